// Rows of a graph's values, whatever their strides: innermost dimension the columns, all others rows.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstring>

namespace gguf_flash::node_rows {

inline int64_t count(const ggml_tensor * t) {
    return t->ne[1] * t->ne[2] * t->ne[3];
}

// F32 or F16, in memory that the CPU may read. Tensors of a plain ggml_context have no buffer.
inline bool readable(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src != nullptr ? t->view_src->buffer : t->buffer;
    return (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16) && t->data != nullptr &&
           (buffer == nullptr || ggml_backend_buffer_is_host(buffer));
}

// Where row number `row` of a readable tensor begins.
inline void * address(const ggml_tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / t->ne[1] / t->ne[2];
    return static_cast<char *>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

// Row number `row` of a readable tensor as t->ne[0] floats.
inline void load(const ggml_tensor * t, int64_t row, float * out) {
    const char * from = static_cast<const char *>(address(t, row));
    for (int64_t i = 0; i < t->ne[0]; ++i, from += t->nb[0]) {
        if (t->type == GGML_TYPE_F32) {
            std::memcpy(out + i, from, sizeof(float));
        } else {
            ggml_fp16_t half;
            std::memcpy(&half, from, sizeof(half));
            out[i] = ggml_fp16_to_fp32(half);
        }
    }
}

} // namespace gguf_flash::node_rows
