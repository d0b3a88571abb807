#include "flash_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace gguf_flash;

Bytes quantize_rows(ggml_type type, const std::vector<float> & rows, uint32_t n_embd) {
    const int64_t n = int64_t(rows.size() / n_embd);
    Bytes out(size_t(n) * ggml_row_size(type, n_embd));
    ggml_quantize_chunk(type, rows.data(), out.data(), 0, n, n_embd, nullptr);
    return out;
}

std::vector<float> dequantize_rows(ggml_type type, const Bytes & rows, uint32_t n_embd) {
    const size_t row = ggml_row_size(type, n_embd), n = rows.size() / row;
    std::vector<float> out(n * n_embd);
    for (size_t i = 0; i < n; ++i) {
        if (type == GGML_TYPE_F32) {
            std::memcpy(out.data() + i * n_embd, rows.data() + i * row, row);
        } else {
            ggml_get_type_traits(type)->to_float(rows.data() + i * row, out.data() + i * n_embd, n_embd);
        }
    }
    return out;
}

FlashFile::FlashFile(const FlashSpec & s) : spec(s) {
    add_keys();
    if (spec.bytes_before > 0) {
        image.tensors.push_back(
            { "token_embd.weight", { spec.bytes_before }, GGML_TYPE_I8, Bytes(spec.bytes_before, 7), {} });
    }
    Random random(spec.seed);
    for (size_t i = 0; i < spec.layers.size(); ++i) {
        add_layer(i, random);
    }
    if (spec.pad_header) {
        image.pad_header();
    }
}

std::string FlashFile::bundle_name(size_t index) const {
    return "blk." + std::to_string(spec.layers[index]) + ".ffn_bundle";
}

void FlashFile::add_keys() {
    const bool all = spec.select != Select::gate; // every part is in the bundle
    std::vector<std::string> parts = { "down" };
    std::vector<uint32_t> types = { uint32_t(spec.down) }, every;
    if (all || spec.gated) {
        parts.insert(parts.begin(), "up");
        types.insert(types.begin(), spec.up);
    }
    if (all && spec.gated) {
        parts.insert(parts.begin(), "gate");
        types.insert(types.begin(), spec.gate);
    }
    for (size_t i = 0; i < spec.layers.size(); ++i) {
        every.insert(every.end(), types.begin(), types.end());
    }
    image.set("general.architecture", str_value("llama"));
    image.set("flash_ffn.version", u32_value(1));
    image.set("flash_ffn.select", str_value(to_string(spec.select)));
    image.set("flash_ffn.layers", u32_array(spec.layers));
    image.set("flash_ffn.n_embd", u32_value(spec.n_embd));
    image.set("flash_ffn.gated", bool_value(spec.gated));
    image.set("flash_ffn.fused", bool_value(spec.fused));
    image.set("flash_ffn.bundle.parts", str_array(parts));
    image.set("flash_ffn.bundle.types", u32_array(every));
    image.set("flash_ffn.bundle.align", u32_value(spec.align));
    if (!spec.activation.empty()) {
        image.set("flash_ffn.activation", str_value(spec.activation));
    }
    if (!spec.thresholds.empty()) {
        image.set("flash_ffn.threshold", f32_array(spec.thresholds));
    }
    if (spec.select == Select::predictor) {
        add_predictor_keys();
    }
}

