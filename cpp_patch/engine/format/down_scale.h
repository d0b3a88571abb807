// Private to format/: the scales of down codes (SPEC section 4).
#pragma once

#include "gguf_flash/layout.h"
#include "key_reader.h"

namespace gguf_flash::format {

// R25: every layer whose down part is codes has whole blocks of neurons, and their scales.
Status check_down_scales(const KeyReader & keys, const Layout & layout);

} // namespace gguf_flash::format
