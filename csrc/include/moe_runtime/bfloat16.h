// bfloat16 as storage: the upper half of a float32, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace moe_runtime {

struct bfloat16 {
  uint16_t bits;
};

[[gnu::always_inline]] inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

[[gnu::always_inline]] inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

[[gnu::always_inline]] inline float load(const float* from) { return *from; }

[[gnu::always_inline]] inline float load(const bfloat16* from) { return float_of(uint32_t{from->bits} << 16); }

[[gnu::always_inline]] inline void store(float* to, float value) { *to = value; }

// Every NaN becomes the one quiet NaN: rounding its payload could carry into infinity.
[[gnu::always_inline]] inline void store(bfloat16* to, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

}  // namespace moe_runtime
