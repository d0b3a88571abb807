// Private to format/: files of a split set belong together (SPEC section 5).
#pragma once

#include "key_reader.h"

namespace gguf_flash::format {

// R19: headers are those of all files of one set, in order, or of one ordinary file.
Status check_split_set(const KeyReader & keys, const std::vector<Header> & headers);

} // namespace gguf_flash::format
