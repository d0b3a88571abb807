// Mode predictor's cache: counters, how slots are shared, and thresholds that a user sets.
#include "counter_replay.h"

#include <cmath>

using namespace gguf_flash;
using namespace replay;

namespace {

FlashSpec one_layer(float threshold, uint32_t capacity) {
    FlashSpec spec;
    spec.select = Select::predictor;
    spec.gated = false;
    spec.activation = "relu";
    spec.n_ff = { replayed_neurons };
    spec.predictor.ranks = { 8 };
    spec.predictor.thresholds = { threshold };
    if (capacity > 0) {
        spec.predictor.capacities = { capacity };
    }
    return spec;
}

struct Sizes {
    std::vector<uint32_t> n_ff, capacities;
};

// One large layer beside small ones: what rounding down leaves of seven must not go to the eighth.
const std::vector<Sizes> all_sizes = {
    { { 1000, 400, 100, 30 }, { 500, 64, 90, 30 } },
    { { 5000, 70, 70, 70, 70, 70, 70, 70 }, { 100, 68, 68, 68, 68, 68, 68, 68 } },
    { { 300, 300 }, { 0, 1000000 } },
    { { 300, 200 }, {} },
};

FlashSpec layers_of(const Sizes & sizes) {
    FlashSpec spec;
    spec.select = Select::predictor;
    spec.gated = false;
    spec.n_embd = 32;
    spec.n_ff = sizes.n_ff;
    spec.layers.clear();
    for (uint32_t i = 0; i < sizes.n_ff.size(); ++i) {
        spec.layers.push_back(i);
    }
    spec.predictor.ranks = { 4 };
    spec.predictor.capacities = sizes.capacities;
    return spec;
}

struct Shares {
    uint64_t least = 0, calibrated = 0, whole = 0; // bytes of RAM
    std::vector<uint32_t> low, high;               // slots of each layer with the first two
};

Shares shares_of(const StoredFlash & stored, const Sizes & sizes) {
    Shares out;
    const Stats stats = open_flash(stored.path, { { "ram", "100%" } })->model().stats();
    out.least = out.calibrated = out.whole = least_ram(stored.path);
    for (size_t i = 0; i < sizes.n_ff.size(); ++i) {
        const uint32_t n_ff = sizes.n_ff[i], low = std::min(n_ff, 64u);
        const uint32_t capacity = sizes.capacities.empty() ? 0 : sizes.capacities[i];
        out.low.push_back(low);
        out.high.push_back(std::max(low, std::min(n_ff, capacity)));
        out.calibrated += (out.high[i] - low) * stats.layers[i].slot_bytes;
        out.whole += (n_ff - low) * stats.layers[i].slot_bytes;
    }
    return out;
}

Stats stats_with(const StoredFlash & stored, uint64_t ram) {
    const Stats stats = open_flash(stored.path, { { "ram", std::to_string(ram) } })->model().stats();
    CHECK(stats.ram_bytes == ram);
    CHECK(stats.resident_bytes + stats.cache_bytes <= ram);
    return stats;
}

// Slots lie the given share of the way from low to high, rounded down; above is what may be added.
void check_share(const Stats & stats, const std::vector<uint32_t> & low, const std::vector<uint32_t> & high,
                 double share) {
    for (size_t i = 0; i < low.size(); ++i) {
        CAPTURE(i);
        CHECK(stats.layers[i].slots >= low[i]);
        CHECK(stats.layers[i].slots <= high[i]);
        CHECK(std::fabs(stats.layers[i].slots - (low[i] + share * (high[i] - low[i]))) <= 1);
    }
}

} // namespace

TEST_CASE("predictor counters: hits, evictions, requests and bytes as a replay predicts") {
    for (float threshold : { 0.5f, 0.3f }) {
        for (uint32_t capacity : { 0u, 600u }) {
            for (const char * policy : { "window", "budget" }) {
                for (uint32_t window : { 1u, 2u, 4u, 5u, 10u }) {
                    CAPTURE(threshold);
                    CAPTURE(std::string(policy));
                    CAPTURE(window);
                    compare_with_replay(one_layer(threshold, capacity),
                                        { { "ram", "30%" },
                                          { "policy", policy },
                                          { "window", std::to_string(window) },
                                          { "prefill", "select" } },
                                        std::string(policy) == "budget" ? Policy::budget : Policy::window, window,
                                        score_limit(threshold));
                }
            }
        }
    }
}

// Against every other share of real files: tests/python/test_plan.py and test_plan_model.py.
TEST_CASE("predictor slots: along the miss curves, steepest first, what is left to all alike") {
    FlashSpec spec = layers_of({ { 500, 500 }, { 100, 100 } });
    spec.predictor.miss_slots = { 64, 128, 300, 64, 128, 300 };
    spec.predictor.miss_curve = { 100, 40, 40, 100, 70, 10 };
    const StoredFlash stored(spec);
    const uint64_t least = least_ram(stored.path), slot = stats_with(stored, least).layers[0].slot_bytes;
    auto slots = [&](uint64_t more) {
        const Stats stats = stats_with(stored, least + more);
        return std::vector<uint32_t>{ stats.layers[0].slots, stats.layers[1].slots };
    };
    CHECK((slots(0) == std::vector<uint32_t>{ 64, 64 }));
    CHECK((slots(10 * slot) == std::vector<uint32_t>{ 74, 64 })); // 0.66 misses a slot, the other layer's 0.43
    CHECK(slots(64 * slot)[0] == 128);
    CHECK((slots(uint64_t(1) << 30) == std::vector<uint32_t>{ 500, 500 }));
}

