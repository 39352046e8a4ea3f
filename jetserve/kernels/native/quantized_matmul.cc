// x [T, K] times a packed quantized weight [K, N].
//
// A weight is cut into tiles of kLanes columns, and along K into steps of 32. A step of a tile is
//   4 bits: 4 vectors; byte 4c + i of vector j holds k = 8j + i in its low nibble and k = 8j + 4 + i in its high one,
//           of column c, as unsigned value + 8;
//   8 bits: 8 vectors; byte 4c + i of vector j holds k = 4j + i of column c, signed.
// So one 32-bit lane is one column, and a broadcast of four activations meets four weights of every column.
//
// y[n] = sum over blocks of scale[g, n] * (sum over k of q x) + offset[g, n] * (sum over k of x), where q is the stored
// value and offset = -scale * (zero point + 8 or 0). Activations are int8 with a scale for each step of 32, or float32.

#include <algorithm>
#include <vector>

#include "common.h"

namespace jetserve {
namespace {

constexpr int kStep = 32;
constexpr int kMaxRows = 4;

struct Weight {
  const uint8_t* values;  // [tiles][K / 32][step bytes]
  const float* scale;     // [tiles][G][kLanes]
  const float* offset;    // the same, or null for zero
  int64_t K, N, block;    // K is a multiple of the step; block = K for per-channel
};

// One row of quantized activations.
struct Row {
  const int8_t* values;   // [K]
  const float* scale;     // [K / 32]
  const float* sum;       // [G], of the values times their scale
  const int32_t* step_sum;  // [K / 32], of the values alone
};

template <int kBits>
constexpr int64_t StepBytes() {
  return int64_t{kStep} * kLanes * kBits / 8;
}

inline int64_t Tiles(int64_t N) { return (N + kLanes - 1) / kLanes; }

// The first `columns` lanes.
inline void Put(float* y, VecF value, int64_t columns) {
  if (columns == kLanes) StoreF(y, value);
  else for (int64_t c = 0; c < columns; ++c) y[c] = value[c];
}

inline int32_t Four(const int8_t* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// Dot products of one step with R rows: out[r] += sum over 32 of q x, for every column.
template <int kBits, int R>
inline void DotStep(const uint8_t* w, const Row* rows, int64_t step, VecI* out) {
  const int8_t* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows[r].values + step * kStep;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(JETSERVE_PORTABLE)
  __m512i acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_si512();
  if constexpr (kBits == 4) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      __m512i v = _mm512_loadu_si512(w + 64 * j);
      __m512i lo = _mm512_and_si512(v, mask), hi = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
      for (int r = 0; r < R; ++r) {
        acc[r] = _mm512_dpbusd_epi32(acc[r], lo, _mm512_set1_epi32(Four(x[r] + 8 * j)));
        acc[r] = _mm512_dpbusd_epi32(acc[r], hi, _mm512_set1_epi32(Four(x[r] + 8 * j + 4)));
      }
    }
  } else {
    // The instruction takes unsigned weights: value + 128, and 128 times the sum of x is taken off again.
    const __m512i bias = _mm512_set1_epi8(-128);
    for (int j = 0; j < 8; ++j) {
      __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), bias);
      for (int r = 0; r < R; ++r) acc[r] = _mm512_dpbusd_epi32(acc[r], v, _mm512_set1_epi32(Four(x[r] + 4 * j)));
    }
    for (int r = 0; r < R; ++r) acc[r] = _mm512_sub_epi32(acc[r], _mm512_set1_epi32(128 * rows[r].step_sum[step]));
  }
  for (int r = 0; r < R; ++r) out[r] = reinterpret_cast<VecI>(acc[r]);
