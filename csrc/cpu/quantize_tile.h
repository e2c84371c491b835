// The pieces that a quantizing kernel is made of: reading the input, block maxima, and the payload of both directions.
//
// The input is read once, a few rows at a time, into a float32 buffer, and its row-wise bytes are written as it is
// read. Column-wise bytes of a column lie side by side in memory: once the buffer holds enough rows to fill a cache
// line with them, codes of adjacent rows are joined to 32-bit words, one word a column, and the words are transposed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "moe_runtime/quantize.h"
#include "moe_runtime/quantize_float16.h"
#include "quantize_cast.h"

namespace moe_runtime {

// Where a tile lies in the stack. Legend: H, W height and width of a tile, B size of a block.
struct TilePlace {
  int64_t member;
  int64_t row, num_rows;        // num_rows <= H
  int64_t column, num_columns;  // num_columns <= W
};

// The stack cut into patches, each a thread's next piece of work. Tiles cross the matrix and its transpose at right
// angles, and each row of either lies on pages of its own. A patch is no wider than the TLB can hold pages of
// transposed rows, and the patch below it comes next, so those pages are used until they are full.
struct Patches {
  static constexpr int64_t kRows = 256, kCols = 1024;  // multiples of every H and W
  int64_t members, rows, cols;

  int64_t down() const { return (rows + kRows - 1) / kRows; }
  int64_t across() const { return (cols + kCols - 1) / kCols; }
  int64_t size() const { return members * across() * down(); }

  TilePlace at(int64_t index) const {
    const int64_t row = index % down() * kRows, column = index / down() % across() * kCols;
    return {index / down() / across(), row, std::min(kRows, rows - row), column, std::min(kCols, cols - column)};
  }
};

inline Patches patches_of(const MatrixStack& in) { return {in.members, in.rows, in.cols}; }

// Calls body with the tiles of a patch, row by row. Their rows and columns are those of the stack.
template <int64_t H, int64_t W, class Body>
[[gnu::always_inline]] inline void for_tiles(const TilePlace& patch, const Body& body) {
  static_assert(Patches::kRows % H == 0 && Patches::kCols % W == 0, "a patch holds whole tiles");
  for (int64_t r = 0; r < patch.num_rows; r += H) {
    for (int64_t c = 0; c < patch.num_columns; c += W) {
      body(TilePlace{patch.member, patch.row + r, std::min(H, patch.num_rows - r), patch.column + c,
                     std::min(W, patch.num_columns - c)});
    }
  }
}

// A cache line more than a patch is wide, so that rows below each other do not fall into one set of the cache.
constexpr int64_t kBufferStride = Patches::kCols + 16;

// H x W values in a buffer of float32; cells outside the matrix are 0.
template <int64_t H, int64_t W>
struct Tile {
  float* x;

  [[gnu::always_inline]] float* row(int64_t r) const { return x + r * kBufferStride; }

  [[gnu::always_inline]] void read(const MatrixStack& in, const TilePlace& at) const {
    const int64_t first = (at.member * in.rows + at.row) * in.cols + at.column;
    switch (in.type) {
      case ValueType::float32:
        return read(static_cast<const float*>(in.x) + first, in.cols, at);
      case ValueType::bfloat16:
        return read(static_cast<const bfloat16*>(in.x) + first, in.cols, at);
      case ValueType::float16:
        return read(static_cast<const float16*>(in.x) + first, in.cols, at);
    }
  }

  template <class T>
  [[gnu::always_inline]] void read(const T* from, int64_t stride, const TilePlace& at) const {
    constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
    if (at.num_rows < H || at.num_columns < W) clear();
    for (int64_t r = 0; r < at.num_rows; ++r) {
      const T* __restrict in = from + r * stride;
      float* __restrict to = row(r);
      for (int64_t c = 0; c < W; c += line) __builtin_prefetch(in + H * stride + c, 0, 2);  // of the tile below
      if (at.num_columns == W) {
        for (int64_t c = 0; c < W; ++c) to[c] = load(in + c);
      } else {
        for (int64_t c = 0; c < at.num_columns; ++c) to[c] = load(in + c);
      }
    }
  }

