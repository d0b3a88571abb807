#include "predictor_keys.h"

#include "ggml.h"

namespace gguf_flash::format {

namespace {

std::string shape_text(const std::vector<uint64_t> & ne) {
    std::string text = "{";
    for (size_t i = 0; i < ne.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(ne[i]);
    }
    return text + "}";
}

// A matrix of a type for weights, or a vector of F32.
Status check_tensor(const KeyReader & keys, const Layout & layout, const std::string & name,
                    const std::vector<uint64_t> & ne) {
    const TensorPlace * t = layout.tensor(name);
    const bool good =
        t != nullptr && t->ne == ne && (ne.size() == 1 ? t->type == GGML_TYPE_F32 : is_weight_type(t->type));
    return good ? Status()
                : keys.corrupt("predictor tensor '" + name + "' is missing, or not " +
                                   (ne.size() == 1 ? "F32 values" : "weights") + " of shape " + shape_text(ne),
                               22);
}

// What the engine has no use for must be as section 3 says all the same: readers accept the same files.
Status check_calibration_types(const KeyReader & keys, const std::string & prefix) {
    for (const char * name : { "text", "target" }) {
        const Value * v = keys.find(prefix + name);
        if (v != nullptr && !v->is(value_string)) {
            return keys.missing(prefix + name, "a string");
        }
    }
    uint64_t window = 0;
    return keys.find(prefix + "window") == nullptr ? Status() : keys.integer(prefix + "window", window);
}

} // namespace

Status read_predictor_keys(const KeyReader & keys, Layout & layout) {
    if (layout.select != Select::predictor) {
        return {};
    }
    const size_t n = layout.layers.size();
    std::vector<double> ranks, thresholds;
    Status status = keys.numbers("flash_ffn.predictor.rank", value_u32, { n, 21 }, ranks);
    status = status.ok() ? keys.numbers("flash_ffn.predictor.threshold", value_f32, { n, 21, true, 1.0 }, thresholds)
                         : status;
    for (size_t i = 0; status.ok() && i < n; ++i) {
        layout.layers[i].rank = uint32_t(ranks[i]);
        layout.layers[i].predictor_threshold = float(thresholds[i]);
        if (layout.layers[i].rank < 2) {
            return keys.corrupt("'flash_ffn.predictor.rank' holds less than 2", 21);
        }
    }
    return status;
}

Status check_predictor_tensors(const KeyReader & keys, const Layout & layout) {
    for (const LayerLayout & l : layout.layers) {
        if (l.rank == 0) {
            continue;
        }
        const PredictorNames names(l.layer);
        Status status = check_tensor(keys, layout, names.a, { layout.n_embd, l.rank });
        status = status.ok() ? check_tensor(keys, layout, names.b, { l.rank, l.n_ff }) : status;
        status = status.ok() ? check_tensor(keys, layout, names.bias, { l.n_ff }) : status;
        if (!status.ok()) {
            return status;
        }
    }
    return {};
}

Status read_calibration_keys(const KeyReader & keys, Layout & layout) {
    const std::string prefix = "flash_ffn.calibration.";
    uint64_t tokens = 0;
    if (keys.find(prefix + "tokens") == nullptr) {
        return {};
    }
    Status status = keys.integer(prefix + "tokens", tokens);
    status = status.ok() ? check_calibration_types(keys, prefix) : status;
    const size_t n = layout.layers.size();
    std::vector<double> values;
    for (const char * rate : { "active", "false_negatives", "false_positives", "selected" }) {
        status = status.ok() ? keys.numbers(prefix + rate, value_f32, { n, 23, false, 1.001 }, values) : status;
    }
    for (size_t i = 0; status.ok() && i < values.size(); ++i) {
        layout.layers[i].selected = values[i];
    }
    const Value * slots = keys.find(prefix + "miss_slots");
    const size_t points = slots == nullptr ? 0 : slots->numbers.size() / n * n;
    std::vector<double> misses;
    status = status.ok() ? keys.numbers(prefix + "miss_slots", value_u32, { points, 23, false }, values) : status;
    status = status.ok() ? keys.numbers(prefix + "miss_curve", value_f32, { points, 23, false }, misses) : status;
    for (size_t i = 0; status.ok() && i < std::min(values.size(), misses.size()); ++i) {
        layout.layers[i / (points / n)].misses.push_back({ uint32_t(values[i]), misses[i] });
    }
    status = status.ok() ? keys.numbers(prefix + "capacity", value_u32, { n, 23, false }, values) : status;
    for (size_t i = 0; status.ok() && i < values.size(); ++i) {
        layout.layers[i].capacity = uint32_t(values[i]);
    }
    return status;
}

} // namespace gguf_flash::format
