// The recorder on hand-built graphs: through ggml's scheduler, and node by node where a graph is odd.
#include "gguf_flash/recorder.h"

#include "random_data.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

using namespace gguf_flash;

namespace {

const uint32_t N_EMBD = 8, N_FF = 13;

// Tensors with data of their own, filled at random.
class Graph {
public:
    Graph() : ctx_(ggml_init({ 4u << 20, nullptr, false })) {}
    ~Graph() { ggml_free(ctx_); }
    Graph(const Graph &) = delete;
    Graph & operator=(const Graph &) = delete;

    ggml_context * ctx() { return ctx_; }
    ggml_tensor * floats(int64_t columns, int64_t rows, const std::string & name = "") {
        ggml_tensor * t = ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, columns, rows);
        for (int64_t i = 0; i < columns * rows; ++i) {
            ggml_get_data_f32(t)[i] = random_.real();
        }
        ggml_set_name(t, name.c_str());
        return t;
    }
    // The product of a weight of layer `layer` with what it is given.
    ggml_tensor * product(int layer, const std::string & part, ggml_tensor * given) {
        const int64_t rows = part == "down" ? N_EMBD : N_FF;
        const std::string name = "blk." + std::to_string(layer) + ".ffn_" + part + ".weight";
        return ggml_mul_mat(ctx_, floats(given->ne[0], rows, name), given);
    }

private:
    ggml_context * ctx_;
    Random random_{ 7 };
};

Recorder recorder(uint32_t tokens, bool magnitudes = false) {
    return { "model.gguf", N_EMBD, { { 3, N_FF }, { 0, N_FF } }, tokens, magnitudes };
}

bool feed(Recorder & r, ggml_tensor * node) {
    return Recorder::on_node(node, true, &r) && Recorder::on_node(node, false, &r);
}

Recorder::Rows rows(const Recorder & r, uint32_t layer) {
    const Result<Recorder::Rows> found = r.rows(layer);
    REQUIRE_MESSAGE(found.ok(), found.status().message());
    return found.value();
}

bool is_active(const Recorder::Rows & rows, uint32_t token, uint32_t neuron) {
    return rows.active[token * ((N_FF + 7) / 8) + neuron / 8] >> (neuron % 8) & 1;
}

void check_refused(const Recorder & r, uint32_t tokens, const std::string & words) {
    const Status status = r.check(tokens);
    CHECK(status.code() == Code::unsupported);
    CHECK_MESSAGE(status.message().find(words) != std::string::npos, status.message());
    CHECK(status.message().find("model.gguf") != std::string::npos);
    CHECK(status.message().find('\n') == std::string::npos);
}

} // namespace

TEST_CASE("recorder: two layers through the scheduler, in two evaluations") {
    const uint32_t n = 5;
    Graph g;
    Recorder r = recorder(2 * n, true);
    ggml_tensor * input = g.floats(N_EMBD, n);
    ggml_tensor * x3 = ggml_scale(g.ctx(), input, 2.0f);
    ggml_tensor * h3 = ggml_relu(g.ctx(), g.product(3, "up", x3));
    ggml_tensor * x0 = g.product(3, "down", h3);
    ggml_tensor * gate = ggml_relu(g.ctx(), g.product(0, "gate", x0));
    ggml_tensor * h0 = ggml_mul(g.ctx(), gate, g.product(0, "up", x0));
    ggml_cgraph * graph = ggml_new_graph(g.ctx());
    ggml_build_forward_expand(graph, g.product(0, "down", h0));

    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_sched_t sched = ggml_backend_sched_new(&cpu, nullptr, 1, 64, false, false);
    ggml_backend_sched_set_eval_callback(sched, Recorder::on_node, &r);
    for (int i = 0; i < 2; ++i) {
        REQUIRE(ggml_backend_sched_graph_compute(sched, graph) == GGML_STATUS_SUCCESS);
    }
    ggml_backend_sched_free(sched);
    ggml_backend_free(cpu);

    const Status status = r.check(2 * n);
    REQUIRE_MESSAGE(status.ok(), status.message());
    CHECK(r.layers() == std::vector<uint32_t>{ 0, 3 });
    CHECK(r.buffer_bytes() == 2 * (2 * n) * (2 * N_EMBD + 2 + N_FF));
    int active = 0;
    for (const auto & [layer, x, h] : { std::tuple(3u, x3, h3), std::tuple(0u, x0, h0) }) {
        const Recorder::Rows found = rows(r, layer);
        REQUIRE(found.tokens == 2 * n);
        for (uint32_t t = 0; t < 2 * n; ++t) {
            for (uint32_t i = 0; i < N_EMBD; ++i) {
                const float value = ggml_get_data_f32(x)[t % n * N_EMBD + i];
                CHECK(found.x[t * N_EMBD + i] == ggml_fp32_to_fp16(value));
            }
            for (uint32_t i = 0; i < N_FF; ++i) {
                const float value = ggml_get_data_f32(h)[t % n * N_FF + i];
                CHECK(is_active(found, t, i) == (value != 0));
                CHECK(found.magnitudes[t * N_FF + i] == magnitude_code(value));
                active += value != 0;
            }
            CHECK(found.active[t * 2 + 1] < 1 << (N_FF % 8));
        }
    }
    CHECK(active > 0);
    CHECK(active < int(4 * n * N_FF));
}