void FlashFile::add_predictor_keys() {
    const PredictorSpec & p = spec.predictor;
    const size_t n = spec.layers.size();
    std::vector<uint32_t> ranks;
    for (size_t i = 0; i < n; ++i) {
        ranks.push_back(p.ranks[std::min(i, p.ranks.size() - 1)]);
    }
    image.set("flash_ffn.predictor.rank", u32_array(ranks));
    image.set("flash_ffn.predictor.threshold",
              f32_array(p.thresholds.empty() ? std::vector<float>(n, 0.5f) : p.thresholds));
    if (p.capacities.empty()) {
        return;
    }
    const std::string prefix = "flash_ffn.calibration.";
    image.set(prefix + "tokens", u32_value(1000));
    image.set(prefix + "text", str_value("a.txt"));
    image.set(prefix + "target", str_value("5 % missed"));
    image.set(prefix + "window", u32_value(5));
    image.set(prefix + "capacity", u32_array(p.capacities));
    for (const char * rate : { "active", "selected", "false_negatives", "false_positives" }) {
        image.set(prefix + rate, f32_array(std::vector<float>(n, 0.25f)));
    }
    if (!p.miss_slots.empty()) {
        image.set(prefix + "miss_slots", u32_array(p.miss_slots));
        image.set(prefix + "miss_curve", f32_array(p.miss_curve));
    }
}

void FlashFile::add_layer(size_t index, Random & random) {
    DenseLayer layer;
    layer.n_ff = spec.n_ff[std::min(index, spec.n_ff.size() - 1)];
    const uint32_t n_embd = spec.n_embd;
    // Scales that keep activations and outputs near 1.
    const float scale = 1.7f / std::sqrt(float(n_embd)), down_scale = 1.7f / std::sqrt(float(layer.n_ff));
    const std::string block = "blk." + std::to_string(spec.layers[index]) + ".ffn_";
    struct {
        ggml_type type;
        float scale;
        bool wanted, deciding;
        const char * name;
        std::vector<float> * rows;
    } parts[] = {
        { spec.gate, scale, spec.gated, spec.gated, "gate", &layer.gate },
        { spec.up, scale, true, !spec.gated, "up", &layer.up },
        { spec.down, down_scale, true, false, "down", &layer.down },
    };
    std::vector<Bytes> bundled;
    std::vector<ImageTensor> resident;
    for (auto & part : parts) {
        if (!part.wanted) {
            continue;
        }
        if (part.type == GGML_TYPE_I8) {
            bundled.push_back(add_codes(layer, block, random, part.scale));
            continue;
        }
        const Bytes raw = quantize_rows(part.type, random.reals(size_t(layer.n_ff) * n_embd, part.scale), n_embd);
        *part.rows = dequantize_rows(part.type, raw, n_embd);
        if (spec.select == Select::gate && part.deciding) {
            resident.push_back({ block + part.name + ".weight", { n_embd, layer.n_ff }, uint32_t(part.type), raw, {} });
        } else {
            bundled.push_back(raw);
        }
    }
    uint64_t stride = 0;
    const Bytes rows = bundle(bundled, layer.n_ff, stride);
    image.tensors.push_back({ bundle_name(index), { stride, layer.n_ff }, GGML_TYPE_I8, rows, {} });
    image.tensors.insert(image.tensors.end(), resident.begin(), resident.end());
    if (spec.biases) {
        add_biases(layer, block, random);
    }
    if (spec.select == Select::predictor) {
        add_predictor(index, layer, block);
    }
    if (spec.neuron_thresholds > 0) {
        layer.thresholds = Random(spec.seed + 77).reals(layer.n_ff, spec.neuron_thresholds);
        for (float & t : layer.thresholds) {
            t = std::fabs(t);
        }
        const uint8_t * p = reinterpret_cast<const uint8_t *>(layer.thresholds.data());
        image.tensors.push_back(
            { block + "threshold", { layer.n_ff }, GGML_TYPE_F32, Bytes(p, p + layer.n_ff * sizeof(float)), {} });
    }
    layers.push_back(std::move(layer));
}

