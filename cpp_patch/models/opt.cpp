#include "gguf_flash_hooks.h"
#include "gguf_flash_models.h"

#include "llama-adapter.h"
#include "llama-batch.h"
#include "llama-model-loader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace {

// Rows of the position table. A position beyond the table fails the decode: the table ends where
// training did, and nothing can be said about what comes after.
class learned_positions : public llm_graph_input_i {
public:
    learned_positions(ggml_tensor * rows, int64_t n_rows) : rows(rows), n_rows(n_rows) {}

    void set_input(const llama_ubatch * ubatch) override {
        std::vector<int32_t> inside(ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            const llama_pos pos = ubatch->pos[i];
            inside[i] = int32_t(std::clamp<int64_t>(pos, 0, n_rows - 1));
            if (inside[i] != pos) {
                gguf_flash_refuse_batch("cannot decode position " + std::to_string(pos) + ": the model has learned " +
                                        std::to_string(n_rows) + " positions, 0 to " + std::to_string(n_rows - 1) +
                                        "; shorten the text or make the context no larger than that");
            }
        }
        ggml_backend_tensor_set(rows, inside.data(), 0, ggml_nbytes(rows));
    }

    bool can_reuse(const llm_graph_params & params) override { return rows->ne[0] == params.ubatch.n_tokens; }

private:
    ggml_tensor * rows; // I32 {n_tokens}
    int64_t n_rows;
};

struct opt_graph : public llm_graph_context {
    opt_graph(const llama_model_opt & model, const llm_graph_params & params);

private:
    ggml_tensor * build_embeddings();
    ggml_tensor * build_projected_tokens();
    ggml_tensor * build_attention(llm_graph_input_attn_kv * inp, ggml_tensor * cur, int il);
    ggml_tensor * build_layer_ffn(ggml_tensor * cur, int il);
    void build_output(ggml_tensor * cur);

    const llama_model_opt & model;
};

// As build_inp_embd, which knows no embeddings narrower than the layers. Vectors given instead of
// tokens are as wide as the layers: what project_in would have made.
ggml_tensor * opt_graph::build_projected_tokens() {
    auto inp = std::make_unique<llm_graph_input_embd>(n_embd);
    inp->tokens = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_tokens);
    cb(inp->tokens, "inp_tokens", -1);
    ggml_set_input(inp->tokens);
    res->t_inp_tokens = inp->tokens;
    inp->embd = ggml_new_tensor_2d(ctx0, GGML_TYPE_F32, n_embd, n_tokens);
    cb(inp->embd, "inp_embd", -1);
    ggml_set_input(inp->embd);

    ggml_tensor * words = ggml_get_rows(ctx0, model.tok_embd, inp->tokens);
    for (const auto & [adapter, scale] : *loras) {
        if (llama_adapter_lora_weight * w = adapter->get_weight(model.tok_embd)) {
            ggml_tensor * delta = ggml_mul_mat(ctx0, w->b, ggml_get_rows(ctx0, w->a, inp->tokens));
            words = ggml_add(ctx0, words, ggml_scale(ctx0, delta, w->get_scale(adapter->alpha, scale)));
        }
    }
    std::array<ggml_tensor *, 2> either = { build_lora_mm(model.project_in, words), inp->embd };
    res->add_input(std::move(inp));
    ggml_tensor * cur = ggml_build_forward_select(gf, either.data(), either.size(), ubatch.token ? 0 : 1);
    res->t_inp_embd = cur;
    return cur;
}

ggml_tensor * opt_graph::build_embeddings() {
    ggml_tensor * cur = model.project_in != nullptr ? build_projected_tokens() : build_inp_embd(model.tok_embd);
    ggml_tensor * rows = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_tokens);
    ggml_set_input(rows);
    cb(rows, "inp_pos", -1);
    res->add_input(std::make_unique<learned_positions>(rows, model.pos_embd->ne[1]));
    ggml_tensor * pos = ggml_get_rows(ctx0, model.pos_embd, rows);
    cb(pos, "pos_embd", -1);
    cur = ggml_add(ctx0, cur, pos);
    cb(cur, "inpL", -1);
    return cur;
}

