#include "bindings.h"

namespace py = pybind11;

namespace gguf_flash {

namespace {

const char * exception_class(Code code) {
    switch (code) {
        case Code::not_flash: return "NotFlashError";
        case Code::corrupt: return "CorruptFileError";
        case Code::version: return "VersionError";
        case Code::unsupported: return "UnsupportedError";
        case Code::ram_too_small: return "RamTooSmallError";
        case Code::io: return "IoError";
        default: return "ArgumentError";
    }
}

} // namespace

void raise_if_failed(const Status & status) {
    if (status.ok()) {
        return;
    }
    const py::object type = py::module_::import("gguf_flash.errors").attr(exception_class(status.code()));
    PyErr_SetString(type.ptr(), status.message().c_str());
    throw py::error_already_set();
}

} // namespace gguf_flash
