// Running an FFN of a small file: opening it under settings, calling it, and an FfnOp on several threads.
#pragma once

#include "flash_file.h"
#include "gguf_flash/standalone.h"
#include "temp_folder.h"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using SettingList = std::vector<std::pair<std::string, std::string>>;

inline gguf_flash::Settings settings_of(const SettingList & list) {
    gguf_flash::Settings settings;
    for (const auto & [name, value] : list) {
        const gguf_flash::Status status = settings.set(name, value);
        REQUIRE_MESSAGE(status.ok(), status.message());
    }
    return settings;
}

inline std::shared_ptr<gguf_flash::Standalone> open_flash(const std::string & path, const SettingList & list = {}) {
    auto opened = gguf_flash::Standalone::open(path, settings_of(list));
    REQUIRE_MESSAGE(opened.ok(), opened.status().message());
    return opened.value();
}

// A file on disk together with what it was made from.
struct StoredFlash {
    explicit StoredFlash(const FlashSpec & spec) : file(spec), path(folder.write("m.gguf", file.image.bytes())) {}

    std::vector<float> input(uint32_t n_tokens, uint64_t seed = 5) const {
        return Random(seed).reals(size_t(n_tokens) * file.spec.n_embd, 1.7f);
    }

    FlashFile file;
    TempFolder folder;
    std::string path;
};

// Output of a call that must succeed; starts from garbage, which the engine must overwrite.
inline std::vector<float> call(gguf_flash::Standalone & model, uint32_t layer, const std::vector<float> & x,
                               uint32_t n_tokens, int threads = 1) {
    std::vector<float> out(x.size(), 1e30f);
    const gguf_flash::Status status = model.ffn(layer, x.data(), n_tokens, out.data(), threads);
    REQUIRE_MESSAGE(status.ok(), status.message());
    return out;
}

inline gguf_flash::Status run_op(gguf_flash::FfnOp & op, const gguf_flash::FfnInput & in, int n_threads) {
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads; ++i) {
        threads.emplace_back([&, i] { op.run(in, i, n_threads); });
    }
    op.run(in, 0, n_threads);
    for (std::thread & t : threads) {
        t.join();
    }
    return op.status();
}

// The least budget in bytes that opens: resident weights, staging, and 64 slots a layer.
inline uint64_t least_ram(const std::string & path) {
    const auto model = open_flash(path, { { "ram", "100%" } });
    const gguf_flash::Stats stats = model->model().stats();
    uint64_t bytes = stats.resident_bytes + stats.cache_bytes;
    for (const gguf_flash::LayerStats & l : stats.layers) {
        bytes -= (l.slots - std::min(l.slots, 64u)) * l.slot_bytes;
    }
    return bytes;
}

inline bool has(const gguf_flash::Status & status, const std::string & text) {
    return status.message().find(text) != std::string::npos;
}

inline bool zero(const std::vector<float> & values) {
    for (float v : values) {
        if (v != 0.0f) {
            return false;
        }
    }
    return true;
}
