// Summing each token's routed rows. Legend: T tokens, K choices, R rows, D width.
#pragma once

#include <cstdint>

#include "moe_runtime/parallel.h"

namespace moe_runtime {

template <class T>
struct GatherSum {
  const T* y;  // row r starts at y + r * y_stride
  int64_t num_rows;
  int64_t y_stride;  // elements
  int64_t width;
  const int32_t* row_TK;  // a negative row contributes nothing
  int64_t num_tokens;
  int64_t top_k;
  T* out;  // [num_tokens, width]
};

// out[t] = sum of y[row[t, k]] over increasing k, from +0 in float32, rounded once.
// Returns -1, or the first token with a row >= num_rows (that row is left out).
template <class T>
int64_t gather_sum(const GatherSum<T>& args, ParallelFor parallel_for);

}  // namespace moe_runtime
