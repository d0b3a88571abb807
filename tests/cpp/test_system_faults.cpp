// A file system without direct reads, and a disk that fails while a model is loaded.
#include "failing_system.h"
#include "ffn_runner.h"
#include "specs.h"

#include <cerrno>

using namespace gguf_flash;

TEST_CASE("system faults: a file system without direct reads") {
    if (!failing::can_fail) {
        return;
    }
    for (const FlashSpec & spec : specs()) {
        const StoredFlash stored(spec);
        const std::vector<float> x = stored.input(3);
        const std::vector<float> expected = call(*open_flash(stored.path), 5, x, 3);
        for (const char * reader : { "pread", "auto" }) {
            failing::direct_opens(true);
            auto model = Standalone::open(stored.path, settings_of({ { "reader", reader }, { "ram", "60%" } }));
            CHECK(failing::healthy());
            REQUIRE(model.ok());
            CHECK(model.value()->model().stats().reader.find("buffered") != std::string::npos);
            CHECK(call(*model.value(), 5, x, 3, 2) == expected);
        }
    }
}

TEST_CASE("system faults: a disk error while a model is loaded is no damaged file") {
    for (const FlashSpec & spec : specs()) {
        const StoredFlash stored(spec);
        int refused = 0;
        for (int nth = 1; failing::can_fail; ++nth) {
            failing::buffered_reads(nth, EIO);
            auto opened = Standalone::open(stored.path, Settings());
            if (!failing::healthy()) {
                break;
            }
            CAPTURE(nth);
            CAPTURE(opened.status().message());
            ++refused;
            CHECK(opened.status().code() == Code::io);
            CHECK(has(opened.status(), stored.path));
            CHECK(has(opened.status(), "Input/output error; "));
        }
        CHECK((refused > 20 || !failing::can_fail));
        call(*open_flash(stored.path), 5, stored.input(1), 1);
    }
}
