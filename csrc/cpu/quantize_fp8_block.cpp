#include "moe_runtime/quantize.h"
#include "quantize_fp8_scale.h"
#include "quantize_tile.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kBlock = 128, kHeight = 128, kWidth = 128;

// 1 / multiplier is stored; NaN where amax is not finite.
template <Element element>
struct Fp8Scaler {
  bool power_of_two;

  [[gnu::always_inline]] BlockScale<float> operator()(uint32_t amax) const {
    const float chosen = fp8_multiplier<element>(float_of(amax), power_of_two);
    const float multiplier = amax < kInfinityBits ? chosen : float_of(0x7fc00000u);
    return {1.0f / multiplier, multiplier};
  }
};

template <Element element, int64_t across>
struct Fp8BlockTiles {
  static constexpr int64_t kRows = across > 1 ? across : 4;

  [[gnu::always_inline]] static void run(const QuantizeFp8Block& args, int64_t begin, int64_t end) {
    const Fp8Scaler<element> scaler{args.power_of_two};
    const ToNearestInRange<element> usual;
    const ToNearest<element> safe;
    read_patches<kRows, kHeight, kWidth>(
        args.in, begin, end,
        [&](Tile<kRows, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (args.row.payload) quantize_rows<kBlock, across>(tile, at, args.in, args.row, scaler, usual, safe);
        },
        [&](Tile<kHeight, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (args.column.payload)
            quantize_columns<kBlock, across>(tile, at, args.in, args.column, scaler, usual, safe);
        });
    finish_runs();
  }
};

template <Element element>
void run_tiles(const QuantizeFp8Block& args, int64_t begin, int64_t end) {
  if (args.two_dimensional) return run_widest<Fp8BlockTiles<element, kBlock>>(args, begin, end);
  run_widest<Fp8BlockTiles<element, 1>>(args, begin, end);
}

}  // namespace

void quantize_fp8_block(const QuantizeFp8Block& args, ParallelFor parallel_for) {
  for_ranges(parallel_for, patches_of(args.in).size(), 1, [&](int64_t begin, int64_t end) {
    if (args.element == Element::e5m2) return run_tiles<Element::e5m2>(args, begin, end);
    run_tiles<Element::e4m3>(args, begin, end);
  });
}

}  // namespace moe_runtime
