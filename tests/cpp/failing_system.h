// A system that refuses memory or files to the engine: its calls of operator new, mmap, open, fread and preadv
// come through failing_system.cpp first.
#pragma once

namespace failing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool can_fail = false; // these calls are the sanitizer's own
#else
constexpr bool can_fail = true;
#endif

// From now on the nth request for memory fails, of any thread, and so does everything after it until
// healthy() if lasting. 0: none.
void memory(int nth, bool lasting = false);
// Opening with O_DIRECT gives EINVAL, as on file systems that have no direct reads.
void direct_opens(bool fail);
// The nth fread gives nothing and an error.
void buffered_reads(int nth, int error);
// Ends all of it; whether anything had failed.
bool healthy();

} // namespace failing
