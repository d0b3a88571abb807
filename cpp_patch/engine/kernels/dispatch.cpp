#include "ggml.h"
#include "tables.h"

#include <algorithm>
#include <cstdlib>

namespace gguf_flash {

std::vector<const Kernels *> available_kernels() {
    std::vector<const Kernels *> tables = { &scalar_kernels };
#ifdef GGUF_FLASH_X86
    if (cpu_has_avx2()) {
        tables.push_back(&avx2_kernels);
    }
    if (cpu_has_avx512()) {
        tables.push_back(cpu_has_vnni() ? &avx512_vnni_kernels : &avx512_kernels);
    }
#endif
#ifdef GGUF_FLASH_NEON
    tables.push_back(&neon_kernels);
#endif
    return tables;
}

namespace {

const Kernels & choose() {
    const std::vector<const Kernels *> tables = available_kernels();
    const char * forced = std::getenv("GGUF_FLASH_SIMD");
    for (const Kernels * table : tables) {
        if (forced != nullptr && std::strcmp(forced, table->name) == 0) {
            return *table;
        }
    }
    return *tables.back();
}

using Axpy = void (*)(const void *, float, float *, size_t);

// The kernel that reads this type directly, or nullptr.
Axpy direct_kernel(int type) {
    const Kernels & k = kernels();
    switch (type) {
        case GGML_TYPE_F32: return k.axpy_f32;
        case GGML_TYPE_F16: return k.axpy_f16;
        case GGML_TYPE_BF16: return k.axpy_bf16;
        case GGML_TYPE_Q8_0: return k.axpy_q8_0;
        case GGML_TYPE_Q4_0: return k.axpy_q4_0;
        default: return nullptr;
    }
}

const char * at_column(int type, const void * row, size_t first) {
    return static_cast<const char *>(row) + ggml_row_size(ggml_type(type), int64_t(first));
}

} // namespace

const Kernels & kernels() {
    static const Kernels & chosen = choose();
    return chosen;
}

size_t column_block(int type) {
    return std::max<size_t>(block_values, size_t(ggml_blck_size(ggml_type(type))));
}

void sum_lanes(const float * lanes, size_t ld, float * out, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const float * l = lanes + i;
        const float a = l[4 * ld] + l[0], b = l[5 * ld] + l[ld], c = l[6 * ld] + l[2 * ld], d = l[7 * ld] + l[3 * ld];
        out[i] = (a + c) + (b + d);
    }
}

float code_scale(const uint8_t * block) {
    ggml_fp16_t half;
    std::memcpy(&half, block, sizeof(half));
    return ggml_fp16_to_fp32(half);
}

const int8_t * code_values(const uint8_t * block) {
    return reinterpret_cast<const int8_t *>(block + sizeof(ggml_fp16_t));
}

void expand_row(int type, const void * row, size_t first, size_t n, float * out) {
    const char * from = at_column(type, row, first);
    if (type == GGML_TYPE_F32) {
        std::memcpy(out, from, n * sizeof(float));
    } else {
        ggml_get_type_traits(ggml_type(type))->to_float(from, out, int64_t(n));
    }
}

void axpy_row(int type, const void * row, size_t first, size_t n, float a, float * y, float * scratch) {
    if (Axpy kernel = direct_kernel(type)) {
        kernel(at_column(type, row, first), a, y, n);
    } else {
        expand_row(type, row, first, n, scratch);
        kernels().axpy_f32(scratch, a, y, n);
    }
}

} // namespace gguf_flash
