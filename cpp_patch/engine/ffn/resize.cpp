// Caches of another size while other threads run FFN calls: between these, with every layer locked.
#include "layer_state.h"

#include <algorithm>
#include <cstring>

namespace gguf_flash {

// Nothing has changed when it fails.
Status Model::resize(const std::vector<uint32_t> & slots) {
    std::vector<std::unique_lock<std::mutex>> locks;
    std::vector<SlotMove> moves;
    bool same = true;
    try {
        locks.reserve(layers_.size());
        uint32_t most = 0;
        for (size_t i = 0; i < layers_.size(); ++i) { // in this order: a call tries the next layer's, never the last's
            locks.emplace_back(layers_[i]->lock);
            most = std::max(most, layers_[i]->cache.n_slots());
            same = same && layers_[i]->cache.n_slots() == slots[i];
        }
        moves.reserve(most);
    } catch (const std::bad_alloc &) {
        return without_memory("change the neuron cache of", label_);
    }
    if (same) {
        return {};
    }
    if (!grow(slots)) {
        return without_memory("enlarge the neuron cache of", label_);
    }
    settle_ahead();
    enlist_all(false); // pages that are enlisted would not go back to the system
    for (size_t i = 0; i < layers_.size(); ++i) {
        refit(*layers_[i], slots[i], moves);
    }
    ++generation_;
    enlist_all(true);
    return {};
}

// The memory of the layers that get more slots.
bool Model::grow(const std::vector<uint32_t> & slots) {
    for (size_t i = 0; i < layers_.size(); ++i) {
        LayerState & state = *layers_[i];
        if (slots[i] > state.cache.n_slots() && !state.slots.resize(slots[i] * state.slot_bytes)) {
            for (size_t k = 0; k < i; ++k) {
                layers_[k]->slots.resize(layers_[k]->cache.n_slots() * layers_[k]->slot_bytes);
            }
            return false;
        }
    }
    return true;
}

// Waits for what is read ahead for any layer, and forgets it.
void Model::settle_ahead() {
    for (const std::unique_ptr<LayerState> & state : layers_) {
        if (ahead_ != nullptr) {
            ahead_->settle(*state);
        }
        state->ahead.clear();
        for (uint32_t i = 0; state->cache.n_pinned() > 0 && i < state->layout.n_ff; ++i) {
            if (state->cache.slot(i) != NeuronCache::none && state->cache.pinned(i)) {
                state->cache.drop(i);
            }
        }
    }
}

void Model::refit(LayerState & state, uint32_t n_slots, std::vector<SlotMove> & moves) {
    if (n_slots == state.cache.n_slots()) {
        return;
    }
    state.cache.resize(n_slots, moves);
    for (const SlotMove & move : moves) {
        std::memcpy(state.slot_data(move.to), state.slot_data(move.from), state.slot_bytes);
    }
    state.slots.resize(n_slots * state.slot_bytes);
}

std::vector<iovec> Model::slot_memory() const {
    std::vector<iovec> memory;
    for (const std::unique_ptr<LayerState> & layer : layers_) {
        memory.push_back({ layer->slots.data(), layer->slots.bytes() });
    }
    return memory;
}

// Tells the readers that nobody uses where the slots are, or that they are nowhere. Where there is no
// memory to tell, they read the longer way.
void Model::enlist_all(bool slots) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
        const std::vector<iovec> memory = slots ? slot_memory() : std::vector<iovec>();
        if (ahead_ != nullptr) {
            ahead_->enlist(files_, memory);
        }
        for (const std::unique_ptr<Session> & session : sessions_) {
            if (session->enlists && session->pid == getpid()) {
                session->reader->enlist(files_, memory);
                session->known = slots ? generation_.load() : 0;
            }
        }
    } catch (const std::bad_alloc &) {
    }
}

void Model::renew(Session & session) const {
    if (session.enlists && session.known != generation_) {
        session.reader->enlist(files_, slot_memory());
        session.known = generation_;
    }
}

} // namespace gguf_flash
