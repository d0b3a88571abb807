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

// Counts down to the first of some failures.
struct Countdown {
    std::atomic<int> left{ 0 }, failures{ 0 };
    std::atomic<bool> failed{ false };

    void arm(int nth, int n = 1) {
        failures = 0;
        failed = false;
        left = nth;
        failures = nth == 0 ? 0 : n;
    }
    bool fails() {
        if (failures.load() == 0) {
            return false;
        }
        const int after = -(--left); // requests since the first that fails
        if (after < 0 || after >= failures.load()) {
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

void memory(int nth, int failures) {
    requests.arm(nth, failures);
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

#if !defined(__SANITIZE_THREAD__)

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
