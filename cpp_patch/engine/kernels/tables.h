// Private to kernels/: the tables, and the two block formats they read (as ggml defines them).
#pragma once

#include "gguf_flash/kernels.h"

#include <cstring>

namespace gguf_flash {

constexpr size_t block_values = 32;
constexpr size_t q8_0_bytes = 34; // half scale, 32 signed bytes
constexpr size_t q4_0_bytes = 18; // half scale, 16 bytes: value i in the low nibble, i + 16 in the high

constexpr size_t lane_values = 4; // neighbours in a block that one lane sums
constexpr size_t code_tile = 256; // columns whose scales are at hand at a time

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

extern const Kernels scalar_kernels;
#ifdef GGUF_FLASH_X86
float fma_silu(float v);
void avx2_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n);
extern const Kernels avx2_kernels;
bool cpu_has_avx2();
void avx512_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n);
extern const Kernels avx512_kernels;
bool cpu_has_avx512(); // and AVX2
#endif
#ifdef GGUF_FLASH_NEON
extern const Kernels neon_kernels;
#endif

} // namespace gguf_flash
