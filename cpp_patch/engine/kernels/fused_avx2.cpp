// AVX2 and FMA twin of fused.cpp. Compiled with those flags, called only after cpu_has_avx2().
#include "fused.h"

#include <immintrin.h>

namespace gguf_flash {

namespace {

constexpr size_t step = 16; // columns

__m256i sixteen(const int8_t * row) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row)));
}

void add_eight(__m256i sum, const float * ds, float * acc) {
    const __m256 wide = _mm256_cvtepi32_ps(sum);
    _mm256_storeu_ps(acc, _mm256_fmadd_ps(_mm256_loadu_ps(ds), wide, _mm256_loadu_ps(acc)));
}

// Two products of signed bytes, one factor being more than -128, fit 16 bits; four need 32.
void add_lane_avx2(const int8_t * const * rows, const int8_t * q, const float * ds, float * acc, size_t n) {
    const __m256i q0 = _mm256_set1_epi16(q[0]), q1 = _mm256_set1_epi16(q[1]);
    const __m256i q2 = _mm256_set1_epi16(q[2]), q3 = _mm256_set1_epi16(q[3]);
    const size_t body = n / step * step;
    for (size_t i = 0; i < body; i += step) {
        const __m256i a = _mm256_add_epi16(_mm256_mullo_epi16(sixteen(rows[0] + i), q0),
                                           _mm256_mullo_epi16(sixteen(rows[1] + i), q1));
        const __m256i b = _mm256_add_epi16(_mm256_mullo_epi16(sixteen(rows[2] + i), q2),
                                           _mm256_mullo_epi16(sixteen(rows[3] + i), q3));
        const __m256i low = _mm256_add_epi32(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)),
                                             _mm256_cvtepi16_epi32(_mm256_castsi256_si128(b)));
        const __m256i high = _mm256_add_epi32(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1)),
                                              _mm256_cvtepi16_epi32(_mm256_extracti128_si256(b, 1)));
        add_eight(low, ds + i, acc + i);
        add_eight(high, ds + i + 8, acc + i + 8);
    }
    add_lane(rows, q, ds, acc, body, n);
}

void scale_tile(const uint16_t * scale, float d, float * ds, size_t n) {
    const __m256 vd = _mm256_set1_ps(d);
    const size_t body = n / 8 * 8;
    for (size_t i = 0; i < body; i += 8) {
        const __m256 s = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scale + i)));
        _mm256_storeu_ps(ds + i, _mm256_mul_ps(s, vd));
    }
    for (size_t i = body; i < n; ++i) {
        ds[i] = _cvtsh_ss(scale[i]) * d;
    }
}

} // namespace

float fma_silu(float v) {
    static const ExpForm form = ggml_exp_form();
    return ggml_silu(v, form);
}

void avx2_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n) {
    add_tiles(block, acc, ld, n, scale_tile, add_lane_avx2);
}

} // namespace gguf_flash
