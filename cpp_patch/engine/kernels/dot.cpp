#include "ggml-cpu.h"
#include "tables.h"

namespace gguf_flash {

namespace {

const ggml_type_traits_cpu & traits(int type) {
    return *ggml_get_type_traits_cpu(ggml_type(type));
}

} // namespace

// What ggml_cpu_has_* say is what ggml was compiled for, and so which code it runs.
ExpForm ggml_exp_form() {
    if (ggml_cpu_has_avx512() != 0) {
        return ExpForm::one_inside;
    }
    const bool fused = (ggml_cpu_has_avx2() != 0 && ggml_cpu_has_fma() != 0) || ggml_cpu_has_neon() != 0;
    return fused ? ExpForm::one_outside : ExpForm::libm;
}

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
