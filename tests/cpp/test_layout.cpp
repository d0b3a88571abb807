// What read_layout says about files that are right.
#include "flash_file.h"
#include "ggml.h"
#include "temp_folder.h"

#include <doctest/doctest.h>

using namespace gguf_flash;

namespace {

Layout layout_of(const FlashFile & file) {
    TempFolder folder;
    const std::string path = folder.write("m.gguf", file.image.bytes());
    const Result<Layout> layout = read_layout({ path }, path);
    REQUIRE_MESSAGE(layout.ok(), layout.status().message());
    CHECK(layout.value().files == std::vector<std::string>{ path });
    return layout.value();
}

// The layout's bundles hold what the file was built from.
void check_bundles(const FlashFile & file, const Layout & layout) {
    const Bytes bytes = file.image.bytes();
    for (size_t i = 0; i < layout.layers.size(); ++i) {
        const LayerLayout & layer = layout.layers[i];
        const DenseLayer & dense = file.layers[i];
        CHECK(layer.layer == file.spec.layers[i]);
        CHECK(layer.n_ff == dense.n_ff);
        CHECK(layer.stride % layout.align == 0);
        CHECK(layout.find(layer.layer) == &layer);
        for (const PartLayout & part : layer.parts) {
            CHECK(part.offset % 32 == 0);
            CHECK(part.bytes == ggml_row_size(ggml_type(part.type), layout.n_embd));
            const std::vector<float> & rows = part.part == Part::gate ? dense.gate
                                            : part.part == Part::up   ? dense.up
                                                                      : dense.down;
            for (uint32_t neuron : { 0u, 1u, dense.n_ff - 1 }) {
                const uint8_t * at = bytes.data() + layer.offset + neuron * layer.stride + part.offset;
                const std::vector<float> row =
                    dequantize_rows(ggml_type(part.type), Bytes(at, at + part.bytes), layout.n_embd);
                CHECK(std::equal(row.begin(), row.end(), rows.begin() + long(neuron * layout.n_embd)));
            }
        }
    }
}

} // namespace

TEST_CASE("layout: a gated file with several layers and types") {
    FlashSpec spec;
    spec.n_embd = 256;
    spec.layers = { 1, 4, 12 };
    spec.n_ff = { 100, 70, 300 };
    spec.gate = GGML_TYPE_Q4_K;
    spec.up = GGML_TYPE_Q8_0;
    spec.thresholds = { 0.0f, 0.25f, 1.5f };
    spec.biases = true;
    const FlashFile file(spec);
    const Layout layout = layout_of(file);
    CHECK(layout.version == 1);
    CHECK(layout.select == Select::all);
    CHECK(layout.activation == Activation::silu);
    CHECK(layout.gated);
    CHECK_FALSE(layout.fused);
    CHECK(layout.n_embd == 256);
    CHECK(layout.align == 512);
    REQUIRE(layout.layers.size() == 3);
    CHECK(layout.layers[1].threshold == 0.25f);
    REQUIRE(layout.layers[0].parts.size() == 3);
    CHECK(layout.layers[0].parts[0].type == GGML_TYPE_Q4_K);
    CHECK(layout.layers[0].parts[1].type == GGML_TYPE_Q8_0);
    CHECK(layout.layers[0].parts[2].type == GGML_TYPE_F16);
    CHECK(layout.layers[0].find(Part::up)->offset == 160); // 144 bytes of gate, rounded up to 32
    CHECK(layout.layers[0].offset % 4096 == 0);
    CHECK(layout.find(2) == nullptr);
    CHECK(layout.bundle_bytes() == (100 + 70 + 300) * layout.layers[0].stride);
    CHECK(layout.resident_bytes() == (2 * (100 + 70 + 300) + 3 * 256) * sizeof(float));
    REQUIRE(layout.tensor("blk.4.ffn_up.bias") != nullptr);
    CHECK(layout.tensor("blk.4.ffn_up.bias")->ne == std::vector<uint64_t>{ 70 });
    CHECK(layout.tensor("blk.4.ffn_bundle") == nullptr);
    check_bundles(file, layout);
}

TEST_CASE("layout: which parts the four kinds of file have") {
    for (Select select : { Select::all, Select::gate }) {
        for (bool gated : { true, false }) {
            FlashSpec spec;
            spec.select = select;
            spec.gated = gated;
            spec.layers = { 0, 1 };
            const FlashFile file(spec);
            const Layout layout = layout_of(file);
            const LayerLayout & layer = layout.layers[1];
            CHECK(layout.select == select);
            CHECK(layout.gated == gated);
            CHECK((layer.find(Part::gate) != nullptr) == (gated && select == Select::all));
            CHECK((layer.find(Part::up) != nullptr) == (gated || select == Select::all));
            CHECK(layer.find(Part::down) != nullptr);
            CHECK(layout.resident.size() == (select == Select::all ? 0 : 2));
            check_bundles(file, layout);
        }
    }
}

