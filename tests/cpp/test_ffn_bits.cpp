// The promise of ffn.h: output bits depend on the weights and the input, and on nothing else.
#include "ffn_ways.h"

using namespace gguf_flash;

namespace {

FlashSpec two_layers(Select select, ggml_type gate, ggml_type up, ggml_type down, uint32_t n_embd) {
    FlashSpec spec;
    spec.layers = { 0, 5 };
    spec.n_ff = { 300, 150 };
    spec.select = select;
    spec.gate = gate;
    spec.up = up;
    spec.down = down;
    spec.n_embd = n_embd;
    spec.biases = true;
    spec.activation = select == Select::gate ? "relu" : "silu";
    return spec;
}

} // namespace

TEST_CASE("ffn bits: the same whatever the memory, reader, window, threads and faults") {
    SUBCASE("all, F16") {
        same_bits_every_way(two_layers(Select::all, GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16, 64), 60);
    }
    SUBCASE("gate, mixed") {
        same_bits_every_way(two_layers(Select::gate, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_F16, 96), 60);
    }
    SUBCASE("all, Q4_K and Q8_0") {
        same_bits_every_way(two_layers(Select::all, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, 256), 25);
    }
    SUBCASE("all, down in codes") {
        FlashSpec spec = two_layers(Select::all, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_I8, 96);
        spec.n_ff = { 320, 160 };
        same_bits_every_way(spec, 60);
    }
    SUBCASE("gate, down in codes") {
        FlashSpec spec = two_layers(Select::gate, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_I8, 64);
        spec.n_ff = { 288, 128 };
        same_bits_every_way(spec, 60);
    }
    SUBCASE("gate, down in Q4_K") {
        same_bits_every_way(two_layers(Select::gate, GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_Q4_K, 512), 25);
    }
}

TEST_CASE("ffn bits: a batch is its tokens one by one") {
    for (Select select : { Select::all, Select::gate }) {
        for (ggml_type down : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                GGML_TYPE_Q4_K, GGML_TYPE_I8 }) {
            CAPTURE(int(select));
            CAPTURE(std::string(ggml_type_name(down)));
            FlashSpec spec = two_layers(select, GGML_TYPE_Q8_0, GGML_TYPE_F16, down, 256);
            spec.n_ff = { 320, 160 };
            const StoredFlash stored(spec);
            const auto model = open_flash(stored.path, { { "ram", "60%" } });
            const std::vector<float> x = stored.input(17);
            const std::vector<float> batch = call(*model, 0, x, 17, 2);
            std::vector<float> single;
            for (size_t t = 0; t < 17; ++t) {
                const std::vector<float> one(x.begin() + long(t * 256), x.begin() + long((t + 1) * 256));
                const std::vector<float> out = call(*model, 0, one, 1);
                single.insert(single.end(), out.begin(), out.end());
            }
            CHECK(batch == single);
        }
    }
}

TEST_CASE("ffn bits: concurrent calls on the same and on different layers") {
    for (const char * ram : { "60%", "100%" }) {
        for (const char * reader : { "auto", "pread" }) {
            const StoredFlash stored(two_layers(Select::all, GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16, 64));
            const std::vector<float> expected = session(stored, *open_flash(stored.path), 1);
            const auto model = open_flash(stored.path, { { "ram", ram }, { "reader", reader }, { "depth", "4" } });
            std::vector<std::thread> callers;
            std::vector<int> same(4);
            for (size_t c = 0; c < same.size(); ++c) {
                callers.emplace_back([&, c] { same[c] = session(stored, *model, 1 + int(c) % 2) == expected; });
            }
            for (int i = 0; i < 50; ++i) {
                CHECK(model->model().stats().layers.size() == 2); // readable at any moment
            }
            for (std::thread & t : callers) {
                t.join();
            }
            CHECK(same == std::vector<int>(4, 1));
        }
    }
}

TEST_CASE("ffn bits: first calls on many threads, whose scratch memory grows under way") {
    FlashSpec spec = two_layers(Select::all, GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16, 64);
    spec.n_ff = { 1500, 900 };
    const StoredFlash stored(spec);
    const std::vector<float> x = stored.input(1);
    const std::vector<float> expected = call(*open_flash(stored.path), 0, x, 1);
    for (int i = 0; i < 20; ++i) {
        const auto model = open_flash(stored.path, { { "reader", i % 2 ? "auto" : "pread" }, { "depth", "4" } });
        CHECK(call(*model, 0, x, 1, 4) == expected);
    }
}

TEST_CASE("ffn bits: streaming layers of very different strides") {
    // One reader's staging memory serves every layer; bundles here are larger and smaller than a read.
    FlashSpec spec;
    spec.layers = { 0, 1 };
    spec.n_ff = { 9 };
    spec.n_embd = 65536;
    spec.gate = spec.up = spec.down = GGML_TYPE_F32;
    FlashSpec small = spec;
    small.gate = small.up = small.down = GGML_TYPE_F16;
    StoredFlash large(spec);
    // The second layer's bundles become those of the F16 file.
    FlashFile halves(small);
    large.file.image.tensor("blk.1.ffn_bundle") = halves.image.tensor("blk.1.ffn_bundle");
    large.file.image.set("flash_ffn.bundle.types", u32_array({ 0, 0, 0, 1, 1, 1 })); // F32, F16
    const std::string path = large.folder.write("mixed.gguf", large.file.image.bytes());
    const std::vector<float> x = large.input(2);
    const auto select = open_flash(path, { { "prefill", "select" } });
    const auto stream = open_flash(path, { { "prefill", "stream" } });
    for (uint32_t layer : { 1u, 0u, 1u, 0u }) {
        CAPTURE(layer);
        CHECK(call(*stream, layer, x, 2, 2) == call(*select, layer, x, 2, 2));
    }
}
