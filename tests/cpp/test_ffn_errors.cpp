// What goes wrong stays a Status: the output is zero, the message names the place, the next call is right.
#include "ffn_runner.h"
#include "specs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

using namespace gguf_flash;

namespace {

// Calls until one fails; whether one did, checking everything about it.
bool one_failure(const StoredFlash & stored, const SettingList & settings, uint32_t n_tokens, int threads) {
    const std::vector<float> x = stored.input(n_tokens);
    const std::vector<float> expected = call(*open_flash(stored.path), 5, x, n_tokens);
    const auto model = open_flash(stored.path, settings);
    bool failed = false;
    for (int i = 0; i < 4; ++i) {
        std::vector<float> out(x.size(), 9.0f);
        const Status status = model->ffn(5, x.data(), n_tokens, out.data(), threads);
        if (status.ok()) {
            CHECK(out == expected);
            continue;
        }
        CAPTURE(status.message());
        CHECK_FALSE(failed); // once
        failed = true;
        CHECK(status.code() == Code::io);
        CHECK(has(status, "layer 5"));
        CHECK(has(status, "neuron "));
        CHECK(has(status, "'" + stored.path + "'"));
        CHECK(has(status, "Input/output error"));
        CHECK(zero(out));
    }
    return failed;
}

} // namespace

TEST_CASE("ffn errors: a failed read fails one call, and the next has the right bits") {
    const StoredFlash stored(biased_layers());
    const std::string least = std::to_string(least_ram(stored.path));
    int failures = 0;
    for (const char * reader : { "pread", "auto" }) {
        for (const char * eio : { "eio:1", "eio:2", "eio:4", "eio:9,short:2,again:3" }) {
            for (const std::string & ram : { least, std::string("60%"), std::string("100%") }) {
                for (int threads : { 1, 3 }) {
                    for (uint32_t n_tokens : { 1u, 17u }) {
                        CAPTURE(std::string(reader));
                        CAPTURE(std::string(eio));
                        CAPTURE(ram);
                        CAPTURE(threads);
                        CAPTURE(n_tokens);
                        for (const char * prefill : { "select", "stream" }) {
                            failures += one_failure(
                                stored,
                                { { "reader", reader }, { "faults", eio }, { "ram", ram }, { "prefill", prefill } },
                                n_tokens, threads);
                        }
                    }
                }
            }
        }
    }
    CHECK(failures > 100);
}

TEST_CASE("ffn errors: the file shrinks before a call") {
    for (const char * prefill : { "select", "stream" }) {
        for (int threads : { 1, 3 }) {
            const StoredFlash stored(biased_layers());
            const auto model = open_flash(stored.path, { { "ram", "60%" }, { "prefill", prefill } });
            const std::vector<float> x = stored.input(2);
            std::vector<float> out = call(*model, 5, x, 2, threads);
            const LayerLayout & layer = model->model().layout().layers[1];
            REQUIRE(truncate(stored.path.c_str(), off_t(layer.offset + layer.stride * 100 + 33)) == 0);
            const Status status = model->ffn(5, x.data(), 2, out.data(), threads);
            CHECK(status.code() == Code::io);
            CHECK(has(status, stored.path));
            CHECK(has(status, "truncated"));
            CHECK(zero(out));
            stored.folder.write("m.gguf", stored.file.image.bytes()); // by whom, nobody knows
            CHECK(has(model->ffn(5, x.data(), 2, out.data(), threads), "load the model again"));
            const auto again = open_flash(stored.path, { { "ram", "60%" }, { "prefill", prefill } });
            CHECK(worst_error(call(*again, 5, x, 2, threads), reference_ffn(stored.file, 1, x, 2), 2) < 2e-3);
        }
    }
}

TEST_CASE("ffn errors: the file is written to, its size the same") {
    const StoredFlash stored(biased_layers());
    const auto model = open_flash(stored.path, { { "ram", "100%" } });
    const std::vector<float> x = stored.input(1);
    std::vector<float> out = call(*model, 5, x, 1);
    const std::string other = stored.path + ".link";
    REQUIRE(chmod(stored.path.c_str(), 0400) == 0);
    REQUIRE(link(stored.path.c_str(), other.c_str()) == 0);
    REQUIRE(unlink(other.c_str()) == 0); // the inode's time changes, the bytes do not
    CHECK(call(*model, 5, x, 1) == out);
    const timespec times[2] = { { 0, UTIME_OMIT }, { 1000000000, 7 } };
    REQUIRE(utimensat(AT_FDCWD, stored.path.c_str(), times, 0) == 0);
    for (int i = 0; i < 2; ++i) {
        const Status status = model->ffn(5, x.data(), 1, out.data(), 1);
        CHECK(status.code() == Code::io);
        CHECK(has(status, stored.path));
        CHECK(has(status, "written to"));
        CHECK(zero(out));
    }
    call(*open_flash(stored.path), 5, x, 1);
}

