// Private to ffn/: keeps a ring of reads full while everybody computes.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace gguf_flash {

// A thread that calls feed again and again, with a pause between, for as long as it returns true, and then
// sleeps until it is woken. feed may take locks that nobody keeps while it waits for this thread.
class Feeder {
public:
    explicit Feeder(std::function<bool()> feed);
    ~Feeder(); // feed is not running any more

    void wake();

private:
    void run();

    const std::function<bool()> feed_;
    const int pid_ = getpid();

    // Shared with the thread, which a fork's child does not have and must not wait for.
    struct Bed {
        std::mutex mutex;
        std::condition_variable wakes;
        bool ends = false, awake = false, sleeps = false;
    };
    std::unique_ptr<Bed> bed_;
    std::unique_ptr<std::thread> thread_;
};

} // namespace gguf_flash
