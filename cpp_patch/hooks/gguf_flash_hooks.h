// What the patches call: the only door between llama.cpp and the engine.
//
//   upstream function                    hook
//   llama_model_base::load_tensors       gguf_flash_open
//   llama_model_base::create_tensor      gguf_flash_virtual_tensor
//   llama_model_base::load_tensors       gguf_flash_load
//   llm_graph_context::build_ffn         gguf_flash_build_ffn
//   llama_model_bitnet::graph            gguf_flash_build_normed_ffn
//   llama_model_gemma3n::graph           gguf_flash_build_topk_ffn
//   llama_context::graph_compute         gguf_flash_compute
//   llama_model_save_to_file             gguf_flash_refuse_save
//   llama_init_from_model                gguf_flash_new_context
//   llama_free                           gguf_flash_old_context
//   llama_context::output_reserve        gguf_flash_refuse_outputs
//
// For a file that is not a flash-GGUF and names no activation of its own, and for every file when
// GGUF_FLASH_DISABLE=1, each hook does nothing: the first returns null, which makes the others step aside.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>

namespace gguf_flash {
class Model;
}
struct gguf_flash_model;  // what the hooks keep for one llama_model
struct gguf_flash_charge; // and for one llama_context
struct llama_context;
struct llama_context_params;
struct llama_layer;
struct llama_model;
struct llama_model_loader;
struct llm_graph_context;

struct gguf_flash_model_deleter {
    void operator()(gguf_flash_model * model) const;
};
using gguf_flash_model_ptr = std::unique_ptr<gguf_flash_model, gguf_flash_model_deleter>;

// Opens the flash section if ml has one: takes bundles and predictors out of ml's list of tensors, so
// that it does not load them, and turns mmap off (a mapping of the whole file would fill RAM with
// bundles). Of a dense file it notes the activation that the key <arch>.hidden_activation or a setting
// asks for. Throws std::runtime_error, which llama.cpp reports as a failed load.
gguf_flash_model_ptr gguf_flash_open(llama_model_loader & ml, const llama_model & model);

// A tensor with the shape and type of a bundled matrix, whose data must not be touched; null if the
// matrix is not bundled. Throws std::runtime_error if the architecture expects another shape.
// A tensor that is asked for a second time (embeddings as the output matrix) is the one that is there
// already: llama.cpp would hold a copy in another order beside it, which no budget counts.
ggml_tensor * gguf_flash_virtual_tensor(gguf_flash_model * flash, const llama_model_loader & ml,
                                        const std::string & name, const std::initializer_list<int64_t> & ne, int flags);

// Reads all resident weights into the buffers that are reserved for them, and takes them out of ml's list,
// so that it does not read them again. progress, which may be null, gets the share that is done and ends
// the load with false, as does this then. Throws std::runtime_error for bytes that cannot be read.
bool gguf_flash_load(gguf_flash_model * flash, llama_model_loader & ml, bool (*progress)(float, void *),
                     void * user_data);

// The weights of one build_ffn call, any of them null.
struct gguf_flash_ffn_weights {
    ggml_tensor *up, *up_b, *up_s;
    ggml_tensor *gate, *gate_b, *gate_s;
    ggml_tensor *down, *down_b, *down_s;
    ggml_tensor * act_scales;
    ggml_tensor * norm = nullptr;                          // of an RMS norm over the hidden values
    std::function<ggml_tensor *(ggml_tensor *)> topk = {}; // what the graph does to the gate's output
};

// The FFN's output computed by the engine; that of a dense FFN if the model asks for another activation
// than type_op; else null. type_op and type_gate are llm_ffn_op_type and llm_ffn_gate_type. Throws
// std::runtime_error for an FFN that cannot be computed so.
ggml_tensor * gguf_flash_build_ffn(const llm_graph_context & graph, ggml_tensor * cur, const gguf_flash_ffn_weights & w,
                                   int type_op, int type_gate, int il);

// The same for graphs that compute the FFN of a layer themselves: BitNet's, with an RMS norm over the hidden
// values, and Gemma 3n's, which sets all but the largest values of the gate to zero by topk.
ggml_tensor * gguf_flash_build_normed_ffn(const llm_graph_context & graph, ggml_tensor * cur, const llama_layer & layer,
                                          int type_op, int il);
ggml_tensor * gguf_flash_build_topk_ffn(const llm_graph_context & graph, ggml_tensor * cur, const llama_layer & layer,
                                        int type_op, std::function<ggml_tensor *(ggml_tensor *)> topk, int il);

// From an llm_graph_input_i::set_input that cannot serve its micro-batch: this thread's next
// gguf_flash_compute, which is that micro-batch's, fails with the message instead of computing.
void gguf_flash_refuse_batch(const std::string & message);

// ggml_backend_sched_graph_compute_async, then GGML_STATUS_FAILED if the engine met an error. Refuses a
// graph that reads a virtual tensor elsewhere than in build_ffn, and a refused batch.
ggml_status gguf_flash_compute(ggml_backend_sched_t sched, ggml_cgraph * gf);

// True, with an error in the log, if the model's FFN weights are not in memory to be saved.
bool gguf_flash_refuse_save(const llama_model * model);

// Stands where a context is made, so that KV cache and buffers come out of the RAM limit. Before the first
// one of a model is there, what it will take is counted and the neuron cache gets the rest; for another one
// the cache shrinks to its least until it is known. Both throw std::runtime_error if the limit is too
// small; made() frees the context then.
class gguf_flash_new_context {
public:
    gguf_flash_new_context(llama_model & model, const llama_context_params & params);
    ~gguf_flash_new_context();
    gguf_flash_new_context(const gguf_flash_new_context &) = delete;
    gguf_flash_new_context & operator=(const gguf_flash_new_context &) = delete;
    void made(llama_context * ctx);

private:
    llama_model & model_;
    const llama_context_params & params_;
    std::shared_ptr<gguf_flash::Model> engine_; // null for other models
    std::unique_lock<std::mutex> alone_;        // contexts of a model are made one after the other
    bool pending_ = false;
};

// Stands where a context is freed, and afterwards gives what it took back to the neuron cache.
class gguf_flash_old_context {
public:
    explicit gguf_flash_old_context(const llama_context * ctx);
    ~gguf_flash_old_context();
    gguf_flash_old_context(const gguf_flash_old_context &) = delete;
    gguf_flash_old_context & operator=(const gguf_flash_old_context &) = delete;

private:
    std::shared_ptr<gguf_flash_charge> charge_; // null for other models'
};

// Before llama.cpp takes more bytes for logits than the context was charged for: shrinks the neuron cache by
// the difference. True, with an error in the log, if the RAM limit has no room for them.
bool gguf_flash_refuse_outputs(const llama_context * ctx, size_t bytes);
