// Private to format/: the predictor's part of a flash-GGUF (SPEC sections 3 and 4).
#pragma once

#include "gguf_flash/layout.h"
#include "key_reader.h"

namespace gguf_flash::format {

// R21: rank and threshold of every layer; nothing unless the predictor selects.
Status read_predictor_keys(const KeyReader & keys, Layout & layout);
// R22: every predictor's tensors are there and fit.
Status check_predictor_tensors(const KeyReader & keys, const Layout & layout);
// R23: calibration keys that are there have their values; keeps the capacities.
Status read_calibration_keys(const KeyReader & keys, Layout & layout);

} // namespace gguf_flash::format
