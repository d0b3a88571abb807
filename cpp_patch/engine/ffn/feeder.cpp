#include "feeder.h"

#include <pthread.h>

#include <chrono>
#include <system_error>
#include <utility>

namespace gguf_flash {

namespace {

// A disk takes longer for what a ring holds.
constexpr std::chrono::microseconds pause{ 500 };

// feed holds locks: a fork meanwhile would leave them locked in the child, for ever.
std::mutex feeding;

void let_no_feed_cross_a_fork() {
    pthread_atfork([] { feeding.lock(); }, [] { feeding.unlock(); }, [] { feeding.unlock(); });
}

} // namespace

Feeder::Feeder(std::function<bool()> feed) : feed_(std::move(feed)), bed_(new Bed()) {
    static std::once_flag once;
    std::call_once(once, let_no_feed_cross_a_fork);
    try {
        thread_ = std::make_unique<std::thread>([this] { run(); });
    } catch (const std::system_error &) { // no thread: the ring runs empty while others compute, that is all
    }
}

Feeder::~Feeder() {
    if (pid_ != getpid()) {
        thread_.release();
        bed_.release();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(bed_->mutex);
        bed_->ends = true;
    }
    bed_->wakes.notify_all();
    if (thread_ != nullptr) {
        thread_->join();
    }
}

void Feeder::wake() {
    if (pid_ != getpid()) {
        return;
    }
    std::lock_guard<std::mutex> lock(bed_->mutex);
    bed_->awake = true;
    if (bed_->sleeps) {
        bed_->wakes.notify_all();
    }
}

void Feeder::run() {
    std::unique_lock<std::mutex> lock(bed_->mutex);
    while (!bed_->ends) {
        bed_->sleeps = true;
        bed_->wakes.wait(lock, [this] { return bed_->ends || bed_->awake; });
        bed_->sleeps = bed_->awake = false;
        lock.unlock();
        bool more;
        {
            std::lock_guard<std::mutex> guard(feeding);
            more = feed_();
        }
        lock.lock();
        if (more) {
            bed_->wakes.wait_for(lock, pause, [this] { return bed_->ends; });
            bed_->awake = true;
        }
    }
}

} // namespace gguf_flash
