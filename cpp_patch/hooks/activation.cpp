#include "activation.h"

#include "flash_model.h"
#include "neuron_thresholds.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model-loader.h"
#include "llama-model.h"

#include "gguf.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstring>
#include <mutex>

namespace {

using gguf_flash::Activation;

struct chosen_activation : gguf_flash_model {
    chosen_activation(const llama_model & model, Activation activation, std::vector<float> thresholds,
                      neuron_thresholds of_neurons);
    ~chosen_activation() override;

    ggml_tensor * virtual_tensor(const std::string &, const std::initializer_list<int64_t> &) override {
        return nullptr;
    }
    float threshold(size_t block) const {
        return thresholds.empty() ? 0.0f : thresholds[block < thresholds.size() ? block : 0];
    }

    ggml_tensor * neurons(unsigned block) const {
        const auto found = of_neurons.of_block.find(block);
        return found == of_neurons.of_block.end() ? nullptr : found->second;
    }

    const llama_prec_policy * key; // the part of its model that a graph knows
    const Activation activation;
    const std::vector<float> thresholds;
    const neuron_thresholds of_neurons; // instead of the block's
};

std::mutex chosen_mutex;
std::vector<const chosen_activation *> chosen;
std::atomic<int> n_chosen{ 0 };

chosen_activation::chosen_activation(const llama_model & model, Activation a, std::vector<float> t, neuron_thresholds n)
    : key(&model.prec_policy), activation(a), thresholds(std::move(t)), of_neurons(std::move(n)) {
    std::lock_guard<std::mutex> lock(chosen_mutex);
    chosen.push_back(this);
    n_chosen = int(chosen.size());
}

chosen_activation::~chosen_activation() {
    std::lock_guard<std::mutex> lock(chosen_mutex);
    chosen.erase(std::find(chosen.begin(), chosen.end(), this));
    n_chosen = int(chosen.size());
}

const chosen_activation * chosen_for(const llm_graph_context & graph) {
    if (n_chosen == 0) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(chosen_mutex);
    for (const chosen_activation * c : chosen) {
        if (c->key == graph.prec_policy) {
            return c;
        }
    }
    return nullptr;
}

// What checkpoints call the functions; "gelu" is the tanh form, as in upstream's graphs.
Activation spelled(std::string name) {
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return char(std::tolower(c)); });
    static const std::map<std::string, Activation> others = {
        { "swish", Activation::silu },     { "swiglu", Activation::silu },
        { "geglu", Activation::gelu },     { "gelu_new", Activation::gelu },
        { "gelu_fast", Activation::gelu }, { "gelu_pytorch_tanh", Activation::gelu },
        { "relu2", Activation::relu_sqr }, { "relu_squared", Activation::relu_sqr },
    };
    const auto other = others.find(name);
    return other != others.end() ? other->second : gguf_flash::parse_activation(name).value();
}

std::vector<float> thresholds_of(const gguf_context * metadata) {
    const int64_t id = gguf_find_key(metadata, "flash_ffn.threshold");
    if (id < 0) {
        return {};
    }
    std::vector<float> found;
    if (gguf_get_kv_type(metadata, id) == GGUF_TYPE_ARRAY && gguf_get_arr_type(metadata, id) == GGUF_TYPE_FLOAT32) {
        const float * values = static_cast<const float *>(gguf_get_arr_data(metadata, id));
        found.assign(values, values + gguf_get_arr_n(metadata, id));
    }
    if (found.empty() || !std::all_of(found.begin(), found.end(), [](float v) { return std::isfinite(v) && v >= 0; })) {
        flash_refuse({ gguf_flash::Code::corrupt,
                       "the model's key 'flash_ffn.threshold' is no array of f32 numbers, zero or more; "
                       "convert the model again" });
    }
    return found;
}

// act(x), with what the threshold, or each neuron's own, cuts set to zero: see gguf_flash::activate.
ggml_tensor * apply(const llm_graph_context & graph, ggml_tensor * x, Activation activation, float threshold,
                    ggml_tensor * neurons) {
    ggml_context * ctx = graph.ctx0;
    ggml_tensor * y = nullptr;
    switch (activation) {
        case Activation::relu:
        case Activation::drelu:
        case Activation::relu_sqr: y = ggml_relu(ctx, x); break;
        case Activation::gelu: y = ggml_gelu(ctx, x); break;
        case Activation::gelu_erf: y = ggml_gelu_erf(ctx, x); break;
        default: y = ggml_silu(ctx, x); break;
    }
    if (threshold > 0 || neurons != nullptr) {
        const bool rectified =
            activation == Activation::relu || activation == Activation::relu_sqr || activation == Activation::drelu;
        ggml_tensor * size = rectified ? y : ggml_abs(ctx, y);
        ggml_tensor * above =
            neurons != nullptr ? ggml_sub(ctx, size, neurons) : ggml_scale_bias(ctx, size, 1.0f, -threshold);
        y = ggml_mul(ctx, y, ggml_step(ctx, above));
    }
    return activation == Activation::relu_sqr ? ggml_sqr(ctx, y) : y;
}

ggml_tensor * product(const llm_graph_context & graph, ggml_tensor * w, ggml_tensor * bias, ggml_tensor * x) {
    ggml_tensor * y = graph.build_lora_mm(w, x);
    return bias == nullptr ? y : ggml_add(graph.ctx0, y, bias);
}

} // namespace

Activation activation_of(int type_op) {
    switch (type_op) {
        case LLM_FFN_SILU:
        case LLM_FFN_SWIGLU: return Activation::silu;
        case LLM_FFN_GELU:
        case LLM_FFN_GEGLU: return Activation::gelu;
        case LLM_FFN_RELU:
        case LLM_FFN_REGLU: return Activation::relu;
        case LLM_FFN_RELU_SQR: return Activation::relu_sqr;
        default: return Activation::from_graph;
    }
}