TEST_CASE("predictor slots: up to what calibration saw, the same share of the way") {
    for (const Sizes & sizes : all_sizes) {
        const StoredFlash stored(layers_of(sizes));
        const Shares s = shares_of(stored, sizes);
        for (int percent = 0; percent < 100 && s.calibrated > s.least; ++percent) {
            CAPTURE(percent);
            const uint64_t ram = s.least + (s.calibrated - s.least) * uint64_t(percent) / 100;
            check_share(stats_with(stored, ram), s.low, s.high, double(ram - s.least) / double(s.calibrated - s.least));
        }
        check_share(stats_with(stored, s.calibrated), s.low, s.high, 1);
        if (s.calibrated > s.least) {
            check_share(stats_with(stored, s.calibrated - 1), s.low, s.high, 1);
        }
    }
}

TEST_CASE("predictor slots: beyond that, up to whole layers; from the least on without calibration") {
    for (const Sizes & sizes : all_sizes) {
        const StoredFlash stored(layers_of(sizes));
        const Shares s = shares_of(stored, sizes);
        for (int percent = 0; percent <= 110; percent += 2) {
            CAPTURE(percent);
            const uint64_t ram = s.calibrated + (s.whole - s.calibrated) * uint64_t(percent) / 100;
            check_share(stats_with(stored, ram), s.high, sizes.n_ff,
                        std::min(1.0, double(ram - s.calibrated) / double(s.whole - s.calibrated)));
        }
    }
}

// Lists that only grow with the slots were once charged for every neuron.
TEST_CASE("predictor slots: a neuron without one is charged next to nothing") {
    const auto engine_bytes = [](uint32_t n_ff) {
        const StoredFlash stored(layers_of({ std::vector<uint32_t>(16, n_ff), {} }));
        const SettingList least = { { "ram", std::to_string(least_ram(stored.path)) }, { "lookahead", "off" } };
        const Stats stats = open_flash(stored.path, least)->model().stats();
        CHECK(stats.layers[0].slots >= 64);
        CHECK(stats.layers[0].slots < n_ff / 2);
        return stats.memory.engine;
    };
    const uint64_t few = engine_bytes(500), many = engine_bytes(2500);
    CHECK(many - few < 16 * 2000 * NeuronCache::bytes_per_slot()); // buffers of a call grow, too
}

TEST_CASE("predictor settings: a threshold for each layer") {
    const Sizes sizes = { { 200, 200, 200 }, {} };
    const StoredFlash stored(layers_of(sizes));
    const auto thresholds = [&](const SettingList & list) {
        std::vector<float> out;
        const auto model = open_flash(stored.path, list);
        for (const LayerLayout & l : model->model().layout().layers) {
            out.insert(out.end(), { l.threshold, l.predictor_threshold });
        }
        return out;
    };
    using Floats = std::vector<float>;
    CHECK((thresholds({}) == Floats{ 0, 0.5f, 0, 0.5f, 0, 0.5f }));
    CHECK((thresholds({ { "predictor_threshold", "0.25" } }) == Floats{ 0, 0.25f, 0, 0.25f, 0, 0.25f }));
    CHECK((thresholds({ { "predictor_threshold", "0,0.75,0.125" } }) == Floats{ 0, 0, 0, 0.75f, 0, 0.125f }));
    CHECK((thresholds({ { "threshold", "1,2,3" } }) == Floats{ 1, 0.5f, 2, 0.5f, 3, 0.5f }));
    for (const char * name : { "threshold", "predictor_threshold" }) {
        for (const char * value : { "0.1,0.2", "0.1,0.2,0.3,0.4" }) {
            const auto refused = Standalone::open(stored.path, settings_of({ { name, value } }));
            CHECK(refused.status().code() == Code::argument);
            CHECK(refused.status().message() == "cannot set '" + std::string(name) + "' of '" + stored.path +
                                                    "': one value or 3 expected, found " +
                                                    (std::string(value).size() > 8 ? "4" : "2"));
        }
    }
}

TEST_CASE("predictor settings: a threshold decides how many are selected, each layer by its own") {
    const Sizes sizes = { { 200, 200, 200 }, {} };
    const StoredFlash stored(layers_of(sizes));
    const auto model = open_flash(stored.path, { { "predictor_threshold", "0,0.55,0.9999999" } });
    const std::vector<float> x = stored.input(1);
    for (uint32_t layer : { 0u, 1u, 2u }) {
        call(*model, layer, x, 1);
    }
    const Stats stats = model->model().stats();
    CHECK(stats.layers[0].counters.selected == 200);
    CHECK(stats.layers[1].counters.selected > 0);
    CHECK(stats.layers[1].counters.selected < 150);
    CHECK(stats.layers[2].counters.selected == 0);
}
