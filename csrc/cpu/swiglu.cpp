#include "moe_runtime/swiglu.h"

#include <algorithm>

#include "exp.h"
#include "moe_runtime/bfloat16.h"
#include "widest.h"

namespace moe_runtime {

namespace {

constexpr int64_t kLanes = 16;   // partial sums of a gate gradient, whatever the vector width
constexpr int64_t kBlock = 256;  // products kept between computing and summing them; a multiple of kLanes

// Where column f of the two halves lies, in elements from the row's start.
template <GateUpLayout layout>
struct Halves {
  int64_t width;
  [[gnu::always_inline]] int64_t g(int64_t f) const { return layout == GateUpLayout::interleaved ? 2 * f : f; }
  [[gnu::always_inline]] int64_t u(int64_t f) const {
    return layout == GateUpLayout::interleaved ? 2 * f + 1 : width + f;
  }
};

template <GateUpLayout layout, class T>
[[gnu::always_inline]] inline void forward_row(const T* __restrict h, float gate, int64_t width, T* __restrict a) {
  const Halves<layout> at{width};
  for (int64_t f = 0; f < width; ++f) {
    const float g = load(h + at.g(f));
    const float u = load(h + at.u(f));
    store(a + f, gate * ((g * sigmoid_f32(g)) * u));
  }
}

// Adds x[0..kBlock) to the lanes, x[i] to lane i % kLanes.
[[gnu::always_inline]] inline void add_to_lanes(const float* __restrict x, float* __restrict lanes) {
  for (int64_t start = 0; start < kBlock; start += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[start + lane];
  }
}

[[gnu::always_inline]] inline float sum_of_lanes(float* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Writes dh and returns the gate's gradient.
template <GateUpLayout layout, class T>
[[gnu::always_inline]] inline float backward_row(const T* __restrict da, const T* __restrict h, float gate,
                                                 int64_t width, T* __restrict dh) {
  const Halves<layout> at{width};
  float lanes[kLanes] = {};
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t end = std::min(width, start + kBlock);
    float product[kBlock] = {};
    for (int64_t f = start; f < end; ++f) {
      const float g = load(h + at.g(f));
      const float u = load(h + at.u(f));
      const float d = load(da + f);
      const float sigmoid = sigmoid_f32(g);
      const float silu = g * sigmoid;
      const float dp = d * gate;
      store(dh + at.g(f), (dp * u) * (sigmoid * (1.0f + g * (1.0f - sigmoid))));
      store(dh + at.u(f), dp * silu);
      product[f - start] = d * (silu * u);
    }
    add_to_lanes(product, lanes);
  }
  return sum_of_lanes(lanes);
}

template <GateUpLayout layout>
struct ForwardRows {
  template <class T>
  [[gnu::always_inline]] static void run(const Swiglu<T>& args, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float gate = args.gate_R ? args.gate_R[r] : 1.0f;
      forward_row<layout>(args.h + r * args.h_stride, gate, args.width, args.a + r * args.width);
    }
  }
};

template <GateUpLayout layout>
struct BackwardRows {
  template <class T>
  [[gnu::always_inline]] static void run(const SwigluBackward<T>& args, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float gate = args.gate_R ? args.gate_R[r] : 1.0f;
      const float dgate = backward_row<layout>(args.da + r * args.da_stride, args.h + r * args.h_stride, gate,
                                               args.width, args.dh + 2 * r * args.width);
      if (args.dgate_R) args.dgate_R[r] = dgate;
    }
  }
};

}  // namespace

template <class T>
void swiglu(const Swiglu<T>& args, ParallelFor parallel_for) {
  const int64_t row_bytes = 3 * args.width * static_cast<int64_t>(sizeof(T));
  for_ranges(parallel_for, args.num_rows, row_grain(row_bytes), [&](int64_t begin, int64_t end) {
    if (args.layout == GateUpLayout::interleaved) {
      run_widest<ForwardRows<GateUpLayout::interleaved>>(args, begin, end);
    } else {
      run_widest<ForwardRows<GateUpLayout::concatenated>>(args, begin, end);
    }
  });
}

template <class T>
void swiglu_backward(const SwigluBackward<T>& args, ParallelFor parallel_for) {
  const int64_t row_bytes = 5 * args.width * static_cast<int64_t>(sizeof(T));
  for_ranges(parallel_for, args.num_rows, row_grain(row_bytes), [&](int64_t begin, int64_t end) {
    if (args.layout == GateUpLayout::interleaved) {
      run_widest<BackwardRows<GateUpLayout::interleaved>>(args, begin, end);
    } else {
      run_widest<BackwardRows<GateUpLayout::concatenated>>(args, begin, end);
    }
  });
}

template void swiglu(const Swiglu<float>&, ParallelFor);
template void swiglu(const Swiglu<bfloat16>&, ParallelFor);
template void swiglu_backward(const SwigluBackward<float>&, ParallelFor);
template void swiglu_backward(const SwigluBackward<bfloat16>&, ParallelFor);

}  // namespace moe_runtime
