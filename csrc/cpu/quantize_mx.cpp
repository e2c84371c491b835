#include "moe_runtime/quantize.h"
#include "quantize_tile.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kBlock = 32, kRows = 4, kHeight = 64, kWidth = 128;

// The exponent of amax / max rounded up, and 2^(127 - code); NaN where amax is not finite.
template <Element element>
struct MxScaler {
  [[gnu::always_inline]] BlockScale<uint32_t> operator()(uint32_t amax) const {
    constexpr float reciprocal = 1.0f / Encoding<element>::max;
    const uint32_t bits = bits_of(float_of(amax) * reciprocal);
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    const uint32_t up = mantissa > (exponent ? 0u : 0x400000u) ? 1u : 0u;
    const bool finite = amax < kInfinityBits;
    const uint32_t code = finite ? exponent + up : 255u;
    return {code, float_of(finite ? (254u - code) << 23 : 0x7fc00000u)};
  }
};

template <Element element>
struct MxTiles {
  [[gnu::always_inline]] static void run(const QuantizeMx& args, int64_t begin, int64_t end) {
    const MxScaler<element> scaler;
    const ToNearestInRange<element> usual;
    const ToNearest<element> safe;
    read_patches<kRows, kHeight, kWidth>(
        args.in, begin, end,
        [&](Tile<kRows, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (args.row.payload) quantize_rows<kBlock, 1>(tile, at, args.in, args.row, scaler, usual, safe);
        },
        [&](Tile<kHeight, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (args.column.payload) quantize_columns<kBlock, 1>(tile, at, args.in, args.column, scaler, usual, safe);
        });
    finish_runs();
  }
};

}  // namespace

void quantize_mx(const QuantizeMx& args, ParallelFor parallel_for) {
  for_ranges(parallel_for, patches_of(args.in).size(), 1, [&](int64_t begin, int64_t end) {
    switch (args.element) {
      case Element::e4m3:
        return run_widest<MxTiles<Element::e4m3>>(args, begin, end);
      case Element::e5m2:
        return run_widest<MxTiles<Element::e5m2>>(args, begin, end);
      case Element::e2m1:
        return run_widest<MxTiles<Element::e2m1>>(args, begin, end);
    }
  });
}

}  // namespace moe_runtime
