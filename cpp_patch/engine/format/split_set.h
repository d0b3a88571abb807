// Private to format/: files of a split set belong together (SPEC section 5).
#pragma once

#include "gguf_header.h"

namespace gguf_flash::format {

// The headers of the set that the first of paths begins, or of that file alone if it begins none, whatever
// its name; rules R1, R2, R3, R20 and R19. labels name the files in messages.
Result<std::vector<Header>> read_set(const std::vector<std::string> & paths, const std::vector<std::string> & labels);

} // namespace gguf_flash::format
