// Private to kernels/: the rows that accumulate adds. Included by one source of each instruction set:
// everything here has internal linkage.
#pragma once

#include "tables.h"

namespace gguf_flash {
namespace {

constexpr size_t most_active = 32;

// Calls add(list, factors, n) for every few rows: the n of them whose factor is not 0, as offsets into
// their matrix. Which factors are zero is past predicting: the loops over columns ask no more.
template <class Add> void for_active(size_t ld, const float * a, size_t n_rows, Add add) {
    for (size_t first = 0; first < n_rows; first += most_active) {
        size_t list[most_active], n = 0;
        float factors[most_active];
        for (size_t r = first; r < n_rows && r < first + most_active; ++r) {
            list[n] = r * ld;
            factors[n] = a[r];
            n += a[r] != 0.0f;
        }
        add(list, factors, n);
    }
}

} // namespace
} // namespace gguf_flash
