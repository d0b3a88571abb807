// Private to ffn/: how one budget of bytes is shared between the layers' caches.
#pragma once

#include "gguf_flash/layout.h"

namespace gguf_flash {

// A cache below this holds too few neurons to keep the disk busy.
constexpr uint32_t least_slots = 64;

// Slots of each layer for spare bytes beyond the least_slots of each. Where every layer has a miss curve,
// slots go where a byte avoids most misses, as in gguf_flash/plan/share.py, to the order of operations. Else
// first up to what calibration saw a window use, then up to the whole layer, the same share of the way
// for every layer.
std::vector<uint32_t> share_slots(const std::vector<LayerLayout> & layers, const std::vector<uint64_t> & slot_bytes,
                                  uint64_t spare);

} // namespace gguf_flash
