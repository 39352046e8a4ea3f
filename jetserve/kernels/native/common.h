// What the kernels share: vectors, conversions, and splitting work over XLA's own thread pool.
#ifndef JETSERVE_KERNELS_COMMON_H_
#define JETSERVE_KERNELS_COMMON_H_

#include <algorithm>
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

inline float FromHalf(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float value;
  if (rest < 0x0400) {  // zero, or too small for a normal number
    value = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t wide = sign | ((rest << 13) + (rest < 0x7c00 ? 0x38000000u : 0x70000000u));
  std::memcpy(&value, &wide, 4);
  return value;
}

// kLanes float16 numbers.
inline VecF LoadHalf(const void* p) {
#if defined(JETSERVE_AVX512)
  return reinterpret_cast<VecF>(_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(JETSERVE_AVX2)
  return reinterpret_cast<VecF>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
  uint16_t bits[kLanes];
  std::memcpy(bits, p, sizeof(bits));
  VecF out;
  for (int i = 0; i < kLanes; ++i) out[i] = FromHalf(bits[i]);
  return out;
#endif
}

// 2 kLanes int8 numbers as int16, two to a lane.
inline VecI WidenToInt16(const void* p) {
#if defined(JETSERVE_AVX512)
  return reinterpret_cast<VecI>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(JETSERVE_AVX2)
  return reinterpret_cast<VecI>(_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
  int8_t bytes[2 * kLanes];
  int16_t wide[2 * kLanes];
  std::memcpy(bytes, p, sizeof(bytes));
  for (int i = 0; i < 2 * kLanes; ++i) wide[i] = bytes[i];
  VecI out;
  std::memcpy(&out, wide, sizeof(wide));
  return out;
#endif
}

// Computes `v` here. Compilers otherwise put off long chains of sums, and run out of registers for what they add.
template <typename V>
inline void Settle(V& v) {
#if defined(JETSERVE_AVX512)
  asm("" : "+v"(v));
#elif defined(JETSERVE_AVX2)
  asm("" : "+x"(v));
#elif defined(JETSERVE_DOTPROD)
  if constexpr (sizeof(V) == 16) asm("" : "+w"(v));
#endif
}

// The four bytes at p.
inline int32_t Word(const void* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

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

inline void Pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Numbers on the heap that are written before they are read: clearing them first, as std::vector does, takes its time.
template <typename T>
class Room {
 public:
  explicit Room(int64_t size) : size_(size), numbers_(size ? new T[size] : nullptr) {}
  T& operator[](int64_t i) { return numbers_[i]; }
  const T& operator[](int64_t i) const { return numbers_[i]; }
  T* data() { return numbers_.get(); }
  const T* data() const { return numbers_.get(); }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  std::unique_ptr<T[]> numbers_;
};

// The job that threads of the pool help with. One at a time: a step's kernels follow each other, and a thread that has
// helped stays for the next one, because waking another takes as long as many a kernel does.
class Team {
 public:
  // Runs body(context, task) for tasks 0..count-1, here and on up to `helpers` threads of the pool; false, having done
  // nothing, if there is another job.
  bool Run(ffi::ThreadPool& pool, int64_t helpers, int64_t count, void (*body)(const void*, int64_t), const void* context) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    body_ = body, context_ = context, count_ = count, done_ = 0;
    ticket_.store(Next(0), std::memory_order_release);
    while (present_.load(std::memory_order_relaxed) < helpers) {
      present_.fetch_add(1, std::memory_order_relaxed);
      pool.Schedule([this] { Help(); });
    }
    Work();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < kSpins) Pause();
      else std::this_thread::yield();
    }
    ticket_.store(Next(kClosed), std::memory_order_release);
    busy_.clear(std::memory_order_release);
    return true;
  }

 private:
  static constexpr int kSpins = 4000;  // some 100 microseconds
  static constexpr uint64_t kClosed = 0x7fffffff;

  uint64_t Next(uint64_t task) const { return ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | task; }

  // Takes tasks while there are any, and says whether it got one. A job's fields change only while the ticket is closed,
  // so what was read of them belongs together if the ticket can then be moved on.
  bool Work() {
    bool has_worked = false;
    for (uint64_t ticket = ticket_.load(std::memory_order_acquire);;) {
      const auto body = body_.load(std::memory_order_relaxed);
      const auto context = context_.load(std::memory_order_relaxed);
      const int64_t task = static_cast<int64_t>(ticket & 0xffffffff);
      if (task >= count_.load(std::memory_order_relaxed)) return has_worked;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      body(context, task);
      done_.fetch_add(1, std::memory_order_release);
      has_worked = true;
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void Help() {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (Work()) spins = 0;
      Pause();
    }
    present_.fetch_sub(1, std::memory_order_relaxed);
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::atomic<uint64_t> ticket_{kClosed};  // the job's number, and in the low half its next task
  std::atomic<void (*)(const void*, int64_t)> body_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> count_{0}, done_{0};
  std::atomic<int64_t> present_{0};  // helpers that run or will
};

inline Team team;

// Runs f(task) for tasks 0..count-1, on the caller and on the pool's other threads, and returns when all are done.
// Nothing waits for a thread that is busy elsewhere: the caller does what nobody else takes.
template <typename F>
void ParallelFor(ffi::ThreadPool& pool, int64_t count, const F& f) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  auto body = [](const void* context, int64_t task) { (*static_cast<const F*>(context))(task); };
  if (helpers > 0 && count < int64_t{1} << 31 && team.Run(pool, helpers, count, body, &f)) return;
  for (int64_t i = 0; i < count; ++i) f(i);
}

// Calls f(row) for all rows, over the pool's threads where that pays.
template <typename F>
void ForRows(ffi::ThreadPool& pool, int64_t T, const F& f) {
  constexpr int64_t kRows = 8;
  if (T <= kRows) {
    for (int64_t t = 0; t < T; ++t) f(t);
  } else {
    ParallelFor(pool, (T + kRows - 1) / kRows, [&](int64_t i) {
      for (int64_t t = i * kRows; t < std::min(T, (i + 1) * kRows); ++t) f(t);
    });
  }
}

}  // namespace jetserve

#endif  // JETSERVE_KERNELS_COMMON_H_
