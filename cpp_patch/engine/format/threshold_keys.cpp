#include "threshold_keys.h"

#include "ggml.h"

#include <cmath>

namespace gguf_flash::format {

namespace {

constexpr double largest_share = 1.001; // as in R23: a share may be rounded up

Status check_number(const KeyReader & keys, const std::string & key, double below) {
    const Value * v = keys.find(key);
    if (v == nullptr) {
        return {};
    }
    if (!v->is(value_f32)) {
        return keys.missing(key, "an f32");
    }
    const double n = v->numbers[0];
    return std::isfinite(n) && n >= 0 && n < below
             ? Status()
             : keys.corrupt("'" + key + "' is no finite number of at least 0" + (below < 2 ? " and at most 1" : ""),
                            24);
}

} // namespace

Status check_sparsity_keys(const KeyReader & keys, const Layout & layout) {
    const std::string prefix = "flash_ffn.sparsity.";
    if (keys.find(prefix + "target") == nullptr) {
        return {};
    }
    Status status = check_number(keys, prefix + "target", largest_share);
    for (const char * name : { "perplexity", "dense_perplexity", "mean_kl" }) {
        status = status.ok() ? check_number(keys, prefix + name, 1e308) : status;
    }
    for (const char * name : { "criterion", "text" }) {
        const Value * v = keys.find(prefix + name);
        if (status.ok() && v != nullptr && !v->is(value_string)) {
            status = keys.missing(prefix + name, "a string");
        }
    }
    for (const char * name : { "tokens", "held_out" }) {
        uint64_t n = 0;
        status = status.ok() && keys.find(prefix + name) != nullptr ? keys.integer(prefix + name, n) : status;
    }
    std::vector<double> zeros;
    return status.ok()
             ? keys.numbers(prefix + "zeros", value_f32, { layout.layers.size(), 24, false, largest_share }, zeros)
             : status;
}

Status check_threshold_tensors(const KeyReader & keys, Layout & layout) {
    for (const TensorPlace & t : layout.resident) {
        uint64_t number = 0;
        if (!block_named(t.name, threshold_name, number)) {
            continue;
        }
        const LayerLayout * layer = layout.find(number);
        if (layer == nullptr) {
            return keys.corrupt("tensor '" + t.name + "' exists but flash_ffn.layers does not list its layer", 24);
        }
        if (t.type != GGML_TYPE_F32 || t.ne != std::vector<uint64_t>{ layer->n_ff }) {
            return keys.corrupt("tensor '" + t.name + "' does not hold " + std::to_string(layer->n_ff) + " F32 values",
                                24);
        }
        layout.layers[size_t(layer - layout.layers.data())].neuron_thresholds = true;
    }
    return {};
}

} // namespace gguf_flash::format