  [[gnu::always_inline]] void clear() const {
    for (int64_t r = 0; r < H; ++r) std::memset(row(r), 0, W * sizeof(float));
  }
};

// Reads patches begin .. end - 1 in tiles of G rows and passes each to on_rows as it comes; after H rows, on_columns
// gets them as tiles of H rows. Both take a tile, which they may change, and its place.
template <int64_t G, int64_t H, int64_t W, class OnRows, class OnColumns>
[[gnu::always_inline]] inline void read_patches(const MatrixStack& in, int64_t begin, int64_t end,
                                                const OnRows& on_rows, const OnColumns& on_columns) {
  static_assert(H % G == 0, "tiles of rows fill the buffer");
  const std::unique_ptr<float[]> memory(new float[H * kBufferStride + 16]);
  float* buffer = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / sizeof(float);
  for (int64_t index = begin; index < end; ++index) {
    const TilePlace patch = patches_of(in).at(index);
    for_tiles<H, Patches::kCols>(patch, [&](const TilePlace& strip) __attribute__((always_inline)) {
      for_tiles<G, W>(strip, [&](const TilePlace& at) __attribute__((always_inline)) {
        const Tile<G, W> tile{buffer + (at.row - strip.row) * kBufferStride + at.column - strip.column};
        tile.read(in, at);
        on_rows(tile, at);
      });
      for (int64_t r = (strip.num_rows + G - 1) / G * G; r < H; ++r) {
        std::memset(buffer + r * kBufferStride, 0, Patches::kCols * sizeof(float));
      }
      for_tiles<H, W>(strip, [&](const TilePlace& at) __attribute__((always_inline)) {
        on_columns(Tile<H, W>{buffer + at.column - strip.column}, at);
      });
    });
  }
}

// Copies a run of bytes out of a tile. Whole cache lines go past the caches: nothing reads them back here, and they
// need not be fetched before they are written.
template <int64_t size>
[[gnu::always_inline]] inline void write_run(uint8_t* to, const void* from, int64_t num_bytes) {
  if (num_bytes < size) {
    std::memcpy(to, from, static_cast<size_t>(num_bytes));
    return;
  }
#if defined(__SSE2__)
  if (size % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    const __m128i* quarter = static_cast<const __m128i*>(from);
    __m128i* out = reinterpret_cast<__m128i*>(to);
    for (int64_t k = 0; k < size / 16; ++k) _mm_stream_si128(out + k, _mm_load_si128(quarter + k));
    return;
  }
#endif
  std::memcpy(to, from, size);
}

// What write_run sent past the caches is visible to other threads after it.
inline void finish_runs() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Largest magnitudes as bits: in that order NaN stands above infinity, above every finite value.
[[gnu::always_inline]] inline uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

template <int64_t size>
[[gnu::always_inline]] inline void halve(const uint32_t* __restrict from, uint32_t* __restrict to) {
  for (int64_t k = 0; k < size; ++k) to[k] = std::max(from[2 * k], from[2 * k + 1]);
}

// most[r, j] of columns jB .. of row r. Each block folds to 16 lanes; then all blocks halve together, which costs a
// third of reducing them one by one.
template <int64_t B, int64_t H, int64_t W>
[[gnu::always_inline]] inline void row_maxima(Tile<H, W> tile, uint32_t* __restrict most) {
  constexpr int64_t lanes = 16, count = H * (W / B);
  alignas(64) uint32_t folded[count * lanes], halved[count * lanes / 2];
  for (int64_t k = 0; k < count; ++k) {
    const float* __restrict x = tile.row(k / (W / B)) + k % (W / B) * B;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      uint32_t largest = magnitude_bits(x[lane]);
      for (int64_t c = lanes; c < B; c += lanes) largest = std::max(largest, magnitude_bits(x[c + lane]));
      folded[k * lanes + lane] = largest;
    }
  }
  halve<count * lanes / 2>(folded, halved);
  halve<count * lanes / 4>(halved, folded);
  halve<count * lanes / 8>(folded, halved);
  halve<count>(halved, most);
}

// most[i, c] of rows iB .. of column c.
template <int64_t B, int64_t H, int64_t W>
[[gnu::always_inline]] inline void column_maxima(Tile<H, W> tile, uint32_t* __restrict most) {
  for (int64_t i = 0; i < H / B; ++i) {
    uint32_t* __restrict largest = most + i * W;
    for (int64_t c = 0; c < W; ++c) largest[c] = 0;
    for (int64_t r = i * B; r < (i + 1) * B; ++r) {
      const float* __restrict x = tile.row(r);
      for (int64_t c = 0; c < W; ++c) largest[c] = std::max(largest[c], magnitude_bits(x[c]));
    }
  }
}

// The greatest of `count` maxima replaces each of them; entry k is most[k * stride].
[[gnu::always_inline]] inline void share_maximum(uint32_t* most, int64_t count, int64_t stride) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, most[k * stride]);
  for (int64_t k = 0; k < count; ++k) most[k * stride] = largest;
}

