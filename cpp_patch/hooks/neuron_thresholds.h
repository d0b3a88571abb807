// Private to hooks/: a threshold for each neuron in a dense file, the tensors blk.N.ffn_threshold.
#pragma once

#include "ggml-cpp.h"

#include <map>

struct llama_model_loader;

struct neuron_thresholds {
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
    std::map<unsigned, ggml_tensor *> of_block; // {n_ff} of F32
};

// Takes the tensors out of the load, which knows none of them, and reads them unless keep is false or
// memory is only estimated.
neuron_thresholds take_neuron_thresholds(llama_model_loader & ml, bool keep);
