// Down rows as codes, and SiLU: the bits of ggml's own dense FFN.
#include "ffn_runner.h"
#include "ggml-cpu.h"
#include "gguf_flash/kernels.h"

#include <cmath>
#include <cstring>

using namespace gguf_flash;

namespace {

using Floats = std::vector<float>;

bool same_bits(const Floats & a, const Floats & b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// What a ggml graph computes, in memory of its own.
class Graph {
public:
    Graph() : ctx_(ggml_init({ 64 << 20, nullptr, false })) {}
    ~Graph() { ggml_free(ctx_); }
    Graph(const Graph &) = delete;
    Graph & operator=(const Graph &) = delete;

    ggml_context * ctx() { return ctx_; }
    ggml_tensor * put(ggml_type type, int64_t ne0, int64_t ne1, const void * data) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx_, type, ne0, ne1);
        std::memcpy(t->data, data, ggml_nbytes(t));
        return t;
    }
    Floats run(ggml_tensor * result, int n_threads = 2) {
        ggml_cgraph * graph = ggml_new_graph(ctx_);
        ggml_build_forward_expand(graph, result);
        REQUIRE(ggml_graph_compute_with_ctx(ctx_, graph, n_threads) == GGML_STATUS_SUCCESS);
        const float * data = static_cast<const float *>(result->data);
        return Floats(data, data + ggml_nelements(result));
    }

private:
    ggml_context * ctx_;
};

// ggml's own FFN from the matrices of a file in Q8_0, [n_tokens, n_embd].
Floats dense_ffn(const StoredFlash & stored, const Floats & x, uint32_t n_tokens) {
    const FlashSpec & spec = stored.file.spec;
    const DenseLayer & layer = stored.file.layers[0];
    const int64_t n_embd = spec.n_embd, n_ff = layer.n_ff;
    Graph g;
    ggml_tensor * in = g.put(GGML_TYPE_F32, n_embd, n_tokens, x.data());
    auto product = [&](const Floats & rows) { // the floats stand for whole Q8_0 blocks: quantizing finds them again
        const Bytes raw = quantize_rows(GGML_TYPE_Q8_0, rows, uint32_t(n_embd));
        return ggml_mul_mat(g.ctx(), g.put(GGML_TYPE_Q8_0, n_embd, n_ff, raw.data()), in);
    };
    ggml_tensor * gate = product(layer.gate);
    ggml_tensor * h = spec.activation == "silu" ? ggml_swiglu_split(g.ctx(), gate, product(layer.up))
                                                : ggml_mul(g.ctx(), ggml_relu(g.ctx(), gate), product(layer.up));
    return g.run(ggml_mul_mat(g.ctx(), g.put(GGML_TYPE_Q8_0, n_ff, n_embd, layer.down_q8_0.data()), h));
}

FlashSpec codes_spec(const char * activation, uint32_t n_embd, uint32_t n_ff) {
    FlashSpec spec;
    spec.n_embd = n_embd;
    spec.n_ff = { n_ff };
    spec.gate = spec.up = GGML_TYPE_Q8_0;
    spec.down = GGML_TYPE_I8;
    spec.activation = activation;
    return spec;
}

} // namespace

TEST_CASE("codes: every table adds them with the same bits") {
    Random random(3);
    for (size_t n : { 1, 15, 16, 96, 255, 256, 257, 576 }) {
        std::vector<std::vector<int8_t>> rows(32, std::vector<int8_t>(n));
        std::vector<const int8_t *> at;
        std::vector<uint16_t> scale(n);
        std::vector<int8_t> q(32);
        for (std::vector<int8_t> & row : rows) {
            for (int8_t & v : row) {
                v = int8_t(random.bits());
            }
            at.push_back(row.data());
        }
        for (uint16_t & s : scale) {
            s = ggml_fp32_to_fp16(random.reals(1, 0.01f)[0]);
        }
        for (size_t j = 0; j < q.size(); ++j) {
            q[j] = j / 4 % 3 == 1 ? int8_t(0) : j % 5 == 0 ? int8_t(-127) : int8_t(int(random.bits() % 255) - 127);
        }
        const CodeBlock block = { at.data(), q.data(), scale.data(), 0.0123f };
        const Floats start = random.reals(code_lanes * n, 1.0f);
        Floats expected = start;
        available_kernels()[0]->add_codes(block, expected.data(), n, n);
        CHECK(!same_bits(expected, start));
        for (const Kernels * table : available_kernels()) {
            CAPTURE(std::string(table->name));
            CAPTURE(n);
            Floats acc = start;
            table->add_codes(block, acc.data(), n, n);
            CHECK(same_bits(acc, expected));
        }
    }
}

