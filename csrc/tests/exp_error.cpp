// Prints the largest error, in units of the last place, of the kernels' exp and sigmoid over every 499th float32 of the
// range where each is accurate, then "special values: ok" if the rest behaves as exp.h says.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "../cpu/exp.h"

namespace {

using namespace moe_runtime;

double ulps(float actual, double expected) {
  const int exponent = std::max(std::ilogb(expected), -126);
  return std::abs(static_cast<double>(actual) - expected) / std::ldexp(1.0, exponent - 23);
}

template <class Actual, class Expected>
double largest_error(float low, float high, const Actual& actual, const Expected& expected) {
  double largest = 0.0;
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 499) {
    const float x = float_of(static_cast<uint32_t>(bits));
    if (x >= low && x <= high) largest = std::max(largest, ulps(actual(x), expected(static_cast<double>(x))));
  }
  return largest;
}

bool special_values_hold() {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float huge = std::numeric_limits<float>::max();
  return std::isnan(half_exp_f32(nan)) && half_exp_f32(inf) == inf && half_exp_f32(huge) == inf &&
         half_exp_f32(-inf) > 0.0f && half_exp_f32(-inf) < 1e-37f && half_exp_f32(-huge) == half_exp_f32(-inf) &&
         std::isnan(sigmoid_f32(nan)) && sigmoid_f32(inf) == 1.0f && sigmoid_f32(-inf) == 0.0f &&
         sigmoid_f32(huge) == 1.0f && sigmoid_f32(-huge) == 0.0f && sigmoid_f32(0.0f) == 0.5f;
}

}  // namespace

int main() {
  std::printf("half_exp %.3f\n", largest_error(-86.0f, 89.0f, half_exp_f32, [](double x) { return std::exp(x) / 2; }));
  std::printf("sigmoid %.3f\n",
              largest_error(-87.0f, 1e30f, sigmoid_f32, [](double x) { return 1 / (1 + std::exp(-x)); }));
  std::printf("special values: %s\n", special_values_hold() ? "ok" : "wrong");
}
