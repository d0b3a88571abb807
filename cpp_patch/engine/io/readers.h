// Private to io/: the two readers and what they share.
#pragma once

#include "gguf_flash/reader.h"

#include <mutex>

namespace gguf_flash {

// Books one result of the operating system (bytes or negative errno); true when op is finished,
// false when the rest of it must be read again.
bool settle(ReadOp & op, int64_t result);

Result<std::unique_ptr<Reader>> make_uring_reader(int depth, std::shared_ptr<FaultPlan> faults);
Result<std::unique_ptr<Reader>> make_pread_reader(int depth, std::shared_ptr<FaultPlan> faults);

} // namespace gguf_flash
