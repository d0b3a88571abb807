// A flash-GGUF opened for running: its layout, its files, and per layer a neuron cache under one
// byte budget. Shared by all contexts of a model; every method may be called from any thread.
#pragma once

#include "gguf_flash/layout.h"
#include "gguf_flash/neuron_cache.h"
#include "gguf_flash/reader.h"
#include "gguf_flash/resident.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gguf_flash {

enum class Prefill {
    automatic, // by the share of the layer that is missing
    select,    // read missing neurons one by one, also for long prompts
    stream,    // read whole layers in sequence whenever a call has more than one token
};

// What a user may set. One vocabulary for KV overrides (flash_ffn.<name>), environment variables
// (GGUF_FLASH_<NAME>) and Python keywords, all parsed by set().
struct Settings {
    uint64_t ram_bytes = 0; // for all weights, resident ones included; 0 with ram_share 0: automatic
    double ram_share = 0;   // or: all resident weights and this share of the bundles
    uint32_t window = 5;    // tokens, for Policy::window
    Policy policy = Policy::budget;
    ReaderKind reader = ReaderKind::automatic;
    int depth = 32;          // reads in flight
    bool lookahead = true;   // read the next layer's neurons before its call, where its predictor can tell
    uint64_t gap = 12 << 10; // bytes between two bundles that are read through to save a request
    Prefill prefill = Prefill::automatic;
    Activation activation = Activation::from_graph; // overrides the file's
    std::string faults;                             // FaultPlan text, for tests
    // Override the file's, of the activation and of the predictor: one for all layers or one for each.
    std::vector<float> threshold, predictor_threshold;

    // name is "ram" ("200MiB", "60%", plain bytes), "window", "policy", "reader", "depth", "prefill",
    // "threshold" or "predictor_threshold" ("0.5" or "0.4,0.5,..."), "activation" or "faults". An unknown
    // name or value is Code::argument.
    Status set(const std::string & name, const std::string & value);
    // Takes every GGUF_FLASH_<NAME> that is set and not empty.
    Status set_from_environment();
    static const std::vector<std::string> & names();
};

struct Counters {
    uint64_t tokens = 0;
    uint64_t selected = 0; // neurons, each counted once per tick
    uint64_t hits = 0;     // selected neurons that were cached
    uint64_t misses = 0;   // selected neurons that were not, and not streamed
    uint64_t evictions = 0;
    uint64_t ahead = 0;    // neurons whose reads began before the call
    uint64_t foreseen = 0; // of these, selected by it; they are among the misses
    uint64_t bytes_read = 0;
    uint64_t requests = 0; // reads given to the device
    uint64_t waves = 0; // parts beyond the first that a working set was cut into, for the cache or for scratch memory
    uint64_t streamed = 0;     // calls that read the layer in sequence
    uint64_t predictor_ns = 0; // scoring neurons before the FFN, by whoever gave the scores
    uint64_t io_ns = 0;        // waiting for reads with nothing else to do
    uint64_t mem_ns = 0;       // bookkeeping of selection and cache
    uint64_t compute_ns = 0;   // the rest

    void add(const Counters & other);
};

struct LayerStats {
    uint32_t layer = 0, n_ff = 0, slots = 0;
    uint64_t slot_bytes = 0;
    Counters counters;
};

struct Stats {
    Counters total; // tokens: of the busiest layer; all else: sums
    std::vector<LayerStats> layers;
    std::string reader;                                          // for example "io_uring, direct"
    uint64_t ram_bytes = 0, resident_bytes = 0, cache_bytes = 0; // the budget and its two parts
};

class Ahead;
class Pages;
class Session;
struct LayerState;

class Model {
public:
    // Opens paths (one file, or a split set in order). with_cache false: only the layout, for a
    // caller that wants sizes. Code::ram_too_small when the budget holds no working cache.
    static Result<std::shared_ptr<Model>> open(const std::vector<std::string> & paths, const std::string & label,
                                               const Settings & settings, bool with_cache = true);
    ~Model();

    const Layout & layout() const { return layout_; }
    const Settings & settings() const { return settings_; }
    const std::string & label() const { return label_; }
    // Index into layout().layers of a block, or -1.
    int index_of(uint32_t layer) const;

    // Code::io if one of the files was written to since it was opened: for the start of a decode, one look at
    // the file's size and time.
    Status check_files() const;

    Stats stats() const;
    void reset_stats();

    // Why the last decode failed, for callers that see only "decode failed"; taken once.
    void set_last_error(const Status & status);
    Status take_last_error();

    // read_resident from this model's files; needs a model that was opened with a cache.
    Result<bool> load_resident(const std::vector<Resident> & tensors, const ResidentLoaded & loaded) const;

    // For FfnOp: a layer's state, and the loan of a reader with scratch memory.
    LayerState & layer(int index) { return *layers_[size_t(index)]; }
    Ahead * ahead() { return ahead_.get(); } // null if nothing is read ahead
    const File & file(uint32_t index) const { return *files_[index]; }
    // Bytes of one buffer for reading a layer in sequence: a chunk, and the sectors it begins and ends in.
    uint64_t stream_piece() const { return stream_piece_; }
    Result<std::unique_ptr<Session>> borrow();
    void give_back(std::unique_ptr<Session> session);

private:
    Model();
    static Result<std::shared_ptr<Model>> load(const std::vector<std::string> & paths, const std::string & label,
                                               const Settings & settings, bool with_cache);
    Status override_thresholds();
    Status prepare();
    Status resolve_budget(uint64_t & spare);
    uint64_t slot_bytes(size_t index) const;
    Status allocate();
    Status prepare_ahead();
    void enlist(Reader & reader) const;

    Layout layout_;
    Settings settings_;
    std::string label_;
    std::vector<std::shared_ptr<File>> files_;
    std::vector<std::unique_ptr<LayerState>> layers_;
    std::shared_ptr<FaultPlan> faults_;
    std::string reader_name_;
    uint64_t ram_bytes_ = 0, cache_bytes_ = 0, stream_piece_ = 0;
    std::unique_ptr<Pages> trash_;
    std::unique_ptr<Ahead> ahead_; // after the layers, whose memory its reads fill

    std::atomic<size_t> enlisted_{ 0 }; // sessions whose readers have the slots registered
    mutable std::mutex mutex_;          // guards the two below
    std::vector<std::unique_ptr<Session>> sessions_;
    Status last_error_;
};

// Engines by the object that opened them (the address of a llama_model), so that Python can reach
// the one inside a model that llama.cpp loaded.
void attach(const void * owner, std::shared_ptr<Model> model);
void detach(const void * owner);
std::shared_ptr<Model> attached(const void * owner);

// Why this thread's last load or context failed, for callers that see only a null pointer.
// take_load_error() is ok when nothing failed since the last call.
void set_load_error(const Status & status);
Status take_load_error();

// Why this thread's last decode was refused before any engine ran; also for models without one.
void set_decode_error(const Status & status);
Status take_decode_error();

} // namespace gguf_flash
