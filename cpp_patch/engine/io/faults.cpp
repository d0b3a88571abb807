// Injected faults: what a disk, a driver or a sandbox may do to reads, made to happen.
#include "gguf_flash/round.h"
#include "readers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sstream>
#include <thread>
#include <vector>

namespace gguf_flash {

namespace {

constexpr std::chrono::seconds stall_time(3);

// A number of digits alone, at least 1.
bool parse_count(const std::string & text, uint64_t & to) {
    if (text.empty() || text.size() > 18 || text.find_first_not_of("0123456789") != std::string::npos) {
        return false;
    }
    to = std::stoull(text);
    return to > 0;
}

class ReorderingReader final : public Reader {
public:
    ReorderingReader(std::unique_ptr<Reader> inner, size_t n) : inner_(std::move(inner)), n_(n) {}

    const char * name() const override { return inner_->name(); }

    void submit(ReadOp * op) override {
        held_.reserve(++pending_);
        inner_->submit(op);
    }

    void flush() override { inner_->flush(); }

    size_t poll(ReadOp ** done, size_t max) override {
        hold(inner_->poll(batch_, batch));
        return held_.size() < std::min(n_, pending_) ? 0 : take(done, max);
    }

    size_t wait(ReadOp ** done, size_t max) override {
        while (held_.size() < std::min(n_, pending_)) {
            hold(inner_->wait(batch_, batch));
        }
        return take(done, max);
    }

private:
    void hold(size_t n) { held_.insert(held_.end(), batch_, batch_ + n); }

    size_t take(ReadOp ** done, size_t max) {
        size_t n = 0;
        for (; n < max && !held_.empty(); held_.pop_back(), --pending_) {
            done[n++] = held_.back();
        }
        return n;
    }

    static constexpr size_t batch = 16;
    std::unique_ptr<Reader> inner_;
    const size_t n_;
    ReadOp * batch_[batch];
    std::vector<ReadOp *> held_; // done, not yet taken
    size_t pending_ = 0;         // submitted, not yet taken
};

} // namespace

std::unique_ptr<Reader> reordering(std::unique_ptr<Reader> inner, size_t n) {
    return std::unique_ptr<Reader>(new ReorderingReader(std::move(inner), n));
}

Result<std::shared_ptr<FaultPlan>> FaultPlan::parse(const std::string & text) {
    auto plan = std::make_shared<FaultPlan>();
    std::stringstream items(text);
    std::string item;
    while (std::getline(items, item, ',')) {
        const size_t colon = item.find(':');
        if (colon == std::string::npos || !plan->set(item.substr(0, colon), item.substr(colon + 1))) {
            return Status(Code::argument, "cannot use fault plan '" + text +
                                              "': items eio:N, einval:N, vanish:N[-M], short:N, again:N, "
                                              "delay:MICROSECONDS, stall:N, reorder:N or uring:EPERM|ENOSYS expected, "
                                              "found '" +
                                              item + "'");
        }
    }
    return plan;
}

bool FaultPlan::set(const std::string & name, const std::string & value) {
    if (name == "uring") {
        uring_error_ = value == "EPERM" ? EPERM : value == "ENOSYS" ? ENOSYS : 0;
        return uring_error_ != 0;
    }
    if (name == "vanish") {
        const size_t dash = value.find('-');
        const bool returns = dash != std::string::npos;
        return parse_count(value.substr(0, dash), vanish_) &&
               (!returns || (parse_count(value.substr(dash + 1), back_) && back_ >= vanish_));
    }
    return set_number(name, value);
}

bool FaultPlan::set_number(const std::string & name, const std::string & value) {
    uint64_t * field = name == "eio"     ? &eio_
                     : name == "einval"  ? &einval_
                     : name == "short"   ? &short_
                     : name == "again"   ? &again_
                     : name == "delay"   ? &delay_us_
                     : name == "stall"   ? &stall_
                     : name == "reorder" ? &reorder_
                                         : nullptr;
    return field != nullptr && parse_count(value, *field);
}

int64_t FaultPlan::apply(int64_t result, uint64_t align) {
    const uint64_t count = ++count_;
    if (delay_us_ != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us_));
    }
    if (count == stall_) {
        std::this_thread::sleep_for(stall_time);
    }
    if (vanish_ != 0 && count >= vanish_ && count <= back_) {
        return -ENODEV;
    }
    if (count == eio_ || count == einval_) {
        return count == eio_ ? -EIO : -EINVAL;
    }
    if (again_ != 0 && count % again_ == 0) {
        return -EAGAIN;
    }
    if (short_ != 0 && count % short_ == 0 && result > int64_t(align)) {
        return int64_t(std::max(round_down(uint64_t(result) / 2, align), align));
    }
    return result;
}

} // namespace gguf_flash
