// Every rejection rule of gguf_flash/format/SPEC.md, by a file that breaks it.
#include "flash_file.h"
#include "temp_folder.h"

#include <doctest/doctest.h>

#include <cmath>
#include <functional>

using namespace gguf_flash;

namespace {

struct Broken {
    int rule;
    Code code;
    const char * what;
    std::function<void(GgufImage &)> damage;
};

const char * bundle_tensor = "blk.0.ffn_bundle";

FlashSpec small(Select select) {
    FlashSpec spec;
    spec.layers = { 0, 3 };
    spec.n_ff = { 70 };
    spec.select = select;
    spec.biases = true;
    return spec;
}

void check_refused(const Bytes & bytes, int rule, Code code, const char * what) {
    CAPTURE(std::string(what));
    TempFolder folder;
    const std::string path = folder.write("broken.gguf", bytes);
    const Result<Layout> layout = read_layout({ path }, path);
    REQUIRE_FALSE(layout.ok());
    CAPTURE(layout.status().message());
    CHECK(layout.status().message().find("(SPEC R" + std::to_string(rule) + ")") != std::string::npos);
    CHECK(layout.status().message().find(path) != std::string::npos);
    CHECK(int(layout.status().code()) == int(code));
}

void check_all(Select select, const std::vector<Broken> & cases) {
    for (const Broken & broken : cases) {
        FlashFile file(small(select));
        broken.damage(file.image);
        check_refused(file.image.bytes(), broken.rule, broken.code, broken.what);
    }
}

Broken key(int rule, const char * name, Bytes value, Code code = Code::corrupt) {
    return { rule, code, name, [=](GgufImage & g) { g.set(name, value); } };
}

Broken without(int rule, const char * name, Code code = Code::corrupt) {
    return { rule, code, name, [=](GgufImage & g) { g.remove(name); } };
}

std::function<void(GgufImage &)> shaped(std::vector<uint64_t> ne, const char * tensor = bundle_tensor) {
    return [=](GgufImage & g) { g.tensor(tensor).ne = ne; };
}

} // namespace

TEST_CASE("rejections: the container") {
    const std::vector<Broken> cases = {
        { 1, Code::not_flash, "magic", [](GgufImage & g) { g.magic = "GGML"; } },
        { 2, Code::version, "GGUF version 2", [](GgufImage & g) { g.version = 2; } },
        { 2, Code::version, "big-endian", [](GgufImage & g) { g.version = 50331648; } },
        { 3, Code::corrupt, "tensor count", [](GgufImage & g) { g.n_tensors = 1ull << 60; } },
        { 3, Code::corrupt, "key count", [](GgufImage & g) { g.n_keys = UINT64_MAX; } },
        { 3, Code::corrupt, "one key too many", [](GgufImage & g) { g.n_keys = g.keys.size() + 1; } },
        { 3, Code::corrupt, "value type", [](GgufImage & g) { g.set("x", scalar_value(13, 0)); } },
        { 3, Code::corrupt, "array of arrays", [](GgufImage & g) { g.set("x", array_value<uint32_t>(9, { 1 })); } },
        { 3, Code::corrupt, "empty key", [](GgufImage & g) { g.set("", u32_value(1)); } },
        { 3, Code::corrupt, "long name", [](GgufImage & g) { g.tensors[1].name = std::string(64, 'x'); } },
        { 3, Code::corrupt, "tensor type", [](GgufImage & g) { g.tensors[1].type = 99; } },
        { 3, Code::corrupt, "half a block", [](GgufImage & g) { g.tensors[1].type = GGML_TYPE_Q8_0; } },
        { 3, Code::corrupt, "five dimensions", shaped({ 1, 1, 1, 1, 1 }) },
        { 3, Code::corrupt, "size overflow", shaped({ 1ull << 32, 1ull << 32 }) },
        { 16, Code::corrupt, "offset", [](GgufImage & g) { g.tensors[1].offset = 70 * 512 + 16; } },
        { 16, Code::corrupt, "overlap", [](GgufImage & g) { g.tensors[1].offset = 64; } },
        { 15, Code::corrupt, "far offset", [](GgufImage & g) { g.tensors[1].offset = UINT64_MAX - 31; } },
        { 15, Code::corrupt, "more rows than bytes", shaped({ 512, 1u << 30 }) },
        { 20, Code::corrupt, "twice a key", [](GgufImage & g) { g.keys.push_back(g.keys[2]); } },
        { 20, Code::corrupt, "twice a tensor", [](GgufImage & g) { g.tensors.push_back(g.tensors[1]); } },
        key(16, "general.alignment", u32_value(48)),
        key(16, "general.alignment", u32_value(0)),
        key(16, "general.alignment", u16_value(32)),
    };
    check_all(Select::all, cases);
}

