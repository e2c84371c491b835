#include "moe_runtime/dequantize.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "quantize_tensors.h"

namespace moe_runtime::bindings {

namespace {

ScaleKind scale_kind_of(int64_t number) {
  if (number < 0 || number > 2) fail("scale_kind must be 0 (e8m0), 1 (e4m3) or 2 (float32), got ", number);
  return static_cast<ScaleKind>(number);
}

Tensor dequantize(const Tensor& payload_EMP, const Tensor& scale, const std::optional<Tensor>& tensor_scale_E,
                  int64_t element, int64_t scale_kind, int64_t block_rows, int64_t block_cols, bool transposed,
                  bool rotated, ScalarType dtype) {
  check_rank(payload_EMP, 3, "payload");
  check_dtype(payload_EMP, ScalarType::Byte, "payload");
  const int64_t members = payload_EMP.size(0), rows = payload_EMP.size(1);
  const int64_t cols = payload_EMP.size(2) * (element_of(element) == Element::e2m1 ? 2 : 1);
  check_dtype(scale, scale_kind_of(scale_kind) == ScaleKind::float32 ? ScalarType::Float : ScalarType::Byte, "scale");
  if (block_rows < 0 || (block_rows > 0 && block_cols < 1)) fail("a block must be positive, got ", block_cols);
  if (block_rows == 0) {
    check_shape(scale, {members}, "scale");
  } else {
    if (rows % block_rows != 0) fail("rows must be a multiple of ", block_rows, ", got ", rows);
    if (cols % block_cols != 0) fail("cols must be a multiple of ", block_cols, ", got ", cols);
    check_shape(scale, {members, rows / block_rows, cols / block_cols}, "scale");
  }
  if (rotated && (!transposed || cols % 16 != 0)) fail("a rotated matrix is transposed, with whole blocks of 16");
  if (tensor_scale_E) {
    check_shape(*tensor_scale_E, {members}, "tensor_scale");
    check_dtype(*tensor_scale_E, ScalarType::Float, "tensor_scale");
  }
  const Tensor payload = as_dense(payload_EMP), dense_scale = as_dense(scale);
  const Tensor tensor_scale = as_dense(tensor_scale_E.value_or(dense_scale));  // unused where there is none
  const Tensor x_ERC =
      transposed ? empty(payload, {members, cols, rows}, dtype) : empty(payload, {members, rows, cols}, dtype);
  moe_runtime::dequantize(
      {input<uint8_t>(payload), element_of(element), dense_scale.const_data_ptr(), scale_kind_of(scale_kind),
       tensor_scale_E ? input<float>(tensor_scale) : nullptr, members, rows, cols, block_rows, block_cols, transposed,
       rotated, x_ERC.mutable_data_ptr(), value_type_of(dtype, "dtype")},
      torch_threads);
  return x_ERC;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(moe_runtime, library) {
  library.def(
      "dequantize(Tensor payload_EMP, Tensor scale, Tensor? tensor_scale_E, int element, int scale_kind, "
      "int block_rows, int block_cols, bool transposed, bool rotated, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(moe_runtime, CPU, library) { library.impl("dequantize", TORCH_BOX(&dequantize)); }

}  // namespace moe_runtime::bindings
