// Reading the missing neurons of a working set. Everything here runs on thread 0.
#include "reads.h"
#include "run.h"

#include <algorithm>

namespace gguf_flash {

uint32_t wave_neurons(uint32_t n_tokens) {
    constexpr uint32_t floats = 1 << 20;
    return std::max<uint32_t>(256, floats / n_tokens);
}

// Plans selection[first, end): hits are ready at once, misses get a slot and a read. Returns end.
uint32_t FfnRun::plan_wave(uint32_t first) {
    Session & s = session();
    s.items.clear();
    s.misses.clear();
    s.missing.clear();
    late_ = 0;
    const uint32_t most = wave_neurons(in_.n_tokens);
    const uint32_t limit = uint32_t(std::min<size_t>(s.selection.size(), size_t(first) + most));
    uint32_t end = first;
    for (; end < limit; ++end) {
        const Selected selected = s.selection[end];
        const bool hit = state_.cache.slot(selected.neuron) != NeuronCache::none;
        const bool cached = hit || state_.cache.acquire(selected) != NeuronCache::none;
        const bool must = in_one_block(first, end); // a wave is at least this much
        if (!cached && (!must || !make_room(end) || state_.cache.acquire(selected) == NeuronCache::none)) {
            break;
        }
        s.rows[end] = state_.bundle(selected.neuron);
        if (!hit) {
            s.misses.push_back(end);
            s.missing.push_back(selected.neuron);
            continue;
        }
        state_.cache.protect(selected.neuron);
        if (state_.cache.pinned(selected.neuron)) {
            ++late_;
        } else {
            s.items.push_back(end);
        }
    }
    end = whole_blocks(first, end);
    const uint32_t foreseen = std::min(foreseen_, uint32_t(s.items.size()) + late_); // later waves have the others
    state_.counters.hits += s.items.size() + late_ - foreseen;
    state_.counters.misses += s.misses.size() + foreseen;
    foreseen_ -= foreseen;
    wave_first_ = first;
    offer_items(end - first);
    return end;
}

// Whether two selected neurons' down rows must be added in the same wave; every one is alone without codes.
bool FfnRun::in_one_block(uint32_t a, uint32_t b) const {
    const std::vector<Selected> & selection = session().selection;
    return a == b || (state_.codes && selection[a].neuron / code_block == selection[b].neuron / code_block);
}

// Takes back what a wave has of the block that it would cut, unless that is its first. Returns its new end.
uint32_t FfnRun::whole_blocks(uint32_t first, uint32_t end) {
    Session & s = session();
    uint32_t cut = end;
    while (end < s.selection.size() && cut > first && in_one_block(cut - 1, end)) {
        --cut;
    }
    if (cut == end || cut == first) {
        return end;
    }
    while (!s.items.empty() && s.items.back() >= cut) {
        s.items.pop_back();
    }
    while (!s.misses.empty() && s.misses.back() >= cut) {
        state_.cache.drop(s.missing.back());
        s.misses.pop_back();
        s.missing.pop_back();
    }
    for (uint32_t i = cut; i < end; ++i) {
        const uint32_t neuron = s.selection[i].neuron;
        late_ -= state_.cache.slot(neuron) != NeuronCache::none && state_.cache.pinned(neuron);
    }
    return cut;
}

// Lets the other threads take the items listed so far, of a wave of so many neurons.
void FfnRun::offer_items(uint32_t wave) {
    Session & s = session();
    s.h.resize(std::max<size_t>(s.h.size(), size_t(in_.n_tokens) * wave));
    s.squares.resize(in_.norm != nullptr ? s.h.size() : 0);
    s.next.store(0);
    s.ready.store(uint32_t(s.items.size()), std::memory_order_release);
}

// Every slot holds a neuron this tick still needs: gives up those whose turn comes last.
bool FfnRun::make_room(uint32_t from) {
    uint32_t wanted = std::max<uint32_t>(1, state_.cache.n_slots() / 8), freed = 0;
    const std::vector<Selected> & selection = session().selection;
    for (uint32_t i = uint32_t(selection.size()); i-- > from && freed < wanted;) {
        const uint32_t neuron = selection[i].neuron;
        if (state_.cache.slot(neuron) != NeuronCache::none && !state_.cache.pinned(neuron)) {
            state_.cache.release(neuron);
            ++freed;
        }
    }
    return freed > 0;
}

void FfnRun::submit_misses() {
    const Clock::time_point t = Clock::now();
    Session & s = session();
    plan_runs(state_, s.missing, s.runs);
    // Room for what was read ahead in vain, too: what is with the reader must stay where it is.
    s.segments.resize(std::max(s.segments.size(), 2 * s.missing.size() + late_));
    s.ops.resize(std::max(s.ops.size(), s.runs.size() + late_));
    segments_used_ = 0;
    outstanding_ = 0;
    for (uint32_t r = 0; r < s.runs.size(); ++r) {
        submit_run(r);
    }
    if (outstanding_ > 0) {
        s.reader->flush();
    }
    io_ns_ += since(t);
}

void FfnRun::submit_run(uint32_t run) {
    Session & s = session();
    ReadOp & op = s.ops[run];
    state_.counters.bytes_read += describe_run(state_, s.missing, s.runs[run], s.segments.data() + segments_used_, op);
    state_.counters.requests += 1;
    segments_used_ += uint32_t(op.n_segments);
    op.tag = run;
    s.reader->submit(&op);
    ++outstanding_;
}

// Takes what has been read. block: waits for something, if anything is under way.
void FfnRun::pump(bool block) {
    const bool waits = block;
    const Clock::time_point t = Clock::now();
    if (late_ > 0) {
        Session & s = session();
        op_.model_->ahead()->take(state_, s.arrivals, block);
        for (const Arrival & arrival : s.arrivals) {
            accept(arrival);
        }
        block = false;
    }
    if (outstanding_ > 0) {
        constexpr size_t batch = 64;
        ReadOp * done[batch];
        Reader & reader = *session().reader;
        const size_t n = block ? reader.wait(done, batch) : reader.poll(done, batch);
        outstanding_ -= uint32_t(n);
        for (size_t i = 0; i < n; ++i) {
            complete(*done[i]);
        }
    }
    io_ns_ += waits ? since(t) : 0;
}

void FfnRun::complete(ReadOp & op) {
    Session & s = session();
    const ReadRun & run = s.runs[op.tag];
    if (op.error != 0) {
        const uint32_t neuron = s.missing[run.first];
        for (uint32_t i = 0; i < run.count; ++i) {
            state_.cache.drop(s.missing[run.first + i]);
        }
        fail({ Code::io, "cannot read neuron " + std::to_string(neuron) + " of layer " +
                             std::to_string(state_.layout.layer) + " at byte " + std::to_string(op.offset) + " of '" +
                             state_.file.label() + "': " + read_error(op.error) });
        return;
    }
    for (uint32_t i = 0; i < run.count; ++i) {
        s.items.push_back(s.misses[run.first + i]);
    }
    s.ready.store(uint32_t(s.items.size()), std::memory_order_release);
}

// Other threads wait for what is under way, and nothing of this call's may be when the slots or the
// operations are used again.
void FfnRun::drain() {
    while (outstanding_ > 0 || (late_ > 0 && !failed())) {
        pump(true);
    }
}

void FfnRun::release_wave(uint32_t first, uint32_t end) {
    for (uint32_t i = first; i < end; ++i) {
        if (state_.cache.slot(session().selection[i].neuron) != NeuronCache::none) {
            state_.cache.release(session().selection[i].neuron);
        }
    }
}

} // namespace gguf_flash