TEST_CASE("layout: fused, no activation, other alignments, bundles anywhere") {
    for (uint32_t align : { 32u, 64u, 4096u, 65536u }) {
        FlashSpec spec;
        spec.fused = true;
        spec.activation = "";
        spec.align = align;
        spec.pad_header = false;
        spec.bytes_before = 96;
        spec.n_ff = { 70 };
        const FlashFile file(spec);
        const Layout layout = layout_of(file);
        CHECK(layout.fused);
        CHECK(layout.activation == Activation::from_graph);
        CHECK(layout.layers[0].threshold == 0);
        CHECK(layout.layers[0].stride == GgufImage::up(384, align));
        check_bundles(file, layout);
    }
}

TEST_CASE("layout: every activation of the engine is read") {
    for (Activation a : { Activation::relu, Activation::relu_sqr, Activation::silu, Activation::gelu,
                          Activation::gelu_erf, Activation::drelu }) {
        FlashSpec spec;
        spec.activation = to_string(a);
        CHECK(layout_of(FlashFile(spec)).activation == a);
        CHECK(parse_activation(to_string(a)).value() == a);
    }
    CHECK_FALSE(parse_activation("swish").ok());
}

TEST_CASE("layout: layers of two stacks have the names of their blocks") {
    FlashSpec spec;
    spec.layers = { 0, 1 };
    FlashFile file(spec);
    CHECK(layout_of(file).layers[1].block == "blk.1");
    file.image.set("flash_ffn.blocks", str_array({ "enc.blk.0", "dec.blk.0" }));
    const Layout layout = layout_of(file);
    CHECK(layout.layers[0].block == "enc.blk.0");
    CHECK(layout.find_block("dec.blk.0.ffn_down.weight") == &layout.layers[1]);
    CHECK(layout.find_block("blk.1.ffn_down.weight") == nullptr);
    CHECK(layout.find_block("dec.blk.01.ffn_down.weight") == nullptr);
    CHECK(layout.architecture == "llama");
    file.image.tensors.push_back({ "enc.blk.0.ffn_up.weight", { 64, 300 }, 1, Bytes(64 * 300 * 2, 0), {} });
    TempFolder folder;
    const std::string path = folder.write("m.gguf", file.image.bytes());
    CHECK(read_layout({ path }, path).status().message().find("(SPEC R17)") != std::string::npos);
}

TEST_CASE("layout: label instead of path, missing and no files") {
    const Result<Layout> missing = read_layout({ "/nonexistent" }, "the model");
    CHECK(missing.status().code() == Code::io);
    CHECK(missing.status().message().find("'the model'") != std::string::npos);
    CHECK(read_layout({}, "none").status().code() == Code::argument);
    CHECK_FALSE(read_layout({ "/tmp" }, "a folder").ok());
}

TEST_CASE("layout: split_paths") {
    using Paths = std::vector<std::string>;
    CHECK(split_paths("d/m-00001-of-00003.gguf") ==
          Paths{ "d/m-00001-of-00003.gguf", "d/m-00002-of-00003.gguf", "d/m-00003-of-00003.gguf" });
    for (const char * alone : { "m.gguf", "", "m-00002-of-00003.gguf", "m-00001-of-00001.gguf", "m-1-of-3.gguf",
                                "m-00001-of-00003.gguf.part", "-00001-of-00002.gguf", "m-00001-of-00003.bin" }) {
        CAPTURE(std::string(alone));
        CHECK(split_paths(alone) == Paths{ alone });
    }
}

TEST_CASE("layout: a split set") {
    FlashSpec spec;
    spec.layers = { 0, 1 };
    spec.biases = true;
    FlashFile whole(spec);
    GgufImage first = whole.image, second;
    second.set("split.no", u16_value(1));
    second.set("split.count", u16_value(2));
    second.set("split.tensors.count", i32_value(int32_t(whole.image.tensors.size())));
    first.set("split.no", u16_value(0));
    first.set("split.count", u16_value(2));
    first.set("split.tensors.count", i32_value(int32_t(whole.image.tensors.size())));
    second.tensors.assign(first.tensors.begin() + 4, first.tensors.end());
    first.tensors.resize(4);
    TempFolder folder;
    const std::string one = folder.write("m-00001-of-00002.gguf", first.bytes());
    const std::string two = folder.write("m-00002-of-00002.gguf", second.bytes());
    const Result<Layout> layout = read_layout(split_paths(one), one);
    REQUIRE_MESSAGE(layout.ok(), layout.status().message());
    CHECK(layout.value().files == std::vector<std::string>{ one, two });
    CHECK(layout.value().layers[0].file == 0);
    CHECK(layout.value().layers[1].file == 1);
    CHECK(layout.value().resident.size() == 6);
}