TEST_CASE("recorder: only products with the weights themselves are asked for") {
    Graph g;
    Recorder r = recorder(4);
    ggml_tensor * x = g.floats(N_EMBD, 2);
    ggml_tensor * weight = g.floats(N_EMBD, N_FF, "blk.0.ffn_up.weight");
    ggml_tensor * view = ggml_view_2d(g.ctx(), weight, N_EMBD, 4, weight->nb[1], 0);
    CHECK_FALSE(Recorder::on_node(ggml_mul_mat(g.ctx(), view, x), true, &r));
    CHECK_FALSE(Recorder::on_node(ggml_add(g.ctx(), weight, weight), true, &r));
    CHECK_FALSE(Recorder::on_node(g.product(1, "up", x), true, &r)); // a layer that is not watched
    for (const char * name : { "blk.0.ffn_up.bias", "blk.x.ffn_up.weight", "blk.0ffn_up.weight", "ffn_up.weight",
                               "blk.99999999999.ffn_up.weight", "blk.0.ffn_up_exps.weight", "blk." }) {
        CAPTURE(name);
        CHECK_FALSE(Recorder::on_node(ggml_mul_mat(g.ctx(), g.floats(N_EMBD, N_FF, name), x), true, &r));
    }
    check_refused(r, 2, "multiplies no ffn_up");
    CHECK(r.layers().empty());
    CHECK(r.buffer_bytes() == 0);
    CHECK(r.rows(0).status().code() == Code::argument);
}

TEST_CASE("recorder: inputs only, of FFNs that are on flash") {
    Graph g;
    Recorder r{ "model.gguf", N_EMBD, { { 3, N_FF }, { 0, N_FF } }, 4, false, true };
    ggml_tensor * x0 = g.floats(N_EMBD, 2);
    ggml_tensor * x3 = g.floats(N_EMBD, 2);
    CHECK_FALSE(Recorder::on_node(g.product(0, "down", g.floats(N_FF, 2)), true, &r));
    for (int i = 0; i < 2; ++i) { // two evaluations
        CHECK(feed(r, g.product(0, "gate", x0)));
        CHECK(feed(r, g.product(3, "pred_a", x3)));
    }
    const Status status = r.check(4);
    REQUIRE_MESSAGE(status.ok(), status.message());
    CHECK(r.layers() == std::vector<uint32_t>{ 0, 3 });
    for (const auto & [layer, x] : { std::pair(0u, x0), std::pair(3u, x3) }) {
        const Recorder::Rows found = rows(r, layer);
        REQUIRE(found.tokens == 4);
        CHECK(found.active == nullptr);
        for (uint32_t i = 0; i < 4 * N_EMBD; ++i) {
            CHECK(found.x[i] == ggml_fp32_to_fp16(ggml_get_data_f32(x)[i % (2 * N_EMBD)]));
        }
    }
    CHECK(r.buffer_bytes() == 2 * 4 * 2 * N_EMBD);
    feed(r, g.product(0, "gate", x0));
    check_refused(r, 4, "more than once");

    Recorder usual = recorder(4); // a dense model has no predictor, and its hidden vectors count
    CHECK_FALSE(Recorder::on_node(g.product(3, "pred_a", x3), true, &usual));
}

