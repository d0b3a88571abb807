#include "down_scale.h"

#include "ggml.h"

namespace gguf_flash::format {

Status check_down_scales(const KeyReader & keys, const Layout & layout) {
    for (const LayerLayout & l : layout.layers) {
        if (!l.has_codes()) {
            continue;
        }
        if (l.n_ff % code_block != 0 || l.n_ff < 2 * code_block) {
            return keys.corrupt("layer " + std::to_string(l.layer) + " has down codes for " + std::to_string(l.n_ff) +
                                    " neurons, a multiple of 32 from 64 expected",
                                25);
        }
        const std::string name = down_scale_name(l.layer);
        const TensorPlace * t = layout.tensor(name);
        const std::vector<uint64_t> ne = { layout.n_embd, l.n_ff / code_block };
        if (t == nullptr || t->type != GGML_TYPE_F16 || t->ne != ne) {
            return keys.corrupt("tensor '" + name +
                                    "', the scales of the layer's down codes, is missing or not F16 of " +
                                    std::to_string(ne[0]) + " by " + std::to_string(ne[1]),
                                25);
        }
    }
    return {};
}

} // namespace gguf_flash::format
