#include "failing_system.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace failing {

namespace {

// Counts down to a failure; negative: all that follow fail too.
struct Countdown {
    std::atomic<int> left{ 0 };
    std::atomic<bool> lasting{ false }, failed{ false };

    void arm(int nth, bool last = false) {
        lasting = last;
        failed = false;
        left = nth;
    }
    bool fails() {
        if (failed.load() && lasting.load()) {
            return true;
        }
        if (left.load() == 0 || --left != 0) {
            return false;
        }
        failed = true;
        return true;
    }
};

Countdown requests, freads;
std::atomic<bool> refuse_direct{ false }, refused_direct{ false };
std::atomic<int> fread_error{ 0 };

} // namespace

void memory(int nth, bool lasting) {
    requests.arm(nth, lasting);
}

void direct_opens(bool fail) {
    refused_direct = false;
    refuse_direct = fail;
}

void buffered_reads(int nth, int error) {
    fread_error = error;
    freads.arm(nth);
}

bool healthy() {
    const bool any = requests.failed || freads.failed || refused_direct;
    memory(0);
    direct_opens(false);
    buffered_reads(0, 0);
    return any;
}

} // namespace failing

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

void * operator new(size_t n) {
    void * p = failing::requests.fails() ? nullptr : std::malloc(n == 0 ? 1 : n);
    if (p == nullptr) {
        throw std::bad_alloc();
    }
    return p;
}

void operator delete(void * p) noexcept {
    std::free(p);
}

void operator delete(void * p, size_t) noexcept {
    std::free(p);
}

extern "C" {

void * mmap(void * address, size_t n, int protection, int flags, int fd, off_t offset) noexcept {
    if (failing::requests.fails()) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return reinterpret_cast<void *>(syscall(SYS_mmap, address, n, protection, flags, fd, offset));
}

int open(const char * path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const int mode = (flags & O_CREAT) != 0 ? va_arg(rest, int) : 0;
    va_end(rest);
    if (failing::refuse_direct && (flags & O_DIRECT) != 0) {
        failing::refused_direct = true;
        errno = EINVAL;
        return -1;
    }
    return int(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

size_t fread(void * to, size_t size, size_t n, FILE * file) {
    static const auto real = reinterpret_cast<size_t (*)(void *, size_t, size_t, FILE *)>(dlsym(RTLD_NEXT, "fread"));
    if (failing::freads.fails()) {
        file->_flags |= 0x20; // what ferror() looks at in glibc
        errno = failing::fread_error;
        return 0;
    }
    return real(to, size, n, file);
}
}

#endif
