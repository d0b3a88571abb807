// Any weights, lengths, factors and alignments: every table of kernels gives the bits of the scalar one,
// and neither reads nor writes a byte beside its rows.
//
// Denormals, infinities and NaN are welcome. Which NaN comes out depends on the instruction and on which
// operand a compiler puts first: NaN must meet NaN, of any sign and payload.
#include "ggml.h"
#include "gguf_flash/kernels.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace gguf_flash;

namespace {

using Floats = std::vector<float>;
using Axpy = void (*)(const void *, float, float *, size_t);

// Takes values from the input, again from its start where it is too short: long rows need no long inputs.
class Input {
public:
    Input(const uint8_t * data, size_t size) : data_(data), size_(size) {}

    void fill(void * to, size_t n) {
        for (size_t i = 0; i < n; ++i) {
            static_cast<uint8_t *>(to)[i] = size_ == 0 ? 0 : data_[at_++ % size_];
        }
    }
    template <typename T> T take() {
        T value = {};
        fill(&value, sizeof(T));
        return value;
    }
    Floats floats(size_t n, bool tame) {
        Floats out(n);
        fill(out.data(), n * sizeof(float));
        for (float & v : out) {
            v = tame && !(std::fabs(v) < 2) ? std::ldexp(v, -200) : v; // else most sums are soon infinite
            v = tame && !std::isfinite(v) ? 1.0f : v;
        }
        return out;
    }

private:
    const uint8_t * data_;
    size_t size_;
    size_t at_ = 0;
};

// A row that ends where its memory does, so that the sanitizer sees what reads on, and begins off the
// boundaries of vectors.
class Row {
public:
    Row(Input & in, size_t bytes, size_t shift) : raw_(bytes + shift), shift_(shift) { in.fill(data(), bytes); }
    uint8_t * data() { return raw_.data() + shift_; }

private:
    std::vector<uint8_t> raw_;
    size_t shift_;
};

void require_same(const Floats & expected, const Floats & found, const char * kernel, const Kernels & table) {
    for (size_t i = 0; i < expected.size(); ++i) {
        const bool same = std::memcmp(&expected[i], &found[i], sizeof(float)) == 0 ||
                          (std::isnan(expected[i]) && std::isnan(found[i]));
        if (!same) {
            std::fprintf(stderr, "%s of table %s, element %zu of %zu: %a expected, found %a\n", kernel, table.name, i,
                         expected.size(), double(expected[i]), double(found[i]));
            std::abort();
        }
    }
}

// Runs a kernel of every table on a copy of y and compares with what the scalar one makes of it.
template <class Run> void compare(const char * kernel, const Floats & y, Run run) {
    Floats expected;
    for (const Kernels * table : available_kernels()) {
        Floats found = y;
        run(*table, found.data());
        if (expected.empty()) {
            expected = found; // the scalar table comes first
        }
        require_same(expected, found, kernel, *table);
    }
}

void fuzz_axpy(Input & in, bool tame) {
    struct Case {
        const char * name;
        ggml_type type;
        Axpy Kernels::* kernel;
        size_t step; // lengths are multiples of this
    };
    static const Case cases[] = {
        { "axpy_f32", GGML_TYPE_F32, &Kernels::axpy_f32, 1 },
        { "axpy_f16", GGML_TYPE_F16, &Kernels::axpy_f16, 1 },
        { "axpy_bf16", GGML_TYPE_BF16, &Kernels::axpy_bf16, 1 },
        { "axpy_q8_0", GGML_TYPE_Q8_0, &Kernels::axpy_q8_0, 32 },
        { "axpy_q4_0", GGML_TYPE_Q4_0, &Kernels::axpy_q4_0, 32 },
    };
    const Case & c = cases[in.take<uint8_t>() % 5];
    const size_t n = in.take<uint16_t>() % 600 / c.step * c.step;
    const size_t shift = in.take<uint8_t>() % 16 * (c.type == GGML_TYPE_F32 ? 4 : 2);
    const float a = in.take<float>();
    const Floats y = in.floats(n, tame);
    Row w(in, ggml_row_size(c.type, int64_t(n)), shift);
    compare(c.name, y, [&](const Kernels & table, float * out) { (table.*c.kernel)(w.data(), a, out, n); });
}

void fuzz_accumulate(Input & in, bool tame) {
    const size_t n = in.take<uint16_t>() % 300, n_rows = 1 + in.take<uint8_t>() % 8, ld = n + in.take<uint8_t>() % 4;
    const Floats a = in.floats(n_rows, tame), y = in.floats(n, tame);
    const Floats w = in.floats((n_rows - 1) * ld + n, tame);
    compare("accumulate", y,
            [&](const Kernels & table, float * out) { table.accumulate(w.data(), ld, a.data(), n_rows, out, n); });
}

void fuzz_codes(Input & in, bool tame) {
    const size_t n = in.take<uint16_t>() % 600, ld = n + in.take<uint8_t>() % 4;
    const float d = in.take<float>();
    int8_t q[32];
    in.fill(q, sizeof(q));
    std::vector<std::vector<int8_t>> rows(32, std::vector<int8_t>(n));
    const int8_t * at[32];
    for (size_t r = 0; r < 32; ++r) {
        q[r] = q[r] == -128 ? int8_t(0) : q[r];
        in.fill(rows[r].data(), n);
        at[r] = rows[r].data();
    }
    std::vector<uint16_t> scale(n);
    in.fill(scale.data(), n * sizeof(uint16_t));
    const CodeBlock block = { at, q, scale.data(), d };
    const Floats acc = in.floats(n == 0 ? 0 : (code_lanes - 1) * ld + n, tame);
    compare("add_codes", acc, [&](const Kernels & table, float * out) { table.add_codes(block, out, ld, n); });
}

void fuzz_silu(Input & in, bool tame) {
    const Floats v = in.floats(in.take<uint8_t>() % 64, tame);
    compare("silu", v, [&](const Kernels & table, float * out) {
        for (size_t i = 0; i < v.size(); ++i) {
            out[i] = table.silu(v[i]);
        }
    });
}

// Rows of every type there is, whole and cut: as expanding the row and adding it does.
void fuzz_row(Input & in, bool tame) {
    const ggml_type type = ggml_type(in.take<uint8_t>() % GGML_TYPE_COUNT);
    if (type != GGML_TYPE_F32 && (ggml_get_type_traits(type)->to_float == nullptr || ggml_blck_size(type) <= 0)) {
        return;
    }
    const size_t block = column_block(type), n = (1 + in.take<uint8_t>() % 4) * block;
    const size_t cut = in.take<uint8_t>() % 4 * block % (n + block);
    const float a = in.take<float>();
    Row row(in, ggml_row_size(type, int64_t(n)), 0);
    Floats y = in.floats(n, tame), expected = y, scratch(n), expanded(n);
    expand_row(type, row.data(), 0, n, expanded.data());
    available_kernels()[0]->axpy_f32(expanded.data(), a, expected.data(), n);
    axpy_row(type, row.data(), 0, cut, a, y.data(), scratch.data());
    axpy_row(type, row.data(), cut, n - cut, a, y.data() + cut, scratch.data());
    require_same(expected, y, ggml_type_name(type), kernels());
}

// Products of rows with tokens together, as each alone. The tokens are what a converter leaves of floats.
void fuzz_dots(Input & in, bool tame) {
    static const ggml_type types[] = { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    const ggml_type type = types[in.take<uint8_t>() % 3];
    const size_t n = (1 + in.take<uint8_t>() % 20) * 64, n_rows = 1 + in.take<uint8_t>() % 9;
    const size_t n_tokens = 1 + in.take<uint8_t>() % 20, x_bytes = dot_input_bytes(type, n);
    std::vector<uint8_t> x(n_tokens * x_bytes);
    for (size_t t = 0; t < n_tokens; ++t) {
        convert_dot_input(type, in.floats(n, true).data(), n, x.data() + t * x_bytes);
    }
    std::vector<Row> raw;
    std::vector<const void *> rows;
    for (size_t r = 0; r < n_rows; ++r) {
        raw.emplace_back(in, ggml_row_size(type, int64_t(n)), tame ? 0 : 2);
    }
    Floats expected, found(n_rows * n_tokens), scratch(dot_rows_scratch(n));
    for (Row & row : raw) {
        rows.push_back(row.data());
        for (size_t t = 0; t < n_tokens; ++t) {
            expected.push_back(dot_row(type, row.data(), x.data() + t * x_bytes, n));
        }
    }
    dot_rows(type, { rows.data(), n_rows, x.data(), x_bytes, n_tokens, n, found.data(), scratch.data() });
    require_same(expected, found, "dot_rows", kernels());
}

void fuzz_marked(Input & in, bool few) {
    std::vector<uint32_t> marks(in.take<uint16_t>() % 300);
    for (uint32_t & mark : marks) {
        mark = few && in.take<uint8_t>() % 8 != 0 ? 0 : in.take<uint32_t>();
    }
    std::vector<uint32_t> expected(marks.size());
    expected.resize(available_kernels()[0]->list_marked(marks.data(), marks.size(), expected.data()));
    for (const Kernels * table : available_kernels()) {
        std::vector<uint32_t> found(marks.size());
        found.resize(table->list_marked(marks.data(), marks.size(), found.data()));
        if (found != expected) {
            std::fprintf(stderr, "list_marked of table %s lists %zu of %zu marks, %zu expected\n", table->name,
                         found.size(), marks.size(), expected.size());
            std::abort();
        }
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static constexpr void (*kinds[])(Input &, bool) = { fuzz_axpy, fuzz_accumulate, fuzz_codes, fuzz_silu,
                                                        fuzz_row,  fuzz_dots,       fuzz_marked };
    Input in(data, size);
    const uint8_t kind = in.take<uint8_t>();
    kinds[kind % 7](in, (kind & 0x80) != 0);
    return 0;
}
