// A replay of a layer's cache and of the merging of its reads, written from their descriptions, and what it
// predicts of the counters.
#pragma once

#include "ffn_runner.h"
#include "plain_cache.h"

#include <cmath>

namespace replay {

using namespace gguf_flash;

constexpr uint32_t replayed_neurons = 1504; // whole blocks of codes

// Scores of a few tokens that select what a drifting text would: mostly what was selected before.
class DriftingText {
public:
    // limit is the score above which a neuron is selected.
    explicit DriftingText(float limit) : limit_(limit), active_(replayed_neurons) {
        for (uint32_t first = 100; first < 400; ++first) {
            active_[first] = true; // one long run of neighbours
        }
    }
    std::vector<float> next(uint32_t n_tokens) {
        std::vector<float> scores(size_t(n_tokens) * replayed_neurons);
        for (uint32_t t = 0; t < n_tokens; ++t) {
            for (int change = 0; change < 60; ++change) {
                const uint32_t i = random_.below(replayed_neurons);
                active_[i] = !active_[i] && random_.chance(30);
            }
            for (uint32_t i = 0; i < replayed_neurons; ++i) {
                scores[size_t(t) * replayed_neurons + i] =
                    active_[i] && !random_.chance(20) ? above() : limit_ - float(i % 3);
            }
        }
        return scores;
    }

private:
    // The next float, or one far off: neither may be taken for the limit itself, which some scores are.
    float above() { return random_.chance(50) ? std::nextafter(limit_, INFINITY) : limit_ + 3; }

    float limit_;
    std::vector<bool> active_;
    Random random_{ 8 };
};

struct Replay {
    Replay(uint32_t slots, Policy policy, uint32_t window, const LayerLayout & l, uint64_t a, float limit)
        : cache(slots, policy, window), layout(l), align(a), merges(l.stride % a == 0 && l.offset % a == 0),
          n_slots(slots), score_limit(limit) {}

    void call(const std::vector<float> & scores, uint32_t n_tokens) {
        std::vector<Selected> selection;
        for (uint32_t i = 0; i < replayed_neurons; ++i) {
            for (uint32_t t = n_tokens; t-- > 0;) {
                if (scores[size_t(t) * replayed_neurons + i] > score_limit) {
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
        for (size_t i = 0; i < missing.size();) {
            size_t n = 1, segments = 1;
            while (merges && i + n < missing.size()) {
                const uint64_t between = missing[i + n] - missing[i + n - 1] - 1;
                const size_t more = between == 0 ? 1 : 2;
                if (between * layout.stride > gap || segments + more > 64 ||
                    (missing[i + n] - missing[i] + 1) * layout.stride > 512 * 1024) {
                    break;
                }
                segments += more;
                ++n;
            }
            const uint64_t first = layout.offset + missing[i] * layout.stride;
            const uint64_t end = layout.offset + (missing[i + n - 1] + 1) * layout.stride;
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
    float score_limit;
    uint64_t gap = Settings().gap;
    Counters want;
};

inline void check_counters(const Counters & got, const Counters & want) {
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

// Calls the only layer of spec, a neuron of which is selected by a score above limit.
inline void compare_with_replay(const FlashSpec & spec, const SettingList & settings, Policy policy, uint32_t window,
                                float limit = 0) {
    const StoredFlash stored(spec);
    const auto standalone = open_flash(stored.path, settings);
    const std::shared_ptr<Model> model(standalone, &standalone->model());
    Replay replay(model->stats().layers[0].slots, policy, window, model->layout().layers[0], model->file(0).align(),
                  limit);
    DriftingText text(limit);
    FfnOp op(model, 0);
    for (int i = 0; i < 60; ++i) {
        const uint32_t n_tokens = i % 5 == 4 ? 3 : 1;
        const std::vector<float> scores = text.next(n_tokens), x = stored.input(n_tokens);
        std::vector<float> out(x.size());
        FfnInput in;
        in.n_tokens = n_tokens;
        in.x = x.data();
        in.scores = scores.data();
        in.scores_stride = replayed_neurons;
        in.x_stride = in.out_stride = spec.n_embd;
        in.out = out.data();
        REQUIRE(run_op(op, in, 1 + i % 2).ok());
        replay.call(scores, n_tokens);
        const Counters now = model->stats().total;
        CHECK(now.misses - now.evictions <= replay.n_slots); // what is cached
    }
    const Stats stats = model->stats();
    check_counters(stats.layers[0].counters, replay.want);
    check_counters(stats.total, replay.want);
    CHECK(replay.want.hits > 0);
    CHECK((replay.want.evictions > 0 || replay.n_slots == replayed_neurons));
    model->reset_stats();
    check_counters(model->stats().total, Counters());
}

} // namespace replay
