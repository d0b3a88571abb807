#include "gguf_flash/ffn.h"

#include "layer_state.h"

#include <cmath>
#include <cstring>

namespace gguf_flash {

Status check_thresholds(const std::string & label, const std::string & tensor, const std::vector<float> & values) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i]) || values[i] < 0) {
            return { Code::corrupt, "cannot use " + label + ": value " + std::to_string(i) + " of tensor '" + tensor +
                                        "' is " + std::to_string(values[i]) +
                                        ", a finite number, zero or more, expected; convert the model again" };
        }
    }
    return {};
}

Status read_thresholds(const Layout & layout, const LayerLayout & layer, const std::string & label,
                       std::vector<float> & to) {
    to.clear();
    if (!layer.neuron_thresholds) {
        return {};
    }
    std::vector<uint8_t> raw;
    const TensorPlace & place = *layout.tensor(threshold_name(layer.layer)); // R24 proved it is there
    const Status status = read_tensor(layout, place, raw);
    if (!status.ok()) {
        return status;
    }
    to.resize(layer.n_ff);
    std::memcpy(to.data(), raw.data(), raw.size());
    return check_thresholds("'" + label + "'", place.name, to);
}

} // namespace gguf_flash
