// Private to bindings/: what module.cpp lists, and the way an engine status becomes an exception.
#pragma once

#include "gguf_flash/status.h"

#include <pybind11/pybind11.h>

namespace gguf_flash {

void init_model(pybind11::module_ & m);
void init_layout(pybind11::module_ & m);
void init_rows(pybind11::module_ & m);
void init_machine(pybind11::module_ & m);
void init_device(pybind11::module_ & m);
void init_recorder(pybind11::module_ & m);
void init_meter(pybind11::module_ & m);
void init_interrupt(pybind11::module_ & m);

// Raises the class of gguf_flash.errors that belongs to the status; returns when it is ok.
void raise_if_failed(const Status & status);

template <typename T> T value_or_raise(Result<T> result) {
    raise_if_failed(result.status());
    return std::move(result.value());
}

// What llama.cpp's parameters want of an object that it calls back: the properties callback and user_data.
template <typename T, typename Function>
pybind11::class_<T> & give_callback(pybind11::class_<T> && c, Function * function) {
    return c
        .def_property_readonly(
            "callback", [function](const T &) { return reinterpret_cast<uintptr_t>(function); },
            "Address of the function.")
        .def_property_readonly(
            "user_data", [](const T & self) { return reinterpret_cast<uintptr_t>(&self); },
            "The pointer that it gets.");
}

} // namespace gguf_flash
