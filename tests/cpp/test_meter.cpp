// The meter on hand-built graphs: what it counts, and that what it cuts is zero for those who read on.
#include "gguf_flash/ffn.h"
#include "gguf_flash/meter.h"

#include "random_data.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

using namespace gguf_flash;

namespace {

const uint32_t N_EMBD = 8, N_FF = 13, N = 5;

// act(gate x + bias) * up x of layer 2, on random data.
struct Graph {
    explicit Graph(bool fused = false) {
        x = floats(N_EMBD, N);
        ggml_tensor * up = product(fused ? 2 * N_FF : N_FF, "up");
        gate = fused ? up : product(N_FF, "gate");
        bias = floats(N_FF, 1);
        graph = ggml_new_graph(ctx);
        auto half = [&](uint32_t first) {
            return ggml_cont(ctx, ggml_view_2d(ctx, up, N_FF, N, up->nb[1], first * sizeof(float)));
        };
        h = ggml_silu(ctx, ggml_add(ctx, fused ? half(0) : gate, bias));
        h = ggml_mul(ctx, h, fused ? half(N_FF) : up);
        ggml_build_forward_expand(graph, h);
    }
    ~Graph() { ggml_free(ctx); }

    ggml_tensor * floats(int64_t columns, int64_t rows) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, columns, rows);
        for (int64_t i = 0; i < columns * rows; ++i) {
            ggml_get_data_f32(t)[i] = random.real();
        }
        return t;
    }
    ggml_tensor * product(int64_t rows, const char * part) {
        ggml_tensor * w = floats(N_EMBD, rows);
        ggml_set_name(w, (std::string("blk.2.ffn_") + part + ".weight").c_str());
        return ggml_mul_mat(ctx, w, x);
    }
    // h after a run under the meter's eyes.
    std::vector<float> run(Meter * meter) const {
        ggml_backend_t cpu = ggml_backend_cpu_init();
        ggml_backend_sched_t sched = ggml_backend_sched_new(&cpu, nullptr, 1, 64, false, false);
        if (meter != nullptr) {
            ggml_backend_sched_set_eval_callback(sched, Meter::on_node, meter);
        }
        REQUIRE(ggml_backend_sched_graph_compute(sched, graph) == GGML_STATUS_SUCCESS);
        ggml_backend_sched_free(sched);
        ggml_backend_free(cpu);
        return std::vector<float>(ggml_get_data_f32(h), ggml_get_data_f32(h) + N * N_FF);
    }
    std::vector<float> biases() const { return { ggml_get_data_f32(bias), ggml_get_data_f32(bias) + N_FF }; }

    ggml_context * ctx = ggml_init({ 4u << 20, nullptr, false });
    Random random{ 3 };
    ggml_tensor *x, *gate, *bias, *h;
    ggml_cgraph * graph;
};

std::vector<float> ones() {
    return std::vector<float>(N_FF, 1.0f);
}

} // namespace

TEST_CASE("meter: cuts what is small, counts all, for a gate and for the first half of a fused product") {
    for (bool fused : { false, true }) {
        CAPTURE(fused);
        Graph g(fused);
        const std::vector<float> uncut = g.run(nullptr);
        std::vector<float> a(N * N_FF), thresholds, weights;
        for (uint32_t i = 0; i < N * N_FF; ++i) {
            const float * row = ggml_get_data_f32(g.gate) + i / N_FF * g.gate->ne[0];
            a[i] = std::fabs(activate(Activation::silu, row[i % N_FF] + g.biases()[i % N_FF], 0));
        }
        for (uint32_t i = 0; i < N_FF; ++i) {
            thresholds.push_back(0.02f * float(i));
            weights.push_back(1 + float(i % 3));
        }
        Meter meter("m.gguf", Activation::silu, { { 2, !fused, weights, g.biases() } });
        CHECK(g.run(&meter) == uncut); // without thresholds nothing changes
        REQUIRE(meter.counts(2) != nullptr);
        const uint64_t zeros_before = meter.counts(2)->zeros;
        CHECK(meter.counts(2)->values == N * N_FF);
        std::vector<uint64_t> buckets(Meter::n_buckets);
        for (uint32_t i = 0; i < N * N_FF; ++i) {
            ++buckets[Meter::bucket(a[i] * weights[i % N_FF])];
        }
        CHECK(meter.counts(2)->buckets == buckets);
        meter.clear();
        REQUIRE(meter.set_thresholds(2, thresholds).ok());
        const std::vector<float> cut = g.run(&meter);
        uint64_t zeros = 0;
        for (uint32_t i = 0; i < N * N_FF; ++i) {
            const bool small = a[i] <= thresholds[i % N_FF];
            CHECK(cut[i] == (small ? 0.0f : uncut[i]));
            zeros += small;
        }
        CHECK(meter.counts(2)->zeros == zeros);
        CHECK(zeros > zeros_before);
        CHECK(zeros < N * N_FF);
        CHECK(meter.counts(2)->buckets == buckets); // scores are counted before they are cut
    }
}

