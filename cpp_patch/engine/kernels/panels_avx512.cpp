// Panels in AVX-512 with VNNI. Compiled with those flags, called only after cpu_has_avx512() and, but for
// dot_f16, cpu_has_vnni().
#include "panels.h"

#include <immintrin.h>

namespace gguf_flash {

namespace {

struct Vector {
    using Floats = __m512;
    static constexpr size_t width = 16;
    static Floats load(const float * p) { return _mm512_loadu_ps(p); }
    static void store(float * p, Floats v) { _mm512_storeu_ps(p, v); }
    static Floats halves(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum_of_four(Floats a, Floats b, Floats c, Floats d) {
        return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, c), _mm512_add_ps(b, d)));
    }
};

// A token's block, to meet two rows at a time. The instruction wants one factor without a sign: the row's
// codes have 128 added, and sums begin at -128 times the token's values.
class Codes {
public:
    using Floats = __m512;
    static constexpr size_t rows = 2, panel_rows = 8;
    Codes(const uint8_t * values, float scale)
        : values_(_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(values)))),
          start_(_mm512_sub_epi32(_mm512_setzero_si512(),
                                  _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), values_))),
          scale_(_mm512_set1_ps(scale)) {}

    static float scale(const uint8_t * block) {
        uint16_t half;
        std::memcpy(&half, block, sizeof(half));
        return _cvtsh_ss(half);
    }
    static void prepare(int8_t * codes, size_t n) {
        for (size_t i = 0; i < n; i += 64) {
            const __m512i signs = _mm512_set1_epi8(-128);
            _mm512_store_si512(codes + i, _mm512_xor_si512(_mm512_load_si512(codes + i), signs));
        }
    }
    static Floats load(const float * p) { return _mm512_loadu_ps(p); }
    static void store(float * p, Floats v) { _mm512_storeu_ps(p, v); }

    Floats add(const int8_t * codes, const float * scales, Floats sum) const {
        const __m512i dots = _mm512_dpbusd_epi32(start_, _mm512_load_si512(codes), values_);
        const __m256 low = _mm256_broadcast_ss(scales), high = _mm256_broadcast_ss(scales + 1);
        const __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
        return _mm512_fmadd_ps(_mm512_mul_ps(both, scale_), _mm512_cvtepi32_ps(dots), sum);
    }

private:
    __m512i values_, start_;
    __m512 scale_;
};

} // namespace

void avx512_dot_f16(const DotBatch & b) {
    dot_f16<Vector, 4>(b);
}

void avx512_dot_q8_0(const DotBatch & b) {
    dot_codes<Codes, q8_0_bytes, read_codes_q8_0>(b);
}

void avx512_dot_q4_0(const DotBatch & b) {
    dot_codes<Codes, q4_0_bytes, read_codes_q4_0>(b);
}

} // namespace gguf_flash
