#include "gguf_flash/layout.h"

#include "block_names.h"
#include "checksum_keys.h"
#include "down_scale.h"
#include "ggml.h"
#include "gguf_flash/round.h"
#include "key_reader.h"
#include "predictor_keys.h"
#include "split_set.h"
#include "threshold_keys.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iterator>
#include <set>

namespace gguf_flash {

namespace {

using format::Header;
using format::is_weight_type;
using format::KeyReader;
using format::TensorInfo;
using format::Value;

constexpr uint64_t part_align = 32; // parts start here, for vector loads

constexpr uint64_t max_n_embd = 1 << 24;
constexpr size_t max_layers = 1 << 16;

// Turns the headers of one file, or of a split set, into a Layout; one method per group of rules.
class LayoutReader : private KeyReader {
public:
    LayoutReader(const std::string & label, std::vector<Header> headers)
        : KeyReader(label, headers[0]), headers_(std::move(headers)) {}

    Result<Layout> run() {
        for (auto step :
             { &LayoutReader::version, &LayoutReader::parts, &LayoutReader::listed_layers, &LayoutReader::blocks,
               &LayoutReader::types, &LayoutReader::align, &LayoutReader::activation, &LayoutReader::thresholds,
               &LayoutReader::predictors, &LayoutReader::calibration, &LayoutReader::sparsity, &LayoutReader::checksums,
               &LayoutReader::tensors, &LayoutReader::bundles, &LayoutReader::places, &LayoutReader::dense_matrices,
               &LayoutReader::predictor_tensors, &LayoutReader::threshold_tensors, &LayoutReader::down_scales }) {
            Status status = (this->*step)();
            if (!status.ok()) {
                return status;
            }
        }
        return std::move(out_);
    }

private:
    Status version() {
        const Value * v = find("flash_ffn.version");
        if (v == nullptr) {
            return bad(Code::not_flash,
                       "it is an ordinary GGUF without the key 'flash_ffn.version'; make a "
                       "flash-GGUF of it with gguf-flash convert",
                       4);
        }
        if (!v->is(format::value_u32)) {
            return missing("flash_ffn.version", "a u32");
        }
        if (v->numbers[0] != 1) {
            return bad(Code::version,
                       "flash_ffn.version 1 expected, found " + std::to_string(uint32_t(v->numbers[0])) +
                           "; install a newer gguf_flash or convert the model again",
                       5);
        }
        out_.version = 1;
        const Value * arch = find("general.architecture");
        out_.architecture = arch != nullptr && arch->is(format::value_string) ? arch->strings[0] : "";
        return {};
    }

    Status select() {
        const Value * v = find("flash_ffn.select");
        if (v == nullptr || !v->is(format::value_string)) {
            return missing("flash_ffn.select", "a string");
        }
        const std::string & name = v->strings[0];
        if (name != "all" && name != "gate" && name != "predictor") {
            return bad(Code::unsupported,
                       "selection 'all', 'gate' or 'predictor' expected, found '" + name.substr(0, 40) +
                           "'; install a newer gguf_flash",
                       7);
        }
        out_.select = name == "all" ? Select::all : name == "gate" ? Select::gate : Select::predictor;
        Status status = boolean("flash_ffn.gated", out_.gated);
        return status.ok() ? boolean("flash_ffn.fused", out_.fused) : status;
    }

    Status align() {
        uint64_t align = 0;
        Status status = integer("flash_ffn.bundle.align", align);
        if (status.ok() && (align < part_align || align > 65536 || (align & (align - 1)) != 0)) {
            return corrupt("flash_ffn.bundle.align is " + std::to_string(align) +
                               ", a power of two from 32 to 65536 expected",
                           11);
        }
        out_.align = uint32_t(align);
        return status;
    }

