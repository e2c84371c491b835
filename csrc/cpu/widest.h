// Compiling a hot loop once per vector width and running the widest that this CPU has.
#pragma once

#include <cstdint>

namespace moe_runtime {

// A kernel is a struct with `[[gnu::always_inline]] static void run(...)`: inlined into each function below, its loops
// are vectorized for that function's target. All versions give the same bits: contraction is off (-ffp-contract=off)
// and no sum's order depends on the width. With MOE_RUNTIME_BASELINE_ONLY, or off x86-64, the compiler's own target is
// the only one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(MOE_RUNTIME_BASELINE_ONLY)

template <class Kernel, class... Args>
__attribute__((target("avx512f,avx512bw"))) void run_avx512(Args&... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
__attribute__((target("avx2"))) void run_avx2(Args&... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
void run_baseline(Args&... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
void run_widest(Args&... args) {
  if (__builtin_cpu_supports("avx512bw")) return run_avx512<Kernel>(args...);
  if (__builtin_cpu_supports("avx2")) return run_avx2<Kernel>(args...);
  run_baseline<Kernel>(args...);
}

#else

template <class Kernel, class... Args>
void run_widest(Args&... args) {
  Kernel::run(args...);
}

#endif

}  // namespace moe_runtime
