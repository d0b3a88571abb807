#include "bindings.h"

#include "gguf_flash/meter.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

namespace py = pybind11;

namespace gguf_flash {

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using LayerTuple = std::tuple<uint32_t, bool, Floats, std::optional<Floats>>;

std::vector<float> values(const Floats & array) {
    return std::vector<float>(array.data(), array.data() + array.size());
}

std::unique_ptr<Meter> make(const std::string & label, const std::string & activation,
                            const std::vector<LayerTuple> & layers) {
    std::vector<Meter::Layer> specs;
    for (const auto & [layer, gate, weights, bias] : layers) {
        specs.push_back({ layer, gate, values(weights), bias ? values(*bias) : std::vector<float>() });
        if (bias && bias->size() != weights.size()) {
            throw py::value_error("a bias has as many values as there are neurons");
        }
    }
    return std::make_unique<Meter>(label, value_or_raise(parse_activation(activation)), specs);
}

const Meter::Counts & counts(const Meter & self, uint32_t layer) {
    const Meter::Counts * found = self.counts(layer);
    if (found == nullptr) {
        throw py::value_error("layer " + std::to_string(layer) + " is not watched");
    }
    return *found;
}

py::array_t<uint64_t> buckets(const Meter & self, uint32_t layer) {
    const std::vector<uint64_t> & found = counts(self, layer).buckets;
    return py::array_t<uint64_t>(py::ssize_t(found.size()), found.data());
}

} // namespace

void init_meter(py::module_ & m) {
    give_callback(
        py::class_<Meter>(
            m, "Meter",
            "Counts the scores of a dense model's neurons, and cuts the small ones, through "
            "llama_context_params.cb_eval. It must outlive the context, and be used by one thread at a time."),
        &Meter::on_node)
        .def(py::init(&make), py::arg("label"), py::arg("activation"), py::arg("layers"),
             "layers are (layer, whether ffn_gate decides, weights float32 [n_ff], bias float32 [n_ff] or None).")
        .def(
            "set_thresholds",
            [](Meter & self, uint32_t layer, const Floats & thresholds) {
                raise_if_failed(self.set_thresholds(layer, values(thresholds)));
            },
            py::arg("layer"), py::arg("thresholds"), "float32 [n_ff], or empty to cut nothing.")
        .def("clear", &Meter::clear, "Forgets all counts and the error; thresholds stay.")
        .def(
            "check", [](const Meter & self) { raise_if_failed(self.check()); },
            "Raises UnsupportedError if values could not be read or were not finite.")
        .def("buckets", &buckets, py::arg("layer"), "uint64 (16384): scores by the upper 14 bits of a float.")
        .def(
            "zeros", [](const Meter & self, uint32_t layer) { return counts(self, layer).zeros; }, py::arg("layer"))
        .def("values", [](const Meter & self, uint32_t layer) { return counts(self, layer).values; }, py::arg("layer"));
}

} // namespace gguf_flash
