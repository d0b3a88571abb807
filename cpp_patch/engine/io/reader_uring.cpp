// io_uring through its two system calls: one ring, many reads in flight, no thread.
#include "readers.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace gguf_flash {

namespace {

uint32_t load_acquire(const uint32_t * p) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

void store_release(uint32_t * p, uint32_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

// A mapping of the ring's memory shared with the kernel.
struct Mapping {
    void * address = MAP_FAILED;
    size_t bytes = 0;

    bool map(int fd, size_t n, off_t offset) {
        address = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
        bytes = n;
        return address != MAP_FAILED;
    }
    ~Mapping() {
        if (address != MAP_FAILED) {
            munmap(address, bytes);
        }
    }
    uint32_t * at(uint32_t offset) const { return reinterpret_cast<uint32_t *>(static_cast<char *>(address) + offset); }
};

constexpr size_t largest_buffer = size_t(1) << 30; // that the kernel registers

class UringReader final : public Reader {
public:
    UringReader(int depth, std::shared_ptr<FaultPlan> faults) : depth_(uint32_t(depth)), faults_(std::move(faults)) {}

    ~UringReader() override {
        ReadOp * done[64];
        while (in_flight_ > 0 && wait(done, 64) > 0) { // the kernel still writes into callers' memory
        }
        if (fd_ >= 0) {
            // The kernel takes a closed ring apart later: until then a file system could not be unmounted.
            register_with(IORING_UNREGISTER_FILES);
            register_with(IORING_UNREGISTER_BUFFERS);
            close(fd_);
        }
    }

    // 0, or the errno of the step that failed.
    int open() {
        io_uring_params params;
        std::memset(&params, 0, sizeof(params));
        params.flags = IORING_SETUP_CLAMP;
        fd_ = int(syscall(__NR_io_uring_setup, depth_, &params));
        if (fd_ < 0) {
            return errno;
        }
        const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
        const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        if (!sq_.map(fd_, sq_bytes, IORING_OFF_SQ_RING) || !cq_.map(fd_, cq_bytes, IORING_OFF_CQ_RING) ||
            !sqes_.map(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
            return errno;
        }
        sq_tail_ = sq_.at(params.sq_off.tail);
        sq_mask_ = *sq_.at(params.sq_off.ring_mask);
        sq_array_ = sq_.at(params.sq_off.array);
        cq_head_ = cq_.at(params.cq_off.head);
        cq_tail_ = cq_.at(params.cq_off.tail);
        cq_mask_ = *cq_.at(params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe *>(cq_.at(params.cq_off.cqes));
        depth_ = std::min(depth_, params.sq_entries);
        return 0;
    }

    const char * name() const override { return "io_uring"; }

    // Saves the kernel looking up pages and files for each read: a third of a read's processor time. Where it
    // refuses (RLIMIT_MEMLOCK, old kernels), all works as before.
    void enlist(const std::vector<std::shared_ptr<File>> & files, const std::vector<iovec> & memory) override {
        if (!buffers_.empty()) {
            buffers_.clear();
            syscall(__NR_io_uring_register, fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
        }
        std::vector<int> fds;
        for (const std::shared_ptr<File> & file : files) {
            fds.push_back(file->fd());
        }
        if (files_.empty() && !fds.empty() && register_with(IORING_REGISTER_FILES, fds.data(), fds.size())) {
            files_ = files;
        }
        std::vector<iovec> buffers;          // nobody may take for registered what memory ran out for
        for (const iovec & piece : memory) { // a buffer is at most so long
            for (size_t at = 0; at < piece.iov_len; at += largest_buffer) {
                buffers.push_back(
                    { static_cast<char *>(piece.iov_base) + at, std::min(largest_buffer, piece.iov_len - at) });
            }
        }
        std::sort(buffers.begin(), buffers.end(),
                  [](const iovec & a, const iovec & b) { return a.iov_base < b.iov_base; });
        if (!buffers.empty() && register_with(IORING_REGISTER_BUFFERS, buffers.data(), buffers.size())) {
            buffers_ = std::move(buffers);
        }
    }

    void submit(ReadOp * op) override { waiting_.push_back(op); }

    void flush() override { enter(0); }

    size_t poll(ReadOp ** done, size_t max) override {
        const size_t n = reap(done, max);
        enter(0);
        return n;
    }

    size_t wait(ReadOp ** done, size_t max) override {
        size_t n = 0;
        while (n == 0) {
            enter(0);
            n = reap(done, max);
            if (n == 0 && in_flight_ == 0 && waiting_.empty() && refused_.empty()) {
                return 0;
            }
            if (n == 0) {
                enter(1);
                n = reap(done, max);
            }
        }
        enter(0);
        return n;
    }

private:
    // Moves waiting operations into the ring and tells the kernel; blocks for min_complete results.
    void enter(uint32_t min_complete) {
        uint32_t tail = *sq_tail_;
        while (in_flight_ < depth_ && !waiting_.empty()) {
            prepare(tail++, waiting_.pop_front());
            ++in_flight_;
            ++unsubmitted_;
        }
        store_release(sq_tail_, tail);
        if (unsubmitted_ == 0 && min_complete == 0) {
            return;
        }
        const long n = syscall(__NR_io_uring_enter, fd_, unsubmitted_, min_complete,
                               min_complete > 0 ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
        if (n > 0) {
            unsubmitted_ -= uint32_t(n);
        } else if (n < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            give_up(errno);
        } // else the entries stay in the ring and go with the next call
    }

    // The kernel takes no more reads: those it has not seen fail, the others still complete.
    void give_up(int error) {
        uint32_t tail = *sq_tail_;
        for (; unsubmitted_ > 0; --unsubmitted_, --in_flight_) {
            const io_uring_sqe & sqe = static_cast<io_uring_sqe *>(sqes_.address)[--tail & sq_mask_];
            waiting_.push_front(reinterpret_cast<ReadOp *>(sqe.user_data));
        }
        store_release(sq_tail_, tail);
        while (!waiting_.empty()) {
            ReadOp * op = waiting_.pop_front();
            op->error = error;
            refused_.push_back(op);
        }
    }

    bool register_with(unsigned what, const void * list = nullptr, size_t n = 0) const {
        return syscall(__NR_io_uring_register, fd_, what, list, unsigned(n)) == 0;
    }

    void prepare(uint32_t tail, ReadOp * op) {
        const uint32_t index = tail & sq_mask_;
        io_uring_sqe & sqe = static_cast<io_uring_sqe *>(sqes_.address)[index];
        std::memset(&sqe, 0, sizeof(sqe));
        const iovec & first = op->segments[op->first];
        const int buffer = op->first + 1 == op->n_segments ? buffer_of(first) : -1;
        if (buffer >= 0) {
            sqe.opcode = IORING_OP_READ_FIXED;
            sqe.addr = reinterpret_cast<uint64_t>(first.iov_base);
            sqe.len = uint32_t(first.iov_len);
            sqe.buf_index = uint16_t(buffer);
        } else {
            sqe.opcode = IORING_OP_READV;
            sqe.addr = reinterpret_cast<uint64_t>(op->segments + op->first);
            sqe.len = uint32_t(op->n_segments - op->first);
        }
        set_file(sqe, *op->file);
        sqe.off = op->offset + op->got;
        sqe.user_data = reinterpret_cast<uint64_t>(op);
        sq_array_[index] = index;
    }

    void set_file(io_uring_sqe & sqe, const File & file) const {
        sqe.fd = file.fd();
        for (size_t i = 0; i < files_.size(); ++i) {
            if (files_[i].get() == &file) {
                sqe.fd = int(i);
                sqe.flags |= IOSQE_FIXED_FILE;
            }
        }
    }

    // The registered buffer that a segment lies in, or -1.
    int buffer_of(const iovec & segment) const {
        const char * begin = static_cast<const char *>(segment.iov_base);
        auto after = std::upper_bound(buffers_.begin(), buffers_.end(), begin, [](const char * at, const iovec & b) {
            return at < static_cast<const char *>(b.iov_base);
        });
        if (after == buffers_.begin()) {
            return -1;
        }
        const iovec & buffer = *--after;
        const char * end = static_cast<const char *>(buffer.iov_base) + buffer.iov_len;
        return begin + segment.iov_len <= end ? int(after - buffers_.begin()) : -1;
    }

    size_t reap(ReadOp ** done, size_t max) {
        size_t n = refused_.pop(done, max);
        uint32_t head = *cq_head_;
        while (n < max && head != load_acquire(cq_tail_)) {
            const io_uring_cqe & cqe = cqes_[head & cq_mask_];
            ReadOp * op = reinterpret_cast<ReadOp *>(cqe.user_data);
            int64_t result = cqe.res;
            if (faults_) {
                result = faults_->apply(result, op->file->align());
            }
            store_release(cq_head_, ++head); // taken, whatever happens to it below
            --in_flight_;
            if (settle(*op, result)) {
                done[n++] = op;
            } else {
                waiting_.push_front(op);
            }
        }
        return n;
    }

    uint32_t depth_;
    std::shared_ptr<FaultPlan> faults_;
    int fd_ = -1;
    Mapping sq_, cq_, sqes_;
    uint32_t * sq_tail_ = nullptr;
    uint32_t * sq_array_ = nullptr;
    uint32_t * cq_head_ = nullptr;
    uint32_t * cq_tail_ = nullptr;
    io_uring_cqe * cqes_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    uint32_t in_flight_ = 0;                   // in the ring or with the kernel
    uint32_t unsubmitted_ = 0;                 // of these, not yet seen by the kernel
    std::vector<std::shared_ptr<File>> files_; // registered, by index
    std::vector<iovec> buffers_;               // registered, by index, ascending
    OpQueue waiting_, refused_;                // not yet in the ring; failed before the kernel saw them
};

} // namespace

Result<std::unique_ptr<Reader>> make_uring_reader(int depth, std::shared_ptr<FaultPlan> faults) {
    std::unique_ptr<UringReader> reader(new UringReader(depth, std::move(faults)));
    const int error = reader->open();
    if (error != 0) {
        return Status(Code::io,
                      std::string("io_uring is not available: ") + std::strerror(error) + "; use the reader 'pread'");
    }
    return std::unique_ptr<Reader>(std::move(reader));
}

} // namespace gguf_flash

#else

namespace gguf_flash {

Result<std::unique_ptr<Reader>> make_uring_reader(int, std::shared_ptr<FaultPlan>) {
    return Status(Code::io, "io_uring is not available: it needs Linux; use the reader 'pread'");
}

} // namespace gguf_flash

#endif