TEST_CASE("rejections: cut anywhere") {
    const Bytes whole = FlashFile(small(Select::all)).image.bytes();
    const size_t header = FlashFile(small(Select::all)).image.header().size();
    for (size_t cut : { size_t(0), size_t(3), size_t(4), size_t(7), size_t(12), size_t(23), size_t(24), size_t(40),
                        size_t(500), header - 1, header, whole.size() - 512, whole.size() / 2 }) {
        CAPTURE(cut);
        const Bytes bytes(whole.begin(), whole.begin() + long(cut));
        check_refused(bytes, cut < 4 ? 1 : cut < header ? 3 : 15, cut < 4 ? Code::not_flash : Code::corrupt, "cut");
    }
}

TEST_CASE("rejections: keys of the flash section") {
    const std::vector<Broken> cases = {
        without(4, "flash_ffn.version", Code::not_flash),
        key(5, "flash_ffn.version", u32_value(2), Code::version),
        key(5, "flash_ffn.version", u32_value(0), Code::version),
        without(6, "flash_ffn.select"),
        without(6, "flash_ffn.layers"),
        without(6, "flash_ffn.n_embd"),
        without(6, "flash_ffn.gated"),
        without(6, "flash_ffn.fused"),
        without(6, "flash_ffn.bundle.parts"),
        without(6, "flash_ffn.bundle.types"),
        without(6, "flash_ffn.bundle.align"),
        key(6, "flash_ffn.select", u32_value(0)),
        key(6, "flash_ffn.n_embd", str_value("64")),
        key(6, "flash_ffn.n_embd", f32_value(64)),
        key(6, "flash_ffn.gated", u32_value(1)),
        key(6, "flash_ffn.layers", f32_array({ 0, 3 })),
        key(6, "flash_ffn.bundle.types", f32_array({ 1, 1, 1, 1, 1, NAN })),
        key(6, "flash_ffn.bundle.parts", u32_array({ 0, 1, 2 })),
    };
    check_all(Select::all, cases);
}

