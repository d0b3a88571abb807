#include "checksum_keys.h"

namespace gguf_flash::format {

namespace {

constexpr size_t digits = 64; // of a SHA-256 in hex

bool is_digest(const std::string & text) {
    return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

} // namespace

Status check_checksum_keys(const KeyReader & keys, const Layout & layout) {
    const std::string prefix = "flash_ffn.checksum.";
    const Value * layers = keys.find(prefix + "layers");
    if (layers == nullptr) {
        return {};
    }
    if (!layers->is_array_of(value_string)) {
        return keys.missing(prefix + "layers", "an array of strings");
    }
    const Value * algorithm = keys.find(prefix + "algorithm");
    if (algorithm == nullptr || !algorithm->is(value_string)) {
        return keys.missing(prefix + "algorithm", "a string");
    }
    if (algorithm->strings[0] != "sha256") {
        return keys.bad(
            Code::unsupported,
            "checksums of 'sha256' expected, found '" + algorithm->strings[0] + "'; install a newer gguf_flash", 27);
    }
    bool good = layers->strings.size() == layout.layers.size();
    for (const std::string & text : layers->strings) {
        good = good && is_digest(text);
    }
    return good ? Status()
                : keys.corrupt("'" + prefix + "layers' does not hold " + std::to_string(layout.layers.size()) +
                                   " digests of 64 lower-case hex digits",
                               27);
}

} // namespace gguf_flash::format
