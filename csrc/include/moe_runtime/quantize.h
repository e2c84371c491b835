// Quantizing stacks of matrices, both directions from one read. Legend: E members, R rows, C columns.
//
// What the bytes mean is in moe_runtime/formats; the values here are those of kernels/quantize/_reference.py, bit for
// bit. A direction whose payload is null is not written.
#pragma once

#include <cstdint>
#include <optional>

#include "moe_runtime/parallel.h"

namespace moe_runtime {

enum class Element { e4m3, e5m2, e2m1 };

enum class ValueType { float32, bfloat16, float16 };

struct MatrixStack {
  const void* x;  // [members, rows, cols], contiguous
  ValueType type;
  int64_t members;
  int64_t rows;
  int64_t cols;
};

// Row-wise: payload [E, R, C], scale [E, R / b, C / B]. Column-wise: payload [E, C, R], scale [E, C / b, R / B]. b x B
// is the block; a four-bit payload has half as many bytes in its last dimension.
template <class Scale>
struct QuantizedOut {
  uint8_t* payload = nullptr;
  Scale* scale = nullptr;
};

// Blocks of 1 x 32, scales E8M0.
struct QuantizeMx {
  MatrixStack in;
  Element element;
  QuantizedOut<uint8_t> row, column;
};

// Blocks of 1 x 128 or 128 x 128, scales float32.
struct QuantizeFp8Block {
  MatrixStack in;
  Element element;
  bool two_dimensional;
  bool power_of_two;
  QuantizedOut<float> row, column;
};

// One scale a member, which both directions share.
struct QuantizeFloat8 {
  MatrixStack in;
  Element element;
  bool power_of_two;
  const float* amax_E;  // null: taken from x
  uint8_t* row;
  uint8_t* column;
  float* scale_E;
};

// Blocks of 1 x 16 or 16 x 16, scales E4M3 and one float32 a member and direction.
struct QuantizeNvfp4 {
  MatrixStack in;
  bool two_dimensional;
  bool random_hadamard;         // of the columns
  std::optional<int64_t> seed;  // absent: round to nearest
  const float* amax_E;          // null: taken from x
  QuantizedOut<uint8_t> row, column;
  float* row_tensor_scale_E;     // null: that direction is not wanted
  float* column_tensor_scale_E;  // an empty payload is null too
};

void quantize_mx(const QuantizeMx& args, ParallelFor parallel_for);

void quantize_fp8_block(const QuantizeFp8Block& args, ParallelFor parallel_for);

void quantize_float8(const QuantizeFloat8& args, ParallelFor parallel_for);

void quantize_nvfp4(const QuantizeNvfp4& args, ParallelFor parallel_for);

}  // namespace moe_runtime
