// Private to ffn/: how much memory this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace gguf_flash {

// Bytes still free under the machine's memory and the process's cgroup limit (v1 or v2), the smaller.
uint64_t available_memory();

// For people: "1.5 MiB".
std::string mib(uint64_t bytes);

} // namespace gguf_flash
