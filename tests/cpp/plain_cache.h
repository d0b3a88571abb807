// What neuron_cache.h promises, without slots, lists or speed.
#pragma once

#include "gguf_flash/neuron_cache.h"

#include <algorithm>
#include <map>
#include <vector>

class PlainCache {
public:
    PlainCache(uint32_t n_slots, gguf_flash::Policy policy, uint32_t window)
        : n_slots_(n_slots), window_(policy == gguf_flash::Policy::window ? window : UINT32_MAX) {}

    void begin(uint32_t n_tokens) {
        tick_tokens_ = n_tokens;
        released_.clear();
    }
    void touch(gguf_flash::Selected s) { last_[s.neuron] = tokens_ + 1 + s.token; }
    // False when there is no room.
    bool acquire(gguf_flash::Selected s) {
        if (last_.size() == n_slots_) {
            uint32_t victim = 0;
            if (!longest_unused(victim)) {
                if (released_.empty()) {
                    return false;
                }
                victim = released_.back();
            }
            forget(victim);
            ++evictions;
        }
        touch(s);
        return true;
    }
    void release(uint32_t neuron) {
        protect(neuron);
        released_.push_back(neuron);
    }
    void protect(uint32_t neuron) {
        released_.erase(std::remove(released_.begin(), released_.end(), neuron), released_.end());
    }
    void forget(uint32_t neuron) {
        protect(neuron);
        last_.erase(neuron);
    }
    void end() {
        tokens_ += tick_tokens_;
        for (auto it = last_.begin(); it != last_.end();) {
            const bool old = tokens_ - it->second >= window_;
            evictions += old;
            it = old ? last_.erase(it) : std::next(it);
        }
    }
    bool has(uint32_t neuron) const { return last_.count(neuron) != 0; }
    bool released(uint32_t neuron) const {
        return std::find(released_.begin(), released_.end(), neuron) != released_.end();
    }
    const std::map<uint32_t, uint64_t> & cached() const { return last_; }

    uint64_t evictions = 0;

private:
    bool longest_unused(uint32_t & victim) const {
        uint64_t oldest = tokens_ + 1;      // what this tick selected is younger or as old
        for (auto [neuron, last] : last_) { // ascending: of equals, the smaller neuron goes
            if (last < oldest) {
                oldest = last;
                victim = neuron;
            }
        }
        return oldest <= tokens_;
    }

    uint32_t n_slots_, window_, tick_tokens_ = 0;
    uint64_t tokens_ = 0;
    std::map<uint32_t, uint64_t> last_;
    std::vector<uint32_t> released_;
};
