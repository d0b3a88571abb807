// Caches of another size: no neuron twice, none lost that has room, and the same bits.
#include "ffn_runner.h"
#include "gguf_flash/neuron_cache.h"
#include "random_data.h"

#include <atomic>
#include <set>

using namespace gguf_flash;

TEST_CASE("resize: the neurons used last stay, each in a slot of its own") {
    NeuronCache cache(100, 40, Policy::budget, 5);
    for (uint32_t n = 0; n < 40; ++n) {
        cache.begin(1);
        REQUIRE(cache.acquire({ n, 0 }) != NeuronCache::none);
        cache.end();
    }
    std::vector<int32_t> held(40);
    for (uint32_t n = 0; n < 40; ++n) {
        held[size_t(cache.slot(n))] = int32_t(n);
    }
    std::vector<SlotMove> moves;
    moves.reserve(40);
    cache.resize(15, moves);
    for (const SlotMove & move : moves) {
        CHECK(move.from >= 15);
        CHECK(move.to < 15);
        held[size_t(move.to)] = held[size_t(move.from)];
    }
    std::set<int32_t> slots;
    for (uint32_t n = 0; n < 40; ++n) {
        CHECK((cache.slot(n) != NeuronCache::none) == (n >= 25));
        if (n >= 25) {
            CHECK(slots.insert(cache.slot(n)).second);
            CHECK(held[size_t(cache.slot(n))] == int32_t(n));
        }
    }
    CHECK(!cache.has_free_slot());
    cache.resize(90, moves);
    CHECK(moves.empty());
    CHECK(cache.n_cached() == 15);
    cache.begin(1);
    for (uint32_t n = 0; n < 25; ++n) {
        CHECK(cache.acquire({ n, 0 }) != NeuronCache::none);
    }
    cache.end();
    CHECK(cache.n_cached() == 40);
}

TEST_CASE("resize: the same bits while the limit changes, and none of it below the floor") {
    for (const char * reader : { "io_uring", "pread" }) {
        FlashSpec spec;
        spec.layers = { 0, 1, 2 };
        spec.n_ff = { 1500, 700, 70 };
        const StoredFlash stored(spec);
        const auto opened = Standalone::open(stored.path, settings_of({ { "ram", "50%" }, { "reader", reader } }));
        if (!opened.ok()) {
            MESSAGE(opened.status().message());
            continue; // no io_uring here
        }
        const auto standalone = opened.value();
        Model & model = standalone->model();
        const uint64_t least = least_ram(stored.path),
                       more = open_flash(stored.path, { { "ram", "100%" } })->model().stats().ram_bytes;
        std::atomic<bool> done{ false };
        std::thread changes([&] {
            Random random(7);
            while (!done) {
                CHECK(model.set_ram(std::to_string(least + random.below(uint32_t(more - least)))).ok());
                const uint64_t slots = model.stats().memory.cache;
                const Status refused = model.set_ram(std::to_string(least - 1));
                CHECK(refused.code() == Code::ram_too_small);
                CHECK(has(refused, std::to_string(least) + " bytes"));
                CHECK(model.stats().memory.cache == slots);
            }
        });
        const auto other = open_flash(stored.path, { { "ram", "100%" } });
        for (int round = 0; round < 60; ++round) {
            for (uint32_t layer = 0; layer < 3; ++layer) {
                const std::vector<float> x = stored.input(1 + uint32_t(round) % 3, uint64_t(round));
                const uint32_t n = 1 + uint32_t(round) % 3;
                CHECK(call(*standalone, layer, x, n, 2) == call(*other, layer, x, n));
            }
        }
        done = true;
        changes.join();
    }
}
