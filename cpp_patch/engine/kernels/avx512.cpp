// AVX-512 twins of scalar.cpp (F, BW, DQ and VL). Compiled with those flags, called only after
// cpu_has_avx512(). Multiplication and addition stay separate on purpose (see kernels.h). The last values
// of a row are a vector of their own, whose other lanes are masked: not touched in memory.
#include "active.h"

#include <immintrin.h>

namespace gguf_flash {

namespace {

constexpr size_t lanes = 16;

// The lanes that n values take, at most all.
__mmask16 first_lanes(size_t n) {
    return n >= lanes ? __mmask16(0xFFFF) : __mmask16((1u << n) - 1);
}

struct F32 {
    static __m512 load(const float * row, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, row); }
};

struct F16 {
    static __m512 load(const uint16_t * row, __mmask16 mask) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row));
    }
};

struct BF16 {
    static __m512 load(const uint16_t * row, __mmask16 mask) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
};

__m512 plus_product(__m512 y, __m512 a, __m512 w) {
    return _mm512_add_ps(y, _mm512_mul_ps(a, w));
}

void step(float * y, __m512 a, __m512 w) {
    _mm512_storeu_ps(y, plus_product(_mm512_loadu_ps(y), a, w));
}

template <class Type, class Value> void axpy(const void * w, float a, float * y, size_t n) {
    const Value * row = static_cast<const Value *>(w);
    const __m512 va = _mm512_set1_ps(a);
    const size_t body = n / lanes * lanes;
    for (size_t i = 0; i < body; i += lanes) {
        step(y + i, va, Type::load(row + i, first_lanes(lanes)));
    }
    const __mmask16 mask = first_lanes(n - body);
    const __m512 old = _mm512_maskz_loadu_ps(mask, y + body);
    _mm512_mask_storeu_ps(y + body, mask, plus_product(old, va, Type::load(row + body, mask)));
}

__m512 scale_of(const unsigned char * block) {
    uint16_t half;
    std::memcpy(&half, block, sizeof(half));
    return _mm512_set1_ps(_cvtsh_ss(half));
}

__m128i sixteen_bytes(const unsigned char * from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
}

__m512 widen(__m128i q) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
}

void axpy_q8_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    const __m512 va = _mm512_set1_ps(a);
    for (size_t b = 0; b < n; b += block_values, block += q8_0_bytes) {
        const __m512 d = scale_of(block);
        step(y + b, va, _mm512_mul_ps(widen(sixteen_bytes(block + 2)), d));
        step(y + b + 16, va, _mm512_mul_ps(widen(sixteen_bytes(block + 18)), d));
    }
}

// The 16 values that a nibble can stand for fill a vector: a value is a permutation's pick, which looks at
// the low four bits of its index only.
void axpy_q4_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    const __m512 va = _mm512_set1_ps(a);
    const __m512 codes = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    for (size_t b = 0; b < n; b += block_values, block += q4_0_bytes) {
        const __m512 values = _mm512_mul_ps(codes, scale_of(block));
        const __m512i packed = _mm512_cvtepu8_epi32(sixteen_bytes(block + 2));
        step(y + b, va, _mm512_permutexvar_ps(packed, values));
        step(y + b + 16, va, _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 4), values));
    }
}

// Adds the rows to n_vectors * 16 columns of y, which stay in registers while the rows pass. The mask is
// that of the last vector.
template <size_t n_vectors>
void add_tile(const float * w, const size_t * list, const float * a, size_t n_rows, float * y, __mmask16 last) {
    __m512 sum[n_vectors];
    GGUF_FLASH_UNROLL
    for (size_t v = 0; v < n_vectors; ++v) {
        sum[v] = F32::load(y + v * lanes, v + 1 < n_vectors ? first_lanes(lanes) : last);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        const __m512 va = _mm512_set1_ps(a[r]);
        const float * row = w + list[r];
        GGUF_FLASH_UNROLL
        for (size_t v = 0; v < n_vectors; ++v) {
            const __mmask16 mask = v + 1 < n_vectors ? first_lanes(lanes) : last;
            sum[v] = plus_product(sum[v], va, F32::load(row + v * lanes, mask));
        }
    }
    GGUF_FLASH_UNROLL
    for (size_t v = 0; v < n_vectors; ++v) {
        _mm512_mask_storeu_ps(y + v * lanes, v + 1 < n_vectors ? first_lanes(lanes) : last, sum[v]);
    }
}

void accumulate(const float * w, size_t ld, const float * a, size_t n_rows, float * y, size_t n) {
    constexpr size_t wide = 8; // vectors of a tile
    for_active(ld, a, n_rows, [&](const size_t * list, const float * factors, size_t n_active) {
        size_t i = 0;
        for (; i + wide * lanes <= n; i += wide * lanes) {
            add_tile<wide>(w + i, list, factors, n_active, y + i, first_lanes(lanes));
        }
        for (; i < n; i += lanes) {
            add_tile<1>(w + i, list, factors, n_active, y + i, first_lanes(n - i));
        }
    });
}

// Whole vectors are stored, also of few indices: out has room for n, and no more than i are listed yet.
size_t list_marked(const uint32_t * marks, size_t n, uint32_t * out) {
    const size_t body = n / lanes * lanes;
    __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    size_t count = 0;
    for (size_t i = 0; i < body; i += lanes) {
        const __m512i values = _mm512_loadu_si512(marks + i);
        const __mmask16 marked = _mm512_test_epi32_mask(values, values);
        _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(marked, index));
        count += size_t(__builtin_popcount(marked));
        index = _mm512_add_epi32(index, _mm512_set1_epi32(int(lanes)));
    }
    for (size_t i = body; i < n; ++i) {
        out[count] = uint32_t(i);
        count += marks[i] != 0 ? 1 : 0;
    }
    return count;
}

} // namespace

bool cpu_has_avx512() { // the compiler's support asks the system, too, whether it keeps the wide registers
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool cpu_has_vnni() {
    return __builtin_cpu_supports("avx512vnni");
}

namespace {

constexpr Kernels table(DotRows dot_q8_0, DotRows dot_q4_0) {
    return { "avx512",    axpy<F32, float>, axpy<F16, uint16_t>, axpy<BF16, uint16_t>,
             axpy_q8_0,   axpy_q4_0,        accumulate,          avx512_add_codes,
             list_marked, fma_silu,         avx512_dot_f16,      dot_q8_0,
             dot_q4_0 };
}

} // namespace

const Kernels avx512_kernels = table(avx2_dot_q8_0, avx2_dot_q4_0);
const Kernels avx512_vnni_kernels = table(avx512_dot_q8_0, avx512_dot_q4_0);

} // namespace gguf_flash
