// What read_layout says about predictors and calibration, and what it refuses (SPEC R21 to R23).
#include "flash_file.h"
#include "temp_folder.h"

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>

using namespace gguf_flash;

namespace {

FlashSpec small() {
    FlashSpec spec;
    spec.layers = { 0, 3 };
    spec.n_ff = { 70 };
    spec.select = Select::predictor;
    spec.predictor.ranks = { 32, 64 };
    spec.predictor.b = GGML_TYPE_Q8_0;
    spec.predictor.thresholds = { 0.0f, 0.25f };
    spec.predictor.capacities = { 33, 1000000 };
    spec.predictor.miss_slots = { 64, 64, 64, 64 };
    spec.predictor.miss_curve = { 1.5f, 1.5f, 1.5f, 1.5f };
    return spec;
}

Result<Layout> read(const GgufImage & image) {
    TempFolder folder;
    return read_layout({ folder.write("m.gguf", image.bytes()) }, "m.gguf");
}

using Damage = std::function<void(GgufImage &)>;

void check_refused(int rule, const std::string & what, const Damage & damage) {
    CAPTURE(rule);
    CAPTURE(what);
    FlashFile file(small());
    REQUIRE(read(file.image).ok());
    damage(file.image);
    const Result<Layout> layout = read(file.image);
    REQUIRE_FALSE(layout.ok());
    CAPTURE(layout.status().message());
    CHECK(layout.status().code() == Code::corrupt);
    CHECK(layout.status().message().find("(SPEC R" + std::to_string(rule) + ")") != std::string::npos);
    CHECK(layout.status().message().find(what) != std::string::npos); // the key or tensor is named
}

void key_refused(int rule, const std::string & name, const std::vector<Bytes> & values) {
    for (const Bytes & value : values) {
        check_refused(rule, "flash_ffn." + name, [&](GgufImage & g) { g.set("flash_ffn." + name, value); });
    }
}

} // namespace

TEST_CASE("predictor layout: keys and tensors are read") {
    for (bool gated : { true, false }) {
        FlashSpec spec = small();
        spec.gated = gated;
        const Result<Layout> layout = read(FlashFile(spec).image);
        REQUIRE_MESSAGE(layout.ok(), layout.status().message());
        const Layout & l = layout.value();
        CHECK(l.select == Select::predictor);
        CHECK(std::string(to_string(l.select)) == "predictor");
        CHECK(l.gated == gated);
        REQUIRE(l.layers.size() == 2);
        CHECK(l.layers[0].parts.size() == (gated ? 3 : 2));
        CHECK((l.layers[0].find(Part::gate) != nullptr) == gated);
        CHECK(l.layers[0].rank == 32);
        CHECK(l.layers[1].rank == 64);
        CHECK(l.layers[0].predictor_threshold == 0.0f);
        CHECK(l.layers[1].predictor_threshold == 0.25f);
        CHECK(l.layers[0].capacity == 33);
        CHECK(l.layers[1].capacity == 1000000); // as it stands; more than there are is the cache's affair
        const PredictorNames names(3);
        CHECK(names.a == "blk.3.ffn_pred_a.weight");
        REQUIRE(l.tensor(names.a) != nullptr);
        CHECK(l.tensor(names.a)->ne == std::vector<uint64_t>{ 64, 64 });
        CHECK(l.tensor(names.b)->ne == std::vector<uint64_t>{ 64, 70 });
        CHECK(l.tensor(names.b)->type == GGML_TYPE_Q8_0);
        CHECK(l.tensor(names.bias)->ne == std::vector<uint64_t>{ 70 });
        CHECK(l.resident.size() == 6);
    }
}

TEST_CASE("predictor layout: fused is allowed when gated, calibration may be absent") {
    FlashSpec spec = small();
    spec.fused = true;
    spec.predictor.capacities = {};
    const Result<Layout> layout = read(FlashFile(spec).image);
    REQUIRE_MESSAGE(layout.ok(), layout.status().message());
    CHECK(layout.value().fused);
    CHECK(layout.value().layers[1].capacity == 0);
    spec.gated = false;
    CHECK(read(FlashFile(spec).image).status().message().find("(SPEC R9)") != std::string::npos);
}

TEST_CASE("predictor layout: every type for A and B") {
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        FlashSpec spec = small();
        spec.predictor.a = spec.predictor.b = type;
        CHECK(read(FlashFile(spec).image).ok());
    }
}

TEST_CASE("predictor layout: calibration is ignored without its tokens, and keys of another mode too") {
    FlashFile file(small());
    file.image.remove("flash_ffn.calibration.tokens");
    file.image.set("flash_ffn.calibration.active", f32_array({ NAN }));
    const Result<Layout> layout = read(file.image);
    REQUIRE(layout.ok());
    CHECK(layout.value().layers[0].capacity == 0);
    FlashSpec spec = small();
    spec.select = Select::all;
    FlashFile all(spec);
    all.image.set("flash_ffn.predictor.rank", u32_array({ 0 }));
    const Result<Layout> ignored = read(all.image);
    REQUIRE(ignored.ok());
    CHECK(ignored.value().layers[0].rank == 0);
}

