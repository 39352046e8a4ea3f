// How fast this machine reads memory and multiplies. Usage: machine_limits KIND THREADS MEGABYTES SECONDS, where KIND is
// read, float or int8. Prints bytes or operations a second (a multiplication and an addition are two) of all threads
// together; 0 for instructions that this program was not compiled for.
//
// The threads work side by side, again and again until the time is over, and the best time counts: what else runs on the
// machine only takes away.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4)));
constexpr int kChains = 12;  // results that do not wait for each other
constexpr int kTurns = 1000000;
constexpr double kBytesATime = 2e8;

// The compiler may not know what v holds from here on.
template <typename V>
void Forget(V& v) {
  asm volatile("" : "+m"(v));
}

// Sums an array, several times; the bytes that were read.
double Read(const std::vector<float>& data) {
  const size_t count = data.size() / kLanes / 8 * 8;
  const double bytes = 4.0 * kLanes * count;
  const int passes = std::max(1, static_cast<int>(kBytesATime / bytes));
  for (int pass = 0; pass < passes; ++pass) {
    Vec sums[8] = {};
    const Vec* p = reinterpret_cast<const Vec*>(data.data());
    for (size_t i = 0; i < count; i += 8) {
      for (int j = 0; j < 8; ++j) sums[j] += p[i + j];
    }
    for (Vec& sum : sums) Forget(sum);
  }
  return bytes * passes;
}

double Float() {
  Vec sums[kChains] = {}, a = Vec{} + 1.0f, b = Vec{} + 1e-9f;
  Forget(a), Forget(b);
  for (int i = 0; i < kTurns; ++i) {
    for (int j = 0; j < kChains; ++j) sums[j] = sums[j] * a + b;
  }
  for (Vec& sum : sums) Forget(sum);
  return 2.0 * kLanes * kChains * kTurns;
}

// What an int8 matmul does for each of its products: these instructions, on operands that are new every time.
#if defined(__AVX512VNNI__)
typedef __m512i VecI;
#define JETSERVE_ANY_REGISTER "+v"
VecI MultiplyAdd(VecI sum, VecI a, VecI b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVX2__)
typedef __m256i VecI;
#define JETSERVE_ANY_REGISTER "+x"
VecI MultiplyAdd(VecI sum, VecI a, VecI b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int32x4_t VecI;
#define JETSERVE_ANY_REGISTER "+w"
VecI MultiplyAdd(VecI sum, VecI a, VecI b) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#endif

double Int8() {
#if defined(JETSERVE_ANY_REGISTER)
  VecI sums[kChains] = {}, a = {}, b = {};
  Forget(a), Forget(b);
  for (int i = 0; i < kTurns; ++i) {
    for (int j = 0; j < kChains; ++j) {
      VecI fresh = a;
      asm volatile("" : JETSERVE_ANY_REGISTER(fresh));
      sums[j] = MultiplyAdd(sums[j], fresh, b);
    }
  }
  for (VecI& sum : sums) Forget(sum);
  return 2.0 * sizeof(VecI) * kChains * kTurns;
#else
  return 0;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::string kind = argv[1];
  const int threads = std::atoi(argv[2]);
  const double seconds = std::atof(argv[4]);
  const size_t floats = kind == "read" ? static_cast<size_t>(std::atof(argv[3]) * 1e6 / 4 / threads) : 0;
  std::vector<std::vector<float>> data(threads, std::vector<float>(floats, 1.0f));
  std::vector<double> done(threads);
  double best = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (auto stop = begin; stop - begin < std::chrono::duration<double>(seconds);) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> pool;
    for (int i = 0; i < threads; ++i) {
      pool.emplace_back([&, i] { done[i] = kind == "read" ? Read(data[i]) : kind == "float" ? Float() : Int8(); });
    }
    double total = 0;
    for (int i = 0; i < threads; ++i) pool[i].join(), total += done[i];
    stop = std::chrono::steady_clock::now();
    best = std::max(best, total / std::chrono::duration<double>(stop - start).count());
  }
  std::printf("%.6g\n", best);
}
