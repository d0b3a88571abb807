// The reference every vector table is tested against, bit for bit.
#include "ggml.h"
#include "tables.h"

namespace gguf_flash {

namespace {

void axpy_f32(const void * w, float a, float * y, size_t n) {
    const float * row = static_cast<const float *>(w);
    for (size_t i = 0; i < n; ++i) {
        y[i] = y[i] + a * row[i];
    }
}

void axpy_f16(const void * w, float a, float * y, size_t n) {
    const ggml_fp16_t * row = static_cast<const ggml_fp16_t *>(w);
    for (size_t i = 0; i < n; ++i) {
        y[i] = y[i] + a * ggml_fp16_to_fp32(row[i]);
    }
}

void axpy_bf16(const void * w, float a, float * y, size_t n) {
    const ggml_bf16_t * row = static_cast<const ggml_bf16_t *>(w);
    for (size_t i = 0; i < n; ++i) {
        y[i] = y[i] + a * ggml_bf16_to_fp32(row[i]);
    }
}

void axpy_q8_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    for (size_t b = 0; b < n; b += block_values, block += q8_0_bytes) {
        const float d = code_scale(block);
        const int8_t * q = reinterpret_cast<const int8_t *>(block + 2);
        for (size_t i = 0; i < block_values; ++i) {
            y[b + i] = y[b + i] + a * (q[i] * d);
        }
    }
}

void axpy_q4_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    for (size_t b = 0; b < n; b += block_values, block += q4_0_bytes) {
        const float d = code_scale(block);
        for (size_t i = 0; i < block_values / 2; ++i) {
            const int low = (block[2 + i] & 15) - 8, high = (block[2 + i] >> 4) - 8;
            y[b + i] = y[b + i] + a * (low * d);
            y[b + i + 16] = y[b + i + 16] + a * (high * d);
        }
    }
}

void accumulate(const float * w, size_t ld, const float * a, size_t n_rows, float * y, size_t n) {
    for (size_t r = 0; r < n_rows; ++r) {
        if (a[r] != 0.0f) {
            axpy_f32(w + r * ld, a[r], y, n);
        }
    }
}

} // namespace

// Without branches: which neurons are marked is nothing that a processor predicts.
size_t scalar_list_marked(const uint32_t * marks, size_t n, uint32_t * out) {
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        out[count] = uint32_t(i);
        count += marks[i] != 0 ? 1 : 0;
    }
    return count;
}

const Kernels scalar_kernels = { "scalar",  axpy_f32,   axpy_f16,         axpy_bf16,          axpy_q8_0,
                                 axpy_q4_0, accumulate, scalar_add_codes, scalar_list_marked, scalar_silu,
                                 nullptr,   nullptr,    nullptr };

} // namespace gguf_flash
