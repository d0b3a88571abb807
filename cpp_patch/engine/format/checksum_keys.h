// Private to format/: checksums of layers' bundles (SPEC section 3).
#pragma once

#include "gguf_flash/layout.h"
#include "key_reader.h"

namespace gguf_flash::format {

// R27: keys under flash_ffn.checksum are what section 3 says. The engine has no use for them: whoever wants
// to compare reads all bundles, which a program that reads single neurons does not.
Status check_checksum_keys(const KeyReader & keys, const Layout & layout);

} // namespace gguf_flash::format
