// Counters against a replay of the cache and the merging of reads, written from their descriptions.
#include "ffn_runner.h"
#include "plain_cache.h"

using namespace gguf_flash;

namespace {

constexpr uint32_t n_ff = 1500;

FlashSpec gate_mode(uint32_t align, uint32_t bytes_before) {
    FlashSpec spec;
    spec.select = Select::gate;
    spec.gated = false;
    spec.activation = "relu";
    spec.n_ff = { n_ff };
    spec.align = align;
    spec.bytes_before = bytes_before;
    return spec;
}

// Scores of a few tokens that select what a drifting text would: mostly what was selected before.
class DriftingText {
public:
    DriftingText() : active_(n_ff) {
        for (uint32_t first = 100; first < 400; ++first) {
            active_[first] = true; // one long run of neighbours
        }
    }
    std::vector<float> next(uint32_t n_tokens) {
        std::vector<float> scores(size_t(n_tokens) * n_ff, -1.0f);
        for (uint32_t t = 0; t < n_tokens; ++t) {
            for (int change = 0; change < 60; ++change) {
                const uint32_t i = random_.below(n_ff);
                active_[i] = !active_[i] && random_.chance(30);
            }
            for (uint32_t i = 0; i < n_ff; ++i) {
                scores[size_t(t) * n_ff + i] = active_[i] && !random_.chance(20) ? 1.0f : -1.0f;
            }
        }
        return scores;
    }

private:
    std::vector<bool> active_;
    Random random_{ 8 };
};

struct Replay {
    Replay(uint32_t slots, Policy policy, uint32_t window, const LayerLayout & l, uint64_t a)
        : cache(slots, policy, window), layout(l), align(a), merges(l.stride % a == 0 && l.offset % a == 0),
          n_slots(slots) {}

    void call(const std::vector<float> & scores, uint32_t n_tokens) {
        std::vector<Selected> selection;
        for (uint32_t i = 0; i < n_ff; ++i) {
            for (uint32_t t = n_tokens; t-- > 0;) {
                if (scores[size_t(t) * n_ff + i] > 0) {
                    selection.push_back({ i, t });
                    break;
                }
            }
        }
        REQUIRE(selection.size() <= n_slots); // no waves here
        cache.begin(n_tokens);
        std::vector<uint32_t> missing;
        for (Selected s : selection) {
            cache.has(s.neuron) ? cache.touch(s) : missing.push_back(s.neuron);
        }
        for (Selected s : selection) {
            REQUIRE((cache.has(s.neuron) || cache.acquire(s)));
        }
        cache.end();
        want.tokens += n_tokens;
        want.selected += selection.size();
        want.hits += selection.size() - missing.size();
        want.misses += missing.size();
        want.evictions = cache.evictions;
        reads(missing);
    }

    void reads(const std::vector<uint32_t> & missing) {
        const uint64_t most = std::min<uint64_t>(64, 512 * 1024 / layout.stride);
        for (size_t i = 0; i < missing.size();) {
            size_t n = 1;
            while (merges && i + n < missing.size() && n < most && missing[i + n] == missing[i] + n) {
                ++n;
            }
            const uint64_t first = layout.offset + missing[i] * layout.stride, end = first + n * layout.stride;
            want.requests += 1;
            want.bytes_read += (end + align - 1) / align * align - first / align * align;
            i += n;
        }
    }

    PlainCache cache;
    LayerLayout layout;
    uint64_t align;
    bool merges;
    uint32_t n_slots;
    Counters want;
};

void check_counters(const Counters & got, const Counters & want) {
    CHECK(got.tokens == want.tokens);
    CHECK(got.selected == want.selected);
    CHECK(got.hits == want.hits);
    CHECK(got.misses == want.misses);
    CHECK(got.evictions == want.evictions);
    CHECK(got.requests == want.requests);
    CHECK(got.bytes_read == want.bytes_read);
    CHECK(got.waves == 0);
    CHECK(got.streamed == 0);
}

void compare_with_replay(const FlashSpec & spec, const SettingList & settings, Policy policy, uint32_t window) {
    const StoredFlash stored(spec);
    const auto standalone = open_flash(stored.path, settings);
    const std::shared_ptr<Model> model(standalone, &standalone->model());
    Replay replay(model->stats().layers[0].slots, policy, window, model->layout().layers[0], model->file(0).align());
    DriftingText text;
    FfnOp op(model, 0);
    for (int i = 0; i < 60; ++i) {
        const uint32_t n_tokens = i % 5 == 4 ? 3 : 1;
        const std::vector<float> scores = text.next(n_tokens), x = stored.input(n_tokens);
        std::vector<float> out(x.size());
        FfnInput in;
        in.n_tokens = n_tokens;
        in.x = x.data();
        in.scores = scores.data();
        in.scores_stride = n_ff;
        in.x_stride = in.out_stride = spec.n_embd;
        in.out = out.data();
        REQUIRE(run_op(op, in, 1 + i % 2).ok());
        replay.call(scores, n_tokens);
    }
    const Stats stats = model->stats();
    check_counters(stats.layers[0].counters, replay.want);
    check_counters(stats.total, replay.want);
    CHECK(replay.want.hits > 0);
    CHECK((replay.want.evictions > 0 || replay.n_slots == n_ff));
    model->reset_stats();
    check_counters(model->stats().total, Counters());
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
