// Private to kernels/: the tables, and the two block formats they read (as ggml defines them).
#pragma once

#include "gguf_flash/kernels.h"

#include <cstring>

// Before a loop over the vectors of a tile: unrolled, they are registers, else memory.
#ifdef __clang__
#define GGUF_FLASH_UNROLL _Pragma("unroll")
#else
#define GGUF_FLASH_UNROLL _Pragma("GCC unroll 16")
#endif

namespace gguf_flash {

constexpr size_t block_values = 32;
constexpr size_t q8_0_bytes = 34; // half scale, 32 signed bytes
constexpr size_t q4_0_bytes = 18; // half scale, 16 bytes: value i in the low nibble, i + 16 in the high

constexpr size_t lane_values = 4;  // neighbours in a block that one lane sums
constexpr size_t panel_sums = 256; // floats of sums that a panel of rows has for one token, at most
constexpr size_t code_tile = 256;  // columns whose scales are at hand at a time

// How ggml's SiLU, as it was built, computes the exponential.
enum class ExpForm {
    libm,        // the C library's
    one_outside, // AVX2 and NEON: 2^n + 2^n * p(b)
    one_inside,  // AVX-512: 2^n * (1 + p(b))
};
ExpForm ggml_exp_form();

// The parts of the scalar table that fuse multiplication and addition (see fused.h).
float scalar_silu(float v);
void scalar_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n);
size_t scalar_list_marked(const uint32_t * marks, size_t n, uint32_t * out);

extern const Kernels scalar_kernels;
#ifdef GGUF_FLASH_X86
float fma_silu(float v);
void avx2_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n);
extern const Kernels avx2_kernels;
bool cpu_has_avx2();
void avx2_dot_f16(const DotBatch & b);
void avx2_dot_q8_0(const DotBatch & b);
void avx2_dot_q4_0(const DotBatch & b);
void avx512_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n);
extern const Kernels avx512_kernels, avx512_vnni_kernels;
bool cpu_has_avx512(); // and AVX2
void avx512_dot_f16(const DotBatch & b);
void avx512_dot_q8_0(const DotBatch & b);
void avx512_dot_q4_0(const DotBatch & b);
bool cpu_has_vnni();
#endif
#ifdef GGUF_FLASH_NEON
extern const Kernels neon_kernels;
#endif

} // namespace gguf_flash
