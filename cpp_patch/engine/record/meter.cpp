#include "gguf_flash/meter.h"

#include "block_name.h"
#include "node_rows.h"

#include "ggml.h"
#include "gguf_flash/ffn.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace gguf_flash {

uint32_t Meter::bucket(float score) {
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof(bits));
    return bits >> 17;
}

Meter::Meter(std::string label, Activation activation, const std::vector<Layer> & layers)
    : label_(std::move(label)), activation_(activation) {
    for (const Layer & layer : layers) {
        layers_.push_back({ layer, {}, {} });
    }
    clear();
}

Meter::Watched * Meter::find(uint32_t layer) {
    const auto at =
        std::find_if(layers_.begin(), layers_.end(), [&](const Watched & w) { return w.spec.layer == layer; });
    return at == layers_.end() ? nullptr : &*at;
}

Meter::Watched * Meter::find(const ggml_tensor * node) {
    uint32_t number = 0;
    const char * rest = nullptr;
    if (node->op != GGML_OP_MUL_MAT || !split_name(node->src[0]->name, number, rest)) {
        return nullptr;
    }
    Watched * layer = find(number);
    const bool decides =
        layer != nullptr && std::strcmp(rest, layer->spec.gate ? "ffn_gate.weight" : "ffn_up.weight") == 0;
    return decides ? layer : nullptr;
}

bool Meter::on_node(ggml_tensor * node, bool ask, void * meter) {
    Meter & self = *static_cast<Meter *>(meter);
    Watched * layer = self.find(node);
    if (layer == nullptr) {
        return !ask;
    }
    if (!ask && self.status_.ok()) {
        self.take(*layer, node);
    }
    return self.status_.ok();
}

void Meter::take(Watched & layer, ggml_tensor * product) {
    const std::string where =
        "cannot measure the FFN of layer " + std::to_string(layer.spec.layer) + " of '" + label_ + "': ";
    if (product->type != GGML_TYPE_F32 || !node_rows::readable(product) || product->nb[0] != sizeof(float) ||
        product->ne[0] < int64_t(layer.spec.weights.size())) {
        status_ = { Code::unsupported, where + "rows of F32 values in the CPU's memory expected, but its graph has a "
                                               "form of its own, or runs on another device; run it on the CPU, or give "
                                               "thresholds instead of a target" };
        return;
    }
    for (int64_t row = 0; row < node_rows::count(product); ++row) {
        if (!take_row(layer, static_cast<float *>(node_rows::address(product, row)))) {
            status_ = { Code::unsupported, where + "a value is not finite, so the model computes no sense on this "
                                                   "text; check its activation with 'gguf-flash inspect --probe', or "
                                                   "download it again" };
            return;
        }
    }
}

bool Meter::take_row(Watched & layer, float * row) {
    const Layer & spec = layer.spec;
    const bool rectified = activation_ == Activation::relu || activation_ == Activation::relu_sqr;
    const size_t n_ff = spec.weights.size();
    for (size_t i = 0; i < n_ff; ++i) {
        const float bias = spec.bias.empty() ? 0.0f : spec.bias[i], v = row[i] + bias;
        if (!std::isfinite(v)) {
            return false;
        }
        const float score = rectified ? std::max(v, 0.0f) : std::fabs(activate(activation_, v, 0));
        ++layer.counts.buckets[bucket(std::fabs(score * spec.weights[i]))]; // of -0 the zero
        const float threshold = layer.thresholds.empty() ? 0.0f : layer.thresholds[i];
        if (activate(activation_, v, threshold) == 0) {
            ++layer.counts.zeros;
            row[i] = threshold > 0 ? -bias : row[i]; // every activation is zero at zero
        }
    }
    layer.counts.values += n_ff;
    return true;
}

Status Meter::set_thresholds(uint32_t number, std::vector<float> thresholds) {
    Watched * layer = find(number);
    if (layer == nullptr || (!thresholds.empty() && thresholds.size() != layer->spec.weights.size())) {
        return { Code::argument, "thresholds for each neuron of a layer that is watched expected, found " +
                                     std::to_string(thresholds.size()) + " for layer " + std::to_string(number) };
    }
    layer->thresholds = std::move(thresholds);
    return {};
}

void Meter::clear() {
    status_ = {};
    for (Watched & layer : layers_) {
        layer.counts = Counts();
        layer.counts.buckets.assign(n_buckets, 0);
    }
}

const Meter::Counts * Meter::counts(uint32_t number) const {
    const Watched * layer = const_cast<Meter *>(this)->find(number);
    return layer == nullptr ? nullptr : &layer->counts;
}

} // namespace gguf_flash
