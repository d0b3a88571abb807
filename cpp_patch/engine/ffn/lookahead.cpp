// Reading the next layer's neurons while this one and the attention between them compute: what its
// predictor says of this layer's input is nearly what it will say of its own. Only what is cached
// depends on it, never what is selected. Everything here runs on thread 0.
#include "gguf_flash/kernels.h"
#include "reads.h"
#include "run.h"

#include <algorithm>

namespace gguf_flash {

namespace {

// Below this share a read ahead costs the disk more time than the others hide.
constexpr double least_share = 0.6;
constexpr double fading = 0.9;       // of what was learnt, per tick
constexpr uint32_t retry_ticks = 64; // layers that proved not worth it are tried again

} // namespace

bool Foresight::worth_it() const {
    return used >= least_share * read || ticks % retry_ticks == 0;
}

void Foresight::learn(size_t n_read, size_t n_used) {
    ++ticks;
    read = fading * read + double(n_read);
    used = fading * used + double(n_used);
}

// Takes into account what has been read ahead for a layer whose lock is held.
void FfnRun::settle(LayerState & state) {
    std::vector<Arrival> & arrived = session().arrivals;
    Clock::time_point t = Clock::now();
    op_.model_->ahead()->take(state, arrived, false);
    io_ns_ += since(t);
    t = Clock::now();
    for (const Arrival & arrival : arrived) {
        if (arrival.ok) {
            state.cache.unpin(arrival.neuron);
            continue;
        }
        state.cache.drop(arrival.neuron);
        const auto at = std::find(state.ahead.begin(), state.ahead.end(), arrival.neuron);
        if (at != state.ahead.end()) {
            state.ahead.erase(at);
        }
    }
    mem_ns_ += since(t);
}

// At the start of a tick, when its selection is marked: which of it was foreseen.
void FfnRun::judge_foresight() {
    if (op_.model_->ahead() == nullptr) {
        return;
    }
    settle(state_);
    foreseen_ = 0;
    for (uint32_t neuron : state_.ahead) {
        foreseen_ += session().last[neuron] != 0;
    }
    state_.counters.ahead += state_.ahead.size();
    state_.counters.foreseen += foreseen_;
    state_.foresight.learn(state_.ahead.size(), foreseen_);
    state_.ahead.clear();
}

// Begins to read what the next layer will probably select and has not cached.
void FfnRun::look_ahead() {
    if (in_.ahead_scores == nullptr || op_.model_->ahead() == nullptr || !op_.model_->ahead()->able()) {
        return;
    }
    LayerState & next = op_.model_->layer(op_.layer_index_ + 1);
    std::unique_lock<std::mutex> lock(next.lock, std::try_to_lock);
    if (!lock || !next.ahead.empty() || !next.foresight.worth_it()) {
        return;
    }
    settle(next);
    Clock::time_point t = Clock::now();
    acquire_ahead(next);
    mem_ns_ += since(t);
    t = Clock::now();
    op_.model_->ahead()->read(next, next.ahead);
    io_ns_ += since(t);
}

void FfnRun::acquire_ahead(LayerState & next) {
    Session & s = session();
    const uint32_t n_ff = next.layout.n_ff;
    const float limit = score_limit(next.layout.predictor_threshold);
    s.marks.assign(n_ff, 0);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        const float * scores = in_.ahead_scores + t * in_.ahead_stride;
        for (uint32_t i = 0; i < n_ff; ++i) {
            s.marks[i] |= scores[i] > limit;
        }
    }
    s.listed.resize(n_ff);
    const size_t n = kernels().list_marked(s.marks.data(), n_ff, s.listed.data());
    std::vector<uint32_t> & wanted = s.ahead;
    wanted.clear();
    next.cache.begin_ahead();
    for (size_t k = 0; k < n; ++k) {
        const uint32_t neuron = s.listed[k];
        if (next.cache.slot(neuron) == NeuronCache::none) {
            wanted.push_back(neuron);
        } else {
            next.cache.keep(neuron);
        }
    }
    next.cache.expect(uint32_t(wanted.size()));
    const uint32_t most = next.cache.n_slots() / 2; // the tick itself must not run out of slots
    for (uint32_t neuron : wanted) {
        if (next.cache.n_pinned() >= most || next.cache.acquire_ahead(neuron) == NeuronCache::none) {
            break;
        }
        next.ahead.push_back(neuron);
    }
}

// Within a tick: a bundle of this layer that was under way when the tick began.
void FfnRun::accept(const Arrival & arrival) {
    Session & s = session();
    const auto at =
        std::lower_bound(s.selection.begin(), s.selection.end(), arrival.neuron,
                         [](const Selected & selected, uint32_t neuron) { return selected.neuron < neuron; });
    const uint32_t index = uint32_t(at - s.selection.begin());
    const bool needed =
        at != s.selection.end() && at->neuron == arrival.neuron && index >= wave_first_ && index < s.wave_end;
    late_ -= needed;
    if (arrival.ok) {
        state_.cache.unpin(arrival.neuron);
    } else if (!needed) {
        state_.cache.drop(arrival.neuron);
    }
    if (!needed) {
        return;
    }
    if (arrival.ok) {
        s.items.push_back(index);
        s.ready.store(uint32_t(s.items.size()), std::memory_order_release);
        return;
    }
    state_.cache.unpin(arrival.neuron); // its read is repeated; should that fail too, it says why
    s.misses.push_back(index);
    s.missing.push_back(arrival.neuron);
    s.runs.push_back({ uint32_t(s.misses.size() - 1), 1 });
    submit_run(uint32_t(s.runs.size() - 1));
    s.reader->flush();
}

} // namespace gguf_flash