TEST_CASE("rejections: values of the flash section") {
    const std::vector<Broken> cases = {
        key(7, "flash_ffn.select", str_value("oracle"), Code::unsupported),
        key(8, "flash_ffn.layers", u32_array({})),
        key(8, "flash_ffn.layers", u32_array({ 3, 0 })),
        key(8, "flash_ffn.layers", u32_array({ 0, 0 })),
        key(9, "flash_ffn.bundle.parts", str_array({ "gate", "up" })),
        key(9, "flash_ffn.bundle.parts", str_array({ "up", "gate", "down" })),
        key(9, "flash_ffn.gated", bool_value(false)),
        key(10, "flash_ffn.bundle.types", u32_array({ 1, 1, 1 })),
        key(10, "flash_ffn.bundle.types", u32_array({ 1, 1, 1, 1, 1, 99 })),
        key(10, "flash_ffn.bundle.types", u32_array({ 1, 1, 1, 1, 1, 4 })),   // a removed type
        key(10, "flash_ffn.bundle.types", u32_array({ 1, 1, 1, 1, 1, 12 })),  // blocks of 256 in rows of 64
        key(10, "flash_ffn.bundle.types", u32_array({ 24, 1, 1, 24, 1, 1 })), // I8: no dot product
        key(10, "flash_ffn.bundle.types", u32_array({ 1, 9, 1, 1, 9, 1 })),   // Q8_1: only for activations
        key(10, "flash_ffn.n_embd", u32_value(0)),
        key(11, "flash_ffn.bundle.align", u32_value(16)),
        key(11, "flash_ffn.bundle.align", u32_value(48)),
        key(11, "flash_ffn.bundle.align", u32_value(131072)),
        key(18, "flash_ffn.activation", str_value("swish"), Code::unsupported),
        { 18, Code::unsupported, "drelu without a gate",
          [](GgufImage & g) {
              g.set("flash_ffn.gated", bool_value(false));
              g.set("flash_ffn.bundle.parts", str_array({ "up", "down" }));
              g.set("flash_ffn.bundle.types", u32_array({ 1, 1, 1, 1 }));
              g.set("flash_ffn.activation", str_value("drelu"));
          } },
        key(6, "flash_ffn.blocks", u32_array({ 0, 3 })),
        key(26, "flash_ffn.blocks", str_array({ "enc.blk.0" })),
        key(26, "flash_ffn.blocks", str_array({ "enc.blk.0", "enc.blk.0" })),
        key(26, "flash_ffn.blocks", str_array({ "enc.blk.0", "" })),
        key(26, "flash_ffn.blocks", str_array({ "enc.blk.0", "dec.blk.0", "dec.blk.1" })),
        key(18, "flash_ffn.threshold", f32_array({ 1 })),
        key(18, "flash_ffn.threshold", f32_array({ 1, -1 })),
        key(18, "flash_ffn.threshold", f32_array({ 1, NAN })),
        key(18, "flash_ffn.threshold", f32_array({ INFINITY, 1 })),
    };
    check_all(Select::all, cases);
}

TEST_CASE("rejections: bundles and matrices") {
    auto add = [](const char * name, std::vector<uint64_t> ne, uint32_t type, uint64_t bytes) {
        return [=](GgufImage & g) { g.tensors.push_back({ name, ne, type, Bytes(bytes, 0), {} }); };
    };
    auto narrow = [](GgufImage & g) {
        g.set("flash_ffn.bundle.align", u32_value(32));
        g.tensor(bundle_tensor).ne = { 352, 70 };
    };
    const std::vector<Broken> all = {
        { 12, Code::corrupt, "no bundle", [](GgufImage & g) { g.remove_tensor(bundle_tensor); } },
        { 12, Code::corrupt, "unlisted", add("blk.1.ffn_bundle", { 512, 70 }, 24, 512 * 70) },
        { 13, Code::corrupt, "not I8", [](GgufImage & g) { g.tensor(bundle_tensor).type = GGML_TYPE_Q4_0; } },
        { 13, Code::corrupt, "1-D", shaped({ 512 * 70 }) },
        { 13, Code::corrupt, "3-D", shaped({ 512, 7, 10 }) },
        { 13, Code::corrupt, "no rows", shaped({ 512, 0 }) },
        { 13, Code::corrupt, "empty rows", shaped({ 0, 70 }) },
        { 14, Code::corrupt, "stride below its parts", narrow },
        { 14, Code::corrupt, "stride not aligned", shaped({ 500, 70 }) },
        { 17, Code::corrupt, "dense up", add("blk.0.ffn_up.weight", { 64, 70 }, 1, 64 * 70 * 2) },
        { 17, Code::corrupt, "dense gate", add("blk.3.ffn_gate.weight", { 64, 70 }, 1, 64 * 70 * 2) },
        { 17, Code::corrupt, "dense down", add("blk.0.ffn_down.weight", { 70, 64 }, 1, 64 * 70 * 2) },
    };
    check_all(Select::all, all);
    const std::vector<Broken> gate = {
        { 17, Code::corrupt, "fused ungated gate's up",
          [](GgufImage & g) {
              g.set("flash_ffn.fused", bool_value(true)); // then the gate's half is a tensor of its own, too
              g.remove_tensor("blk.0.ffn_gate.weight");
          } },
        { 17, Code::corrupt, "no gate", [](GgufImage & g) { g.remove_tensor("blk.0.ffn_gate.weight"); } },
        { 17, Code::corrupt, "shape", shaped({ 70, 64 }, "blk.3.ffn_gate.weight") },
        { 17, Code::corrupt, "dense up", add("blk.0.ffn_up.weight", { 64, 70 }, 1, 64 * 70 * 2) },
        { 17, Code::corrupt, "I16", [](GgufImage & g) { g.tensor("blk.0.ffn_gate.weight").type = GGML_TYPE_I16; } },
    };
    check_all(Select::gate, gate);
}

