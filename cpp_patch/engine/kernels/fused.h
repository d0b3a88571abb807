// Private to kernels/: scalar arithmetic with fused multiply-add, element for element what ggml's vector
// code does. Included by one source of each instruction set, built for it: everything here has internal
// linkage, so that no caller gets another's instructions. Inline: not every source needs all of it.
#pragma once

#include "tables.h"

#include <algorithm>
#include <cmath>

namespace gguf_flash {
namespace {

// 2^e as a float, for e in -126..127.
inline float power_of_two(int e) {
    const uint32_t bits = uint32_t(e + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// ggml's exponential (ggml_v_expf, after ARM's optimized routines) for x = n log 2 + b: a polynomial in
// b, times 2^n. Its forms differ in where 1 is added, so in the last bit.
inline float ggml_exp(float x, ExpForm form) {
    const float shift = 0x1.8p23f;
    const float z = std::fma(x, 0x1.715476p+0f, shift), n = z - shift;
    const float b = std::fma(-n, 0x1.7f7d1cp-20f, std::fma(-n, 0x1.62e4p-1f, x)), u = b * b;
    const float head =
        std::fma(std::fma(0x1.0e4020p-7f, b, 0x1.573e2ep-5f), u, std::fma(0x1.555e66p-3f, b, 0x1.fffdb6p-2f));
    if (!(std::fabs(n) <= 192)) { // NaN, too, which is no number of a power
        return std::isnan(n) ? n : n <= 0 ? 0.0f : INFINITY;
    }
    if (form == ExpForm::one_inside) {
        const float j = std::fma(head, u, std::fma(0x1.ffffecp-1f, b, 1.0f));
        return std::fabs(n) > 126 ? std::ldexp(j, int(n)) : j * power_of_two(int(n));
    }
    const float j = std::fma(head, u, 0x1.ffffecp-1f * b);
    if (std::fabs(n) > 126) { // in two steps, of which the second may leave the range of normal numbers
        const int first = n <= 0 ? -125 : 127;
        const float rest = power_of_two(int(n) - first);
        return std::fma(rest, j, rest) * power_of_two(first);
    }
    const float k = power_of_two(int(n));
    return std::fma(j, k, k);
}

// acc[i] = fma(ds[i], the sum of q[r] * rows[r][i] for r < 4, acc[i])
inline void add_lane(const int8_t * const * rows, const int8_t * q, const float * ds, float * acc, size_t first,
                     size_t n) {
    for (size_t i = first; i < n; ++i) {
        const int sum = q[0] * rows[0][i] + q[1] * rows[1][i] + q[2] * rows[2][i] + q[3] * rows[3][i];
        acc[i] = std::fma(ds[i], float(sum), acc[i]);
    }
}

// Goes through the columns in tiles: scale(from, d, ds, count) makes a tile's factors, lane(rows, q, ds,
// acc, count) adds one lane. A lane without activations adds zeros: it is left out.
template <class Scale, class Lane>
void add_tiles(const CodeBlock & block, float * acc, size_t ld, size_t n, Scale scale, Lane lane) {
    alignas(32) float ds[code_tile];
    for (size_t first = 0; first < n; first += code_tile) {
        const size_t count = std::min(code_tile, n - first);
        scale(block.scale + first, block.d, ds, count);
        for (size_t l = 0; l < code_lanes; ++l) {
            const int8_t * q = block.q + l * lane_values;
            const int8_t * rows[lane_values];
            for (size_t r = 0; r < lane_values; ++r) {
                rows[r] = block.rows[l * lane_values + r] + first;
            }
            if ((q[0] | q[1] | q[2] | q[3]) != 0) {
                lane(rows, q, ds, acc + l * ld + first, count);
            }
        }
    }
}

inline float ggml_silu(float v, ExpForm form) {
    return form == ExpForm::libm ? v / (1.0f + std::exp(-v)) : v / (1.0f + ggml_exp(0.0f - v, form));
}

} // namespace
} // namespace gguf_flash
