#include "bindings.h"

PYBIND11_MODULE(_core, m) {
    m.doc() = "The gguf_flash engine. Use it through gguf_flash.open_model and gguf_flash.FlashLlama.";
    gguf_flash::init_model(m);
    gguf_flash::init_layout(m);
    gguf_flash::init_rows(m);
    gguf_flash::init_machine(m);
    gguf_flash::init_device(m);
    gguf_flash::init_recorder(m);
    gguf_flash::init_meter(m);
    gguf_flash::init_interrupt(m);
}
