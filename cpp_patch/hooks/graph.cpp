// Graph: every bundled FFN becomes one custom op on all threads.
#include "activation.h"
#include "flash_model.h"

#include "gguf_flash/ffn.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <chrono>
#include <cstring>
#include <new>
#include <utility>

namespace {

using gguf_flash::Activation;

[[noreturn]] void refuse(int il, const std::string & message) {
    flash_refuse({ gguf_flash::Code::unsupported,
                   "cannot run the FFN of layer " + std::to_string(il) + " from flash: " + message });
}

// What the op needs from graph to graph. Owned by the graph's result, as its inputs are; nothing in
// it depends on the micro-batch, so the graph may be reused.
class flash_call : public llm_graph_input_i {
public:
    flash_call(flash_model & flash, int index) : op(flash.engine, index) {}

    void set_input(const llama_ubatch * ubatch) override { GGML_UNUSED(ubatch); }
    bool can_reuse(const llm_graph_params & params) override {
        GGML_UNUSED(params);
        return true;
    }

    gguf_flash::FfnOp op;
    Activation activation = Activation::from_graph;
    // Indices into the op's sources, 0 when absent: source 0 is the FFN's input.
    int scores = 0, ahead = 0, gate_bias = 0, up_bias = 0, norm = 0;
    float norm_eps = 0.0f;
    std::chrono::steady_clock::time_point scoring; // when this call's predictor began; unset without one
};

// The identity: notes when the predictor, whose first input it makes, begins.
void begin_scoring(ggml_tensor *, const ggml_tensor *, int ith, int, void * userdata) {
    if (ith == 0) {
        static_cast<flash_call *>(userdata)->scoring = std::chrono::steady_clock::now();
    }
}

const float * source(const ggml_tensor * dst, int i) {
    return i == 0 ? nullptr : static_cast<const float *>(dst->src[i]->data);
}

void run_flash_ffn(ggml_tensor * dst, int ith, int nth, void * userdata) {
    flash_call & call = *static_cast<flash_call *>(userdata);
    const ggml_tensor * x = dst->src[0];
    gguf_flash::FfnInput in;
    in.n_tokens = uint32_t(ggml_nrows(x));
    in.x = static_cast<const float *>(x->data);
    in.x_stride = x->nb[1] / sizeof(float);
    in.scores = source(dst, call.scores);
    in.scores_stride = call.scores == 0 ? 0 : dst->src[call.scores]->nb[1] / sizeof(float);
    in.ahead_scores = source(dst, call.ahead);
    in.ahead_stride = call.ahead == 0 ? 0 : dst->src[call.ahead]->nb[1] / sizeof(float);
    if (ith == 0 && call.scoring.time_since_epoch().count() != 0) {
        const auto took = std::chrono::steady_clock::now() - call.scoring;
        in.predictor_ns = uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    }
    in.gate_bias = source(dst, call.gate_bias);
    in.up_bias = source(dst, call.up_bias);
    in.norm = source(dst, call.norm);
    in.norm_eps = call.norm_eps;
    in.out = static_cast<float *>(dst->data);
    in.out_stride = dst->nb[1] / sizeof(float);
    in.activation = call.activation;
    call.op.run(in, ith, nth);
}

// The call behind one of our nodes, null for any other node. A custom op keeps its function in the
// first bytes of op_params (ggml_custom_op_params).
flash_call * call_of(const ggml_tensor * node) {
    ggml_custom_op_t fun = nullptr;
    void * userdata = nullptr;
    if (node->op != GGML_OP_CUSTOM) {
        return nullptr;
    }
    std::memcpy(&fun, node->op_params, sizeof(fun));
    std::memcpy(&userdata, reinterpret_cast<const char *>(node->op_params) + 2 * sizeof(void *), sizeof(userdata));
    return fun == run_flash_ffn ? static_cast<flash_call *>(userdata) : nullptr;
}

void check_supported(const llm_graph_context & graph, const gguf_flash::Layout & layout,
                     const gguf_flash_ffn_weights & w, int type_op, int type_gate, int il) {
    const std::string reason = unsupported_form(graph, w, type_op, type_gate, il);
    if (!reason.empty()) {
        refuse(il, reason + "; run the dense model");
    }
    if ((layout.gated && !layout.fused) != (w.gate != nullptr) || layout.fused != is_fused(type_op)) {
        refuse(il, "the file's gated or fused key does not fit the architecture; convert the model again");
    }
    if (w.topk && layout.select != gguf_flash::Select::gate) {
        refuse(il, "its graph keeps the largest of the gate's values, so all of them are needed; convert again with "
                   "--select gate");
    }
}

ggml_tensor * as_f32(const llm_graph_context & graph, ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 ? t : ggml_cast(graph.ctx0, t, GGML_TYPE_F32);
}

// A predictor's scores, B relu(A x) + b (paper, section 3.1).
ggml_tensor * predicted_scores(const llm_graph_context & graph, const flash_predictor & p, ggml_tensor * x, int il) {
    ggml_tensor * hidden = ggml_relu(graph.ctx0, ggml_mul_mat(graph.ctx0, p.a, x));
    ggml_tensor * scores = ggml_add(graph.ctx0, ggml_mul_mat(graph.ctx0, p.b, hidden), p.bias);
    graph.cb(scores, "ffn_pred", il);
    return scores;
}

// A prompt's tokens together select nearly everything: for more than these nothing is read ahead.
constexpr int64_t ahead_tokens = 8;

bool looks_ahead(const flash_model & flash, int index, const ggml_tensor * cur) {
    return flash.engine->ahead() != nullptr && size_t(index) + 1 < flash.predictors.size() &&
           ggml_nrows(cur) <= ahead_tokens;
}

// The sources of the op, in the order call records: at most input, norm, two scores and two biases.
int collect_sources(const llm_graph_context & graph, const flash_model & flash, int index,
                    const gguf_flash_ffn_weights & w, ggml_tensor * cur, flash_call & call, ggml_tensor ** args,
                    int il) {
    const gguf_flash::Layout & layout = flash.engine->layout();
    int n = 0;
    args[n++] = cur;
    auto add = [&](ggml_tensor * t) {
        args[n] = as_f32(graph, t);
        return n++;
    };
    if (w.norm != nullptr) {
        call.norm = add(w.norm);
    }
    ggml_tensor *gate_b = w.gate_b, *up_b = w.up_b;
    if (layout.fused && up_b != nullptr) { // as the matrix: the gate's half, then up's
        ggml_tensor * both = as_f32(graph, up_b);
        const int64_t half = both->ne[0] / 2;
        gate_b = ggml_view_1d(graph.ctx0, both, half, 0);
        up_b = ggml_view_1d(graph.ctx0, both, half, size_t(half) * sizeof(float));
    }
    if (layout.select == gguf_flash::Select::gate) {
        ggml_tensor * deciding = layout.fused ? flash.gates[size_t(index)] : layout.gated ? w.gate : w.up;
        ggml_tensor * bias = layout.gated ? gate_b : up_b;
        ggml_tensor * scores = graph.build_lora_mm(deciding, cur);
        scores = bias != nullptr ? ggml_add(graph.ctx0, scores, bias) : scores;
        graph.cb(scores, layout.gated ? "ffn_gate" : "ffn_up", il);
        scores = w.topk ? w.topk(scores) : scores;
        call.scores = add(ggml_is_contiguous(scores) ? scores : ggml_cont(graph.ctx0, scores));
        call.up_bias = layout.gated && up_b != nullptr ? add(up_b) : 0;
        return n;
    }
    if (layout.select == gguf_flash::Select::predictor) {
        ggml_tensor * x = ggml_map_custom1_inplace(graph.ctx0, cur, begin_scoring, 1, &call);
        call.scores = add(predicted_scores(graph, flash.predictors[size_t(index)], x, il));
        if (looks_ahead(flash, index, cur)) {
            call.ahead = add(predicted_scores(graph, flash.predictors[size_t(index) + 1], x, il));
        }
    }
    call.gate_bias = gate_b != nullptr ? add(gate_b) : 0;
    call.up_bias = up_b != nullptr ? add(up_b) : 0;
    return n;
}

thread_local gguf_flash::Status refused_batch;

// The first of the graph's calls that failed, else its last; null for a graph without any.
flash_call * deciding_call(ggml_cgraph * gf) {
    flash_call * found = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(gf) && (found == nullptr || found->op.status().ok()); ++i) {
        flash_call * call = call_of(ggml_graph_node(gf, i));
        found = call != nullptr ? call : found;
    }
    return found;
}

