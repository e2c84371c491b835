// Runs every kernel at awkward sizes and prints a digest of each result's bits. Built for different vector widths, or
// with a sanitizer, it must print the same lines.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "moe_runtime/bfloat16.h"
#include "moe_runtime/combine.h"
#include "moe_runtime/permute.h"
#include "moe_runtime/swiglu.h"

namespace {

using namespace moe_runtime;

class Random {
 public:
  uint32_t bits() { return state_ = state_ * 1664525u + 1013904223u; }
  int64_t below(int64_t limit) { return (bits() >> 8) % limit; }
  float value() { return (static_cast<float>(bits() >> 8) / 0x1p23f - 1.0f) * 12.0f; }

 private:
  uint32_t state_ = 1;
};

template <class T>
std::vector<T> random_values(Random& random, int64_t size) {
  std::vector<T> values(static_cast<size_t>(size));
  for (T& value : values) store(&value, random.value());
  return values;
}

template <class T>
uint64_t digest(const std::vector<T>& values) {
  uint64_t hash = 14695981039346656037u;
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  return hash;
}

template <class T>
void print_digest(const char* name, int64_t width, const std::vector<T>& values) {
  std::printf("%s %lld %016llx\n", name, static_cast<long long>(width),
              static_cast<unsigned long long>(digest(values)));
}

void serial(int64_t size, int64_t, RangeBody body, void* context) {
  if (size > 0) body(0, size, context);
}

constexpr int64_t kTokens = 11, kTopK = 3, kExperts = 5, kRows = kTokens * kTopK;

struct Routed {
  std::vector<int32_t> slot_R = std::vector<int32_t>(kRows);
  std::vector<int32_t> row_S = std::vector<int32_t>(kRows);
  std::vector<int32_t> ends_E = std::vector<int32_t>(kExperts);
};

Routed route_some(Random& random) {
  std::vector<int64_t> ids(kRows);
  for (int64_t& id : ids) id = random.below(kExperts + 1) - 1;
  Routed routed;
  route(ids.data(), kRows, kExperts, routed.slot_R.data(), routed.row_S.data(), routed.ends_E.data(), serial);
  print_digest("route slot", kRows, routed.slot_R);
  print_digest("route row", kRows, routed.row_S);
  print_digest("route ends", kRows, routed.ends_E);
  return routed;
}

template <class T>
void move_rows(Random& random, const Routed& routed, int64_t width) {
  const auto x = random_values<T>(random, kTokens * width);
  std::vector<T> y(static_cast<size_t>(kRows * width)), out(static_cast<size_t>(kTokens * width));
  const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
  gather_rows(GatherRows{reinterpret_cast<const std::byte*>(x.data()), kTokens, bytes, bytes, routed.slot_R.data(),
                         kRows, routed.ends_E.back(), kTopK, reinterpret_cast<std::byte*>(y.data())},
              serial);
  print_digest("gather_rows", width, y);
  gather_sum(GatherSum<T>{y.data(), kRows, width, width, routed.row_S.data(), kTokens, kTopK, out.data()}, serial);
  print_digest("gather_sum", width, out);
}

template <class T>
void activate(Random& random, int64_t width, GateUpLayout layout) {
  const auto h = random_values<T>(random, kRows * 2 * width);
  const auto da = random_values<T>(random, kRows * width);
  const auto gate = random_values<float>(random, kRows);
  std::vector<T> a(static_cast<size_t>(kRows * width)), dh(static_cast<size_t>(kRows * 2 * width));
  std::vector<float> dgate(kRows);
  swiglu(Swiglu<T>{h.data(), 2 * width, gate.data(), kRows, width, layout, a.data()}, serial);
  print_digest("swiglu", width, a);
  swiglu_backward(SwigluBackward<T>{da.data(), width, h.data(), 2 * width, gate.data(), kRows, width, layout, dh.data(),
                                    dgate.data()},
                  serial);
  print_digest("swiglu_backward dh", width, dh);
  print_digest("swiglu_backward dgate", width, dgate);
}

}  // namespace

int main() {
  Random random;
  const Routed routed = route_some(random);
  for (int64_t width : {1, 15, 64, 129, 777}) {
    move_rows<float>(random, routed, width);
    move_rows<bfloat16>(random, routed, width);
    for (GateUpLayout layout : {GateUpLayout::concatenated, GateUpLayout::interleaved}) {
      activate<float>(random, width, layout);
      activate<bfloat16>(random, width, layout);
    }
  }
}
