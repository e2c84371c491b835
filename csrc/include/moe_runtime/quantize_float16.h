// float16 as storage: IEEE half precision, rounded to nearest even, in operations that vectorize.
#pragma once

#include <cstdint>

#include "moe_runtime/bfloat16.h"

namespace moe_runtime {

struct float16 {
  uint16_t bits;
};

[[gnu::always_inline]] inline float load(const float16* from) {
  const uint32_t bits = from->bits;
  const uint32_t size = bits & 0x7fffu;
  const uint32_t rebiased = (size << 13) + (112u << 23);
  const uint32_t special = rebiased + (112u << 23);                        // infinity and NaN
  const float small = float_of((size << 13) + (113u << 23)) - 0x1.0p-14f;  // subnormal: size * 2^-24, exactly
  const uint32_t magnitude = size < 0x400u ? bits_of(small) : size >= 0x7c00u ? special : rebiased;
  return float_of(magnitude | (bits & 0x8000u) << 16);
}

// NaN becomes the one quiet NaN; from 65520 on a value is infinity.
[[gnu::always_inline]] inline void store(float16* to, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t normal = (size + 0xfffu + ((size >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t small = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);  // 0.5 has steps of 2^-24
  uint32_t half = size < (113u << 23) ? small : normal;
  half = size >= 0x477ff000u ? 0x7c00u : half;
  half = size > 0x7f800000u ? 0x7e00u : half;
  to->bits = static_cast<uint16_t>(half | (size > 0x7f800000u ? 0u : (bits >> 16) & 0x8000u));
}

}  // namespace moe_runtime
