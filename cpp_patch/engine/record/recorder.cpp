#include "gguf_flash/recorder.h"

#include "block_name.h"
#include "node_rows.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace gguf_flash {

namespace {

size_t packed(uint32_t n_ff) {
    return (size_t(n_ff) + 7) / 8;
}

bool all_finite(const std::vector<float> & row, size_t n) {
    bool finite = true;
    for (size_t i = 0; i < n; ++i) {
        finite &= std::isfinite(row[i]);
    }
    return finite;
}

} // namespace

uint8_t magnitude_code(float h) {
    if (h == 0) {
        return 0;
    }
    const float code = std::round(8 * std::log2(std::fabs(h)) + 161);
    return uint8_t(std::min(std::max(code, 1.0f), 255.0f));
}

Recorder::Recorder(std::string label, uint32_t n_embd, const std::vector<Shape> & shapes, uint32_t tokens,
                   bool magnitudes, bool inputs_only)
    : label_(std::move(label)), n_embd_(n_embd), tokens_(tokens), magnitudes_(magnitudes), inputs_only_(inputs_only) {
    uint32_t widest = n_embd;
    for (const Shape & shape : shapes) {
        Layer layer;
        layer.shape = shape;
        layers_.push_back(std::move(layer));
        widest = std::max(widest, shape.n_ff);
    }
    std::sort(layers_.begin(), layers_.end(),
              [](const Layer & a, const Layer & b) { return a.shape.layer < b.shape.layer; });
    row_.resize(widest);
}

Recorder::Layer * Recorder::find(uint32_t layer) {
    const auto at = std::lower_bound(layers_.begin(), layers_.end(), layer,
                                     [](const Layer & l, uint32_t n) { return l.shape.layer < n; });
    return at != layers_.end() && at->shape.layer == layer ? &*at : nullptr;
}

const Recorder::Layer * Recorder::find(uint32_t layer) const {
    return const_cast<Recorder *>(this)->find(layer);
}

// A product with a view of a weight has another name on it, and is not an FFN's.
Recorder::Watched Recorder::watched(const ggml_tensor * node) {
    uint32_t number = 0;
    const char * rest = nullptr;
    if (node->op != GGML_OP_MUL_MAT || !split_name(node->src[0]->name, number, rest)) {
        return {};
    }
    static const std::pair<const char *, Role> roles[] = { { "ffn_gate.weight", Role::gate },
                                                           { "ffn_up.weight", Role::up },
                                                           { "ffn_pred_a.weight", Role::predictor },
                                                           { "ffn_down.weight", Role::down } };
    for (const auto & [name, role] : roles) {
        if (std::strcmp(rest, name) == 0 && (inputs_only_ ? role != Role::down : role != Role::predictor)) {
            return { role, find(number) };
        }
    }
    return {};
}

bool Recorder::on_node(ggml_tensor * node, bool ask, void * recorder) {
    Recorder & self = *static_cast<Recorder *>(recorder);
    const Watched what = self.watched(node);
    if (what.layer == nullptr) {
        return !ask;
    }
    if (!ask && self.status_.ok()) {
        try {
            self.take(what, node->src[1]);
        } catch (const std::bad_alloc &) {
            self.fail(*what.layer, "there is no memory for " + std::to_string(self.tokens_) +
                                       " tokens of its input and activity; use a smaller context");
        }
    }
    return self.status_.ok();
}

void Recorder::fail(const Layer & layer, const std::string & what) {
    status_ = { Code::unsupported, "cannot record the FFN of layer " + std::to_string(layer.shape.layer) + " of '" +
                                       label_ + "': " + what };
}

void Recorder::take(const Watched & what, const ggml_tensor * source) {
    if (what.role == Role::down) {
        take_hidden(*what.layer, source);
    } else {
        take_input(*what.layer, what.role, source);
    }
    if (inputs_only_) { // no down product tells the end of the FFN: each product is one
        what.layer->input = nullptr;
        what.layer->gate_seen = what.layer->up_seen = false;
    }
}

// Whether source has rows of `width` values that can be read, and not more of them than there is room.
bool Recorder::fits(const Layer & layer, const ggml_tensor * source, uint32_t width, uint32_t used) {
    if (source->ne[0] != int64_t(width)) {
        fail(layer, "expected rows of " + std::to_string(width) + " values, found " + std::to_string(source->ne[0]) +
                        "; its graph has a form of its own");
    } else if (!node_rows::readable(source)) {
        fail(layer, std::string("values of type F32 or F16 in the CPU's memory expected, found ") +
                        ggml_type_name(source->type) + "; run the model on the CPU");
    } else if (node_rows::count(source) > int64_t(tokens_ - used)) {
        fail(layer, "it is computed more than once for a token, as parallel and shared FFNs are; only models with "
                    "one FFN in a layer can be recorded");
    }
    return status_.ok();
}

