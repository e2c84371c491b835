// The scale of FP8 with float32 scales, of a block or of a member.
#pragma once

#include "quantize_cast.h"

namespace moe_runtime {

// max / amax, at most the largest float32; 1 where amax is 0. With power_of_two the mantissa is cleared. NaN stays.
template <Element element>
[[gnu::always_inline]] inline float fp8_multiplier(float amax, bool power_of_two) {
  const float quotient = Encoding<element>::max / amax;
  const float limited = quotient > kLargest ? kLargest : quotient;
  const float exact = amax == 0.0f ? 1.0f : limited;
  const float exponent = float_of(bits_of(exact) & kInfinityBits);
  return power_of_two && exact == exact ? exponent : exact;
}

}  // namespace moe_runtime
