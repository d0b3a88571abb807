// Down rows of a Q8_0 model: every product and sum as ggml's vec_dot of Q8_0 rows makes them, so that
// the output has the dense model's bits.
//
// ggml quantizes the activations h in blocks of 32 neurons and adds each block, times both scales, to
// eight lanes of which lane l holds the block's neurons 4l to 4l + 3. A neuron that is not selected has
// h = 0 and so adds nothing: only the rows that are there are touched. What a call adds up is kept per
// lane until its last wave; waves and chunks end where blocks do.
#include "ggml.h"
#include "gguf_flash/kernels.h"
#include "run.h"

#include <cstring>

namespace gguf_flash {

namespace {

constexpr size_t kept_lanes = 4 << 20; // bytes that are not worth giving back

} // namespace

float * FfnRun::lanes(uint32_t token, size_t column) const {
    return reinterpret_cast<float *>(session().lanes.data()) + size_t(token) * code_lanes * n_embd_ + column;
}

// A prompt's lanes are many times those of one token: the first call that needs few gives them back.
void FfnRun::reserve_lanes() {
    if (!state_.codes) {
        return;
    }
    Session & s = session();
    s.code_scratch.resize(std::max<size_t>(s.code_scratch.size(), size_t(nth_)));
    const size_t bytes = size_t(in_.n_tokens) * code_lanes * n_embd_ * sizeof(float);
    const bool fits = bytes <= s.lanes.bytes() && (s.lanes.bytes() <= kept_lanes || s.lanes.bytes() / 4 <= bytes);
    if (!fits && !s.lanes.allocate(bytes)) {
        fail(without_memory("reserve " + std::to_string(bytes) + " bytes for a micro-batch of " +
                            std::to_string(in_.n_tokens) + " tokens of '" + op_.model_->label() + "'"));
    }
}

// Lists the blocks of selection[first, end) and where each of their rows is, from a column on.
void FfnRun::gather_block_rows(CodeScratch & scratch, uint32_t first, uint32_t end, size_t column) const {
    const Session & s = session();
    const size_t offset = state_.layout.find(Part::down)->offset + column;
    scratch.blocks.clear();
    scratch.rows.clear();
    scratch.place.clear();
    for (uint32_t i = first; i < end; ++i) {
        const uint32_t neuron = s.selection[i].neuron, block = neuron / code_block;
        const int8_t * row = reinterpret_cast<const int8_t *>(s.rows[i] + offset);
        if (scratch.blocks.empty() || scratch.blocks.back() != block) {
            scratch.blocks.push_back(block);
            scratch.rows.insert(scratch.rows.end(), code_block, row); // for those that are not selected, any
        }
        const uint32_t place = uint32_t(scratch.blocks.size() - 1) * code_block + neuron % code_block;
        scratch.rows[place] = row;
        scratch.place.push_back(place);
    }
}

void FfnRun::quantize_h(CodeScratch & scratch, uint32_t token, uint32_t first, uint32_t end) const {
    const float * h = session().h.data() + size_t(token) * (end - first);
    scratch.h.assign(scratch.blocks.size() * code_block, 0.0f);
    for (size_t i = 0; i < scratch.place.size(); ++i) {
        scratch.h[scratch.place[i]] = h[i];
    }
    scratch.quantized.resize(dot_input_bytes(GGML_TYPE_Q8_0, scratch.h.size()));
    convert_dot_input(GGML_TYPE_Q8_0, scratch.h.data(), scratch.h.size(), scratch.quantized.data());
}

// Adds the codes of selection[first, end), whole blocks, to this thread's columns of every token's lanes.
void FfnRun::accumulate_codes(uint32_t first, uint32_t end) {
    size_t column, n;
    my_columns(column, n);
    if (n == 0) {
        return;
    }
    CodeScratch & scratch = session().code_scratch[size_t(ith_)];
    gather_block_rows(scratch, first, end, column);
    const uint16_t * scale = reinterpret_cast<const uint16_t *>(state_.down_scale.data()) + column;
    const size_t block_bytes = dot_input_bytes(GGML_TYPE_Q8_0, code_block);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        quantize_h(scratch, t, first, end);
        for (size_t b = 0; b < scratch.blocks.size(); ++b) {
            const uint8_t * quantized = scratch.quantized.data() + b * block_bytes;
            const CodeBlock block = { scratch.rows.data() + b * code_block, code_values(quantized),
                                      scale + size_t(scratch.blocks[b]) * n_embd_, code_scale(quantized) };
            kernels().add_codes(block, lanes(t, column), n_embd_, n);
        }
    }
}

void FfnRun::clear_lanes() {
    size_t column, n;
    my_columns(column, n);
    for (uint32_t t = 0; state_.codes && t < in_.n_tokens; ++t) {
        for (size_t lane = 0; lane < code_lanes; ++lane) {
            std::memset(lanes(t, column) + lane * n_embd_, 0, n * sizeof(float));
        }
    }
}

void FfnRun::sum_lanes_up() {
    size_t column, n;
    my_columns(column, n);
    for (uint32_t t = 0; t < in_.n_tokens; ++t) {
        sum_lanes(lanes(t, column), n_embd_, in_.out + t * in_.out_stride + column, n);
    }
}

} // namespace gguf_flash