TEST_CASE("predictor rejections: R6, keys that are missing or of another type") {
    for (const char * name : { "predictor.rank", "predictor.threshold" }) {
        check_refused(6, name, [&](GgufImage & g) { g.remove(std::string("flash_ffn.") + name); });
    }
    key_refused(6, "predictor.rank", { f32_array({ 32, 64 }), u32_value(32) });
    key_refused(6, "predictor.threshold", { u32_array({ 0, 0 }), f32_value(0), str_array({ "0", "0" }) });
    key_refused(6, "calibration.tokens", { f32_value(1000), u32_array({ 1 }) });
    key_refused(6, "calibration.text", { u32_value(1) });
    key_refused(6, "calibration.target", { f32_value(0.05f) });
    key_refused(6, "calibration.window", { i32_value(5) });
    key_refused(6, "calibration.capacity", { f32_array({ 1, 1 }), u32_value(1) });
    key_refused(6, "calibration.miss_slots", { f32_array({ 1, 1, 1, 1 }), str_array({ "1", "1" }) });
    key_refused(6, "calibration.miss_curve", { u32_array({ 1, 1, 1, 1 }) });
}

TEST_CASE("predictor rejections: R21, ranks and thresholds") {
    key_refused(21, "predictor.rank",
                { u32_array({}), u32_array({ 32 }), u32_array({ 32, 64, 64 }), u32_array({ 0, 64 }),
                  u32_array({ 32, 0 }), u32_array({ 32, 1 }) });
    const float tiny = -std::numeric_limits<float>::denorm_min();
    key_refused(21, "predictor.threshold",
                { f32_array({}), f32_array({ 0.5f }), f32_array({ 0, 0, 0 }), f32_array({ 0, 1 }), f32_array({ 2, 0 }),
                  f32_array({ -0.5f, 0 }), f32_array({ 0, tiny }), f32_array({ NAN, 0 }), f32_array({ 0, INFINITY }) });
}

TEST_CASE("predictor rejections: R22, tensors") {
    const PredictorNames names(3);
    struct {
        std::string name;
        std::vector<uint64_t> less, more;
    } tensors[] = {
        { names.a, { 64, 63 }, { 64, 64, 1 } },
        { names.b, { 64, 69 }, { 32, 70 } },
        { names.bias, { 69 }, { 70, 1 } },
    };
    for (const auto & t : tensors) {
        CAPTURE(t.name);
        check_refused(22, t.name, [&](GgufImage & g) { g.remove_tensor(t.name); });
        check_refused(22, t.name, [&](GgufImage & g) { g.tensor(t.name).ne = t.less; });
        check_refused(22, t.name, [&](GgufImage & g) { g.tensor(t.name).ne = t.more; });
        check_refused(22, t.name, [&](GgufImage & g) { g.tensor(t.name).type = GGML_TYPE_I8; });
    }
    check_refused(22, names.bias, [&](GgufImage & g) { g.tensor(names.bias).type = GGML_TYPE_F16; });
    check_refused(22, names.a, [](GgufImage & g) { g.set("flash_ffn.predictor.rank", u32_array({ 32, 65 })); });
    check_refused(22, names.a, [](GgufImage & g) { g.set("flash_ffn.predictor.rank", u32_array({ 32, ~0u })); });
}

TEST_CASE("predictor rejections: R23, calibration") {
    for (const char * rate : { "active", "selected", "false_negatives", "false_positives" }) {
        key_refused(23, std::string("calibration.") + rate,
                    { f32_array({}), f32_array({ 0.5f }), f32_array({ 0, 0, 0 }), f32_array({ 0, NAN }),
                      f32_array({ -0.1f, 0 }), f32_array({ 0, 1.0011f }), f32_array({ INFINITY, 0 }) });
    }
    key_refused(23, "calibration.capacity", { u32_array({}), u32_array({ 1 }), u32_array({ 1, 1, 1 }) });
    key_refused(23, "calibration.miss_slots", { u32_array({ 1, 2, 3 }) }); // not the same number for each layer
    for (const Bytes & slots : { u32_array({}), u32_array({ 1, 2 }), u32_array({ 1, 2, 3, 4, 5, 6 }) }) {
        check_refused(23, "flash_ffn.calibration.miss_curve", // has another number
                      [&](GgufImage & g) { g.set("flash_ffn.calibration.miss_slots", slots); });
    }
    key_refused(23, "calibration.miss_curve",
                { f32_array({}), f32_array({ 1, 1, 1 }), f32_array({ 1, 1, 1, NAN }), f32_array({ 1, 1, 1, -1 }),
                  f32_array({ INFINITY, 1, 1, 1 }) });
    check_refused(23, "flash_ffn.calibration.miss_curve",
                  [](GgufImage & g) { g.remove("flash_ffn.calibration.miss_slots"); });
}

TEST_CASE("predictor layout: shares a little above 1 are rounding, counts have no limit") {
    FlashFile file(small());
    file.image.set("flash_ffn.calibration.active", f32_array({ 1.0f, 1.0009f }));
    file.image.set("flash_ffn.calibration.miss_curve", f32_array({ 3e38f, 1, 1, 0 }));
    file.image.set("flash_ffn.calibration.miss_slots", u32_array({ 0, ~0u, 1, 1 }));
    file.image.remove("flash_ffn.calibration.text");
    CHECK(read(file.image).ok());
}
