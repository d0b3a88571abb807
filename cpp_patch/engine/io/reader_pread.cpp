// A pool of threads, each blocking in preadv: works everywhere, costs a context switch per read.
#include "readers.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

namespace gguf_flash {

namespace {

class PreadReader final : public Reader {
public:
    PreadReader(int depth, std::shared_ptr<FaultPlan> faults) : faults_(std::move(faults)) {
        threads_.reserve(size_t(depth));
        try {
            for (int i = 0; i < depth; ++i) {
                threads_.emplace_back([this] { work(); });
            }
        } catch (const std::exception &) { // no thread, or no memory for one
            if (threads_.empty()) {
                throw; // else fewer threads serve as well
            }
        }
    }
    ~PreadReader() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        queued_cv_.notify_all();
        for (std::thread & t : threads_) {
            t.join();
        }
    }

    const char * name() const override { return "pread"; }

    void submit(ReadOp * op) override { staged_.push_back(op); }

    void flush() override {
        if (staged_.empty()) {
            return;
        }
        const size_t n = staged_.size();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (!staged_.empty()) {
                queued_.push_back(staged_.pop_front());
            }
            outstanding_ += n;
        }
        n > 1 ? queued_cv_.notify_all() : queued_cv_.notify_one();
    }

    size_t poll(ReadOp ** done, size_t max) override {
        flush();
        std::lock_guard<std::mutex> lock(mutex_);
        return take(done, max);
    }

    size_t wait(ReadOp ** done, size_t max) override {
        flush();
        std::unique_lock<std::mutex> lock(mutex_);
        done_cv_.wait(lock, [this] { return !done_.empty() || outstanding_ == 0; });
        return take(done, max);
    }

private:
    size_t take(ReadOp ** done, size_t max) {
        const size_t n = done_.pop(done, max);
        outstanding_ -= n;
        return n;
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            queued_cv_.wait(lock, [this] { return stop_ || !queued_.empty(); });
            if (stop_) {
                return;
            }
            ReadOp * op = queued_.pop_front();
            lock.unlock();
            read(*op);
            lock.lock();
            done_.push_back(op);
            done_cv_.notify_one();
        }
    }

    // What nobody looks at goes to memory of the thread's own: two threads never write to one place.
    static void divert(ReadOp & op) {
        thread_local std::unique_ptr<void, decltype(&std::free)> own(nullptr, &std::free);
        thread_local size_t bytes = 0;
        size_t wanted = 0;
        for (int i = 0; op.trash != nullptr && i < op.n_segments; ++i) {
            wanted = op.segments[i].iov_base == op.trash ? std::max(wanted, op.segments[i].iov_len) : wanted;
        }
        if (wanted > bytes) {
            void * more = nullptr;
            if (posix_memalign(&more, 4096, wanted) != 0) {
                return; // the shared place serves as well
            }
            own.reset(more);
            bytes = wanted;
        }
        for (int i = 0; wanted > 0 && i < op.n_segments; ++i) {
            iovec & segment = op.segments[i];
            segment.iov_base = segment.iov_base == op.trash ? own.get() : segment.iov_base;
        }
    }

    void read(ReadOp & op) {
        divert(op);
        int64_t result;
        do {
            result = preadv(op.file->fd(), op.segments + op.first, op.n_segments - op.first, off_t(op.offset + op.got));
            result = result < 0 ? -errno : result;
            if (faults_) {
                result = faults_->apply(result, op.file->align());
            }
        } while (!settle(op, result));
    }

    std::shared_ptr<FaultPlan> faults_;
    std::vector<std::thread> threads_;
    OpQueue staged_;   // submitted, not yet flushed
    std::mutex mutex_; // guards all below
    std::condition_variable queued_cv_, done_cv_;
    OpQueue queued_, done_;
    size_t outstanding_ = 0; // flushed, not yet taken
    bool stop_ = false;
};

} // namespace

Result<std::unique_ptr<Reader>> make_pread_reader(int depth, std::shared_ptr<FaultPlan> faults) {
    try {
        return std::unique_ptr<Reader>(new PreadReader(depth, std::move(faults)));
    } catch (const std::system_error & e) {
        return Status(Code::io, "cannot start " + std::to_string(depth) + " reading threads: " + e.what() +
                                    "; lower the read depth");
    }
}

} // namespace gguf_flash