    Status activation() {
        const Value * v = find("flash_ffn.activation");
        if (v == nullptr) {
            return {};
        }
        if (!v->is(format::value_string)) {
            return missing("flash_ffn.activation", "a string");
        }
        Result<Activation> parsed = parse_activation(v->strings[0]);
        if (!parsed.ok() || parsed.value() == Activation::from_graph) {
            return bad(Code::unsupported,
                       "activation " + std::string(activation_names) + " expected, found '" +
                           v->strings[0].substr(0, 40) + "'; install a newer gguf_flash",
                       18);
        }
        if (parsed.value() == Activation::drelu && !out_.gated) {
            return bad(Code::unsupported, "activation drelu is one of gated FFNs, and this file's have no gate", 18);
        }
        out_.activation = parsed.value();
        return {};
    }

    Status listed_layers() {
        const Value * v = find("flash_ffn.layers");
        if (v == nullptr || !v->is_array_of(format::value_u32)) {
            return missing("flash_ffn.layers", "an array of u32");
        }
        if (v->numbers.size() > max_layers) {
            return corrupt("flash_ffn.layers lists " + std::to_string(v->numbers.size()) + " layers, at most " +
                               std::to_string(max_layers) + " expected",
                           8);
        }
        double last = -1;
        for (double n : v->numbers) {
            if (n <= last) {
                last = -1;
                break;
            }
            last = n;
            LayerLayout layer;
            layer.layer = uint32_t(n);
            out_.layers.push_back(layer);
        }
        if (last < 0) {
            return corrupt("flash_ffn.layers is empty or not ascending", 8);
        }
        return {};
    }

    Status parts() {
        Status status = select();
        if (!status.ok()) {
            return status;
        }
        const Value * v = find("flash_ffn.bundle.parts");
        if (v == nullptr || !v->is_array_of(format::value_string)) {
            return missing("flash_ffn.bundle.parts", "an array of strings");
        }
        if (out_.select != Select::gate && out_.gated) {
            parts_.push_back(Part::gate);
        }
        if (out_.select != Select::gate || out_.gated) {
            parts_.push_back(Part::up);
        }
        parts_.push_back(Part::down);
        bool same = v->strings.size() == parts_.size() && !(out_.fused && !out_.gated);
        for (size_t i = 0; same && i < parts_.size(); ++i) {
            same = v->strings[i] == to_string(parts_[i]);
        }
        if (!same) {
            return corrupt("flash_ffn.bundle.parts does not fit flash_ffn.select, gated and fused", 9);
        }
        return {};
    }

    // Collects tensors of all files; bundles by layer, the rest as resident.
    Status tensors() {
        Status unlisted;
        std::set<std::string> names;
        bundles_.assign(out_.layers.size(), TensorPlace());
        for (size_t f = 0; f < headers_.size(); ++f) {
            for (const TensorInfo & info : headers_[f].tensors) {
                if (!names.insert(info.name).second) {
                    return corrupt("tensor '" + info.name + "' appears in two files", 20);
                }
                TensorPlace place{ info.name, int(info.type), info.ne, uint32_t(f), info.offset, info.bytes };
                uint64_t layer = 0;
                if (!block_named(info.name, bundle_name, layer)) {
                    out_.resident.push_back(std::move(place));
                    continue;
                }
                const LayerLayout * known = out_.find(layer);
                if (known == nullptr) {
                    unlisted = corrupt("tensor '" + info.name + "' exists but flash_ffn.layers does not list it", 12);
                    continue;
                }
                bundles_[size_t(known - out_.layers.data())] = std::move(place);
            }
        }
        std::sort(out_.resident.begin(), out_.resident.end(),
                  [](const TensorPlace & a, const TensorPlace & b) { return a.name < b.name; });
        for (size_t i = 0; unlisted.ok() && i < bundles_.size(); ++i) {
            if (bundles_[i].name.empty()) {
                return corrupt("tensor '" + bundle_name(out_.layers[i].layer) + "' is missing", 12);
            }
        }
        return unlisted;
    }

