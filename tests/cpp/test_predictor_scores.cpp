// Standalone in mode predictor against a computation in double that knows no engine.
#include "ffn_runner.h"

#include <cmath>

using namespace gguf_flash;

namespace {

struct Types {
    ggml_type a, b, part;
    double tolerance; // relative to the length of all scores, or of an output; see test_ffn.cpp
};

const Types all_types[] = {
    { GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_F32, 1e-5 },
    { GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16, 2e-3 },
    { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 4e-2 },
    { GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_F16, 4e-2 },
};

FlashSpec spec_of(const Types & types, bool gated, bool fused) {
    FlashSpec spec;
    spec.select = Select::predictor;
    spec.layers = { 2, 7 };
    spec.n_ff = { 150, 90 };
    spec.gated = gated;
    spec.fused = fused;
    spec.activation = gated ? "silu" : "relu";
    spec.gate = spec.up = spec.down = types.part;
    spec.predictor.a = types.a;
    spec.predictor.b = types.b;
    spec.predictor.ranks = { 32, 64 };
    spec.predictor.thresholds = { 0.3f, 0.6f };
    spec.biases = !fused; // FlashFile writes no fused bias
    return spec;
}

// What the engine's own scores select; they must agree with the true ones but for borderline cases.
std::vector<uint8_t> selection(const std::vector<float> & scores, const std::vector<double> & truth, double limit,
                               double margin) {
    std::vector<uint8_t> selected(scores.size());
    size_t differ = 0, chosen = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
        selected[i] = scores[i] > float(limit);
        chosen += selected[i];
        differ += std::fabs(truth[i] - limit) > margin && (truth[i] > limit) != (selected[i] != 0);
    }
    CHECK(differ == 0);
    CHECK(chosen > scores.size() / 10);
    CHECK(chosen < scores.size() * 9 / 10);
    return selected;
}

double length(const std::vector<double> & values) {
    double sum = 0;
    for (double v : values) {
        sum += v * v;
    }
    return std::sqrt(sum / double(values.size()));
}

void compare(const FlashSpec & spec, double tolerance) {
    const StoredFlash stored(spec);
    const auto model = open_flash(stored.path, { { "ram", "70%" } });
    for (size_t index = 0; index < spec.layers.size(); ++index) {
        for (uint32_t n_tokens : { 1u, 3u, 17u }) {
            CAPTURE(n_tokens);
            const std::vector<float> x = stored.input(n_tokens, n_tokens);
            const std::vector<double> truth = reference_scores(stored.file, index, x, n_tokens);
            std::vector<float> scores, again;
            REQUIRE(model->scores(spec.layers[index], x.data(), n_tokens, scores, 1).ok());
            REQUIRE(model->scores(spec.layers[index], x.data(), n_tokens, again, 3).ok());
            REQUIRE(scores.size() == size_t(n_tokens) * spec.n_ff[index]);
            CHECK(scores == again);
            CHECK(worst_error(scores, truth, n_tokens) < tolerance);
            const double t = double(spec.predictor.thresholds[index]), limit = std::log(t / (1 - t));
            const std::vector<uint8_t> selected = selection(scores, truth, limit, 6 * tolerance * length(truth));
            const std::vector<double> expected = reference_ffn(stored.file, index, x, n_tokens, selected);
            CHECK(worst_error(call(*model, spec.layers[index], x, n_tokens, 2), expected, n_tokens) < tolerance);
        }
    }
}

} // namespace

TEST_CASE("predictor scores: as computed in double, and the FFN of the neurons they select") {
    for (const Types & types : all_types) {
        for (bool gated : { true, false }) {
            CAPTURE(std::string(ggml_type_name(types.b)));
            CAPTURE(gated);
            compare(spec_of(types, gated, false), types.tolerance);
        }
        compare(spec_of(types, true, true), types.tolerance);
    }
}

TEST_CASE("predictor scores: no tokens, no such layer, other modes") {
    const StoredFlash stored(spec_of(all_types[0], true, false));
    const auto model = open_flash(stored.path);
    const std::vector<float> x = stored.input(1);
    std::vector<float> scores = { 1.0f };
    CHECK(model->scores(2, x.data(), 0, scores, 1).ok());
    CHECK(scores.empty());
    CHECK(model->scores(3, x.data(), 1, scores, 1).code() == Code::argument);
    FlashSpec spec = spec_of(all_types[0], true, false);
    spec.select = Select::all;
    const StoredFlash all(spec);
    CHECK(open_flash(all.path)->scores(2, x.data(), 1, scores, 1).ok());
    CHECK(scores.empty());
}
