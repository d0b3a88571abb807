// A prompt's products: those of a few neurons with all of its tokens at once take a third to a half of the time.
#include "gguf_flash/kernels.h"
#include "run.h"

#include <algorithm>

namespace gguf_flash {

namespace {

// Products that nobody needs come along: together pays where at least one in so many is needed.
constexpr uint64_t needed_share = 3;

} // namespace

// Hidden values of n neurons, indices into selection.
void FfnRun::compute_together(const uint32_t * items, uint32_t n, uint32_t first, uint32_t wave) {
    Session & s = session();
    const bool gated = op_.model_->layout().gated;
    const float * products = nullptr;
    if (select_ != Select::gate) {
        uint64_t needed = 0;
        for (uint32_t i = 0; i < n; ++i) {
            needed += count_predicted(s.selection[items[i]].neuron);
        }
        products = products_of(gated ? Part::gate : Part::up, items, n, needed);
    }
    uint64_t active = 0;
    for (uint32_t i = 0; i < n; ++i) {
        float * h = s.h.data() + (items[i] - first);
        decide(items[i], h, wave, products == nullptr ? nullptr : products + size_t(i) * in_.n_tokens);
        for (uint32_t t = 0; gated && t < in_.n_tokens; ++t) {
            active += h[size_t(t) * wave] != 0.0f;
        }
    }
    products = gated ? products_of(Part::up, items, n, active) : nullptr;
    for (uint32_t i = 0; i < n; ++i) {
        conclude(items[i], s.h.data() + (items[i] - first), wave,
                 products == nullptr ? nullptr : products + size_t(i) * in_.n_tokens);
    }
}

uint64_t FfnRun::count_predicted(uint32_t neuron) const {
    uint64_t n = in_.n_tokens;
    for (uint32_t t = 0; select_ == Select::predictor && t < in_.n_tokens; ++t) {
        n -= !predicted(t, neuron);
    }
    return n;
}

// [n, n_tokens], valid until the next call; null where those needed are better computed alone.
const float * FfnRun::products_of(Part part, const uint32_t * items, uint32_t n, uint64_t needed) {
    Session & s = session();
    const PartLayout & layout = *state_.layout.find(part);
    if (!has_dot_rows(layout.type, n_embd_) || needed * needed_share < uint64_t(n) * in_.n_tokens) {
        return nullptr;
    }
    const void * rows[together_neurons];
    for (uint32_t i = 0; i < n; ++i) {
        rows[i] = s.rows[items[i]] + layout.offset;
    }
    const size_t room = size_t(together_neurons) * in_.n_tokens;
    std::vector<float> & scratch = s.expanded[size_t(ith_)];
    scratch.resize(std::max(scratch.size(), room + dot_rows_scratch(n_embd_)));
    dot_rows(layout.type, { rows, n, s.xq[int(part)].data(), x_bytes(part), in_.n_tokens, n_embd_, scratch.data(),
                            scratch.data() + room });
    return scratch.data();
}

} // namespace gguf_flash
