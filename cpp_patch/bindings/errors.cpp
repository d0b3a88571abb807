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
    // A damaged file's text, or a path, need not be UTF-8.
    const std::string & text = status.message();
    const py::object message =
        py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text.data(), py::ssize_t(text.size()), "replace"));
    PyErr_SetObject(type.ptr(), message.ptr());
    throw py::error_already_set();
}

} // namespace gguf_flash
