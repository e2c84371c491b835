#include "moe_runtime/combine.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "first_index.h"
#include "moe_runtime/bfloat16.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kBlock = 512;  // columns summed at a time: their float32 sums stay in the first-level cache

// sum[d] = (...((start[d] + rows[0][d]) + rows[1][d]) ...), start being 0 on the first group of rows.
template <int num_rows, class T>
[[gnu::always_inline]] inline void add_rows(const T* const* rows, int64_t column, int64_t width, bool first,
                                            float* __restrict sum) {
  std::array<const T*, num_rows> row;
  for (int i = 0; i < num_rows; ++i) row[i] = rows[i] + column;
  for (int64_t d = 0; d < width; ++d) {
    float total = first ? 0.0f : sum[d];
#pragma GCC unroll 4
    for (int i = 0; i < num_rows; ++i) total += load(row[i] + d);
    sum[d] = total;
  }
}

// One token: its rows in groups of 4, 2 and 1, block of columns by block of columns.
template <class T>
[[gnu::always_inline]] inline void sum_rows(const T* const* rows, int64_t num_rows, int64_t width, T* __restrict out) {
  float buffer[kBlock];
  for (int64_t column = 0; column < width; column += kBlock) {
    const int64_t n = std::min(kBlock, width - column);
    float* sum = buffer;
    if constexpr (std::is_same_v<T, float>) sum = out + column;
    if (num_rows == 0) {
      for (int64_t d = 0; d < n; ++d) sum[d] = 0.0f;
    }
    int64_t i = 0;
    for (; i + 4 <= num_rows; i += 4) add_rows<4>(rows + i, column, n, i == 0, sum);
    if (i + 2 <= num_rows) {
      add_rows<2>(rows + i, column, n, i == 0, sum);
      i += 2;
    }
    if (i < num_rows) add_rows<1>(rows + i, column, n, i == 0, sum);
    if constexpr (!std::is_same_v<T, float>) {
      for (int64_t d = 0; d < n; ++d) store(out + column + d, sum[d]);
    }
  }
}

struct SumTokens {
  template <class T>
  [[gnu::always_inline]] static void run(const GatherSum<T>& args, int64_t begin, int64_t end, FirstIndex& bad_token) {
    std::vector<const T*> rows(static_cast<size_t>(args.top_k));
    for (int64_t t = begin; t < end; ++t) {
      size_t num_rows = 0;
      for (int64_t k = 0; k < args.top_k; ++k) {
        const int64_t r = args.row_TK[t * args.top_k + k];
        if (r >= args.num_rows) {
          bad_token.report(t);
        } else if (r >= 0) {
          rows[num_rows++] = args.y + r * args.y_stride;
        }
      }
      sum_rows(rows.data(), static_cast<int64_t>(num_rows), args.width, args.out + t * args.width);
    }
  }
};

}  // namespace

template <class T>
int64_t gather_sum(const GatherSum<T>& args, ParallelFor parallel_for) {
  FirstIndex bad_token;
  const int64_t bytes_per_token = (args.top_k + 1) * args.width * static_cast<int64_t>(sizeof(T));
  for_ranges(parallel_for, args.num_tokens, row_grain(bytes_per_token),
             [&](int64_t begin, int64_t end) { run_widest<SumTokens>(args, begin, end, bad_token); });
  return bad_token.get();
}

template int64_t gather_sum(const GatherSum<float>&, ParallelFor);
template int64_t gather_sum(const GatherSum<bfloat16>&, ParallelFor);

}  // namespace moe_runtime