// A decode's failure, kept for who asks and logged if there is memory for it.
ggml_status failed(gguf_flash::Model & model, const gguf_flash::Status & status) {
    model.set_last_error(status);
    try {
        LLAMA_LOG_ERROR("gguf_flash: %s\n", status.message().c_str());
    } catch (const std::bad_alloc &) { // llama.cpp's callers know no exception
    }
    return GGML_STATUS_FAILED;
}

} // namespace

ggml_tensor * gguf_flash_build_ffn(const llm_graph_context & graph, ggml_tensor * cur, const gguf_flash_ffn_weights & w,
                                   int type_op, int type_gate, int il) {
    flash_model * flash = nullptr;
    for (const ggml_tensor * t : { w.down, w.up, w.gate }) {
        flash = flash != nullptr ? flash : flash_model_of(t);
    }
    if (flash == nullptr) {
        return dense_ffn(graph, cur, w, type_op, type_gate, il);
    }
    const gguf_flash::Layout & layout = flash->engine->layout();
    check_supported(graph, layout, w, type_op, type_gate, il);
    const Activation wanted = activation_of(type_op);
    if (layout.activation != Activation::from_graph && layout.activation != wanted && !flash->activation_chosen) {
        refuse(il, std::string("the file says activation ") + gguf_flash::to_string(layout.activation) +
                       ", the architecture " + gguf_flash::to_string(wanted) +
                       "; convert again, or set flash_ffn.activation to the one the model was trained with");
    }
    // The name carries the block: il counts graph layers, which need not be blocks.
    const gguf_flash::LayerLayout * layer = layout.find_block(w.down->name);
    if (layer == nullptr) {
        refuse(il, "the architecture gives it '" + std::string(w.down->name) + "', which is not bundled");
    }
    const int index = int(layer - layout.layers.data());
    auto call = std::make_unique<flash_call>(*flash, index);
    call->activation = wanted;
    call->norm_eps = graph.hparams.f_norm_rms_eps;

    cur = ggml_is_contiguous(cur) ? cur : ggml_cont(graph.ctx0, cur);
    ggml_tensor * args[6];
    const int n_args = collect_sources(graph, *flash, index, w, cur, *call, args, il);
    ggml_tensor * out = ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, cur->ne[0], cur->ne[1], cur->ne[2], cur->ne[3], args,
                                       n_args, run_flash_ffn, GGML_N_TASKS_MAX, call.get());
    graph.res->add_input(std::move(call));
    graph.cb(out, "ffn_flash", il);
    if (w.down_b != nullptr) {
        out = ggml_add(graph.ctx0, out, w.down_b);
    }
    return w.down_s != nullptr ? ggml_mul(graph.ctx0, out, w.down_s) : out;
}

