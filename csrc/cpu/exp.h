// exp and the logistic function on float32, in operations that vectorize at any width.
#pragma once

#include <cstdint>

#include "moe_runtime/bfloat16.h"

namespace moe_runtime {

// exp(x) / 2 = 2^(n - 1) * e^r with r = x - n ln 2, within 1 ulp for -86 <= x < 89. NaN stays NaN; below -86 it is
// exp(-86) / 2, which vanishes beside 1; from 89.07 on it is inf. Halved, n = 128 still has a float32 exponent.
// The polynomial is the minimax fit of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2.
[[gnu::always_inline]] inline float half_exp_f32(float x) {
  constexpr float round_to_integer = 0x1.8p23f;
  constexpr float log2_e = 0x1.715476p0f;
  constexpr float ln2_high = 0x1.63p-1f;  // 9 bits, so n * ln2_high is exact
  constexpr float ln2_low = -0x1.bd0106p-13f;

  x = x > 89.4f ? 89.4f : x;
  x = x < -86.0f ? -86.0f : x;
  const float shifted = x * log2_e + round_to_integer;
  const float n = shifted - round_to_integer;
  const float r = (x - n * ln2_high) - n * ln2_low;
  float p = 0x1.951928p-13f;
  p = p * r + 0x1.6c6360p-10f;
  p = p * r + 0x1.111150p-7f;
  p = p * r + 0x1.555556p-5f;
  p = p * r + 0x1.555556p-3f;
  p = p * r + 0x1.0p-1f;
  const float e = (p * (r * r) + r) + 1.0f;
  const uint32_t exponent = bits_of(shifted) - bits_of(round_to_integer) + 126u;
  return e * float_of(exponent << 23);
}

// 1 / (1 + exp(-x)); halving top and bottom changes no bit.
[[gnu::always_inline]] inline float sigmoid_f32(float x) { return 0.5f / (0.5f + half_exp_f32(-x)); }

}  // namespace moe_runtime
