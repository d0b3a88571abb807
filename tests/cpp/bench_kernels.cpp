// How fast each table's kernels are here, alternating between the tables: prints, asserts nothing.
// Skipped unless asked for: gguf_flash_tests -ts=benchmark -ns
#include "ffn_runner.h"
#include "ggml-cpu.h"
#include "gguf_flash/kernels.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>

using namespace gguf_flash;

namespace {

constexpr int rounds = 15;
constexpr size_t n = 4096; // columns of a row, as OPT-6.7B has

// Of this process: other load on the machine then matters little, where one thread works.
double seconds(const std::function<void()> & work) {
    const std::clock_t start = std::clock();
    work();
    return double(std::clock() - start) / CLOCKS_PER_SEC;
}

// Prints the median over the rounds, in gigabytes of weights and in 1e9 products a second.
void report(const char * kernel, double bytes, double products, const std::function<void(const Kernels &)> & work,
            bool scalar = false) {
    std::vector<const Kernels *> tables = available_kernels();
    tables.erase(tables.begin(),
                 tables.begin() + (!scalar && tables.size() > 1)); // the scalar one would take most of the time
    std::vector<std::vector<double>> times(tables.size());
    for (int round = 0; round < rounds; ++round) {
        for (size_t i = 0; i < tables.size(); ++i) {
            times[i].push_back(seconds([&] { work(*tables[i]); }));
        }
    }
    std::printf("%-24s", kernel);
    for (size_t i = 0; i < tables.size(); ++i) {
        std::nth_element(times[i].begin(), times[i].begin() + rounds / 2, times[i].end());
        const double median = times[i][rounds / 2];
        std::printf("  %s %6.1f GB/s %6.1f Gmul/s", tables[i]->name, bytes / median / 1e9, products / median / 1e9);
    }
    std::printf("\n");
}

// Rows that fit the second cache level, and rows that come from memory.
void report_axpy(const char * kernel, ggml_type type, void (*Kernels::*axpy)(const void *, float, float *, size_t)) {
    const size_t row = ggml_row_size(type, n);
    for (size_t n_rows : { size_t(32), (size_t(64) << 20) / row / 32 * 32 }) {
        Random random(1);
        Bytes weights;
        const Bytes some = quantize_rows(type, random.reals(32 * n), n);
        while (weights.size() < row * n_rows) {
            weights.insert(weights.end(), some.begin(), some.end());
        }
        std::vector<float> y(n);
        const size_t repeats = std::max<size_t>(1, 2048 / n_rows);
        const std::string name = std::string(kernel) + (n_rows == 32 ? " cached" : " memory");
        report(name.c_str(), double(weights.size() * repeats), double(n * n_rows * repeats),
               [&](const Kernels & table) {
                   for (size_t r = 0; r < n_rows * repeats; ++r) {
                       (table.*axpy)(weights.data() + r % n_rows * row, 1e-3f, y.data(), n);
                   }
               });
    }
}

} // namespace

TEST_CASE("benchmark: kernels of each table" * doctest::test_suite("benchmark") * doctest::skip()) {
    report_axpy("axpy_f32", GGML_TYPE_F32, &Kernels::axpy_f32);
    report_axpy("axpy_f16", GGML_TYPE_F16, &Kernels::axpy_f16);
    report_axpy("axpy_bf16", GGML_TYPE_BF16, &Kernels::axpy_bf16);
    report_axpy("axpy_q8_0", GGML_TYPE_Q8_0, &Kernels::axpy_q8_0);
    report_axpy("axpy_q4_0", GGML_TYPE_Q4_0, &Kernels::axpy_q4_0);

    Random random(2);
    constexpr size_t columns = 256, n_rows = 32, n_tokens = 512;
    const std::vector<float> w = random.reals(columns * n_rows), a = random.reals(n_tokens * n_rows);
    std::vector<float> y(n_tokens * columns);
    report("accumulate 512 tokens", double(w.size() * 4), double(n_tokens * n_rows * columns),
           [&](const Kernels & table) {
               for (size_t t = 0; t < n_tokens; ++t) {
                   table.accumulate(w.data(), columns, a.data() + t * n_rows, n_rows, y.data() + t * columns, columns);
               }
           });

    std::vector<int8_t> codes(32 * n);
    std::vector<const int8_t *> rows;
    std::vector<int8_t> q(32);
    for (size_t i = 0; i < codes.size(); ++i) {
        codes[i] = int8_t(random.bits());
    }
    for (size_t r = 0; r < 32; ++r) {
        rows.push_back(codes.data() + r * n);
        q[r] = int8_t(int(random.bits() % 255) - 127);
    }
    const std::vector<uint16_t> scale(n, ggml_fp32_to_fp16(0.01f));
    const CodeBlock block = { rows.data(), q.data(), scale.data(), 0.01f };
    std::vector<float> lanes(code_lanes * n);
    report("add_codes cached", double(64 * codes.size()), double(64 * codes.size()), [&](const Kernels & table) {
        for (int i = 0; i < 64; ++i) {
            table.add_codes(block, lanes.data(), n, n);
        }
    });
}

