// What every binding needs of torch: argument checks, row views, outputs, threads. LibTorch stable ABI only.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>

#include "moe_runtime/bfloat16.h"
#include "moe_runtime/parallel.h"

namespace moe_runtime::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Python sees std::invalid_argument as ValueError.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline void check_rank(const Tensor& tensor, int64_t rank, const char* name) {
  if (tensor.dim() != rank) fail(name, " must have ", rank, " dimensions, got ", tensor.dim());
  if (!tensor.is_cpu()) fail(name, " must be on the CPU, got another device");
}

inline void check_size(const Tensor& tensor, int64_t dim, int64_t size, const char* name) {
  if (tensor.size(dim) != size) fail(name, " must have size ", size, " in dim ", dim, ", got ", tensor.size(dim));
}

inline void check_dtype(const Tensor& tensor, ScalarType dtype, const char* name) {
  if (tensor.scalar_type() != dtype) {
    fail(name, " must be ", torch::headeronly::toString(dtype), ", got ",
         torch::headeronly::toString(tensor.scalar_type()));
  }
}

// The values of a matrix as rows of adjacent elements; only a strided last dimension costs a copy.
inline Tensor as_rows(const Tensor& matrix) {
  return matrix.size(1) <= 1 || matrix.stride(1) == 1 ? matrix : torch::stable::contiguous(matrix);
}

inline Tensor as_dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, dtype);
}

template <class T>
const T* input(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* output(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls body with a value of the C++ type that stores `dtype`.
template <class Body>
auto with_value_type(ScalarType dtype, const char* name, const Body& body) {
  if (dtype == ScalarType::Float) return body(float{});
  if (dtype == ScalarType::BFloat16) return body(bfloat16{});
  fail(name, " must be float32 or bfloat16, got ", torch::headeronly::toString(dtype));
}

inline void torch_threads(int64_t size, int64_t grain, RangeBody body, void* context) {
  torch::stable::parallel_for(0, size, grain, [=](int64_t begin, int64_t end) { body(begin, end, context); });
}

}  // namespace moe_runtime::bindings