    Status types() {
        uint64_t n_embd = 0;
        Status status = integer("flash_ffn.n_embd", n_embd);
        const Value * v = find("flash_ffn.bundle.types");
        if (!status.ok()) {
            return status;
        }
        if (v == nullptr || !v->is_array_of(format::value_u32)) {
            return missing("flash_ffn.bundle.types", "an array of u32");
        }
        if (n_embd == 0 || n_embd > max_n_embd || v->numbers.size() != out_.layers.size() * parts_.size()) {
            return corrupt("flash_ffn.bundle.types has " + std::to_string(v->numbers.size()) + " values for " +
                               std::to_string(out_.layers.size() * parts_.size()) + " parts of " +
                               std::to_string(n_embd) + " columns",
                           10);
        }
        out_.n_embd = uint32_t(n_embd);
        size_t i = 0;
        for (LayerLayout & layer : out_.layers) {
            for (Part part : parts_) {
                status = status.ok() ? place(layer, part, v->numbers[i++]) : status;
            }
        }
        return status;
    }

    // Puts a part of a type (a number that the file gives) behind those that the layer's bundles have.
    Status place(LayerLayout & layer, Part part, double type) {
        PartLayout p;
        p.part = part;
        p.type = type < GGML_TYPE_COUNT ? int(type) : -1;
        const bool known = is_weight_type(p.type) || (part == Part::down && p.type == GGML_TYPE_I8);
        if (!known || out_.n_embd % uint64_t(ggml_blck_size(ggml_type(p.type))) != 0) {
            return corrupt("part '" + std::string(to_string(part)) + "' of layer " + std::to_string(layer.layer) +
                               " has type " + std::to_string(int64_t(type)) +
                               ", which is unknown or does not divide rows of " + std::to_string(out_.n_embd),
                           10);
        }
        p.bytes = ggml_row_size(ggml_type(p.type), out_.n_embd);
        p.offset = layer.parts.empty() ? 0 : round_up(layer.parts.back().offset + layer.parts.back().bytes, part_align);
        layer.parts.push_back(p);
        return {};
    }

    Status bundles() {
        for (size_t i = 0; i < out_.layers.size(); ++i) {
            LayerLayout & layer = out_.layers[i];
            const TensorPlace & place = bundles_[i];
            const std::string name = bundle_name(layer.layer);
            if (place.type != GGML_TYPE_I8 || place.ne.size() != 2 || place.ne[0] == 0 || place.ne[1] == 0) {
                return corrupt("tensor '" + name + "' is not a two-dimensional I8 tensor", 13);
            }
            if (place.ne[1] > UINT32_MAX) {
                return corrupt("tensor '" + name + "' claims " + std::to_string(place.ne[1]) +
                                   " neurons, less than 2^32 expected",
                               13);
            }
            const PartLayout & last = layer.parts.back();
            if (place.ne[0] < last.offset + last.bytes || place.ne[0] % out_.align != 0) {
                return corrupt("tensor '" + name + "' has a stride of " + std::to_string(place.ne[0]) +
                                   " bytes: its parts need " + std::to_string(last.offset + last.bytes) +
                                   " in a multiple of " + std::to_string(out_.align),
                               14);
            }
            layer.n_ff = uint32_t(place.ne[1]);
            layer.stride = place.ne[0];
            layer.file = place.file;
            layer.offset = place.offset;
        }
        return {};
    }

    Status thresholds() {
        std::vector<double> values;
        Status status = numbers("flash_ffn.threshold", format::value_f32, { out_.layers.size(), 18, false }, values);
        for (size_t i = 0; status.ok() && i < values.size(); ++i) {
            out_.layers[i].threshold = float(values[i]);
        }
        return status;
    }

    Status blocks() { return format::read_block_names(*this, out_); }
    Status predictors() { return format::read_predictor_keys(*this, out_); }
    Status calibration() { return format::read_calibration_keys(*this, out_); }
    Status down_scales() { return format::check_down_scales(*this, out_); }
    Status checksums() { return format::check_checksum_keys(*this, out_); }
    Status sparsity() { return format::check_sparsity_keys(*this, out_); }
    Status threshold_tensors() { return format::check_threshold_tensors(*this, out_); }
    Status predictor_tensors() { return format::check_predictor_tensors(*this, out_); }