// A Q8_0 down matrix taken apart: its scales become a tensor, its codes, turned, are returned.
Bytes FlashFile::add_codes(DenseLayer & layer, const std::string & block, Random & random, float scale) {
    const uint32_t n_embd = spec.n_embd, n_ff = layer.n_ff, n_blocks = n_ff / 32, q8_0 = 34;
    layer.down_q8_0 = quantize_rows(GGML_TYPE_Q8_0, random.reals(size_t(n_ff) * n_embd, scale), n_ff);
    const std::vector<float> dense = dequantize_rows(GGML_TYPE_Q8_0, layer.down_q8_0, n_ff);
    layer.down.resize(dense.size());
    Bytes codes(dense.size()), scales(size_t(n_blocks) * n_embd * 2);
    for (uint32_t i = 0; i < n_embd; ++i) {
        for (uint32_t j = 0; j < n_ff; ++j) {
            const uint8_t * from = layer.down_q8_0.data() + (size_t(i) * n_blocks + j / 32) * q8_0;
            codes[size_t(j) * n_embd + i] = from[2 + j % 32];
            std::memcpy(scales.data() + (size_t(j / 32) * n_embd + i) * 2, from, 2);
            layer.down[size_t(j) * n_embd + i] = dense[size_t(i) * n_ff + j];
        }
    }
    image.tensors.push_back({ block + "down_scale", { n_embd, n_blocks }, GGML_TYPE_F16, scales, {} });
    return codes;
}

void FlashFile::add_biases(DenseLayer & layer, const std::string & block, Random & random) {
    layer.gate_bias = spec.gated ? random.reals(layer.n_ff, 0.3f) : std::vector<float>();
    layer.up_bias = random.reals(layer.n_ff, 0.3f);
    layer.down_bias = random.reals(spec.n_embd, 0.3f);
    for (auto [name, bias] : { std::pair("gate", &layer.gate_bias), std::pair("up", &layer.up_bias),
                               std::pair("down", &layer.down_bias) }) {
        if (!bias->empty()) {
            const uint8_t * p = reinterpret_cast<const uint8_t *>(bias->data());
            const Bytes raw(p, p + bias->size() * sizeof(float));
            image.tensors.push_back({ block + name + ".bias", { bias->size() }, GGML_TYPE_F32, raw, {} });
        }
    }
}

// From numbers of its own, so that the bundles are those of the same spec in another mode.
void FlashFile::add_predictor(size_t index, DenseLayer & layer, const std::string & block) {
    const PredictorSpec & p = spec.predictor;
    const uint32_t n_embd = spec.n_embd, rank = p.ranks[std::min(index, p.ranks.size() - 1)];
    Random random(spec.seed * 1000 + index + 1);
    const Bytes a = quantize_rows(p.a, random.reals(size_t(rank) * n_embd, 1.7f / std::sqrt(float(n_embd))), n_embd);
    const Bytes b = quantize_rows(p.b, random.reals(size_t(layer.n_ff) * rank, 2.5f / std::sqrt(float(rank))), rank);
    layer.pred_a = dequantize_rows(p.a, a, n_embd);
    layer.pred_b = dequantize_rows(p.b, b, rank);
    layer.pred_bias = random.reals(layer.n_ff, 0.3f);
    const uint8_t * bias = reinterpret_cast<const uint8_t *>(layer.pred_bias.data());
    image.tensors.push_back({ block + "pred_a.weight", { n_embd, rank }, uint32_t(p.a), a, {} });
    image.tensors.push_back({ block + "pred_b.weight", { rank, layer.n_ff }, uint32_t(p.b), b, {} });
    image.tensors.push_back(
        { block + "pred_b.bias", { layer.n_ff }, GGML_TYPE_F32, Bytes(bias, bias + layer.n_ff * sizeof(float)), {} });
}

Bytes FlashFile::bundle(const std::vector<Bytes> & parts, uint32_t n_ff, uint64_t & stride) const {
    uint64_t end = 0;
    for (const Bytes & part : parts) {
        end = GgufImage::up(end, 32) + part.size() / n_ff;
    }
    stride = GgufImage::up(end, spec.align);
    Bytes out(stride * n_ff, 0);
    for (uint32_t i = 0; i < n_ff; ++i) {
        uint64_t at = 0;
        for (const Bytes & part : parts) {
            const uint64_t row = part.size() / n_ff;
            at = GgufImage::up(at, 32);
            std::memcpy(out.data() + i * stride + at, part.data() + i * row, row);
            at += row;
        }
    }
    return out;
}

