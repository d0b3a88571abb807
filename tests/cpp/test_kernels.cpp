// Every table of kernels gives the bits of the scalar one.
#include "flash_file.h"
#include "ggml-cpu.h"
#include "gguf_flash/kernels.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

using namespace gguf_flash;

namespace {

using Axpy = void (*)(const void *, float, float *, size_t);

// Where NaN comes out, its sign and payload depend on the instruction: keep inputs and sums finite.
bool all_finite(const std::vector<float> & values) {
    for (float v : values) {
        if (!std::isfinite(v) || std::fabs(v) > 1e30f) {
            return false;
        }
    }
    return true;
}

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Random blocks of a type whose n values are all finite.
Bytes random_row(ggml_type type, uint32_t n, Random & random) {
    for (int attempt = 0; attempt < 5000; ++attempt) {
        Bytes row(ggml_row_size(type, n));
        for (uint8_t & b : row) {
            b = uint8_t(random.bits());
        }
        if (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_F32) {
            const uint32_t width = type == GGML_TYPE_F32 ? 4 : 2;
            for (uint32_t i = width - 1; i < row.size(); i += width) {
                row[i] &= 0xBB; // exponents below the middle: no infinity, no NaN, subnormals kept
            }
        }
        if (all_finite(dequantize_rows(type, row, n))) {
            return row;
        }
    }
    FAIL("no finite row of type ", std::string(ggml_type_name(type)), " found");
    return {};
}

struct Case {
    ggml_type type;
    Axpy Kernels::* kernel;
    uint32_t step; // lengths are multiples of this
};

const Case cases[] = {
    { GGML_TYPE_F32, &Kernels::axpy_f32, 1 },    { GGML_TYPE_F16, &Kernels::axpy_f16, 1 },
    { GGML_TYPE_BF16, &Kernels::axpy_bf16, 1 },  { GGML_TYPE_Q8_0, &Kernels::axpy_q8_0, 32 },
    { GGML_TYPE_Q4_0, &Kernels::axpy_q4_0, 32 },
};

} // namespace

TEST_CASE("kernels: scalar comes first and every table has a name") {
    const std::vector<const Kernels *> tables = available_kernels();
    REQUIRE(!tables.empty());
    CHECK(std::string(tables[0]->name) == "scalar");
    for (const Kernels * table : tables) {
        MESSAGE("table ", std::string(table->name));
    }
    CHECK(kernels().name != nullptr);
}

TEST_CASE("kernels: axpy has the same bits in every table") {
    Random random(1);
    for (const Kernels * table : available_kernels()) {
        for (const Case & c : cases) {
            for (uint32_t n = 0; n <= 100 * c.step; n += c.step) {
                CAPTURE(std::string(table->name));
                CAPTURE(std::string(ggml_type_name(c.type)));
                CAPTURE(n);
                const Bytes row = n == 0 ? Bytes() : random_row(c.type, n, random);
                Bytes shifted(row.size() + 2); // rows start at any element, not at vectors
                std::copy(row.begin(), row.end(), shifted.begin() + 2);
                const float a = random.real() * 3;
                const std::vector<float> y = random.reals(n);
                std::vector<float> want = y, got = y;
                (available_kernels()[0]->*c.kernel)(row.data(), a, want.data(), n);
                (table->*c.kernel)(c.type == GGML_TYPE_F32 ? row.data() : shifted.data() + 2, a, got.data(), n);
                REQUIRE(same_bits(want, got));
            }
        }
    }
}

TEST_CASE("kernels: axpy is one multiplication and one addition, not fused") {
    Random random(2);
    const std::vector<float> w = random.reals(67), y = random.reals(67);
    const float a = random.real();
    for (const Kernels * table : available_kernels()) {
        std::vector<float> got = y;
        table->axpy_f32(w.data(), a, got.data(), got.size());
        for (size_t i = 0; i < y.size(); ++i) {
            volatile float product = a * w[i]; // rounded here
            REQUIRE(got[i] == y[i] + product);
        }
    }
}

