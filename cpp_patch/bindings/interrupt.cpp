#include "bindings.h"

#include <atomic>

namespace py = pybind11;

namespace gguf_flash {

namespace {

struct Interrupt {
    std::atomic<bool> asked{ false };

    // For llama_context_params.abort_callback, which every node of a graph calls.
    static bool answer(void * data) { return static_cast<Interrupt *>(data)->asked.load(std::memory_order_relaxed); }
};

} // namespace

void init_interrupt(py::module_ & m) {
    give_callback(py::class_<Interrupt>(m, "Interrupt",
                                        "Ends a decode through llama_context_params.abort_callback. It must outlive "
                                        "the context; any thread may use it."),
                  &Interrupt::answer)
        .def(py::init<>())
        .def_property(
            "asked", [](const Interrupt & s) { return s.asked.load(); },
            [](Interrupt & s, bool value) { s.asked.store(value); }, "Whether the decode under way is to end.");
}

} // namespace gguf_flash
