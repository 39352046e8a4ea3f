// What the kernels share: vectors, conversions, and splitting work over XLA's own thread pool.
#ifndef JETSERVE_KERNELS_COMMON_H_
#define JETSERVE_KERNELS_COMMON_H_

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jetserve {

namespace ffi = xla::ffi;

// Which instructions there are for what the compiler does not find by itself. JETSERVE_PORTABLE forgets them all.
#if !defined(JETSERVE_PORTABLE)
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define JETSERVE_AVX512
#if defined(__AVX512VNNI__)
#define JETSERVE_VNNI
#endif
#elif defined(__AVX2__) && defined(__F16C__)
#define JETSERVE_AVX2
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define JETSERVE_DOTPROD
#endif
#endif

// Columns of a weight that one vector of 32-bit lanes holds.
#if defined(JETSERVE_AVX512)
inline constexpr int kLanes = 16;
#else
inline constexpr int kLanes = 8;
#endif

typedef float VecF __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline VecF Splat(float x) { return VecF{} + x; }
inline VecF LoadF(const float* p) { return *reinterpret_cast<const VecF*>(p); }
inline void StoreF(float* p, VecF v) { *reinterpret_cast<VecF*>(p) = v; }
inline VecI LoadI(const void* p) { return *reinterpret_cast<const VecI*>(p); }
inline VecF ToFloat(VecI v) { return __builtin_convertvector(v, VecF); }

inline float Sum(VecF v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

inline float FromBf16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Rounds to nearest even. NaN stays NaN.
inline uint16_t ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Runs f(task) for tasks 0..count-1, on the caller and on the pool's other threads, and returns when all are done.
//
// Work is taken from a counter, so nothing waits for a pool thread that is busy elsewhere: the caller does what nobody
// else takes. A task that the pool starts late finds nothing left, and touches only the shared counter.
template <typename F>
void ParallelFor(ffi::ThreadPool& pool, int64_t count, const F& f) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  auto state = std::make_shared<State>();
  const F* body = &f;
  auto work = [state, body, count] {
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      (*body)(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) {
    auto copy = work;
    pool.Schedule(std::move(copy));
  }
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 2000) std::this_thread::yield();
#if defined(__SSE2__)
    else _mm_pause();
#endif
  }
}

}  // namespace jetserve

#endif  // JETSERVE_KERNELS_COMMON_H_
