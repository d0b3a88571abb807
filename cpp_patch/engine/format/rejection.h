// Private to format/: the sentence that refuses a file.
#pragma once

#include "gguf_flash/status.h"

namespace gguf_flash::format {

// "cannot read 'label': what (SPEC Rrule)". What is cut at a length that people read; its bytes from the
// file that are no printable ASCII are shown as \xNN, so that a name can neither break the line nor
// command the terminal.
Status reject(Code code, const std::string & label, const std::string & what, int rule);

} // namespace gguf_flash::format
