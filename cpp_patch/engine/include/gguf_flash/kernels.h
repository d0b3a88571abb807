// Arithmetic on rows of weights: y += a * w for each storage type, one function table per
// instruction set, chosen once at run time.
//
// Every table gives the same bits: each element is one multiplication and one addition in float,
// never fused, in the order of the rows. That is what makes the text independent of the machine's
// vector width, of how columns are dealt to threads and of whether rows were expanded first.
// The exceptions are add_codes and silu, which do what ggml's vector code does, fused operations and
// all, so that a Q8_0 model gives the dense model's bits.
#pragma once

#include "gguf_flash/status.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gguf_flash {

constexpr size_t code_lanes = 8; // of ggml's sum of products of Q8_0 blocks

// The values of a block of a down matrix in Q8_0 (SPEC section 4, codes), and one token's activations,
// quantized like it: neuron j of the block is row j.
struct CodeBlock {
    const int8_t * const * rows; // 32 rows of codes, each at the first column wanted
    const int8_t * q;            // 32 codes of the activations, none -128
    const uint16_t * scale;      // of the rows' codes, a half for each column
    float d;                     // of the activations' codes
};

// Rows of weights and tokens, all of n values, the tokens as the rows' type wants them (dot_input_bytes).
struct DotBatch {
    const void * const * rows;
    size_t n_rows;
    const void * x;
    size_t x_bytes; // from one token to the next
    size_t n_tokens, n;
    float * out;     // [n_rows, n_tokens]
    float * scratch; // dot_rows_scratch(n) floats
};
using DotRows = void (*)(const DotBatch & b);

struct Kernels {
    const char * name;
    // y[i] += a * w[i] for i in [0, n); w is n values of the type; n is a multiple of 32 for q8_0, q4_0.
    void (*axpy_f32)(const void * w, float a, float * y, size_t n);
    void (*axpy_f16)(const void * w, float a, float * y, size_t n);
    void (*axpy_bf16)(const void * w, float a, float * y, size_t n);
    void (*axpy_q8_0)(const void * w, float a, float * y, size_t n);
    void (*axpy_q4_0)(const void * w, float a, float * y, size_t n);
    // y[i] += a[0]*w[i], then += a[1]*w[ld + i], ... for n_rows rows of floats.
    void (*accumulate)(const float * w, size_t ld, const float * a, size_t n_rows, float * y, size_t n);
    // For each lane l < code_lanes and column i < n, with s the sum of q[4l + r] * rows[4l + r][i] for r < 4:
    // acc[l*ld + i] = fma(scale[i] * d, s, acc[l*ld + i]). These are the lanes of ggml's vec_dot for Q8_0.
    void (*add_codes)(const CodeBlock & block, float * acc, size_t ld, size_t n);
    // Lists the i < n whose mark is not 0, ascending; out has room for n. Returns how many.
    size_t (*list_marked)(const uint32_t * marks, size_t n, uint32_t * out);
    // v / (1 + exp(-v)), as ggml's own graphs have it.
    float (*silu)(float v);
    // The batch's products with the sums of ggml's vec_dot as it is when built for the same instructions;
    // n is a multiple of 64. Null: one by one is all there is.
    DotRows dot_f16, dot_q8_0, dot_q4_0;
};

// All tables this processor runs, scalar first.
std::vector<const Kernels *> available_kernels();
// The widest, or the one GGUF_FLASH_SIMD names ("scalar", "avx2", "avx512", "neon"); chosen at the first call.
const Kernels & kernels();

// ggml's dot product of a row of weights with x wants x in a type of its own, which depends on the
// row's. Bytes of n values in it; 0 when it takes the floats as they are.
size_t dot_input_bytes(int ggml_type, size_t n);
// x[0..n) in that type; not for a type that takes floats.
void convert_dot_input(int ggml_type, const float * x, size_t n, void * out);
// The product of a row of n values with x, floats or converted as the type wants it.
float dot_row(int ggml_type, const void * row, const void * x, size_t n);

// The batch's products, each with the bits of dot_row. has_dot_rows: they take less time together than alone.
void dot_rows(int ggml_type, const DotBatch & b);
bool has_dot_rows(int ggml_type, size_t n);
size_t dot_rows_scratch(size_t n);

// out[i] = the lanes of column i (lane l at lanes[l*ld + i]) summed in the order of ggml's vec_dot.
void sum_lanes(const float * lanes, size_t ld, float * out, size_t n);
// The half that begins a Q8_0 block, and its 32 codes.
float code_scale(const uint8_t * block);
const int8_t * code_values(const uint8_t * block);

// Columns of a row may be cut only at multiples of this many values, for any ggml type.
size_t column_block(int ggml_type);
// y[0..n) += a * row[first..first+n) for a row of any ggml type; first is a multiple of column_block,
// scratch holds n floats.
void axpy_row(int ggml_type, const void * row, size_t first, size_t n, float a, float * y, float * scratch);
// out[0..n) = row[first..first+n) as floats.
void expand_row(int ggml_type, const void * row, size_t first, size_t n, float * out);

} // namespace gguf_flash
