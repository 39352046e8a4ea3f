// x [T, K] times packed quantized weights [K, N], several of them in one call.
//
// A weight is cut into tiles of kLanes columns, which lie one after the other. A tile is its blocks along K; a block is
//   kLanes scales, then, where the weight has offsets, as all of 4 bits have, kLanes of them: float32, or float16 where
//   that is exact;
//   steps of 32 along K, each of
//     4 bits: 4 vectors of 32-bit lanes; byte 4c + i of vector j holds k = 8j + i of column c in its low nibble and
//             k = 8j + 4 + i in its high one, as unsigned value + 8;
//     8 bits: 16 vectors of 16-bit lanes; byte 2c + i of vector j holds k = 2j + i of column c, signed.
// So one 32-bit lane is one column, and a broadcast of some activations meets as many weights of every column.
//
// y[n] = bias[n] + sum over blocks of scale[g, n] * (sum over k of q x) + offset[g, n] * (sum over k of x), where q is
// the stored value and offset = -scale * (zero point + 8 or 0). With float32 activations the 8 is taken off q first:
// two great sums whose difference is small would lose digits.
//
// Activations are float32, or integers with a scale for each step of 32: int8 for 4-bit weights. 8-bit ones get int16,
// which costs no more: their products with int8 do not fit the 16 bits that the instruction has for them. One that
// stands out among the 32 stays float32 and meets its weights by itself: in int8 it would take the others' precision
// away, and models have channels that do so at every token (Dettmers et al., "LLM.int8()", 2022).

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace jetserve {
namespace {

constexpr int kStep = 32;
constexpr int kBias4 = 8;  // that 4-bit values are stored with
constexpr int kMaxRows = 4;  // that share the loading of a weight
constexpr int kTiles = 2;    // that share the loading of an activation
constexpr int kAhead = 1024;  // bytes that weights are fetched ahead of their use
constexpr float kOutlier = 3;  // times the greatest of the others
constexpr int kPanel = 256;  // vectors of a tile that are unpacked at once, to stay in the nearest cache

// Where a tile holds what belongs to one k: bytes from the tile's start, and bits.
struct Place {
  int64_t block, vector;
  int shift;
};

struct Weight {
  Weight(const uint8_t* data, int64_t N, int64_t steps, int64_t block_steps, int bits, bool is_half, bool has_offset)
      : data(data), N(N), steps(steps), block_steps(block_steps), blocks(steps / block_steps),
        tiles((N + kLanes - 1) / kLanes), step_bytes(int64_t{kStep} * kLanes * bits / 8),
        head_bytes((has_offset ? 2 : 1) * kLanes * (is_half ? 2 : 4)),
        block_bytes(head_bytes + block_steps * step_bytes), tile_bytes(blocks * block_bytes), bits(bits),
        is_half(is_half), has_offset(has_offset) {}

  const uint8_t* data;
  int64_t N, steps, block_steps, blocks, tiles, step_bytes, head_bytes, block_bytes, tile_bytes;
  int bits;
  bool is_half, has_offset;
  const float* bias = nullptr;  // [N], or null
  float* y = nullptr;           // [T, N]
  const float* sums = nullptr;  // of x over the blocks, as `BlockSums` lays them out; null without offsets
  std::vector<Place> channels;  // of outliers

  VecF Scale(const uint8_t* block) const { return is_half ? LoadHalf(block) : LoadF(reinterpret_cast<const float*>(block)); }
  VecF Offset(const uint8_t* block) const { return Scale(block + kLanes * (is_half ? 2 : 4)); }

  // For 4 bits.
  Place Find(int64_t k) const {
    const int64_t step = k / kStep, block = step / block_steps * block_bytes;
    return {block, block + head_bytes + step % block_steps * step_bytes + k % kStep / 8 * 4 * kLanes,
            static_cast<int>(k % 4 * 8 + k % 8 / 4 * 4)};
  }
};

// By whole vectors: what is cleared in halves cannot be read back at once.
template <typename V, int n>
inline void Clear(V (&vectors)[n]) {
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) vectors[i] = V{}, Settle(vectors[i]);
}

// How activations are held, and the arithmetic that goes with it. An instance is n sums over one step.
//   Value: an activation. kGroup: k's that one 32-bit lane of a vector of weights holds, so kVectors a step.
//   ForVectors(step, f): f(j, v) for every vector of a step.
//   Add(i, j, v, x): meets vector j of a step of weights with the same k's of a row, for sum i. Sum(i): the total.
//   kBlocksAreShort: whether blocks of one step are so common that they have code of their own.

template <int n>
struct Int8 {
  using Value = int8_t;
  static constexpr int kBits = 4, kGroup = 4, kVectors = 8;
  static constexpr bool kBlocksAreShort = true;
  static constexpr float kTop = 127;

#if defined(JETSERVE_VNNI)
  __m512i sums[n];
  Int8() { Clear(sums); }
  void Add(int i, int, VecI v, const int8_t* x) {
    sums[i] = _mm512_dpbusd_epi32(sums[i], reinterpret_cast<__m512i>(v), _mm512_set1_epi32(Word(x)));
    Settle(sums[i]);
  }
  VecF Sum(int i) const { return ToFloat(reinterpret_cast<VecI>(sums[i])); }
#elif defined(JETSERVE_AVX2)
  // 8 sums of pairs, each at most 15 * 127 * 2, fit 16 bits: 30,480.
  __m256i sums[n];
  Int8() { Clear(sums); }
  void Add(int i, int, VecI v, const int8_t* x) {
    __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(v), _mm256_set1_epi32(Word(x)));
    sums[i] = _mm256_add_epi16(sums[i], pairs);
    Settle(sums[i]);
  }
  VecF Sum(int i) const {
    return reinterpret_cast<VecF>(_mm256_cvtepi32_ps(_mm256_madd_epi16(sums[i], _mm256_set1_epi16(1))));
  }
#elif defined(JETSERVE_DOTPROD)
  int32x4_t sums[n][2] = {};
  void Add(int i, int, VecI v, const int8_t* x) {
    int8x16_t row = vreinterpretq_s8_s32(vdupq_n_s32(Word(x))), w[2];
    std::memcpy(w, &v, 32);
    for (int h = 0; h < 2; ++h) {
      sums[i][h] = vdotq_s32(sums[i][h], w[h], row);
      Settle(sums[i][h]);
    }
  }
  VecF Sum(int i) const {
    VecI total;
    std::memcpy(&total, sums[i], 32);
    return ToFloat(total);
  }
#else
  VecI sums[n] = {};
  void Add(int i, int, VecI v, const int8_t* x) {
    for (int k = 0; k < 4; ++k) sums[i] += ((v >> (8 * k)) & 255) * x[k];
  }
  VecF Sum(int i) const { return ToFloat(sums[i]); }
#endif

  template <typename F>
  static void ForVectors(const uint8_t* step, const F& f) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      VecI v = LoadI(step + 4 * kLanes * j);
      f(2 * j, v & 0x0f0f0f0f), f(2 * j + 1, (v >> 4) & 0x0f0f0f0f);
    }
  }
};