TEST_CASE("kernels: accumulate has the same bits as one axpy per row") {
    Random random(3);
    for (const Kernels * table : available_kernels()) {
        for (size_t n : { 0, 1, 5, 8, 31, 32, 33, 64, 100, 255, 256, 257 }) {
            for (size_t n_rows : { 0, 1, 2, 7, 32 }) {
                CAPTURE(std::string(table->name));
                CAPTURE(n);
                CAPTURE(n_rows);
                const size_t ld = n + 3;
                const std::vector<float> w = random.reals(ld * n_rows + 1), y = random.reals(n);
                std::vector<float> a = random.reals(n_rows), want = y, got = y;
                for (size_t r = 0; r < n_rows; r += 3) {
                    a[r] = r % 2 == 0 ? 0.0f : -0.0f; // inactive
                }
                for (size_t r = 0; r < n_rows; ++r) {
                    if (a[r] != 0.0f) {
                        available_kernels()[0]->axpy_f32(w.data() + r * ld, a[r], want.data(), n);
                    }
                }
                table->accumulate(w.data(), ld, a.data(), n_rows, got.data(), n);
                REQUIRE(same_bits(want, got));
            }
        }
    }
}

TEST_CASE("kernels: list_marked lists the same in every table, and writes nowhere else") {
    Random random(11);
    for (uint32_t n : { 0u, 1u, 15u, 16u, 17u, 64u, 100u, 1000u }) {
        for (uint32_t one_in : { 1u, 3u, 10u, 5000u }) {
            std::vector<uint32_t> marks(n), expected;
            for (uint32_t i = 0; i < n; ++i) {
                marks[i] = random.bits() % one_in == 0 ? 1 + uint32_t(random.bits()) % 7 : 0;
                marks[i] = i % 13 == 5 ? 0x80000000u : marks[i]; // no bit of a mark may be overlooked
                if (marks[i] != 0) {
                    expected.push_back(i);
                }
            }
            for (const Kernels * table : available_kernels()) {
                CAPTURE(table->name);
                std::vector<uint32_t> out(n); // to its end: an address sanitizer sees what lies beyond
                const size_t count = table->list_marked(marks.data(), n, out.data());
                REQUIRE(count == expected.size());
                out.resize(count);
                CHECK(out == expected);
            }
        }
    }
}

TEST_CASE("kernels: accumulate ignores the weights of inactive rows") {
    const float inf = INFINITY;
    const std::vector<float> w(40, inf), a = { 0.0f };
    for (const Kernels * table : available_kernels()) {
        std::vector<float> y(40, 1.0f);
        table->accumulate(w.data(), 40, a.data(), 1, y.data(), 40);
        CHECK(same_bits(y, std::vector<float>(40, 1.0f)));
    }
}

TEST_CASE("kernels: axpy_row is expand_row and scalar axpy for every type, whole or in slices") {
    Random random(4);
    constexpr uint32_t n = 1024;
    int types = 0;
    for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
        const ggml_type type = ggml_type(t);
        const ggml_type_traits * traits = ggml_get_type_traits(type);
        if (type != GGML_TYPE_F32 && (traits->to_float == nullptr || ggml_blck_size(type) <= 0)) {
            continue;
        }
        CAPTURE(std::string(ggml_type_name(type)));
        ++types;
        const Bytes row = random_row(type, n, random);
        const float a = random.real();
        const size_t block = column_block(type);
        CHECK(block % 32 == 0);
        CHECK(block % size_t(ggml_blck_size(type)) == 0);
        std::vector<float> expanded(n), want(n), whole(n), slices(n), scratch(n);
        expand_row(type, row.data(), 0, n, expanded.data());
        CHECK(same_bits(expanded, dequantize_rows(type, row, n)));
        want = whole = slices = random.reals(n);
        available_kernels()[0]->axpy_f32(expanded.data(), a, want.data(), n);
        axpy_row(type, row.data(), 0, n, a, whole.data(), scratch.data());
        CHECK(same_bits(want, whole));
        for (size_t first = 0; first < n;) {
            const size_t count = std::min<size_t>(n - first, block * (1 + random.below(3)));
            axpy_row(type, row.data(), first, count, a, slices.data() + first, scratch.data());
            std::vector<float> part(count);
            expand_row(type, row.data(), first, count, part.data());
            CHECK(std::memcmp(part.data(), expanded.data() + first, count * sizeof(float)) == 0);
            first += count;
        }
        CHECK(same_bits(want, slices));
    }
    CHECK(types > 20);
}

