// The flash section of a GGUF file: where every neuron's bundle lies. See gguf_flash/format/SPEC.md;
// the rule numbers in error messages are its rejection rules.
//
// Reading validates everything (offsets, sizes, types, overlaps, counts) with checked arithmetic
// before any bundle is touched, and allocates no more than a small multiple of the header's size.
#pragma once

#include "gguf_flash/file_stamp.h"
#include "gguf_flash/status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace gguf_flash {

enum class Part { gate = 0, up = 1, down = 2 };
enum class Select { all, gate, predictor };
// drelu: ReLU of gate and of up, both, in a gated FFN; the others are functions of the deciding part.
enum class Activation { from_graph, relu, relu_sqr, silu, gelu, gelu_erf, drelu };

// The block N for which name_of, one of the functions below, gives name; false for any other name. A
// number that no u32 holds is given as some number that no u32 holds.
bool block_named(const std::string & name, std::string (*name_of)(uint32_t), uint64_t & block);
// The tensor that holds the bundles of a block.
std::string bundle_name(uint32_t layer);
// The scales of a block's down codes (SPEC section 4): F16 {n_embd, n_ff / 32}.
std::string down_scale_name(uint32_t layer);
constexpr uint32_t code_block = 32; // neurons that share a scale for each column

// The tensor that holds a threshold for each neuron of a block.
std::string threshold_name(uint32_t layer);
// The tensors of a block's predictor, score = B relu(A x) + b (paper, section 3.1).
struct PredictorNames {
    explicit PredictorNames(uint32_t layer);
    std::string a, b, bias; // A {n_embd, rank}, B {rank, n_ff}, b {n_ff} of F32
};

const char * to_string(Part part);
const char * to_string(Select select);
const char * to_string(Activation activation); // "" for from_graph
Result<Activation> parse_activation(const std::string & name);
extern const char * const activation_names; // for messages: "relu, ... or drelu"

// One part of every bundle of a layer.
struct PartLayout {
    Part part = Part::down;
    int type = 0;        // ggml_type of its rows
    uint64_t offset = 0; // bytes from the start of the bundle, a multiple of 32
    uint64_t bytes = 0;  // bytes of one row of n_embd values
};

// Neurons missed per token by a cache of so many slots.
struct MissPoint {
    uint32_t slots;
    double misses;
};

// The bundles of one layer: neuron i is at [offset + i*stride, offset + (i+1)*stride) of file.
struct LayerLayout {
    uint32_t layer = 0;               // the N of its bundle, blk.N.ffn_bundle
    std::string block;                // begins the names of its dense tensors: "blk.N", or "dec.blk.0"
    uint32_t n_ff = 0;                // neurons
    uint32_t file = 0;                // index into Layout::files
    uint64_t offset = 0;              // bytes from the start of that file; any alignment
    uint64_t stride = 0;              // bytes
    float threshold = 0.0f;           // of the activation, unless each neuron has its own
    bool neuron_thresholds = false;   // tensor threshold_name(layer) is there
    uint32_t rank = 0;                // of the predictor; 0: the layer has none
    float predictor_threshold = 0.0f; // a probability in [0, 1)
    uint32_t capacity = 0;            // neurons that calibration saw a window use; 0: not calibrated
    double selected = -1;             // share of its neurons that a token selects; below 0: not calibrated
    std::vector<MissPoint> misses;    // what calibration measured; empty: nothing
    std::vector<PartLayout> parts;

    const PartLayout * find(Part part) const; // nullptr if the bundle has no such part
    bool has_codes() const;                   // down rows are codes of Q8_0 blocks
};

// An ordinary tensor of the file, by name: what the engine needs when it runs without llama.cpp.
struct TensorPlace {
    std::string name;
    int type = 0;
    std::vector<uint64_t> ne; // elements per dimension, ggml order
    uint32_t file = 0;
    uint64_t offset = 0; // bytes from the start of the file
    uint64_t bytes = 0;
};

struct Layout {
    std::vector<std::string> files;  // one, or all files of a split set in order
    std::vector<std::string> labels; // their names in messages
    std::vector<FileStamp> stamps;   // as they were when their headers were read
    uint32_t version = 0;
    Select select = Select::all;
    Activation activation = Activation::from_graph;
    std::string architecture; // general.architecture, or empty
    bool gated = false;
    bool fused = false; // the graph's ffn_up holds the gate rows, then the up rows
    uint32_t n_embd = 0;
    uint32_t align = 0;
    std::vector<LayerLayout> layers;   // ascending by block index
    std::vector<TensorPlace> resident; // every tensor that is not a bundle, by name

    uint64_t resident_bytes() const;
    uint64_t bundle_bytes() const;
    const LayerLayout * find(uint64_t layer) const;
    // The layer of a dense tensor such as "blk.3.ffn_down.weight"; null if it has no bundle.
    const LayerLayout * find_block(const std::string & tensor) const;
    const TensorPlace * tensor(const std::string & name) const;
};

// Reads and validates the layout of a flash-GGUF, or of the split set whose first file is path.
// label replaces path in messages when path is not what the user wrote (for example /proc/self/fd/N).
Result<Layout> read_layout(const std::vector<std::string> & paths, const std::string & label);

// The data of an ordinary tensor, read whole. Code::io if the file does not give it.
Status read_tensor(const Layout & layout, const TensorPlace & place, std::vector<uint8_t> & to);

// The files of the split set that path opens ("m-00001-of-00003.gguf" gives three), or path alone.
std::vector<std::string> split_paths(const std::string & path);

} // namespace gguf_flash