// How scaled values become codes, their upper bits anything. `prepare` comes before the codes of a row of the tile; (r,
// c) is a place in it.
template <Element element>
struct ToNearest {
  static constexpr Element kElement = element;
  [[gnu::always_inline]] void prepare(int64_t) const {}
  [[gnu::always_inline]] uint32_t code(int64_t, int64_t, float scaled) const { return cast<element>(scaled); }
};

// As ToNearest, for values that their scale keeps in range.
template <Element element>
struct ToNearestInRange {
  static constexpr Element kElement = element;
  [[gnu::always_inline]] void prepare(int64_t) const {}
  [[gnu::always_inline]] uint32_t code(int64_t, int64_t, float scaled) const { return cast_in_range<element>(scaled); }
};

// Row-wise payload: element * multiplier[r, j] encoded, the rows of the tile.
template <int64_t B, int64_t H, int64_t W, class Rounding>
[[gnu::always_inline]] inline void write_rows(Tile<H, W> tile, const TilePlace& at, const float* multiplier,
                                              Rounding& rounding, uint8_t* payload, int64_t row_bytes) {
  constexpr int bits = Encoding<Rounding::kElement>::bits;
  const int64_t num_bytes = at.num_columns * bits / 8;
  for (int64_t r = 0; r < at.num_rows; ++r) {
    alignas(64) uint32_t code[W];  // narrowed in a loop of its own: together they vectorize at half the width
    alignas(64) uint8_t bytes[W * bits / 8];
    const float* __restrict x = tile.row(r);
    rounding.prepare(r);
    for (int64_t j = 0; j < W / B; ++j) {
      const float m = multiplier[r * (W / B) + j];
      for (int64_t c = j * B; c < (j + 1) * B; ++c) code[c] = rounding.code(r, c, x[c] * m);
    }
    if (bits == 8) {
      for (int64_t c = 0; c < W; ++c) bytes[c] = static_cast<uint8_t>(code[c]);
    } else {
      for (int64_t b = 0; b < W / 2; ++b) bytes[b] = static_cast<uint8_t>((code[2 * b] & 0xfu) | code[2 * b + 1] << 4);
    }
    write_run<W * bits / 8>(payload + r * row_bytes, bytes, num_bytes);
  }
}

// Column-wise payload: element * multiplier[i, c] encoded, the columns of the tile.
template <int64_t B, int64_t H, int64_t W, class Rounding>
[[gnu::always_inline]] inline void write_columns(Tile<H, W> tile, const TilePlace& at, const float* multiplier,
                                                 Rounding& rounding, uint8_t* payload, int64_t column_bytes) {
  constexpr int bits = Encoding<Rounding::kElement>::bits;
  constexpr int64_t rows_per_word = 32 / bits, num_words = H / rows_per_word;
  alignas(64) uint32_t words[num_words][W];
  for (int64_t q = 0; q < num_words; ++q) {
    const float* __restrict m = multiplier + q * rows_per_word / B * W;
    for (int64_t k = 0; k < rows_per_word; k += 4) {
      const int64_t r = q * rows_per_word + k;
      const float *x0 = tile.row(r), *x1 = tile.row(r + 1), *x2 = tile.row(r + 2), *x3 = tile.row(r + 3);
      for (int64_t i = 0; i < 4; ++i) rounding.prepare(r + i);
      for (int64_t c = 0; c < W; ++c) {
        const uint32_t code0 = rounding.code(r, c, x0[c] * m[c]);
        const uint32_t code1 = rounding.code(r + 1, c, x1[c] * m[c]);
        const uint32_t code2 = rounding.code(r + 2, c, x2[c] * m[c]);
        const uint32_t code3 = rounding.code(r + 3, c, x3[c] * m[c]);
        constexpr uint32_t mask = (1u << bits) - 1u;
        const uint32_t four = (code0 & mask) | (code1 << bits & mask << bits) |
                              (code2 << (2 * bits) & mask << (2 * bits)) | (code3 << (3 * bits) & mask << (3 * bits));
        words[q][c] = k ? words[q][c] | four << (k * bits) : four;
      }
    }
  }
  alignas(64) uint32_t columns[W][num_words];
  for (int64_t c = 0; c < W; ++c) {
    for (int64_t q = 0; q < num_words; ++q) columns[c][q] = words[q][c];
  }
  const int64_t num_bytes = (at.num_rows * bits + 7) / 8;
  for (int64_t c = 0; c < at.num_columns; ++c) {
    write_run<H * bits / 8>(payload + c * column_bytes, columns[c], num_bytes);
  }
}

