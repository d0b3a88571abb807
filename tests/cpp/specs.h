// Small models that several tests run.
#pragma once

#include "flash_file.h"

#include <string>
#include <vector>

// Two layers with biases, every neuron selected.
inline FlashSpec biased_layers() {
    FlashSpec spec;
    spec.layers = { 0, 5 };
    spec.n_ff = { 400 };
    spec.biases = true;
    return spec;
}

// Every way to select neurons, and down rows that are codes.
inline std::vector<FlashSpec> specs() {
    using gguf_flash::Select;
    const auto spec_of = [](Select select, ggml_type down = GGML_TYPE_F16) {
        FlashSpec spec = biased_layers();
        spec.n_ff = { 320 };
        spec.select = select;
        spec.down = down;
        spec.neuron_thresholds = down == GGML_TYPE_I8 ? 0 : 0.01f;
        return spec;
    };
    return { spec_of(Select::all), spec_of(Select::gate), spec_of(Select::predictor),
             spec_of(Select::all, GGML_TYPE_I8) };
}