namespace {

double act(const std::string & name, double v, double t) {
    if (name == "relu" || name == "drelu") {
        return v > t ? v : 0;
    }
    if (name == "relu_sqr") {
        return v > t ? v * v : 0;
    }
    const double y = name == "silu" ? v / (1 + std::exp(-v))
                   : name == "gelu" ? 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)))
                                    : 0.5 * v * (1 + std::erf(v / std::sqrt(2.0)));
    return t > 0 && std::fabs(y) <= t ? 0 : y;
}

double dot(const std::vector<float> & rows, size_t i, const float * x, uint32_t n, const std::vector<float> & bias) {
    double sum = bias.empty() ? 0.0 : bias[i];
    for (uint32_t c = 0; c < n; ++c) {
        sum += double(rows[i * n + c]) * x[c];
    }
    return sum;
}

} // namespace

std::vector<double> reference_ffn(const FlashFile & file, size_t index, const std::vector<float> & x, uint32_t n_tokens,
                                  const std::vector<uint8_t> & selected) {
    const DenseLayer & layer = file.layers[index];
    const uint32_t n = file.spec.n_embd;
    const double threshold = file.spec.thresholds.empty() ? 0 : file.spec.thresholds[index];
    std::vector<double> out(size_t(n_tokens) * n);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        const float * xt = x.data() + size_t(t) * n;
        for (uint32_t c = 0; c < n; ++c) {
            out[size_t(t) * n + c] = layer.down_bias.empty() ? 0.0 : layer.down_bias[c];
        }
        for (uint32_t i = 0; i < layer.n_ff; ++i) {
            if (!selected.empty() && selected[size_t(t) * layer.n_ff + i] == 0) {
                continue;
            }
            const double both = dot(layer.up, i, xt, n, layer.up_bias);
            const double up = file.spec.activation == "drelu" ? std::max(both, 0.0) : both;
            const double gate = file.spec.gated ? dot(layer.gate, i, xt, n, layer.gate_bias) : up;
            const double own = layer.thresholds.empty() ? threshold : layer.thresholds[i];
            const double h = act(file.spec.activation, gate, own) * (file.spec.gated ? up : 1);
            for (uint32_t c = 0; c < n; ++c) {
                out[size_t(t) * n + c] += h * layer.down[size_t(i) * n + c];
            }
        }
    }
    return out;
}

std::vector<double> reference_scores(const FlashFile & file, size_t index, const std::vector<float> & x,
                                     uint32_t n_tokens) {
    const DenseLayer & layer = file.layers[index];
    const uint32_t n = file.spec.n_embd;
    const size_t rank = layer.pred_a.size() / n;
    std::vector<double> out(size_t(n_tokens) * layer.n_ff);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        double * scores = out.data() + size_t(t) * layer.n_ff;
        std::copy(layer.pred_bias.begin(), layer.pred_bias.end(), scores);
        for (size_t r = 0; r < rank; ++r) {
            const double hidden = std::max(0.0, dot(layer.pred_a, r, x.data() + size_t(t) * n, n, {}));
            for (uint32_t i = 0; i < layer.n_ff; ++i) {
                scores[i] += hidden * layer.pred_b[i * rank + r];
            }
        }
    }
    return out;
}

double worst_error(const std::vector<float> & out, const std::vector<double> & expected, uint32_t n_tokens) {
    double worst = 0;
    const size_t n = expected.size() / n_tokens;
    for (uint32_t t = 0; t < n_tokens; ++t) {
        double difference = 0, length = 0;
        for (size_t i = t * n; i < (t + 1) * n; ++i) {
            difference += (out[i] - expected[i]) * (out[i] - expected[i]);
            length += expected[i] * expected[i];
        }
        worst = std::max(worst, std::isfinite(difference) ? std::sqrt(difference / length) : INFINITY);
    }
    return worst;
}
