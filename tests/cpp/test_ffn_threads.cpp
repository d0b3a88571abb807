// Many threads in one model and in several: made for the thread sanitizer, and checked for bits.
#include "ffn_ways.h"

#include <atomic>
#include <functional>

using namespace gguf_flash;

namespace {

FlashSpec small(Select select) {
    FlashSpec spec;
    spec.layers = { 0, 5 };
    spec.n_ff = { 300, 150 };
    spec.select = select;
    spec.gate = spec.up = spec.down = GGML_TYPE_F16;
    spec.n_embd = 64;
    spec.biases = true;
    spec.activation = select == Select::gate ? "relu" : "silu";
    return spec;
}

std::vector<SettingList> ways(const std::string & path) {
    std::vector<SettingList> found;
    for (const char * reader : { "auto", "pread" }) {
        for (const std::string & ram : { std::to_string(least_ram(path)), std::string("60%"), std::string("100%") }) {
            found.push_back({ { "ram", ram }, { "reader", reader }, { "depth", "4" } });
        }
    }
    return found;
}

// Runs work(i) on n threads, and disturb over and over until they have ended.
void in_parallel(int n, const std::function<void(int)> & work, const std::function<void()> & disturb) {
    std::atomic<int> left{ n };
    std::vector<std::thread> threads;
    for (int i = 0; i < n; ++i) {
        threads.emplace_back([&, i] {
            work(i);
            --left;
        });
    }
    while (left > 0) {
        disturb();
        std::this_thread::yield();
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

} // namespace

TEST_CASE("ffn threads: models of one file with all readers and budgets, and counters reset meanwhile") {
    for (Select select : { Select::all, Select::gate }) {
        const StoredFlash stored(small(select));
        const std::vector<float> expected = session(stored, *open_flash(stored.path), 1);
        std::vector<std::shared_ptr<Standalone>> models;
        for (const SettingList & way : ways(stored.path)) {
            models.push_back(open_flash(stored.path, way));
        }
        const int n = int(models.size()) * 2; // two callers a model
        std::vector<int> same(size_t(n), 0);
        in_parallel(
            n,
            [&](int i) {
                same[size_t(i)] = session(stored, *models[size_t(i) % models.size()], 1 + i % 2) == expected;
            },
            [&] {
                for (const auto & model : models) {
                    CHECK(model->model().stats().layers.size() == 2);
                    model->model().reset_stats();
                }
            });
        CHECK(same == std::vector<int>(size_t(n), 1));
    }
}

TEST_CASE("ffn threads: models open and go while others run") {
    const StoredFlash stored(small(Select::all));
    const std::vector<float> expected = session(stored, *open_flash(stored.path), 1);
    const std::vector<SettingList> settings = ways(stored.path);
    const auto model = open_flash(stored.path, { { "ram", "60%" } });
    std::vector<int> same(3, 0);
    size_t opened = 0;
    in_parallel(
        3, [&](int i) { same[size_t(i)] = session(stored, *model, 1 + i % 2) == expected; },
        [&] {
            const auto other = open_flash(stored.path, settings[opened++ % settings.size()]);
            CHECK(call(*other, 5, stored.input(1), 1).size() == 64);
        });
    CHECK(same == std::vector<int>(3, 1));
}

TEST_CASE("ffn threads: errors and owners are looked up while calls run") {
    const StoredFlash stored(small(Select::all));
    const auto model = open_flash(stored.path, { { "ram", std::to_string(least_ram(stored.path)) } });
    const std::shared_ptr<Model> inner(model, &model->model());
    const int owner = 0;
    in_parallel(
        4,
        [&](int i) {
            for (int n = 0; n < 50; ++n) {
                inner->set_last_error({ Code::io, "read " + std::to_string(i) });
                call(*model, i % 2 ? 5 : 0, stored.input(1, uint64_t(n)), 1);
            }
        },
        [&] {
            attach(&owner, inner);
            CHECK(attached(&owner) == inner);
            const Status status = inner->take_last_error();
            CHECK((status.ok() || status.message().rfind("read ", 0) == 0));
            detach(&owner);
            CHECK(attached(&owner) == nullptr);
        });
}