// A block's scale as it is stored, bytes still 32 bits wide, and what its elements are multiplied by before encoding.
template <class Wide>
struct BlockScale {
  Wide stored;
  float multiplier;
};

template <class Stored>
using Widened = std::conditional_t<sizeof(Stored) == 1, uint32_t, Stored>;

// Scales of `count` maxima; `scaler` maps a maximum's bits to a BlockScale. Whether all maxima are finite.
template <class Wide, class Scaler>
[[gnu::always_inline]] inline bool make_scales(const Scaler& scaler, const uint32_t* __restrict most, int64_t count,
                                               Wide* __restrict stored, float* __restrict multiplier) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    const BlockScale<Wide> scale = scaler(most[k]);
    stored[k] = scale.stored;
    multiplier[k] = scale.multiplier;
    largest = std::max(largest, most[k]);
  }
  return largest < kInfinityBits;
}

// A tile's row-wise bytes and scales. Blocks are across x B; `usual` rounds unless a block of the tile is not finite.
template <int64_t B, int64_t across, class Stored, int64_t H, int64_t W, class Scaler, class Usual, class Safe>
[[gnu::always_inline]] inline void quantize_rows(Tile<H, W> tile, const TilePlace& at, const MatrixStack& in,
                                                 const QuantizedOut<Stored>& out, const Scaler& scaler, Usual& usual,
                                                 Safe& safe) {
  constexpr int64_t blocks = W / B, bits = Encoding<Usual::kElement>::bits;
  alignas(64) uint32_t most[H * blocks];
  alignas(64) float multiplier[H * blocks];
  alignas(64) Widened<Stored> stored[H * blocks];
  row_maxima<B>(tile, most);
  if (across > 1) {
    for (int64_t k = 0; k < H * blocks; k += k % blocks == blocks - 1 ? (across - 1) * blocks + 1 : 1) {
      share_maximum(most + k, across, blocks);
    }
  }
  const bool finite = make_scales(scaler, most, H * blocks, stored, multiplier);
  const int64_t first = at.member * in.rows + at.row;
  for (int64_t r = 0; r < at.num_rows; r += across) {
    Stored* to = out.scale + (first + r) / across * (in.cols / B) + at.column / B;
    for (int64_t j = 0; j < at.num_columns / B; ++j) to[j] = static_cast<Stored>(stored[r * blocks + j]);
  }
  const int64_t row_bytes = in.cols * bits / 8;
  uint8_t* payload = out.payload + first * row_bytes + at.column * bits / 8;
  if (finite) {
    write_rows<B>(tile, at, multiplier, usual, payload, row_bytes);
  } else {
    write_rows<B>(tile, at, multiplier, safe, payload, row_bytes);
  }
}

// A tile's column-wise bytes and scales, as quantize_rows of the transposed tile.
template <int64_t B, int64_t across, class Stored, int64_t H, int64_t W, class Scaler, class Usual, class Safe>
[[gnu::always_inline]] inline void quantize_columns(Tile<H, W> tile, const TilePlace& at, const MatrixStack& in,
                                                    const QuantizedOut<Stored>& out, const Scaler& scaler, Usual& usual,
                                                    Safe& safe) {
  constexpr int64_t blocks = H / B, bits = Encoding<Usual::kElement>::bits;
  alignas(64) uint32_t most[blocks * W];
  alignas(64) float multiplier[blocks * W];
  alignas(64) Widened<Stored> stored[blocks * W];
  column_maxima<B>(tile, most);
  if (across > 1) {
    for (int64_t k = 0; k < blocks * W; k += across) share_maximum(most + k, across, 1);
  }
  const bool finite = make_scales(scaler, most, blocks * W, stored, multiplier);
  const int64_t first = at.member * in.cols + at.column;
  for (int64_t c = 0; c < at.num_columns; c += across) {
    Stored* to = out.scale + (first + c) / across * (in.rows / B) + at.row / B;
    for (int64_t i = 0; i < at.num_rows / B; ++i) to[i] = static_cast<Stored>(stored[i * W + c]);
  }
  const int64_t column_bytes = in.rows * bits / 8;
  uint8_t* payload = out.payload + first * column_bytes + at.row * bits / 8;
  if (finite) {
    write_columns<B>(tile, at, multiplier, usual, payload, column_bytes);
  } else {
    write_columns<B>(tile, at, multiplier, safe, payload, column_bytes);
  }
}

}  // namespace moe_runtime
