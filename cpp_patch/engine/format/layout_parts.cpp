#include "gguf_flash/layout.h"

#include "ggml.h"
#include "gguf_flash/reader.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>

namespace gguf_flash {

bool block_named(const std::string & name, std::string (*name_of)(uint32_t), uint64_t & block) {
    constexpr size_t begin = 4; // of the number, behind "blk."
    const size_t end = name.find('.', begin);
    const std::string zero = name_of(0); // "blk.0.TAIL"
    if (end == std::string::npos || end == begin || name.compare(0, begin, zero, 0, begin) != 0 ||
        name.compare(end, std::string::npos, zero, begin + 1, std::string::npos) != 0 ||
        (name[begin] == '0' && end > begin + 1)) {
        return false;
    }
    uint64_t number = 0;
    for (size_t i = begin; i < end; ++i) {
        if (name[i] < '0' || name[i] > '9') {
            return false;
        }
        number = std::min<uint64_t>(number * 10 + uint64_t(name[i] - '0'), uint64_t(1) << 40); // more is no layer
    }
    block = number;
    return true;
}

// The name does not end in "weight": upstream's quantizer then leaves the tensor as it is.
std::string bundle_name(uint32_t layer) {
    return "blk." + std::to_string(layer) + ".ffn_bundle";
}

std::string down_scale_name(uint32_t layer) {
    return "blk." + std::to_string(layer) + ".ffn_down_scale";
}

std::string threshold_name(uint32_t layer) {
    return "blk." + std::to_string(layer) + ".ffn_threshold";
}

PredictorNames::PredictorNames(uint32_t layer) {
    const std::string block = "blk." + std::to_string(layer) + ".ffn_pred";
    a = block + "_a.weight";
    b = block + "_b.weight";
    bias = block + "_b.bias";
}

const char * to_string(Part part) {
    static const char * names[] = { "gate", "up", "down" };
    return names[int(part)];
}

const char * to_string(Select select) {
    static const char * names[] = { "all", "gate", "predictor" };
    return names[int(select)];
}

const char * const activation_names = "relu, relu_sqr, silu, gelu, gelu_erf or drelu";

const char * to_string(Activation activation) {
    static const char * names[] = { "", "relu", "relu_sqr", "silu", "gelu", "gelu_erf", "drelu" };
    return names[int(activation)];
}

Result<Activation> parse_activation(const std::string & name) {
    for (Activation a : { Activation::from_graph, Activation::relu, Activation::relu_sqr, Activation::silu,
                          Activation::gelu, Activation::gelu_erf, Activation::drelu }) {
        if (name == to_string(a)) {
            return a;
        }
    }
    return Status(Code::unsupported, "unknown activation '" + name + "'; use " + activation_names);
}

const PartLayout * LayerLayout::find(Part part) const {
    for (const PartLayout & p : parts) {
        if (p.part == part) {
            return &p;
        }
    }
    return nullptr;
}

bool LayerLayout::has_codes() const {
    const PartLayout * down = find(Part::down);
    return down != nullptr && down->type == GGML_TYPE_I8;
}

uint64_t Layout::resident_bytes() const {
    uint64_t sum = 0;
    for (const TensorPlace & t : resident) {
        sum += t.bytes;
    }
    return sum;
}

uint64_t Layout::bundle_bytes() const {
    uint64_t sum = 0;
    for (const LayerLayout & l : layers) {
        sum += l.stride * l.n_ff;
    }
    return sum;
}

const LayerLayout * Layout::find(uint64_t layer) const {
    const auto at = std::lower_bound(layers.begin(), layers.end(), layer,
                                     [](const LayerLayout & l, uint64_t wanted) { return l.layer < wanted; });
    return at != layers.end() && at->layer == layer ? &*at : nullptr;
}

const LayerLayout * Layout::find_block(const std::string & tensor) const {
    const std::string block = tensor.substr(0, tensor.find(".ffn_"));
    for (const LayerLayout & l : layers) {
        if (l.block == block) {
            return &l;
        }
    }
    return nullptr;
}

const TensorPlace * Layout::tensor(const std::string & name) const {
    const auto at = std::lower_bound(resident.begin(), resident.end(), name,
                                     [](const TensorPlace & t, const std::string & wanted) { return t.name < wanted; });
    return at != resident.end() && at->name == name ? &*at : nullptr;
}

Status read_tensor(const Layout & layout, const TensorPlace & place, std::vector<uint8_t> & to) {
    const std::string & path = layout.files[place.file];
    std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
    to.resize(place.bytes);
    if (!file || fseeko(file.get(), off_t(place.offset), SEEK_SET) != 0 ||
        std::fread(to.data(), 1, to.size(), file.get()) != to.size()) {
        const int error = file && !std::ferror(file.get()) ? ENODATA : errno;
        return { Code::io, "cannot read tensor '" + place.name + "' (" + std::to_string(place.bytes) +
                               " bytes at byte " + std::to_string(place.offset) + ") of '" + layout.labels[place.file] +
                               "': " + read_error(error) };
    }
    return {};
}

} // namespace gguf_flash
