// Reading resident weights into memory: large reads, many in flight, past the page cache where the file
// system allows it.
#pragma once

#include "gguf_flash/reader.h"
#include "gguf_flash/status.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace gguf_flash {

constexpr uint64_t load_read = 2 << 20;                             // bytes of one read
constexpr int load_depth = 8;                                       // reads in flight
constexpr uint64_t load_staging = load_read * uint64_t(load_depth); // bytes of RAM beside the weights meanwhile

// A tensor's bytes in one of the files.
struct Resident {
    std::string name; // for messages
    uint32_t file = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint8_t * to = nullptr; // null: the bytes are only lent, all at once, to who is told that they are there
};

// Told of each tensor whose bytes are there, in order; false ends the load.
using ResidentLoaded = std::function<bool(const Resident &, const uint8_t * data)>;

// Reads the tensors in the order given; in that of the file it is one sequence. Nothing is in flight when
// it returns: true if all were read, false if loaded ended it, Code::io with file, tensor and byte, or
// Code::ram_too_small without memory for load_staging or for the largest tensor that is lent.
Result<bool> read_resident(const std::vector<std::shared_ptr<File>> & files, const std::vector<Resident> & tensors,
                           Reader & reader, const ResidentLoaded & loaded);

} // namespace gguf_flash
