// The values of quantized bytes. Legend: E members, M and N rows and columns of the stored matrix.
#pragma once

#include <cstdint>

#include "moe_runtime/parallel.h"
#include "moe_runtime/quantize.h"

namespace moe_runtime {

enum class ScaleKind { e8m0, e4m3, float32 };

struct Dequantize {
  const uint8_t* payload;  // [E, M, N] codes, two to a byte for e2m1
  Element element;
  const void* scale;  // [E, M / block_rows, N / block_cols], or [E] where block_rows is 0
  ScaleKind scale_kind;
  const float* tensor_scale_E;  // null: 1
  int64_t members, rows, cols;
  int64_t block_rows, block_cols;
  bool transposed;  // the values are [E, N, M]
  bool rotated;     // each 16 values of a row were rotated before they were encoded; only if transposed
  void* x;
  ValueType type;
};

// element * scale, or element * (scale * tensor_scale), in float32; one rounding to the type of x.
void dequantize(const Dequantize& args, ParallelFor parallel_for);

}  // namespace moe_runtime