    Status places() {
        for (size_t i = 0; i < headers_.size(); ++i) {
            Status status =
                format::check_places(headers_[i], i == 0 ? label_ : "file " + std::to_string(i + 1) + " of " + label_);
            if (!status.ok()) {
                return status;
            }
        }
        return {};
    }

    // What a bundle replaces must be gone; what gate mode keeps must be there.
    Status dense_matrices() {
        for (const LayerLayout & layer : out_.layers) {
            const std::string block = layer.block + ".ffn_";
            for (Part part : { Part::gate, Part::up, Part::down }) {
                const TensorPlace * dense = out_.tensor(block + to_string(part) + ".weight");
                const bool deciding = out_.select == Select::gate && part == (out_.gated ? Part::gate : Part::up);
                if (!deciding && dense != nullptr) {
                    return corrupt("tensor '" + dense->name + "' is present beside the bundle that replaces it", 17);
                }
                if (deciding && (dense == nullptr || dense->ne.size() != 2 || dense->ne[0] != out_.n_embd ||
                                 dense->ne[1] != layer.n_ff || !is_weight_type(dense->type))) {
                    return corrupt("tensor '" + block + to_string(part) +
                                       ".weight', which decides in gate mode, is "
                                       "missing or not weights of " +
                                       std::to_string(out_.n_embd) + " by " + std::to_string(layer.n_ff),
                                   17);
                }
            }
        }
        return {};
    }

    std::vector<Header> headers_;
    std::vector<Part> parts_;
    std::vector<TensorPlace> bundles_; // one per listed layer
    Layout out_;
};

} // namespace

// What the user knows a file as: for one that was opened again through /proc, where that leads.
static std::string shown_path(const std::string & path) {
    char name[PATH_MAX];
    const bool link = path.rfind("/proc/self/fd/", 0) == 0;
    const ssize_t n = link ? readlink(path.c_str(), name, sizeof(name)) : -1;
    return n > 0 ? std::string(name, size_t(n)) : path;
}

Result<Layout> read_layout(const std::vector<std::string> & paths, const std::string & label) {
    if (paths.empty()) {
        return Status(Code::argument, "no file was given; pass the path of a flash-GGUF");
    }
    std::vector<std::string> labels = { label };
    std::transform(paths.begin() + 1, paths.end(), std::back_inserter(labels), shown_path);
    Result<std::vector<Header>> headers = format::read_set(paths, labels);
    if (!headers.ok()) {
        return headers.status();
    }
    const size_t n_files = headers.value().size();
    std::vector<FileStamp> stamps;
    for (const Header & header : headers.value()) {
        stamps.push_back(header.stamp);
    }
    Result<Layout> layout = LayoutReader(label, std::move(headers.value())).run();
    if (layout.ok()) {
        layout.value().files.assign(paths.begin(), paths.begin() + long(n_files));
        labels.resize(n_files);
        layout.value().labels = std::move(labels);
        layout.value().stamps = std::move(stamps);
    }
    return layout;
}

std::vector<std::string> split_paths(const std::string & path) {
    // "<prefix>-00001-of-00003.gguf"
    constexpr size_t tail = 20;
    unsigned no = 0, count = 0;
    int used = 0;
    if (path.size() <= tail ||
        std::sscanf(path.c_str() + path.size() - tail, "-%5u-of-%5u.gguf%n", &no, &count, &used) != 2 ||
        size_t(used) != tail || no != 1 || count < 2) {
        return { path };
    }
    std::vector<std::string> paths;
    for (unsigned i = 1; i <= count; ++i) {
        char name[32];
        std::snprintf(name, sizeof(name), "-%05u-of-%05u.gguf", i, count);
        paths.push_back(path.substr(0, path.size() - tail) + name);
    }
    return paths;
}

} // namespace gguf_flash