template <int n>
struct Int16 {
  using Value = int16_t;
  static constexpr int kBits = 8, kGroup = 2, kVectors = 16;
  static constexpr bool kBlocksAreShort = false;
  static constexpr float kTop = 32767;
  VecI sums[n];  // at most 32 * 128 * 32,767 < 2^27
  Int16() { Clear(sums); }

  void Add(int i, int, VecI v, const int16_t* x) {
#if defined(JETSERVE_AVX512)
    __m512i pairs = _mm512_madd_epi16(reinterpret_cast<__m512i>(v), _mm512_set1_epi32(Word(x)));
    sums[i] += reinterpret_cast<VecI>(pairs);
#elif defined(JETSERVE_AVX2)
    __m256i pairs = _mm256_madd_epi16(reinterpret_cast<__m256i>(v), _mm256_set1_epi32(Word(x)));
    sums[i] += reinterpret_cast<VecI>(pairs);
#else
    sums[i] += ((v << 16) >> 16) * x[0] + (v >> 16) * x[1];
#endif
    Settle(sums[i]);
  }
  VecF Sum(int i) const { return ToFloat(sums[i]); }

  template <typename F>
  static void ForVectors(const uint8_t* step, const F& f) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) f(j, WidenToInt16(step + 2 * kLanes * j));
  }
};

