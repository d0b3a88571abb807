// The FFN against a reference in double precision that knows nothing of bundles or caches.
#include "ffn_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using namespace gguf_flash;

namespace {

struct Types {
    const char * name;
    ggml_type gate, up, down;
    uint32_t n_embd;
    double tolerance; // relative to the length of the output
};

// The reference takes x as it is; ggml's dot product first rounds x to the type beside the weights.
// That rounding is the tolerance, doubled by gate times up and by squaring, plus a margin:
constexpr double exact_x = 1e-5;    // F32: sums in float only
constexpr double half_x = 2e-3;     // F16: 11 bits of x
constexpr double bfloat_x = 1.5e-2; // BF16: 8 bits of x
constexpr double byte_x = 4e-2;     // Q8_0 and Q8_K: steps of the largest of 32 (256) values over 127
constexpr double gelu_table = 2e-3; // gelu is rounded to halves, as upstream's table is

const Types all_types[] = {
    { "F32", GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_F32, 64, exact_x },
    { "F16", GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16, 64, half_x },
    { "BF16", GGML_TYPE_BF16, GGML_TYPE_BF16, GGML_TYPE_BF16, 64, bfloat_x },
    { "Q8_0", GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 64, byte_x },
    { "Q4_0", GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, 96, byte_x },
    { "Q4_K", GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, 256, byte_x },
    { "mixed", GGML_TYPE_Q4_0, GGML_TYPE_F32, GGML_TYPE_F16, 96, byte_x },
    { "K mixed", GGML_TYPE_Q6_K, GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, 512, byte_x },
};

FlashSpec spec_of(const Types & types, const char * activation, bool gated, Select select) {
    FlashSpec spec;
    spec.n_embd = types.n_embd;
    spec.n_ff = { 150 };
    spec.gate = types.gate;
    spec.up = types.up;
    spec.down = types.down;
    spec.gated = gated;
    spec.select = select;
    spec.activation = activation;
    spec.biases = true;
    return spec;
}

void compare(const FlashSpec & spec, double tolerance) {
    const StoredFlash stored(spec);
    const auto model = open_flash(stored.path, { { "ram", "70%" } });
    for (uint32_t n_tokens : { 1u, 3u, 17u, 64u }) {
        CAPTURE(n_tokens);
        const std::vector<float> x = stored.input(n_tokens, n_tokens);
        const std::vector<float> out = call(*model, spec.layers[0], x, n_tokens, 2);
        CHECK(worst_error(out, reference_ffn(stored.file, 0, x, n_tokens), n_tokens) < tolerance);
    }
}

} // namespace

TEST_CASE("ffn: every activation, gated and not, both selections, every kind of type") {
    for (const Types & types : all_types) {
        for (const char * activation : { "relu", "relu_sqr", "silu", "gelu", "gelu_erf", "drelu" }) {
            for (bool gated : { true, false }) {
                if (!gated && std::string(activation) == "drelu") {
                    continue;
                }
                for (Select select : { Select::all, Select::gate }) {
                    CAPTURE(std::string(types.name));
                    CAPTURE(std::string(activation));
                    CAPTURE(gated);
                    CAPTURE(int(select));
                    compare(spec_of(types, activation, gated, select),
                            types.tolerance + (std::string(activation) == "gelu" ? gelu_table : 0));
                }
            }
        }
    }
}

TEST_CASE("ffn: thresholds cut small activations") {
    for (const char * activation : { "relu", "relu_sqr", "silu", "gelu_erf", "drelu" }) {
        for (Select select : { Select::all, Select::gate }) {
            FlashSpec spec = spec_of(all_types[0], activation, true, select);
            spec.thresholds = { 0.4f };
            CAPTURE(std::string(activation));
            compare(spec, exact_x);
            const StoredFlash stored(spec);
            const std::vector<float> x = stored.input(3);
            FlashSpec none = spec;
            none.thresholds = {};
            const FlashFile uncut(none);
            const auto model = open_flash(stored.path, { { "threshold", "0" } }); // the setting wins
            CHECK(worst_error(call(*model, 0, x, 3), reference_ffn(uncut, 0, x, 3), 3) < exact_x);
        }
    }
}

TEST_CASE("ffn: each neuron has its own threshold") {
    for (const char * activation : { "relu", "relu_sqr", "silu", "gelu_erf" }) {
        for (Select select : { Select::all, Select::gate }) {
            FlashSpec spec = spec_of(all_types[0], activation, true, select);
            spec.thresholds = { 5.0f }; // of the layer: counts for nothing
            spec.neuron_thresholds = 0.8f;
            CAPTURE(std::string(activation));
            compare(spec, exact_x);
            const StoredFlash stored(spec);
            const std::vector<float> x = stored.input(3);
            FlashSpec other = spec;
            other.thresholds = { 0.25f };
            other.neuron_thresholds = 0;
            const auto model = open_flash(stored.path, { { "threshold", "0.25" } }); // the setting wins
            CHECK(worst_error(call(*model, 0, x, 3), reference_ffn(FlashFile(other), 0, x, 3), 3) < exact_x);
        }
    }
}

TEST_CASE("ffn: a threshold that is none is refused when the model is opened") {
    for (float value : { NAN, INFINITY, -0.5f }) {
        FlashSpec spec = spec_of(all_types[0], "silu", true, Select::gate);
        spec.neuron_thresholds = 0.8f;
        FlashFile file(spec);
        std::memcpy(file.image.tensor("blk.0.ffn_threshold").data.data() + 8, &value, sizeof(value));
        TempFolder folder;
        const std::string path = folder.write("model.gguf", file.image.bytes());
        const auto opened = Standalone::open(path, Settings());
        REQUIRE_FALSE(opened.ok());
        CHECK(opened.status().code() == Code::corrupt);
        CHECK(opened.status().message().find("value 2 of tensor 'blk.0.ffn_threshold'") != std::string::npos);
    }
}

