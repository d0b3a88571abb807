// Mode predictor: which neurons count for which token, and that their bits are those of mode all.
#include "ffn_ways.h"
#include "scored_call.h"

#include <cmath>

using namespace gguf_flash;

namespace {

FlashSpec two_layers(Select select, ggml_type type, bool gated) {
    FlashSpec spec;
    spec.layers = { 0, 5 };
    spec.n_ff = { 300, 150 };
    spec.select = select;
    spec.gate = spec.up = spec.down = type;
    spec.gated = gated;
    spec.biases = true;
    spec.activation = gated ? "silu" : "relu";
    spec.predictor.ranks = { 32, 64 };
    return spec;
}

FlashSpec with_threshold(FlashSpec spec, float threshold) {
    spec.predictor.thresholds = { threshold, threshold };
    return spec;
}

const std::vector<ggml_type> part_types = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0 };

std::vector<float> token(const std::vector<float> & rows, size_t t, size_t width) {
    return std::vector<float>(rows.begin() + long(t * width), rows.begin() + long((t + 1) * width));
}

} // namespace

TEST_CASE("predictor bits: threshold 0 gives what mode all gives, every way") {
    for (ggml_type type : part_types) {
        for (bool gated : { true, false }) {
            CAPTURE(std::string(ggml_type_name(type)));
            CAPTURE(gated);
            same_bits_every_way(with_threshold(two_layers(Select::predictor, type, gated), 0), 12,
                                two_layers(Select::all, type, gated));
        }
    }
}

TEST_CASE("predictor bits: the same whatever the memory, reader, window, threads and faults") {
    for (ggml_type type : part_types) {
        for (bool gated : { true, false }) {
            CAPTURE(std::string(ggml_type_name(type)));
            CAPTURE(gated);
            FlashSpec spec = two_layers(Select::predictor, type, gated);
            spec.predictor.thresholds = { 0.4f, 0.75f };
            spec.predictor.capacities = { 200, 100 };
            spec.predictor.a = type;
            spec.predictor.b = type;
            same_bits_every_way(spec, 12);
        }
    }
}

TEST_CASE("predictor bits: threshold 0 takes scores of any finite value") {
    for (ggml_type type : part_types) {
        for (bool gated : { true, false }) {
            const StoredFlash all(two_layers(Select::all, type, gated));
            const StoredFlash stored(with_threshold(two_layers(Select::predictor, type, gated), 0));
            for (const char * prefill : { "select", "stream" }) {
                ScoredModel truth(all), model(stored, { { "ram", "50%" }, { "prefill", prefill } });
                for (uint32_t n_tokens : { 1u, 2u, 3u, 4u, 17u }) {
                    CAPTURE(n_tokens);
                    const std::vector<float> x = stored.input(n_tokens), scores = wild_scores(n_tokens * 300, n_tokens);
                    CHECK(model.must(0, x, scores.data(), n_tokens, 2) == truth.must(0, x, nullptr, n_tokens));
                }
                CHECK((model.counters().streamed > 0) == (std::string(prefill) == "stream"));
            }
        }
    }
}

TEST_CASE("predictor bits: in a batch, each token has its own neurons") {
    const std::vector<SettingList> ways = { { { "ram", "100%" }, { "prefill", "select" } },
                                            { { "ram", "30%" }, { "prefill", "select" } }, // in waves
                                            { { "ram", "60%" }, { "prefill", "stream" } } };
    for (ggml_type type : part_types) {
        for (bool gated : { true, false }) {
            const StoredFlash stored(two_layers(Select::predictor, type, gated));
            for (size_t way = 0; way < ways.size(); ++way) {
                CAPTURE(std::string(ggml_type_name(type)));
                CAPTURE(gated);
                CAPTURE(way);
                ScoredModel batch(stored, ways[way]), single(stored);
                for (uint32_t n_tokens : { 2u, 3u, 4u, 17u }) {
                    const std::vector<float> x = stored.input(n_tokens), scores = wild_scores(n_tokens * 300, 9);
                    const std::vector<float> out = batch.must(0, x, scores.data(), n_tokens, 1 + int(n_tokens % 4));
                    for (uint32_t t = 0; t < n_tokens; ++t) {
                        const std::vector<float> alone = single.must(0, token(x, t, 64), &scores[t * 300], 1);
                        CHECK(token(out, t, 64) == alone);
                        CHECK_FALSE(zero(alone));
                    }
                }
                const Counters c = batch.counters();
                CHECK((c.streamed > 0) == (way == 2));
                CHECK((c.waves > 0) == (way == 1));
                CHECK(single.counters().selected < single.counters().tokens * 300); // the masks are masks
            }
        }
    }
}

TEST_CASE("predictor bits: Standalone's batches are their tokens one by one") {
    for (const char * prefill : { "select", "stream" }) {
        const StoredFlash stored(two_layers(Select::predictor, GGML_TYPE_F16, true));
        const auto model = open_flash(stored.path, { { "ram", "60%" }, { "prefill", prefill } });
        const std::vector<float> x = stored.input(17), batch = call(*model, 5, x, 17, 2);
        for (size_t t = 0; t < 17; ++t) {
            CHECK(token(batch, t, 64) == call(*model, 5, token(x, t, 64), 1));
        }
    }
}

