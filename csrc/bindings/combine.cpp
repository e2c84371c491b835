#include "moe_runtime/combine.h"

#include <torch/csrc/stable/library.h>

#include "tensors.h"

namespace moe_runtime::bindings {

namespace {

Tensor gather_sum(const Tensor& y_RD, const Tensor& row_TK) {
  check_rank(y_RD, 2, "y");
  check_rank(row_TK, 2, "row");
  check_dtype(row_TK, ScalarType::Int, "row");
  const Tensor y = as_rows(y_RD);
  const Tensor row = as_dense(row_TK);
  const Tensor out_TD = empty(y, {row.size(0), y.size(1)}, y.scalar_type());
  if (out_TD.numel() == 0) return out_TD;
  const int64_t bad = with_value_type(y.scalar_type(), "y", [&](auto value) {
    using T = decltype(value);
    return moe_runtime::gather_sum(GatherSum<T>{input<T>(y), y.size(0), y.stride(0), y.size(1), input<int32_t>(row),
                                                row.size(0), row.size(1), output<T>(out_TD)},
                                   torch_threads);
  });
  if (bad >= 0) fail("row must lie in [-1, number of rows=", y.size(0), "), got a larger one for token ", bad);
  return out_TD;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_runtime, CPU, library) { library.impl("gather_sum", TORCH_BOX(&gather_sum)); }

}  // namespace moe_runtime::bindings
