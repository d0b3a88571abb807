// FFNs on a disk that misbehaves: what can be recovered changes no bit, what cannot fails its own call.
#include "ffn_runner.h"
#include "gguf_flash/reader.h"
#include "specs.h"

using namespace gguf_flash;

namespace {

std::vector<std::string> readers() {
    return io_uring_problem().empty() ? std::vector<std::string>{ "pread", "io_uring" }
                                      : std::vector<std::string>{ "pread" };
}

// Calls body with settings of every reader, memory and way to read a prompt.
template <typename Body> void for_each_way(const std::string & path, const std::string & faults, const Body & body) {
    for (const std::string & reader : readers()) {
        for (const std::string & ram : { std::to_string(least_ram(path)), std::string("60%") }) {
            for (const char * prefill : { "select", "stream" }) {
                CAPTURE(reader);
                CAPTURE(ram);
                CAPTURE(std::string(prefill));
                CAPTURE(faults);
                body(SettingList{ { "reader", reader }, { "ram", ram }, { "prefill", prefill }, { "faults", faults } });
            }
        }
    }
}

// Calls until one succeeds: how many failed, each of them as it should.
int calls_that_fail(const StoredFlash & stored, Standalone & model, const std::vector<float> & x, uint32_t n_tokens,
                    const std::string & words, std::vector<float> & out) {
    for (int failed = 0; failed < 200; ++failed) {
        out.assign(x.size(), 9.0f);
        const Status status = model.ffn(5, x.data(), n_tokens, out.data(), 1 + failed % 3);
        if (status.ok()) {
            return failed;
        }
        CAPTURE(status.message());
        CHECK(status.code() == Code::io);
        for (const std::string & part : { std::string("layer 5"), "'" + stored.path + "'", words }) {
            CHECK(status.message().find(part) != std::string::npos);
        }
        CHECK(zero(out));
    }
    return -1;
}

} // namespace

TEST_CASE("ffn faults: what can be recovered changes no bit") {
    const StoredFlash stored(biased_layers());
    for (uint32_t n_tokens : { 1u, 17u }) {
        const std::vector<float> x = stored.input(n_tokens);
        const std::vector<float> expected = call(*open_flash(stored.path), 5, x, n_tokens);
        for (const char * faults : { "reorder:3", "reorder:1000", "reorder:5,short:2,again:3", "einval:1",
                                     "einval:7,reorder:4", "again:2", "delay:300,reorder:2" }) {
            for_each_way(stored.path, faults, [&](const SettingList & settings) {
                const auto model = open_flash(stored.path, settings);
                for (int threads : { 1, 3 }) {
                    CHECK(call(*model, 5, x, n_tokens, threads) == expected);
                }
            });
        }
    }
}

TEST_CASE("ffn faults: a device that goes fails every call until it is back") {
    const StoredFlash stored(biased_layers());
    int failures = 0;
    for (uint32_t n_tokens : { 1u, 17u }) {
        const std::vector<float> x = stored.input(n_tokens);
        const std::vector<float> expected = call(*open_flash(stored.path), 5, x, n_tokens);
        for (const char * faults : { "vanish:1-1", "vanish:2-40", "vanish:1-30,reorder:4", "vanish:3-9,short:2" }) {
            for_each_way(stored.path, faults, [&](const SettingList & settings) {
                const auto model = open_flash(stored.path, settings);
                std::vector<float> out;
                for (int i = 0; i < 3; ++i) {
                    const int failed = calls_that_fail(stored, *model, x, n_tokens, "No such device; ", out);
                    CHECK(failed >= 0);
                    CHECK(out == expected);
                    failures += failed;
                }
            });
        }
    }
    CHECK(failures > 40);
}

TEST_CASE("ffn faults: a device that does not come back, and one that is never ready") {
    FlashSpec spec = biased_layers();
    spec.n_ff = { 64 };
    const StoredFlash stored(spec);
    const std::vector<float> x = stored.input(1);
    for (const auto & [faults, words] : { std::pair("vanish:2", "connect it"), std::pair("again:1", "never ready") }) {
        for (const std::string & reader : readers()) {
            const auto model =
                open_flash(stored.path, { { "reader", reader }, { "depth", "128" }, { "faults", faults } });
            for (int i = 0; i < 2; ++i) {
                std::vector<float> out(x.size(), 9.0f);
                const Status status = model->ffn(5, x.data(), 1, out.data(), 2);
                CAPTURE(status.message());
                CHECK(status.code() == Code::io);
                CHECK(status.message().find(words) != std::string::npos);
                CHECK(zero(out));
            }
        }
    }
}

TEST_CASE("ffn faults: a read of seconds is waited for") {
    const StoredFlash stored(biased_layers());
    const std::vector<float> x = stored.input(1);
    const std::vector<float> expected = call(*open_flash(stored.path), 5, x, 1);
    for (const std::string & reader : readers()) {
        const auto model = open_flash(stored.path, { { "reader", reader }, { "ram", "60%" }, { "faults", "stall:2" } });
        CHECK(call(*model, 5, x, 1, 2) == expected);
    }
}

TEST_CASE("ffn faults: without io_uring the bits are the same, and asking for it is refused") {
    const StoredFlash stored(biased_layers());
    const std::vector<float> x = stored.input(3);
    const std::vector<float> expected = call(*open_flash(stored.path), 5, x, 3);
    for (const char * faults : { "uring:EPERM", "uring:ENOSYS" }) {
        const auto model = open_flash(stored.path, { { "faults", faults } });
        CHECK(model->model().stats().reader.rfind("pread", 0) == 0);
        CHECK(call(*model, 5, x, 3, 2) == expected);
        const auto asked =
            Standalone::open(stored.path, settings_of({ { "faults", faults }, { "reader", "io_uring" } }));
        CHECK(asked.status().code() == Code::io);
        CHECK(asked.status().message().find("use the reader 'pread'") != std::string::npos);
    }
}
