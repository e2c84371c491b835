#include "moe_runtime/quantize.h"
#include "quantize_amax.h"
#include "quantize_fp8_scale.h"
#include "quantize_tile.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kRows = 4, kHeight = 64, kWidth = 128;

// Infinity becomes NaN, so that it is told from a product that overflows, which saturates.
[[gnu::always_inline]] inline void mark_infinity(Tile<kRows, kWidth> tile) {
  for (int64_t r = 0; r < kRows; ++r) {
    float* __restrict x = tile.row(r);
    for (int64_t c = 0; c < kWidth; ++c) x[c] = magnitude_bits(x[c]) < kInfinityBits ? x[c] : float_of(0x7fc00000u);
  }
}

template <Element element>
struct Float8Tiles {
  [[gnu::always_inline]] static void run(const QuantizeFloat8& args, const float* multiplier_E, int64_t begin,
                                         int64_t end) {
    const ToNearest<element> rounding;
    const int64_t rows = args.in.rows, cols = args.in.cols;
    read_patches<kRows, kHeight, kWidth>(
        args.in, begin, end,
        [&](Tile<kRows, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          mark_infinity(tile);
          if (!args.row) return;
          alignas(64) float multiplier[kRows];
          std::fill_n(multiplier, kRows, multiplier_E[at.member]);
          write_rows<kWidth>(tile, at, multiplier, rounding, args.row + (at.member * rows + at.row) * cols + at.column,
                             cols);
        },
        [&](Tile<kHeight, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (!args.column) return;
          alignas(64) float multiplier[kWidth];
          std::fill_n(multiplier, kWidth, multiplier_E[at.member]);
          write_columns<kHeight>(tile, at, multiplier, rounding,
                                 args.column + (at.member * cols + at.column) * rows + at.row, rows);
        });
    finish_runs();
  }
};

}  // namespace

void quantize_float8(const QuantizeFloat8& args, ParallelFor parallel_for) {
  const int64_t members = args.in.members;
  MemberMaxima maxima(members);
  if (!args.amax_E) find_finite_maxima(args.in, maxima, parallel_for);
  const std::unique_ptr<float[]> multiplier_E(new float[static_cast<size_t>(members)]);
  for (int64_t e = 0; e < members; ++e) {
    const float amax = args.amax_E ? args.amax_E[e] : maxima.get(e);
    multiplier_E[static_cast<size_t>(e)] = args.element == Element::e5m2
                                               ? fp8_multiplier<Element::e5m2>(amax, args.power_of_two)
                                               : fp8_multiplier<Element::e4m3>(amax, args.power_of_two);
    args.scale_E[e] = 1.0f / multiplier_E[static_cast<size_t>(e)];
  }
  const float* multipliers = multiplier_E.get();
  for_ranges(parallel_for, patches_of(args.in).size(), 1, [&](int64_t begin, int64_t end) {
    if (args.element == Element::e5m2) {
      run_widest<Float8Tiles<Element::e5m2>>(args, multipliers, begin, end);
    } else {
      run_widest<Float8Tiles<Element::e4m3>>(args, multipliers, begin, end);
    }
  });
}

}  // namespace moe_runtime