TEST_CASE("benchmark: products of rows with a prompt's tokens" * doctest::test_suite("benchmark") * doctest::skip()) {
    Random random(3);
    constexpr size_t n_rows = 8, n_tokens = 512;
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        const Bytes weights = quantize_rows(type, random.reals(n * n_rows), n);
        std::vector<const void *> rows;
        for (size_t r = 0; r < n_rows; ++r) {
            rows.push_back(weights.data() + r * ggml_row_size(type, n));
        }
        const size_t x_bytes = dot_input_bytes(type, n);
        Bytes x(n_tokens * x_bytes);
        for (size_t t = 0; t < n_tokens; ++t) {
            convert_dot_input(type, random.reals(n).data(), n, x.data() + t * x_bytes);
        }
        std::vector<float> out(n_rows * n_tokens), scratch(dot_rows_scratch(n));
        const DotBatch batch = { rows.data(), n_rows, x.data(), x_bytes, n_tokens, n, out.data(), scratch.data() };
        const std::string name = std::string("dot ") + ggml_type_name(type) + " (scalar: alone)";
        report(
            name.c_str(), double(weights.size()), double(n_rows * n_tokens * n),
            [&](const Kernels & table) {
                const DotRows kernel = type == GGML_TYPE_F16  ? table.dot_f16
                                     : type == GGML_TYPE_Q8_0 ? table.dot_q8_0
                                                              : table.dot_q4_0;
                if (kernel != nullptr) {
                    kernel(batch);
                    return;
                }
                for (size_t i = 0; i < out.size(); ++i) {
                    out[i] = dot_row(type, rows[i / n_tokens], x.data() + i % n_tokens * x_bytes, n);
                }
            },
            true);
    }
}

TEST_CASE("benchmark: a prompt's FFN beside ggml's" * doctest::test_suite("benchmark") * doctest::skip()) {
    constexpr uint32_t n_ff = 2048, n_tokens = 512; // an eighth of OPT-6.7B's layer
    constexpr int n_threads = 1;
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        FlashSpec spec;
        spec.n_embd = n;
        spec.n_ff = { n_ff };
        spec.gated = false;
        spec.up = spec.down = type;
        spec.activation = "relu";
        const StoredFlash stored(spec);
        const auto model = open_flash(stored.path, { { "ram", "100%" } });
        const std::vector<float> x = stored.input(n_tokens);
        const Bytes up = quantize_rows(type, stored.file.layers[0].up, n);
        ggml_context * ctx = ggml_init({ 256 << 20, nullptr, false });
        const auto matrix = [&](int64_t columns, int64_t rows) {
            ggml_tensor * t = ggml_new_tensor_2d(ctx, type, columns, rows);
            std::memcpy(t->data, up.data(), up.size());
            return t;
        };
        ggml_tensor * in = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n_tokens);
        std::memcpy(in->data, x.data(), x.size() * sizeof(float));
        ggml_tensor * h = ggml_relu(ctx, ggml_mul_mat(ctx, matrix(n, n_ff), in));
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, ggml_mul_mat(ctx, matrix(n_ff, n), h));
        std::vector<double> ours, theirs;
        for (int round = 0; round < 5; ++round) {
            ours.push_back(seconds([&] { call(*model, 0, x, n_tokens, n_threads); }));
            theirs.push_back(seconds([&] { ggml_graph_compute_with_ctx(ctx, graph, n_threads); }));
        }
        ggml_free(ctx);
        std::sort(ours.begin(), ours.end());
        std::sort(theirs.begin(), theirs.end());
        const double products = 2.0 * n * n_ff * n_tokens;
        std::printf("prompt of %u, %s, one thread: %.1f Gmul/s, ggml %.1f\n", n_tokens, ggml_type_name(type),
                    products / ours[2] / 1e9, products / theirs[2] / 1e9);
    }
}
