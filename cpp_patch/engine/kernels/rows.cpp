// Dot products of several rows with many tokens: by a table's kernel where it gives ggml's bits here, else
// one by one.
#include "ggml-cpu.h"
#include "tables.h"

#include <algorithm>

namespace gguf_flash {

namespace {

constexpr size_t piece = 64; // rows of other lengths have a rest that ggml sums apart

void one_by_one(int type, const DotBatch & b) {
    for (size_t r = 0; r < b.n_rows; ++r) {
        for (size_t t = 0; t < b.n_tokens; ++t) {
            b.out[r * b.n_tokens + t] =
                dot_row(type, b.rows[r], static_cast<const uint8_t *>(b.x) + t * b.x_bytes, b.n);
        }
    }
}

// How ggml was compiled decides how it sums, and no function tells all of it: a few products do.
bool agrees(int type, DotRows kernel) {
    constexpr size_t n = 512, n_rows = 3, n_tokens = 3;
    std::vector<float> values(n * (n_rows + n_tokens)), scratch(dot_rows_scratch(n));
    uint32_t state = 12345;
    for (float & v : values) {
        state = state * 1664525u + 1013904223u;
        v = float(int32_t(state)) * 0x1p-31f;
    }
    const size_t row_bytes = ggml_row_size(ggml_type(type), n), x_bytes = dot_input_bytes(type, n);
    std::vector<uint8_t> weights(n_rows * row_bytes), x(n_tokens * x_bytes);
    const void * rows[n_rows];
    for (size_t r = 0; r < n_rows; ++r) {
        rows[r] = weights.data() + r * row_bytes;
        ggml_get_type_traits_cpu(ggml_type(type))
            ->from_float(values.data() + r * n, weights.data() + r * row_bytes, int64_t(n));
    }
    for (size_t t = 0; t < n_tokens; ++t) {
        convert_dot_input(type, values.data() + (n_rows + t) * n, n, x.data() + t * x_bytes);
    }
    float expected[n_rows * n_tokens], found[n_rows * n_tokens];
    DotBatch b = { rows, n_rows, x.data(), x_bytes, n_tokens, n, found, scratch.data() };
    kernel(b);
    b.out = expected;
    one_by_one(type, b);
    return std::memcmp(expected, found, sizeof(found)) == 0;
}

DotRows agreeing(int type, DotRows kernel) {
    return kernel != nullptr && agrees(type, kernel) ? kernel : nullptr;
}

DotRows kernel_of(int type) {
    static const DotRows f16 = agreeing(GGML_TYPE_F16, kernels().dot_f16);
    static const DotRows q8_0 = agreeing(GGML_TYPE_Q8_0, kernels().dot_q8_0);
    static const DotRows q4_0 = agreeing(GGML_TYPE_Q4_0, kernels().dot_q4_0);
    switch (type) {
        case GGML_TYPE_F16: return f16;
        case GGML_TYPE_Q8_0: return q8_0;
        case GGML_TYPE_Q4_0: return q4_0;
        default: return nullptr;
    }
}

} // namespace

size_t dot_rows_scratch(size_t n) {
    return 4 * n + 16 * panel_sums + 16; // a panel, a batch's sums, and what alignment takes
}

bool has_dot_rows(int type, size_t n) {
    return n % piece == 0 && kernel_of(type) != nullptr;
}

void dot_rows(int type, const DotBatch & b) {
    if (has_dot_rows(type, b.n)) {
        kernel_of(type)(b);
    } else {
        one_by_one(type, b);
    }
}

} // namespace gguf_flash
