// Small flash-GGUF files with random weights, and what their FFNs must give.
#pragma once

#include "ggml.h"
#include "gguf_flash/layout.h"
#include "gguf_image.h"
#include "random_data.h"

// Select::predictor: what a layer's predictor is like, and what calibration says of it.
struct PredictorSpec {
    std::vector<uint32_t> ranks = { 32 }; // one per layer, or one for all
    ggml_type a = GGML_TYPE_F16, b = GGML_TYPE_F16;
    std::vector<float> thresholds;    // one per layer; none: 0.5, which about half of the neurons pass
    std::vector<uint32_t> capacities; // none, or one per layer
    std::vector<uint32_t> miss_slots; // with capacities: none, or as many for each layer
    std::vector<float> miss_curve;
};

struct FlashSpec {
    uint32_t n_embd = 64;
    std::vector<uint32_t> layers = { 0 };
    std::vector<uint32_t> n_ff = { 300 }; // one per layer, or one for all
    gguf_flash::Select select = gguf_flash::Select::all;
    bool gated = true;
    bool fused = false;
    ggml_type gate = GGML_TYPE_F16, up = GGML_TYPE_F16, down = GGML_TYPE_F16; // down I8: codes of Q8_0 blocks
    bool biases = false;
    std::string activation = "silu"; // "": the file does not name one
    std::vector<float> thresholds;   // none, or one per layer
    float neuron_thresholds = 0;     // not 0: each neuron has its own, up to this
    uint32_t align = 512;
    bool pad_header = true;    // bundles start on a sector
    uint32_t bytes_before = 0; // size of a tensor before the bundles, which shifts them
    uint64_t seed = 1;
    PredictorSpec predictor;
};

// What the file's weights mean: rows of n_embd floats, after quantization and back.
struct DenseLayer {
    uint32_t n_ff = 0;
    std::vector<float> gate, up, down;                // [n_ff, n_embd]; gate is empty when not gated
    std::vector<float> gate_bias, up_bias, down_bias; // empty without biases
    Bytes down_q8_0;                                  // [n_embd, n_ff]: the dense matrix behind codes
    std::vector<float> thresholds;                    // [n_ff], or empty
    std::vector<float> pred_a, pred_b, pred_bias;     // [rank, n_embd], [n_ff, rank], [n_ff]; of predictor mode
};

struct FlashFile {
    FlashSpec spec;
    GgufImage image;
    std::vector<DenseLayer> layers;

    explicit FlashFile(const FlashSpec & spec);
    std::string bundle_name(size_t index) const;

private:
    void add_keys();
    void add_layer(size_t index, Random & random);
    Bytes add_codes(DenseLayer & layer, const std::string & block, Random & random, float scale);
    void add_biases(DenseLayer & layer, const std::string & block, Random & random);
    void add_predictor_keys();
    void add_predictor(size_t index, DenseLayer & layer, const std::string & block);
    Bytes bundle(const std::vector<Bytes> & parts, uint32_t n_ff, uint64_t & stride) const;
};

// [n_tokens, n_embd], computed in double from the dequantized rows. selected is [n_tokens, n_ff], not zero
// where a neuron counts; empty: all do.
std::vector<double> reference_ffn(const FlashFile & file, size_t index, const std::vector<float> & x, uint32_t n_tokens,
                                  const std::vector<uint8_t> & selected = {});

// [n_tokens, n_ff], what the predictor says, in double.
std::vector<double> reference_scores(const FlashFile & file, size_t index, const std::vector<float> & x,
                                     uint32_t n_tokens);

// Distance of out from expected over the length of expected, the worst token.
double worst_error(const std::vector<float> & out, const std::vector<double> & expected, uint32_t n_tokens);

Bytes quantize_rows(ggml_type type, const std::vector<float> & rows, uint32_t n_embd);
std::vector<float> dequantize_rows(ggml_type type, const Bytes & rows, uint32_t n_embd);
