// A fork of a process that has run a model.
#include "flash_model.h"

#include <dlfcn.h>
#include <pthread.h>

namespace {

// OpenMP's threads are not copied into the child, which would wait for them for ever at its first
// graph. Ended before the fork, they are started again where they are needed, on both sides. Only
// GNU's runtime needs it; the function belongs to OpenMP 5.0, and is not there in a build without.
void end_openmp_threads() {
    using pause_fn = int (*)(int);
    constexpr int pause_hard = 2;
    static const auto pause = reinterpret_cast<pause_fn>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
    if (pause != nullptr) {
        pause(pause_hard); // refused, and harmless, inside a parallel region
    }
}

} // namespace

void make_forks_safe() {
    static const int registered = pthread_atfork(end_openmp_threads, nullptr, nullptr);
    (void)registered;
}
