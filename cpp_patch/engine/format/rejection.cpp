#include "rejection.h"

#include <cstdio>

namespace gguf_flash::format {

namespace {

constexpr size_t most_text = 240; // kept of each end of a longer one

std::string printable(const std::string & text) {
    std::string out;
    for (char c : text) {
        if (c >= ' ' && c <= '~') {
            out += c;
            continue;
        }
        char code[8];
        std::snprintf(code, sizeof(code), "\\x%02x", unsigned(static_cast<unsigned char>(c)));
        out += code;
    }
    return out;
}

} // namespace

Status reject(Code code, const std::string & label, const std::string & what, int rule) {
    std::string text = printable(what);
    if (text.size() > 2 * most_text) {
        text = text.substr(0, most_text) + " ... " + text.substr(text.size() - most_text);
    }
    return { code, "cannot read '" + label + "': " + text + " (SPEC R" + std::to_string(rule) + ")" };
}

} // namespace gguf_flash::format
