// Architectures that upstream does not have, one source file each. Included by llama-model.cpp, which
// creates them (patches 0006 and 0007); the classes follow upstream's src/models/models.h.
#pragma once

#include "llama-graph.h"
#include "llama-model.h"

// OPT (125M to 66B): learned positions, LayerNorm before each half of a layer, or after it (350M),
// and embeddings that may be narrower than the layers (350M), with a projection on either side.
struct llama_model_opt : public llama_model_base {
    llama_model_opt(const llama_model_params & params) : llama_model_base(params) {}
    void load_arch_hparams(llama_model_loader & ml) override;
    void load_arch_tensors(llama_model_loader & ml) override;
    std::unique_ptr<llm_graph_context> build_arch_graph(const llm_graph_params & params) const override;

    ggml_tensor * project_in = nullptr;  // embeddings to layers, "fc"; null when the widths are the same
    ggml_tensor * project_out = nullptr; // layers to embeddings, "dense_2"
};

// Persimmon (8B): LayerNorm before each half of a layer and, unless the checkpoint has none, of each
// head's query and key; RoPE on the first part of a head; squared ReLU.
struct llama_model_persimmon : public llama_model_base {
    llama_model_persimmon(const llama_model_params & params) : llama_model_base(params) {}
    void load_arch_hparams(llama_model_loader & ml) override;
    void load_arch_tensors(llama_model_loader & ml) override;
    std::unique_ptr<llm_graph_context> build_arch_graph(const llm_graph_params & params) const override;
};
