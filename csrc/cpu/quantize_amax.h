// The largest finite magnitude of each member: what formats with one scale a member need before they can encode.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "quantize_tile.h"
#include "widest.h"

namespace moe_runtime {

// One running maximum a member, of magnitudes as bits; its result does not depend on the order of reports.
class MemberMaxima {
 public:
  explicit MemberMaxima(int64_t members) : most_(new std::atomic<uint32_t>[static_cast<size_t>(members)]()) {}

  void report(int64_t member, uint32_t bits) {
    std::atomic<uint32_t>& most = most_[static_cast<size_t>(member)];
    uint32_t seen = most.load(std::memory_order_relaxed);
    while (bits > seen && !most.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  }

  float get(int64_t member) const {
    return float_of(most_[static_cast<size_t>(member)].load(std::memory_order_relaxed));
  }

 private:
  std::unique_ptr<std::atomic<uint32_t>[]> most_;
};

[[gnu::always_inline]] inline uint32_t finite_magnitude_bits(float value) {
  const uint32_t bits = magnitude_bits(value);
  return bits < kInfinityBits ? bits : 0u;
}

struct FiniteMaximum {
  [[gnu::always_inline]] static void run(const MatrixStack& in, int64_t begin, int64_t end, MemberMaxima& maxima) {
    switch (in.type) {
      case ValueType::float32:
        return run_rows(static_cast<const float*>(in.x), in, begin, end, maxima);
      case ValueType::bfloat16:
        return run_rows(static_cast<const bfloat16*>(in.x), in, begin, end, maxima);
      case ValueType::float16:
        return run_rows(static_cast<const float16*>(in.x), in, begin, end, maxima);
    }
  }

  template <class T>
  [[gnu::always_inline]] static void run_rows(const T* from, const MatrixStack& in, int64_t begin, int64_t end,
                                              MemberMaxima& maxima) {
    for (int64_t row = begin; row < end; ++row) {
      const T* __restrict x = from + row * in.cols;
      uint32_t largest = 0;
      for (int64_t c = 0; c < in.cols; ++c) largest = std::max(largest, finite_magnitude_bits(load(x + c)));
      maxima.report(row / in.rows, largest);
    }
  }
};

inline void find_finite_maxima(const MatrixStack& in, MemberMaxima& maxima, ParallelFor parallel_for) {
  const int64_t row_bytes = in.cols * (in.type == ValueType::float32 ? 4 : 2);
  for_ranges(parallel_for, in.members * in.rows, row_grain(row_bytes),
             [&](int64_t begin, int64_t end) { run_widest<FiniteMaximum>(in, begin, end, maxima); });
}

}  // namespace moe_runtime
