// A layer's FFN without llama.cpp: what the Python package's open_model() runs.
#pragma once

#include "gguf_flash/ffn.h"

namespace gguf_flash {

class Standalone {
public:
    // Opens path (or the split set it starts) and loads what the bundles do not hold: biases, in gate
    // mode the deciding matrices, in predictor mode the predictors. These count as resident weights; the rest of the
    // file's resident weights is not loaded, but is counted in the budget as it would be under llama.cpp.
    static Result<std::shared_ptr<Standalone>> open(const std::string & path, const Settings & settings);
    ~Standalone();

    Model & model() { return *model_; }
    // out[n_tokens, n_embd] = FFN of layer (a block index) at x[n_tokens, n_embd], biases included.
    // Any number of threads may call it at the same time; each call runs on n_threads of its own.
    Status ffn(uint32_t layer, const float * x, uint32_t n_tokens, float * out, int n_threads);

    // to[n_tokens, n_ff] = what selects the neurons of layer at x: in gate mode the deciding matrix's output,
    // in predictor mode the predictor's scores; empty in mode all.
    Status scores(uint32_t layer, const float * x, uint32_t n_tokens, std::vector<float> & to, int n_threads) const;

private:
    struct Matrix;
    struct LayerWeights;
    Standalone();
    static Result<std::shared_ptr<Standalone>> load(const std::string & path, const Settings & settings);
    Status load_weights();
    Status compute(uint32_t layer, const float * x, uint32_t n_tokens, float * out, int n_threads);
    Status read_matrix(const std::string & name, Matrix & to) const;
    Status read_bias(const std::string & name, uint32_t n, std::vector<float> & to) const;
    Status find_layer(uint32_t layer, int n_threads, int & index) const;
    static void multiply(const Matrix & m, const std::vector<float> & bias, const float * x, uint32_t n_tokens,
                         float * out, int ith, int nth);

    std::shared_ptr<Model> model_;
    std::vector<LayerWeights> layers_;
};

} // namespace gguf_flash
