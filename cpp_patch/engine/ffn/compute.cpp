// The arithmetic: dot products of gate and up rows, then down rows added in the order of neurons.
#include "gguf_flash/kernels.h"
#include "run.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace gguf_flash {

namespace {

constexpr uint32_t grain = 4;         // neurons a thread takes at a time, for few tokens
constexpr uint32_t expand_tokens = 4; // from here on, expanding a down row once pays
constexpr uint32_t expand_rows = 32;  // rows expanded together, a bit each
constexpr uint32_t many_rows = 12;    // of them: from here on, passing over the others costs less than passes over y
constexpr size_t expand_columns = 256;

uint32_t popcount(uint32_t bits) {
    return uint32_t(__builtin_popcount(bits));
}

uint32_t lowest_bit(uint32_t bits) { // of one that is not 0
    return uint32_t(__builtin_ctz(bits));
}

uint32_t highest_bit(uint32_t bits) {
    return 31 - uint32_t(__builtin_clz(bits));
}

} // namespace

// Every thread takes neurons until all n_items are computed; thread 0 collects reads meanwhile.
void FfnRun::compute_items(uint32_t first, uint32_t n_items, uint32_t wave) {
    Session & s = session();
    const bool together = in_.n_tokens >= together_tokens;
    const uint32_t count = together ? together_neurons : grain;
    for (;;) {
        const uint32_t from = s.next.fetch_add(count, std::memory_order_relaxed);
        if (from >= n_items) {
            return;
        }
        const uint32_t end = std::min(from + count, n_items);
        if (together) {
            if (!await_item(end - 1)) {
                return;
            }
            compute_together(s.items.data() + from, end - from, first, wave);
        }
        for (uint32_t i = from; !together && i < end; ++i) {
            if (!await_item(i)) {
                return;
            }
            float * h = s.h.data() + (s.items[i] - first);
            decide(s.items[i], h, wave, nullptr);
            conclude(s.items[i], h, wave, nullptr);
        }
        if (ith_ == 0) {
            pump(false);
        }
    }
}

// False when the call has failed.
bool FfnRun::await_item(uint32_t item) {
    for (int spins = 0; item >= session().ready.load(std::memory_order_acquire); ++spins) {
        if (failed()) {
            return false;
        }
        if (ith_ == 0) {
            pump(true);
        } else if (spins > 50) {
            std::this_thread::yield();
        }
    }
    return true;
}

// h[t * wave] = the activation of selection[index] for each token, 0 where only other tokens selected it.
// products: with the part that decides, or null.
void FfnRun::decide(uint32_t index, float * h, uint32_t wave, const float * products) {
    const uint32_t neuron = session().selection[index].neuron;
    const Part part = op_.model_->layout().gated ? Part::gate : Part::up;
    const float * biases = part == Part::gate ? in_.gate_bias : in_.up_bias;
    const float bias = biases != nullptr ? biases[neuron] : 0.0f;
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        float deciding;
        if (select_ == Select::predictor && !predicted(t, neuron)) {
            h[size_t(t) * wave] = 0.0f;
            continue;
        }
        if (select_ == Select::gate) {
            deciding = in_.scores[t * in_.scores_stride + neuron];
        } else {
            deciding = (products != nullptr ? products[t] : dot(part, index, t)) + bias;
        }
        h[size_t(t) * wave] = activate(activation_, deciding, state_.threshold(neuron));
    }
}

// Makes hidden values of what decide left. products: with up, or null.
void FfnRun::conclude(uint32_t index, float * h, uint32_t wave, const float * products) {
    const uint32_t neuron = session().selection[index].neuron;
    const float bias = in_.up_bias != nullptr ? in_.up_bias[neuron] : 0.0f;
    const bool gated = op_.model_->layout().gated;
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        float & value = h[size_t(t) * wave];
        if (gated && value != 0.0f) {
            const float v = (products != nullptr ? products[t] : dot(Part::up, index, t)) + bias;
            value *= activation_ == Activation::drelu && v < 0.0f ? 0.0f : v;
        }
        value = weighted(value, neuron, size_t(&value - session().h.data()));
    }
}

float FfnRun::dot(Part part, uint32_t index, uint32_t token) const {
    const PartLayout & layout = *state_.layout.find(part);
    const size_t bytes = dot_input_bytes(layout.type, n_embd_);
    const void * x = in_.x + token * in_.x_stride;
    if (bytes != 0) {
        x = session().xq[int(part)].data() + token * bytes;
    }
    return dot_row(layout.type, session().rows[index] + layout.offset, x, n_embd_);
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
        note_active(end - first);
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

// Which rows have anything to add to which token, found once for all columns of this thread.
void FfnRun::note_active(uint32_t wave) {
    std::vector<uint32_t> & active = session().active[size_t(ith_)];
    const size_t row = in_.n_tokens + 1;
    active.assign(size_t((wave + expand_rows - 1) / expand_rows) * row, 0);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        const float * h = session().h.data() + size_t(t) * wave;
        for (uint32_t i = 0; i < wave; ++i) {
            active[i / expand_rows * row + t] |= uint32_t(h[i] != 0.0f) << (i % expand_rows);
        }
    }
    for (size_t at = 0; at < active.size(); at += row) {
        for (uint32_t t = 0; t < in_.n_tokens; ++t) {
            active[at + in_.n_tokens] |= active[at + t];
        }
    }
}

// Adds the rows whose bit is set to y, in their order; most are not where a predictor selects.
void FfnRun::add_active(const float * rows, size_t ld, const float * h, uint32_t active, float * y, size_t n) const {
    if (popcount(active) >= many_rows) {
        const uint32_t first = lowest_bit(active);
        kernels().accumulate(rows + first * ld, ld, h + first, highest_bit(active) + 1 - first, y, n);
        return;
    }
    for (; active != 0; active &= active - 1) {
        const uint32_t r = lowest_bit(active);
        kernels().accumulate(rows + r * ld, ld, h + r, 1, y, n);
    }
}

void FfnRun::accumulate_expanded(const PartLayout & down, uint32_t first, uint32_t end, size_t column, size_t n) {
    Session & s = session();
    std::vector<float> & rows = s.expanded[size_t(ith_)];
    rows.resize(std::max(rows.size(), expand_rows * expand_columns));
    const uint32_t wave = end - first;
    for (uint32_t i = first; i < end; i += expand_rows) {
        const uint32_t count = std::min(expand_rows, end - i);
        const size_t block = (i - first) / expand_rows;
        const uint32_t * active = s.active[size_t(ith_)].data() + block * (in_.n_tokens + 1);
        for (uint32_t r = 0; r < count; ++r) {
            if ((active[in_.n_tokens] >> r & 1) != 0) {
                expand_row(down.type, s.rows[i + r] + down.offset, column, n, rows.data() + r * n);
            } else { // not touched, but rows between active ones are added with h = 0
                std::memset(rows.data() + r * n, 0, n * sizeof(float));
            }
        }
        for (uint32_t t = 0; t < in_.n_tokens; ++t) {
            add_active(rows.data(), n, s.h.data() + size_t(t) * wave + (i - first), active[t],
                       in_.out + t * in_.out_stride + column, n);
        }
    }
}

} // namespace gguf_flash
