// ggml's own conversion of rows, for the converter: what it writes is what the engine reads.
#include "bindings.h"

#include "ggml.h"

#include <pybind11/numpy.h>

#include <cctype>

namespace py = pybind11;

namespace gguf_flash {

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

ggml_type type_named(const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
        const ggml_type_traits * traits = ggml_get_type_traits(ggml_type(t));
        std::string known = traits->type_name == nullptr || traits->blck_size == 0 ? "" : traits->type_name;
        if (known.size() == name.size() && std::equal(known.begin(), known.end(), name.begin(), [](char a, char b) {
                return std::toupper(a) == std::toupper(b);
            })) {
            return ggml_type(t);
        }
    }
    raise_if_failed({ Code::argument, "unknown weight type '" + name + "'; use ggml's names, such as F16 or Q8_0" });
    return GGML_TYPE_COUNT;
}

void check_rows(ggml_type type, py::ssize_t k) {
    if (k <= 0 || k % ggml_blck_size(type) != 0) {
        raise_if_failed({ Code::argument, std::string("rows of type ") + ggml_type_name(type) + " hold a multiple of " +
                                              std::to_string(ggml_blck_size(type)) + " values, found " +
                                              std::to_string(k) });
    }
}

Bytes quantize(const std::string & type_name, const Floats & rows) {
    const ggml_type type = type_named(type_name);
    if (rows.ndim() != 2) {
        raise_if_failed({ Code::argument, "rows of shape (n, k) expected" });
    }
    check_rows(type, rows.shape(1));
    if (ggml_quantize_requires_imatrix(type)) {
        raise_if_failed({ Code::unsupported, "type " + type_name +
                                                 " needs an importance matrix; quantize the dense "
                                                 "model with llama-quantize instead" });
    }
    const int64_t n = rows.shape(0), k = rows.shape(1);
    Bytes out({ py::ssize_t(n), py::ssize_t(ggml_row_size(type, k)) });
    const float * from = rows.data();
    uint8_t * to = out.mutable_data();
    py::gil_scoped_release release;
    if (type == GGML_TYPE_F32) {
        std::copy_n(reinterpret_cast<const uint8_t *>(from), size_t(n * k) * sizeof(float), to);
    } else {
        ggml_quantize_chunk(type, from, to, 0, n, k, nullptr);
    }
    return out;
}

Floats dequantize(const std::string & type_name, const Bytes & rows, py::ssize_t k) {
    const ggml_type type = type_named(type_name);
    check_rows(type, k);
    if (rows.ndim() != 2 || rows.shape(1) != py::ssize_t(ggml_row_size(type, k))) {
        raise_if_failed({ Code::argument, "rows of shape (n, " + std::to_string(ggml_row_size(type, k)) +
                                              ") bytes expected for type " + type_name });
    }
    const py::ssize_t n = rows.shape(0);
    Floats out({ n, k });
    const uint8_t * from = rows.data();
    float * to = out.mutable_data();
    py::gil_scoped_release release;
    if (type == GGML_TYPE_F32) {
        std::copy_n(from, size_t(n * k) * sizeof(float), reinterpret_cast<uint8_t *>(to));
    } else {
        ggml_get_type_traits(type)->to_float(from, to, n * k);
    }
    return out;
}

} // namespace

void init_rows(py::module_ & m) {
    m.def("quantize", &quantize, py::arg("type_name"), py::arg("rows"),
          "float32 (n, k) to uint8 (n, row_bytes) with ggml's quantizer of the named type.");
    m.def("dequantize", &dequantize, py::arg("type_name"), py::arg("rows"), py::arg("k"),
          "uint8 (n, row_bytes) to float32 (n, k).");
}

} // namespace gguf_flash
