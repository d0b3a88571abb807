// The one vocabulary of settings: what is taken, what is refused and in which words.
#include "gguf_flash/model.h"

#include <doctest/doctest.h>

#include <algorithm>

using namespace gguf_flash;

namespace {

Settings with(const std::string & name, const std::string & value) {
    Settings s;
    const Status status = s.set(name, value);
    CAPTURE(name);
    CAPTURE(value);
    CHECK_MESSAGE(status.ok(), status.message());
    return s;
}

} // namespace

TEST_CASE("settings: ram") {
    CHECK(with("ram", "1048576").ram_bytes == 1048576);
    CHECK(with("ram", "200MiB").ram_bytes == 200u << 20);
    CHECK(with("ram", "200 MiB").ram_bytes == 200u << 20);
    CHECK(with("ram", "1.5GiB").ram_bytes == 3u << 29);
    CHECK(with("ram", "2GB").ram_bytes == 2000000000u);
    CHECK(with("ram", "2G").ram_bytes == 2000000000u);
    CHECK(with("ram", "3k").ram_bytes == 3000);
    CHECK(with("ram", "1TiB").ram_bytes == 1ull << 40);
    CHECK(with("ram", "12B").ram_bytes == 12);
    CHECK(with("ram", "60%").ram_share == doctest::Approx(0.6));
    CHECK(with("ram", "100%").ram_share == doctest::Approx(1.0));
    Settings s = with("ram", "60%");
    CHECK(s.set("ram", "5MB").ok());
    CHECK(s.ram_share == 0);
    CHECK(s.ram_bytes == 5000000);
    CHECK(s.set("ram", "auto").ok());
    CHECK(s.ram_bytes == 0);
    CHECK(s.ram_share == 0);
}

TEST_CASE("settings: the others") {
    CHECK(with("window", "1").window == 1);
    CHECK(with("window", "50").window == 50);
    CHECK(with("policy", "window").policy == Policy::window);
    CHECK(with("policy", "budget").policy == Policy::budget);
    CHECK(with("reader", "pread").reader == ReaderKind::pread);
    CHECK(with("reader", "io_uring").reader == ReaderKind::io_uring);
    CHECK(with("reader", "auto").reader == ReaderKind::automatic);
    CHECK(with("depth", "4096").depth == 4096);
    CHECK(with("prefill", "stream").prefill == Prefill::stream);
    CHECK(with("prefill", "select").prefill == Prefill::select);
    CHECK(with("prefill", "auto").prefill == Prefill::automatic);
    using Floats = std::vector<float>;
    CHECK((with("threshold", "0.25").threshold == Floats{ 0.25f }));
    CHECK((with("threshold", "0").threshold == Floats{ 0 }));
    CHECK((with("threshold", "0,2.5, 1e-3").threshold == Floats{ 0, 2.5f, 1e-3f }));
    CHECK((with("predictor_threshold", "0,0.999").predictor_threshold == Floats{ 0, 0.999f }));
    CHECK(with("activation", "relu_sqr").activation == Activation::relu_sqr);
    CHECK(with("faults", "eio:3,short:2").faults == "eio:3,short:2");
    CHECK(with("faults", "").faults.empty());
    CHECK(with("lookahead", "on").lookahead);
    CHECK(!with("lookahead", "off").lookahead);
    CHECK(with("gap", "0").gap == 0);
    CHECK(with("gap", "1048576").gap == 1048576);
}

TEST_CASE("settings: bad values are refused, named, and change nothing") {
    const std::vector<std::pair<std::string, std::vector<std::string>>> bad = {
        { "ram", { "", "x", "-1", "5 parsecs", "120%", "-5%", "inf", "nan", "1e30", "10MiBB", "%" } },
        { "window", { "", "0", "-1", "x", "1.5", "99999999999999999999", "1000001" } },
        { "depth", { "", "0", "4097", "32x" } },
        { "policy", { "", "lru" } },
        { "reader", { "mmap" } },
        { "prefill", { "", "always" } },
        { "threshold", { "", "-0.5", "x", "nan", "inf", "1%", "1,", ",1", "1,,2", "1;2", "0,-1" } },
        { "predictor_threshold", { "", "1", "0.99999999", "-0.1", "nan", "0.5,1", "0.5," } },
        { "activation", { "swish" } },
        { "lookahead", { "", "1", "auto" } },
        { "watch", { "", "yes" } },
        { "gap", { "", "-1", "12KiB", "1048577" } },
        { "faults", { "eio", "eio:0", "boom:3" } },
    };
    for (const auto & [name, values] : bad) {
        CHECK(std::count(Settings::names().begin(), Settings::names().end(), name) == 1);
        for (const std::string & value : values) {
            CAPTURE(name);
            CAPTURE(value);
            Settings s;
            const Status status = s.set(name, value);
            CHECK((status.code() == Code::argument || (name == "activation" && status.code() == Code::unsupported)));
            CHECK(status.message().find("'" + value + "'") != std::string::npos);
            const Settings fresh;
            CHECK(s.ram_bytes == fresh.ram_bytes);
            CHECK(s.ram_share == fresh.ram_share);
            CHECK(s.window == fresh.window);
            CHECK(s.depth == fresh.depth);
            CHECK(s.gap == fresh.gap);
            CHECK(s.lookahead == fresh.lookahead);
            CHECK(s.watch == fresh.watch);
            CHECK((s.threshold == fresh.threshold));
            CHECK((s.predictor_threshold == fresh.predictor_threshold));
            CHECK(s.faults == fresh.faults);
        }
    }
    CHECK(Settings::names().size() == bad.size());
}

TEST_CASE("settings: unknown names") {
    Settings s;
    const Status status = s.set("rams", "1");
    CHECK(status.code() == Code::argument);
    CHECK(status.message().find("flash_ffn.rams") != std::string::npos);
}
