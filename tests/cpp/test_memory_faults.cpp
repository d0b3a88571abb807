// A system without memory: what fails is one load or one call, with a sentence.
#include "failing_system.h"
#include "ffn_runner.h"
#include "specs.h"

using namespace gguf_flash;

namespace {

// A second failure comes while the first is handled; without end, nothing has memory.
constexpr int failure_counts[] = { 1, 2, failing::for_good };

// Each of a call's requests for memory is the first that fails, in turn.
void fail_calls(const StoredFlash & stored, uint32_t n_tokens, int threads, int failures, const char * reader) {
    const std::vector<float> x = stored.input(n_tokens);
    const std::vector<float> expected = call(*open_flash(stored.path), 5, x, n_tokens, threads);
    for (int nth = 1; failing::can_fail; ++nth) {
        const auto model = open_flash(stored.path, { { "ram", "60%" }, { "reader", reader }, { "depth", "4" } });
        std::vector<float> out(x.size(), 9.0f);
        failing::memory(nth, failures);
        const Status status = model->ffn(5, x.data(), n_tokens, out.data(), threads);
        if (!failing::healthy()) {
            return;
        }
        CAPTURE(nth);
        CAPTURE(failures);
        CAPTURE(status.message());
        CHECK((status.ok() ? out == expected : zero(out)));
        CHECK((status.ok() || status.code() == Code::ram_too_small));
        CHECK((status.ok() || has(status, "memory")));
        CHECK(call(*model, 5, x, n_tokens, threads) == expected);
    }
}

} // namespace

TEST_CASE("memory faults: a load without memory fails with a sentence, and the next one succeeds") {
    for (const FlashSpec & spec : specs()) {
        const StoredFlash stored(spec);
        for (int failures : failure_counts) {
            int refused = 0;
            for (int nth = 1; failing::can_fail; ++nth) {
                failing::memory(nth, failures);
                auto opened = Standalone::open(stored.path, Settings());
                if (!failing::healthy()) {
                    break;
                }
                CAPTURE(nth);
                if (opened.ok()) {
                    continue; // it did without, as a buffer of the C library can
                }
                ++refused;
                CAPTURE(opened.status().message());
                CHECK(opened.status().code() == Code::ram_too_small);
                CHECK((has(opened.status(), stored.path) || failures > 1)); // the path itself takes memory
                CHECK(has(opened.status(), "memory"));
            }
            CHECK((refused > 50 || !failing::can_fail));
        }
        call(*open_flash(stored.path), 5, stored.input(1), 1);
    }
}

TEST_CASE("memory faults: a call without memory fails with a sentence, and the next one is right") {
    for (const FlashSpec & spec : specs()) {
        const StoredFlash stored(spec);
        for (uint32_t n_tokens : { 1u, 17u }) {
            for (int threads : { 1, 3 }) {
                for (int failures : failure_counts) {
                    fail_calls(stored, n_tokens, threads, failures, "auto");
                    fail_calls(stored, n_tokens, threads, failures, "pread");
                }
            }
        }
    }
}
