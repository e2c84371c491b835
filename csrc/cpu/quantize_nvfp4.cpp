#include "moe_runtime/quantize.h"
#include "quantize_amax.h"
#include "quantize_hadamard.h"
#include "quantize_tile.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kBlock = 16, kHeight = 128, kWidth = 128;  // 128 rows of half bytes are a cache line
static_assert(kBlock == kHadamardSize, "a rotation is of one block");

constexpr float kE2m1Reciprocal = 1.0f / Encoding<Element::e2m1>::max;

// S of one direction: each member's float32 multiplier; 1 / S is stored.
using MemberMultipliers = std::unique_ptr<float[]>;

struct NvScaler {
  float multiplier;    // S
  float tensor_scale;  // 1 / S

  [[gnu::always_inline]] BlockScale<uint32_t> operator()(uint32_t amax) const {
    const uint32_t encoded = cast<Element::e4m3>(float_of(amax) * (multiplier * kE2m1Reciprocal));
    const uint32_t code = amax < kInfinityBits ? encoded : kFp8NaN;
    const float quotient = 1.0f / (decode<Element::e4m3>(code) * tensor_scale);
    return {code, quotient > kLargest ? kLargest : quotient};
  }
};

[[gnu::always_inline]] inline void rotate_tile(Tile<kHeight, kWidth> tile) {
  for (int64_t i = 0; i < kHeight; i += kBlock) rotate<kWidth>(tile.row(i), kBufferStride);
}

// E2M1 with random bits of the element's place.
struct Stochastically {
  static constexpr Element kElement = Element::e2m1;
  uint64_t seed;
  uint32_t direction, member, first_row, first_column;  // first_column is a multiple of 4
  alignas(64) float uniform[4][kWidth];                 // of the last four rows prepared

  [[gnu::always_inline]] void prepare(int64_t r) {
    for (int64_t g = 0; g < kWidth / 4; ++g) {
      const PhiloxWords words = philox(first_column / 4 + static_cast<uint32_t>(g),
                                       first_row + static_cast<uint32_t>(r), member, direction, seed);
      for (int64_t k = 0; k < 4; ++k) uniform[r % 4][4 * g + k] = uniform_of(words.word[k]);
    }
  }

  [[gnu::always_inline]] uint32_t code(int64_t r, int64_t c, float scaled) const {
    return cast_stochastically(scaled, uniform[r % 4][c]);
  }
};

template <int64_t across, bool stochastic>
struct NvTiles {
  static constexpr int64_t kRows = across > 1 ? across : 4;

  [[gnu::always_inline]] static void run(const QuantizeNvfp4& args, const float* row_E, const float* column_E,
                                         int64_t begin, int64_t end) {
    read_patches<kRows, kHeight, kWidth>(
        args.in, begin, end,
        [&](Tile<kRows, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (!args.row.payload) return;
          auto rounding = rounding_of(args, at, 0);
          const NvScaler scaler{row_E[at.member], args.row_tensor_scale_E[at.member]};
          quantize_rows<kBlock, across>(tile, at, args.in, args.row, scaler, rounding, rounding);
        },
        [&](Tile<kHeight, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          if (!args.column.payload) return;
          auto rounding = rounding_of(args, at, 1);
          const NvScaler scaler{column_E[at.member], args.column_tensor_scale_E[at.member]};
          if (args.random_hadamard) rotate_tile(tile);
          quantize_columns<kBlock, across>(tile, at, args.in, args.column, scaler, rounding, rounding);
        });
    finish_runs();
  }

  [[gnu::always_inline]] static auto rounding_of(const QuantizeNvfp4& args, const TilePlace& at, uint32_t direction) {
    if constexpr (stochastic) {
      return Stochastically{static_cast<uint64_t>(*args.seed), direction,
                            static_cast<uint32_t>(at.member),  static_cast<uint32_t>(at.row),
                            static_cast<uint32_t>(at.column),  {}};
    } else {
      return ToNearest<Element::e2m1>{};
    }
  }
};

struct RotatedMaximum {
  [[gnu::always_inline]] static void run(const MatrixStack& in, int64_t begin, int64_t end, MemberMaxima& maxima) {
    read_patches<4, kHeight, kWidth>(
        in, begin, end, [](Tile<4, kWidth>, const TilePlace&) {},
        [&](Tile<kHeight, kWidth> tile, const TilePlace& at) __attribute__((always_inline)) {
          rotate_tile(tile);
          uint32_t largest = 0;
          for (int64_t r = 0; r < kHeight; ++r) {
            const float* __restrict x = tile.row(r);
            for (int64_t c = 0; c < kWidth; ++c) largest = std::max(largest, finite_magnitude_bits(x[c]));
          }
          maxima.report(at.member, largest);
        });
  }
};

// S = 448 * 6 / amax, at most the largest float32, and 1 where amax is 0 or infinite; tensor_scale = 1 / S.
template <class Amax>
MemberMultipliers member_multipliers(int64_t members, const Amax& amax_of, float* tensor_scale_E) {
  MemberMultipliers multiplier_E(new float[static_cast<size_t>(members)]);
  for (int64_t e = 0; e < members; ++e) {
    const float amax = amax_of(e);
    const float quotient = Encoding<Element::e4m3>::max * Encoding<Element::e2m1>::max / amax;
    const float limited = quotient > kLargest ? kLargest : quotient;
    const float multiplier = amax == 0.0f || limited == 0.0f ? 1.0f : limited;
    multiplier_E[static_cast<size_t>(e)] = multiplier;
    tensor_scale_E[e] = 1.0f / multiplier;
  }
  return multiplier_E;
}

}  // namespace

void quantize_nvfp4(const QuantizeNvfp4& args, ParallelFor parallel_for) {
  const int64_t members = args.in.members, patches = patches_of(args.in).size();
  MemberMaxima plain(members), rotated(members);
  const bool rotates = args.random_hadamard && args.column_tensor_scale_E;
  if (!args.amax_E && (args.row_tensor_scale_E || !rotates)) find_finite_maxima(args.in, plain, parallel_for);
  if (rotates) {
    for_ranges(parallel_for, patches, 1,
               [&](int64_t begin, int64_t end) { run_widest<RotatedMaximum>(args.in, begin, end, rotated); });
  }
  MemberMultipliers row_E, column_E;
  const auto plain_amax = [&](int64_t e) { return args.amax_E ? args.amax_E[e] : plain.get(e); };
  if (args.row_tensor_scale_E) row_E = member_multipliers(members, plain_amax, args.row_tensor_scale_E);
  if (args.column_tensor_scale_E) {
    const auto amax = [&](int64_t e) { return rotates ? rotated.get(e) : plain_amax(e); };
    column_E = member_multipliers(members, amax, args.column_tensor_scale_E);
  }
  const float* row = row_E.get();
  const float* column = column_E.get();
  for_ranges(parallel_for, patches, 1, [&](int64_t begin, int64_t end) {
    if (args.two_dimensional) {
      run_widest<NvTiles<kBlock, false>>(args, row, column, begin, end);
    } else if (args.seed) {
      run_widest<NvTiles<1, true>>(args, row, column, begin, end);
    } else {
      run_widest<NvTiles<1, false>>(args, row, column, begin, end);
    }
  });
}

}  // namespace moe_runtime
