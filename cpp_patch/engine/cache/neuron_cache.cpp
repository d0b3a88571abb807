#include "gguf_flash/neuron_cache.h"

#include <algorithm>

namespace gguf_flash {

NeuronCache::NeuronCache(uint32_t n_neurons, uint32_t n_slots, Policy policy, uint32_t window)
    : n_slots_(n_slots), policy_(policy), window_(window), slot_of_(n_neurons, none), slots_(n_slots) {
    free_.reserve(n_slots);
    released_.reserve(n_neurons);
    order_.reserve(n_slots);
    for (uint32_t i = n_slots; i-- > 0;) {
        free_.push_back(int32_t(i)); // slot 0 is taken first
    }
}

void NeuronCache::begin(uint32_t n_tokens) {
    tick_tokens_ = n_tokens;
    released_.clear();
}

void NeuronCache::touch(Selected s) {
    const int32_t slot = slot_of_[s.neuron];
    unlink(slot);
    slots_[slot].last = tokens_before_ + 1 + s.token;
    slots_[slot].released = false;
    append(slot);
}

int32_t NeuronCache::acquire(Selected s) {
    return take_slot() == none ? none : put(s.neuron, tokens_before_ + 1 + s.token);
}

void NeuronCache::keep(uint32_t neuron) {
    const int32_t slot = slot_of_[neuron];
    unlink(slot);
    slots_[slot].last = tokens_before_;
    slots_[slot].pass = pass_;
    append(slot);
}

int32_t NeuronCache::acquire_ahead(uint32_t neuron) {
    if (free_.empty()) {
        const int32_t victim = oldest_unpinned();
        if (victim == none || slots_[victim].pass == pass_) {
            return none;
        }
        evict(victim);
    }
    const int32_t slot = put(neuron, tokens_before_);
    slots_[slot].pinned = true;
    return slot;
}

// Gives the next free slot to a neuron.
int32_t NeuronCache::put(uint32_t neuron, uint64_t last) {
    const int32_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = { neuron, none, none, last, pass_, false, false };
    slot_of_[neuron] = slot;
    append(slot);
    ++n_cached_;
    return slot;
}

int32_t NeuronCache::oldest_unpinned() const {
    int32_t slot = oldest_;
    while (slot != none && slots_[slot].pinned) {
        slot = slots_[slot].newer;
    }
    return slot;
}

// Sees to it that there is a free slot, and returns it; none if there can be none.
int32_t NeuronCache::take_slot() {
    if (free_.empty()) {
        int32_t victim = oldest_unpinned();
        victim = victim != none && slots_[victim].last <= tokens_before_ ? victim : take_released();
        if (victim == none) {
            return none;
        }
        evict(victim);
    }
    return free_.back();
}

// The slot released last, or none. Giving away what was loaded last keeps the rest for the next
// token: a scan longer than the cache would otherwise push out every neuron before its turn comes.
int32_t NeuronCache::take_released() {
    while (!released_.empty()) {
        const int32_t slot = slot_of_[released_.back()];
        released_.pop_back();
        if (slot != none && slots_[slot].released) {
            return slot;
        }
    }
    return none;
}

void NeuronCache::release(uint32_t neuron) {
    slots_[slot_of_[neuron]].released = true;
    released_.push_back(neuron);
}

void NeuronCache::drop(uint32_t neuron) {
    evict(slot_of_[neuron]);
    --evictions_;
}

void NeuronCache::end(const std::vector<Selected> & selection) {
    order_.clear();
    for (const Selected & s : selection) {
        if (slot_of_[s.neuron] != none) {
            order_.push_back(s);
        }
    }
    if (tick_tokens_ > 1) {
        std::sort(order_.begin(), order_.end(),
                  [](Selected a, Selected b) { return a.token != b.token ? a.token < b.token : a.neuron < b.neuron; });
    }
    for (const Selected & s : order_) {
        touch(s);
    }
    tokens_before_ += tick_tokens_;
    while (policy_ == Policy::window) {
        const int32_t slot = oldest_unpinned();
        if (slot == none || slots_[slot].last + window_ > tokens_before_) {
            return;
        }
        evict(slot);
    }
}

void NeuronCache::evict(int32_t slot) {
    unlink(slot);
    slot_of_[slots_[slot].neuron] = none;
    free_.push_back(slot);
    --n_cached_;
    ++evictions_;
}

void NeuronCache::unlink(int32_t slot) {
    const Slot & s = slots_[slot];
    (s.older == none ? oldest_ : slots_[s.older].newer) = s.newer;
    (s.newer == none ? newest_ : slots_[s.newer].older) = s.older;
}

void NeuronCache::append(int32_t slot) {
    slots_[slot].older = newest_;
    slots_[slot].newer = none;
    (newest_ == none ? oldest_ : slots_[newest_].newer) = slot;
    newest_ = slot;
}

} // namespace gguf_flash
