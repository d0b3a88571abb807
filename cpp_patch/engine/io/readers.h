// Private to io/: the two readers and what they share.
#pragma once

#include "gguf_flash/reader.h"

namespace gguf_flash {

// Books one result of the operating system (bytes or negative errno); true when op is finished,
// false when the rest of it must be read again.
bool settle(ReadOp & op, int64_t result);

Result<std::unique_ptr<Reader>> make_uring_reader(int depth, std::shared_ptr<FaultPlan> faults);
Result<std::unique_ptr<Reader>> make_pread_reader(int depth, std::shared_ptr<FaultPlan> faults);

// Why there is no io_uring reader.
Status no_uring(int error);

// inner, whose results are held back until n are there or none is under way, and then come last first.
std::unique_ptr<Reader> reordering(std::unique_ptr<Reader> inner, size_t n);

} // namespace gguf_flash
