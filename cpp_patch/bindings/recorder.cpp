#include "bindings.h"

#include "gguf_flash/recorder.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace gguf_flash {

namespace {

std::unique_ptr<Recorder> make(const std::string & label, uint32_t n_embd,
                               const std::vector<std::pair<uint32_t, uint32_t>> & layers, uint32_t tokens,
                               bool magnitudes, bool inputs_only) {
    std::vector<Recorder::Shape> shapes;
    for (const auto & [layer, n_ff] : layers) {
        shapes.push_back({ layer, n_ff });
    }
    return std::make_unique<Recorder>(label, n_embd, shapes, tokens, magnitudes, inputs_only);
}

// A view: numpy keeps the recorder alive, and sees its memory change when it is fed again.
py::array view(const py::object & owner, const char * type, const void * data, uint32_t rows, size_t columns) {
    return py::array(py::dtype(type), { py::ssize_t(rows), py::ssize_t(columns) }, data, owner);
}

Recorder::Rows rows_of(const py::object & self, uint32_t layer) {
    return value_or_raise(self.cast<const Recorder &>().rows(layer));
}

py::array x(const py::object & self, uint32_t layer) {
    const Recorder::Rows rows = rows_of(self, layer);
    return view(self, "float16", rows.x, rows.tokens, self.cast<const Recorder &>().n_embd());
}

py::object active(const py::object & self, uint32_t layer) {
    const Recorder::Rows rows = rows_of(self, layer);
    return rows.active == nullptr ? py::object(py::none())
                                  : view(self, "uint8", rows.active, rows.tokens, (size_t(rows.shape.n_ff) + 7) / 8);
}

py::object magnitudes(const py::object & self, uint32_t layer) {
    const Recorder::Rows rows = rows_of(self, layer);
    return rows.magnitudes == nullptr ? py::object(py::none())
                                      : view(self, "uint8", rows.magnitudes, rows.tokens, rows.shape.n_ff);
}

} // namespace

void init_recorder(py::module_ & m) {
    give_callback(py::class_<Recorder>(
                      m, "Recorder",
                      "Records FFN inputs and active neurons through llama_context_params.cb_eval. It must outlive "
                      "the context, and be used by one thread at a time."),
                  &Recorder::on_node)
        .def(py::init(&make), py::arg("label"), py::arg("n_embd"), py::arg("layers"), py::arg("tokens"),
             py::arg("magnitudes") = false, py::arg("inputs_only") = false,
             "label names the model in messages; layers are (layer, n_ff); tokens is the most between two clears. "
             "inputs_only is for a model whose FFNs are on flash.")
        .def("clear", &Recorder::clear, "Forgets all rows and the error.")
        .def(
            "check", [](const Recorder & self, uint32_t tokens) { raise_if_failed(self.check(tokens)); },
            py::arg("tokens"), "Raises UnsupportedError unless every computed layer was recorded for this many tokens.")
        .def_property_readonly("layers", &Recorder::layers, "The layers computed since the last clear, ascending.")
        .def("x", &x, py::arg("layer"), "float16 (tokens, n_embd), a view until the recorder is fed again.")
        .def("active", &active, py::arg("layer"),
             "uint8 (tokens, ceil(n_ff / 8)), bit order as numpy.packbits(bitorder=\"little\"); a view. "
             "None if only inputs were asked for.")
        .def("magnitudes", &magnitudes, py::arg("layer"), "uint8 (tokens, n_ff), a view; None unless asked for.")
        .def_property_readonly("buffer_bytes", &Recorder::buffer_bytes, "Bytes allocated for rows.");
    m.def("magnitude_code", &magnitude_code, py::arg("h"), "The uint8 that stands for |h|; 0 for zero only.");
}

} // namespace gguf_flash