#elif defined(__AVX2__) && !defined(JETSERVE_PORTABLE)
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kBits == 4) {
    // 8 products of pairs, each at most 15 * 127 * 2, fit 16 bits: 30,480.
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; ++j) {
      __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * j));
      __m256i lo = _mm256_and_si256(v, mask), hi = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
      for (int r = 0; r < R; ++r) {
        acc[r] = _mm256_add_epi16(acc[r], _mm256_maddubs_epi16(lo, _mm256_set1_epi32(Four(x[r] + 8 * j))));
        acc[r] = _mm256_add_epi16(acc[r], _mm256_maddubs_epi16(hi, _mm256_set1_epi32(Four(x[r] + 8 * j + 4))));
      }
    }
    for (int r = 0; r < R; ++r) out[r] = reinterpret_cast<VecI>(_mm256_madd_epi16(acc[r], ones));
  } else {
    // |w| times x with w's sign: a pair is at most 128 * 127 * 2, which fits 16 bits just once.
    __m256i acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_si256();
    for (int j = 0; j < 8; ++j) {
      __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * j));
      __m256i magnitude = _mm256_abs_epi8(v);
      for (int r = 0; r < R; ++r) {
        __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(_mm256_set1_epi32(Four(x[r] + 4 * j)), v));
        acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(pairs, ones));
      }
    }
    for (int r = 0; r < R; ++r) out[r] = reinterpret_cast<VecI>(acc[r]);
  }
#else
  for (int r = 0; r < R; ++r) out[r] = VecI{};
  for (int j = 0; j < kStep / (32 / kBits); ++j) {
    VecI v = LoadI(w + 4 * kLanes * j);
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBits == 4) {
        VecI lo = (v >> (8 * i)) & 15, hi = (v >> (8 * i + 4)) & 15;
        for (int r = 0; r < R; ++r) out[r] += lo * x[r][8 * j + i] + hi * x[r][8 * j + 4 + i];
      } else {
        VecI q = (v << (24 - 8 * i)) >> 24;
        for (int r = 0; r < R; ++r) out[r] += q * x[r][4 * j + i];
      }
    }
  }
#endif
}

// One tile of columns for R rows of quantized activations.
template <int kBits, int R>
void TileQuantized(const Weight& w, int64_t tile, const Row* rows, float* const* y, int64_t columns) {
  const int64_t steps = w.K / kStep, per_block = w.block / kStep, blocks = steps / per_block;
  const uint8_t* values = w.values + tile * steps * StepBytes<kBits>();
  const float* scale = w.scale + tile * blocks * kLanes;
  const float* offset = w.offset ? w.offset + tile * blocks * kLanes : nullptr;
  VecF total[R];
  for (int r = 0; r < R; ++r) total[r] = VecF{};
  for (int64_t g = 0, step = 0; g < blocks; ++g) {
    VecF part[R];
    for (int r = 0; r < R; ++r) part[r] = VecF{};
    for (int64_t end = step + per_block; step < end; ++step, values += StepBytes<kBits>()) {
      VecI dots[R];
      DotStep<kBits, R>(values, rows, step, dots);
      for (int r = 0; r < R; ++r) part[r] += ToFloat(dots[r]) * rows[r].scale[step];
    }
    VecF s = LoadF(scale + g * kLanes);
    for (int r = 0; r < R; ++r) total[r] += part[r] * s;
    if (offset) {
      VecF o = LoadF(offset + g * kLanes);
      for (int r = 0; r < R; ++r) total[r] += o * rows[r].sum[g];
    }
  }
  for (int r = 0; r < R; ++r) Put(y[r], total[r], columns);
}

void QuantizeRow(const float* x, int64_t K, int64_t block, int8_t* values, float* scale, float* sum,
                 int32_t* step_sum) {
  std::fill(sum, sum + K / block, 0.0f);
  for (int64_t step = 0; step < K / kStep; ++step) {
    const float* from = x + step * kStep;
    float range = 0;
    for (int64_t i = 0; i < kStep; ++i) range = std::max(range, std::fabs(from[i]));
    float s = range / 127, inverse = range > 0 ? 127 / range : 0;
    int32_t total = 0;
    int8_t* to = values + step * kStep;
    for (int64_t i = 0; i < kStep; ++i) {
      int32_t q = static_cast<int32_t>(std::nearbyint(from[i] * inverse));
      to[i] = static_cast<int8_t>(q);
      total += q;
    }
    scale[step] = s;
    step_sum[step] = total;
    sum[step * kStep / block] += s * static_cast<float>(total);
  }
}

