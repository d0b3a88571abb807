#include "ggml-cpu.h"
#include "gguf_flash/kernels.h"

namespace gguf_flash {

namespace {

const ggml_type_traits_cpu & traits(int type) {
    return *ggml_get_type_traits_cpu(ggml_type(type));
}

} // namespace

size_t dot_input_bytes(int type, size_t n) {
    const ggml_type wanted = traits(type).vec_dot_type;
    return wanted == GGML_TYPE_F32 ? 0 : ggml_row_size(wanted, int64_t(n));
}

void convert_dot_input(int type, const float * x, size_t n, void * out) {
    traits(traits(type).vec_dot_type).from_float(x, out, int64_t(n));
}

float dot_row(int type, const void * row, const void * x, size_t n) {
    float sum = 0.0f;
    traits(type).vec_dot(int(n), &sum, 0, row, 0, x, 0, 1);
    return sum;
}

} // namespace gguf_flash
