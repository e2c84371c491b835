// The small encodings: casting float32 to them and back, in operations that vectorize at any width.
#pragma once

#include <cstdint>

#include "moe_runtime/bfloat16.h"
#include "moe_runtime/quantize.h"

namespace moe_runtime {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kLargest = 0x1.fffffep127f;
constexpr uint32_t kFp8NaN = 0x7fu;  // NaN in E4M3 and in E5M2

// Powers of two as compile-time float32.
constexpr float exp2_of(int exponent) {
  float value = 1.0f;
  for (; exponent > 0; --exponent) value *= 2.0f;
  for (; exponent < 0; ++exponent) value *= 0.5f;
  return value;
}

template <Element element>
struct Encoding;

template <>
struct Encoding<Element::e4m3> {
  static constexpr int bits = 8, mantissa = 3, bias = 7;
  static constexpr float max = 448.0f;
  static constexpr uint32_t nan = kFp8NaN;
};

template <>
struct Encoding<Element::e5m2> {
  static constexpr int bits = 8, mantissa = 2, bias = 15;
  static constexpr float max = 57344.0f;
  static constexpr uint32_t nan = kFp8NaN;
};

template <>
struct Encoding<Element::e2m1> {
  static constexpr int bits = 4, mantissa = 1, bias = 1;
  static constexpr float max = 6.0f;
  static constexpr uint32_t nan = 0;  // it has none
};

// The code nearest to value, ties to even, for |value| that rounds to at most the encoding's largest. Bits above the
// encoding's width are anything.
template <Element element>
[[gnu::always_inline]] inline uint32_t cast_in_range(float value) {
  using E = Encoding<element>;
  constexpr int dropped = 23 - E::mantissa;
  constexpr uint32_t sign_bit = 1u << (E::bits - 1);
  // Beside 2^(e + dropped) a value of exponent e keeps mantissa + 1 bits, n * 2^(e - mantissa): the sum's last bits are
  // n. A subnormal takes the least normal exponent. The code is n + ((e + bias - 1) << mantissa), and `last` is even.
  constexpr uint32_t last = (0u - (static_cast<uint32_t>(128 - E::bias) << E::mantissa)) & 0xffu;
  const uint32_t bits = bits_of(value);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t least = bits_of(exp2_of(1 - E::bias));
  const uint32_t own = size & kInfinityBits;
  const uint32_t exponent = own > least ? own : least;
  const uint32_t sum = bits_of(float_of(size) + float_of(exponent + ((static_cast<uint32_t>(dropped) << 23) | last)));
  return (sum + (exponent >> dropped)) | ((bits >> (32 - E::bits)) & sign_bit);
}

// The code nearest to value, ties to even, and no other bits; saturates; NaN becomes the encoding's.
template <Element element>
[[gnu::always_inline]] inline uint32_t cast(float value) {
  using E = Encoding<element>;
  const uint32_t bits = bits_of(value);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t most = bits_of(E::max);
  const uint32_t clamped = (size < most ? size : most) | (bits & 0x80000000u);
  return size > kInfinityBits ? E::nan : cast_in_range<element>(float_of(clamped)) & ((1u << E::bits) - 1u);
}

// E2M1 code of value: of its two neighbors the farther from 0 if its distance from the nearer exceeds uniform.
[[gnu::always_inline]] inline uint32_t cast_stochastically(float value, float uniform) {
  const uint32_t bits = bits_of(value);
  const uint32_t size = bits & 0x7fffffffu;
  const uint32_t most = bits_of(6.0f);
  const uint32_t clamped = size < most ? size : most;
  const bool small = clamped < bits_of(1.0f);
  const float magnitude = float_of(clamped);
  const uint32_t above_half = magnitude >= 0.5f ? 1u : 0u;
  const uint32_t below = small ? above_half : (clamped >> 22) - 252u;  // the code of the neighbor nearer to 0
  const float low = small ? (magnitude >= 0.5f ? 0.5f : 0.0f) : float_of(clamped & 0xffc00000u);
  const float steps = small ? 2.0f : float_of((255u << 23) - (clamped & kInfinityBits));  // 1 / (distance of the two)
  const uint32_t up = (magnitude - low) * steps > uniform ? 1u : 0u;
  const uint32_t code = (below + up) | ((bits >> 28) & 8u);
  return size > kInfinityBits ? 0u : code;
}

// The value of a code; bits above the encoding's width must be 0.
template <Element element>
[[gnu::always_inline]] inline float decode(uint32_t code) {
  using E = Encoding<element>;
  constexpr int dropped = 23 - E::mantissa;
  constexpr uint32_t sign_bit = 1u << (E::bits - 1);
  constexpr uint32_t first_normal = 1u << E::mantissa;
  const uint32_t size = code & (sign_bit - 1u);
  const uint32_t rebiased = (size << dropped) + (static_cast<uint32_t>(127 - E::bias) << 23);
  const float subnormal = float_of(rebiased + (1u << 23)) - exp2_of(1 - E::bias);
  uint32_t bits = size < first_normal ? bits_of(subnormal) : rebiased;
  if (element == Element::e4m3) bits = size == 0x7fu ? 0x7fc00000u : bits;
  if (element == Element::e5m2) bits = size > 0x7cu ? 0x7fc00000u : size == 0x7cu ? kInfinityBits : bits;
  return float_of(bits | (code & sign_bit) << (32 - E::bits));
}

// 2^(code - 127); 255 is NaN.
[[gnu::always_inline]] inline float decode_e8m0(uint32_t code) {
  const uint32_t bits = code == 0u ? 0x00400000u : code << 23;
  return float_of(code == 255u ? 0x7fc00000u : bits);
}

// Philox4x32-10: four words of a 128-bit counter and the 64-bit key.
struct PhiloxWords {
  uint32_t word[4];
};

[[gnu::always_inline]] inline PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A multiple of 2^-24 in [0, 1).
[[gnu::always_inline]] inline float uniform_of(uint32_t word) { return static_cast<float>(word >> 8) * 0x1.0p-24f; }

}  // namespace moe_runtime
