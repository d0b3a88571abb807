// Contexts: what each takes comes out of the RAM that the neuron cache may have.
#include "flash_model.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"
#include "llama-model.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <new>

// What a context was charged; its address is the engine's key.
struct gguf_flash_charge {
    std::shared_ptr<gguf_flash::Model> engine;
    gguf_flash::ContextMemory memory;
    uint64_t outputs; // bytes for logits, of memory.compute
};

namespace {

using gguf_flash::ContextMemory;

// Of llama.cpp's lists, about: for each node of a graph beside its tensor, for each token of the context
// (its cell in the KV cache and its place in the set of used ones) and of a batch.
constexpr uint64_t node_bytes = 400, cell_bytes = 160, batch_token_bytes = 256;
constexpr uint64_t graph_results = 3; // one reserved, two that take turns
constexpr int most_backends = 16;     // of a scheduler

std::mutex charges_mutex;
std::map<const llama_context *, std::shared_ptr<gguf_flash_charge>> charges;

std::shared_ptr<gguf_flash_charge> charge_of(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(charges_mutex);
    const auto found = charges.find(ctx);
    return found == charges.end() ? nullptr : found->second;
}

// As llama_context::output_reserve counts them. Where nobody said how many rows there will be, the first
// decode that wants more than one for each sequence charges them.
uint64_t output_bytes(const llama_context & ctx, const llama_context_params & params) {
    const llama_model & model = ctx.get_model();
    const llama_cparams & c = ctx.get_cparams();
    const bool both = c.embeddings || model.arch == LLM_ARCH_T5;
    const uint64_t rows = std::max(params.n_outputs_max == 0 ? 0 : c.n_outputs_max, c.n_seq_max);
    return rows * (model.vocab.n_tokens() + (both ? model.hparams.n_embd_out() : 0)) * sizeof(float);
}

// Bytes of the buffers of the largest graph, and of the memory its operations work in. simulated: the
// scheduler has none, since the model says no_alloc.
uint64_t compute_bytes(llama_context & ctx, bool simulated, int threads) {
    const llama_cparams & c = ctx.get_cparams();
    const uint32_t n_tokens = std::min(c.n_ctx, c.n_ubatch);
    llama_memory_context_ptr memory = ctx.get_memory() != nullptr ? ctx.get_memory()->init_full() : nullptr;
    size_t sizes[most_backends] = {};
    ggml_cgraph * gf = ctx.graph_reserve(n_tokens, c.n_seq_max, std::min(n_tokens, c.n_outputs_max), memory.get(), true,
                                         simulated ? sizes : nullptr);
    uint64_t bytes = ggml_graph_plan(gf, threads, nullptr).work_size;
    ggml_backend_sched_t sched = ctx.get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        bytes +=
            simulated ? sizes[i] : ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));
    }
    return bytes;
}

ContextMemory measure(llama_context & ctx, const llama_context_params & params, bool simulated) {
    const llama_cparams & c = ctx.get_cparams();
    const llama_model & model = ctx.get_model();
    ContextMemory memory;
    memory.n_tokens = std::max<uint32_t>(1, std::min(c.n_ctx, c.n_ubatch));
    memory.threads = uint32_t(std::max({ 1, int(c.n_threads), int(c.n_threads_batch) }));
    if (ctx.get_memory() != nullptr) {
        for (const auto & [type, bytes] : ctx.get_memory()->memory_breakdown()) {
            memory.kv += bytes;
        }
    }
    memory.compute = compute_bytes(ctx, simulated, int(memory.threads)) + output_bytes(ctx, params);
    const uint64_t nodes = ctx.graph_max_nodes(memory.n_tokens);
    memory.rest = graph_results * (nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false)) +
                  nodes * node_bytes + uint64_t(c.n_ctx) * cell_bytes + uint64_t(c.n_batch) * batch_token_bytes +
                  model.vocab.n_tokens() * (sizeof(llama_token) + sizeof(llama_token_data));
    return memory;
}

