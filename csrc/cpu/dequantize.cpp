#include "moe_runtime/dequantize.h"

#include <algorithm>
#include <cstring>

#include "moe_runtime/quantize_float16.h"
#include "quantize_cast.h"
#include "quantize_hadamard.h"
#include "quantize_tile.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kHeight = 64, kWidth = 128;

[[gnu::always_inline]] inline float scale_at(const Dequantize& args, int64_t index) {
  switch (args.scale_kind) {
    case ScaleKind::e8m0:
      return decode_e8m0(static_cast<const uint8_t*>(args.scale)[index]);
    case ScaleKind::e4m3:
      return decode<Element::e4m3>(static_cast<const uint8_t*>(args.scale)[index]);
    case ScaleKind::float32:
      return static_cast<const float*>(args.scale)[index];
  }
  return 0.0f;
}

// The scale of each element of row `row` of the stored matrix, from column at.column on.
[[gnu::always_inline]] inline void row_scales(const Dequantize& args, const TilePlace& at, int64_t row, float* scale) {
  const int64_t block = args.block_rows ? args.block_cols : kWidth;
  for (int64_t c = 0; c < at.num_columns; c += block) {
    const int64_t index = args.block_rows ? (at.member * (args.rows / args.block_rows) + row / args.block_rows) *
                                                    (args.cols / args.block_cols) +
                                                (at.column + c) / args.block_cols
                                          : at.member;
    float value = scale_at(args, index);
    if (args.tensor_scale_E) value *= args.tensor_scale_E[at.member];
    for (int64_t k = c; k < std::min(c + block, kWidth); ++k) scale[k] = value;
  }
}

template <class T>
[[gnu::always_inline]] inline void write_values(void* x, int64_t first, const float* __restrict value, int64_t count) {
  T* __restrict to = static_cast<T*>(x) + first;
  for (int64_t c = 0; c < count; ++c) store(to + c, value[c] == value[c] ? value[c] : float_of(0x7fc00000u));
}

[[gnu::always_inline]] inline void write_values(const Dequantize& args, int64_t first, const float* value,
                                                int64_t count) {
  switch (args.type) {
    case ValueType::float32:
      return write_values<float>(args.x, first, value, count);
    case ValueType::bfloat16:
      return write_values<bfloat16>(args.x, first, value, count);
    case ValueType::float16:
      return write_values<float16>(args.x, first, value, count);
  }
}

template <Element element>
struct DequantizeTiles {
  struct alignas(64) Values {
    float x[kHeight][kWidth];
  };
  struct alignas(64) Transposed {
    float x[kWidth][kHeight];
  };

  [[gnu::always_inline]] static void run(const Dequantize& args, int64_t begin, int64_t end) {
    Values tile;
    Transposed turned;
    const Patches patches{args.members, args.rows, args.cols};
    for (int64_t index = begin; index < end; ++index) {
      for_tiles<kHeight, kWidth>(patches.at(index), [&](const TilePlace& at) __attribute__((always_inline)) {
        read(args, at, tile);
        if (args.transposed) {
          write_turned(args, at, tile, turned);
        } else {
          write_straight(args, at, tile);
        }
      });
    }
  }

  [[gnu::always_inline]] static void write_straight(const Dequantize& args, const TilePlace& at, const Values& tile) {
    for (int64_t r = 0; r < at.num_rows; ++r) {
      const int64_t first = (at.member * args.rows + at.row + r) * args.cols + at.column;
      write_values(args, first, tile.x[r], at.num_columns);
    }
  }

  [[gnu::always_inline]] static void read(const Dequantize& args, const TilePlace& at, Values& tile) {
    constexpr int bits = Encoding<element>::bits;
    alignas(64) uint8_t bytes[kWidth * bits / 8] = {};
    alignas(64) uint32_t code[kWidth];
    alignas(64) float scale[kWidth] = {};
    for (int64_t r = 0; r < at.num_rows; ++r) {
      const int64_t first = (at.member * args.rows + at.row + r) * args.cols + at.column;
      std::memcpy(bytes, args.payload + first * bits / 8, static_cast<size_t>(at.num_columns * bits / 8));
      row_scales(args, at, at.row + r, scale);
      if (bits == 8) {
        for (int64_t c = 0; c < kWidth; ++c) code[c] = bytes[c];
      } else {
        for (int64_t b = 0; b < kWidth / 2; ++b) {
          code[2 * b] = bytes[b] & 0xfu;
          code[2 * b + 1] = static_cast<uint32_t>(bytes[b]) >> 4;
        }
      }
      for (int64_t c = 0; c < kWidth; ++c) tile.x[r][c] = decode<element>(code[c]) * scale[c];
    }
  }

  [[gnu::always_inline]] static void write_turned(const Dequantize& args, const TilePlace& at, const Values& tile,
                                                  Transposed& turned) {
    for (int64_t c = 0; c < kWidth; ++c) {
      for (int64_t r = 0; r < kHeight; ++r) turned.x[c][r] = tile.x[r][c];
    }
    if (args.rotated) {
      for (int64_t c = 0; c < kWidth; c += kHadamardSize) rotate_back<kHeight>(turned.x[c], kHeight);
    }
    for (int64_t c = 0; c < at.num_columns; ++c) {
      const int64_t first = (at.member * args.cols + at.column + c) * args.rows + at.row;
      write_values(args, first, turned.x[c], at.num_rows);
    }
  }
};

}  // namespace

void dequantize(const Dequantize& args, ParallelFor parallel_for) {
  const Patches patches{args.members, args.rows, args.cols};
  for_ranges(parallel_for, patches.size(), 1, [&](int64_t begin, int64_t end) {
    switch (args.element) {
      case Element::e4m3:
        return run_widest<DequantizeTiles<Element::e4m3>>(args, begin, end);
      case Element::e5m2:
        return run_widest<DequantizeTiles<Element::e5m2>>(args, begin, end);
      case Element::e2m1:
        return run_widest<DequantizeTiles<Element::e2m1>>(args, begin, end);
    }
  });
}

}  // namespace moe_runtime
