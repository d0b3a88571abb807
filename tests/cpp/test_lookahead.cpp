// Reading the next layer's neurons ahead: the same bits, the same selection, other times.
#include "counter_replay.h"
#include "failing_system.h"
#include "scored_call.h"

using namespace gguf_flash;

namespace {

constexpr uint32_t n_ff = replay::replayed_neurons;

FlashSpec two_layers(ggml_type down = GGML_TYPE_F16) {
    FlashSpec spec;
    spec.layers = { 0, 1 };
    spec.n_ff = { n_ff, n_ff };
    spec.select = Select::predictor;
    spec.gated = false;
    spec.activation = "relu";
    spec.down = down;
    spec.predictor.ranks = { 8, 8 };
    spec.predictor.thresholds = { 0.5f, 0.5f };
    return spec;
}

// What the layer before would say of scores: that so many selected neurons are not, and some others are.
std::vector<float> guess(const std::vector<float> & scores, int percent_wrong, uint64_t seed) {
    Random random(seed);
    std::vector<float> out = scores;
    for (float & s : out) {
        const bool wrong = random.chance(percent_wrong) && (s > 0 || random.below(100) < uint32_t(percent_wrong));
        s = wrong ? 0.5f - s : s;
    }
    return out;
}

// A model of two layers whose first looks ahead into the second.
class Ahead2 {
public:
    Ahead2(const StoredFlash & stored, SettingList settings)
        : stored_(stored), standalone_(open_flash(stored.path, settings)), model_(standalone_, &standalone_->model()) {}

    // Both layers on one text; an error is followed by one more attempt, which must not fail.
    // fail_from > 0: in each tick one allocation of one of the calls fails, a later one in each tick.
    std::vector<float> run(int ticks, int threads, int percent_wrong, uint64_t seed = 3, int fail_from = 0) {
        replay::DriftingText texts[2] = { replay::DriftingText(0), replay::DriftingText(0) };
        FfnOp ops[2] = { FfnOp(model_, 0), FfnOp(model_, 1) };
        std::vector<float> all;
        for (int tick = 0; tick < ticks; ++tick) {
            // What grows from call to call has to ask for memory in each.
            const uint32_t n_tokens = fail_from > 0 ? 1 + uint32_t(tick) / 2 : tick % 7 == 6 ? 3 : 1;
            const std::vector<float> x = stored_.input(n_tokens, uint64_t(tick) + 1);
            const std::vector<float> scores[2] = { texts[0].next(n_tokens), texts[1].next(n_tokens) };
            const std::vector<float> ahead = guess(scores[1], percent_wrong, seed + uint64_t(tick));
            for (int layer = 0; layer < 2; ++layer) {
                std::vector<float> out(x.size(), 1e30f);
                FfnInput in;
                in.n_tokens = n_tokens;
                in.x = x.data();
                in.scores = scores[layer].data();
                in.ahead_scores = layer == 0 ? ahead.data() : nullptr;
                in.scores_stride = in.ahead_stride = n_ff;
                in.x_stride = in.out_stride = stored_.file.spec.n_embd;
                in.out = out.data();
                if (fail_from > 0 && (tick + layer) % 2 == 0) {
                    failing::memory(fail_from + tick % 3);
                }
                Status status = run_op(ops[layer], in, threads);
                failing::healthy();
                if (status.code() == Code::io || status.code() == Code::ram_too_small) {
                    ++errors;
                    CHECK(zero(out));
                    status = run_op(ops[layer], in, threads);
                }
                REQUIRE_MESSAGE(status.ok(), status.message());
                all.insert(all.end(), out.begin(), out.end());
            }
        }
        return all;
    }
    Counters counters(size_t layer) const { return model_->stats().layers[layer].counters; }
    int errors = 0;

private:
    const StoredFlash & stored_;
    std::shared_ptr<Standalone> standalone_;
    std::shared_ptr<Model> model_;
};

const SettingList off = { { "lookahead", "off" } };

} // namespace

