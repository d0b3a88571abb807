#include "gguf_flash/model.h"

#include "gguf_flash/round.h"
#include "layer_state.h"
#include "memory.h"
#include "watch.h"

#include <algorithm>
#include <new>
#include <utility>

namespace gguf_flash {

namespace {

// Of a slot, beside its bundle and the lists of NeuronCache: those of LayerState.
constexpr uint64_t slot_lists = sizeof(Arrival) + sizeof(uint32_t) + sizeof(ReadRun);

} // namespace

// Made while there is memory, for when there is none even for a sentence.
static const Status no_memory_at_all(Code::ram_too_small,
                                     "the system has no memory left; set a smaller ram or close programs, then try "
                                     "again");

Status without_memory(const std::string & doing) {
    return { Code::ram_too_small, "cannot " + doing +
                                      ": the system has no memory left for it; set a smaller ram or close programs, "
                                      "then try again" };
}

Status without_memory(const char * doing, const std::string & label) noexcept {
    try {
        return without_memory(std::string(doing) + " '" + label + "'");
    } catch (const std::bad_alloc &) {
        return no_memory_at_all;
    }
}

void Counters::add(const Counters & o) {
    tokens += o.tokens;
    selected += o.selected;
    hits += o.hits;
    misses += o.misses;
    evictions += o.evictions;
    ahead += o.ahead;
    foreseen += o.foreseen;
    bytes_read += o.bytes_read;
    requests += o.requests;
    waves += o.waves;
    streamed += o.streamed;
    predictor_ns += o.predictor_ns;
    io_ns += o.io_ns;
    mem_ns += o.mem_ns;
    compute_ns += o.compute_ns;
}

LayerState::LayerState(const LayerLayout & l, const File & f, uint32_t n_slots, const Settings & settings)
    : layout(l), file(f), cache(l.n_ff, n_slots, settings.policy, settings.window),
      slot_bytes(slot_bytes_for(l, f.align())), aligned(slot_bytes == l.stride), codes(l.has_codes()),
      gap_bytes(settings.gap) {
    // Where a look ahead runs out of memory, what it began must still come to an end.
    arrived.reserve(l.n_ff);
    ahead.reserve(l.n_ff);
    runs_ahead.reserve(l.n_ff);
}

uint64_t LayerState::slot_bytes_for(const LayerLayout & layout, uint64_t align) {
    if (layout.stride % align == 0 && layout.offset % align == 0) {
        return layout.stride;
    }
    // A bundle may begin anywhere in its first sector.
    return round_up(layout.stride, align) + align;
}

uint64_t stream_chunk_bytes(const LayerLayout & layout) {
    const uint64_t bytes = std::min(stream_limit, layout.stride * layout.n_ff / (2 * stream_buffers));
    const uint64_t unit = layout.has_codes() ? code_block : 1, neurons = bytes / layout.stride / unit * unit;
    return std::max(neurons, unit) * layout.stride;
}

Result<std::shared_ptr<Model>> Model::open(const std::vector<std::string> & paths, const std::string & label,
                                           const Settings & settings, Opening opening) {
    try {
        return load(paths, label, settings, opening);
    } catch (const std::bad_alloc &) {
        return without_memory("open", label);
    }
}

Result<std::shared_ptr<Model>> Model::load(const std::vector<std::string> & paths, const std::string & label,
                                           const Settings & settings, Opening opening) {
    std::shared_ptr<Model> model(new Model());
    model->label_ = label;
    model->settings_ = settings;
    model->opening_ = opening;
    Result<Layout> layout = read_layout(paths, label);
    if (!layout.ok()) {
        return layout.status();
    }
    model->layout_ = std::move(layout.value());
    if (settings.activation != Activation::from_graph) {
        model->layout_.activation = settings.activation;
    }
    if (model->layout_.activation == Activation::drelu && !model->layout_.gated) {
        return Status(Code::argument, "activation drelu is one of gated FFNs, and those of '" + label +
                                          "' have no gate; set another flash_ffn.activation");
    }
    Status status = model->override_thresholds();
    status = status.ok() ? model->prepare() : status;
    if (!status.ok()) {
        return status;
    }
    return model;
}

Status Model::override_thresholds() {
    const size_t n = layout_.layers.size();
    for (const auto & [name, values] : { std::make_pair("threshold", &settings_.threshold),
                                         std::make_pair("predictor_threshold", &settings_.predictor_threshold) }) {
        if (values->size() > 1 && values->size() != n) {
            return { Code::argument, "cannot set '" + std::string(name) + "' of '" + label_ + "': one value or " +
                                         std::to_string(n) + " expected, found " + std::to_string(values->size()) };
        }
        for (size_t i = 0; !values->empty() && i < n; ++i) {
            LayerLayout & layer = layout_.layers[i];
            const float value = (*values)[values->size() == 1 ? 0 : i];
            (values == &settings_.threshold ? layer.threshold : layer.predictor_threshold) = value;
            layer.neuron_thresholds = layer.neuron_thresholds && values != &settings_.threshold;
        }
    }
    return {};
}

Status Model::open_files() {
    for (size_t i = 0; i < layout_.files.size(); ++i) {
        Result<std::shared_ptr<File>> file = File::open(layout_.files[i], layout_.labels[i]);
        if (!file.ok()) {
            return file.status();
        }
        files_.push_back(file.value());
        const Status same = file.value()->check(layout_.stamps[i]);
        if (!same.ok()) {
            return same;
        }
    }
    for (const LayerLayout & l : layout_.layers) {
        const uint64_t align = files_[l.file]->align();
        slot_bytes_.push_back(LayerState::slot_bytes_for(l, align) + NeuronCache::bytes_per_slot() + slot_lists);
        stream_piece_ =
            std::max(stream_piece_, round_up(stream_chunk_bytes(l) + 2 * align, std::max<uint64_t>(align, 4096)));
    }
    return {};
}

Status Model::prepare() {
    Status status = open_files();
    if (!status.ok()) {
        return status;
    }
    weights_ = layout_.resident_bytes();
    if (!settings_.faults.empty()) {
        Result<std::shared_ptr<FaultPlan>> plan = FaultPlan::parse(settings_.faults);
        if (!plan.ok()) {
            return plan.status();
        }
        faults_ = plan.value();
    }
    status = allocate();
    if (!status.ok() || opening_ == Opening::sizes) {
        return status;
    }
    Result<std::unique_ptr<Session>> first = borrow(); // fails here rather than at the first token
    if (!first.ok()) {
        return first.status();
    }
    reader_name_ = std::string(first.value()->reader->name()) + (files_[0]->direct() ? ", direct" : ", buffered");
    give_back(std::move(first.value()));
    status = prepare_ahead();
    if (status.ok() && opening_ == Opening::alone) {
        enlist_all(true);
    }
    if (status.ok() && settings_.watch) {
        watcher_ = std::make_unique<Watcher>(*this);
    }
    return status;
}

Status Model::allocate() {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    choose(settings_);
    const MemoryParts parts = needs();
    ram_bytes_ = wanted(parts);
    if (opening_ == Opening::alone && ram_bytes_ < parts.floor()) { // else the hooks say first what is theirs
        return too_small(parts, ram_bytes_);
    }
    trash_ = std::make_unique<Pages>();
    if (!trash_->allocate(settings_.gap)) {
        return without_memory("reserve " + mib(settings_.gap) + " for flash_ffn.gap of '" + label_ + "'");
    }
    const std::vector<uint32_t> slots = slots_for(opening_ == Opening::alone ? ram_bytes_ - parts.floor() : 0);
    for (size_t i = 0; i < slots.size(); ++i) {
        const Status status = allocate(i, opening_ == Opening::sizes ? 0 : slots[i]);
        if (!status.ok()) {
            return status;
        }
    }
    return {};
}

// A layer's state, with so many slots and room for all its neurons.
Status Model::allocate(size_t index, uint32_t n_slots) {
    const LayerLayout & l = layout_.layers[index];
    layers_.push_back(std::make_unique<LayerState>(l, *files_[l.file], n_slots, settings_));
    LayerState & state = *layers_.back();
    state.trash = trash_->data();
    if (opening_ == Opening::sizes) {
        return {};
    }
    if (!state.slots.reserve(l.n_ff * state.slot_bytes) || !state.slots.resize(n_slots * state.slot_bytes)) {
        return without_memory("reserve " + mib(n_slots * state.slot_bytes) + " for the neuron cache of layer " +
                              std::to_string(l.layer) + " of '" + label_ + "'");
    }
    if (l.has_codes()) {
        const TensorPlace & place = *layout_.tensor(down_scale_name(l.layer)); // R25 proved it is there
        const Status read = read_tensor(layout_, place, state.down_scale);
        if (!read.ok()) {
            return read;
        }
    }
    return read_thresholds(layout_, l, label_, state.thresholds);
}

Status Model::check_files() const {
    for (size_t i = 0; i < files_.size(); ++i) {
        Status status = files_[i]->check(layout_.stamps[i]);
        if (!status.ok()) {
            return status;
        }
    }
    return {};
}

int Model::index_of(uint32_t layer) const {
    const LayerLayout * found = layout_.find(layer);
    return found == nullptr ? -1 : int(found - layout_.layers.data());
}

Stats Model::stats() const {
    Stats out;
    out.reader = reader_name_;
    {
        std::lock_guard<std::mutex> lock(budget_mutex_);
        out.ram_bytes = ram_bytes_;
        out.memory = needs();
        out.memory.cache = cache_bytes();
    }
    out.resident_bytes = layout_.resident_bytes();
    uint64_t tokens = 0;
    for (size_t i = 0; i < layers_.size(); ++i) {
        const LayerState & state = *layers_[i];
        std::lock_guard<std::mutex> lock(layers_[i]->lock);
        out.layers.push_back({ state.layout.layer, state.layout.n_ff, state.cache.n_slots(), state.slot_bytes,
                               slot_bytes_[i], state.counters });
        out.total.add(state.counters);
        tokens = std::max(tokens, state.counters.tokens);
    }
    out.total.tokens = tokens;
    out.cache_bytes = out.memory.engine + out.memory.cache;
    return out;
}

void Model::reset_stats() {
    for (const std::unique_ptr<LayerState> & state : layers_) {
        std::lock_guard<std::mutex> lock(state->lock);
        state->counters = Counters();
    }
}

void Model::set_last_error(const Status & status) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_error_ = status;
}

Status Model::take_last_error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(last_error_, Status());
}

namespace {

std::mutex attached_mutex;
thread_local Status load_error;
thread_local Status decode_error;

std::map<const void *, std::weak_ptr<Model>> & attached_models() {
    static std::map<const void *, std::weak_ptr<Model>> models;
    return models;
}

} // namespace

void attach(const void * owner, std::shared_ptr<Model> model) {
    std::lock_guard<std::mutex> lock(attached_mutex);
    attached_models()[owner] = model;
}

void set_load_error(const Status & status) {
    load_error = status;
}

Status take_load_error() {
    return std::exchange(load_error, Status());
}

void set_decode_error(const Status & status) {
    decode_error = status;
}

Status take_decode_error() {
    return std::exchange(decode_error, Status());
}

void detach(const void * owner) {
    std::lock_guard<std::mutex> lock(attached_mutex);
    attached_models().erase(owner);
}

std::shared_ptr<Model> attached(const void * owner) {
    std::lock_guard<std::mutex> lock(attached_mutex);
    auto it = attached_models().find(owner);
    return it == attached_models().end() ? nullptr : it->second.lock();
}

} // namespace gguf_flash
