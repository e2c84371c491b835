// Gated SwiGLU and its gradient, row by row. Legend: R rows, F expert width, H = 2 F.
#pragma once

#include <cstdint>

#include "moe_runtime/parallel.h"

namespace moe_runtime {

// Where a row of h keeps the gate half g and the up half u.
enum class GateUpLayout { concatenated, interleaved };

template <class T>
struct Swiglu {
  const T* h;           // row r starts at h + r * h_stride
  int64_t h_stride;     // elements
  const float* gate_R;  // null means 1
  int64_t num_rows;
  int64_t width;  // F
  GateUpLayout layout;
  T* a;  // [num_rows, width]
};

// a = gate * (silu(g) * u) in float32, rounded once; silu(g) = g * (1 / (1 + exp(-g))).
template <class T>
void swiglu(const Swiglu<T>& args, ParallelFor parallel_for);

template <class T>
struct SwigluBackward {
  const T* da;        // row r starts at da + r * da_stride
  int64_t da_stride;  // elements
  const T* h;
  int64_t h_stride;
  const float* gate_R;  // null means 1
  int64_t num_rows;
  int64_t width;  // F
  GateUpLayout layout;
  T* dh;           // [num_rows, 2 * width]
  float* dgate_R;  // null: not wanted
};

// The gradient of swiglu. dgate[r] = sum over f of da * (silu(g) * u): 16 interleaved partial sums, then halves added.
template <class T>
void swiglu_backward(const SwigluBackward<T>& args, ParallelFor parallel_for);

}  // namespace moe_runtime
