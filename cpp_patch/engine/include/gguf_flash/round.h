// Multiples: of alignments, sectors and pages.
#pragma once

#include <cstdint>

namespace gguf_flash {

inline uint64_t round_down(uint64_t n, uint64_t to) {
    return n / to * to;
}

inline uint64_t round_up(uint64_t n, uint64_t to) {
    return round_down(n + to - 1, to);
}

} // namespace gguf_flash
