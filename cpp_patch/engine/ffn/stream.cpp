// Reading a whole layer in sequence for a prompt. Everything here runs on thread 0.
#include "gguf_flash/round.h"
#include "run.h"

#include <algorithm>
#include <cstring>

namespace gguf_flash {

uint32_t FfnRun::chunk_neurons() const {
    return uint32_t(stream_chunk_bytes(state_.layout) / state_.layout.stride);
}

// Where the chunk's read begins: the sector its first bundle lies in.
uint64_t FfnRun::chunk_offset(uint32_t chunk) const {
    return round_down(state_.bundle_offset(chunk * chunk_neurons()), state_.file.align());
}

void FfnRun::submit_chunk(uint32_t chunk) {
    Session & s = session();
    const uint64_t first = uint64_t(chunk) * chunk_neurons();
    if (first >= state_.layout.n_ff || failed()) {
        return;
    }
    const uint64_t piece = op_.model_->stream_piece();
    if (s.staging.bytes() == 0 && !s.staging.allocate(piece * stream_buffers)) {
        fail(without_memory("reserve " + std::to_string(piece * stream_buffers) + " bytes for reading a layer of '" +
                            op_.model_->label() + "' in sequence"));
        return;
    }
    s.ops.resize(std::max<size_t>(s.ops.size(), stream_buffers));
    s.segments.resize(std::max<size_t>(s.segments.size(), stream_buffers));
    const uint64_t align = state_.file.align(), slot = chunk % stream_buffers;
    const uint64_t n = std::min<uint64_t>(chunk_neurons(), state_.layout.n_ff - first);
    ReadOp & op = s.ops[slot];
    op = ReadOp();
    op.file = &state_.file;
    op.offset = chunk_offset(chunk);
    op.needed = state_.bundle_offset(uint32_t(first)) + n * state_.layout.stride - op.offset;
    op.n_segments = 1;
    op.segments = &s.segments[slot];
    op.tag = chunk;
    op.segments[0] = { s.staging.data() + slot * piece, size_t(round_up(op.needed, align)) };
    state_.counters.bytes_read += op.segments[0].iov_len;
    state_.counters.requests += 1;
    s.arrived[slot] = false;
    s.reader->submit(&op);
    ++chunks_;
}

void FfnRun::reap_chunks() {
    Session & s = session();
    ReadOp * done[stream_buffers];
    const size_t n = s.reader->wait(done, stream_buffers);
    chunks_ -= uint32_t(n);
    for (size_t i = 0; i < n; ++i) {
        const ReadOp & op = *done[i];
        s.arrived[op.tag % stream_buffers] = true;
        if (op.error != 0) {
            fail({ Code::io, "cannot read layer " + std::to_string(state_.layout.layer) + " at neuron " +
                                 std::to_string(op.tag * chunk_neurons()) + ", byte " +
                                 std::to_string(op.offset + op.got) + " of '" + state_.file.label() +
                                 "': " + read_error(op.error) });
        }
    }
}

// True when the chunk's bundles are there. After an error, leaves no read in flight.
bool FfnRun::await_chunk(uint32_t chunk) {
    const Clock::time_point t = Clock::now();
    while (chunks_ > 0 && (failed() || !session().arrived[chunk % stream_buffers])) {
        reap_chunks();
    }
    io_ns_ += since(t);
    return !failed();
}

// Points selection[first, end), which lies in chunk, at its bundles, and keeps as many as free slots take.
void FfnRun::admit(uint32_t chunk, uint32_t first, uint32_t end) {
    Session & s = session();
    const Clock::time_point t = Clock::now();
    const uint8_t * piece = s.staging.data() + (chunk % stream_buffers) * op_.model_->stream_piece();
    const uint64_t start = chunk_offset(chunk);
    s.items.clear();
    for (uint32_t i = first; i < end; ++i) {
        const uint32_t neuron = s.selection[i].neuron;
        s.rows[i] = piece + (state_.bundle_offset(neuron) - start);
        if (state_.cache.slot(neuron) == NeuronCache::none && state_.cache.has_free_slot()) {
            const int32_t slot = state_.cache.acquire(s.selection[i]);
            std::memcpy(state_.slot_data(slot) + state_.lead(neuron), s.rows[i], state_.layout.stride);
        }
        s.items.push_back(i);
    }
    offer_items(end - first);
    mem_ns_ += since(t);
}

} // namespace gguf_flash
