// Private to kernels/: dot products of several rows with many tokens, for one instruction set. Included by
// one source of each, built for it: everything here has internal linkage.
//
// ggml's vec_dot reads both vectors from their storage type for every product. Here a panel of rows is
// expanded once for all tokens, each value of a token's once for all rows, and a piece of the panel stays in
// the first cache level while a batch of tokens passes. Sums keep vec_dot's lanes and their order, so its
// bits: what a token's lanes hold between two pieces is exactly what registers would.
#pragma once

#include "tables.h"

#include <algorithm>

namespace gguf_flash {
namespace {

constexpr size_t token_batch = 16;   // tokens whose sums are kept between two pieces
constexpr size_t piece_values = 512; // of each row
constexpr size_t vectors = 4;        // of sums, that ggml has for F16

inline uint8_t * align_up(void * p) {
    return reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
}

// Calls panel(rows, place) for each Rows rows, the last ones filled up with the first: place is the row's
// number of which results count.
template <size_t Rows, class Panel> void for_panels(const DotBatch & b, Panel panel) {
    for (size_t first = 0; first < b.n_rows; first += Rows) {
        const void * rows[Rows];
        for (size_t r = 0; r < Rows; ++r) {
            rows[r] = b.rows[first + r < b.n_rows ? first + r : first];
        }
        panel(rows, first);
    }
}

// One panel, expanded: pieces(from, count, token, sums) adds to a token's sums, which begin at 0, the values
// [from, from + count); total(sums, r) makes row r's result of them.
template <size_t Rows, size_t Floats, class Piece, class Total>
void run_panel(const DotBatch & b, size_t first, float * sums, Piece piece, Total total) {
    for (size_t t0 = 0; t0 < b.n_tokens; t0 += token_batch) {
        const size_t n_tokens = std::min(token_batch, b.n_tokens - t0);
        std::memset(sums, 0, n_tokens * Floats * sizeof(float));
        for (size_t from = 0; from < b.n; from += piece_values) {
            const size_t count = std::min(piece_values, b.n - from);
            for (size_t t = 0; t < n_tokens; ++t) {
                piece(from, count, static_cast<const uint8_t *>(b.x) + (t0 + t) * b.x_bytes, sums + t * Floats);
            }
        }
        for (size_t r = first; r < std::min(first + Rows, b.n_rows); ++r) {
            for (size_t t = 0; t < n_tokens; ++t) {
                b.out[r * b.n_tokens + t0 + t] = total(sums + t * Floats, r - first);
            }
        }
    }
}

// F16. V: the vector, its width, and what it does.
template <class V, size_t Rows> void dot_f16(const DotBatch & b) {
    constexpr size_t floats = Rows * vectors * V::width;
    float *panel = reinterpret_cast<float *>(align_up(b.scratch)), *sums = panel + Rows * b.n;
    static_assert(floats <= panel_sums, "scratch is reserved for this many");
    for_panels<Rows>(b, [&](const void * const * rows, size_t first) {
        for (size_t r = 0; r < Rows; ++r) {
            for (size_t i = 0; i < b.n; i += V::width) {
                V::store(panel + r * b.n + i, V::halves(static_cast<const uint16_t *>(rows[r]) + i));
            }
        }
        const auto piece = [&](size_t from, size_t count, const uint8_t * token, float * sums_of_token) {
            const uint16_t * x = reinterpret_cast<const uint16_t *>(token);
            typename V::Floats sum[Rows][vectors];
            GGUF_FLASH_UNROLL
            for (size_t k = 0; k < Rows * vectors; ++k) {
                sum[k / vectors][k % vectors] = V::load(sums_of_token + k * V::width);
            }
            for (size_t i = from; i < from + count; i += vectors * V::width) {
                GGUF_FLASH_UNROLL
                for (size_t j = 0; j < vectors; ++j) {
                    const typename V::Floats values = V::halves(x + i + j * V::width);
                    GGUF_FLASH_UNROLL
                    for (size_t r = 0; r < Rows; ++r) {
                        sum[r][j] = V::fma(V::load(panel + r * b.n + i + j * V::width), values, sum[r][j]);
                    }
                }
            }
            GGUF_FLASH_UNROLL
            for (size_t k = 0; k < Rows * vectors; ++k) {
                V::store(sums_of_token + k * V::width, sum[k / vectors][k % vectors]);
            }
        };
        run_panel<Rows, floats>(b, first, sums, piece, [](const float * s, size_t r) {
            const float * row = s + r * vectors * V::width;
            return V::sum_of_four(V::load(row), V::load(row + V::width), V::load(row + 2 * V::width),
                                  V::load(row + 3 * V::width));
        });
    });
}

// The lanes of one vec_dot of codes, summed in its order.
inline float sum_of_lanes(const float * l) {
    const float a = l[4] + l[0], b = l[5] + l[1], c = l[6] + l[2], d = l[7] + l[3];
    return (a + c) + (b + d);
}

inline void read_codes_q8_0(const uint8_t * block, int8_t * codes) {
    std::memcpy(codes, block + 2, block_values);
}

inline void read_codes_q4_0(const uint8_t * block, int8_t * codes) {
    for (size_t i = 0; i < block_values / 2; ++i) {
        codes[i] = int8_t((block[2 + i] & 15) - 8);
        codes[i + block_values / 2] = int8_t((block[2 + i] >> 4) - 8);
    }
}

// Q8_0 and Q4_0, whose blocks meet a token's of Q8_0. C: how a vector of codes of C::rows rows meets them.
template <class C, size_t Bytes, void (*Read)(const uint8_t *, int8_t *)> void dot_codes(const DotBatch & b) {
    constexpr size_t n_rows = C::panel_rows, n_sums = n_rows / C::rows, floats = n_rows * code_lanes;
    int8_t * codes = reinterpret_cast<int8_t *>(align_up(b.scratch)); // [block, row, 32]
    float * scales = reinterpret_cast<float *>(codes + n_rows * b.n); // [block, row]
    float * sums = scales + n_rows * b.n / block_values;
    static_assert(floats <= panel_sums, "scratch is reserved for this many");
    for_panels<n_rows>(b, [&](const void * const * rows, size_t first) {
        for (size_t i = 0; i < b.n / block_values; ++i) {
            for (size_t r = 0; r < n_rows; ++r) {
                const uint8_t * block = static_cast<const uint8_t *>(rows[r]) + i * Bytes;
                Read(block, codes + (i * n_rows + r) * block_values);
                scales[i * n_rows + r] = C::scale(block);
            }
        }
        C::prepare(codes, n_rows * b.n);
        const auto piece = [&](size_t from, size_t count, const uint8_t * token, float * sums_of_token) {
            typename C::Floats sum[n_sums];
            GGUF_FLASH_UNROLL
            for (size_t v = 0; v < n_sums; ++v) {
                sum[v] = C::load(sums_of_token + v * C::rows * code_lanes);
            }
            for (size_t i = from / block_values; i < (from + count) / block_values; ++i) {
                const uint8_t * block = token + i * q8_0_bytes;
                const C x(block + 2, C::scale(block));
                GGUF_FLASH_UNROLL
                for (size_t v = 0; v < n_sums; ++v) {
                    const size_t row = i * n_rows + v * C::rows;
                    sum[v] = x.add(codes + row * block_values, scales + row, sum[v]);
                }
            }
            GGUF_FLASH_UNROLL
            for (size_t v = 0; v < n_sums; ++v) {
                C::store(sums_of_token + v * C::rows * code_lanes, sum[v]);
            }
        };
        run_panel<n_rows, floats>(b, first, sums, piece,
                                  [](const float * s, size_t r) { return sum_of_lanes(s + r * code_lanes); });
    });
}

} // namespace
} // namespace gguf_flash
