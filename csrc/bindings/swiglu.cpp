#include "moe_runtime/swiglu.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "tensors.h"

namespace moe_runtime::bindings {

namespace {

GateUpLayout layout_of(bool interleaved) {
  return interleaved ? GateUpLayout::interleaved : GateUpLayout::concatenated;
}

// F, the width of each half of h.
int64_t half_width(const Tensor& h_RH) {
  check_rank(h_RH, 2, "h");
  if (h_RH.size(1) % 2 != 0) fail("h must have an even number of columns, got ", h_RH.size(1));
  return h_RH.size(1) / 2;
}

std::optional<Tensor> as_float32(const std::optional<Tensor>& gate_R, int64_t num_rows) {
  if (!gate_R) return std::nullopt;
  check_rank(*gate_R, 1, "gate");
  check_size(*gate_R, 0, num_rows, "gate");
  if (gate_R->scalar_type() == ScalarType::Float) return as_dense(*gate_R);
  return as_dense(torch::stable::to(*gate_R, ScalarType::Float));
}

const float* input_or_null(const std::optional<Tensor>& gate) { return gate ? input<float>(*gate) : nullptr; }

Tensor swiglu(const Tensor& h_RH, const std::optional<Tensor>& gate_R, bool interleaved) {
  const int64_t width = half_width(h_RH);
  const Tensor h = as_rows(h_RH);
  const std::optional<Tensor> gate = as_float32(gate_R, h.size(0));
  const Tensor a_RF = empty(h, {h.size(0), width}, h.scalar_type());
  with_value_type(h.scalar_type(), "h", [&](auto value) {
    using T = decltype(value);
    moe_runtime::swiglu(Swiglu<T>{input<T>(h), h.stride(0), input_or_null(gate), h.size(0), width,
                                  layout_of(interleaved), output<T>(a_RF)},
                        torch_threads);
  });
  return a_RF;
}

// The second result has no elements where there is no gate.
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& da_RF, const Tensor& h_RH, const std::optional<Tensor>& gate_R,
                                           bool interleaved) {
  const int64_t width = half_width(h_RH);
  const Tensor h = as_rows(h_RH);
  check_rank(da_RF, 2, "da");
  check_size(da_RF, 0, h.size(0), "da");
  check_size(da_RF, 1, width, "da");
  check_dtype(da_RF, h.scalar_type(), "da");
  const Tensor da = as_rows(da_RF);
  const std::optional<Tensor> gate = as_float32(gate_R, h.size(0));
  const Tensor dh_RH = empty(h, {h.size(0), 2 * width}, h.scalar_type());
  const Tensor dgate_R = empty(h, {gate ? h.size(0) : 0}, ScalarType::Float);
  with_value_type(h.scalar_type(), "h", [&](auto value) {
    using T = decltype(value);
    moe_runtime::swiglu_backward(
        SwigluBackward<T>{input<T>(da), da.stride(0), input<T>(h), h.stride(0), input_or_null(gate), h.size(0), width,
                          layout_of(interleaved), output<T>(dh_RH), gate ? output<float>(dgate_R) : nullptr},
        torch_threads);
  });
  return {dh_RH, dgate_R};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_runtime, CPU, library) {
  library.impl("swiglu", TORCH_BOX(&swiglu));
  library.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}

}  // namespace moe_runtime::bindings
