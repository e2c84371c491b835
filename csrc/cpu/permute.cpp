#include "moe_runtime/permute.h"

#include <cstring>
#include <vector>

#include "first_index.h"

namespace moe_runtime {

namespace {

constexpr int64_t kSlotsPerChunk = 1 << 14;

}  // namespace

template <class Id>
int64_t route(const Id* ids_S, int64_t num_slots, int64_t num_experts, int32_t* slot_R, int32_t* row_S, int32_t* ends_E,
              ParallelFor parallel_for) {
  const int64_t num_chunks = (num_slots + kSlotsPerChunk - 1) / kSlotsPerChunk;
  const int64_t num_buckets = num_experts + 1;  // the last one holds the dropped slots
  std::vector<int32_t> next(static_cast<size_t>(num_chunks * num_buckets));
  FirstIndex bad_slot;

  for_ranges(parallel_for, num_chunks, 1, [&](int64_t first_chunk, int64_t last_chunk) {
    for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      int32_t* count = next.data() + chunk * num_buckets;
      const int64_t end = std::min(num_slots, (chunk + 1) * kSlotsPerChunk);
      for (int64_t s = chunk * kSlotsPerChunk; s < end; ++s) {
        const int64_t id = ids_S[s];
        if (id >= num_experts) {
          bad_slot.report(s);
          break;
        }
        ++count[id < 0 ? num_experts : id];
      }
    }
  });
  if (bad_slot.get() >= 0) return bad_slot.get();

  int32_t total = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      int32_t& start = next[static_cast<size_t>(chunk * num_buckets + bucket)];
      const int32_t count = start;
      start = total;
      total += count;
    }
    if (bucket < num_experts) ends_E[bucket] = total;
  }

  for_ranges(parallel_for, num_chunks, 1, [&](int64_t first_chunk, int64_t last_chunk) {
    for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      int32_t* row = next.data() + chunk * num_buckets;
      const int64_t end = std::min(num_slots, (chunk + 1) * kSlotsPerChunk);
      for (int64_t s = chunk * kSlotsPerChunk; s < end; ++s) {
        const int64_t id = ids_S[s];
        const int32_t r = row[id < 0 ? num_experts : id]++;
        slot_R[r] = static_cast<int32_t>(s);
        row_S[s] = id < 0 ? -1 : r;
      }
    }
  });
  return -1;
}

template int64_t route(const int32_t*, int64_t, int64_t, int32_t*, int32_t*, int32_t*, ParallelFor);
template int64_t route(const int64_t*, int64_t, int64_t, int32_t*, int32_t*, int32_t*, ParallelFor);

int64_t gather_rows(const GatherRows& args, ParallelFor parallel_for) {
  FirstIndex bad_row;
  const size_t row_bytes = static_cast<size_t>(args.row_bytes);
  for_ranges(parallel_for, args.num_rows, row_grain(2 * args.row_bytes), [&](int64_t begin, int64_t end) {
    const int64_t live_end = std::min(end, args.num_live);
    for (int64_t r = begin; r < live_end; ++r) {
      const int64_t slot = args.slot_R[r];
      const int64_t token = slot / args.top_k;
      if (slot < 0 || token >= args.num_tokens) {
        bad_row.report(r);
        return;
      }
      std::memcpy(args.y + r * args.row_bytes, args.x + token * args.x_stride, row_bytes);
    }
    const int64_t tail = std::max(begin, args.num_live);
    if (tail < end) std::memset(args.y + tail * args.row_bytes, 0, static_cast<size_t>(end - tail) * row_bytes);
  });
  return bad_row.get();
}

}  // namespace moe_runtime
