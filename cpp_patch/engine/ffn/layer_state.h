// Private to ffn/: a layer's cache with its memory, and the scratch one running FFN call borrows.
#pragma once

#include "ahead.h"
#include "gguf_flash/ffn.h"

namespace gguf_flash {

// Anonymous pages, aligned for direct reads, given back on destruction. In a fork's child they are zero.
class Pages {
public:
    Pages() = default;
    ~Pages() { release(); }
    Pages(const Pages &) = delete;
    Pages & operator=(const Pages &) = delete;

    bool allocate(size_t bytes); // in place of what there was, also when it fails
    // The same in two steps: addresses for at most so many bytes, then as many of them as are in use. Those
    // that resize() takes go back to the system at once; what stays, stays where it is.
    bool reserve(size_t most);
    bool resize(size_t bytes); // changes nothing when it fails; with fewer bytes it never does
    uint8_t * data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    void give_back(size_t from, size_t end);
    void release();

    uint8_t * data_ = nullptr;
    size_t bytes_ = 0, reserved_ = 0;
};

// The Status of whatever ran out of memory.
Status without_memory(const std::string & doing);
Status without_memory(const char * doing, const std::string & label) noexcept; // where even a sentence may be too much

// A neuron that was read ahead: its bundle is in its slot, or could not be read.
struct Arrival {
    uint32_t neuron;
    bool ok;
};

// How well looking ahead into a layer foresees what is selected there.
struct Foresight {
    uint32_t ticks = 0;            // of one token
    double read = 0.0, used = 0.0; // neurons read ahead, and of these then selected; old ones fade
    bool worth_it() const;
    void learn(size_t n_read, size_t n_used);
};

// Neighbours among missing neurons that one read brings: see reads.h.
struct ReadRun {
    uint32_t first;
    uint32_t count;
};

// One layer. lock is held by a running FFN call from selection to the end of its tick, and by a call of
// the layer before while it looks ahead.
struct LayerState {
    LayerState(const LayerLayout & layout, const File & file, uint32_t n_slots, const Settings & settings);

    // Bytes of a slot: the stride when bundles lie on the device's alignment, else room for sectors around.
    static uint64_t slot_bytes_for(const LayerLayout & layout, uint64_t align);

    uint64_t bundle_offset(uint32_t neuron) const { return layout.offset + uint64_t(neuron) * layout.stride; }
    // Where a neuron's bundle starts inside its slot: direct reads begin at the sector below it.
    uint64_t lead(uint32_t neuron) const { return aligned ? 0 : bundle_offset(neuron) % file.align(); }
    uint8_t * slot_data(int32_t slot) const { return slots.data() + uint64_t(slot) * slot_bytes; }
    const uint8_t * bundle(uint32_t neuron) const { return slot_data(cache.slot(neuron)) + lead(neuron); }

    // Empties the cache. Allocates nothing.
    void forget() {
        for (uint32_t i = 0; i < layout.n_ff; ++i) {
            if (cache.slot(i) != NeuronCache::none) {
                cache.drop(i);
            }
        }
    }

    float threshold(uint32_t neuron) const { return thresholds.empty() ? layout.threshold : thresholds[neuron]; }

    const LayerLayout & layout;
    std::vector<float> thresholds; // of each neuron; empty: the layer's is for all
    const File & file;
    std::mutex lock;
    NeuronCache cache;
    uint64_t slot_bytes;
    bool aligned;                    // slots are as large as bundles: neighbours may share a read
    const bool codes;                // down rows are codes of Q8_0 blocks
    std::vector<uint8_t> down_scale; // of the codes: halves [n_ff / code_block, n_embd]
    const uint64_t gap_bytes;        // that reading through costs less than another request
    uint8_t * trash = nullptr;       // where they go: as many, shared by all reads
    Pages slots;
    Counters counters;
    uint64_t evictions_counted = 0;
    int pid = getpid(); // whose bundles the slots hold: in a fork's child they are empty

