#include "reads.h"

#include "gguf_flash/round.h"

namespace gguf_flash {

void plan_runs(const LayerState & state, const std::vector<uint32_t> & neurons, std::vector<ReadRun> & runs) {
    runs.clear();
    const uint64_t stride = state.layout.stride;
    int segments = 0;
    for (uint32_t i = 0; i < neurons.size(); ++i) {
        if (state.aligned && !runs.empty()) {
            ReadRun & run = runs.back();
            const uint64_t between = neurons[i] - neurons[i - 1] - 1;
            const int more = between == 0 ? 1 : 2;
            if (between * stride <= state.gap_bytes && segments + more <= max_segments &&
                (neurons[i] - neurons[run.first] + 1) * stride <= read_limit) {
                ++run.count;
                segments += more;
                continue;
            }
        }
        runs.push_back({ i, 1 });
        segments = 1;
    }
}

int run_segments(const std::vector<uint32_t> & neurons, ReadRun run) {
    int segments = int(run.count);
    for (uint32_t i = run.first + 1; i < run.first + run.count; ++i) {
        segments += neurons[i] != neurons[i - 1] + 1;
    }
    return segments;
}

uint64_t describe_run(const LayerState & state, const std::vector<uint32_t> & neurons, ReadRun run, iovec * segments,
                      ReadOp & op) {
    const uint32_t neuron = neurons[run.first];
    const uint64_t stride = state.layout.stride, lead = state.lead(neuron);
    op = ReadOp();
    op.file = &state.file;
    op.offset = state.bundle_offset(neuron) - lead;
    op.segments = segments;
    op.trash = state.trash;
    const uint64_t length = state.aligned ? stride : round_up(lead + stride, state.file.align());
    uint64_t bytes = 0;
    auto add = [&](uint8_t * to, uint64_t n) {
        segments[op.n_segments++] = { to, size_t(n) };
        bytes += n;
    };
    for (uint32_t i = run.first; i < run.first + run.count; ++i) {
        if (i > run.first && neurons[i] != neurons[i - 1] + 1) {
            add(state.trash, (neurons[i] - neurons[i - 1] - 1) * stride); // nobody looks at it
        }
        add(state.slot_data(state.cache.slot(neurons[i])), length);
    }
    op.needed = state.aligned ? bytes : lead + stride;
    return bytes;
}

} // namespace gguf_flash
