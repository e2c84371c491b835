// What the quantizing bindings share: elements and value types by number, stacks of matrices.
#pragma once

#include "moe_runtime/quantize.h"
#include "tensors.h"

namespace moe_runtime::bindings {

// The numbers that kernels/quantize/_native.py passes.
inline Element element_of(int64_t number) {
  if (number < 0 || number > 2) fail("element must be 0 (e4m3), 1 (e5m2) or 2 (e2m1), got ", number);
  return static_cast<Element>(number);
}

inline ValueType value_type_of(ScalarType dtype, const char* name) {
  if (dtype == ScalarType::Float) return ValueType::float32;
  if (dtype == ScalarType::BFloat16) return ValueType::bfloat16;
  if (dtype == ScalarType::Half) return ValueType::float16;
  fail(name, " must be float32, bfloat16 or float16, got ", torch::headeronly::toString(dtype));
}

inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> sizes, const char* name) {
  check_rank(tensor, static_cast<int64_t>(sizes.size()), name);
  int64_t dim = 0;
  for (const int64_t size : sizes) check_size(tensor, dim++, size, name);
}

inline void check_output(const Tensor& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype,
                         const char* name) {
  check_shape(tensor, sizes, name);
  check_dtype(tensor, dtype, name);
  if (!tensor.is_contiguous()) fail(name, " must be contiguous, got a strided tensor");
}

}  // namespace moe_runtime::bindings
