// Private to io/: the two readers and what they share.
#pragma once

#include "gguf_flash/reader.h"

namespace gguf_flash {

// Books one result of the operating system (bytes or negative errno); true when op is finished,
// false when the rest of it must be read again.
bool settle(ReadOp & op, int64_t result);

Result<std::unique_ptr<Reader>> make_uring_reader(int depth, std::shared_ptr<FaultPlan> faults);
Result<std::unique_ptr<Reader>> make_pread_reader(int depth, std::shared_ptr<FaultPlan> faults);

// Operations in a row, linked through themselves: a reader needs no memory to take, move or give back one.
class OpQueue {
public:
    bool empty() const { return first_ == nullptr; }
    size_t size() const { return size_; }
    void push_back(ReadOp * op) {
        op->next = nullptr;
        (last_ == nullptr ? first_ : last_->next) = op;
        last_ = op;
        ++size_;
    }
    void push_front(ReadOp * op) {
        op->next = first_;
        first_ = op;
        last_ = last_ == nullptr ? op : last_;
        ++size_;
    }
    ReadOp * pop_front() {
        ReadOp * op = first_;
        first_ = op->next;
        last_ = first_ == nullptr ? nullptr : last_;
        --size_;
        return op;
    }
    size_t pop(ReadOp ** to, size_t max) {
        size_t n = 0;
        for (; n < max && !empty(); ++n) {
            to[n] = pop_front();
        }
        return n;
    }

private:
    ReadOp *first_ = nullptr, *last_ = nullptr;
    size_t size_ = 0;
};

// Why there is no io_uring reader.
Status no_uring(int error);

// inner, whose results are held back until n are there or none is under way, and then come last first.
std::unique_ptr<Reader> reordering(std::unique_ptr<Reader> inner, size_t n);

} // namespace gguf_flash
