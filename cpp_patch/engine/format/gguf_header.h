// Bounded parser of a GGUF v3 header: key-value pairs and tensor infos, nothing of the data.
#pragma once

#include "gguf_flash/file_stamp.h"
#include "gguf_flash/status.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gguf_flash::format {

constexpr uint32_t value_u32 = 4, value_f32 = 6, value_bool = 7, value_string = 8, value_array = 9;

// A metadata value. Scalars and strings are kept; arrays only of strings, u32 and f32 and only for keys of
// the flash section, since a tokenizer's arrays are megabytes the engine has no use for.
struct Value {
    uint32_t type = 0;           // gguf type id; 9 is array
    uint32_t array_type = 0;     // element type when type is array
    uint64_t count = 0;          // elements when type is array
    std::vector<double> numbers; // one for a scalar, count for a kept array
    std::vector<std::string> strings;

    bool is_integer() const { return type <= 5 || type == 10 || type == 11; }
    bool is(uint32_t wanted) const { return type == wanted; }
    bool is_array_of(uint32_t wanted) const { return type == value_array && array_type == wanted; }
};

struct TensorInfo {
    std::string name;
    std::vector<uint64_t> ne;
    uint32_t type = 0;
    uint64_t offset = 0; // bytes from the start of the file; UINT64_MAX if beyond any file
    uint64_t bytes = 0;
    bool aligned = true; // starts at a multiple of the alignment
};

struct Header {
    std::map<std::string, Value> keys;
    std::vector<TensorInfo> tensors;
    uint64_t alignment = 32;
    uint64_t data_offset = 0;
    uint64_t file_size = 0;
    FileStamp stamp;

    const Value * find(const std::string & key) const;
};

// Rules R1 (magic), R2 (version), R3 (bounds), R20 (duplicates) and R16 for general.alignment; label
// names the file in messages.
Result<Header> read_header(const std::string & path, const std::string & label);

// Rules R15 (data beyond the file) and R16 (alignment, overlap).
Status check_places(const Header & header, const std::string & label);

} // namespace gguf_flash::format
