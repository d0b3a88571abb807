// Private to hooks/.
#pragma once

#include "gguf_flash_hooks.h"

#include "ggml-cpp.h"
#include "gguf_flash/model.h"

#include <functional>
#include <map>
#include <vector>

// Owned by llama_model::impl.
struct gguf_flash_model {
    virtual ~gguf_flash_model() = default;
    // See gguf_flash_virtual_tensor.
    virtual ggml_tensor * virtual_tensor(const std::string & name, const std::initializer_list<int64_t> & ne) = 0;
    // The tensor of that name which ml has made, or null.
    virtual ggml_tensor * shared_tensor(const llama_model_loader &, const std::string &) { return nullptr; }
    // See gguf_flash_load.
    virtual bool load(llama_model_loader &, const std::function<bool(float)> &) { return true; }
};

// The weights of one layer's predictor, in RAM.
struct flash_predictor {
    ggml_tensor *a, *b, *bias;
};

// A model whose FFN weights are on flash. Virtual tensors point at address space that is reserved and
// never readable: the scheduler sees weights that have a buffer, and a stray access faults at once.
struct flash_model : gguf_flash_model {
    flash_model(const llama_model & owner, std::shared_ptr<gguf_flash::Model> engine, bool chosen);
    ~flash_model() override;

    ggml_tensor * virtual_tensor(const std::string & name, const std::initializer_list<int64_t> & ne) override;
    ggml_tensor * shared_tensor(const llama_model_loader & ml, const std::string & name) override;
    bool load(llama_model_loader & ml, const std::function<bool(float)> & progress) override;
    // Makes the tensors that llama.cpp does not know: predictors, the gates of fused files.
    void make_own_tensors(bool no_alloc);

    // Bytes of these tensors.
    uint64_t own_bytes() const;

    const llama_model * owner;
    uint64_t vocabulary_bytes = 0; // of the tokenizer's tables, about
    std::shared_ptr<gguf_flash::Model> engine;
    bool activation_chosen;                  // by the model or the user, not by the converter's table
    std::vector<flash_predictor> predictors; // one per bundled layer, or none
    std::vector<ggml_tensor *> gates;        // of a fused file in gate mode: one per bundled layer

private:
    struct expected_shape;
    bool expected(const std::string & name, expected_shape & shape) const;
    void reserve_own_tensors(bool no_alloc);

    void * reserved = nullptr;
    size_t reserved_bytes = 0;
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
    std::map<std::string, ggml_tensor *> tensors;
    ggml_context_ptr own_ctx; // predictors and gates
    ggml_backend_buffer_ptr own_buffer;
};

// Throws what llama.cpp logs as the reason of a failed load or context, and keeps the status for the
// caller of llama.cpp, which sees a null pointer only.
[[noreturn]] void flash_refuse(const gguf_flash::Status & status);

// From now on a child that this process forks may compute, too (fork.cpp).
void make_forks_safe();

// The flash model that a llama_model has, null for others.
flash_model * flash_model_by(const llama_model * owner);

// The flash model a virtual tensor belongs to, null for every other tensor. In an allocated graph a
// view of one belongs to it, too.
flash_model * flash_model_of(const ggml_tensor * tensor);

// A virtual tensor that some node of an allocated graph reads, null if there is none. Our own nodes
// read none. Looks up all sources under one lock; does nothing when no flash model is open.
const ggml_tensor * find_virtual_source(ggml_cgraph * gf);
