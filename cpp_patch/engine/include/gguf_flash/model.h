// A flash-GGUF opened for running: its layout, its files, and per layer a neuron cache under one
// byte budget. Shared by all contexts of a model; every method may be called from any thread.
#pragma once

#include "gguf_flash/layout.h"
#include "gguf_flash/neuron_cache.h"
#include "gguf_flash/reader.h"
#include "gguf_flash/resident.h"

#include <atomic>
#include <map>
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
    uint64_t ram_bytes = 0; // for all of MemoryParts; 0 with ram_share 0: automatic
    double ram_share = 0;   // or: what it needs in any case, and this share of the bundles
    bool watch = false;     // give cache back while the system is short of memory
    uint32_t window = 5;    // tokens, for Policy::window
    Policy policy = Policy::budget;
    ReaderKind reader = ReaderKind::automatic;
    int depth = 0;           // reads in flight; 0: all that a layer misses in a ring, some threads in a pool
    bool lookahead = true;   // read the next layer's neurons before its call, where its predictor can tell
    uint64_t gap = 12 << 10; // bytes between two bundles that are read through to save a request
    Prefill prefill = Prefill::automatic;
    Activation activation = Activation::from_graph; // overrides the file's
    std::string faults;                             // FaultPlan text, for tests
    // Override the file's, of the activation and of the predictor: one for all layers or one for each.
    std::vector<float> threshold, predictor_threshold;

    // name is "ram" ("200MiB", "60%", plain bytes), "watch" ("on", "off"), "window", "policy", "reader",
    // "depth", "prefill", "threshold" or "predictor_threshold" ("0.5" or "0.4,0.5,..."), "activation" or
    // "faults". An unknown name or value is Code::argument.
    Status set(const std::string & name, const std::string & value);
    // Takes every GGUF_FLASH_<NAME> that is set and not empty.
    Status set_from_environment();
    static const std::vector<std::string> & names();
    // Of a pool of readers.
    int threads() const { return depth != 0 ? depth : pool_depth; }
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
    uint64_t read_bytes = 0; // of a bundle with the sectors it lies in
    uint64_t slot_bytes = 0; // of RAM for one, with what the engine notes of it
    Counters counters;
};

// What ram is for: all that a process holds for the model, in bytes.
struct MemoryParts {
    uint64_t weights = 0;                   // resident ones, predictors among them
    uint64_t vocabulary = 0;                // the tokenizer's tables, about
    uint64_t engine = 0;                    // lists, rings, and the buffers of running calls
    uint64_t kv = 0, compute = 0, rest = 0; // of all contexts: KV cache; graph buffers and logits; what else they keep
    uint64_t least = 0;                     // the smallest neuron cache
    uint64_t cache = 0;                     // the neuron cache as it is

    uint64_t without_cache() const { return weights + vocabulary + engine + kv + compute + rest; }
    uint64_t floor() const { return without_cache() + least; } // less than this cannot run
    uint64_t total() const { return without_cache() + cache; }
};

// What one context of llama.cpp takes, in bytes, and what its calls bring with them.
struct ContextMemory {
    uint64_t kv = 0, compute = 0, rest = 0;
    uint32_t n_tokens = 1, threads = 1; // of a micro-batch
};

struct Stats {
    Counters total; // tokens: of the busiest layer; all else: sums
    std::vector<LayerStats> layers;
    std::string reader;     // for example "io_uring, direct"
    uint64_t ram_bytes = 0; // the budget
    MemoryParts memory;
    uint64_t resident_bytes = 0, cache_bytes = 0; // the file's resident tensors; the engine's own and the cache
};

// Whom a model is opened for.
enum class Opening {
    sizes,    // for who asks how much it would need: nothing is reserved
    alone,    // for its own calls: with all the cache that the budget gives
    contexts, // for contexts of llama.cpp: with the smallest cache until the first is charged
};

class Ahead;
class Pages;
class Session;
class Watcher;
struct LayerState;

class Model {
public:
    // Opens paths (one file, or a split set in order). Code::ram_too_small when the budget holds no
    // working cache.
    static Result<std::shared_ptr<Model>> open(const std::vector<std::string> & paths, const std::string & label,
                                               const Settings & settings, Opening opening = Opening::alone);
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