template <int kWeightBits>
struct Float {
  template <int n>
  struct Rows {
    using Value = float;
    static constexpr int kBits = kWeightBits, kGroup = 1, kVectors = 32;
    static constexpr bool kBlocksAreShort = false;
    static constexpr int kChains = 8 / n > 0 ? 8 / n : 1;  // sums that do not wait for each other
    VecF sums[n * kChains];
    Rows() { Clear(sums); }

    void Add(int i, int j, VecI v, const float* x) {
      sums[i * kChains + j % kChains] += reinterpret_cast<VecF>(v) * *x;
      Settle(sums[i * kChains + j % kChains]);
    }
    VecF Sum(int i) const {
      VecF total = sums[i * kChains];
      for (int c = 1; c < kChains; ++c) total += sums[i * kChains + c];
      return total;
    }

    template <typename F>
    static void ForVectors(const uint8_t* step, const F& f) {
      auto put = [&](int k, VecI v) { f(k, reinterpret_cast<VecI>(ToFloat(v))); };
      if constexpr (kBits == 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          VecI v = LoadI(step + 4 * kLanes * j);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            put(8 * j + i, ((v >> (8 * i)) & 15) - kBias4), put(8 * j + 4 + i, ((v >> (8 * i + 4)) & 15) - kBias4);
          }
        }
      } else {
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          VecI v = WidenToInt16(step + 2 * kLanes * j);
          put(2 * j, (v << 16) >> 16), put(2 * j + 1, v >> 16);
        }
      }
    }
  };
};

// An activation that is not among the quantized ones: of `channels[channel]`.
struct Outlier {
  int64_t channel;
  float x;
};

// x as the arithmetic wants it. Rows lie in groups of `rows`, the last one padded; within a group a step of 32 of each
// row follows the same one of the row before, so that one pointer walks them all.
template <typename Value>
struct Activations {
  int64_t T, steps, rows;
  Room<Value> values;    // [groups, steps, rows, 32], K padded to whole steps
  Room<float> scale;     // [groups, steps, rows]; none for float
  Room<float> step_sum;  // [groups, steps, rows], of x as the values say it
  std::vector<std::vector<Outlier>> outliers;  // [T] rows of them; none but for int8
  std::vector<int64_t> channels;  // k's that have any

  Activations(int64_t T, int64_t steps)
      : T(T), steps(steps), rows(std::min<int64_t>(T == 3 ? 4 : T, kMaxRows)), values(Groups() * steps * rows * kStep),
        scale(std::is_same_v<Value, float> ? 0 : Groups() * steps * rows), step_sum(Groups() * steps * rows),
        outliers(std::is_same_v<Value, int8_t> ? T : 0) {
    const int64_t padded = T % rows ? (Groups() - 1) * steps * rows : step_sum.size();  // the last group, if it is
    std::fill(values.data() + padded * kStep, values.data() + values.size(), Value{});
    if (scale.size()) std::fill(scale.data() + padded, scale.data() + scale.size(), 0.0f);
    std::fill(step_sum.data() + padded, step_sum.data() + step_sum.size(), 0.0f);
  }

  int64_t Groups() const { return (T + rows - 1) / rows; }
  // Of a step of row t, among all steps of all rows.
  int64_t Index(int64_t t, int64_t step) const { return (t / rows * steps + step) * rows + t % rows; }

  // Numbers the channels of outliers, which hold their k until now.
  void NumberChannels() {
    static thread_local std::vector<int32_t> numbers;  // by k, plus 1; all 0 between calls
    numbers.resize(std::max<size_t>(numbers.size(), steps * kStep));
    for (std::vector<Outlier>& row : outliers) {
      for (Outlier& outlier : row) {
        int32_t& number = numbers[outlier.channel];
        if (number == 0) channels.push_back(outlier.channel), number = static_cast<int32_t>(channels.size());
        outlier.channel = number - 1;
      }
    }
    for (int64_t k : channels) numbers[k] = 0;
  }
};

