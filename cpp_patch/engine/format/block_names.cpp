#include "block_names.h"

#include <set>

namespace gguf_flash::format {

namespace {

// As section 1 of the Unicode standard's table of well-formed byte sequences has it: no overlong forms, no
// surrogates, nothing beyond U+10FFFF.
bool is_utf8(const std::string & text) {
    for (size_t i = 0; i < text.size();) {
        const unsigned char first = static_cast<unsigned char>(text[i]);
        const size_t n = first < 0x80 ? 1
                       : first < 0xc2 ? 0
                       : first < 0xe0 ? 2
                       : first < 0xf0 ? 3
                       : first < 0xf5 ? 4
                                      : 0;
        if (n == 0 || i + n > text.size()) {
            return false;
        }
        uint32_t code = n == 1 ? first : first & (0x7fu >> n);
        for (size_t j = 1; j < n; ++j) {
            const unsigned char next = static_cast<unsigned char>(text[i + j]);
            if ((next & 0xc0) != 0x80) {
                return false;
            }
            code = code << 6 | (next & 0x3f);
        }
        if ((n == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) ||
            (n == 4 && (code < 0x10000 || code > 0x10ffff))) {
            return false;
        }
        i += n;
    }
    return true;
}

} // namespace

Status read_block_names(const KeyReader & keys, Layout & layout) {
    const Value * v = keys.find("flash_ffn.blocks");
    if (v != nullptr && !v->is_array_of(value_string)) {
        return keys.missing("flash_ffn.blocks", "an array of strings");
    }
    bool good = v == nullptr || v->strings.size() == layout.layers.size();
    std::set<std::string> names;
    for (size_t i = 0; good && i < layout.layers.size(); ++i) {
        LayerLayout & layer = layout.layers[i];
        layer.block = v != nullptr ? v->strings[i] : "blk." + std::to_string(layer.layer);
        good = !layer.block.empty() && is_utf8(layer.block) && names.insert(layer.block).second;
    }
    return good ? Status()
                : keys.corrupt("flash_ffn.blocks does not hold " + std::to_string(layout.layers.size()) +
                                   " different names of blocks in UTF-8",
                               26);
}

} // namespace gguf_flash::format