    // The budget. All of these wait for the FFN calls under way, none changes what calls compute. Where
    // one gives Code::ram_too_small, everything is as it was before.
    //
    // Another budget from now on, in the words of the setting ram.
    Status set_ram(const std::string & value);
    // The budget less what others need, for now (see Watcher); what cannot be given back stays.
    Status yield(uint64_t bytes);
    // The budget, and of it what cannot be given back.
    std::pair<uint64_t, uint64_t> budget_and_floor() const;
    // What llama.cpp holds for the model itself: tensors and tokenizer. weights 0: what the file says.
    Status set_host_memory(uint64_t weights, uint64_t vocabulary);
    // Takes what a context needs out of the cache's share; key is whatever names it. replaced: the key
    // under which it was charged before, if not its own.
    Status charge(const void * key, const ContextMemory & memory, const void * replaced = nullptr);
    void discharge(const void * key);
    size_t n_contexts() const;
    // Leaves the smallest cache, for a context whose needs nobody knows yet, until it is charged or, if it
    // was not made, discharged.
    Status make_room();
    // Code::ram_too_small with the sentence that a run would end with; for Opening::sizes.
    Status check_ram() const;
    // Held by the hooks while they make a context.
    std::mutex & making_context() { return making_context_; }

    // Why the last decode failed, for callers that see only "decode failed"; taken once.
    void set_last_error(const Status & status);
    Status take_last_error();

    // read_resident from this model's files; needs a model that was opened with a cache.
    Result<bool> load_resident(const std::vector<Resident> & tensors, const ResidentLoaded & loaded) const;

    // For FfnOp: a layer's state, and the loan of a reader with scratch memory, which renew() tells of the
    // slots as they are once the layer's lock is held.
    LayerState & layer(int index) { return *layers_[size_t(index)]; }
    Ahead * ahead() { return ahead_.get(); } // null if nothing is read ahead
    const File & file(uint32_t index) const { return *files_[index]; }
    // Bytes of one buffer for reading a layer in sequence: a chunk, and the sectors it begins and ends in.
    uint64_t stream_piece() const { return stream_piece_; }
    Result<std::unique_ptr<Session>> borrow();
    void renew(Session & session) const;
    void give_back(std::unique_ptr<Session> session);

private:
    Model();
    static Result<std::shared_ptr<Model>> load(const std::vector<std::string> & paths, const std::string & label,
                                               const Settings & settings, Opening opening);
    Status override_thresholds();
    Status prepare();
    Status open_files();
    Status allocate();
    Status allocate(size_t index, uint32_t n_slots);
    Status prepare_ahead();

    // budget.cpp and resize.cpp, with budget_mutex_ held
    void choose(const Settings & settings);
    MemoryParts needs() const;
    uint64_t wanted(const MemoryParts & parts) const;
    uint64_t automatic_ram(uint64_t held) const;
    uint64_t cache_bytes() const;
    uint64_t whole_cache() const;
    Status rebudget();
    Status fit();
    void drop_sessions();
    Status too_small(const MemoryParts & parts, uint64_t bytes) const;
    std::vector<uint32_t> slots_for(uint64_t spare) const;
    uint64_t call_bytes(uint32_t n_tokens, uint32_t threads) const;
    uint64_t fixed_bytes() const;
    Status resize(const std::vector<uint32_t> & slots);
    bool grow(const std::vector<uint32_t> & slots);
    void settle_ahead();
    void refit(LayerState & state, uint32_t n_slots, std::vector<SlotMove> & moves);
    std::vector<iovec> slot_memory() const;
    void enlist_all(bool slots);

    Layout layout_;
    Settings settings_;
    std::string label_;
    std::vector<std::shared_ptr<File>> files_;
    std::vector<std::unique_ptr<LayerState>> layers_;
    std::shared_ptr<FaultPlan> faults_;
    std::string reader_name_;
    Opening opening_ = Opening::alone;
    uint64_t stream_piece_ = 0;
    std::vector<uint64_t> slot_bytes_; // of each layer, as in LayerStats
    std::unique_ptr<Pages> trash_;
    std::unique_ptr<Ahead> ahead_; // after the layers, whose memory its reads fill

    std::mutex making_context_;
    mutable std::mutex budget_mutex_; // guards all down to contexts_; taken before any layer's lock
    uint64_t limit_ = 0;              // bytes, unless the share is above 0
    bool automatic_ = false;          // nobody chose the limit: no more of it than there is a use for
    double share_ = 0;                // of the bundles
    uint64_t yielded_ = 0;            // of the budget, to others
    bool room_ = false;               // make_room() holds
    bool had_context_ = false;
    uint64_t ram_bytes_ = 0; // the budget as it came out
    uint64_t weights_ = 0, vocabulary_ = 0;
    std::map<const void *, ContextMemory> contexts_;

    std::atomic<uint64_t> generation_{ 1 }; // of the slots' memory; changes while all layers are locked
    std::atomic<size_t> enlisted_{ 0 };     // sessions whose readers may have the slots registered
    mutable std::mutex mutex_;              // guards the two below
    std::vector<std::unique_ptr<Session>> sessions_;
    Status last_error_;
    std::unique_ptr<Watcher> watcher_; // last: it asks for all the rest
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