TEST_CASE("rejections: thresholds of neurons, and what they cost") {
    auto add = [](const char * name, std::vector<uint64_t> ne, uint32_t type, uint64_t bytes) {
        return [=](GgufImage & g) { g.tensors.push_back({ name, ne, type, Bytes(bytes, 0), {} }); };
    };
    auto told = [](int rule, const char * name, Bytes value) {
        return Broken{ rule, Code::corrupt, name, [=](GgufImage & g) {
                          g.set("flash_ffn.sparsity.target", f32_value(0.5f));
                          g.set(std::string("flash_ffn.sparsity.") + name, value);
                      } };
    };
    const std::vector<Broken> cases = {
        { 24, Code::corrupt, "unlisted layer", add("blk.1.ffn_threshold", { 70 }, GGML_TYPE_F32, 280) },
        { 24, Code::corrupt, "fewer", add("blk.0.ffn_threshold", { 69 }, GGML_TYPE_F32, 276) },
        { 24, Code::corrupt, "2-D", add("blk.0.ffn_threshold", { 35, 2 }, GGML_TYPE_F32, 280) },
        { 24, Code::corrupt, "halves", add("blk.3.ffn_threshold", { 70 }, GGML_TYPE_F16, 140) },
        told(24, "target", f32_value(1.5f)),
        told(24, "perplexity", f32_value(INFINITY)),
        told(24, "dense_perplexity", f32_value(NAN)),
        told(24, "mean_kl", f32_value(-1)),
        told(24, "zeros", f32_array({ 0.5f })),
        told(24, "zeros", f32_array({ 0.5f, 2 })),
        told(6, "target", str_value("50%")),
        told(6, "criterion", u32_value(1)),
        told(6, "text", u32_value(1)),
        told(6, "tokens", f32_value(1)),
        told(6, "held_out", str_value("1")),
        told(6, "mean_kl", u32_value(0)),
        told(6, "zeros", u32_array({ 0, 1 })),
    };
    check_all(Select::all, cases);
    check_all(Select::gate, cases);
}

TEST_CASE("rejections: split sets") {
    FlashFile file(small(Select::all));
    GgufImage first = file.image, second;
    second.tensors.assign(first.tensors.begin() + 5, first.tensors.end());
    first.tensors.resize(5);
    first.set("split.no", u16_value(0));
    first.set("split.count", u16_value(2));
    first.set("split.tensors.count", i32_value(int32_t(file.image.tensors.size())));
    second.set("split.no", u16_value(1));
    second.set("split.count", u16_value(2));
    second.set("split.tensors.count", i32_value(int32_t(file.image.tensors.size())));
    auto refused = [](const GgufImage & a, const GgufImage * b, int rule) {
        TempFolder folder;
        const std::string one = folder.write("m-00001-of-00002.gguf", a.bytes());
        if (b != nullptr) {
            folder.write("m-00002-of-00002.gguf", b->bytes());
        }
        const Result<Layout> layout = read_layout(split_paths(one), one);
        REQUIRE_FALSE(layout.ok());
        CAPTURE(layout.status().message());
        CHECK(layout.status().code() == Code::corrupt);
        CHECK(layout.status().message().find("(SPEC R" + std::to_string(rule) + ")") != std::string::npos);
    };
    refused(first, nullptr, 19);
    GgufImage wrong = second;
    wrong.set("split.no", u16_value(0));
    refused(first, &wrong, 19);
    wrong = first;
    wrong.set("split.count", u16_value(3));
    refused(wrong, &second, 19);
    wrong = second;
    wrong.tensors[0] = first.tensors[0];
    refused(first, &wrong, 20);
    wrong = second;
    wrong.tensors.pop_back();
    refused(first, &wrong, 19); // fewer tensors than promised
    check_refused(first.bytes(), 19, Code::corrupt, "one file of a set, renamed");
}
