// The 16 x 16 Hadamard transform with fixed signs, one transform a column, many columns at a time.
#pragma once

#include <cstdint>

namespace moe_runtime {

constexpr int64_t kHadamardSize = 16;
constexpr uint32_t kHadamardSigns = 0x243fu;  // the first 16 bits of pi's fraction; bit 15 - i is set where d[i] is -1

[[gnu::always_inline]] inline float hadamard_sign(int64_t i) { return kHadamardSigns >> (15 - i) & 1u ? -1.0f : 1.0f; }

// Rows x, x + stride, ... of W values become H x, by butterflies of distance 1, 2, 4, 8 in that order.
template <int64_t W>
[[gnu::always_inline]] inline void butterflies(float* x, int64_t stride) {
  for (int64_t distance = 1; distance < kHadamardSize; distance *= 2) {
    for (int64_t i = 0; i < kHadamardSize; ++i) {
      if (i & distance) continue;
      float* __restrict a = x + i * stride;
      float* __restrict b = x + (i + distance) * stride;
      for (int64_t c = 0; c < W; ++c) {
        const float low = a[c], high = b[c];
        a[c] = low + high;
        b[c] = low - high;
      }
    }
  }
}

// x becomes H (d * x) / 4.
template <int64_t W>
[[gnu::always_inline]] inline void rotate(float* x, int64_t stride) {
  for (int64_t i = 0; i < kHadamardSize; ++i) {
    for (int64_t c = 0; c < W; ++c) x[i * stride + c] *= hadamard_sign(i);
  }
  butterflies<W>(x, stride);
  for (int64_t i = 0; i < kHadamardSize; ++i) {
    for (int64_t c = 0; c < W; ++c) x[i * stride + c] *= 0.25f;
  }
}

// Inverse of rotate: x becomes d * (H x / 4).
template <int64_t W>
[[gnu::always_inline]] inline void rotate_back(float* x, int64_t stride) {
  butterflies<W>(x, stride);
  for (int64_t i = 0; i < kHadamardSize; ++i) {
    for (int64_t c = 0; c < W; ++c) x[i * stride + c] = (x[i * stride + c] * 0.25f) * hadamard_sign(i);
  }
}

}  // namespace moe_runtime
