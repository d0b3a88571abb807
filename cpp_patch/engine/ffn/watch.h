// Private to ffn/: gives cache back while the system, or the cgroup, is short of memory.
#pragma once

#include "gguf_flash/model.h"

#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace gguf_flash {

// A thread that looks several times a second at what is free under the machine's memory and under every
// limit (max, high) of the process's cgroups. Below a margin it takes the cache down until twice the margin
// is free; when four times the margin has been free for some seconds, it lets the cache grow by a part.
class Watcher {
public:
    explicit Watcher(Model & model);
    ~Watcher();

private:
    void run();
    void look();

    Model & model_;
    uint64_t yielded_ = 0; // bytes
    int quiet_ = 0;        // looks in a row that found enough free
    const int pid_ = getpid();

    // Shared with the thread, which a fork's child does not have and must not wait for.
    struct End {
        std::mutex mutex;
        std::condition_variable wakes;
        bool asked = false;
    };
    std::unique_ptr<End> end_;
    std::unique_ptr<std::thread> thread_;
};

} // namespace gguf_flash