TEST_CASE("lookahead: the same bits in any memory, with any reader, policy, threads and faults") {
    for (ggml_type down : { GGML_TYPE_F16, GGML_TYPE_I8 }) {
        const StoredFlash stored(two_layers(down));
        const std::vector<float> want = Ahead2(stored, off).run(40, 1, 10);
        const std::vector<SettingList> ways = {
            { { "ram", "1%" } },
            { { "ram", "30%" } },
            { { "ram", "100%" } },
            { { "policy", "window" } },
            { { "policy", "score" }, { "ram", "30%" } },
            { { "reader", "pread" } },
            { { "ram", "40%" }, { "gap", "0" } },
            { { "ram", "30%" }, { "faults", "short:3,again:5" } },
            { { "ram", "30%" }, { "faults", "delay:300" } },
        };
        for (const SettingList & way : ways) {
            for (int threads : { 1, 2, 3 }) {
                for (int wrong : { 0, 20, 50 }) {
                    CAPTURE(way);
                    CAPTURE(threads);
                    CAPTURE(wrong);
                    CHECK((Ahead2(stored, way).run(40, threads, wrong) == want));
                }
            }
        }
    }
}

TEST_CASE("lookahead: counters say what was foreseen, and every selected neuron is a hit or a miss") {
    const StoredFlash stored(two_layers());
    Ahead2 model(stored, { { "ram", "50%" } }), plain(stored, { { "ram", "50%" }, { "lookahead", "off" } });
    model.run(60, 2, 5);
    plain.run(60, 2, 5);
    const Counters with = model.counters(1), without = plain.counters(1), first = model.counters(0);
    CHECK(first.ahead == 0);
    CHECK(without.ahead == 0);
    CHECK(with.selected == without.selected);
    CHECK(with.hits + with.misses == with.selected);
    CHECK(with.foreseen <= with.misses);
    CHECK(with.foreseen <= with.ahead);
    CHECK(with.foreseen > with.misses / 2);
    CHECK(with.misses < without.misses * 13 / 10);
}

TEST_CASE("lookahead: a layer that cannot be foreseen is left alone, and tried again") {
    const StoredFlash stored(two_layers());
    Ahead2 good(stored, { { "ram", "30%" } }), bad(stored, { { "ram", "30%" } });
    good.run(100, 1, 0);
    bad.run(100, 1, 45);
    CHECK(bad.counters(1).ahead > 0);
    CHECK(bad.counters(1).foreseen < bad.counters(1).ahead / 2);
    // In a tick of all 100 that are good; in few of the bad.
    CHECK(bad.counters(1).requests < good.counters(1).requests * 2);
}

TEST_CASE("lookahead: a read ahead that fails is repeated in time") {
    const StoredFlash stored(two_layers());
    const std::vector<float> want = Ahead2(stored, off).run(40, 1, 10);
    for (const char * reader : { "io_uring", "pread" }) {
        int silent = 0;
        for (int n = 1; n < 1200; n += 37) {
            Ahead2 model(stored, { { "ram", "30%" }, { "reader", reader }, { "faults", "eio:" + std::to_string(n) } });
            CHECK((model.run(40, 2, 10) == want));
            CHECK(model.errors <= 1);
            CHECK(model.counters(1).hits <= model.counters(1).selected); // no difference below zero
            silent += model.errors == 0;
        }
        CHECK(silent > 3);
    }
}

TEST_CASE("lookahead: contexts of one model on several threads") {
    const StoredFlash stored(two_layers());
    const std::vector<float> want = Ahead2(stored, off).run(30, 1, 10);
    for (const char * ram : { "1%", "40%" }) {
        Ahead2 model(stored, { { "ram", ram } });
        std::vector<std::thread> contexts;
        std::vector<int> same(3, 0);
        for (int i = 0; i < 3; ++i) {
            contexts.emplace_back([&, i] { same[size_t(i)] = model.run(30, 1 + i % 2, 10, uint64_t(i)) == want; });
        }
        for (std::thread & t : contexts) {
            t.join();
        }
        CHECK((same == std::vector<int>(3, 1)));
    }
}

TEST_CASE("lookahead: calls without memory lose no read, and the next ones are right") {
    const StoredFlash stored(two_layers());
    const int never = 1 << 20;
    const std::vector<float> want =
        Ahead2(stored, { { "lookahead", "off" }, { "prefill", "select" } }).run(24, 1, 10, 3, never);
    for (const char * reader : { "io_uring", "pread" }) {
        int errors = 0;
        for (int from = 1; from < 30; from += 2) {
            Ahead2 model(stored, { { "ram", "30%" }, { "reader", reader }, { "prefill", "select" } });
            CHECK((model.run(24, 1, 10, 3, from) == want));
            errors += model.errors;
        }
        CHECK((errors > 20 || !failing::can_fail));
    }
}