TEST_CASE("recorder: strided rows, halves and more dimensions") {
    Graph g;
    Recorder r = recorder(6);
    ggml_tensor * wide = g.floats(N_EMBD + 3, 6);
    ggml_tensor * x = ggml_view_3d(g.ctx(), wide, N_EMBD, 2, 3, wide->nb[1], 2 * wide->nb[1], 0);
    ggml_tensor * upright = g.floats(6, N_FF); // columns are tokens
    ggml_tensor * h = ggml_transpose(g.ctx(), upright);
    CHECK(feed(r, g.product(3, "up", x)));
    CHECK(feed(r, ggml_mul_mat(g.ctx(), g.floats(N_FF, N_EMBD, "blk.3.ffn_down.weight"), h)));
    REQUIRE(r.check(6).ok());
    for (uint32_t t = 0; t < 6; ++t) {
        for (uint32_t i = 0; i < N_EMBD; ++i) {
            const float value = ggml_get_data_f32(wide)[t * (N_EMBD + 3) + i];
            CHECK(rows(r, 3).x[t * N_EMBD + i] == ggml_fp32_to_fp16(value));
        }
    }

    ggml_tensor * halves = ggml_new_tensor_2d(g.ctx(), GGML_TYPE_F16, N_FF, 1);
    for (uint32_t i = 0; i < N_FF; ++i) {
        static_cast<ggml_fp16_t *>(halves->data)[i] = ggml_fp32_to_fp16(i % 3 == 0 ? 0.0f : -1.5f);
    }
    r.clear();
    CHECK(feed(r, g.product(0, "gate", g.floats(N_EMBD, 1))));
    CHECK(feed(r, g.product(0, "down", halves)));
    REQUIRE(r.check(1).ok());
    CHECK(r.layers() == std::vector<uint32_t>{ 0 });
    for (uint32_t i = 0; i < N_FF; ++i) {
        CHECK(is_active(rows(r, 0), 0, i) == (i % 3 != 0));
    }
}

TEST_CASE("recorder: inputs beyond a half's range, negative zero and tiny values") {
    Graph g;
    Recorder r = recorder(1);
    ggml_tensor * x = g.floats(N_EMBD, 1);
    ggml_tensor * h = g.floats(N_FF, 1);
    const float inputs[] = { 1e6f, -1e6f, 65504.0f, 1e-8f };
    const float hiddens[] = { -0.0f, 1e-44f, 0.0f };
    std::copy(std::begin(inputs), std::end(inputs), ggml_get_data_f32(x));
    std::copy(std::begin(hiddens), std::end(hiddens), ggml_get_data_f32(h));
    CHECK(feed(r, g.product(0, "up", x)));
    CHECK(feed(r, g.product(0, "down", h)));
    REQUIRE(r.check(1).ok());
    const float expected[] = { 65504.0f, -65504.0f, 65504.0f, 0.0f };
    for (int i = 0; i < 4; ++i) {
        CHECK(ggml_fp16_to_fp32(rows(r, 0).x[i]) == expected[i]);
    }
    CHECK_FALSE(is_active(rows(r, 0), 0, 0));
    CHECK(is_active(rows(r, 0), 0, 1));
    CHECK_FALSE(is_active(rows(r, 0), 0, 2));
    CHECK(rows(r, 0).magnitudes == nullptr);
}

