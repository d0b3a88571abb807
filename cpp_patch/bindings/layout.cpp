#include "bindings.h"

#include "ggml.h"
#include "gguf_flash/layout.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace gguf_flash {

namespace {

py::dict to_dict(const Layout & layout, const LayerLayout & l) {
    py::list types;
    for (const PartLayout & p : l.parts) {
        std::string name = ggml_type_name(ggml_type(p.type));
        for (char & c : name) {
            c = char(std::toupper(c));
        }
        types.append(name);
    }
    py::dict d;
    d["layer"] = l.layer;
    d["block"] = l.block;
    d["n_ff"] = l.n_ff;
    d["stride"] = l.stride;
    d["file"] = layout.files[l.file];
    d["offset"] = l.offset;
    d["threshold"] = l.threshold;
    d["neuron_thresholds"] = l.neuron_thresholds;
    d["rank"] = l.rank;
    d["predictor_threshold"] = l.predictor_threshold;
    d["capacity"] = l.capacity;
    d["types"] = types;
    return d;
}

py::dict read(const std::string & path) {
    const Layout layout = value_or_raise(read_layout(split_paths(path), path));
    py::list parts, layers;
    for (const PartLayout & p : layout.layers[0].parts) {
        parts.append(to_string(p.part));
    }
    for (const LayerLayout & l : layout.layers) {
        layers.append(to_dict(layout, l));
    }
    py::dict d;
    d["version"] = layout.version;
    d["select"] = to_string(layout.select);
    d["activation"] = to_string(layout.activation);
    d["n_embd"] = layout.n_embd;
    d["gated"] = layout.gated;
    d["fused"] = layout.fused;
    d["align"] = layout.align;
    d["parts"] = parts;
    d["layers"] = layers;
    d["resident_bytes"] = layout.resident_bytes();
    d["bundle_bytes"] = layout.bundle_bytes();
    return d;
}

} // namespace

void init_layout(py::module_ & m) {
    m.def(
        "read_layout", &read, py::arg("path"),
        "The engine's own view of a flash-GGUF (gguf_flash/format/SPEC.md), validated: offsets and strides in bytes.");
}

} // namespace gguf_flash