// Rounds to the nearest integer, to even where two are as near. |x| < 2^22.
inline VecI Round(VecF x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the last bit of its neighbours is 1
  return reinterpret_cast<VecI>(x + kMagic) - reinterpret_cast<VecI>(Splat(kMagic));
}

// The greatest magnitude among 32 activations, and the greatest of the others. Both are NaN if any is, or is infinite.
struct Range {
  float most, next;

  explicit Range(const float* x) {
    VecF top = {}, second = {}, poison = {};  // by lanes
    for (int i = 0; i < kStep; i += kLanes) {
      const VecF v = LoadF(x + i), magnitude = v < 0 ? -v : v, least = magnitude < top ? magnitude : top;
      top = magnitude > top ? magnitude : top;
      second = least > second ? least : second;
      poison += v - v;
    }
    float greatest[kLanes], others[kLanes];
    StoreF(greatest, top), StoreF(others, second);
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) {
        const float a = greatest[i], b = greatest[i + half], c = std::max(others[i], others[i + half]);
        others[i] = std::max(c, std::min(a, b)), greatest[i] = std::max(a, b);
      }
    }
    const float none = Sum(poison);  // 0, or NaN
    most = greatest[0] + none, next = others[0] + none;
  }
};

template <typename Value, int kTop>
void QuantizeStep(const float* x, float range, Value* values, float* scale, float* sum) {
  const float inverse = kTop / range;
  if (!(inverse < std::numeric_limits<float>::infinity())) {  // next to nothing, or NaN
    std::fill_n(values, kStep, Value{0});
    *scale = *sum = range * 0;
    return;
  }
  VecI total = {};
  for (int i = 0; i < kStep; i += kLanes) {
    VecI q = Round(LoadF(x + i) * inverse);
    total += q;
    for (int l = 0; l < kLanes; ++l) values[i + l] = static_cast<Value>(q[l]);
  }
  int32_t whole = 0;
  for (int i = 0; i < kLanes; ++i) whole += total[i];
  *scale = range / kTop;
  *sum = *scale * static_cast<float>(whole);
}

template <template <int> typename Rows>
Activations<typename Rows<1>::Value> Prepare(ffi::ThreadPool& pool, const float* x, int64_t T, int64_t K) {
  using Value = typename Rows<1>::Value;
  constexpr bool kIsFloat = std::is_same_v<Value, float>;
  Activations<Value> out(T, (K + kStep - 1) / kStep);
  ForRows(pool, T, [&](int64_t t) {
    for (int64_t s = 0; s < out.steps; ++s) {
      const int64_t index = out.Index(t, s);
      const int64_t valid = std::min<int64_t>(kStep, K - s * kStep);
      const float* from = x + t * K + s * kStep;
      float copy[kStep];
      if (valid < kStep) {
        std::fill(std::copy_n(from, valid, copy), copy + kStep, 0.0f);
        from = copy;
      }
      Value* to = &out.values[index * kStep];
      if constexpr (kIsFloat) {
        std::copy_n(from, kStep, to);
        VecF sum = {};
        for (int i = 0; i < kStep; i += kLanes) sum += LoadF(from + i);
        out.step_sum[index] = Sum(sum);
      } else {
        Range range(from);
        if (!out.outliers.empty() && range.most > kOutlier * range.next) {
          if (from != copy) std::copy_n(from, kStep, copy);
          float* found = std::find_if(copy, copy + kStep, [&](float v) { return std::abs(v) == range.most; });
          out.outliers[t].push_back({s * kStep + (found - copy), *found});
          *found = 0, range.most = range.next;
          from = copy;
        }
        QuantizeStep<Value, static_cast<int>(Rows<1>::kTop)>(from, range.most, to, &out.scale[index], &out.step_sum[index]);
      }
    }
  });
  out.NumberChannels();
  return out;
}

// Sums over blocks [groups, G, rows] from those over steps, in `room` where the two differ.
template <typename Value>
const float* BlockSums(const Activations<Value>& x, int64_t block_steps, std::vector<float>& room) {
  if (block_steps == 1) return x.step_sum.data();
  room.resize(x.step_sum.size() / block_steps);
  for (int64_t i = 0; i < x.step_sum.size(); ++i) room[i / x.rows / block_steps * x.rows + i % x.rows] += x.step_sum[i];
  return room.data();
}

