#include "gguf_flash/neuron_cache.h"

#include <algorithm>

namespace gguf_flash {

namespace {

constexpr uint32_t rated_tokens = 8; // of a prompt: earlier ones count for nothing any more
constexpr float rating_limit = 1e6f; // keeps ratings finite

} // namespace

NeuronCache::NeuronCache(uint32_t n_neurons, uint32_t n_slots, Policy policy, uint32_t window)
    : n_slots_(n_slots), policy_(policy), window_(window), slot_of_(n_neurons, none), slots_(n_slots) {
    free_.reserve(n_slots);
    released_.reserve(n_neurons);
    order_.reserve(n_slots);
    if (policy == Policy::score) {
        rating_.resize(n_neurons);
        worst_.reserve(n_slots);
    }
    for (uint32_t i = n_slots; i-- > 0;) {
        free_.push_back(int32_t(i)); // slot 0 is taken first
    }
}

void NeuronCache::begin(uint32_t n_tokens) {
    tick_tokens_ = n_tokens;
    looking_ahead_ = false;
    released_.clear();
    worst_.clear();
}

void NeuronCache::begin_ahead() {
    ++pass_;
    looking_ahead_ = true;
    worst_.clear();
}

void NeuronCache::rate(const float * scores, size_t stride) {
    const uint32_t first = tick_tokens_ - std::min(tick_tokens_, rated_tokens);
    for (uint32_t t = first; t < tick_tokens_; ++t) {
        const float * row = scores + t * stride;
        for (size_t i = 0; i < rating_.size(); ++i) {
            const float score = row[i] > -rating_limit ? std::min(row[i], rating_limit) : -rating_limit; // NaN, too
            rating_[i] = 0.5f * (rating_[i] + score);
        }
    }
}

// Lists the used slots with the lowest ratings that may go: neither of this tick nor of this look ahead.
void NeuronCache::expect(uint32_t n_slots) {
    worst_.clear();
    if (rating_.empty() || n_slots <= free_.size()) {
        return;
    }
    for (int32_t slot = oldest_; slot != none; slot = slots_[slot].newer) {
        const Slot & s = slots_[slot];
        if (!s.pinned && s.last <= tokens_before_ && (s.pass != pass_ || !looking_ahead_)) {
            worst_.push_back(slot);
        }
    }
    const auto worse = [this](int32_t a, int32_t b) {
        const uint32_t x = slots_[a].neuron, y = slots_[b].neuron;
        return rating_[x] != rating_[y] ? rating_[x] < rating_[y] : x < y;
    };
    const size_t wanted = std::min(worst_.size(), n_slots - free_.size());
    std::nth_element(worst_.begin(), worst_.begin() + long(wanted), worst_.end(), worse);
    worst_.resize(wanted);
}

// A slot that expect() listed and that still may go, or none.
int32_t NeuronCache::take_worst() {
    while (!worst_.empty()) {
        const int32_t slot = worst_.back();
        const Slot & s = slots_[slot];
        worst_.pop_back();
        if (slot_of_[s.neuron] == slot && !s.pinned && s.last <= tokens_before_) {
            return slot;
        }
    }
    return none;
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
        int32_t victim = take_worst();
        victim = victim != none ? victim : oldest_unpinned();
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
        int32_t victim = take_worst();
        victim = victim != none ? victim : oldest_unpinned();
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
