// Private to hooks/: activations other than the one an architecture's graph has (relufied models).
//
// A file says so with the key <arch>.hidden_activation, and flash_ffn.threshold, one value per block, for
// FATReLU: gate values up to it become zero. Unpatched llama.cpp ignores both and runs another model. A
// threshold for each neuron, in tensors, it refuses.
#pragma once

#include "gguf_flash/model.h"
#include "gguf_flash_hooks.h"

// What an llm_ffn_op_type computes; Activation::from_graph for one the engine does not have.
gguf_flash::Activation activation_of(int type_op);

// Whether an llm_ffn_op_type takes one tensor: the gate's rows, then up's.
bool is_fused(int type_op);

// Why the FFN of layer il is not of the form down(act(gate) * up) that both the engine and dense_ffn
// compute; empty if it is.
std::string unsupported_form(const llm_graph_context & graph, const gguf_flash_ffn_weights & w, int type_op,
                             int type_gate, int il);

// Notes the activation that a dense file or the settings ask for; null if neither does.
gguf_flash_model_ptr dense_activation(llama_model_loader & ml, const llama_model & model,
                                      const gguf_flash::Settings & settings);

// The dense FFN with the activation noted for graph's model; null if there is none or it is the graph's own.
ggml_tensor * dense_ffn(const llm_graph_context & graph, ggml_tensor * cur, const gguf_flash_ffn_weights & w,
                        int type_op, int type_gate, int il);
