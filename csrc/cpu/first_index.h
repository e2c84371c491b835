// The smallest index that any thread found wrong.
#pragma once

#include <atomic>
#include <cstdint>

namespace moe_runtime {

class FirstIndex {
 public:
  void report(int64_t index) {
    int64_t seen = first_.load(std::memory_order_relaxed);
    while ((seen < 0 || index < seen) && !first_.compare_exchange_weak(seen, index, std::memory_order_relaxed)) {
    }
  }

  // -1 if nothing was reported.
  int64_t get() const { return first_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> first_{-1};
};

}  // namespace moe_runtime