TEST_CASE("ffn: drelu needs a gate, whoever asks for it") {
    const StoredFlash stored(spec_of(all_types[0], "relu", false, Select::all));
    const auto refused = Standalone::open(stored.path, settings_of({ { "activation", "drelu" } }));
    CHECK(refused.status().code() == Code::argument);
    CHECK(refused.status().message().find("have no gate") != std::string::npos);
}

TEST_CASE("ffn: activate") {
    CHECK(activate(Activation::relu, 0.5f, 0.5f) == 0.0f);
    CHECK(activate(Activation::relu, 0.6f, 0.5f) == 0.6f);
    CHECK(activate(Activation::relu, -3.0f, 0.0f) == 0.0f);
    CHECK(activate(Activation::relu_sqr, 3.0f, 0.0f) == 9.0f);
    CHECK(activate(Activation::relu_sqr, -3.0f, 0.0f) == 0.0f);
    CHECK(activate(Activation::silu, 0.0f, 0.0f) == 0.0f);
    CHECK(activate(Activation::silu, 1.0f, 0.0f) == doctest::Approx(0.7310586f));
    CHECK(activate(Activation::silu, -1.0f, 0.3f) == 0.0f);
    CHECK(activate(Activation::gelu, -11.0f, 0.0f) == 0.0f);
    CHECK(activate(Activation::gelu, 11.0f, 0.0f) == 11.0f);
    CHECK(activate(Activation::gelu, 1.0f, 0.0f) == doctest::Approx(0.8412f).epsilon(0.001));
    CHECK(activate(Activation::gelu_erf, 1.0f, 0.0f) == doctest::Approx(0.8413447f));
}

TEST_CASE("ffn: the graph's activation serves a file that names none, the file's wins over it") {
    FlashSpec spec = spec_of(all_types[0], "", false, Select::gate);
    const StoredFlash stored(spec);
    const auto model = open_flash(stored.path);
    const std::vector<float> x = stored.input(1);
    std::vector<float> out(x.size(), 3.0f);
    Status status = model->ffn(0, x.data(), 1, out.data(), 2);
    CHECK(status.code() == Code::argument);
    CHECK(status.message().find("flash_ffn.activation") != std::string::npos);
    CHECK(zero(out));

    const std::vector<float> scores(150, 2.0f);
    FfnInput in;
    in.n_tokens = 1;
    in.x = x.data();
    in.scores = scores.data();
    in.scores_stride = 150;
    in.out = out.data();
    in.activation = Activation::relu_sqr;
    const std::shared_ptr<Model> shared(model, &model->model());
    FfnOp op(shared, 0);
    REQUIRE(run_op(op, in, 2).ok());
    double sum = 0;
    for (uint32_t i = 0; i < 150; ++i) {
        sum += 4.0 * stored.file.layers[0].down[i * 64 + 7];
    }
    CHECK(out[7] == doctest::Approx(sum).epsilon(1e-4));
    in.scores = nullptr;
    CHECK(run_op(op, in, 2).code() == Code::argument);
    CHECK(zero(out));
}

TEST_CASE("ffn: rows of inputs, scores and outputs may lie apart") {
    const StoredFlash stored(spec_of(all_types[1], "silu", true, Select::all));
    const auto model = open_flash(stored.path);
    const std::shared_ptr<Model> shared(model, &model->model());
    const uint32_t n = 64, n_tokens = 5;
    const std::vector<float> x = stored.input(n_tokens);
    std::vector<float> wide_x(n_tokens * 100, NAN), wide_out(n_tokens * 90, 42.0f);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        std::copy_n(x.begin() + t * n, n, wide_x.begin() + t * 100);
    }
    FfnInput in;
    in.n_tokens = n_tokens;
    in.x = wide_x.data();
    in.x_stride = 100;
    in.out = wide_out.data();
    in.out_stride = 90;
    in.gate_bias = stored.file.layers[0].gate_bias.data();
    in.up_bias = stored.file.layers[0].up_bias.data();
    FfnOp op(shared, 0);
    REQUIRE(run_op(op, in, 3).ok());
    const std::vector<float> dense = call(*model, 0, x, n_tokens);
    for (uint32_t t = 0; t < n_tokens; ++t) {
        for (uint32_t c = 0; c < 90; ++c) {
            const float got = wide_out[t * 90 + c];
            REQUIRE(got + (c < n ? stored.file.layers[0].down_bias[c] : 0) == (c < n ? dense[t * n + c] : 42.0f));
        }
    }
}

TEST_CASE("ffn: calls that make no sense") {
    const StoredFlash stored(spec_of(all_types[0], "relu", true, Select::all));
    const auto model = open_flash(stored.path);
    std::vector<float> x = stored.input(1), out(x.size());
    CHECK(model->ffn(7, x.data(), 1, out.data(), 1).code() == Code::argument);
    CHECK(model->ffn(0, x.data(), 1, out.data(), 0).code() == Code::argument);
    CHECK(model->ffn(0, x.data(), 1, out.data(), 5000).code() == Code::argument);
    CHECK(model->ffn(0, x.data(), 0, out.data(), 1).ok());
}
