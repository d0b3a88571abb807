// The arithmetic: dot products of gate and up rows, then down rows added in the order of neurons.
#include "gguf_flash/kernels.h"
#include "run.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace gguf_flash {

namespace {

constexpr uint32_t grain = 4;         // neurons a thread takes at a time
constexpr uint32_t expand_tokens = 4; // from here on, expanding a down row once pays
constexpr uint32_t expand_rows = 32;  // rows expanded together
constexpr size_t expand_columns = 256;

} // namespace

// Every thread takes neurons until all n_items are computed; thread 0 collects reads meanwhile.
void FfnRun::compute_items(uint32_t first, uint32_t n_items, uint32_t wave) {
    Session & s = session();
    for (;;) {
        const uint32_t from = s.next.fetch_add(grain, std::memory_order_relaxed);
        if (from >= n_items) {
            return;
        }
        for (uint32_t i = from; i < std::min(from + grain, n_items); ++i) {
            for (int spins = 0; i >= s.ready.load(std::memory_order_acquire); ++spins) {
                if (failed()) {
                    return;
                }
                if (ith_ == 0) {
                    pump(true);
                } else if (spins > 50) {
                    std::this_thread::yield();
                }
            }
            compute_neuron(s.items[i], first, wave);
        }
        if (ith_ == 0) {
            pump(false);
        }
    }
}

void FfnRun::compute_neuron(uint32_t index, uint32_t first, uint32_t wave) {
    Session & s = session();
    const LayerLayout & layout = state_.layout;
    const uint32_t neuron = s.selection[index].neuron;
    const uint8_t * bundle = s.rows[index];
    const PartLayout * gate = layout.find(Part::gate);
    const PartLayout * up = layout.find(Part::up);
    const bool gated = op_.model_->layout().gated;
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        float deciding;
        if (select_ == Select::predictor && !predicted(t, neuron)) {
            const size_t place = size_t(t) * wave + (index - first);
            s.h[place] = weighted(0.0f, neuron, place); // another token of this call selected it
            continue;
        }
        if (select_ == Select::gate) {
            deciding = in_.scores[t * in_.scores_stride + neuron];
        } else if (gated) {
            deciding = dot(Part::gate, *gate, bundle, t) + (in_.gate_bias != nullptr ? in_.gate_bias[neuron] : 0.0f);
        } else {
            deciding = dot(Part::up, *up, bundle, t) + (in_.up_bias != nullptr ? in_.up_bias[neuron] : 0.0f);
        }
        float h = activate(activation_, deciding, state_.threshold(neuron));
        if (gated && h != 0.0f) {
            const float v = dot(Part::up, *up, bundle, t) + (in_.up_bias != nullptr ? in_.up_bias[neuron] : 0.0f);
            h *= activation_ == Activation::drelu && v < 0.0f ? 0.0f : v;
        }
        const size_t place = size_t(t) * wave + (index - first);
        s.h[place] = weighted(h, neuron, place);
    }
}

float FfnRun::dot(Part part, const PartLayout & layout, const uint8_t * bundle, uint32_t token) const {
    const size_t bytes = dot_input_bytes(layout.type, n_embd_);
    const void * x = in_.x + token * in_.x_stride;
    if (bytes != 0) {
        x = session().xq[int(part)].data() + token * bytes;
    }
    return dot_row(layout.type, bundle + layout.offset, x, n_embd_);
}

void FfnRun::my_columns(size_t & first, size_t & n) const {
    const size_t block = column_block(state_.layout.find(Part::down)->type);
    const size_t blocks = (n_embd_ + block - 1) / block;
    first = std::min<size_t>(n_embd_, blocks * size_t(ith_) / size_t(nth_) * block);
    n = std::min<size_t>(n_embd_, blocks * size_t(ith_ + 1) / size_t(nth_) * block) - first;
}

void FfnRun::clear_output() {
    size_t column, n;
    my_columns(column, n);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        std::memset(in_.out + t * in_.out_stride + column, 0, n * sizeof(float));
    }
}

// Adds the down rows of selection[first, end) to this thread's columns of every token's output.
void FfnRun::accumulate(uint32_t first, uint32_t end) {
    add_squares(end - first);
    size_t column, n;
    my_columns(column, n);
    if (state_.codes) {
        accumulate_codes(first, end);
        return;
    }
    if (n == 0) {
        return;
    }
    const PartLayout & down = *state_.layout.find(Part::down);
    if (in_.n_tokens >= expand_tokens) {
        for (size_t c = 0; c < n; c += expand_columns) {
            accumulate_expanded(down, first, end, column + c, std::min(expand_columns, n - c));
        }
        return;
    }
    Session & s = session();
    std::vector<float> & scratch = s.expanded[size_t(ith_)];
    scratch.resize(std::max(scratch.size(), n));
    const uint32_t wave = end - first;
    for (uint32_t i = first; i < end; ++i) {
        for (uint32_t t = 0; t < in_.n_tokens; ++t) {
            const float h = s.h[size_t(t) * wave + (i - first)];
            if (h != 0.0f) {
                axpy_row(down.type, s.rows[i] + down.offset, column, n, h, in_.out + t * in_.out_stride + column,
                         scratch.data());
            }
        }
    }
}

void FfnRun::accumulate_expanded(const PartLayout & down, uint32_t first, uint32_t end, size_t column, size_t n) {
    Session & s = session();
    std::vector<float> & rows = s.expanded[size_t(ith_)];
    rows.resize(std::max(rows.size(), expand_rows * expand_columns));
    const uint32_t wave = end - first;
    for (uint32_t i = first; i < end; i += expand_rows) {
        const uint32_t count = std::min(expand_rows, end - i);
        for (uint32_t r = 0; r < count; ++r) {
            expand_row(down.type, s.rows[i + r] + down.offset, column, n, rows.data() + r * n);
        }
        for (uint32_t t = 0; t < in_.n_tokens; ++t) {
            kernels().accumulate(rows.data(), n, s.h.data() + size_t(t) * wave + (i - first), count,
                                 in_.out + t * in_.out_stride + column, n);
        }
    }
}

} // namespace gguf_flash