TEST_CASE("codes: SiLU has the bits of ggml's in every table") {
    Random random(4);
    Floats v = random.reals(4096, 6.0f);
    for (float special :
         { 0.0f,    -0.0f,  1e-30f,  -1e-30f, 87.0f,  -87.0f, 88.5f,   -88.5f,   100.0f,    -100.0f, 104.0f,
           -104.0f, 140.0f, -140.0f, 1e30f,   -1e30f, 3e-39f, -3e-39f, 0.34657f, -0.34657f, 10.0f,   -10.0f }) {
        v.push_back(special);
    }
    v.resize(v.size() / 64 * 64 + 64, -5.5f); // whole vectors: ggml's tail is the C library's
    Graph g;
    const Floats expected = g.run(ggml_silu(g.ctx(), g.put(GGML_TYPE_F32, int64_t(v.size()), 1, v.data())));
    for (const Kernels * table : available_kernels()) {
        CAPTURE(std::string(table->name));
        for (size_t i = 0; i < v.size(); ++i) {
            const float ours = table->silu(v[i]);
            CHECK_MESSAGE(std::memcmp(&ours, &expected[i], sizeof(ours)) == 0, v[i], " gives ", ours, ", ggml ",
                          expected[i]);
        }
    }
}

TEST_CASE("codes: SiLU of what is no number is no number") { // the sanitizers once saw it made an integer
    for (const Kernels * table : available_kernels()) {
        CAPTURE(std::string(table->name));
        CHECK(std::isnan(table->silu(NAN)));
        CHECK(std::isnan(table->silu(-NAN)));
        CHECK(table->silu(INFINITY) == INFINITY);
    }
}

TEST_CASE("codes: a Q8_0 FFN has the bits of ggml's dense one") {
    if (ggml_cpu_has_avx2() == 0 || ggml_cpu_has_fma() == 0) {
        MESSAGE("skipped: here ggml sums Q8_0 products in another order");
        return;
    }
    for (const char * activation : { "relu", "silu" }) {
        for (uint32_t n_tokens : { 1u, 2u, 7u, 16u, 65u }) {
            CAPTURE(std::string(activation));
            CAPTURE(n_tokens);
            const StoredFlash stored(codes_spec(activation, 192, 512));
            const Floats x = stored.input(n_tokens);
            const Floats expected = dense_ffn(stored, x, n_tokens);
            for (const char * ram : { "1%", "100%" }) {
                const auto model = open_flash(stored.path, { { "ram", ram } });
                CHECK(same_bits(call(*model, 0, x, n_tokens, 2), expected));
            }
        }
    }
}

TEST_CASE("codes: one token after a long prompt, and the prompt again") {
    const StoredFlash stored(codes_spec("silu", 576, 128)); // 300 tokens of lanes take 5.3 MiB
    const auto model = open_flash(stored.path);
    const Floats prompt = stored.input(300), token = stored.input(1, 9);
    const Floats whole = call(*model, 0, prompt, 300, 2), one = call(*model, 0, token, 1, 2);
    CHECK(same_bits(call(*open_flash(stored.path), 0, token, 1), one));
    CHECK(same_bits(call(*model, 0, prompt, 300), whole));
}

TEST_CASE("codes: a norm before them is refused") {
    const StoredFlash stored(codes_spec("relu_sqr", 64, 128));
    const auto model = open_flash(stored.path);
    const Floats x = stored.input(1), norm(128, 1.0f);
    Floats out(x.size(), 1e30f);
    FfnInput in;
    in.n_tokens = 1;
    in.x = x.data();
    in.out = out.data();
    in.x_stride = in.out_stride = 64;
    in.norm = norm.data();
    FfnOp op(std::shared_ptr<Model>(model, &model->model()), 0);
    const Status status = run_op(op, in, 2);
    CHECK(status.code() == Code::unsupported);
    CHECK(status.message().find("has down codes and a norm before them; convert") != std::string::npos);
    CHECK(zero(out));
}

TEST_CASE("codes: waves end where blocks do, whatever is selected") {
    FlashSpec spec = codes_spec("relu", 64, 640);
    spec.select = Select::gate;
    const StoredFlash stored(spec);
    const auto whole = open_flash(stored.path, { { "ram", "100%" }, { "prefill", "select" } });
    const auto least = open_flash(stored.path, { { "ram", "1%" }, { "prefill", "select" } });
    for (uint64_t seed = 0; seed < 20; ++seed) {
        const uint32_t n_tokens = 1 + uint32_t(seed % 4);
        const Floats x = stored.input(n_tokens, seed);
        CHECK(same_bits(call(*least, 0, x, n_tokens, 2), call(*whole, 0, x, n_tokens)));
    }
    const Counters counters = least->model().stats().total;
    CHECK(counters.waves > 0);
    CHECK(counters.selected == counters.hits + counters.misses);
}
