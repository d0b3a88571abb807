#include "layer_state.h"

#include <cmath>
#include <cstring>

namespace gguf_flash {

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
    for (uint32_t i = 0; i < layer.n_ff; ++i) {
        if (!std::isfinite(to[i]) || to[i] < 0) {
            return { Code::corrupt, "cannot use '" + label + "': value " + std::to_string(i) + " of tensor '" +
                                        place.name + "' is " + std::to_string(to[i]) +
                                        ", a finite number, zero or more, expected; convert the model again" };
        }
    }
    return {};
}

} // namespace gguf_flash