// The same for activations in float32: `sums[r]` [G] are those of x over the blocks.
template <int kBits, int R>
void TileFloat(const Weight& w, int64_t tile, const float* const* x, const float* const* sums, float* const* y,
               int64_t columns) {
  const int64_t steps = w.K / kStep, per_block = w.block / kStep, blocks = steps / per_block;
  const uint8_t* values = w.values + tile * steps * StepBytes<kBits>();
  const float* scale = w.scale + tile * blocks * kLanes;
  const float* offset = w.offset ? w.offset + tile * blocks * kLanes : nullptr;
  constexpr int kChains = 8 / R;  // sums that do not wait for each other
  VecF total[R];
  for (int r = 0; r < R; ++r) total[r] = VecF{};
  for (int64_t g = 0, step = 0; g < blocks; ++g) {
    VecF part[R][kChains] = {};
    for (int64_t end = step + per_block; step < end; ++step, values += StepBytes<kBits>()) {
      const int64_t base = step * kStep;
      for (int j = 0; j < kStep * kBits / 32; ++j) {
        VecI v = LoadI(values + 4 * kLanes * j);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          if constexpr (kBits == 4) {
            VecF lo = ToFloat((v >> (8 * i)) & 15), hi = ToFloat((v >> (8 * i + 4)) & 15);
            for (int r = 0; r < R; ++r) {
              part[r][2 * i % kChains] += lo * x[r][base + 8 * j + i];
              part[r][(2 * i + 1) % kChains] += hi * x[r][base + 8 * j + 4 + i];
            }
          } else {
            VecF q = ToFloat((v << (24 - 8 * i)) >> 24);
            for (int r = 0; r < R; ++r) part[r][i % kChains] += q * x[r][base + 4 * j + i];
          }
        }
      }
    }
    VecF s = LoadF(scale + g * kLanes);
    for (int r = 0; r < R; ++r) {
      VecF sum = part[r][0];
      for (int c = 1; c < kChains; ++c) sum += part[r][c];
      total[r] += sum * s;
      if (offset) total[r] += LoadF(offset + g * kLanes) * sums[r][g];
    }
  }
  for (int r = 0; r < R; ++r) Put(y[r], total[r], columns);
}

