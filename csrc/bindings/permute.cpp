#include "moe_runtime/permute.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "tensors.h"

namespace moe_runtime::bindings {

namespace {

template <class Id>
void route_or_fail(const Tensor& ids, int64_t num_experts, const Tensor& slot, const Tensor& row, const Tensor& ends) {
  const int64_t bad = moe_runtime::route(input<Id>(ids), ids.numel(), num_experts, output<int32_t>(slot),
                                         output<int32_t>(row), output<int32_t>(ends), torch_threads);
  if (bad >= 0) {
    fail("ids must lie in [-1, num_experts=", num_experts, "), got ", input<Id>(ids)[bad], " for token ",
         bad / ids.size(1), ", choice ", bad % ids.size(1));
  }
}

std::tuple<Tensor, Tensor, Tensor> route(const Tensor& ids_TK, int64_t num_experts) {
  check_rank(ids_TK, 2, "ids");
  if (num_experts < 1) fail("num_experts must be at least 1, got ", num_experts);
  const int64_t num_slots = ids_TK.numel();
  if (num_slots > std::numeric_limits<int32_t>::max()) {
    fail("ids must have fewer than 2^31 elements, as slots are int32, got ", num_slots);
  }
  const Tensor ids = as_dense(ids_TK);
  const Tensor slot_R = empty(ids, {num_slots}, ScalarType::Int);
  const Tensor row_TK = empty(ids, {ids.size(0), ids.size(1)}, ScalarType::Int);
  const Tensor ends_E = empty(ids, {num_experts}, ScalarType::Int);
  const ScalarType dtype = ids.scalar_type();
  if (dtype == ScalarType::Long) {
    route_or_fail<int64_t>(ids, num_experts, slot_R, row_TK, ends_E);
  } else if (dtype == ScalarType::Int) {
    route_or_fail<int32_t>(ids, num_experts, slot_R, row_TK, ends_E);
  } else {
    fail("ids must be int64 or int32, got ", torch::headeronly::toString(dtype));
  }
  return {slot_R, row_TK, ends_E};
}

Tensor gather_rows(const Tensor& x_TD, const Tensor& slot_R, const Tensor& ends_E, int64_t top_k) {
  check_rank(x_TD, 2, "x");
  check_rank(slot_R, 1, "slot");
  check_rank(ends_E, 1, "ends");
  check_dtype(slot_R, ScalarType::Int, "slot");
  check_dtype(ends_E, ScalarType::Int, "ends");
  if (top_k < 1) fail("top_k must be at least 1, got ", top_k);
  if (ends_E.numel() < 1) fail("ends must have at least 1 element, got 0");
  const Tensor x = as_rows(x_TD);
  const Tensor slot = as_dense(slot_R);
  const int64_t num_rows = slot.numel();
  const int64_t width = x.size(1);
  const int64_t num_live = input<int32_t>(ends_E)[(ends_E.numel() - 1) * ends_E.stride(0)];
  if (num_live < 0 || num_live > num_rows) {
    fail("ends[-1] must lie in [0, number of rows=", num_rows, "], got ", num_live);
  }
  const Tensor y_RD = empty(x, {num_rows, width}, x.scalar_type());
  if (y_RD.numel() == 0) return y_RD;
  const int64_t bytes = static_cast<int64_t>(x.element_size());
  const int64_t bad =
      moe_runtime::gather_rows(GatherRows{input<std::byte>(x), x.size(0), x.stride(0) * bytes, width * bytes,
                                          input<int32_t>(slot), num_rows, num_live, top_k, output<std::byte>(y_RD)},
                               torch_threads);
  if (bad >= 0) {
    fail("slot must lie in [0, T * top_k=", x.size(0) * top_k, ") up to row ", num_live, ", got ",
         input<int32_t>(slot)[bad], " at row ", bad);
  }
  return y_RD;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_runtime, CPU, library) {
  library.impl("route", TORCH_BOX(&route));
  library.impl("gather_rows", TORCH_BOX(&gather_rows));
}

}  // namespace moe_runtime::bindings
