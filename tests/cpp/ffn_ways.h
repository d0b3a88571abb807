// The ways to run one model that must all give the same bits: memory, reader, window, threads, faults.
#pragma once

#include "ffn_runner.h"

// One way to run the same model.
struct Way {
    std::string ram = "100%", reader = "auto", window = "5", policy = "budget", prefill = "auto", depth = "32", faults;
    int threads = 1;

    SettingList settings() const {
        SettingList all = { { "ram", ram },       { "reader", reader },   { "window", window },
                            { "policy", policy }, { "prefill", prefill }, { "faults", faults } };
        if (depth != "auto") {
            all.push_back({ "depth", depth });
        }
        return all;
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
    std::vector<std::string> depths = { "1", "4", "32", "auto" };
    std::vector<std::string> faults = { "", "short:3,again:5" };
    std::vector<int> threads = { 1, 2, 3, 4 };

    explicit Choices(const std::string & path) : rams{ std::to_string(least_ram(path)), "60%", "100%" } {
        if (!gguf_flash::io_uring_problem().empty()) {
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

inline const std::vector<uint32_t> session_sizes = { 1, 17, 1, 3, 64, 1 }; // tokens of one call after the other

// The outputs of a session of calls on both layers, in one row.
inline std::vector<float> session(const StoredFlash & stored, gguf_flash::Standalone & model, int threads) {
    std::vector<float> out;
    for (size_t i = 0; i < session_sizes.size(); ++i) {
        for (uint32_t layer : stored.file.spec.layers) {
            const std::vector<float> part =
                call(model, layer, stored.input(session_sizes[i], i), session_sizes[i], threads);
            out.insert(out.end(), part.begin(), part.end());
        }
    }
    return out;
}

// The session's bits are the same every way, and those that a file of truth gives.
inline void same_bits_every_way(const FlashSpec & spec, int n_random, const FlashSpec & truth) {
    const StoredFlash stored(spec);
    FlashSpec shifted_spec = spec;
    shifted_spec.bytes_before = 96;
    shifted_spec.pad_header = false;
    const StoredFlash shifted(shifted_spec); // bundles off every sector, as other tools leave them
    const StoredFlash other(truth);
    const std::vector<float> expected = session(other, *open_flash(other.path, Way().settings()), 1);
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

inline void same_bits_every_way(const FlashSpec & spec, int n_random) {
    same_bits_every_way(spec, n_random, spec);
}
