#include "block_names.h"

#include <set>

namespace gguf_flash::format {

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
        good = !layer.block.empty() && names.insert(layer.block).second;
    }
    return good ? Status()
                : keys.corrupt("flash_ffn.blocks does not hold " + std::to_string(layout.layers.size()) +
                                   " different names of blocks",
                               26);
}

} // namespace gguf_flash::format
