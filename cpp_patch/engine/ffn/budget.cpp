// What the RAM limit is for, and caches of another size while a model runs.
#include "gguf_flash/kernels.h"
#include "layer_state.h"
#include "memory.h"
#include "share.h"

#include <algorithm>
#include <tuple>

namespace gguf_flash {

namespace {

// What an automatic budget leaves to everybody else.
constexpr double automatic_share = 0.75;

// Of the readers: their rings or, for pread, the stacks that their threads have touched.
constexpr uint64_t ring_bytes = 256 << 10, thread_bytes = 16 << 10;

// Of a read ahead that is under way, for each of its neurons, about.
constexpr uint64_t piece_bytes = 320;

// Of a call for each of a layer's neurons: the lists of Session, a read and its two segments.
constexpr uint64_t neuron_bytes = 15 * sizeof(uint32_t) + sizeof(uint8_t *) + sizeof(ReadOp) + 2 * sizeof(iovec);

uint32_t most_neurons(const Layout & layout) {
    uint32_t most = 0;
    for (const LayerLayout & l : layout.layers) {
        most = std::max(most, l.n_ff);
    }
    return most;
}

// Tensors that the engine keeps itself.
uint64_t own_tensor_bytes(const Layout & layout) {
    uint64_t bytes = 0;
    for (const LayerLayout & l : layout.layers) {
        bytes += l.has_codes() ? layout.tensor(down_scale_name(l.layer))->bytes : 0;
        bytes += l.neuron_thresholds ? l.n_ff * sizeof(float) : 0;
    }
    return bytes;
}

} // namespace

// Of the model, whatever its contexts.
uint64_t Model::fixed_bytes() const {
    uint64_t bytes = settings_.gap + 2 * ring_bytes;
    for (const LayerLayout & l : layout_.layers) {
        bytes += NeuronCache::bytes(l.n_ff, settings_.policy);
    }
    if (settings_.lookahead && layout_.select == Select::predictor) {
        bytes += piece_bytes * most_neurons(layout_) + thread_bytes; // and the feeder's stack
    }
    return bytes;
}

// Of one running call: a Session.
uint64_t Model::call_bytes(uint32_t n_tokens, uint32_t threads) const {
    const uint64_t n_ff = most_neurons(layout_), tokens = n_tokens;
    const uint64_t wave = std::min<uint64_t>(n_ff, wave_neurons(n_tokens));
    const bool codes =
        std::any_of(layout_.layers.begin(), layout_.layers.end(), [](const LayerLayout & l) { return l.has_codes(); });
    const uint64_t h = tokens * wave * sizeof(float);
    uint64_t bytes = stream_buffers * stream_piece_ + neuron_bytes * n_ff + ring_bytes;
    bytes += uint64_t(settings_.threads()) * (thread_bytes + settings_.gap); // where pread's threads read gaps to
    bytes += (layout_.architecture == "bitnet" ? 2 : 1) * h;                 // its norm needs their squares, too
    bytes += 2 * tokens * layout_.n_embd * sizeof(float);                    // x for gate and up, at most as floats
    bytes += threads * (uint64_t(128) << 10);                                // rows as floats
    bytes += threads * (together_neurons * tokens + dot_rows_scratch(layout_.n_embd)) * sizeof(float);
    if (codes) {
        bytes += tokens * code_lanes * layout_.n_embd * sizeof(float);
        bytes += threads * std::max<uint64_t>(n_ff, code_block) * 24; // CodeScratch
    }
    return bytes;
}

MemoryParts Model::needs() const {
    MemoryParts parts;
    parts.weights = weights_;
    parts.vocabulary = vocabulary_;
    parts.engine = fixed_bytes() + (contexts_.empty() ? call_bytes(1, 1) : 0);
    for (const auto & [key, context] : contexts_) {
        parts.kv += context.kv;
        parts.compute += context.compute;
        parts.rest += context.rest;
        parts.engine += call_bytes(context.n_tokens, context.threads);
    }
    for (size_t i = 0; i < layout_.layers.size(); ++i) {
        parts.least += slot_bytes_[i] * std::min(layout_.layers[i].n_ff, least_slots);
    }
    return parts;
}

uint64_t Model::cache_bytes() const {
    uint64_t bytes = 0;
    for (size_t i = 0; i < layers_.size(); ++i) {
        bytes += slot_bytes_[i] * layers_[i]->cache.n_slots();
    }
    return bytes;
}

uint64_t Model::whole_cache() const {
    uint64_t bytes = 0;
    for (size_t i = 0; i < layout_.layers.size(); ++i) {
        bytes += slot_bytes_[i] * layout_.layers[i].n_ff;
    }
    return bytes;
}

// Of what is free now and what we hold, the part that is ours unless somebody says otherwise.
uint64_t Model::automatic_ram(uint64_t held) const {
    return uint64_t(automatic_share * (double(available_memory()) + double(held)));
}

// The budget that the settings ask for.
uint64_t Model::wanted(const MemoryParts & parts) const {
    if (share_ > 0) {
        return parts.without_cache() + std::max(parts.least, uint64_t(share_ * double(whole_cache())));
    }
    return automatic_ ? std::min(limit_, parts.without_cache() + whole_cache()) : limit_;
}

Status Model::too_small(const MemoryParts & parts, uint64_t bytes) const {
    std::string text = "cannot run '" + label_ + "' in " + mib(bytes) + " of RAM: it needs " +
                       std::to_string(parts.floor()) + " bytes (" + mib(parts.weights) + " of resident weights, " +
                       mib(parts.vocabulary) + " for the tokenizer, " + mib(parts.engine) + " for the engine, ";
    if (!contexts_.empty()) {
        text += mib(parts.kv) + " of KV cache, " + mib(parts.compute) + " of compute buffers and logits, " +
                mib(parts.rest) + " of other buffers, ";
    }
    text += mib(parts.least) + " for the smallest neuron cache); give ";
    text += contexts_.empty() ? "" : "a smaller context or batch, or ";
    text += "at least " + std::to_string((parts.floor() >> 20) + 1) + "MiB";
    const bool more = contexts_.empty() && opening_ != Opening::alone;
    return { Code::ram_too_small, text + (more ? " and what the context takes beside it" : "") };
}

std::vector<uint32_t> Model::slots_for(uint64_t spare) const {
    return share_slots(layout_.layers, slot_bytes_, spare);
}

Status Model::rebudget() {
    try {
        return fit();
    } catch (const std::bad_alloc &) {
        return without_memory("change the neuron cache of", label_);
    }
}

// Caches as large as the budget allows.
Status Model::fit() {
    const MemoryParts parts = needs();
    const uint64_t budget = wanted(parts);
    if (opening_ == Opening::sizes) {
        ram_bytes_ = budget;
        return {};
    }
    if (budget < parts.floor()) {
        return too_small(parts, budget);
    }
    const bool waits = opening_ == Opening::contexts && !had_context_; // what the first takes is not known yet
    const uint64_t spare = budget - parts.floor();
    const Status status = resize(slots_for(room_ || waits ? 0 : spare - std::min(spare, yielded_)));
    ram_bytes_ = status.ok() ? budget : ram_bytes_;
    return status;
}

Status Model::set_ram(const std::string & value) {
    Settings asked;
    Status status = asked.set("ram", value);
    if (!status.ok()) {
        return status;
    }
    std::lock_guard<std::mutex> lock(budget_mutex_);
    const auto before = std::make_tuple(limit_, share_, automatic_);
    try {
        choose(asked);
        status = rebudget();
    } catch (const std::bad_alloc &) {
        status = without_memory("change the RAM limit of", label_);
    }
    if (!status.ok()) {
        std::tie(limit_, share_, automatic_) = before;
    }
    return status;
}

// Takes over what settings say of ram.
void Model::choose(const Settings & settings) {
    limit_ = settings.ram_bytes;
    share_ = settings.ram_share;
    automatic_ = limit_ == 0 && share_ == 0;
    if (automatic_) {
        const uint64_t held = cache_bytes();
        limit_ = automatic_ram(held == 0 ? 0 : needs().without_cache() + held);
    }
}

std::pair<uint64_t, uint64_t> Model::budget_and_floor() const {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    return { ram_bytes_, needs().floor() };
}

Status Model::yield(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    yielded_ = bytes;
    return rebudget();
}

Status Model::set_host_memory(uint64_t weights, uint64_t vocabulary) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    const uint64_t all = weights == 0 ? layout_.resident_bytes() : weights + own_tensor_bytes(layout_);
    if (all == weights_ && vocabulary == vocabulary_) {
        return {};
    }
    weights_ = all;
    vocabulary_ = vocabulary;
    return rebudget();
}

Status Model::charge(const void * key, const ContextMemory & memory, const void * replaced) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    std::map<const void *, ContextMemory> contexts;
    try {
        contexts = contexts_;
        contexts.erase(replaced);
        contexts[key] = memory;
    } catch (const std::bad_alloc &) {
        return without_memory("make a context of", label_);
    }
    contexts_.swap(contexts);
    room_ = room_ && replaced == nullptr;
    had_context_ = true;
    const Status status = rebudget();
    if (!status.ok()) {
        contexts_.swap(contexts);
    }
    return status;
}

void Model::discharge(const void * key) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    if (contexts_.erase(key) == 0) {
        room_ = false; // the context that make_room() was for was not made
    }
    drop_sessions();          // their scratch is as large as the largest context asked for
    if (!contexts_.empty()) { // else the caches stay for the next context
        rebudget();
    }
}

size_t Model::n_contexts() const {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    return contexts_.size();
}

Status Model::make_room() {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    room_ = true;
    const Status status = rebudget();
    room_ = status.ok();
    return status;
}

Status Model::check_ram() const {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    const MemoryParts parts = needs();
    const uint64_t budget = wanted(parts);
    return budget < parts.floor() ? too_small(parts, budget) : Status();
}

} // namespace gguf_flash
