// AVX2 and F16C twins of scalar.cpp. Compiled with those flags, called only after cpu_has_avx2(), which
// asks for FMA too (fused_avx2.cpp).
// Multiplication and addition stay separate on purpose (see kernels.h).
#include "active.h"

#include <cpuid.h>
#include <immintrin.h>

namespace gguf_flash {

namespace {

constexpr size_t lanes = 8;

void step(float * y, __m256 a, __m256 w) {
    _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), _mm256_mul_ps(a, w)));
}

void axpy_f32(const void * w, float a, float * y, size_t n) {
    const float * row = static_cast<const float *>(w);
    const __m256 va = _mm256_set1_ps(a);
    const size_t body = n / lanes * lanes;
    for (size_t i = 0; i < body; i += lanes) {
        step(y + i, va, _mm256_loadu_ps(row + i));
    }
    scalar_kernels.axpy_f32(row + body, a, y + body, n - body);
}

void axpy_f16(const void * w, float a, float * y, size_t n) {
    const uint16_t * row = static_cast<const uint16_t *>(w);
    const __m256 va = _mm256_set1_ps(a);
    const size_t body = n / lanes * lanes;
    for (size_t i = 0; i < body; i += lanes) {
        step(y + i, va, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row + i))));
    }
    scalar_kernels.axpy_f16(row + body, a, y + body, n - body);
}

void axpy_bf16(const void * w, float a, float * y, size_t n) {
    const uint16_t * row = static_cast<const uint16_t *>(w);
    const __m256 va = _mm256_set1_ps(a);
    const size_t body = n / lanes * lanes;
    for (size_t i = 0; i < body; i += lanes) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(row + i)));
        step(y + i, va, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    scalar_kernels.axpy_bf16(row + body, a, y + body, n - body);
}

__m256 scale_of(const unsigned char * block) {
    uint16_t half;
    std::memcpy(&half, block, sizeof(half));
    return _mm256_set1_ps(_cvtsh_ss(half));
}

// Eight signed bytes from the low half of q, as floats.
__m256 widen(__m128i q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
}

void axpy_q8_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    const __m256 va = _mm256_set1_ps(a);
    for (size_t b = 0; b < n; b += block_values, block += q8_0_bytes) {
        const __m256 d = scale_of(block);
        for (size_t i = 0; i < block_values; i += lanes) {
            const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(block + 2 + i));
            step(y + b + i, va, _mm256_mul_ps(widen(q), d));
        }
    }
}

void axpy_q4_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    const __m256 va = _mm256_set1_ps(a);
    const __m128i mask = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    for (size_t b = 0; b < n; b += block_values, block += q4_0_bytes) {
        const __m256 d = scale_of(block);
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block + 2));
        const __m128i low = _mm_sub_epi8(_mm_and_si128(packed, mask), eight);
        const __m128i high = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(packed, 4), mask), eight);
        step(y + b, va, _mm256_mul_ps(widen(low), d));
        step(y + b + 8, va, _mm256_mul_ps(widen(_mm_srli_si128(low, 8)), d));
        step(y + b + 16, va, _mm256_mul_ps(widen(high), d));
        step(y + b + 24, va, _mm256_mul_ps(widen(_mm_srli_si128(high, 8)), d));
    }
}

// Adds the rows to a tile's columns of y, which stay in registers while the rows pass.
template <size_t n_vectors>
void add_tile(const float * w, const size_t * list, const float * a, size_t n_rows, float * y) {
    __m256 sum[n_vectors];
    GGUF_FLASH_UNROLL
    for (size_t v = 0; v < n_vectors; ++v) {
        sum[v] = _mm256_loadu_ps(y + v * lanes);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        const __m256 va = _mm256_set1_ps(a[r]);
        GGUF_FLASH_UNROLL
        for (size_t v = 0; v < n_vectors; ++v) {
            sum[v] = _mm256_add_ps(sum[v], _mm256_mul_ps(va, _mm256_loadu_ps(w + list[r] + v * lanes)));
        }
    }
    GGUF_FLASH_UNROLL
    for (size_t v = 0; v < n_vectors; ++v) {
        _mm256_storeu_ps(y + v * lanes, sum[v]);
    }
}

void accumulate(const float * w, size_t ld, const float * a, size_t n_rows, float * y, size_t n) {
    constexpr size_t n_vectors = 8, tile = n_vectors * lanes;
    const size_t body = n / tile * tile;
    for_active(ld, a, n_rows, [&](const size_t * list, const float * factors, size_t n_active) {
        for (size_t i = 0; i < body; i += tile) {
            add_tile<n_vectors>(w + i, list, factors, n_active, y + i);
        }
    });
    scalar_kernels.accumulate(w + body, ld, a, n_rows, y + body, n - body);
}

} // namespace

bool cpu_has_avx2() {
    // Not every compiler knows the name "f16c" for __builtin_cpu_supports.
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
           (c & bit_F16C) != 0;
}

const Kernels avx2_kernels = { "avx2",       axpy_f32,      axpy_f16,       axpy_bf16,          axpy_q8_0,
                               axpy_q4_0,    accumulate,    avx2_add_codes, scalar_list_marked, fma_silu,
                               avx2_dot_f16, avx2_dot_q8_0, avx2_dot_q4_0 };

} // namespace gguf_flash
