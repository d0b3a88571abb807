// The promise of ffn.h: output bits depend on the weights and the input, and on nothing else.
#include "ffn_runner.h"

using namespace gguf_flash;

namespace {

// One way to run the same model.
struct Way {
    std::string ram = "100%", reader = "auto", window = "5", policy = "budget", prefill = "auto", depth = "32", faults;
    int threads = 1;

    SettingList settings() const {
        return { { "ram", ram },         { "reader", reader }, { "window", window }, { "policy", policy },
                 { "prefill", prefill }, { "depth", depth },   { "faults", faults } };
    }
    std::string text() const {
        return ram + " " + reader + " window " + window + " " + policy + " " + prefill + " depth " + depth +
               " faults '" + faults + "' threads " + std::to_string(threads);
    }
};

struct Choices {
    std::vector<std::string> rams;
    std::vector<std::string> readers = { "pread", "io_uring" };
    std::vector<std::string> windows = { "1", "5", "50" };
    std::vector<std::string> policies = { "budget", "window" };
    std::vector<std::string> prefills = { "auto", "select", "stream" };
    std::vector<std::string> depths = { "1", "4", "32" };
    std::vector<std::string> faults = { "", "short:3,again:5" };
    std::vector<int> threads = { 1, 2, 3, 4 };

    explicit Choices(const std::string & path) : rams{ std::to_string(least_ram(path)), "60%", "100%" } {
        if (!io_uring_problem().empty()) {
            readers.pop_back();
        }
    }
    Way pick(Random & random) const {
        Way way;
        way.ram = random.pick(rams);
        way.reader = random.pick(readers);
        way.window = random.pick(windows);
        way.policy = random.pick(policies);
        way.prefill = random.pick(prefills);
        way.depth = random.pick(depths);
        way.faults = random.pick(faults);
        way.threads = random.pick(threads);
        return way;
    }
    // The default with one thing changed, for each thing.
    std::vector<Way> one_by_one() const {
        std::vector<Way> ways;
        auto vary = [&](const auto & values, auto field) {
            for (const auto & value : values) {
                ways.emplace_back();
                ways.back().*field = value;
            }
        };
        vary(rams, &Way::ram);
        vary(readers, &Way::reader);
        vary(windows, &Way::window);
        vary(policies, &Way::policy);
        vary(prefills, &Way::prefill);
        vary(faults, &Way::faults);
        vary(threads, &Way::threads);
        return ways;
    }
};

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

const std::vector<uint32_t> sizes = { 1, 17, 1, 3, 64, 1 }; // tokens of one call after the other

// The outputs of a session of calls on both layers, in one row.
std::vector<float> session(const StoredFlash & stored, Standalone & model, int threads) {
    std::vector<float> out;
    for (size_t i = 0; i < sizes.size(); ++i) {
        for (uint32_t layer : stored.file.spec.layers) {
            const std::vector<float> part = call(model, layer, stored.input(sizes[i], i), sizes[i], threads);
            out.insert(out.end(), part.begin(), part.end());
        }
    }
    return out;
}

void same_bits_every_way(const FlashSpec & spec, int n_random) {
    const StoredFlash stored(spec);
    FlashSpec shifted_spec = spec;
    shifted_spec.bytes_before = 96;
    shifted_spec.pad_header = false;
    const StoredFlash shifted(shifted_spec); // bundles off every sector, as other tools leave them
    const std::vector<float> expected = session(stored, *open_flash(stored.path, Way().settings()), 1);
    const Choices choices(stored.path), shifted_choices(shifted.path);
    std::vector<Way> ways = choices.one_by_one();
    Random random(spec.n_embd);
    for (int i = 0; i < n_random; ++i) {
        ways.push_back(choices.pick(random));
    }
    for (size_t i = 0; i < ways.size(); ++i) {
        Way way = ways[i];
        const bool shift = i % 2 == 1;
        if (shift && way.ram == choices.rams[0]) {
            way.ram = shifted_choices.rams[0];
        }
        CAPTURE(way.text());
        CAPTURE(shift);
        const StoredFlash & used = shift ? shifted : stored;
        CHECK(session(used, *open_flash(used.path, way.settings()), way.threads) == expected);
    }
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
    SUBCASE("gate, down in Q4_K") {
        same_bits_every_way(two_layers(Select::gate, GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_Q4_K, 512), 25);
    }
}

TEST_CASE("ffn bits: a batch is its tokens one by one") {
    for (Select select : { Select::all, Select::gate }) {
        for (ggml_type down :
             { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K }) {
            CAPTURE(int(select));
            CAPTURE(std::string(ggml_type_name(down)));
            const StoredFlash stored(two_layers(select, GGML_TYPE_Q8_0, GGML_TYPE_F16, down, 256));
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
