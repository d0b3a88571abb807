#include "gguf_flash/neuron_cache.h"

#include <algorithm>
#include <cstring>

namespace gguf_flash {

namespace {

constexpr uint32_t rated_tokens = 8; // of a prompt: earlier ones count for nothing any more
constexpr float rating_limit = 1e6f; // keeps ratings finite
constexpr uint32_t sign = 1u << 31;  // of a float's bits
constexpr size_t sieve_classes = 256;
constexpr size_t listed_slots = 64; // found by one search that nobody announced
constexpr size_t lasting_ticks = 8; // that a list serves, about: it takes sorting

} // namespace

NeuronCache::NeuronCache(uint32_t n_neurons, uint32_t n_slots, Policy policy, uint32_t window)
    : n_slots_(n_slots), policy_(policy), window_(window), slot_of_(n_neurons, none) {
    slots_.reserve(n_neurons); // more slots later must not need memory
    slots_.resize(n_slots);
    free_.reserve(n_neurons);
    released_.reserve(n_neurons);
    worst_.reserve(n_neurons);
    if (policy == Policy::score) {
        rating_.resize(n_neurons);
    }
    for (uint32_t i = n_slots; i-- > 0;) {
        free_.push_back(int32_t(i)); // slot 0 is taken first
    }
}

void NeuronCache::begin(uint32_t n_tokens) {
    tick_tokens_ = n_tokens;
    looking_ahead_ = false;
    released_.clear();
    begin_evicting();
}

void NeuronCache::begin_ahead() {
    ++pass_;
    looking_ahead_ = true;
    begin_evicting();
}

void NeuronCache::begin_evicting() {
    all_listed_ = false;
    if (!lasting_) {
        worst_.clear();
    }
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

int32_t NeuronCache::acquire(Selected s) {
    const bool room = !free_.empty() || evict_worst() || evict_released();
    return room ? put(s.neuron, tokens_before_ + 1 + s.token) : none;
}

int32_t NeuronCache::acquire_ahead(uint32_t neuron) {
    if (free_.empty() && !evict_worst()) {
        return none;
    }
    const int32_t slot = put(neuron, tokens_before_);
    slots_[slot].pinned = true;
    ++n_pinned_;
    return slot;
}

// Gives the next free slot to a neuron.
int32_t NeuronCache::put(uint32_t neuron, uint64_t last) {
    const int32_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = { neuron, true, false, false, last, pass_ };
    slot_of_[neuron] = slot;
    return slot;
}

// Whether what a slot holds is needed neither by this tick nor by this look ahead.
bool NeuronCache::may_go(const Slot & slot) const {
    const bool needed = (slot.last > tokens_before_) | (looking_ahead_ & (slot.pass == pass_));
    return slot.used & !slot.pinned & !needed;
}

// What leaves first is worth least: by last use, under Policy::score by rating and then by last use.
uint64_t NeuronCache::worth(const Slot & slot) const {
    if (policy_ != Policy::score) {
        return slot.last;
    }
    uint32_t bits;
    const float rating = rating_[slot.neuron] + 0.0f; // no negative zero
    std::memcpy(&bits, &rating, sizeof(bits));
    bits = (bits & sign) != 0 ? ~bits : bits | sign; // ordered as the floats are
    return uint64_t(bits) << 32 | uint32_t(slot.last);
}

void NeuronCache::expect(uint32_t n_slots) {
    if (n_slots > free_.size() + worst_.size()) {
        find_worst(n_slots - free_.size(), false);
    }
}

// Lists slots to evict, at least so many if they may go. Where few are needed, a list by last use serves
// several ticks: whatever is used meanwhile is passed over, and everything else was used later than what
// is listed.
void NeuronCache::find_worst(size_t least, bool in_order) {
    const size_t several = least * lasting_ticks;
    lasting_ = policy_ != Policy::score && several <= n_slots_ / 4;
    list_worst(lasting_ ? several : least, lasting_ || in_order);
}

// Lists the slots to evict first, of those that may go.
void NeuronCache::list_worst(size_t most, bool in_order) {
    worst_.resize(n_slots_);
    size_t n = 0;
    for (const Slot & slot : slots_) { // without a branch, which no processor would predict
        worst_[n] = { worth(slot), slot.neuron };
        n += may_go(slot) ? 1 : 0;
    }
    worst_.resize(n);
    const auto better = [](const Listed & a, const Listed & b) {
        return a.worth != b.worth ? a.worth > b.worth : a.neuron > b.neuron;
    };
    all_listed_ = n <= most;
    if (!all_listed_) {
        sift_listed(most);
        const auto cut = worst_.end() - long(most);
        std::nth_element(worst_.begin(), cut, worst_.end(), better);
        worst_.erase(worst_.begin(), cut);
    }
    if (in_order) {
        std::sort(worst_.begin(), worst_.end(), better);
    }
}

// Drops most of what is listed beyond the worst ones, by a histogram: sorting mispredicts every other branch.
void NeuronCache::sift_listed(size_t most) {
    uint64_t low = ~uint64_t(0), high = 0;
    for (const Listed & listed : worst_) {
        low = std::min(low, listed.worth);
        high = std::max(high, listed.worth);
    }
    int shift = 0;
    while ((high - low) >> shift >= sieve_classes) {
        ++shift;
    }
    uint32_t counts[sieve_classes] = {};
    for (const Listed & listed : worst_) {
        ++counts[(listed.worth - low) >> shift];
    }
    uint64_t last = 0; // class that is needed
    for (size_t below = counts[0]; below < most; below += counts[last]) {
        ++last;
    }
    size_t n = 0;
    for (const Listed & listed : worst_) { // no branch here, either
        worst_[n] = listed;
        n += (listed.worth - low) >> shift <= last ? 1 : 0;
    }
    worst_.resize(n);
}

bool NeuronCache::evict_worst() {
    for (;;) {
        if (worst_.empty() && !all_listed_) {
            find_worst(listed_slots, true);
        }
        if (worst_.empty()) {
            return false;
        }
        const Listed listed = worst_.back();
        worst_.pop_back();
        const int32_t slot = slot_of_[listed.neuron];
        if (slot != none && worth(slots_[slot]) == listed.worth && may_go(slots_[slot])) { // else used since
            evict(slot);
            return true;
        }
    }
}

bool NeuronCache::evict_released() {
    while (!released_.empty()) {
        const int32_t slot = slot_of_[released_.back()];
        released_.pop_back();
        if (slot != none && slots_[slot].released) {
            evict(slot);
            return true;
        }
    }
    return false;
}

void NeuronCache::release(uint32_t neuron) {
    slots_[slot_of_[neuron]].released = true;
    released_.push_back(neuron);
}

void NeuronCache::drop(uint32_t neuron) {
    evict(slot_of_[neuron]);
    --evictions_;
}

void NeuronCache::end() {
    tokens_before_ += tick_tokens_;
    for (uint32_t i = 0; policy_ == Policy::window && i < n_slots_; ++i) {
        const Slot & slot = slots_[i];
        if (slot.used && !slot.pinned && slot.last + window_ <= tokens_before_) {
            evict(int32_t(i));
        }
    }
}

void NeuronCache::resize(uint32_t n_slots, std::vector<SlotMove> & moves) {
    looking_ahead_ = all_listed_ = lasting_ = false;
    moves.clear();
    worst_.clear();
    if (n_cached() > n_slots) {
        list_worst(n_cached() - n_slots, false);
        for (const Listed & listed : worst_) {
            evict(slot_of_[listed.neuron]);
        }
        worst_.clear();
    }
    int32_t to = 0;
    for (uint32_t from = n_slots; from < n_slots_; ++from) {
        if (slots_[from].used) {
            for (; slots_[to].used; ++to) {
            }
            slots_[to] = slots_[from];
            slot_of_[slots_[to].neuron] = to;
            moves.push_back({ int32_t(from), to });
        }
    }
    slots_.resize(n_slots);
    n_slots_ = n_slots;
    free_.clear();
    for (uint32_t i = n_slots; i-- > 0;) {
        if (!slots_[i].used) {
            free_.push_back(int32_t(i));
        }
    }
}

uint64_t NeuronCache::bytes(uint32_t n_neurons, Policy policy) {
    return n_neurons * (sizeof(int32_t) + (policy == Policy::score ? sizeof(float) : 0));
}

uint64_t NeuronCache::bytes_per_slot() {
    return sizeof(Slot) + sizeof(int32_t) + sizeof(uint32_t) + sizeof(Listed); // slots_, free_, released_, worst_
}

void NeuronCache::evict(int32_t slot) {
    slot_of_[slots_[slot].neuron] = none;
    n_pinned_ -= slots_[slot].pinned; // of a read that failed
    slots_[slot] = Slot();
    free_.push_back(slot);
    ++evictions_;
}

} // namespace gguf_flash
