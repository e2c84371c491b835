// Routing tokens to experts and gathering their rows. Legend: T tokens, K choices, S = T * K slots, R rows, E experts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe_runtime/parallel.h"

namespace moe_runtime {

// Stable counting sort of slots by expert. slot_R[r] is the slot of routed row r, row_S its inverse (-1 where the id is
// negative: such slots go last, in slot order), ends_E[e] the end row of expert e.
// Returns -1, or the first slot whose id is >= num_experts (the outputs are then unspecified).
template <class Id>
int64_t route(const Id* ids_S, int64_t num_slots, int64_t num_experts, int32_t* slot_R, int32_t* row_S, int32_t* ends_E,
              ParallelFor parallel_for);

struct GatherRows {
  const std::byte* x;  // row t starts at x + t * x_stride
  int64_t num_tokens;
  int64_t x_stride;  // bytes
  int64_t row_bytes;
  const int32_t* slot_R;
  int64_t num_rows;
  int64_t num_live;  // rows past it become zero
  int64_t top_k;
  std::byte* y;  // [num_rows, row_bytes]
};

// y[r] = x[slot[r] / top_k]. Returns -1, or the first live row whose slot names no token (left unwritten).
int64_t gather_rows(const GatherRows& args, ParallelFor parallel_for);

}  // namespace moe_runtime
