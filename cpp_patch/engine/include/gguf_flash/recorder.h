// What the FFNs of a dense model are given, and which of their neurons answer.
//
// A Recorder watches a graph through ggml's scheduler (llama_context_params.cb_eval). It knows FFNs by
// the names of their weights, not by architecture: a product with blk.N.ffn_up.weight or
// blk.N.ffn_gate.weight has the FFN's input x beside it, a product with blk.N.ffn_down.weight the
// hidden vector h after the activation. Neuron i is active if h[i] != 0.
//
// For each layer and token it keeps
//   x           n_embd IEEE halves; values beyond the range of a half become its largest (65504)
//   active      ceil(n_ff / 8) bytes, neuron i in bit i % 8 of byte i / 8, unused bits zero
//   magnitudes  n_ff codes, if asked for: see magnitude_code
//
// Of a model whose FFNs are on flash it can keep the inputs only: those of products with a resident
// gate or up matrix, and with a predictor's first, blk.N.ffn_pred_a.weight.
//
// Buffers for `tokens` tokens of a layer are allocated when the graph first computes it, and kept.
#pragma once

#include "gguf_flash/status.h"

#include <cstdint>
#include <string>
#include <vector>

struct ggml_tensor;

namespace gguf_flash {

// 0 if h is zero, else 8 log2|h| + 161 rounded and cut to 1..255: steps of an eighth of an octave, 1
// stands for 2^-20 and less, 255 for 2^11.75 and more. The code of h rises with |h|.
uint8_t magnitude_code(float h);

class Recorder {
public:
    struct Shape {
        uint32_t layer = 0; // the N of blk.N
        uint32_t n_ff = 0;
    };
    // The rows of one layer, valid until the recorder is fed or cleared.
    struct Rows {
        Shape shape;
        uint32_t tokens = 0;
        const uint16_t * x = nullptr;
        const uint8_t * active = nullptr;     // null if only inputs were asked for
        const uint8_t * magnitudes = nullptr; // null unless asked for
    };

    // label names the model in messages. Layers that are not in shapes are not watched.
    Recorder(std::string label, uint32_t n_embd, const std::vector<Shape> & shapes, uint32_t tokens, bool magnitudes,
             bool inputs_only = false);

    // A ggml_backend_sched_eval_callback whose user data is a Recorder. It runs on the thread that
    // computes the graph, and nothing else may be called meanwhile. After an error it ends the graph's
    // evaluation early and takes nothing more until clear().
    static bool on_node(ggml_tensor * node, bool ask, void * recorder);

    // Forgets all rows and the error.
    void clear();
    // ok if at least one layer was computed, and every computed one for exactly `tokens` tokens, with
    // nothing that cannot be recorded: an FFN computed twice or without an input, a value that is not
    // finite, a tensor of another shape or type, or out of reach of the CPU. Cheap.
    Status check(uint32_t tokens) const;

    // The layers that were computed since the last clear, ascending.
    std::vector<uint32_t> layers() const;
    // Fails for a layer that layers() does not list.
    Result<Rows> rows(uint32_t layer) const;
    uint32_t n_embd() const { return n_embd_; }
    // Bytes allocated for rows.
    uint64_t buffer_bytes() const;

private:
    enum class Role { none, gate, up, predictor, down };
    struct Layer {
        Shape shape;
        uint32_t inputs = 0;                 // rows of x
        uint32_t hiddens = 0;                // rows of active and magnitudes
        const ggml_tensor * input = nullptr; // x of the product under way: seen by gate or up, not yet by down
        bool gate_seen = false;
        bool up_seen = false;
        std::vector<uint16_t> x;
        std::vector<uint8_t> active;
        std::vector<uint8_t> magnitudes;
    };
    struct Watched {
        Role role = Role::none;
        Layer * layer = nullptr;
    };

    Watched watched(const ggml_tensor * node);
    Layer * find(uint32_t layer);
    const Layer * find(uint32_t layer) const;
    void take(const Watched & what, const ggml_tensor * source);
    void take_input(Layer & layer, Role role, const ggml_tensor * x);
    void take_hidden(Layer & layer, const ggml_tensor * h);
    void add_hidden(Layer & layer);
    // Hidden vectors that so many tokens of a layer have.
    uint32_t hiddens_of(uint32_t tokens) const { return inputs_only_ ? 0 : tokens; }
    bool fits(const Layer & layer, const ggml_tensor * source, uint32_t width, uint32_t used);
    void fail(const Layer & layer, const std::string & what);

    std::string label_;
    uint32_t n_embd_;
    uint32_t tokens_;
    bool magnitudes_;
    bool inputs_only_;
    std::vector<Layer> layers_; // ascending
    std::vector<float> row_;    // one row of x or h
    Status status_;
};

} // namespace gguf_flash
