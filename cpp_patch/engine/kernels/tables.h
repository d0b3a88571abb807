// Private to kernels/: the tables, and the two block formats they read (as ggml defines them).
#pragma once

#include "gguf_flash/kernels.h"

#include <cstring>

namespace gguf_flash {

constexpr size_t block_values = 32;
constexpr size_t q8_0_bytes = 34; // half scale, 32 signed bytes
constexpr size_t q4_0_bytes = 18; // half scale, 16 bytes: value i in the low nibble, i + 16 in the high

extern const Kernels scalar_kernels;
#ifdef GGUF_FLASH_AVX2
extern const Kernels avx2_kernels;
bool cpu_has_avx2();
#endif

} // namespace gguf_flash