// The first `columns` lanes.
inline void Put(float* y, VecF value, int64_t columns) {
  if (columns == kLanes) StoreF(y, value);
  else for (int64_t c = 0; c < columns; ++c) y[c] = value[c];
}

inline VecF Get(const float* y, int64_t columns) {
  if (columns == kLanes) return LoadF(y);
  VecF value = {};
  for (int64_t c = 0; c < columns; ++c) value[c] = y[c];
  return value;
}

// C tiles of columns for a group of R rows, over steps [first, last) of K. Adds to y, which the first panel sets.
//
// `unpacked` holds the vectors of those steps, kPanel apart from tile to tile, if `kIsUnpacked`; else they are unpacked
// on the way, which a few rows do not make worth storing. `kIsOneStep`: a block is one step.
template <template <int> typename Rows, int R, int C, bool kIsUnpacked, bool kIsOneStep>
void Tile(const Weight& w, int64_t tile, const Activations<typename Rows<1>::Value>& x, int64_t group, int64_t first,
          int64_t last, const VecI* unpacked) {
  using Kind = Rows<R * C>;
  constexpr bool kIsFloat = std::is_same_v<typename Kind::Value, float>;
  const int64_t columns = std::min<int64_t>(kLanes, w.N - (tile + C - 1) * kLanes);  // of the last tile
  const int64_t rows = std::min<int64_t>(R, x.T - group * R);
  auto at = [&](float* y, int r, int c) { return y + (group * R + r) * w.N + (tile + c) * kLanes; };
  auto width = [&](int c) { return c < C - 1 ? kLanes : columns; };
  VecF total[R * C];
  for (int c = 0; c < C; ++c) {
    const VecF bias = w.bias && !first ? Get(w.bias + (tile + c) * kLanes, width(c)) : VecF{};
    for (int r = 0; r < R; ++r) total[r * C + c] = first && r < rows ? Get(at(w.y, r, c), width(c)) : bias;
  }
  int64_t step = first, g = first / w.block_steps;
  const typename Kind::Value* values = x.values.data() + (group * w.steps + first) * R * kStep;
  const float* scale = x.scale.data() + (group * w.steps + first) * R;
  const float* sum = w.has_offset ? w.sums + (group * w.blocks + g) * R : nullptr;
  const uint8_t* block = w.data + tile * w.tile_bytes + g * w.block_bytes;
  for (; step < last; ++g, block += w.block_bytes) {
    const int64_t block_start = g * w.block_steps, block_end = block_start + w.block_steps;
    const int64_t end = kIsOneStep ? step + 1 : std::min(last, block_end);
    const uint8_t* packed = block + w.head_bytes + (step - block_start) * w.step_bytes;
    VecF part[R * C];
    if constexpr (!kIsOneStep) Clear(part);
    for (; step < end; ++step, values += R * kStep, scale += R) {
      Kind dots;
      auto add = [&](int j, int c, VecI v) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) dots.Add(r * C + c, j, v, values + r * kStep + j * Kind::kGroup);
      };
      if constexpr (kIsUnpacked) {
#pragma GCC unroll 32
        for (int j = 0; j < Kind::kVectors; ++j) {
#pragma GCC unroll 2
          for (int c = 0; c < C; ++c) add(j, c, unpacked[c * kPanel + j]);
        }
        unpacked += Kind::kVectors;
      } else {
        static_assert(C == 1);
        for (int64_t i = 0; i < w.step_bytes; i += 64) __builtin_prefetch(packed + kAhead + i);
        Kind::ForVectors(packed, [&](int j, VecI v) __attribute__((always_inline)) { add(j, 0, v); });
        packed += w.step_bytes;
      }
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const VecF s = kIsOneStep ? w.Scale(block + c * w.tile_bytes) : VecF{};
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const int i = r * C + c;
          if constexpr (kIsFloat) part[i] += dots.Sum(i);
          else if constexpr (kIsOneStep) total[i] += dots.Sum(i) * s * scale[r];
          else part[i] += dots.Sum(i) * scale[r];
        }
      }
    }
    for (int c = 0; c < C; ++c) {
      if constexpr (!kIsOneStep) {
        const VecF s = w.Scale(block + c * w.tile_bytes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) total[r * C + c] += part[r * C + c] * s;
      }
      if (!w.has_offset || step < block_end) continue;
      VecF o = w.Offset(block + c * w.tile_bytes);
      if (kIsFloat && Kind::kBits == 4) o += w.Scale(block + c * w.tile_bytes) * static_cast<float>(kBias4);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[r * C + c] += o * sum[r];
    }
    sum += R;
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < C; ++c) Put(at(w.y, r, c), total[r * C + c], width(c));
  }
}

