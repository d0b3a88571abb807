#include "memory.h"

#include "gguf_flash/round.h"
#include "layer_state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <sstream>
#include <string>

namespace gguf_flash {

namespace {

constexpr uint64_t unlimited = UINT64_MAX;
constexpr uint64_t huge_page = 2 << 20; // bytes

uint64_t number_in(const std::string & path) {
    std::ifstream in(path);
    uint64_t n = 0;
    return in >> n ? n : unlimited; // absent, or "max"
}

uint64_t meminfo_available() {
    std::ifstream in("/proc/meminfo");
    std::string name, unit;
    uint64_t kib = 0;
    while (in >> name >> kib) {
        if (name == "MemAvailable:") {
            return kib * 1024;
        }
        std::getline(in, unit);
    }
    return unlimited;
}

// Bytes of files that a cgroup's usage includes and that the kernel gives up when asked for memory.
// prefix is "total_" in version 1, where plain names leave out the groups below.
uint64_t file_cache_of(const std::string & folder, const std::string & prefix) {
    std::ifstream in(folder + "/memory.stat");
    std::string name;
    uint64_t n = 0, sum = 0;
    while (in >> name >> n) {
        sum += name == prefix + "inactive_file" || name == prefix + "active_file" ? n : 0;
    }
    return sum;
}

// Free bytes under the limit of one cgroup folder and of all above it.
uint64_t cgroup_available(const std::string & root, std::string path, const char * limit, const char * soft,
                          const char * usage, const char * stat_prefix) {
    uint64_t least = unlimited;
    for (;;) {
        const std::string folder = root + path;
        const uint64_t high = number_in(folder + "/" + soft); // from where on the kernel slows us down
        const uint64_t max = std::min(high, number_in(folder + "/" + limit));
        uint64_t now = number_in(folder + "/" + usage);
        if (max != unlimited && now != unlimited) {
            now -= std::min(now, file_cache_of(folder, stat_prefix));
            least = std::min(least, max > now ? max - now : 0);
        }
        if (path.empty() || path == "/") {
            return least;
        }
        path.resize(path.find_last_of('/'));
    }
}

} // namespace

uint64_t available_memory() {
    uint64_t least = meminfo_available();
    std::ifstream in("/proc/self/cgroup"); // "4:memory:/path" for version 1, "0::/path" for version 2
    std::string line;
    while (std::getline(in, line)) {
        const size_t a = line.find(':'), b = line.find(':', a + 1);
        if (b == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(a + 1, b - a - 1) + ",", path = line.substr(b + 1);
        if (controllers == ",,") {
            least = std::min(
                least, cgroup_available("/sys/fs/cgroup", path, "memory.max", "memory.high", "memory.current", ""));
        } else if (controllers.find(",memory,") != std::string::npos) {
            least = std::min(least, cgroup_available("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "",
                                                     "memory.usage_in_bytes", "total_"));
        }
    }
    return least;
}

std::string mib(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f MiB", double(bytes) / (1024 * 1024));
    return text;
}

bool Pages::allocate(size_t bytes) {
    return reserve(bytes) && resize(bytes);
}

bool Pages::reserve(size_t most) {
    release();
    void * p = most == 0 ? nullptr : mmap(nullptr, most, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        return false;
    }
#ifdef MADV_WIPEONFORK
    // Pages that are pinned for direct reads are copied by a fork, all at once: a child begins with empty ones.
    // A kernel that refuses copies, and the child is none the wiser.
    madvise(p, most, MADV_WIPEONFORK);
#endif
    data_ = static_cast<uint8_t *>(p);
    reserved_ = most;
    return true;
}

bool Pages::resize(size_t bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const size_t now = round_up(bytes_, page), next = round_up(bytes, page);
    if (next > now) {
        if (mprotect(data_ + now, next - now, PROT_READ | PROT_WRITE) != 0) {
            return false;
        }
#ifdef MADV_HUGEPAGE
        // Fewer entries for the processor to look up, and fewer pages to pin for a direct read. Huge pages
        // only lie whole inside what is in use, so the budget holds; a refusal changes nothing.
        madvise(data_ + now, next - now, MADV_HUGEPAGE);
#endif
    } else if (next < now) {
        give_back(next, now);
    }
    bytes_ = bytes;
    return true;
}

// The system keeps a huge page whole while any of it is in use: what stays of the one that is cut is put
// into small ones. Without memory to do so, it is given back when the rest is.
void Pages::give_back(size_t from, size_t end) {
    const uint64_t address = reinterpret_cast<uint64_t>(data_);
    const size_t cut = size_t(std::max(round_down(address + from, huge_page), address) - address);
    std::unique_ptr<uint8_t[]> kept(new (std::nothrow) uint8_t[from - cut]);
    if (kept != nullptr) {
        std::memcpy(kept.get(), data_ + cut, from - cut);
    }
    const size_t first = kept != nullptr ? cut : from;
    madvise(data_ + first, end - first, MADV_DONTNEED);
    mprotect(data_ + from, end - from, PROT_NONE);
    if (kept != nullptr) {
        std::memcpy(data_ + cut, kept.get(), from - cut);
    }
}

void Pages::release() {
    if (data_ != nullptr) {
        munmap(data_, reserved_);
    }
    data_ = nullptr;
    bytes_ = reserved_ = 0;
}

} // namespace gguf_flash
