// Names of a block's tensors.
#pragma once

#include <cstdint>
#include <cstring>

namespace gguf_flash {

// The number after "blk." and what follows it and a dot; false for any other name.
inline bool split_name(const char * name, uint32_t & layer, const char *& rest) {
    if (std::strncmp(name, "blk.", 4) != 0) {
        return false;
    }
    const char * p = name + 4;
    uint32_t n = 0;
    for (; *p >= '0' && *p <= '9' && n < 1000000; ++p) {
        n = n * 10 + uint32_t(*p - '0');
    }
    if (p == name + 4 || *p != '.') {
        return false;
    }
    layer = n;
    rest = p + 1;
    return true;
}

} // namespace gguf_flash