TEST_CASE("meter: scores of the ReLUs are their inputs") {
    Graph g;
    Meter meter("m.gguf", Activation::relu_sqr, { { 2, true, ones(), {} } });
    g.run(&meter);
    uint64_t positive = 0;
    for (uint32_t i = 0; i < N * N_FF; ++i) {
        const float v = ggml_get_data_f32(g.gate)[i];
        positive += v > 0;
        CHECK(meter.counts(2)->buckets[Meter::bucket(std::max(v, 0.0f))] > 0);
    }
    CHECK(meter.counts(2)->zeros == N * N_FF - positive);
    CHECK(meter.counts(2)->buckets[0] == N * N_FF - positive);
}

TEST_CASE("meter: buckets") {
    CHECK(Meter::bucket(0) == 0);
    CHECK(Meter::bucket(std::numeric_limits<float>::max()) < Meter::n_buckets);
    for (float v : { 1e-20f, 0.3f, 1.0f, 77.0f }) {
        CHECK(Meter::bucket(v * 1.02f) > Meter::bucket(v));
        CHECK(Meter::bucket(v * 1.02f) <= Meter::bucket(v) + 3);
    }
}

TEST_CASE("meter: only the deciding matrix of a watched layer is asked for") {
    Graph g;
    Meter other("m.gguf", Activation::silu, { { 1, true, ones(), {} } });
    CHECK_FALSE(Meter::on_node(g.gate, true, &other));
    Meter ungated("m.gguf", Activation::silu, { { 2, false, ones(), {} } });
    CHECK_FALSE(Meter::on_node(g.gate, true, &ungated));
    CHECK_FALSE(Meter::on_node(g.h, true, &ungated));
    CHECK(ungated.counts(3) == nullptr);
    CHECK(ungated.set_thresholds(3, {}).code() == Code::argument);
    CHECK(ungated.set_thresholds(2, { 1, 2 }).code() == Code::argument);
    CHECK(ungated.set_thresholds(2, {}).ok());
}

TEST_CASE("meter: what cannot be measured is told, and ends the graph") {
    Graph g;
    Meter meter("m.gguf", Activation::silu, { { 2, true, ones(), {} } });
    g.run(nullptr);
    ggml_get_data_f32(g.gate)[3] = NAN;
    CHECK(Meter::on_node(g.gate, true, &meter));
    CHECK_FALSE(Meter::on_node(g.gate, false, &meter));
    CHECK(meter.check().code() == Code::unsupported);
    CHECK(meter.check().message().find("layer 2 of 'm.gguf'") != std::string::npos);
    CHECK(meter.check().message().find("; check its activation") != std::string::npos);
    meter.clear();
    CHECK(meter.check().ok());
    Meter wide("m.gguf", Activation::silu, { { 2, true, std::vector<float>(N_FF + 1, 1.0f), {} } });
    CHECK_FALSE(Meter::on_node(g.gate, false, &wide));
    CHECK(wide.check().code() == Code::unsupported);
    CHECK(wide.check().message().find("; run it on the CPU, or give thresholds") != std::string::npos);
}
