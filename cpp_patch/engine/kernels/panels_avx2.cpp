// Panels in AVX2, F16C and FMA. Compiled with those flags, called only after cpu_has_avx2().
#include "panels.h"

#include <immintrin.h>

namespace gguf_flash {

namespace {

struct Vector {
    using Floats = __m256;
    static constexpr size_t width = 8;
    static Floats load(const float * p) { return _mm256_loadu_ps(p); }
    static void store(float * p, Floats v) { _mm256_storeu_ps(p, v); }
    static Floats halves(const uint16_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum_of_four(Floats a, Floats b, Floats c, Floats d) {
        const __m256 all = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
        const __m128 two = _mm_hadd_ps(four, four);
        return _mm_cvtss_f32(_mm_hadd_ps(two, two));
    }
};

// A token's block, to meet one row at a time. Products of signed bytes: of the row's absolute values with
// the token's, which take the row's signs.
class Codes {
public:
    using Floats = __m256;
    static constexpr size_t rows = 1, panel_rows = 4;
    Codes(const uint8_t * values, float scale)
        : values_(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(values))), scale_(scale) {}

    static float scale(const uint8_t * block) {
        uint16_t half;
        std::memcpy(&half, block, sizeof(half));
        return _cvtsh_ss(half);
    }
    static void prepare(int8_t *, size_t) {}
    static Floats load(const float * p) { return _mm256_loadu_ps(p); }
    static void store(float * p, Floats v) { _mm256_storeu_ps(p, v); }

    Floats add(const int8_t * codes, const float * scales, Floats sum) const {
        const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i *>(codes));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(values_, w));
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        return _mm256_fmadd_ps(_mm256_set1_ps(scales[0] * scale_), _mm256_cvtepi32_ps(fours), sum);
    }

private:
    __m256i values_;
    float scale_;
};

} // namespace

void avx2_dot_f16(const DotBatch & b) {
    dot_f16<Vector, 2>(b);
}

void avx2_dot_q8_0(const DotBatch & b) {
    dot_codes<Codes, q8_0_bytes, read_codes_q8_0>(b);
}

void avx2_dot_q4_0(const DotBatch & b) {
    dot_codes<Codes, q4_0_bytes, read_codes_q4_0>(b);
}

} // namespace gguf_flash