// Calls tile(tile index, first row, how many rows: 1, 2 or 4) for all tiles and rows, over the pool's threads.
template <typename F>
void ForTiles(ffi::ThreadPool& pool, int64_t tiles, int64_t T, const F& tile) {
  constexpr int64_t kRowGroup = 64;  // rows that take turns with a tile while it is in the cache
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t per_task = std::clamp<int64_t>(tiles / (4 * threads), 1, 64);
  const int64_t row_groups = (T + kRowGroup - 1) / kRowGroup;
  ParallelFor(pool, (tiles + per_task - 1) / per_task * row_groups, [&](int64_t task) {
    const int64_t first = task / row_groups * per_task, last = std::min(tiles, first + per_task);
    const int64_t t0 = task % row_groups * kRowGroup, t1 = std::min(T, t0 + kRowGroup);
    for (int64_t i = first; i < last; ++i) {
      for (int64_t t = t0, rows; t < t1; t += rows) {
        rows = t1 - t >= 4 ? 4 : t1 - t >= 2 ? 2 : 1;
        tile(i, t, rows);
      }
    }
  });
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

template <int kBits>
void MultiplyInt8(ffi::ThreadPool& pool, const Weight& w, const float* x, int64_t T, float* y) {
  const int64_t steps = w.K / kStep, blocks = w.K / w.block;
  std::vector<int8_t> values(T * w.K);
  std::vector<float> scale(T * steps), sum(T * blocks);
  std::vector<int32_t> step_sum(T * steps);
  std::vector<Row> rows(T);
  ForRows(pool, T, [&](int64_t t) {
    QuantizeRow(x + t * w.K, w.K, w.block, &values[t * w.K], &scale[t * steps], &sum[t * blocks], &step_sum[t * steps]);
    rows[t] = {&values[t * w.K], &scale[t * steps], &sum[t * blocks], &step_sum[t * steps]};
  });
  ForTiles(pool, Tiles(w.N), T, [&](int64_t tile, int64_t t, int64_t count) {
    float* out[kMaxRows];
    for (int64_t r = 0; r < count; ++r) out[r] = y + (t + r) * w.N + tile * kLanes;
    const int64_t columns = std::min<int64_t>(kLanes, w.N - tile * kLanes);
    if (count == 4) TileQuantized<kBits, 4>(w, tile, &rows[t], out, columns);
    else if (count == 2) TileQuantized<kBits, 2>(w, tile, &rows[t], out, columns);
    else TileQuantized<kBits, 1>(w, tile, &rows[t], out, columns);
  });
}

template <int kBits>
void MultiplyFloat(ffi::ThreadPool& pool, const Weight& w, const float* x, int64_t T, float* y) {
  const int64_t blocks = w.K / w.block;
  std::vector<float> sum(T * blocks);
  ForRows(pool, T, [&](int64_t t) {
    for (int64_t g = 0; g < blocks; ++g) {
      float total = 0;
      for (int64_t k = g * w.block; k < (g + 1) * w.block; ++k) total += x[t * w.K + k];
      sum[t * blocks + g] = total;
    }
  });
  ForTiles(pool, Tiles(w.N), T, [&](int64_t tile, int64_t t, int64_t count) {
    float* out[kMaxRows];
    const float *from[kMaxRows], *sums[kMaxRows];
    for (int64_t r = 0; r < count; ++r) {
      out[r] = y + (t + r) * w.N + tile * kLanes;
      from[r] = x + (t + r) * w.K;
      sums[r] = &sum[(t + r) * blocks];
    }
    const int64_t columns = std::min<int64_t>(kLanes, w.N - tile * kLanes);
    if (count == 4) TileFloat<kBits, 4>(w, tile, from, sums, out, columns);
    else if (count == 2) TileFloat<kBits, 2>(w, tile, from, sums, out, columns);
    else TileFloat<kBits, 1>(w, tile, from, sums, out, columns);
  });
}

ffi::Error MatmulImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> values,
                      ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> offset, ffi::ResultBuffer<ffi::F32> y,
                      int64_t bits, int64_t block, bool quantize_activation) {
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  if ((bits != 4 && bits != 8) || block <= 0 || block % kStep || K % block) {
    return ffi::Error::InvalidArgument("found bits, block or K that the layout does not have");
  }
  const int64_t steps = Tiles(N) * (K / kStep), blocks = Tiles(N) * (K / block) * kLanes;
  if (static_cast<int64_t>(values.element_count()) != steps * kStep * kLanes * bits / 8 ||
      static_cast<int64_t>(scale.element_count()) != blocks ||
      (offset.element_count() && static_cast<int64_t>(offset.element_count()) != blocks)) {
    return ffi::Error::InvalidArgument("found a packed weight of another size than its shape says");
  }
  const Weight w{values.typed_data(), scale.typed_data(), offset.element_count() ? offset.typed_data() : nullptr,
                 K, N, block};
  auto multiply = quantize_activation ? (bits == 4 ? MultiplyInt8<4> : MultiplyInt8<8>)
                                      : (bits == 4 ? MultiplyFloat<4> : MultiplyFloat<8>);
  multiply(pool, w, x.typed_data(), T, y->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jetserve_quantized_matmul, MatmulImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block")
                                  .Attr<bool>("quantize_activation"));

}  // namespace jetserve

extern "C" int jetserve_lanes() { return jetserve::kLanes; }
