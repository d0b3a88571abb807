// Any bytes as a flash-GGUF: the engine's reader gives a layout that lies inside the file, or one short
// line that names a rule.
#include "gguf_flash/layout.h"

#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#include <unistd.h>

using namespace gguf_flash;

namespace {

void require(bool good, const char * what, const std::string & found) {
    if (!good) {
        std::fprintf(stderr, "%s: %s\n", what, found.c_str());
        std::abort();
    }
}

void check_refusal(const std::string & message) {
    require(message.find("(SPEC R") != std::string::npos && message.size() < 1000, "no rule, or long", message);
    for (char c : message) {
        require(c >= ' ' && c <= '~', "not one printable line", message);
    }
}

void check_layout(const Layout & layout, size_t size) {
    require(!layout.layers.empty(), "no layers", "");
    for (const LayerLayout & l : layout.layers) {
        const PartLayout & last = l.parts.back();
        require(l.offset <= size && l.n_ff <= (size - l.offset) / l.stride, "bundles beyond the file", l.block);
        require(last.offset + last.bytes <= l.stride, "parts beyond a row", l.block);
        require((l.rank > 0) == (layout.select == Select::predictor), "a predictor too many or few", l.block);
        require(layout.find(l.layer) == &l, "a layer that is not found", l.block);
    }
    for (const TensorPlace & t : layout.resident) {
        require(t.offset <= size && t.bytes <= size - t.offset, "data beyond the file", t.name);
        require(layout.tensor(t.name) == &t, "a tensor that is not found", t.name);
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static const int fd = memfd_create("fuzz", 0);
    static const std::string path = "/proc/self/fd/" + std::to_string(fd);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != ssize_t(size)) {
        std::abort();
    }
    const Result<Layout> layout = read_layout({ path }, "fuzz");
    if (layout.ok()) {
        check_layout(layout.value(), size);
    } else {
        check_refusal(layout.status().message());
    }
    return 0;
}
