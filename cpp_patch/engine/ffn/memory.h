// Private to ffn/: how much memory this process may use.
#pragma once

#include <cstdint>

namespace gguf_flash {

// Bytes still free under the machine's memory and the process's cgroup limit (v1 or v2), the smaller.
uint64_t available_memory();

} // namespace gguf_flash
