// Reading the missing neurons of a working set. Everything here runs on thread 0.
#include "gguf_flash/round.h"
#include "run.h"

#include <algorithm>

namespace gguf_flash {

namespace {

constexpr uint32_t wave_floats = 1 << 20; // bound on tokens * neurons of one wave, for its activations

} // namespace

// Plans selection[first, end): hits are ready at once, misses get a slot and a read. Returns end.
uint32_t FfnRun::plan_wave(uint32_t first) {
    Session & s = session();
    s.items.clear();
    s.misses.clear();
    s.runs.clear();
    const uint32_t most = std::max<uint32_t>(256, wave_floats / in_.n_tokens);
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
        if (hit) {
            state_.cache.protect(selected.neuron);
            s.items.push_back(end);
        } else {
            add_miss(end);
        }
    }
    end = whole_blocks(first, end);
    state_.counters.hits += s.items.size();
    state_.counters.misses += s.misses.size();
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
        state_.cache.drop(s.selection[s.misses.back()].neuron);
        s.misses.pop_back();
        if (--s.runs.back().count == 0) {
            s.runs.pop_back();
        }
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
        if (state_.cache.slot(selection[i].neuron) != NeuronCache::none) {
            state_.cache.release(selection[i].neuron);
            ++freed;
        }
    }
    return freed > 0;
}

void FfnRun::add_miss(uint32_t index) {
    Session & s = session();
    const uint32_t neuron = s.selection[index].neuron;
    if (!s.runs.empty() && state_.aligned) {
        MissRun & run = s.runs.back();
        const uint32_t previous = s.selection[s.misses.back()].neuron;
        if (previous + 1 == neuron && run.count < uint32_t(max_segments) &&
            (run.count + 1) * state_.layout.stride <= read_limit) {
            ++run.count;
            s.misses.push_back(index);
            return;
        }
    }
    s.runs.push_back({ uint32_t(s.misses.size()), 1 });
    s.misses.push_back(index);
}

void FfnRun::submit_misses() {
    const Clock::time_point t = Clock::now();
    Session & s = session();
    const uint64_t align = state_.file.align();
    s.segments.resize(std::max(s.segments.size(), s.misses.size()));
    s.ops.resize(std::max(s.ops.size(), s.runs.size()));
    for (size_t r = 0; r < s.runs.size(); ++r) {
        const MissRun & run = s.runs[r];
        const uint32_t neuron = s.selection[s.misses[run.first]].neuron;
        const uint64_t lead = state_.lead(neuron);
        ReadOp & op = s.ops[r];
        op = ReadOp();
        op.file = &state_.file;
        op.offset = state_.bundle_offset(neuron) - lead;
        op.needed = lead + run.count * state_.layout.stride;
        op.n_segments = int(run.count);
        op.segments = s.segments.data() + run.first;
        op.tag = uint32_t(r);
        const uint64_t length = state_.aligned ? state_.layout.stride : round_up(op.needed, align);
        for (uint32_t i = 0; i < run.count; ++i) {
            const uint32_t missing = s.selection[s.misses[run.first + i]].neuron;
            op.segments[i] = { state_.slot_data(state_.cache.slot(missing)), size_t(length) };
        }
        state_.counters.bytes_read += run.count * length;
        s.reader->submit(&op);
    }
    state_.counters.requests += s.runs.size();
    outstanding_ = uint32_t(s.runs.size());
    if (outstanding_ > 0) {
        s.reader->flush();
    }
    io_ns_ += since(t);
}

void FfnRun::pump(bool block) {
    if (outstanding_ == 0) {
        return;
    }
    constexpr size_t batch = 64;
    ReadOp * done[batch];
    size_t n;
    if (block) {
        const Clock::time_point t = Clock::now();
        n = session().reader->wait(done, batch);
        io_ns_ += since(t);
    } else {
        n = session().reader->poll(done, batch);
    }
    for (size_t i = 0; i < n; ++i) {
        complete(*done[i]);
    }
    outstanding_ -= uint32_t(n);
}

void FfnRun::complete(ReadOp & op) {
    Session & s = session();
    const MissRun & run = s.runs[op.tag];
    if (op.error != 0) {
        const uint32_t neuron = s.selection[s.misses[run.first]].neuron;
        for (uint32_t i = 0; i < run.count; ++i) {
            state_.cache.drop(s.selection[s.misses[run.first + i]].neuron);
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

// Nothing may be left in flight when the slots or the operations are used again.
void FfnRun::drain() {
    while (outstanding_ > 0) {
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
