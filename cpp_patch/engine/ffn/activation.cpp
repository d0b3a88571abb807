#include "ggml.h"
#include "gguf_flash/ffn.h"
#include "gguf_flash/kernels.h"

#include <cmath>

namespace gguf_flash {

namespace {

// Tanh form. Upstream's CPU backend looks it up in a table of halves, so dense and flash agree only
// if ours rounds likewise.
float gelu_tanh(float x) {
    if (x <= -10.0f || x >= 10.0f) {
        return x < 0 ? 0.0f : x;
    }
    const float h = ggml_fp16_to_fp32(ggml_fp32_to_fp16(x));
    const float y = 0.5f * h * (1.0f + std::tanh(0.79788456080286535587989211986876f * h * (1.0f + 0.044715f * h * h)));
    return ggml_fp16_to_fp32(ggml_fp32_to_fp16(y));
}

float gelu_erf(float x) {
    return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752440084436210484f));
}

float cut(float y, float threshold) {
    return threshold > 0 && std::fabs(y) <= threshold ? 0.0f : y;
}

} // namespace

float activate(Activation activation, float v, float threshold) {
    switch (activation) {
        case Activation::relu:
        case Activation::drelu: return v > threshold ? v : 0.0f;
        case Activation::relu_sqr: return v > threshold ? v * v : 0.0f;
        case Activation::gelu: return cut(gelu_tanh(v), threshold);
        case Activation::gelu_erf: return cut(gelu_erf(v), threshold);
        default: return cut(kernels().silu(v), threshold);
    }
}

} // namespace gguf_flash