ggml_tensor * gguf_flash_build_normed_ffn(const llm_graph_context & graph, ggml_tensor * cur, const llama_layer & l,
                                          int type_op, int il) {
    gguf_flash_ffn_weights w = { l.ffn_up,     nullptr,    l.ffn_up_s, l.ffn_gate,   nullptr,
                                 l.ffn_gate_s, l.ffn_down, nullptr,    l.ffn_down_s, nullptr };
    w.norm = l.ffn_sub_norm;
    return gguf_flash_build_ffn(graph, cur, w, type_op, LLM_FFN_PAR, il);
}

ggml_tensor * gguf_flash_build_topk_ffn(const llm_graph_context & graph, ggml_tensor * cur, const llama_layer & l,
                                        int type_op, std::function<ggml_tensor *(ggml_tensor *)> topk, int il) {
    gguf_flash_ffn_weights w = { l.ffn_up, nullptr,    nullptr, l.ffn_gate, nullptr,
                                 nullptr,  l.ffn_down, nullptr, nullptr,    nullptr };
    w.topk = std::move(topk);
    return gguf_flash_build_ffn(graph, cur, w, type_op, LLM_FFN_PAR, il);
}

void gguf_flash_refuse_batch(const std::string & message) {
    refused_batch = { gguf_flash::Code::argument, message };
}

ggml_status gguf_flash_compute(ggml_backend_sched_t sched, ggml_cgraph * gf) {
    const gguf_flash::Status refused = std::exchange(refused_batch, gguf_flash::Status());
    gguf_flash::set_decode_error(refused);
    if (!refused.ok()) {
        LLAMA_LOG_ERROR("gguf_flash: %s\n", refused.message().c_str());
        return GGML_STATUS_FAILED;
    }
    if (const ggml_tensor * stray = find_virtual_source(gf)) {
        const std::string message = "tensor '" + std::string(stray->name) +
                                    "' is on flash, but this architecture "
                                    "reads it outside build_ffn; run the dense model";
        return failed(*flash_model_of(stray)->engine, { gguf_flash::Code::unsupported, message });
    }
    if (flash_call * call = deciding_call(gf)) {
        const gguf_flash::Status same = call->op.model().check_files();
        if (!same.ok()) {
            return failed(call->op.model(), same);
        }
    }
    const ggml_status status = ggml_backend_sched_graph_compute_async(sched, gf);
    flash_call * call = status == GGML_STATUS_SUCCESS ? deciding_call(gf) : nullptr;
    if (call == nullptr) {
        return status;
    }
    if (!call->op.status().ok()) {
        return failed(call->op.model(), call->op.status());
    }
    call->op.model().set_last_error({}); // an older failure explains nothing any more
    return status;
}
