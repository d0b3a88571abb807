// Which neurons of one layer are in RAM, and in which slot. Holds indices only, no weights.
//
// Invariants: every slot is free or holds one neuron; a neuron is in at most one slot; never more than
// n_slots neurons are cached. A hit costs one store; what to evict is found for a whole tick at once.
// Nothing is allocated after construction. Not thread-safe: the layer's lock is held from begin() to end().
//
// A tick is one FFN call of one or more tokens:
//     begin(n_tokens); touch() every hit; acquire() every miss, release() what is computed; end().
// Between ticks, for what the next one will probably select:
//     begin_ahead(); keep() what is cached; acquire_ahead() the rest; unpin() each when it has arrived.
// Between ticks and looks ahead, with nothing pinned: resize().
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gguf_flash {

enum class Policy {
    budget, // evict the longest unused, only when room is needed
    window, // and, as in the paper, whatever none of the last k tokens selected
    score,  // evict what has had the lowest scores of late, only when room is needed
};

// A neuron some token of the tick selected; token is the last one that did, from 0.
struct Selected {
    uint32_t neuron;
    uint32_t token;
};

// A neuron changed its slot: what lies in from belongs to to.
struct SlotMove {
    int32_t from, to;
};

class NeuronCache {
public:
    static constexpr int32_t none = -1;

    // window counts tokens and matters to Policy::window only.
    NeuronCache(uint32_t n_neurons, uint32_t n_slots, Policy policy, uint32_t window);

    uint32_t n_slots() const { return n_slots_; }
    uint32_t n_cached() const { return n_slots_ - uint32_t(free_.size()); }
    uint64_t evictions() const { return evictions_; }
    // The neuron's slot, or none.
    int32_t slot(uint32_t neuron) const { return slot_of_[neuron]; }
    bool has_free_slot() const { return !free_.empty(); }

    void begin(uint32_t n_tokens);
    // Policy::score: the tick's scores, [n_tokens, n_neurons] with this stride. They count from the next
    // tick on, halving with each token. Before any, and for other policies, this does nothing.
    void rate(const float * scores, size_t stride);
    // How many slots acquire() or acquire_ahead() will be asked for. Not needed, but one search for them
    // all is faster than several.
    void expect(uint32_t n_slots);
    // Protects a cached neuron, selected by this tick, from eviction until it is released.
    void touch(Selected s) {
        Slot & slot = slots_[slot_of_[s.neuron]];
        slot.last = tokens_before_ + 1 + s.token;
        slot.released = false;
    }
    // A slot for a neuron that is not cached, protected like a touched one: a free slot, else that
    // of the longest unused neuron this tick did not select, else that of the neuron released last.
    // none when every slot is protected: compute what is there, release it, ask again.
    int32_t acquire(Selected s);
    // The neuron's weights have been used, or can be read again later in this tick: its slot may go.
    void release(uint32_t neuron);
    // Takes a release back, for a cached neuron whose weights are about to be used after all.
    void protect(uint32_t neuron) { slots_[slot_of_[neuron]].released = false; }
    // Forgets a neuron whose weights did not arrive.
    void drop(uint32_t neuron);
    // Before a tick, for neurons that it will probably select. They count as selected by the last token.
    void begin_ahead();
    void keep(uint32_t neuron) {
        Slot & slot = slots_[slot_of_[neuron]];
        slot.last = tokens_before_;
        slot.pass = pass_;
    }
    // A pinned slot for a neuron that is not cached, at the cost of none that this pass keeps or
    // acquired; none if there is no such slot.
    int32_t acquire_ahead(uint32_t neuron);
    // Pinned: a read into the slot is under way, so that it cannot be given away.
    bool pinned(uint32_t neuron) const { return slots_[slot_of_[neuron]].pinned; }
    void unpin(uint32_t neuron) {
        Slot & slot = slots_[slot_of_[neuron]];
        n_pinned_ -= slot.pinned;
        slot.pinned = false;
    }
    uint32_t n_pinned() const { return n_pinned_; }
    // Applies the window.
    void end();
    // From now on n_slots. If that is too few for what is cached, the neurons that would be evicted first
    // leave, and those in slots that go change to others: moves, whose room for n_slots() is the caller's.
    void resize(uint32_t n_slots, std::vector<SlotMove> & moves);
    // Bytes of a cache's lists: those of any number of slots, and what each slot adds. Room for a slot for
    // each neuron is reserved, but the system gives no memory for what was never used.
    static uint64_t bytes(uint32_t n_neurons, Policy policy);
    static uint64_t bytes_per_slot();

private:
    struct Slot {
        uint32_t neuron = 0;
        bool used = false;
        bool released = false; // may be given away within this tick
        bool pinned = false;
        uint64_t last = 0; // number of the token that selected it last, from 1
        uint64_t pass = 0; // the look ahead that last kept or acquired it
    };

    struct Listed {
        uint64_t worth; // see worth()
        uint32_t neuron;
    };

    void begin_evicting();
    bool may_go(const Slot & slot) const;
    uint64_t worth(const Slot & slot) const;
    void find_worst(size_t least, bool in_order);
    void list_worst(size_t most, bool in_order);
    void sift_listed(size_t most);
    bool evict_worst();
    bool evict_released();
    void evict(int32_t slot);
    int32_t put(uint32_t neuron, uint64_t last);

    uint32_t n_slots_;
    Policy policy_;
    uint32_t window_;
    uint32_t n_pinned_ = 0;
    uint64_t evictions_ = 0;
    uint64_t tokens_before_ = 0;   // tokens of all earlier ticks
    uint32_t tick_tokens_ = 0;     // tokens of this tick
    uint64_t pass_ = 0;            // looks ahead so far
    bool looking_ahead_ = false;   // between begin_ahead() and begin()
    bool all_listed_ = false;      // worst_ has every slot that may still go in this tick or look ahead
    bool lasting_ = false;         // worst_ serves further ticks
    std::vector<int32_t> slot_of_; // per neuron
    std::vector<Slot> slots_;
    std::vector<int32_t> free_;
    std::vector<uint32_t> released_; // neurons of this tick whose slots may go, last in first out
    std::vector<float> rating_;      // per neuron, for Policy::score
    std::vector<Listed> worst_;      // slots to evict next, the last one first
};

} // namespace gguf_flash
