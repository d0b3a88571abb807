#include "gguf_flash_models.h"

#include "llama-model-loader.h"

#include <cmath>

namespace {

struct persimmon_graph : public llm_graph_context {
    persimmon_graph(const llama_model_persimmon & model, const llm_graph_params & params);

private:
    ggml_tensor * rotate(ggml_tensor * x, ggml_tensor * positions) const;
    ggml_tensor * build_attention(llm_graph_input_attn_kv * inp, ggml_tensor * cur, ggml_tensor * positions, int il);
    ggml_tensor * build_layer_ffn(ggml_tensor * cur, int il);
    void build_output(ggml_tensor * cur);

    const llama_model_persimmon & model;
};

// Only the first n_rot values of each head: ggml_rope_ext copies the others.
ggml_tensor * persimmon_graph::rotate(ggml_tensor * x, ggml_tensor * positions) const {
    return ggml_rope_ext(ctx0, x, positions, nullptr, n_rot, rope_type, n_ctx_orig, freq_base, freq_scale, ext_factor,
                         attn_factor, beta_fast, beta_slow);
}

ggml_tensor * persimmon_graph::build_attention(llm_graph_input_attn_kv * inp, ggml_tensor * cur,
                                               ggml_tensor * positions, int il) {
    const llama_layer & layer = model.layers[il];
    const int64_t n_embd_head = hparams.n_embd_head_v();
    auto [q, k, v] = build_qkv(layer, cur, n_embd_head, n_head, n_head_kv, il);
    if (layer.attn_q_norm != nullptr) {
        q = build_norm(q, layer.attn_q_norm, layer.attn_q_norm_b, LLM_NORM, il);
        k = build_norm(k, layer.attn_k_norm, layer.attn_k_norm_b, LLM_NORM, il);
    }
    q = rotate(q, positions);
    k = rotate(k, positions);
    cb(q, "Qcur", il);
    cb(k, "Kcur", il);
    return build_attn(inp, layer.wo, layer.wo_b, layer.wo_s, q, k, v, nullptr, nullptr, nullptr,
                      1.0f / sqrtf(float(n_embd_head)), il);
}

ggml_tensor * persimmon_graph::build_layer_ffn(ggml_tensor * cur, int il) {
    const llama_layer & layer = model.layers[il];
    return build_ffn(cur, layer.ffn_up, layer.ffn_up_b, nullptr, nullptr, nullptr, nullptr, layer.ffn_down,
                     layer.ffn_down_b, nullptr, nullptr, LLM_FFN_RELU_SQR, LLM_FFN_SEQ, il);
}

void persimmon_graph::build_output(ggml_tensor * cur) {
    cur = build_norm(cur, model.output_norm, model.output_norm_b, LLM_NORM, -1);
    cb(cur, "result_norm", -1);
    res->t_embd = cur;
    cur = build_lora_mm(model.output, cur, model.output_s);
    cb(cur, "result_output", -1);
    res->t_logits = cur;
    ggml_build_forward_expand(gf, cur);
}

persimmon_graph::persimmon_graph(const llama_model_persimmon & model, const llm_graph_params & params)
    : llm_graph_context(params), model(model) {
    ggml_tensor * x = build_inp_embd(model.tok_embd);
    ggml_tensor * positions = build_inp_pos();
    auto * inp_attn = build_attn_inp_kv();
    ggml_tensor * inp_out_ids = build_inp_out_ids();

    for (int il = 0; il < n_layer; ++il) {
        const llama_layer & layer = model.layers[il];
        ggml_tensor * cur = build_norm(x, layer.attn_norm, layer.attn_norm_b, LLM_NORM, il);
        cb(cur, "attn_norm", il);
        cur = build_attention(inp_attn, cur, positions, il);
        if (il == n_layer - 1 && inp_out_ids != nullptr) {
            cur = ggml_get_rows(ctx0, cur, inp_out_ids);
            x = ggml_get_rows(ctx0, x, inp_out_ids);
        }
        x = ggml_add(ctx0, cur, x);
        cb(x, "ffn_inp", il);

        cur = build_norm(x, layer.ffn_norm, layer.ffn_norm_b, LLM_NORM, il);
        cb(cur, "ffn_norm", il);
        cur = build_layer_ffn(cur, il);
        cb(cur, "ffn_out", il);
        x = build_cvec(ggml_add(ctx0, cur, x), il);
        cb(x, "l_out", il);
    }
    build_output(x);
}

} // namespace

