// How large the values are by which a dense model's neurons answer, and the model without the small ones.
//
// A Meter watches a graph through ggml's scheduler (llama_context_params.cb_eval), as a Recorder does, and
// looks at the products with the deciding matrices (blk.N.ffn_gate.weight, or ffn_up of an FFN without a
// gate, or its first half where it is fused). It counts the neurons' scores in buckets of a 64th of an
// octave, and cuts: where a neuron's activation counts as zero under its threshold (SPEC section 3), the
// product becomes what the activation makes zero. So thresholds can be chosen, and what they cost be
// measured, on any dense model, before anything is written.
//
// The score of a value v (the product and its bias) is, times the neuron's weight: |act(v)|; for the
// ReLUs, whose thresholds are of the input, max(v, 0).
#pragma once

#include "gguf_flash/layout.h"

#include <cstdint>
#include <string>
#include <vector>

struct ggml_tensor;

namespace gguf_flash {

class Meter {
public:
    struct Layer {
        uint32_t layer = 0;         // the N of blk.N
        bool gate = false;          // ffn_gate decides, else ffn_up, of which the first n_ff rows
        std::vector<float> weights; // n_ff
        std::vector<float> bias;    // n_ff, or empty
    };

    // One bucket for each value of the upper bits of a float that is not negative: no bucket is wider
    // than a 64th of the power of two below it.
    static constexpr uint32_t n_buckets = 1u << 14;
    static uint32_t bucket(float score);

    // label names the model in messages.
    Meter(std::string label, Activation activation, const std::vector<Layer> & layers);

    // A ggml_backend_sched_eval_callback whose user data is a Meter. After an error it ends the graph's
    // evaluation early and takes nothing more until clear().
    static bool on_node(ggml_tensor * node, bool ask, void * meter);

    // From now on a neuron whose threshold is not reached counts as zero; thresholds are n_ff values, or
    // none to cut nothing. Code::argument for another number or a layer that is not watched.
    Status set_thresholds(uint32_t layer, std::vector<float> thresholds);
    // Forgets all counts and the error; thresholds stay.
    void clear();
    // Why counting ended: values that are not finite, or out of the CPU's reach.
    Status check() const { return status_; }

    struct Counts {
        uint64_t values = 0;           // tokens times neurons
        uint64_t zeros = 0;            // values that are zero after the thresholds
        std::vector<uint64_t> buckets; // of scores before them
    };
    // Null for a layer that is not watched.
    const Counts * counts(uint32_t layer) const;

private:
    struct Watched {
        Layer spec;
        std::vector<float> thresholds;
        Counts counts;
    };

    Watched * find(const ggml_tensor * node);
    Watched * find(uint32_t layer);
    void take(Watched & layer, ggml_tensor * product);
    bool take_row(Watched & layer, float * row);

    std::string label_;
    Activation activation_;
    std::vector<Watched> layers_;
    Status status_;
};

} // namespace gguf_flash