bool is_fused(int type_op) {
    return type_op == LLM_FFN_SWIGLU || type_op == LLM_FFN_GEGLU || type_op == LLM_FFN_REGLU;
}

std::string unsupported_form(const llm_graph_context & graph, const gguf_flash_ffn_weights & w, int type_op,
                             int type_gate, int il) {
    if (activation_of(type_op) == Activation::from_graph) {
        return "its activation (llm_ffn_op_type " + std::to_string(type_op) + ") is not supported";
    }
    if (w.act_scales != nullptr || w.up_s != nullptr || w.gate_s != nullptr) {
        return "scaled weights are not supported";
    }
    if (w.down == nullptr || (w.gate != nullptr && (type_gate != LLM_FFN_PAR || is_fused(type_op)))) {
        return "the architecture does not compute it as down(act(gate) * up)";
    }
    if (type_op == LLM_FFN_SILU && w.gate != nullptr && il >= 0 &&
        graph.hparams.swiglu_clamp_shexp[size_t(il)] > 1e-6f) {
        return "clamped SwiGLU is not supported";
    }
    return {};
}

gguf_flash_model_ptr dense_activation(llama_model_loader & ml, const llama_model & model,
                                      const gguf_flash::Settings & settings) {
    Activation activation = settings.activation;
    const int64_t id = gguf_find_key(ml.metadata, (ml.arch_name + ".hidden_activation").c_str());
    // Their graphs obey the key themselves.
    const bool own = model.arch == LLM_ARCH_MODERN_BERT || model.arch == LLM_ARCH_DFLASH;
    if (activation == Activation::from_graph && id >= 0 && !own &&
        gguf_get_kv_type(ml.metadata, id) == GGUF_TYPE_STRING) {
        const std::string name = gguf_get_val_str(ml.metadata, id);
        activation = spelled(name);
        if (activation == Activation::from_graph) {
            flash_refuse({ gguf_flash::Code::unsupported,
                           "the model's key '" + ml.arch_name + ".hidden_activation' is '" + name + "', expected " +
                               gguf_flash::activation_names + "; set flash_ffn.activation, or GGUF_FLASH_ACTIVATION" });
        }
    }
    std::vector<float> thresholds = settings.threshold.empty() ? thresholds_of(ml.metadata) : settings.threshold;
    neuron_thresholds neurons = take_neuron_thresholds(ml, settings.threshold.empty());
    if (activation == Activation::from_graph && thresholds.empty() && neurons.of_block.empty()) {
        return nullptr;
    }
    const size_t n_layer = model.hparams.n_layer_all;
    if (thresholds.size() > 1 && thresholds.size() != n_layer) {
        flash_refuse({ gguf_flash::Code::argument, "one threshold for each of " + std::to_string(n_layer) +
                                                       " blocks expected, found " +
                                                       std::to_string(thresholds.size()) });
    }
    return gguf_flash_model_ptr(new chosen_activation(model, activation, std::move(thresholds), std::move(neurons)));
}

ggml_tensor * dense_ffn(const llm_graph_context & graph, ggml_tensor * cur, const gguf_flash_ffn_weights & w,
                        int type_op, int type_gate, int il) {
    const chosen_activation * own = w.down == nullptr || w.up == nullptr ? nullptr : chosen_for(graph);
    if (own == nullptr) {
        return nullptr;
    }
    unsigned block = 0;
    const char * stack = std::strstr(w.down->name, "blk."); // after "enc." or "dec." in T5
    sscanf(stack != nullptr ? stack : "", "blk.%u.", &block);
    const float threshold = own->threshold(block);
    ggml_tensor * neurons = own->neurons(block);
    const Activation usual = activation_of(type_op);
    const Activation activation = own->activation == Activation::from_graph ? usual : own->activation;
    if (activation == usual && threshold <= 0 && neurons == nullptr) {
        return nullptr;
    }
    std::string reason = unsupported_form(graph, w, type_op, type_gate, il);
    if (activation == Activation::drelu && w.gate == nullptr && !is_fused(type_op)) {
        reason = "it has no gate";
    }
    if (!reason.empty()) {
        flash_refuse({ gguf_flash::Code::unsupported, "cannot run the FFN of layer " + std::to_string(il) +
                                                          " with activation " + gguf_flash::to_string(activation) +
                                                          ": " + reason });
    }
    const bool fused = is_fused(type_op);
    ggml_tensor * up = product(graph, w.up, w.up_b, cur);
    ggml_tensor * gate = w.gate != nullptr ? product(graph, w.gate, w.gate_b, cur) : nullptr;
    if (fused) { // the gate's rows, then up's
        const int64_t half = up->ne[0] / 2;
        auto view = [&](int64_t first) {
            return ggml_cont(graph.ctx0, ggml_view_2d(graph.ctx0, up, half, ggml_nrows(up), up->nb[1],
                                                      size_t(first) * sizeof(float)));
        };
        gate = view(0);
        up = view(half);
    }
    gate = w.topk ? w.topk(gate) : gate;
    ggml_tensor * h = apply(graph, gate != nullptr ? gate : up, activation, threshold, neurons);
    up = activation == Activation::drelu ? ggml_relu(graph.ctx0, up) : up;
    h = gate != nullptr ? ggml_mul(graph.ctx0, h, up) : h;
    graph.cb(h, "ffn_act", il);
    h = w.norm != nullptr ? graph.build_norm(h, w.norm, nullptr, LLM_NORM_RMS, il) : h;
    ggml_tensor * out = product(graph, w.down, w.down_b, h);
    return w.down_s != nullptr ? ggml_mul(graph.ctx0, out, w.down_s) : out;
}