void llama_model_persimmon::load_arch_hparams(llama_model_loader & ml) {
    ml.get_key(LLM_KV_ATTENTION_LAYERNORM_EPS, hparams.f_norm_eps);
}

void llama_model_persimmon::load_arch_tensors(llama_model_loader &) {
    LLAMA_LOAD_LOCALS;

    tok_embd = create_tensor(tn(LLM_TENSOR_TOKEN_EMBD, "weight"), { n_embd, n_vocab }, 0);
    output_norm = create_tensor(tn(LLM_TENSOR_OUTPUT_NORM, "weight"), { n_embd }, 0);
    output_norm_b = create_tensor(tn(LLM_TENSOR_OUTPUT_NORM, "bias"), { n_embd }, 0);
    output = create_tensor(tn(LLM_TENSOR_OUTPUT, "weight"), { n_embd, n_vocab }, TENSOR_NOT_REQUIRED);
    if (output == nullptr) { // `tie_word_embeddings`
        output = create_tensor(tn(LLM_TENSOR_TOKEN_EMBD, "weight"), { n_embd, n_vocab }, TENSOR_DUPLICATED);
    }
    for (int i = 0; i < n_layer; ++i) {
        llama_layer & layer = layers[i];
        layer.attn_norm = create_tensor(tn(LLM_TENSOR_ATTN_NORM, "weight", i), { n_embd }, 0);
        layer.attn_norm_b = create_tensor(tn(LLM_TENSOR_ATTN_NORM, "bias", i), { n_embd }, 0);
        create_tensor_qkv(layer, i, n_embd, n_embd, n_embd_k_gqa, n_embd_v_gqa, 0);
        // All four, or none in checkpoints with `qk_layernorm` false.
        layer.attn_q_norm =
            create_tensor(tn(LLM_TENSOR_ATTN_Q_NORM, "weight", i), { n_embd_head_k }, TENSOR_NOT_REQUIRED);
        if (layer.attn_q_norm != nullptr) {
            layer.attn_q_norm_b = create_tensor(tn(LLM_TENSOR_ATTN_Q_NORM, "bias", i), { n_embd_head_k }, 0);
            layer.attn_k_norm = create_tensor(tn(LLM_TENSOR_ATTN_K_NORM, "weight", i), { n_embd_head_k }, 0);
            layer.attn_k_norm_b = create_tensor(tn(LLM_TENSOR_ATTN_K_NORM, "bias", i), { n_embd_head_k }, 0);
        }
        layer.wo = create_tensor(tn(LLM_TENSOR_ATTN_OUT, "weight", i), { n_embd, n_embd }, 0);
        layer.wo_b = create_tensor(tn(LLM_TENSOR_ATTN_OUT, "bias", i), { n_embd }, 0);
        layer.ffn_norm = create_tensor(tn(LLM_TENSOR_FFN_NORM, "weight", i), { n_embd }, 0);
        layer.ffn_norm_b = create_tensor(tn(LLM_TENSOR_FFN_NORM, "bias", i), { n_embd }, 0);
        layer.ffn_up = create_tensor(tn(LLM_TENSOR_FFN_UP, "weight", i), { n_embd, n_ff }, 0);
        layer.ffn_up_b = create_tensor(tn(LLM_TENSOR_FFN_UP, "bias", i), { n_ff }, 0);
        layer.ffn_down = create_tensor(tn(LLM_TENSOR_FFN_DOWN, "weight", i), { n_ff, n_embd }, 0);
        layer.ffn_down_b = create_tensor(tn(LLM_TENSOR_FFN_DOWN, "bias", i), { n_embd }, 0);
    }
}

std::unique_ptr<llm_graph_context> llama_model_persimmon::build_arch_graph(const llm_graph_params & params) const {
    return std::make_unique<persimmon_graph>(*this, params);
}
