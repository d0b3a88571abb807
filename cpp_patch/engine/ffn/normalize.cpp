// The RMS norm over a layer's hidden values (BitNet): out = D (w h) / sqrt(mean(h^2) + eps). The values
// pass in waves, so their squares are summed on the way and the output is scaled at the end.
#include "run.h"

#include <cmath>

namespace gguf_flash {

// What conclude leaves of a hidden value. Called once for each token and neuron.
float FfnRun::weighted(float h, uint32_t neuron, size_t place) {
    if (in_.norm == nullptr) {
        return h;
    }
    session().squares[place] = h * h;
    return h * in_.norm[neuron];
}

// Adds the squares of a wave to this thread's sums, in the order of neurons: as ggml's norm adds them.
void FfnRun::add_squares(uint32_t wave) {
    if (in_.norm == nullptr) {
        return;
    }
    sums_.resize(in_.n_tokens);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        const float * squares = session().squares.data() + size_t(t) * wave;
        for (uint32_t i = 0; i < wave; ++i) {
            sums_[t] += double(squares[i]);
        }
    }
}

void FfnRun::scale_output() {
    if (in_.norm == nullptr || sums_.empty()) { // no neuron was selected: the output is zero
        return;
    }
    size_t column, n;
    my_columns(column, n);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        const float mean = float(sums_[t] / double(state_.layout.n_ff));
        const float scale = 1.0f / std::sqrt(mean + in_.norm_eps);
        float * out = in_.out + t * in_.out_stride + column;
        for (size_t c = 0; c < n; ++c) {
            out[c] *= scale;
        }
    }
}

} // namespace gguf_flash
