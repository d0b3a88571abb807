// What the readers share: progress of one operation, choice of a reader, what an error means.
#include "readers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace gguf_flash {

namespace {

using Clock = std::chrono::steady_clock;

// A device that is never ready must end in an error.
constexpr std::chrono::seconds patience(1);
constexpr int hasty = 16; // attempts before each further one waits a moment

bool still_patient(ReadOp & op) {
    op.fruitless += 1;
    if (op.fruitless == 1) {
        op.unready = Clock::now();
    } else if (op.fruitless > hasty) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        return Clock::now() - op.unready < patience;
    }
    return true;
}

// Whether a read that gave nothing is to be begun again.
bool begins_again(ReadOp & op, int64_t result) {
    if (result == -EAGAIN) {
        return still_patient(op);
    }
    if (result == -EINVAL && !op.refused && op.file->align() > 1) {
        op.refused = true;
        op.file->read_buffered();
        return true;
    }
    return result == -EINTR;
}

} // namespace

bool advance(ReadOp & op, uint64_t n) {
    op.got += n;
    while (n > 0 && op.first < op.n_segments) {
        iovec & segment = op.segments[op.first];
        const size_t take = std::min<size_t>(n, segment.iov_len);
        segment.iov_base = static_cast<char *>(segment.iov_base) + take;
        segment.iov_len -= take;
        n -= take;
        op.first += segment.iov_len == 0;
    }
    return op.got >= op.needed;
}

bool settle(ReadOp & op, int64_t result) {
    if (begins_again(op, result)) {
        return false;
    }
    op.fruitless = 0;
    if (result < 0) {
        op.error = int(-result);
        return true;
    }
    if (result == 0) {
        op.error = ENODATA;
        return true;
    }
    if (advance(op, uint64_t(result))) {
        return true;
    }
    // A direct read that stops inside a block stopped at the end of the file.
    if (op.file->direct() && op.got % op.file->align() != 0) {
        op.error = ENODATA;
        return true;
    }
    return false;
}

std::string read_error(int error) {
    const char * advice = "check the disk, then try again";
    switch (error) {
        case ENODATA: return "the file ends before it; it was truncated or replaced, restore it";
        case EIO:
            advice = "the disk or its connection failed, see the kernel's log (dmesg); try again, or copy the file to "
                     "another disk";
            break;
        case ENODEV:
        case ENXIO:
        case ESTALE:
            advice = "the disk that holds it is gone; connect it, then try again or load the model again";
            break;
        case EAGAIN: advice = "the disk is never ready; try again when it is less busy"; break;
        case ENOMEM: advice = "the system has no memory for reads; close programs or set a smaller ram"; break;
        case EPERM:
        case EACCES:
        case ENOSYS: advice = "a sandbox forbids this way of reading; load the model again with reader 'pread'"; break;
        default: break;
    }
    return std::string(std::strerror(error)) + "; " + advice;
}

Result<ReaderKind> parse_reader(const std::string & name) {
    if (name == "auto" || name.empty()) {
        return ReaderKind::automatic;
    }
    if (name == "io_uring") {
        return ReaderKind::io_uring;
    }
    if (name == "pread") {
        return ReaderKind::pread;
    }
    return Status(Code::argument, "unknown reader '" + name + "'; use auto, io_uring or pread");
}

static Result<std::unique_ptr<Reader>> make_plain_reader(ReaderKind kind, Depth depth,
                                                         const std::shared_ptr<FaultPlan> & faults) {
    if (kind == ReaderKind::pread) {
        return make_pread_reader(depth.pool, faults);
    }
    const int denied = faults ? faults->uring_error() : 0;
    Result<std::unique_ptr<Reader>> uring = denied != 0 ? no_uring(denied) : make_uring_reader(depth.ring, faults);
    return uring.ok() || kind == ReaderKind::io_uring ? std::move(uring) : make_pread_reader(depth.pool, faults);
}

Result<std::unique_ptr<Reader>> make_reader(ReaderKind kind, Depth depth, std::shared_ptr<FaultPlan> faults) {
    for (int n : { depth.ring, depth.pool }) {
        if (n < 1 || n > 4096) {
            return Status(Code::argument, "a read depth from 1 to 4096 expected, found " + std::to_string(n));
        }
    }
    Result<std::unique_ptr<Reader>> reader = make_plain_reader(kind, depth, faults);
    if (reader.ok() && faults && faults->reorder() > 1) {
        return reordering(std::move(reader.value()), faults->reorder());
    }
    return reader;
}

Status no_uring(int error) {
    return { Code::io, std::string("io_uring is not available: ") + std::strerror(error) + "; use the reader 'pread'" };
}

std::string io_uring_problem() {
    Result<std::unique_ptr<Reader>> uring = make_uring_reader(1, nullptr);
    return uring.ok() ? "" : uring.status().message();
}

} // namespace gguf_flash