TEST_CASE("predictor bits: nobody selected, one neuron selected") {
    const StoredFlash stored(two_layers(Select::predictor, GGML_TYPE_F32, false));
    for (const char * prefill : { "select", "stream" }) {
        for (uint32_t n_tokens : { 1u, 5u }) {
            ScoredModel model(stored, { { "prefill", prefill } });
            const std::vector<float> x = stored.input(n_tokens);
            std::vector<float> scores(n_tokens * 300, 0.0f); // the limit of 0.5 itself does not pass
            CHECK(zero(model.must(0, x, scores.data(), n_tokens, 3)));
            CHECK(model.counters().selected == 0);
            for (uint32_t neuron = 0; neuron < 300; neuron += 23) {
                scores[neuron] = 1e-30f; // for the first token
                std::vector<uint8_t> selected(n_tokens * 300);
                selected[neuron] = 1;
                const std::vector<double> expected = reference_ffn(stored.file, 0, x, n_tokens, selected);
                const std::vector<float> out = model.must(0, x, scores.data(), n_tokens, 3);
                for (size_t i = 0; i < out.size(); ++i) {
                    const float bias = stored.file.layers[0].down_bias[i % 64];
                    CHECK(out[i] + bias == doctest::Approx(expected[i]).epsilon(1e-4));
                }
                scores[neuron] = 0.0f;
            }
            CHECK(model.counters().selected == 14);
        }
    }
}

TEST_CASE("predictor errors: a score that is no number fails its call, and only that") {
    int failures = 0;
    for (float threshold : { 0.0f, 0.5f }) {
        const StoredFlash stored(with_threshold(two_layers(Select::predictor, GGML_TYPE_F16, true), threshold));
        for (const char * prefill : { "select", "stream" }) {
            ScoredModel model(stored, { { "ram", "60%" }, { "prefill", prefill } }), truth(stored);
            for (int threads : { 1, 2, 4 }) {
                for (uint32_t n_tokens : { 1u, 9u }) {
                    const std::vector<float> x = stored.input(n_tokens);
                    std::vector<float> out, scores = wild_scores(n_tokens * 150, 3), broken = scores;
                    broken[size_t(failures * 37) % broken.size()] = failures % 2 ? NAN : -NAN;
                    const uint64_t read = model.counters().bytes_read;
                    const Status status = model.run(1, x, broken.data(), n_tokens, out, threads);
                    CHECK(status.code() == Code::corrupt);
                    CHECK(status.message() == "the predictor of layer 5 of '" + stored.path +
                                                  "' gives scores that are not numbers; train it again");
                    CHECK(zero(out));
                    CHECK(model.counters().bytes_read == read);
                    const std::vector<float> expected = truth.must(1, x, scores.data(), n_tokens);
                    CHECK(model.must(1, x, scores.data(), n_tokens, threads) == expected);
                    ++failures;
                }
            }
        }
    }
    CHECK(failures == 24);
}

TEST_CASE("predictor errors: a predictor whose weights are no numbers") {
    FlashSpec spec = two_layers(Select::predictor, GGML_TYPE_F16, true);
    StoredFlash stored(spec);
    Bytes & bias = stored.file.image.tensor("blk.5.ffn_pred_b.bias").data;
    const float nan = NAN;
    std::memcpy(bias.data() + 4 * 77, &nan, 4);
    const auto model = open_flash(stored.folder.write("nan.gguf", stored.file.image.bytes()));
    const std::vector<float> x = stored.input(3);
    std::vector<float> out(x.size(), 1.0f);
    CHECK(model->ffn(5, x.data(), 3, out.data(), 2).code() == Code::corrupt);
    CHECK(zero(out));
    CHECK(call(*model, 0, x, 3) == call(*open_flash(stored.path), 0, x, 3));
}

TEST_CASE("predictor errors: scores are needed") {
    const StoredFlash stored(two_layers(Select::predictor, GGML_TYPE_F16, true));
    ScoredModel model(stored);
    std::vector<float> out;
    CHECK(model.run(0, stored.input(2), nullptr, 2, out, 2).code() == Code::argument);
    CHECK(zero(out));
}

TEST_CASE("predictor: score_limit is the logit of the threshold") {
    CHECK(score_limit(0.0f) == -INFINITY);
    CHECK(score_limit(0.5f) == 0.0f);
    float last = -INFINITY;
    std::vector<float> thresholds = { std::numeric_limits<float>::denorm_min(), 1e-30f, 1e-9f };
    for (int i = 1; i < 1000; ++i) {
        thresholds.push_back(float(i) / 1000);
    }
    thresholds.push_back(std::nextafter(1.0f, 0.0f));
    for (float t : thresholds) {
        CAPTURE(t);
        const float limit = score_limit(t);
        CHECK(limit == float(std::log(double(t)) - std::log1p(-double(t))));
        CHECK(limit > last);
        CHECK(std::isfinite(limit));
        CHECK(1 / (1 + std::exp(-double(limit))) == doctest::Approx(double(t)).epsilon(1e-5));
        last = limit;
    }
}