TEST_CASE("recorder: what cannot be recorded is refused until the recorder is cleared") {
    Graph g;
    Recorder r = recorder(3);
    ggml_tensor * x = g.floats(N_EMBD, 2);
    ggml_tensor * h = g.floats(N_FF, 2);

    CHECK(feed(r, g.product(0, "up", x)));
    SUBCASE("weights used twice") {
        CHECK_FALSE(feed(r, g.product(0, "up", x)));
        check_refused(r, 2, "used twice");
        CHECK_FALSE(Recorder::on_node(g.product(3, "up", x), true, &r)); // no stop for what is not taken
    }
    SUBCASE("a second FFN after the first") {
        CHECK(feed(r, g.product(0, "down", h)));
        CHECK_FALSE(feed(r, g.product(0, "up", g.floats(N_EMBD, 2))));
        check_refused(r, 2, "more than once for a token");
    }
    SUBCASE("gate and up with different inputs") {
        CHECK_FALSE(feed(r, g.product(0, "gate", g.floats(N_EMBD, 2))));
        check_refused(r, 2, "different inputs");
    }
    SUBCASE("fewer hidden vectors than inputs") {
        CHECK(feed(r, g.product(0, "down", g.floats(N_FF, 1))));
        check_refused(r, 2, "found 2 and 1");
    }
    SUBCASE("no down") {
        check_refused(r, 2, "found 2 and 0");
    }
    SUBCASE("down alone") {
        CHECK_FALSE(feed(r, g.product(3, "down", h)));
        check_refused(r, 2, "layer 3 of 'model.gguf': down is computed without");
    }
    SUBCASE("fewer tokens than expected") {
        CHECK(feed(r, g.product(0, "down", h)));
        check_refused(r, 3, "expected 3 inputs");
    }
    SUBCASE("another width") {
        CHECK_FALSE(feed(r, g.product(0, "down", g.floats(N_FF + 1, 2))));
        check_refused(r, 2, "rows of 13 values, found 14");
    }
    SUBCASE("another type") {
        ggml_tensor * whole = ggml_new_tensor_2d(g.ctx(), GGML_TYPE_I32, N_FF, 2);
        CHECK_FALSE(feed(r, g.product(0, "down", whole)));
        check_refused(r, 2, "found i32");
    }
    SUBCASE("a hidden vector that is not finite") {
        ggml_get_data_f32(h)[N_FF + 4] = std::numeric_limits<float>::quiet_NaN();
        CHECK_FALSE(feed(r, g.product(0, "down", h)));
        check_refused(r, 2, "hidden vector for token 1");
    }
    SUBCASE("an input that is not finite") {
        ggml_get_data_f32(x)[0] = std::numeric_limits<float>::infinity();
        CHECK_FALSE(feed(r, g.product(3, "up", x)));
        check_refused(r, 2, "input for token 0");
    }
    r.clear();
    ggml_get_data_f32(h)[N_FF + 4] = 1.0f;
    ggml_get_data_f32(x)[0] = 1.0f;
    CHECK(feed(r, g.product(0, "up", x)));
    CHECK(feed(r, g.product(0, "down", h)));
    CHECK(r.check(2).ok());
}

TEST_CASE("recorder: magnitude codes") {
    CHECK(magnitude_code(0.0f) == 0);
    CHECK(magnitude_code(-0.0f) == 0);
    CHECK(magnitude_code(1.0f) == 161);
    CHECK(magnitude_code(-1.0f) == 161);
    CHECK(magnitude_code(2.0f) == 169);
    CHECK(magnitude_code(std::ldexp(1.0f, -20)) == 1);
    CHECK(magnitude_code(1e-44f) == 1);
    CHECK(magnitude_code(3443.0f) == 255);
    CHECK(magnitude_code(std::numeric_limits<float>::max()) == 255);
    uint8_t last = 1;
    for (float h = 1e-7f; h < 1e4f; h *= 1.01f) {
        const uint8_t code = magnitude_code(h);
        CHECK(code >= last);
        last = code;
        if (code > 1 && code < 255) {
            const float middle = std::exp2((float(code) - 161) / 8);
            CHECK(std::fabs(std::log2(h / middle)) < 1.001f / 16);
        }
    }
    CHECK(last == 255);
}
