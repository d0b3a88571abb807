// The thread that keeps a ring of reads full.
#include "../../cpp_patch/engine/ffn/feeder.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>

using namespace gguf_flash;

namespace {

// Waits, for seconds at most, until count has reached n.
bool reaches(const std::atomic<int> & count, int n) {
    for (int i = 0; i < 5000 && count < n; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return count >= n;
}

} // namespace

TEST_CASE("feeder: feeds while there is more, sleeps, and no wake is lost") {
    std::atomic<int> left{ 0 }, fed{ 0 };
    Feeder feeder([&] {
        const bool more = --left > 0;
        ++fed; // last: the test goes on when it sees it
        return more;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(fed == 0); // nobody has woken it
    for (int round = 1; round <= 20; ++round) {
        left = 5;
        feeder.wake();
        REQUIRE(reaches(fed, 5 * round));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(fed == 100);
}

TEST_CASE("feeder: ends while it feeds, while it sleeps and while it pauses") {
    for (int i = 0; i < 200; ++i) {
        std::atomic<int> fed{ 0 };
        const bool more = i % 2 == 0;
        {
            Feeder feeder([&] {
                ++fed;
                return more;
            });
            if (i % 3 != 0) {
                feeder.wake();
            }
            if (i % 5 == 0 && i % 3 != 0) {
                CHECK(reaches(fed, 1));
            }
        }
        const int then = fed;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        CHECK(fed == then);
    }
}
