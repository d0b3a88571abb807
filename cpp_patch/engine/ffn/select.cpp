// Which neurons the tokens of a call select, and in which way to read them.
#include "gguf_flash/kernels.h"
#include "run.h"

#include <algorithm>

namespace gguf_flash {

namespace {

// A prompt of at least this many tokens may stream; for fewer, random reads keep the cache useful.
constexpr uint32_t stream_tokens = 8;

} // namespace

// Bytes of one token's x as the dot products with this part want it; 0: no such part, or floats do.
size_t FfnRun::x_bytes(Part part) const {
    const PartLayout * layout = state_.layout.find(part);
    return layout == nullptr ? 0 : dot_input_bytes(layout->type, n_embd_);
}

void FfnRun::reserve_x() {
    for (Part part : { Part::gate, Part::up }) {
        std::vector<uint8_t> & xq = session().xq[int(part)];
        xq.resize(std::max(xq.size(), in_.n_tokens * x_bytes(part)));
    }
}

void FfnRun::quantize_x() {
    for (Part part : { Part::gate, Part::up }) {
        const size_t bytes = x_bytes(part);
        for (uint32_t t = uint32_t(ith_); bytes != 0 && t < in_.n_tokens; t += uint32_t(nth_)) {
            convert_dot_input(state_.layout.find(part)->type, in_.x + t * in_.x_stride, n_embd_,
                              session().xq[int(part)].data() + t * bytes);
        }
    }
}

void FfnRun::mark_selected() {
    const uint32_t n_ff = state_.layout.n_ff;
    const uint32_t first = uint32_t(uint64_t(n_ff) * ith_ / nth_), end = uint32_t(uint64_t(n_ff) * (ith_ + 1) / nth_);
    std::vector<uint32_t> & last = session().last;
    if (in_.scores == nullptr) {
        std::fill(last.begin() + first, last.begin() + end, in_.n_tokens);
        return;
    }
    if (select_ == Select::predictor) {
        mark_predicted(first, end);
        return;
    }
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        const float * scores = in_.scores + t * in_.scores_stride;
        for (uint32_t i = first; i < end; ++i) {
            if (activate(activation_, scores[i], state_.threshold(i)) != 0.0f) {
                last[i] = t + 1;
            }
        }
    }
}

void FfnRun::mark_predicted(uint32_t first, uint32_t end) {
    bool numbers = true;
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        const float * scores = in_.scores + t * in_.scores_stride;
        for (uint32_t i = first; i < end; ++i) {
            numbers = numbers && scores[i] == scores[i];
            if (scores[i] > score_limit_) {
                session().last[i] = t + 1;
            }
        }
    }
    if (!numbers) {
        session().not_a_number.store(true, std::memory_order_relaxed);
    }
}

void FfnRun::list_selected() {
    Session & s = session();
    s.selection.clear();
    if (s.not_a_number.load(std::memory_order_relaxed)) {
        fail({ Code::corrupt, "the predictor of layer " + std::to_string(state_.layout.layer) + " of '" +
                                  op_.model_->label() + "' gives scores that are not numbers; train it again" });
        return;
    }
    const size_t n = kernels().list_marked(s.last.data(), state_.layout.n_ff, s.listed.data());
    for (size_t k = 0; k < n; ++k) {
        s.selection.push_back({ s.listed[k], s.last[s.listed[k]] - 1 });
    }
    s.rows.resize(s.selection.size());
    s.items.reserve(s.selection.size()); // thread 0 appends while others read: it must not move
    uint32_t missing = 0;
    for (const Selected & selected : s.selection) {
        if (state_.cache.slot(selected.neuron) != NeuronCache::none) {
            state_.cache.touch(selected);
        } else {
            ++missing;
        }
    }
    state_.cache.expect(missing);
    state_.counters.selected += s.selection.size();
}

bool FfnRun::should_stream() const {
    const Prefill prefill = op_.model_->settings().prefill;
    if (prefill == Prefill::select || in_.n_tokens < 2) {
        return false;
    }
    if (prefill == Prefill::stream) {
        return true;
    }
    uint64_t missing = 0;
    for (const Selected & s : session().selection) {
        missing += state_.cache.slot(s.neuron) == NeuronCache::none;
    }
    return in_.n_tokens >= stream_tokens && missing * 2 > state_.layout.n_ff;
}

} // namespace gguf_flash
