// AVX-512 twin of fused.cpp (F, BW, DQ and VL). Compiled with those flags, called only after cpu_has_avx512().
#include "fused.h"

#include <immintrin.h>

namespace gguf_flash {

namespace {

constexpr size_t step = 32; // columns

__m512i wide(const int8_t * row) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(row)));
}

void add_sixteen(__m256i a, __m256i b, const float * ds, float * acc) {
    const __m512i sum = _mm512_add_epi32(_mm512_cvtepi16_epi32(a), _mm512_cvtepi16_epi32(b));
    const __m512 old = _mm512_loadu_ps(acc);
    _mm512_storeu_ps(acc, _mm512_fmadd_ps(_mm512_loadu_ps(ds), _mm512_cvtepi32_ps(sum), old));
}

// Two products of signed bytes, one factor being more than -128, fit 16 bits; four need 32.
void add_lane_avx512(const int8_t * const * rows, const int8_t * q, const float * ds, float * acc, size_t n) {
    const __m512i q0 = _mm512_set1_epi16(q[0]), q1 = _mm512_set1_epi16(q[1]);
    const __m512i q2 = _mm512_set1_epi16(q[2]), q3 = _mm512_set1_epi16(q[3]);
    const size_t body = n / step * step;
    for (size_t i = 0; i < body; i += step) {
        const __m512i a =
            _mm512_add_epi16(_mm512_mullo_epi16(wide(rows[0] + i), q0), _mm512_mullo_epi16(wide(rows[1] + i), q1));
        const __m512i b =
            _mm512_add_epi16(_mm512_mullo_epi16(wide(rows[2] + i), q2), _mm512_mullo_epi16(wide(rows[3] + i), q3));
        add_sixteen(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b), ds + i, acc + i);
        add_sixteen(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1), ds + i + 16, acc + i + 16);
    }
    add_lane(rows, q, ds, acc, body, n);
}

void scale_tile(const uint16_t * scale, float d, float * ds, size_t n) {
    const __m512 vd = _mm512_set1_ps(d);
    for (size_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << (n - i)) - 1);
        const __m512 s = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scale + i));
        _mm512_mask_storeu_ps(ds + i, mask, _mm512_mul_ps(s, vd));
    }
}

} // namespace

void avx512_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n) {
    add_tiles(block, acc, ld, n, scale_tile, add_lane_avx512);
}

} // namespace gguf_flash