ggml_tensor * opt_graph::build_attention(llm_graph_input_attn_kv * inp, ggml_tensor * cur, int il) {
    const llama_layer & layer = model.layers[il];
    const int64_t n_embd_head = hparams.n_embd_head_v();
    auto [q, k, v] = build_qkv(layer, cur, n_embd_head, n_head, n_head_kv, il);
    return build_attn(inp, layer.wo, layer.wo_b, layer.wo_s, q, k, v, nullptr, nullptr, nullptr,
                      1.0f / sqrtf(float(n_embd_head)), il);
}

ggml_tensor * opt_graph::build_layer_ffn(ggml_tensor * cur, int il) {
    const llama_layer & layer = model.layers[il];
    return build_ffn(cur, layer.ffn_up, layer.ffn_up_b, nullptr, nullptr, nullptr, nullptr, layer.ffn_down,
                     layer.ffn_down_b, nullptr, nullptr, LLM_FFN_RELU, LLM_FFN_SEQ, il);
}

void opt_graph::build_output(ggml_tensor * cur) {
    if (model.output_norm != nullptr) {
        cur = build_norm(cur, model.output_norm, model.output_norm_b, LLM_NORM, -1);
    }
    cb(cur, "result_norm", -1);
    res->t_embd = cur;
    if (model.project_out != nullptr) {
        cur = build_lora_mm(model.project_out, cur);
    }
    cur = build_lora_mm(model.output, cur, model.output_s);
    cb(cur, "result_output", -1);
    res->t_logits = cur;
    ggml_build_forward_expand(gf, cur);
}

opt_graph::opt_graph(const llama_model_opt & model, const llm_graph_params & params)
    : llm_graph_context(params), model(model) {
    ggml_tensor * x = build_embeddings();
    auto * inp_attn = build_attn_inp_kv();
    ggml_tensor * inp_out_ids = build_inp_out_ids();
    const bool before = hparams.norm_before_residual;

    for (int il = 0; il < n_layer; ++il) {
        const llama_layer & layer = model.layers[il];
        auto norm = [&](ggml_tensor * t, ggml_tensor * w, ggml_tensor * b) {
            return build_norm(t, w, b, LLM_NORM, il);
        };

        ggml_tensor * cur = before ? norm(x, layer.attn_norm, layer.attn_norm_b) : x;
        cur = build_attention(inp_attn, cur, il);
        if (il == n_layer - 1 && inp_out_ids != nullptr) {
            cur = ggml_get_rows(ctx0, cur, inp_out_ids);
            x = ggml_get_rows(ctx0, x, inp_out_ids);
        }
        x = ggml_add(ctx0, cur, x);
        x = before ? x : norm(x, layer.attn_norm, layer.attn_norm_b);
        cb(x, "ffn_inp", il);

        cur = before ? norm(x, layer.ffn_norm, layer.ffn_norm_b) : x;
        cur = build_layer_ffn(cur, il);
        cb(cur, "ffn_out", il);
        x = ggml_add(ctx0, cur, x);
        x = before ? x : norm(x, layer.ffn_norm, layer.ffn_norm_b);
        x = build_cvec(x, il);
        cb(x, "l_out", il);
    }
    build_output(x);
}

} // namespace

void llama_model_opt::load_arch_hparams(llama_model_loader & ml) {
    ml.get_key(LLM_KV_ATTENTION_LAYERNORM_EPS, hparams.f_norm_eps);
    ml.get_key(LLM_KV_NORM_BEFORE_RESIDUAL, hparams.norm_before_residual);

    // The width of the embeddings, which is that of what project_out makes.
    hparams.dense_2_feat_out = hparams.n_embd;
    ml.get_key(LLM_KV_DENSE_2_FEAT_OUT, hparams.dense_2_feat_out, false);

    if (hparams.n_ctx_train == 0 || hparams.dense_2_feat_out == 0) {
        throw std::runtime_error("opt.context_length or opt.dense_2_feat_out is 0, expected at least 1");
    }
}

