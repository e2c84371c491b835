// Every op writes into the tensors that it is given: a parameter keeps its storage when it is quantized again.
#include "moe_runtime/quantize.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "quantize_tensors.h"

namespace moe_runtime::bindings {

namespace {

using MaybeTensor = std::optional<Tensor>;

// x as a contiguous stack; `dense` keeps its storage alive.
struct Input {
  explicit Input(const Tensor& x_ERC) : dense((check_rank(x_ERC, 3, "x"), as_dense(x_ERC))) {
    stack = {dense.const_data_ptr(), value_type_of(dense.scalar_type(), "x"), dense.size(0), dense.size(1),
             dense.size(2)};
  }
  Tensor dense;
  MatrixStack stack;
};

void check_multiple(int64_t size, int64_t multiple, const char* name) {
  if (size % multiple != 0) fail(name, " must be a multiple of ", multiple, ", got ", size);
}

struct BlockShape {
  int64_t across, along;  // in the stored matrix
};

// The checked outputs of one direction, whose stored matrix is rows x cols.
template <class Scale>
QuantizedOut<Scale> outputs(const MaybeTensor& payload, const MaybeTensor& scale, int64_t members, int64_t rows,
                            int64_t cols, BlockShape block, int64_t bits) {
  if (payload.has_value() != scale.has_value()) fail("payload and scale of a direction go together, got one");
  if (!payload) return {};
  check_multiple(rows, block.across, "the dimension across blocks");
  check_multiple(cols, block.along, "the dimension along blocks");
  check_output(*payload, {members, rows, cols * bits / 8}, ScalarType::Byte, "payload");
  check_output(*scale, {members, rows / block.across, cols / block.along},
               sizeof(Scale) == 1 ? ScalarType::Byte : ScalarType::Float, "scale");
  return {output<uint8_t>(*payload), output<Scale>(*scale)};
}

const float* amax_or_null(const MaybeTensor& amax_E, int64_t members) {
  if (!amax_E) return nullptr;
  check_output(*amax_E, {members}, ScalarType::Float, "amax");
  return input<float>(*amax_E);
}

float* tensor_scale_or_null(const MaybeTensor& tensor_scale_E, bool wanted, int64_t members) {
  if (tensor_scale_E.has_value() != wanted) fail("payload and tensor_scale of a direction go together, got one");
  if (!wanted) return nullptr;
  check_output(*tensor_scale_E, {members}, ScalarType::Float, "tensor_scale");
  return output<float>(*tensor_scale_E);
}

void quantize_mx(const Tensor& x_ERC, int64_t element, const MaybeTensor& row_payload, const MaybeTensor& row_scale,
                 const MaybeTensor& column_payload, const MaybeTensor& column_scale) {
  const Input x(x_ERC);
  const auto [_, __, members, rows, cols] = x.stack;
  const int64_t bits = element_of(element) == Element::e2m1 ? 4 : 8;
  moe_runtime::quantize_mx(
      {x.stack, element_of(element), outputs<uint8_t>(row_payload, row_scale, members, rows, cols, {1, 32}, bits),
       outputs<uint8_t>(column_payload, column_scale, members, cols, rows, {1, 32}, bits)},
      torch_threads);
}

void quantize_fp8_block(const Tensor& x_ERC, int64_t element, bool two_dimensional, bool power_of_two,
                        const MaybeTensor& row_payload, const MaybeTensor& row_scale, const MaybeTensor& column_payload,
                        const MaybeTensor& column_scale) {
  const Input x(x_ERC);
  const auto [_, __, members, rows, cols] = x.stack;
  if (element_of(element) == Element::e2m1) fail("element must be 0 (e4m3) or 1 (e5m2), got ", element);
  const BlockShape block{two_dimensional ? 128 : 1, 128};
  moe_runtime::quantize_fp8_block({x.stack, element_of(element), two_dimensional, power_of_two,
                                   outputs<float>(row_payload, row_scale, members, rows, cols, block, 8),
                                   outputs<float>(column_payload, column_scale, members, cols, rows, block, 8)},
                                  torch_threads);
}

void quantize_float8(const Tensor& x_ERC, int64_t element, bool power_of_two, const MaybeTensor& amax_E,
                     const MaybeTensor& row_payload, const MaybeTensor& column_payload, const Tensor& scale_E) {
  const Input x(x_ERC);
  const auto [_, __, members, rows, cols] = x.stack;
  if (element_of(element) == Element::e2m1) fail("element must be 0 (e4m3) or 1 (e5m2), got ", element);
  if (row_payload) check_output(*row_payload, {members, rows, cols}, ScalarType::Byte, "row_payload");
  if (column_payload) check_output(*column_payload, {members, cols, rows}, ScalarType::Byte, "column_payload");
  check_output(scale_E, {members}, ScalarType::Float, "scale");
  moe_runtime::quantize_float8({x.stack, element_of(element), power_of_two, amax_or_null(amax_E, members),
                                row_payload ? output<uint8_t>(*row_payload) : nullptr,
                                column_payload ? output<uint8_t>(*column_payload) : nullptr, output<float>(scale_E)},
                               torch_threads);
}

void quantize_nvfp4(const Tensor& x_ERC, bool two_dimensional, bool random_hadamard, std::optional<int64_t> seed,
                    const MaybeTensor& amax_E, const MaybeTensor& row_payload, const MaybeTensor& row_scale,
                    const MaybeTensor& row_tensor_scale_E, const MaybeTensor& column_payload,
                    const MaybeTensor& column_scale, const MaybeTensor& column_tensor_scale_E) {
  const Input x(x_ERC);
  const auto [_, __, members, rows, cols] = x.stack;
  if (two_dimensional && (random_hadamard || seed)) fail("two_dimensional rounds to nearest and does not rotate");
  const BlockShape block{two_dimensional ? 16 : 1, 16};
  moe_runtime::quantize_nvfp4({x.stack, two_dimensional, random_hadamard, seed, amax_or_null(amax_E, members),
                               outputs<uint8_t>(row_payload, row_scale, members, rows, cols, block, 4),
                               outputs<uint8_t>(column_payload, column_scale, members, cols, rows, block, 4),
                               tensor_scale_or_null(row_tensor_scale_E, row_payload.has_value(), members),
                               tensor_scale_or_null(column_tensor_scale_E, column_payload.has_value(), members)},
                              torch_threads);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(moe_runtime, library) {
  library.def(
      "quantize_mx(Tensor x_ERC, int element, Tensor(a!)? row_payload, Tensor(b!)? row_scale, "
      "Tensor(c!)? column_payload, Tensor(d!)? column_scale) -> ()");
  library.def(
      "quantize_fp8_block(Tensor x_ERC, int element, bool two_dimensional, bool power_of_two, "
      "Tensor(a!)? row_payload, Tensor(b!)? row_scale, Tensor(c!)? column_payload, Tensor(d!)? column_scale) -> ()");
  library.def(
      "quantize_float8(Tensor x_ERC, int element, bool power_of_two, Tensor? amax_E, Tensor(a!)? row_payload, "
      "Tensor(b!)? column_payload, Tensor(c!) scale_E) -> ()");
  library.def(
      "quantize_nvfp4(Tensor x_ERC, bool two_dimensional, bool random_hadamard, int? seed, Tensor? amax_E, "
      "Tensor(a!)? row_payload, Tensor(b!)? row_scale, Tensor(c!)? row_tensor_scale_E, "
      "Tensor(d!)? column_payload, Tensor(e!)? column_scale, Tensor(f!)? column_tensor_scale_E) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_runtime, CPU, library) {
  library.impl("quantize_mx", TORCH_BOX(&quantize_mx));
  library.impl("quantize_fp8_block", TORCH_BOX(&quantize_fp8_block));
  library.impl("quantize_float8", TORCH_BOX(&quantize_float8));
  library.impl("quantize_nvfp4", TORCH_BOX(&quantize_nvfp4));
}

}  // namespace moe_runtime::bindings