    std::vector<uint32_t> ahead;     // neurons read, or being read, for the coming tick
    std::vector<Arrival> arrived;    // guarded by Ahead's mutex, as is
    size_t reads_ahead = 0;          // how many reads are under way for the layer
    std::vector<ReadRun> runs_ahead; // scratch
    Foresight foresight;
};

constexpr uint64_t read_limit = 512 * 1024; // bytes of one merged read
constexpr uint64_t stream_limit = 2 << 20;  // bytes of one streamed read: all threads meet after each
constexpr uint32_t together_neurons = 8;    // whose products with a prompt's tokens are computed at once
constexpr int stream_buffers = 4;           // reads in flight while a layer streams

// The thresholds of each neuron of a layer that has them. Code::io, or corrupt for one that is no threshold.
Status read_thresholds(const Layout & layout, const LayerLayout & layer, const std::string & label,
                       std::vector<float> & to);

// Most neurons of a wave, so that its activations, a float for each of them and each token, stay small.
uint32_t wave_neurons(uint32_t n_tokens);

// Bytes of a streamed read of this layer, at least a bundle: the buffers together are no more than half
// a layer, so that they do not crowd a small model's cache out of its budget. Whole blocks of codes.
uint64_t stream_chunk_bytes(const LayerLayout & layout);

// What one thread needs to add a wave's codes. A block has room for all its neurons, selected or not.
struct CodeScratch {
    std::vector<uint32_t> blocks;     // of the wave, ascending
    std::vector<const int8_t *> rows; // [blocks, code_block]
    std::vector<uint32_t> place;      // per selected neuron of the wave: its place in rows
    std::vector<float> h;             // [blocks, code_block]: one token's activations
    std::vector<uint8_t> quantized;   // and their Q8_0 blocks
};

// What one running call needs beyond the layer: kept by the model between calls so that a steady
// state allocates nothing.
class Session {
public:
    explicit Session(std::unique_ptr<Reader> r) : reader(std::move(r)) {}

    std::shared_ptr<void> enlisted;    // counts it among those that may have the slots registered
    bool enlists = false;              // it may
    uint64_t known = 0;                // Model::generation() of the slots that its reader knows
    const int pid = getpid();          // a fork's child must not use its parent's ring or threads
    std::vector<uint8_t> xq[2];        // x in the dot product's type: for gate rows, for up rows
    std::vector<uint32_t> last;        // per neuron: 0, or 1 + the last token that selects it
    std::vector<uint32_t> marks;       // per neuron: some token of the call will select it, scratch
    std::vector<uint32_t> listed;      // per neuron: room for those found, scratch
    std::vector<Selected> selection;   // ascending by neuron
    std::vector<const uint8_t *> rows; // per selected neuron: its bundle
    std::vector<uint32_t> items;       // indices into selection, in the order their bundles are ready
    std::vector<uint32_t> misses;      // indices into selection
    std::vector<uint32_t> missing;     // their neurons
    std::vector<ReadRun> runs;         // of misses
    std::vector<Arrival> arrivals;     // of the layer's reads ahead, scratch
    std::vector<uint32_t> ahead;       // neurons to read ahead, scratch
    std::vector<ReadOp> ops;
    std::vector<iovec> segments;
    std::vector<float> h;                      // [n_tokens, wave]: activations of the wave under way
    std::vector<float> squares;                // [n_tokens, wave]: theirs, where a norm follows
    std::vector<std::vector<float>> expanded;  // per thread: down rows as floats
    std::vector<std::vector<uint32_t>> active; // per thread: [expand blocks, n_tokens + 1]: rows with h, last of all
    std::vector<CodeScratch> code_scratch;     // per thread
    Pages lanes;                               // floats [n_tokens, code_lanes, n_embd]: sums of down codes so far
    uint32_t wave_end = 0;                     // the wave under way ends before this selected neuron
    Pages staging;                             // stream_buffers pieces of Model::stream_piece() bytes
    bool arrived[stream_buffers] = {};         // per piece: its chunk is there

    bool streaming = false;           // this call reads the layer in sequence
    std::atomic<uint32_t> next{ 0 };  // first item nobody has taken
    std::atomic<uint32_t> ready{ 0 }; // items whose bundles are there
    std::atomic<bool> failed{ false };
    std::atomic<bool> not_a_number{ false }; // a score is none

    std::unique_ptr<Reader> reader; // last: it may still write into the memory above when it goes
};

} // namespace gguf_flash