namespace {

// n_tokens tokens and n_rows rows of any type, and their products one by one.
struct Products {
    Products(ggml_type type, uint32_t n, size_t n_rows, size_t n_tokens, Random & random)
        : scratch(dot_rows_scratch(n)) {
        const auto * traits = ggml_get_type_traits_cpu(type);
        x_bytes = traits->vec_dot_type == GGML_TYPE_F32 ? n * sizeof(float) : dot_input_bytes(type, n);
        x.resize(n_tokens * x_bytes + 2);
        for (size_t t = 0; t < n_tokens; ++t) {
            const std::vector<float> values = random.reals(n, 2.0f);
            if (dot_input_bytes(type, n) == 0) {
                std::memcpy(x.data() + t * x_bytes, values.data(), x_bytes);
            } else {
                convert_dot_input(type, values.data(), n, x.data() + t * x_bytes);
            }
        }
        for (size_t r = 0; r < n_rows; ++r) {
            const Bytes row = quantize_rows(type, random.reals(n), n);
            raw.push_back(Bytes(2)); // rows start at any element
            raw.back().insert(raw.back().end(), row.begin(), row.end());
            rows.push_back(raw.back().data() + 2);
            for (size_t t = 0; t < n_tokens; ++t) {
                expected.push_back(dot_row(type, rows.back(), x.data() + t * x_bytes, n));
            }
        }
        found.assign(expected.size(), 1e30f);
        batch = { rows.data(), n_rows, x.data(), x_bytes, n_tokens, n, found.data(), scratch.data() };
    }

    size_t x_bytes;
    std::vector<Bytes> raw;
    std::vector<const void *> rows;
    Bytes x;
    std::vector<float> expected, found, scratch;
    DotBatch batch;
};

} // namespace

TEST_CASE("kernels: dot_rows has the bits of dot_row for every type") {
    Random random(5);
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_0 }) {
        for (uint32_t n : { 32u, 64u, 96u, 576u, 1024u, 1088u }) {
            for (size_t n_rows : { 1, 3, 4, 8, 9 }) {
                for (size_t n_tokens : { 1, 2, 16, 37 }) {
                    CAPTURE(std::string(ggml_type_name(type)));
                    CAPTURE(n);
                    CAPTURE(n_rows);
                    CAPTURE(n_tokens);
                    Products p(type, n, n_rows, n_tokens, random);
                    dot_rows(type, p.batch);
                    REQUIRE(same_bits(p.found, p.expected));
                }
            }
        }
    }
}

TEST_CASE("kernels: every table sums codes as ggml does where it has AVX2") {
    if (ggml_cpu_has_avx2() == 0 || ggml_cpu_has_fma() == 0) {
        MESSAGE("skipped: here ggml sums products of codes in another order");
        return;
    }
    Random random(6);
    int kernels_seen = 0;
    for (const Kernels * table : available_kernels()) {
        for (const auto & [type, kernel] :
             { std::pair(GGML_TYPE_Q8_0, table->dot_q8_0), std::pair(GGML_TYPE_Q4_0, table->dot_q4_0) }) {
            if (kernel == nullptr) {
                continue;
            }
            CAPTURE(std::string(table->name));
            CAPTURE(std::string(ggml_type_name(type)));
            ++kernels_seen;
            Products p(type, 1152, 9, 21, random);
            kernel(p.batch);
            CHECK(same_bits(p.found, p.expected));
        }
    }
    CHECK(kernels_seen >= 2);
    CHECK(has_dot_rows(GGML_TYPE_Q8_0, 64) == (kernels().dot_q8_0 != nullptr));
    CHECK(!has_dot_rows(GGML_TYPE_Q8_0, 96));
    CHECK(!has_dot_rows(GGML_TYPE_Q5_0, 64));
}

TEST_CASE("kernels: dot_rows of the least codes there are does not overflow") {
    constexpr uint32_t n = 64;
    for (ggml_type type : { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        Random random(7);
        Products p(type, n, 1, 1, random);
        for (Bytes * bytes : { &p.raw[0], &p.x }) {
            const size_t block = bytes == &p.x ? 34 : ggml_row_size(type, 32), start = bytes == &p.x ? 0 : 2;
            for (size_t i = start; i < bytes->size() - (bytes == &p.x ? 2 : 0); ++i) {
                if ((i - start) % block >= 2) {
                    (*bytes)[i] = bytes == &p.x ? uint8_t(-127) : type == GGML_TYPE_Q8_0 ? uint8_t(-128) : uint8_t(0);
                }
            }
        }
        p.expected = { dot_row(type, p.rows[0], p.x.data(), n) };
        for (const Kernels * table : available_kernels()) {
            const DotRows kernel = type == GGML_TYPE_Q8_0 ? table->dot_q8_0 : table->dot_q4_0;
            if (kernel != nullptr && ggml_cpu_has_avx2() != 0) {
                CAPTURE(std::string(table->name));
                kernel(p.batch);
                CHECK(same_bits(p.found, p.expected));
            }
        }
    }
}
