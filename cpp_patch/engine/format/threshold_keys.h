// Private to format/: thresholds of single neurons, and what they were found to cost (SPEC sections 3, 4).
#pragma once

#include "gguf_flash/layout.h"
#include "key_reader.h"

namespace gguf_flash::format {

// R24: keys under flash_ffn.sparsity are what section 3 says. The engine has no use for them.
Status check_sparsity_keys(const KeyReader & keys, const Layout & layout);
// R24: tensors of thresholds are of listed layers and fit; notes which layers have one.
Status check_threshold_tensors(const KeyReader & keys, Layout & layout);

} // namespace gguf_flash::format