// `Tile` for the blocks that the weight has.
template <template <int> typename Rows, int R, int C, bool kIsUnpacked>
void AnyTile(const Weight& w, int64_t tile, const Activations<typename Rows<1>::Value>& x, int64_t group, int64_t first,
             int64_t last, const VecI* unpacked) {
  if constexpr (Rows<1>::kBlocksAreShort) {
    if (w.block_steps == 1) return Tile<Rows, R, C, kIsUnpacked, true>(w, tile, x, group, first, last, unpacked);
  }
  Tile<Rows, R, C, kIsUnpacked, false>(w, tile, x, group, first, last, unpacked);
}

// The vectors of steps [first, last) of a tile.
template <typename Kind>
void Unpack(const Weight& w, int64_t tile, int64_t first, int64_t last, VecI* out) {
  int64_t step = first, g = first / w.block_steps;
  const uint8_t* block = w.data + tile * w.tile_bytes + g * w.block_bytes;
  for (; step < last; ++g, block += w.block_bytes) {
    const int64_t block_start = g * w.block_steps, end = std::min(last, block_start + w.block_steps);
    const uint8_t* packed = block + w.head_bytes + (step - block_start) * w.step_bytes;
    for (; step < end; ++step, packed += w.step_bytes, out += Kind::kVectors) {
      Kind::ForVectors(packed, [&](int j, VecI v) { out[j] = v; });
    }
  }
}

// C tiles for groups [group, last_group) of rows.
template <template <int> typename Rows, int C>
void TileGroups(const Weight& w, int64_t tile, const Activations<typename Rows<1>::Value>& x, int64_t group,
                int64_t last_group) {
  constexpr int64_t kSteps = kPanel / Rows<1>::kVectors;
  alignas(64) VecI unpacked[C * kPanel];
  for (int64_t first = 0; first < w.steps; first += kSteps) {
    const int64_t last = std::min(w.steps, first + kSteps);
    for (int c = 0; c < C; ++c) Unpack<Rows<1>>(w, tile + c, first, last, unpacked + c * kPanel);
    for (int64_t g = group; g < last_group; ++g) AnyTile<Rows, kMaxRows, C, true>(w, tile, x, g, first, last, unpacked);
  }
}

// Adds what outliers contribute to a tile of y, for rows [first, last). `room` is for kLanes weights a channel.
template <typename Value>
void AddOutliers(const Weight& w, int64_t tile, const Activations<Value>& x, int64_t first, int64_t last, float* room) {
  const uint8_t* data = w.data + tile * w.tile_bytes;
  for (size_t i = 0; i < w.channels.size(); ++i) {
    const Place& place = w.channels[i];
    const VecF stored = ToFloat((LoadI(data + place.vector) >> place.shift) & 15);
    StoreF(room + i * kLanes, stored * w.Scale(data + place.block) + w.Offset(data + place.block));
  }
  const int64_t columns = std::min<int64_t>(kLanes, w.N - tile * kLanes);
  for (int64_t t = first; t < last; ++t) {
    float* y = w.y + t * w.N + tile * kLanes;
    VecF total = Get(y, columns);
    for (auto [channel, value] : x.outliers[t]) total += LoadF(room + channel * kLanes) * value;
    Put(y, total, columns);
  }
}

