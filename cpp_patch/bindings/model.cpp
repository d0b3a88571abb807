#include "bindings.h"

#include "gguf_flash/standalone.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace gguf_flash {

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// A model that open_model opened (it computes), or one inside a llama.cpp model (it is observed).
struct PyModel {
    std::shared_ptr<Standalone> standalone;
    std::shared_ptr<Model> model;
};

py::dict to_dict(const Counters & c) {
    py::dict d;
    d["tokens"] = c.tokens;
    d["selected"] = c.selected;
    d["hits"] = c.hits;
    d["misses"] = c.misses;
    d["evictions"] = c.evictions;
    d["ahead"] = c.ahead;
    d["foreseen"] = c.foreseen;
    d["bytes_read"] = c.bytes_read;
    d["requests"] = c.requests;
    d["waves"] = c.waves;
    d["streamed"] = c.streamed;
    d["predictor_ns"] = c.predictor_ns;
    d["io_ns"] = c.io_ns;
    d["mem_ns"] = c.mem_ns;
    d["compute_ns"] = c.compute_ns;
    return d;
}

py::dict settings_dict(const Settings & s) {
    py::dict d;
    d["window"] = s.window;
    d["policy"] = s.policy == Policy::budget ? "budget" : s.policy == Policy::window ? "window" : "score";
    d["depth"] = s.depth != 0 ? py::object(py::int_(s.depth)) : py::none();
    d["lookahead"] = s.lookahead ? "on" : "off";
    d["watch"] = s.watch ? "on" : "off";
    d["gap"] = s.gap;
    d["prefill"] = s.prefill == Prefill::automatic ? "auto" : s.prefill == Prefill::select ? "select" : "stream";
    return d;
}

py::dict memory_dict(const Stats & s) {
    py::dict d;
    d["ram_bytes"] = s.ram_bytes;
    d["floor_bytes"] = s.memory.floor();
    d["total_bytes"] = s.memory.total();
    d["weights_bytes"] = s.memory.weights;
    d["vocabulary_bytes"] = s.memory.vocabulary;
    d["engine_bytes"] = s.memory.engine;
    d["kv_bytes"] = s.memory.kv;
    d["compute_bytes"] = s.memory.compute;
    d["context_bytes"] = s.memory.rest;
    d["least_cache_bytes"] = s.memory.least;
    d["slots_bytes"] = s.memory.cache;
    d["resident_bytes"] = s.resident_bytes;
    d["cache_bytes"] = s.cache_bytes;
    return d;
}

py::dict stats(const PyModel & self) {
    Stats s;
    {
        py::gil_scoped_release release;
        s = self.model->stats();
    }
    py::list layers;
    for (const LayerStats & l : s.layers) {
        py::dict d = to_dict(l.counters);
        d["layer"] = l.layer;
        d["n_ff"] = l.n_ff;
        d["slots"] = l.slots;
        d["read_bytes"] = l.read_bytes;
        d["slot_bytes"] = l.slot_bytes;
        layers.append(d);
    }
    py::dict out;
    out["total"] = to_dict(s.total);
    out["layers"] = layers;
    out["reader"] = s.reader;
    out["memory"] = memory_dict(s);
    out["settings"] = settings_dict(self.model->settings());
    return out;
}

void set_ram(const PyModel & self, const py::object & ram) {
    const std::string value = py::str(ram);
    Status status;
    {
        py::gil_scoped_release release;
        status = self.model->set_ram(value);
    }
    raise_if_failed(status);
}

void check_call(const PyModel & self, const Floats & x) {
    if (self.standalone == nullptr) {
        raise_if_failed(
            { Code::argument, "this model runs inside llama.cpp; open the file with open_model to call ffn" });
    }
    const uint32_t n_embd = self.model->layout().n_embd;
    if (x.ndim() != 2 || x.shape(1) != py::ssize_t(n_embd)) {
        raise_if_failed(
            { Code::argument, "x of shape (n_tokens, " + std::to_string(n_embd) + ") expected, found " +
                                  std::to_string(x.ndim()) + " dimensions" +
                                  (x.ndim() == 2 ? " and " + std::to_string(x.shape(1)) + " columns" : "") });
    }
}

Floats ffn(const PyModel & self, uint32_t layer, const Floats & x, int threads) {
    check_call(self, x);
    Floats out({ x.shape(0), x.shape(1) });
    const float * from = x.data();
    float * to = out.mutable_data();
    Status status;
    {
        py::gil_scoped_release release;
        status = self.standalone->ffn(layer, from, uint32_t(x.shape(0)), to, threads);
    }
    raise_if_failed(status);
    return out;
}

