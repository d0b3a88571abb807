// The norm over hidden values that BitNet has between up and down.
#include "ffn_runner.h"

#include <cmath>

using namespace gguf_flash;

namespace {

constexpr float eps = 1e-3f; // large enough to matter

FlashSpec spec_of(Select select) {
    FlashSpec spec;
    spec.gate = spec.up = spec.down = GGML_TYPE_F32;
    spec.select = select;
    spec.activation = "relu_sqr";
    return spec;
}

// D (w h) / sqrt(mean(h^2) + eps), in double.
std::vector<double> reference(const FlashFile & file, const std::vector<float> & x, uint32_t n_tokens,
                              const std::vector<float> & weights) {
    const DenseLayer & layer = file.layers[0];
    const uint32_t n = file.spec.n_embd;
    std::vector<double> out(size_t(n_tokens) * n);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        double squares = 0;
        for (uint32_t i = 0; i < layer.n_ff; ++i) {
            double gate = 0, up = 0;
            for (uint32_t c = 0; c < n; ++c) {
                gate += double(layer.gate[i * n + c]) * x[t * n + c];
                up += double(layer.up[i * n + c]) * x[t * n + c];
            }
            const double h = gate > 0 ? gate * gate * up : 0;
            squares += h * h;
            for (uint32_t c = 0; c < n; ++c) {
                out[t * n + c] += h * weights[i] * layer.down[i * n + c];
            }
        }
        for (uint32_t c = 0; c < n; ++c) {
            out[t * n + c] /= std::sqrt(squares / layer.n_ff + double(eps));
        }
    }
    return out;
}

std::vector<float> run(const StoredFlash & stored, const SettingList & settings, uint32_t n_tokens, int threads,
                       const std::vector<float> & weights) {
    const auto model = open_flash(stored.path, settings);
    const std::vector<float> x = stored.input(n_tokens);
    std::vector<float> out(x.size(), 1e30f), scores;
    REQUIRE(model->scores(0, x.data(), n_tokens, scores, 1).ok());
    FfnInput in;
    in.n_tokens = n_tokens;
    in.x = x.data();
    in.x_stride = in.out_stride = stored.file.spec.n_embd;
    in.scores = scores.empty() ? nullptr : scores.data();
    in.scores_stride = weights.size();
    in.out = out.data();
    in.norm = weights.data();
    in.norm_eps = eps;
    FfnOp op(std::shared_ptr<Model>(model, &model->model()), 0);
    REQUIRE(run_op(op, in, threads).ok());
    return out;
}

} // namespace

TEST_CASE("ffn: an RMS norm over hidden values, and the same bits in waves, streams and threads") {
    for (Select select : { Select::all, Select::gate }) {
        const StoredFlash stored(spec_of(select));
        const std::vector<float> weights = Random(9).reals(stored.file.layers[0].n_ff, 1.0f);
        for (uint32_t n_tokens : { 1u, 3u, 17u }) {
            const std::vector<float> out = run(stored, {}, n_tokens, 1, weights);
            const std::vector<double> expected = reference(stored.file, stored.input(n_tokens), n_tokens, weights);
            CHECK(worst_error(out, expected, n_tokens) < 1e-5);
            const std::string least = std::to_string(least_ram(stored.path));
            CHECK(run(stored, { { "ram", least } }, n_tokens, 3, weights) == out);
            CHECK(run(stored, { { "prefill", "stream" } }, n_tokens, 2, weights) == out);
        }
    }
}

TEST_CASE("ffn: alone, the FFNs of BitNet and Gemma 3n are refused") {
    for (const char * arch : { "bitnet", "gemma3n" }) {
        FlashFile file(spec_of(Select::gate));
        file.image.set("general.architecture", str_value(arch));
        TempFolder folder;
        const auto refused = Standalone::open(folder.write("m.gguf", file.image.bytes()), Settings());
        CHECK(refused.status().code() == Code::unsupported);
        CHECK(refused.status().message().find(arch) != std::string::npos);
    }
}