// What a context will take, from one whose buffers are only counted. Nobody else may use the model.
ContextMemory foresee(llama_model & model, const llama_context_params & params) {
    struct Counting {
        explicit Counting(llama_hparams & h) : hparams(h) { hparams.no_alloc = true; }
        ~Counting() { hparams.no_alloc = false; }
        llama_hparams & hparams;
    } counting(model.hparams);
    LLAMA_LOG_INFO("gguf_flash: counting what the context will take; buffers of these sizes follow\n");
    llama_context_params counted = params;
    counted.samplers = nullptr; // a chain can be prepared for one context only
    counted.n_samplers = 0;
    llama_context probe(model, counted);
    return measure(probe, params, true);
}

void or_refuse(const gguf_flash::Status & status) {
    if (!status.ok()) {
        flash_refuse(status);
    }
}

} // namespace

gguf_flash_new_context::gguf_flash_new_context(llama_model & model, const llama_context_params & params)
    : model_(model), params_(params), engine_(gguf_flash::attached(&model)) {
    if (engine_ == nullptr || model.hparams.vocab_only) {
        engine_ = nullptr;
        return;
    }
    gguf_flash::set_load_error({});
    alone_ = std::unique_lock<std::mutex>(engine_->making_context());
    const flash_model * flash = flash_model_by(&model);
    uint64_t weights = flash->own_bytes();
    for (const auto & [type, bytes] : model.memory_breakdown()) {
        weights += bytes;
    }
    or_refuse(engine_->set_host_memory(weights, flash->vocabulary_bytes));
    if (model.hparams.no_alloc) {
        return;
    }
    if (engine_->n_contexts() == 0) {
        or_refuse(engine_->charge(&model, foresee(model, params)));
    } else {
        or_refuse(engine_->make_room());
    }
    pending_ = true;
}

gguf_flash_new_context::~gguf_flash_new_context() {
    if (pending_) { // it was not made
        engine_->discharge(&model_);
    }
}

void gguf_flash_new_context::made(llama_context * ctx) {
    if (engine_ == nullptr) {
        return;
    }
    std::unique_ptr<llama_context, void (*)(llama_context *)> unless_refused(ctx, llama_free);
    auto charge = std::make_shared<gguf_flash_charge>();
    *charge = { engine_, measure(*ctx, params_, model_.hparams.no_alloc), output_bytes(*ctx, params_) };
    or_refuse(engine_->charge(charge.get(), charge->memory, &model_));
    pending_ = false;
    try {
        std::lock_guard<std::mutex> lock(charges_mutex);
        charges[ctx] = charge;
    } catch (const std::bad_alloc &) {
        engine_->discharge(charge.get());
        throw;
    }
    unless_refused.release();
}

gguf_flash_old_context::gguf_flash_old_context(const llama_context * ctx) : charge_(charge_of(ctx)) {
    std::lock_guard<std::mutex> lock(charges_mutex);
    charges.erase(ctx);
}

gguf_flash_old_context::~gguf_flash_old_context() {
    if (charge_ != nullptr) {
        charge_->engine->discharge(charge_.get());
    }
}

bool gguf_flash_refuse_outputs(const llama_context * ctx, size_t bytes) {
    const std::shared_ptr<gguf_flash_charge> charge = charge_of(ctx);
    if (charge == nullptr || bytes <= charge->outputs) {
        return false;
    }
    ContextMemory memory = charge->memory;
    memory.compute += bytes - charge->outputs;
    const gguf_flash::Status status = charge->engine->charge(charge.get(), memory);
    if (!status.ok()) {
        gguf_flash::set_decode_error(status);
        LLAMA_LOG_ERROR("gguf_flash: %s\n", status.message().c_str());
        return true;
    }
    charge->memory = memory;
    charge->outputs = bytes;
    return false;
}