TEST_CASE("ffn errors: the file shrinks while calls run") {
    const StoredFlash stored(biased_layers());
    const auto model = open_flash(stored.path, { { "ram", "30%" } });
    const std::vector<float> x = stored.input(1);
    const std::vector<float> expected = call(*model, 5, x, 1);
    std::atomic<int> calls{ 0 };
    std::thread cutter([&] {
        while (calls < 5) {
            std::this_thread::yield();
        }
        const LayerLayout & layer = model->model().layout().layers[1];
        REQUIRE(truncate(stored.path.c_str(), off_t(layer.offset + layer.stride)) == 0);
    });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    Status status;
    while (status.ok() && std::chrono::steady_clock::now() < end) {
        std::vector<float> out(x.size());
        status = model->ffn(5, x.data(), 1, out.data(), 2);
        CHECK((status.ok() ? out == expected : zero(out)));
        ++calls;
    }
    cutter.join();
    CHECK(status.code() == Code::io);
    CHECK(has(status, "truncated"));
}

TEST_CASE("ffn errors: a budget that is too small says what would do") {
    FlashSpec spec = biased_layers();
    spec.select = Select::gate;
    const StoredFlash stored(spec);
    for (const char * ram : { "1", "100KiB" }) {
        const auto refused = Standalone::open(stored.path, settings_of({ { "ram", ram } }));
        REQUIRE_FALSE(refused.ok());
        const Status & status = refused.status();
        CAPTURE(status.message());
        CHECK(status.code() == Code::ram_too_small);
        CHECK(has(status, stored.path));
        const size_t at = status.message().find("at least ");
        REQUIRE(at != std::string::npos);
        const auto model = open_flash(stored.path, { { "ram", status.message().substr(at + 9) } }); // its advice works
        CHECK(model->model().stats().layers[0].slots >= 64);
    }
    const uint64_t least = least_ram(stored.path);
    CHECK(Standalone::open(stored.path, settings_of({ { "ram", std::to_string(least) } })).ok());
    CHECK(Standalone::open(stored.path, settings_of({ { "ram", std::to_string(least - 1) } })).status().code() ==
          Code::ram_too_small);
}

TEST_CASE("ffn errors: the budget is kept, whatever the layers' sizes") {
    FlashSpec spec;
    spec.layers = { 0, 1, 2, 3 };
    spec.n_ff = { 1000, 100, 30, 70 };
    const StoredFlash stored(spec);
    const uint64_t least = least_ram(stored.path);
    const Stats whole = open_flash(stored.path, { { "ram", "100%" } })->model().stats();
    const uint64_t most = whole.resident_bytes + whole.cache_bytes;
    for (int percent = 0; percent <= 120; percent += 5) {
        CAPTURE(percent);
        const uint64_t ram = least + (most - least) * uint64_t(percent) / 100;
        const Stats stats = open_flash(stored.path, { { "ram", std::to_string(ram) } })->model().stats();
        CHECK(stats.ram_bytes == ram);
        CHECK(stats.resident_bytes + stats.cache_bytes <= ram);
        for (size_t i = 0; i < stats.layers.size(); ++i) {
            CHECK(stats.layers[i].slots >= std::min(stats.layers[i].n_ff, 64u));
            CHECK((percent < 100 || stats.layers[i].slots == stats.layers[i].n_ff));
        }
    }
}

TEST_CASE("ffn errors: files that do not open, biases that do not fit") {
    CHECK(Standalone::open("/nonexistent.gguf", Settings()).status().code() == Code::io);
    FlashSpec spec = biased_layers();
    FlashFile file(spec);
    file.image.tensor("blk.5.ffn_up.bias").type = GGML_TYPE_I32;
    TempFolder folder;
    const auto refused = Standalone::open(folder.write("m.gguf", file.image.bytes()), Settings());
    CHECK(refused.status().code() == Code::unsupported);
    CHECK(has(refused.status(), "blk.5.ffn_up.bias"));
}

TEST_CASE("ffn errors: models by the object that owns them") {
    const StoredFlash stored(biased_layers());
    const auto standalone = open_flash(stored.path);
    auto model = std::shared_ptr<Model>(standalone, &standalone->model());
    int owner = 0;
    CHECK(attached(&owner) == nullptr);
    attach(&owner, model);
    CHECK(attached(&owner) == model);
    detach(&owner);
    CHECK(attached(&owner) == nullptr);
    CHECK(model->index_of(5) == 1);
    CHECK(model->index_of(4) == -1);
}