void llama_model_opt::load_arch_tensors(llama_model_loader &) {
    LLAMA_LOAD_LOCALS;
    const int64_t n_word = hparams.dense_2_feat_out;

    tok_embd = create_tensor(tn(LLM_TENSOR_TOKEN_EMBD, "weight"), { n_word, n_vocab }, 0);
    pos_embd = create_tensor(tn(LLM_TENSOR_POS_EMBD, "weight"), { n_embd, n_ctx_train }, 0);
    if (n_word != n_embd) {
        project_in = create_tensor(tn(LLM_TENSOR_FC, "weight"), { n_word, n_embd }, 0);
        project_out = create_tensor(tn(LLM_TENSOR_DENSE_2_OUT, "weight"), { n_embd, n_word }, 0);
    }
    // Not in the 350M form, nor in checkpoints with `_remove_final_layer_norm`.
    output_norm = create_tensor(tn(LLM_TENSOR_OUTPUT_NORM, "weight"), { n_embd }, TENSOR_NOT_REQUIRED);
    output_norm_b = create_tensor(tn(LLM_TENSOR_OUTPUT_NORM, "bias"), { n_embd }, TENSOR_NOT_REQUIRED);
    output = create_tensor(tn(LLM_TENSOR_OUTPUT, "weight"), { n_word, n_vocab }, TENSOR_NOT_REQUIRED);
    if (output == nullptr) {
        output = create_tensor(tn(LLM_TENSOR_TOKEN_EMBD, "weight"), { n_word, n_vocab }, TENSOR_DUPLICATED);
    }
    for (int i = 0; i < n_layer; ++i) {
        llama_layer & layer = layers[i];
        layer.attn_norm = create_tensor(tn(LLM_TENSOR_ATTN_NORM, "weight", i), { n_embd }, 0);
        layer.attn_norm_b = create_tensor(tn(LLM_TENSOR_ATTN_NORM, "bias", i), { n_embd }, 0);
        create_tensor_qkv(layer, i, n_embd, n_embd, n_embd_k_gqa, n_embd_v_gqa, 0);
        layer.wo = create_tensor(tn(LLM_TENSOR_ATTN_OUT, "weight", i), { n_embd, n_embd }, 0);
        layer.ffn_norm = create_tensor(tn(LLM_TENSOR_FFN_NORM, "weight", i), { n_embd }, 0);
        layer.ffn_norm_b = create_tensor(tn(LLM_TENSOR_FFN_NORM, "bias", i), { n_embd }, 0);
        layer.ffn_up = create_tensor(tn(LLM_TENSOR_FFN_UP, "weight", i), { n_embd, n_ff }, 0);
        layer.ffn_down = create_tensor(tn(LLM_TENSOR_FFN_DOWN, "weight", i), { n_ff, n_embd }, 0);
        // Absent from checkpoints with `enable_bias` false.
        layer.wo_b = create_tensor(tn(LLM_TENSOR_ATTN_OUT, "bias", i), { n_embd }, TENSOR_NOT_REQUIRED);
        layer.ffn_up_b = create_tensor(tn(LLM_TENSOR_FFN_UP, "bias", i), { n_ff }, TENSOR_NOT_REQUIRED);
        layer.ffn_down_b = create_tensor(tn(LLM_TENSOR_FFN_DOWN, "bias", i), { n_embd }, TENSOR_NOT_REQUIRED);
    }
}

std::unique_ptr<llm_graph_context> llama_model_opt::build_arch_graph(const llm_graph_params & params) const {
    return std::make_unique<opt_graph>(*this, params);
}
