// Private to ffn/: which bundles one read brings, and its description for a Reader.
#pragma once

#include "layer_state.h"

namespace gguf_flash {

// Cuts neurons, ascending, into reads. Neighbours share one if slots are as large as bundles, and if
// reading through what lies between them costs less than another request.
void plan_runs(const LayerState & state, const std::vector<uint32_t> & neurons, std::vector<ReadRun> & runs);

// Segments that a run needs.
int run_segments(const std::vector<uint32_t> & neurons, ReadRun run);

// Describes the read of a run into the slots that its neurons have, with segments[0, run_segments()).
// Returns its bytes.
uint64_t describe_run(const LayerState & state, const std::vector<uint32_t> & neurons, ReadRun run, iovec * segments,
                      ReadOp & op);

} // namespace gguf_flash
