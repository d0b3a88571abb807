// What the readers share: progress of one operation, injected faults, choice of a reader.
#include "gguf_flash/round.h"
#include "readers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

namespace gguf_flash {

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
    if (result == -EINTR || result == -EAGAIN) {
        return false;
    }
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
    if (op.got % op.file->align() != 0) {
        op.error = ENODATA;
        return true;
    }
    return false;
}

Result<std::shared_ptr<FaultPlan>> FaultPlan::parse(const std::string & text) {
    auto plan = std::make_shared<FaultPlan>();
    std::stringstream items(text);
    std::string item;
    while (std::getline(items, item, ',')) {
        const size_t colon = item.find(':');
        char * end = nullptr;
        const uint64_t n = colon == std::string::npos ? 0 : std::strtoull(item.c_str() + colon + 1, &end, 10);
        const std::string name = item.substr(0, colon);
        uint64_t * field = name == "eio"   ? &plan->eio_
                         : name == "short" ? &plan->short_
                         : name == "again" ? &plan->again_
                         : name == "delay" ? &plan->delay_us_
                                           : nullptr;
        if (field == nullptr || n == 0 || *end != 0 || (name == "again" && n < 2)) { // again:1 would never end
            return Status(Code::argument, "cannot use fault plan '" + text +
                                              "': items eio:N, short:N, again:N or "
                                              "delay:MICROSECONDS expected, found '" +
                                              item + "'");
        }
        *field = n;
    }
    return plan;
}

int64_t FaultPlan::apply(int64_t result, uint64_t align) {
    static std::mutex mutex; // readers of several contexts share a plan
    uint64_t count;
    {
        std::lock_guard<std::mutex> lock(mutex);
        count = ++count_;
    }
    if (delay_us_ != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us_));
    }
    if (eio_ != 0 && count == eio_) {
        return -EIO;
    }
    if (again_ != 0 && count % again_ == 0) {
        return -EAGAIN;
    }
    if (short_ != 0 && count % short_ == 0 && result > int64_t(align)) {
        return int64_t(std::max(round_down(uint64_t(result) / 2, align), align));
    }
    return result;
}

std::string read_error(int error) {
    return error == ENODATA ? "the file ends before it; it was truncated or replaced, restore it"
                            : std::strerror(error);
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

Result<std::unique_ptr<Reader>> make_reader(ReaderKind kind, int depth, std::shared_ptr<FaultPlan> faults) {
    if (depth < 1 || depth > 4096) {
        return Status(Code::argument, "a read depth from 1 to 4096 expected, found " + std::to_string(depth));
    }
    if (kind != ReaderKind::pread) {
        Result<std::unique_ptr<Reader>> uring = make_uring_reader(depth, faults);
        if (uring.ok() || kind == ReaderKind::io_uring) {
            return uring;
        }
    }
    return make_pread_reader(depth, faults);
}

std::string io_uring_problem() {
    Result<std::unique_ptr<Reader>> uring = make_uring_reader(1, nullptr);
    return uring.ok() ? "" : uring.status().message();
}

} // namespace gguf_flash
