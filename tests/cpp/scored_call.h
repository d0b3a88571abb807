// Calls of an FfnOp with scores that a test chose, as llama.cpp's graph makes them.
#pragma once

#include "ffn_runner.h"

#include <limits>

struct ScoredModel {
    explicit ScoredModel(const StoredFlash & s, const SettingList & settings = {})
        : stored(s), standalone(open_flash(s.path, settings)), model(standalone, &standalone->model()) {}

    // out is overwritten, also on an error; it lacks the down bias.
    gguf_flash::Status run(size_t index, const std::vector<float> & x, const float * scores, uint32_t n_tokens,
                           std::vector<float> & out, int threads = 1) {
        const DenseLayer & layer = stored.file.layers[index];
        out.assign(x.size(), 1e30f);
        gguf_flash::FfnInput in;
        in.n_tokens = n_tokens;
        in.x = x.data();
        in.scores = scores;
        in.scores_stride = layer.n_ff;
        in.x_stride = in.out_stride = stored.file.spec.n_embd;
        in.gate_bias = layer.gate_bias.empty() ? nullptr : layer.gate_bias.data();
        in.up_bias = layer.up_bias.empty() ? nullptr : layer.up_bias.data();
        in.out = out.data();
        gguf_flash::FfnOp op(model, int(index));
        return run_op(op, in, threads);
    }
    std::vector<float> must(size_t index, const std::vector<float> & x, const float * scores, uint32_t n_tokens,
                            int threads = 1) {
        std::vector<float> out;
        const gguf_flash::Status status = run(index, x, scores, n_tokens, out, threads);
        REQUIRE_MESSAGE(status.ok(), status.message());
        return out;
    }
    gguf_flash::Counters counters() const { return model->stats().total; }

    const StoredFlash & stored;
    std::shared_ptr<gguf_flash::Standalone> standalone;
    std::shared_ptr<gguf_flash::Model> model;
};

// Finite scores of every size and sign, the largest among them.
inline std::vector<float> wild_scores(size_t n, uint64_t seed) {
    const float most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
    const std::vector<float> extremes = { 0.0f, -0.0f, most, -most, least, -least, 1e-20f, -1e20f, 88.0f, -120.0f };
    Random random(seed);
    std::vector<float> scores(n);
    for (float & s : scores) {
        s = random.chance(30) ? random.pick(extremes) : random.real() * 20;
    }
    return scores;
}