// Tiles [tile, last) for some groups of rows.
template <template <int> typename Rows>
void Tiles(const Weight& w, int64_t tile, int64_t last, const Activations<typename Rows<1>::Value>& x, int64_t group,
           int64_t last_group) {
  Room<float> room(w.channels.size() * kLanes);
  while (tile < last) {
    const int count = x.rows > 2 && last - tile >= kTiles ? kTiles : 1;
    if (x.rows == 1) AnyTile<Rows, 1, 1, false>(w, tile, x, 0, 0, w.steps, nullptr);
    else if (x.rows == 2) AnyTile<Rows, 2, 1, false>(w, tile, x, 0, 0, w.steps, nullptr);
    else if (count == kTiles) TileGroups<Rows, kTiles>(w, tile, x, group, last_group);
    else TileGroups<Rows, 1>(w, tile, x, group, last_group);
    for (const int64_t end = tile + count; tile < end; ++tile) {
      if (room.size() == 0) continue;
      AddOutliers(w, tile, x, group * x.rows, std::min(x.T, last_group * x.rows), room.data());
    }
  }
}

// A run of tiles of one weight for some groups of rows, by one thread.
struct Task {
  int weight;
  int64_t first, last, group, last_group;
};

// Tasks of about equal work, several for each thread. Those of the same rows follow each other, so that x stays in the
// cache while the weights pass.
std::vector<Task> Split(const std::vector<Weight>& weights, int64_t groups, int64_t threads) {
  constexpr int64_t kGroupBytes = 128 << 10;  // of groups of rows, as float32
  const int64_t some = std::clamp<int64_t>(kGroupBytes / (weights[0].steps * kStep * kMaxRows * 4), 4, 128);
  int64_t tiles = 0;
  for (const Weight& w : weights) tiles += w.tiles;
  const int64_t runs = (groups + some - 1) / some;
  const int64_t per_task = std::clamp<int64_t>(tiles * runs / (8 * threads) / kTiles, 1, 32) * kTiles;
  std::vector<Task> tasks;
  for (int64_t g = 0; g < groups; g += some) {
    for (size_t i = 0; i < weights.size(); ++i) {
      for (int64_t tile = 0; tile < weights[i].tiles; tile += per_task) {
        tasks.push_back({static_cast<int>(i), tile, std::min(weights[i].tiles, tile + per_task), g, std::min(groups, g + some)});
      }
    }
  }
  return tasks;
}

// y = x w for the weights of one kind of arithmetic.
template <template <int> typename Rows>
void Multiply(ffi::ThreadPool& pool, std::vector<Weight>& weights, const float* x, int64_t T, int64_t K) {
  const auto rows = Prepare<Rows>(pool, x, T, K);
  std::vector<std::vector<float>> sums(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i].has_offset) weights[i].sums = BlockSums(rows, weights[i].block_steps, sums[i]);
    for (int64_t k : rows.channels) weights[i].channels.push_back(weights[i].Find(k));
  }
  const std::vector<Task> tasks = Split(weights, rows.Groups(), pool.num_threads());
  ParallelFor(pool, tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    Tiles<Rows>(weights[task.weight], task.first, task.last, rows, task.group, task.last_group);
  });
}

// Attributes of one weight, as `cpu.py` passes them.
enum Attribute : int { kBits, kBlock, kIsHalf, kHasOffset, kAttributes };

// The weight that a packed array holds, or an error where the array's size is not what the attributes say.
ffi::ErrorOr<Weight> AsWeight(ffi::Buffer<ffi::U8> data, ffi::Span<const int64_t> attributes, int64_t K, int64_t N) {
  const int64_t bits = attributes[kBits], block = attributes[kBlock], padded = (K + kStep - 1) / kStep * kStep;
  if ((bits != 4 && bits != 8) || (bits == 4 && !attributes[kHasOffset]) || block <= 0 || block % kStep || padded % block) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("found bits, offsets, a block size or K that the layout does not have"));
  }
  if (reinterpret_cast<uintptr_t>(data.untyped_data()) % 4) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("found a packed weight that is not aligned to 4 bytes"));
  }
  const Weight w(data.typed_data(), N, padded / kStep, block / kStep, static_cast<int>(bits), attributes[kIsHalf] != 0,
                 attributes[kHasOffset] != 0);
  if (static_cast<int64_t>(data.element_count()) != w.tiles * w.tile_bytes) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("found a packed weight of another size than its shape says"));
  }
  return w;
}

