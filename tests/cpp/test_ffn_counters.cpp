// Counters against a replay of the cache and the merging of reads, written from their descriptions.
#include "counter_replay.h"

using namespace gguf_flash;
using namespace replay;

namespace {

FlashSpec gate_mode(uint32_t align, uint32_t bytes_before) {
    FlashSpec spec;
    spec.select = Select::gate;
    spec.gated = false;
    spec.activation = "relu";
    spec.n_ff = { replayed_neurons };
    spec.align = align;
    spec.bytes_before = bytes_before;
    return spec;
}

} // namespace

TEST_CASE("ffn counters: hits, evictions, requests and bytes as a replay predicts") {
    for (uint32_t align : { 4096u, 16384u, 512u }) {
        for (uint32_t bytes_before : { 0u, 96u }) {
            for (const char * policy : { "budget", "window" }) {
                for (uint32_t window : { 1u, 5u }) {
                    CAPTURE(align);
                    CAPTURE(bytes_before);
                    CAPTURE(std::string(policy));
                    CAPTURE(window);
                    compare_with_replay(gate_mode(align, bytes_before),
                                        { { "ram", "30%" },
                                          { "policy", policy },
                                          { "window", std::to_string(window) },
                                          { "prefill", "select" } },
                                        std::string(policy) == "budget" ? Policy::budget : Policy::window, window);
                }
            }
        }
    }
}

TEST_CASE("ffn counters: a cache smaller than the working set computes in waves and still hits") {
    for (const char * policy : { "budget", "window" }) {
        for (uint32_t n_tokens : { 1u, 3u }) {
            FlashSpec spec;
            spec.n_ff = { 500 };
            const StoredFlash stored(spec);
            const auto model =
                open_flash(stored.path, { { "ram", "40%" }, { "policy", policy }, { "prefill", "select" } });
            const std::vector<float> x = stored.input(n_tokens);
            const std::vector<float> expected = call(*open_flash(stored.path), 0, x, n_tokens);
            for (int i = 0; i < 10; ++i) {
                CHECK(call(*model, 0, x, n_tokens, 2) == expected);
            }
            const Counters c = model->model().stats().total;
            CHECK(c.selected == 5000);
            CHECK(c.hits + c.misses == c.selected);
            CHECK(c.waves > 0);
            CHECK(double(c.hits) / double(c.selected) > 0.25); // 40% fit; a plain least-recently-used cache gets 0
            MESSAGE(std::string(policy), ": hit rate ", double(c.hits) / double(c.selected), ", waves ", c.waves);
        }
    }
}

TEST_CASE("ffn counters: a layer read in sequence") {
    FlashSpec spec;
    spec.n_ff = { 3000 };
    const StoredFlash stored(spec);
    const auto model = open_flash(stored.path, { { "ram", "50%" }, { "prefill", "stream" } });
    call(*model, 0, stored.input(2), 2, 2);
    const Stats stats = model->model().stats();
    const uint64_t bytes = 3000 * model->model().layout().layers[0].stride;
    CHECK(stats.total.streamed == 1);
    CHECK(stats.total.requests >= (bytes + 512 * 1024 - 1) / (512 * 1024)); // no read is longer
    CHECK(stats.total.requests <= 16);                                      // and few: that is what streaming is for
    CHECK(stats.total.bytes_read >= bytes);
    CHECK(stats.total.bytes_read <= bytes + stats.total.requests * 2 * 65536);
    CHECK(stats.total.misses == 0);
    call(*model, 0, stored.input(1), 1); // one token never streams, and finds what the stream left
    CHECK(model->model().stats().total.streamed == 1);
    CHECK(model->model().stats().total.hits > 1000);
}

TEST_CASE("ffn counters: automatic prefill streams long prompts of a cold layer only") {
    FlashSpec spec;
    spec.n_ff = { 600 };
    const StoredFlash stored(spec);
    const auto model = open_flash(stored.path, { { "ram", "100%" } });
    call(*model, 0, stored.input(3), 3);
    CHECK(model->model().stats().total.streamed == 0);
    call(*model, 0, stored.input(20), 20);
    CHECK(model->model().stats().total.streamed == 0); // all of it is cached by now
    const auto cold = open_flash(stored.path, { { "ram", "100%" } });
    call(*cold, 0, stored.input(20), 20);
    CHECK(cold->model().stats().total.streamed == 1);
}
