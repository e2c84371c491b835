// How the kernels get threads: the caller passes a function that runs a body over disjoint ranges.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe_runtime {

using RangeBody = void (*)(int64_t begin, int64_t end, void* context);

// Calls body on disjoint ranges that together cover [0, size); a range is not shorter than `grain` but for the last.
// No kernel's result depends on where the ranges are cut.
using ParallelFor = void (*)(int64_t size, int64_t grain, RangeBody body, void* context);

template <class Body>
void for_ranges(ParallelFor parallel_for, int64_t size, int64_t grain, const Body& body) {
  parallel_for(
      size, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

// Rows worth handing to a second thread: 128 KiB of traffic takes about as long as waking one.
inline int64_t row_grain(int64_t bytes_per_row) {
  return std::max<int64_t>(1, (int64_t{1} << 17) / std::max<int64_t>(1, bytes_per_row));
}

}  // namespace moe_runtime