Floats scores(const PyModel & self, uint32_t layer, const Floats & x, int threads) {
    check_call(self, x);
    std::vector<float> values;
    const py::ssize_t n = x.shape(0);
    const float * from = x.data();
    Status status;
    {
        py::gil_scoped_release release;
        status = self.standalone->scores(layer, from, uint32_t(n), values, threads);
    }
    raise_if_failed(status);
    Floats out({ n, n == 0 ? 0 : py::ssize_t(values.size()) / n });
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
}

uint32_t n_ff(const PyModel & self, uint32_t layer) {
    const LayerLayout * found = self.model->layout().find(layer);
    if (found == nullptr) {
        raise_if_failed({ Code::argument, "layer " + std::to_string(layer) + " is not bundled" });
    }
    return found->n_ff;
}

std::vector<uint32_t> layers(const PyModel & self) {
    std::vector<uint32_t> out;
    for (const LayerLayout & l : self.model->layout().layers) {
        out.push_back(l.layer);
    }
    return out;
}

PyModel open_model(const std::string & path, const py::kwargs & kwargs) {
    Settings settings;
    raise_if_failed(settings.set_from_environment());
    for (const auto & [key, value] : kwargs) {
        if (!value.is_none()) {
            raise_if_failed(settings.set(py::str(key), py::str(value)));
        }
    }
    std::shared_ptr<Standalone> standalone;
    Status status;
    {
        py::gil_scoped_release release;
        Result<std::shared_ptr<Standalone>> opened = Standalone::open(path, settings);
        status = opened.status();
        standalone = opened.value();
    }
    raise_if_failed(status);
    return { standalone, std::shared_ptr<Model>(standalone, &standalone->model()) };
}

py::object attached_model(uintptr_t owner) {
    std::shared_ptr<Model> model = attached(reinterpret_cast<const void *>(owner));
    return model == nullptr ? py::object(py::none()) : py::cast(PyModel{ nullptr, model });
}

void raise_last_error(uintptr_t owner) {
    raise_if_failed(take_decode_error());
    std::shared_ptr<Model> model = attached(reinterpret_cast<const void *>(owner));
    if (model != nullptr) {
        raise_if_failed(model->take_last_error());
    }
}

} // namespace

void init_model(py::module_ & m) {
    py::class_<PyModel>(m, "Model", "A flash-GGUF opened for running. Methods may be called from any thread.")
        .def_property_readonly("path", [](const PyModel & s) { return s.model->label(); })
        .def_property_readonly("select", [](const PyModel & s) { return to_string(s.model->layout().select); })
        .def_property_readonly("n_embd", [](const PyModel & s) { return s.model->layout().n_embd; })
        .def_property_readonly("layers", &layers, "Block indices that are bundled, ascending.")
        .def("n_ff", &n_ff, py::arg("layer"), "Number of neurons of a layer.")
        .def("ffn", &ffn, py::arg("layer"), py::arg("x"), py::arg("threads") = 1,
             "FFN of one layer: float32 (n_tokens, n_embd) in and out, biases included. Releases the GIL.")
        .def("scores", &scores, py::arg("layer"), py::arg("x"), py::arg("threads") = 1,
             "What selects a layer's neurons: float32 (n_tokens, n_ff), in gate mode the deciding matrix's output, in "
             "predictor mode the predictor's scores; no columns in mode all.")
        .def("stats", &stats,
             "Counters since the start or the last reset, per layer and in total; memory as it is now.")
        .def(
            "set_ram", &set_ram, py::arg("ram"),
            "Another RAM limit from now on, as the setting ram takes it: the neuron cache shrinks or grows between two "
            "FFN calls, and what the model computes stays the same. From any thread, while others run. Raises "
            "RamTooSmallError, and changes nothing, below what the model needs.")
        .def(
            "check_ram", [](const PyModel & s) { raise_if_failed(s.model->check_ram()); },
            "Raises RamTooSmallError if the RAM limit is below what the model and its contexts need.")
        .def(
            "reset_stats", [](const PyModel & s) { s.model->reset_stats(); }, py::call_guard<py::gil_scoped_release>());
    m.def("open_model", &open_model, py::arg("path"),
          "Opens a flash-GGUF without llama.cpp. Keywords: ram, watch, window, policy, reader, depth, prefill, "
          "threshold, "
          "predictor_threshold, activation, faults; values as in the flash_ffn.* settings. None leaves the default.");
    m.def("attached", &attached_model, py::arg("owner"), "The engine inside the llama_model at this address, or None.");
    m.def("raise_last_error", &raise_last_error, py::arg("owner"),
          "Raises why the last decode of the llama_model at this address failed, if a hook or its engine knows; from "
          "the thread that decoded.");
    m.def(
        "raise_load_error", [] { raise_if_failed(take_load_error()); },
        "Raises why the hooks refused this thread's last load or context, if they did.");
}

} // namespace gguf_flash