void Recorder::take_input(Layer & layer, Role role, const ggml_tensor * x) {
    bool & seen = role == Role::gate ? layer.gate_seen : layer.up_seen;
    if (seen || (layer.input != nullptr && layer.input != x)) {
        fail(layer, seen
                        ? "its weights are used twice in one graph; only models with one FFN in a layer can be recorded"
                        : "gate and up are given different inputs; only FFNs with one input can be recorded");
        return;
    }
    seen = true;
    if (layer.input == x || !fits(layer, x, n_embd_, layer.inputs)) {
        return;
    }
    layer.input = x;
    layer.x.resize(size_t(tokens_) * n_embd_);
    const uint32_t n = uint32_t(node_rows::count(x));
    for (uint32_t row = 0; row < n; ++row) {
        node_rows::load(x, row, row_.data());
        if (!all_finite(row_, n_embd_)) {
            fail(layer, "its input for token " + std::to_string(layer.inputs) +
                            " of the window is not finite; the model computes no sense on this text");
            return;
        }
        for (uint32_t i = 0; i < n_embd_; ++i) {
            row_[i] = std::min(std::max(row_[i], -65504.0f), 65504.0f);
        }
        ggml_fp32_to_fp16_row(row_.data(), layer.x.data() + size_t(layer.inputs) * n_embd_, n_embd_);
        ++layer.inputs;
    }
}

void Recorder::take_hidden(Layer & layer, const ggml_tensor * h) {
    if (layer.input == nullptr) {
        fail(layer, "down is computed without a gate or up before it; its graph has a form of its own");
        return;
    }
    layer.input = nullptr;
    layer.gate_seen = layer.up_seen = false;
    if (!fits(layer, h, layer.shape.n_ff, layer.hiddens)) {
        return;
    }
    const uint32_t n = uint32_t(node_rows::count(h));
    layer.active.resize(tokens_ * packed(layer.shape.n_ff));
    layer.magnitudes.resize(magnitudes_ ? size_t(tokens_) * layer.shape.n_ff : 0);
    for (uint32_t row = 0; row < n; ++row) {
        node_rows::load(h, row, row_.data());
        if (!all_finite(row_, layer.shape.n_ff)) {
            fail(layer, "its hidden vector for token " + std::to_string(layer.hiddens) +
                            " of the window is not finite; the model computes no sense on this text");
            return;
        }
        add_hidden(layer);
    }
}

void Recorder::add_hidden(Layer & layer) {
    const uint32_t n_ff = layer.shape.n_ff;
    uint8_t * bits = layer.active.data() + layer.hiddens * packed(n_ff);
    std::fill_n(bits, packed(n_ff), uint8_t(0));
    for (uint32_t i = 0; i < n_ff; ++i) {
        bits[i / 8] |= uint8_t(uint8_t(row_[i] != 0) << (i % 8));
    }
    if (magnitudes_) {
        std::transform(row_.begin(), row_.begin() + n_ff, layer.magnitudes.begin() + size_t(layer.hiddens) * n_ff,
                       magnitude_code);
    }
    ++layer.hiddens;
}

void Recorder::clear() {
    status_ = {};
    for (Layer & layer : layers_) {
        layer.inputs = layer.hiddens = 0;
        layer.input = nullptr;
        layer.gate_seen = layer.up_seen = false;
    }
}

Status Recorder::check(uint32_t tokens) const {
    if (!status_.ok()) {
        return status_;
    }
    bool any = false;
    for (const Layer & layer : layers_) {
        any |= layer.inputs > 0 || layer.hiddens > 0;
        if ((layer.inputs > 0 || layer.hiddens > 0) &&
            (layer.inputs != tokens || layer.hiddens != hiddens_of(tokens))) {
            return { Code::unsupported, "cannot record the FFN of layer " + std::to_string(layer.shape.layer) +
                                            " of '" + label_ + "': expected " + std::to_string(tokens) +
                                            " inputs and hidden " + "vectors, found " + std::to_string(layer.inputs) +
                                            " and " + std::to_string(layer.hiddens) +
                                            "; its graph has a form of its own" };
        }
    }
    return any ? Status()
               : Status(Code::unsupported,
                        "cannot record '" + label_ +
                            "': its graph multiplies no ffn_up or ffn_gate and ffn_down matrix; give a "
                            "model with dense FFN layers");
}

std::vector<uint32_t> Recorder::layers() const {
    std::vector<uint32_t> found;
    for (const Layer & layer : layers_) {
        if (layer.inputs > 0 && layer.hiddens >= hiddens_of(1)) {
            found.push_back(layer.shape.layer);
        }
    }
    return found;
}

Result<Recorder::Rows> Recorder::rows(uint32_t number) const {
    const Layer * layer = find(number);
    if (layer == nullptr || layer->inputs == 0 || layer->hiddens < hiddens_of(1)) {
        return Status(Code::argument, "layer " + std::to_string(number) + " of '" + label_ + "' has not been recorded");
    }
    return Rows{ layer->shape, inputs_only_ ? layer->inputs : layer->hiddens, layer->x.data(),
                 inputs_only_ ? nullptr : layer->active.data(), magnitudes_ ? layer->magnitudes.data() : nullptr };
}

uint64_t Recorder::buffer_bytes() const {
    uint64_t sum = 0;
    for (const Layer & layer : layers_) {
        sum += layer.x.size() * sizeof(layer.x[0]) + layer.active.size() + layer.magnitudes.size();
    }
    return sum;
}

} // namespace gguf_flash
