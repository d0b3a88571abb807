// Private to format/: what the names of a layer's dense tensors begin with.
#pragma once

#include "gguf_flash/layout.h"
#include "key_reader.h"

namespace gguf_flash::format {

// Fills LayerLayout::block of all layers; rule R26.
Status read_block_names(const KeyReader & keys, Layout & layout);

} // namespace gguf_flash::format