// Arguments after x: data and bias (of no elements for none) of every weight; its attributes are as many in a row.
ffi::Error MatmulImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args, ffi::RemainingRets results,
                      ffi::Span<const int64_t> attributes, bool quantize_activation) {
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1], count = results.size();
  if (static_cast<int64_t>(args.size()) != 2 * count || static_cast<int64_t>(attributes.size()) != kAttributes * count) {
    return ffi::Error::InvalidArgument("found another number of arrays or attributes than of results");
  }
  std::vector<Weight> narrow, wide;  // of 4 and of 8 bits
  for (int64_t i = 0; i < count; ++i) {
    auto data = args.get<ffi::Buffer<ffi::U8>>(2 * i);
    auto bias = args.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!data || !bias || !y) return ffi::Error::InvalidArgument("found an array of another type than expected");
    const int64_t N = (*y)->dimensions()[1];
    auto w = AsWeight(*data, {attributes.begin() + kAttributes * i, kAttributes}, K, N);
    if (!w) return w.error();
    if (bias->element_count() && static_cast<int64_t>(bias->element_count()) != N) {
      return ffi::Error::InvalidArgument("found a bias of another size than the result");
    }
    w->bias = bias->element_count() ? bias->typed_data() : nullptr;
    w->y = (*y)->typed_data();
    (w->bits == 4 ? narrow : wide).push_back(*w);
  }
  const float* rows = x.typed_data();
  if (K == 0) return ffi::Error::InvalidArgument("found rows of no inputs");
  if (T == 0) return ffi::Error::Success();
  if (!narrow.empty()) {
    (quantize_activation ? Multiply<Int8> : Multiply<Float<4>::Rows>)(pool, narrow, rows, T, K);
  }
  if (!wide.empty()) {
    (quantize_activation ? Multiply<Int16> : Multiply<Float<8>::Rows>)(pool, wide, rows, T, K);
  }
  return ffi::Error::Success();
}

// out[t, k] = column ids[t] of the weight.
ffi::Error LookupImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::U8> data,
                      ffi::ResultBuffer<ffi::F32> out, ffi::Span<const int64_t> attributes, int64_t columns) {
  const int64_t T = out->dimensions()[0], K = out->dimensions()[1];
  if (attributes.size() != kAttributes) return ffi::Error::InvalidArgument("found another number of attributes");
  auto found = AsWeight(data, attributes, K, columns);
  if (!found) return found.error();
  const Weight w = *found;
  ForRows(pool, T, [&](int64_t t) {
    const int64_t id = std::clamp<int64_t>(ids.typed_data()[t], 0, columns - 1), lane = id % kLanes;
    float* to = out->typed_data() + t * K;
    for (int64_t step = 0; step < w.steps; ++step) {
      const int64_t g = step / w.block_steps;
      const uint8_t* block = w.data + id / kLanes * w.tile_bytes + g * w.block_bytes;
      const uint8_t* values = block + w.head_bytes + (step - g * w.block_steps) * w.step_bytes;
      const float scale = w.Scale(block)[lane], offset = w.has_offset ? w.Offset(block)[lane] : 0.0f;
      for (int64_t i = 0; i < std::min<int64_t>(kStep, K - step * kStep); ++i) {
        int q;
        if (w.bits == 4) q = values[4 * kLanes * (i / 8) + 4 * lane + i % 4] >> (i % 8 < 4 ? 0 : 4) & 15;
        else q = static_cast<int8_t>(values[2 * kLanes * (i / 2) + 2 * lane + i % 2]);
        to[step * kStep + i] = scale * static_cast<float>(q) + offset;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jetserve_quantized_matmul, MatmulImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("attributes")
                                  .Attr<bool>("quantize_activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jetserve_embedding_lookup, LookupImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("attributes")
                                  .Attr<int64_t>("columns"));

}  // namespace jetserve

extern "C" int jetserve_lanes() { return jetserve::kLanes; }
