// The fused part of the scalar table: the reference for fused_avx2.cpp, bit for bit.
#include "fused.h"
#include "ggml.h"

namespace gguf_flash {

float scalar_silu(float v) {
    static const ExpForm form = ggml_exp_form();
    return ggml_silu(v, form);
}

void scalar_add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n) {
    auto scale = [](const uint16_t * halves, float d, float * ds, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            ds[i] = ggml_fp16_to_fp32(halves[i]) * d;
        }
    };
    add_tiles(block, acc, ld, n, scale,
              [](auto rows, auto q, auto ds, float * out, size_t count) { add_lane(rows, q, ds, out, 0, count); });
}

} // namespace gguf_flash
