// A system that refuses memory or files to the engine: its calls of operator new, mmap, open, fread and preadv
// come through failing_system.cpp first.
#pragma once

namespace failing {

#if defined(__SANITIZE_THREAD__)
constexpr bool can_fail = false; // its runtime must see every allocation; the address sanitizer sees malloc
#else
constexpr bool can_fail = true;
#endif

constexpr int for_good = 1 << 30;

// From now on the nth request for memory fails, of any thread, and so many in all, until healthy(). 0: none.
void memory(int nth, int failures = 1);
// Opening with O_DIRECT gives EINVAL, as on file systems that have no direct reads.
void direct_opens(bool fail);
// The nth fread gives nothing and an error.
void buffered_reads(int nth, int error);
// Ends all of it; whether anything had failed.
bool healthy();

} // namespace failing
