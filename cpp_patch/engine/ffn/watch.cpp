#include "watch.h"

#include "memory.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>

namespace gguf_flash {

namespace {

constexpr std::chrono::milliseconds pause{ 100 };
constexpr int quiet_looks = 30;                                     // before the cache grows again
constexpr uint64_t least_margin = 8 << 20, most_margin = 256 << 20; // bytes

// A look holds locks of the model: a fork meanwhile would leave them locked in the child, for ever.
std::mutex looking;

void let_no_look_cross_a_fork() {
    pthread_atfork([] { looking.lock(); }, [] { looking.unlock(); }, [] { looking.unlock(); });
}

} // namespace

Watcher::Watcher(Model & model) : model_(model), end_(new End()) {
    static std::once_flag once;
    std::call_once(once, let_no_look_cross_a_fork);
    try {
        thread_ = std::make_unique<std::thread>([this] { run(); });
    } catch (const std::system_error &) { // no thread, nothing watched: the budget holds all the same
    }
}

Watcher::~Watcher() {
    if (pid_ != getpid()) {
        thread_.release();
        end_.release();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(end_->mutex);
        end_->asked = true;
    }
    end_->wakes.notify_all();
    if (thread_ != nullptr) {
        thread_->join();
    }
}

void Watcher::run() {
    std::unique_lock<std::mutex> lock(end_->mutex);
    while (!end_->wakes.wait_for(lock, pause, [this] { return end_->asked; })) {
        lock.unlock();
        try {
            look();
        } catch (const std::bad_alloc &) { // all the more reason to look again
        }
        lock.lock();
    }
}

void Watcher::look() {
    std::lock_guard<std::mutex> lock(looking);
    const auto [budget, floor] = model_.budget_and_floor();
    const uint64_t free = available_memory(), spare = budget - std::min(budget, floor);
    const uint64_t margin = std::min(std::max(budget / 16, least_margin), most_margin);
    yielded_ = std::min(yielded_, spare);
    uint64_t wanted = yielded_;
    if (free < margin) {
        quiet_ = 0;
        wanted = std::min(spare, yielded_ + 2 * margin - free);
    } else if (free < 4 * margin || yielded_ == 0) {
        quiet_ = 0;
    } else if (++quiet_ >= quiet_looks) {
        quiet_ = 0;
        wanted = yielded_ - std::min(yielded_, (free - 2 * margin) / 2);
    }
    if (wanted != yielded_ && model_.yield(wanted).ok()) {
        yielded_ = wanted;
    }
}

} // namespace gguf_flash
