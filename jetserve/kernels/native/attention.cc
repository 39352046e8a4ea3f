// Attention of a ragged batch over a paged KV cache, and the write of the batch's keys and values into it, in place.
//
// The pages come in and go out as the same buffer. Work is split over (sequence, KV head, block of query tokens). A task
// walks the visible positions in chunks and keeps a running softmax (Milakov and Gimelshein 2018) for each of its rows,
// a row being one query head of one token.

#include <algorithm>
#include <vector>

#include "common.h"

namespace jetserve {
namespace {

typedef float Vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Int8 __attribute__((vector_size(32), aligned(4), may_alias));

constexpr int kChunk = 32;       // KV positions at once
constexpr int kQueryBlock = 16;  // query tokens a task
constexpr float kNone = -1e30f;

inline Vec8 Load8(const float* p) { return *reinterpret_cast<const Vec8*>(p); }
inline void Store8(float* p, Vec8 v) { *reinterpret_cast<Vec8*>(p) = v; }

// Sums of eight vectors, as the lanes of one.
inline Vec8 SumEach(const Vec8* a) {
#if defined(__AVX2__) && !defined(JETSERVE_PORTABLE)
  auto m = [&](int i) { return reinterpret_cast<__m256>(a[i]); };
  __m256 s01 = _mm256_hadd_ps(m(0), m(1)), s23 = _mm256_hadd_ps(m(2), m(3));
  __m256 s45 = _mm256_hadd_ps(m(4), m(5)), s67 = _mm256_hadd_ps(m(6), m(7));
  __m256 low = _mm256_hadd_ps(s01, s23), high = _mm256_hadd_ps(s45, s67);
  return reinterpret_cast<Vec8>(
      _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
#else
  Vec8 out;
  for (int i = 0; i < 8; ++i) out[i] = ((a[i][0] + a[i][4]) + (a[i][1] + a[i][5])) + ((a[i][2] + a[i][6]) + (a[i][3] + a[i][7]));
  return out;
#endif
}

// e to the x for x <= 0, within 2 units in the last place; 0 below -87.
inline Vec8 Exp(Vec8 x) {
  Int8 tiny = x < -87.0f;
  x = tiny ? Vec8{} : x;
  Vec8 t = x * 1.44269504f - 0.5f;  // x <= 0, so truncation towards zero rounds to nearest
  Int8 n = __builtin_convertvector(t, Int8);
  Vec8 f = __builtin_convertvector(n, Vec8);
  Vec8 r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
  Vec8 p = Vec8{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Int8 bits = reinterpret_cast<Int8>(p) + (n << 23);
  p = reinterpret_cast<Vec8>(bits);
  return tiny ? Vec8{} : p;
}

struct Batch {
  const int32_t *positions, *query_starts, *page_table;
  int64_t T, S, P, page_size, N, K, H;
  float scale, cap;     // cap 0: none
  int64_t window;       // 0: none
  const float* slopes;  // [N], or null
  const float* sinks;   // the same

  int64_t Page(int64_t s, int64_t position) const { return page_table[s * P + position / page_size]; }
  int64_t QueryHeads() const { return N / K; }  // that share a KV head

  // Whether all that the numbers point to is there: tokens in the batch, positions in the table, pages in the cache.
  bool IsValid(int64_t pages) const {
    if (query_starts[0] != 0 || query_starts[S] > T) return false;
    for (int64_t s = 0; s < S; ++s) {
      int64_t last = -1;
      if (query_starts[s + 1] < query_starts[s]) return false;
      for (int64_t t = query_starts[s]; t < query_starts[s + 1]; ++t) {
        if (positions[t] < 0 || positions[t] >= P * page_size) return false;
        last = std::max<int64_t>(last, positions[t]);
      }
      for (int64_t p = 0; p * page_size <= last; ++p) {
        if (page_table[s * P + p] < 0 || page_table[s * P + p] >= pages) return false;
      }
    }
    return true;
  }
};

template <typename Page>
struct Pages {
  Page* values;  // [pages, page_size, 2K, H]
  float* scale;  // [pages, page_size, 2K], for int8

  int64_t Row(const Batch& b, int64_t s, int64_t position, int64_t head) const {
    return (b.Page(s, position) * b.page_size + position % b.page_size) * 2 * b.K + head;
  }
};

inline void StoreRow(float* to, float*, const float* from, int64_t H) { std::memcpy(to, from, 4 * H); }
inline void StoreRow(uint16_t* to, float*, const float* from, int64_t H) {
  for (int64_t i = 0; i < H; ++i) to[i] = ToBf16(from[i]);
}
inline void StoreRow(int8_t* to, float* scale, const float* from, int64_t H) {
  float range = 0, poison = 0;  // NaN if a value is, or is infinite
  for (int64_t i = 0; i < H; ++i) range = std::max(range, std::fabs(from[i])), poison += from[i] - from[i];
  const float s = range == 0 ? 1.0f : range / 127;
  for (int64_t i = 0; i < H; ++i) to[i] = poison == 0 ? static_cast<int8_t>(std::nearbyint(from[i] / s)) : 0;
  *scale = s + poison;
}

inline const float* AsFloats(const float* row, float*, int64_t) { return row; }
inline const float* AsFloats(const uint16_t* row, float* room, int64_t H) {
  for (int64_t i = 0; i < H; ++i) room[i] = FromBf16(row[i]);
  return room;
}
inline const float* AsFloats(const int8_t* row, float* room, int64_t H) {
  for (int64_t i = 0; i < H; ++i) room[i] = row[i];
  return room;
}

template <typename Page>
void Write(const Batch& b, const Pages<Page>& pages, const float* k, const float* v) {
  for (int64_t s = 0; s < b.S; ++s) {
    for (int64_t t = b.query_starts[s]; t < b.query_starts[s + 1]; ++t) {
      for (int64_t head = 0; head < b.K; ++head) {
        int64_t row = pages.Row(b, s, b.positions[t], 2 * head);
        const float* from[2] = {k + (t * b.K + head) * b.H, v + (t * b.K + head) * b.H};
        for (int64_t i = 0; i < 2; ++i) {
          StoreRow(pages.values + (row + i) * b.H, pages.scale ? pages.scale + row + i : nullptr, from[i], b.H);
        }
      }
    }
  }
}

// KV positions [start, start + count) of one head, as floats. Rows past the end repeat the first.
struct Chunk {
  int64_t start, count;
  const float *k[kChunk], *v[kChunk];
  float k_scale[kChunk], v_scale[kChunk];
};

template <typename Page>
void Load(const Batch& b, const Pages<Page>& pages, int64_t s, int64_t head, float* room, Chunk& c) {
  for (int64_t j = 0; j < c.count; ++j) {
    int64_t row = pages.Row(b, s, c.start + j, 2 * head);
    c.k[j] = AsFloats(pages.values + row * b.H, room + j * b.H, b.H);
    c.v[j] = AsFloats(pages.values + (row + 1) * b.H, room + (kChunk + j) * b.H, b.H);
    if (pages.scale) c.k_scale[j] = pages.scale[row], c.v_scale[j] = pages.scale[row + 1];
  }
  for (int64_t j = c.count; j < kChunk; ++j) c.k[j] = c.k[0], c.k_scale[j] = c.v_scale[j] = 0;
}

// c * tanh(x / c), for c > 0. Near 0, where 1 - e would lose digits, by tanh's series.
inline Vec8 SoftCap(Vec8 x, float c) {
  const Vec8 y = x * (1 / c), magnitude = y < 0.0f ? -y : y, square = y * y;
  const Vec8 e = Exp(magnitude * -2.0f), far = (1.0f - e) / (1.0f + e) * c;
  const Vec8 near = x * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
  return magnitude < 0.2f ? near : y < 0.0f ? -far : far;
}

// scores[j] of the first `seen` positions of the chunk, and up to 7 more that mean nothing.
inline void Score(const Batch& b, const Chunk& c, bool scaled, const float* query, int64_t seen, int64_t position,
                  float slope, float* scores) {
  for (int64_t j = 0; j < seen; j += 8) {
    Vec8 sums[8] = {};
    for (int64_t h = 0; h < b.H; h += 8) {
      Vec8 x = Load8(query + h);
      for (int l = 0; l < 8; ++l) sums[l] += x * Load8(c.k[j + l] + h);
    }
    Vec8 score = SumEach(sums);
    if (scaled) score *= Load8(c.k_scale + j);
    if (b.cap != 0) score = SoftCap(score, b.cap);
    if (slope != 0) {
      const float distance = static_cast<float>(c.start + j - position);
      score += (Vec8{0, 1, 2, 3, 4, 5, 6, 7} + distance) * slope;
    }
    Store8(scores + j, score);
  }
}

// to [H] = to * shrink + the sum of p[j] * v[j] for j in [first, last).
inline void Mix(float* to, float shrink, const float* p, const float* const* v, int64_t first, int64_t last,
                int64_t H) {
  int64_t h = 0;
  for (; h + 32 <= H; h += 32) {
    Vec8 a0 = Load8(to + h) * shrink, a1 = Load8(to + h + 8) * shrink, a2 = Load8(to + h + 16) * shrink,
         a3 = Load8(to + h + 24) * shrink;
    for (int64_t j = first; j < last; ++j) {
      a0 += Load8(v[j] + h) * p[j], a1 += Load8(v[j] + h + 8) * p[j];
      a2 += Load8(v[j] + h + 16) * p[j], a3 += Load8(v[j] + h + 24) * p[j];
    }
    Store8(to + h, a0), Store8(to + h + 8, a1), Store8(to + h + 16, a2), Store8(to + h + 24, a3);
  }
  for (; h < H; h += 8) {
    Vec8 a = Load8(to + h) * shrink;
    for (int64_t j = first; j < last; ++j) a += Load8(v[j] + h) * p[j];
    Store8(to + h, a);
  }
}

// One query head of one token, and what it has seen of the cache: out is the sum of values times e^(score - highest).
struct Query {
  const float* scaled;
  float* out;
  int64_t position;
  float slope, highest, total;

  void See(const Batch& b, const Chunk& c, bool scaled_pages) {
    const int64_t seen = std::min(c.count, position + 1 - c.start);
    const int64_t skipped = b.window ? std::clamp<int64_t>(position - b.window + 1 - c.start, 0, kChunk) : 0;
    if (seen <= skipped) return;
    alignas(32) float scores[kChunk];
    Score(b, c, scaled_pages, scaled, seen, position, slope, scores);
    for (int64_t j = 0; j < skipped; ++j) scores[j] = kNone;
    float top = highest;
    for (int64_t j = skipped; j < seen; ++j) top = std::max(top, scores[j]);
    for (int64_t j = seen; j < kChunk && j % 8; ++j) scores[j] = kNone;
    Vec8 sum = {};
    for (int64_t j = 0; j < seen; j += 8) {
      Vec8 p = Exp(Load8(scores + j) - top);
      sum += p;
      Store8(scores + j, p);
    }
    const float shrink = std::exp(highest - top);
    float weight = 0;
    for (int l = 0; l < 8; ++l) weight += sum[l];
    total = total * shrink + weight;
    highest = top;
    if (scaled_pages) for (int64_t j = skipped; j < seen; ++j) scores[j] *= c.v_scale[j];
    Mix(out, shrink, scores, c.v, skipped, seen, b.H);
  }
};

// One task: query tokens [t0, t1) of sequence s, for one KV head and the query heads that share it.
template <typename Page>
void Attend(const Batch& b, const Pages<Page>& pages, const float* q, float* out, int64_t s, int64_t head, int64_t t0,
            int64_t t1) {
  const int64_t R = b.QueryHeads(), H = b.H, rows = (t1 - t0) * R;
  Room<float> room(2 * kChunk * H + rows * H);
  float* scaled = room.data() + 2 * kChunk * H;
  std::vector<Query> queries(rows);
  for (int64_t i = 0; i < rows; ++i, scaled += H) {
    const int64_t t = t0 + i / R, n = head * R + i % R;
    const float* from = q + (t * b.N + n) * H;
    for (int64_t h = 0; h < H; ++h) scaled[h] = from[h] * b.scale;
    queries[i] = {scaled, out + (t * b.N + n) * H, b.positions[t], b.slopes ? b.slopes[n] : 0,
                  b.sinks ? b.sinks[n] : kNone, b.sinks ? 1.0f : 0.0f};
    std::fill_n(queries[i].out, H, 0.0f);
  }
  const int64_t last = b.positions[t1 - 1];
  const int64_t first = b.window ? std::max<int64_t>(0, b.positions[t0] - b.window + 1) : 0;
  for (int64_t start = first / kChunk * kChunk; start <= last; start += kChunk) {
    Chunk c;
    c.start = start, c.count = std::min<int64_t>(kChunk, last + 1 - start);
    Load(b, pages, s, head, room.data(), c);
    for (Query& query : queries) query.See(b, c, pages.scale != nullptr);
  }
  for (const Query& query : queries) {
    const float inverse = 1 / std::max(query.total, 1e-30f);
    for (int64_t h = 0; h < H; h += 8) Store8(query.out + h, Load8(query.out + h) * inverse);
  }
}

template <typename Page>
void Run(ffi::ThreadPool& pool, const Batch& b, const Pages<Page>& pages, const float* q, const float* k,
         const float* v, float* out) {
  Write(b, pages, k, v);
  struct Task { int32_t s, t0, t1; };
  std::vector<Task> tasks;
  for (int32_t s = 0; s < b.S; ++s) {
    for (int32_t t = b.query_starts[s]; t < b.query_starts[s + 1]; t += kQueryBlock) {
      tasks.push_back({s, t, std::min<int32_t>(t + kQueryBlock, b.query_starts[s + 1])});
    }
  }
  int64_t used = b.query_starts[b.S];
  std::fill(out + used * b.N * b.H, out + b.T * b.N * b.H, 0.0f);
  ParallelFor(pool, tasks.size() * b.K, [&](int64_t i) {
    const Task& task = tasks[i / b.K];
    Attend(b, pages, q, out, task.s, i % b.K, task.t0, task.t1);
  });
}

template <typename Page, ffi::DataType kType>
ffi::Error AttentionImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                         ffi::Buffer<kType> values, ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> positions,
                         ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> page_table,
                         ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks,
                         ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<kType> new_values,
                         ffi::ResultBuffer<ffi::F32> new_scale, float factor, float cap, int64_t window) {
  if (new_values->untyped_data() != values.untyped_data()) {
    return ffi::Error::Internal("the KV pages were copied; expected them to be updated in place");
  }
  const Batch b{
      positions.typed_data(), query_starts.typed_data(), page_table.typed_data(),
      q.dimensions()[0], page_table.dimensions()[0], page_table.dimensions()[1], values.dimensions()[1],
      q.dimensions()[1], k.dimensions()[1], q.dimensions()[2], factor, cap, window,
      slopes.element_count() ? slopes.typed_data() : nullptr, sinks.element_count() ? sinks.typed_data() : nullptr};
  const auto fits = [&](const auto& by_head) {
    return by_head.element_count() == 0 || static_cast<int64_t>(by_head.element_count()) == b.N;
  };
  if (b.H % 8 || b.K == 0 || b.N % b.K || !fits(slopes) || !fits(sinks)) {
    return ffi::Error::InvalidArgument("found heads that the kernel does not take");
  }
  const auto is = [](const auto& a, std::initializer_list<int64_t> shape) {
    return std::equal(a.dimensions().begin(), a.dimensions().end(), shape.begin(), shape.end());
  };
  const int64_t heads = 2 * b.K, pages_count = values.dimensions()[0];
  const bool scaled = kType == ffi::S8;
  if (!is(k, {b.T, b.K, b.H}) || !is(v, {b.T, b.K, b.H}) || !is(values, {pages_count, b.page_size, heads, b.H}) ||
      (scaled && !is(scale, {pages_count, b.page_size, heads})) || !is(positions, {b.T}) || !is(query_starts, {b.S + 1})) {
    return ffi::Error::InvalidArgument("found queries, keys, values, pages and a batch whose shapes differ");
  }
  if (!b.IsValid(pages_count)) {
    return ffi::Error::InvalidArgument("found a batch that points outside of its own tokens or the KV pages");
  }
  Pages<Page> pages{reinterpret_cast<Page*>(new_values->untyped_data()),
                    scaled ? new_scale->typed_data() : nullptr};
  Run(pool, b, pages, q.typed_data(), k.typed_data(), v.typed_data(), out->typed_data());
  return ffi::Error::Success();
}

}  // namespace

#define JETSERVE_ATTENTION(NAME, PAGE, TYPE)                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, (AttentionImpl<PAGE, TYPE>),               \
                                ffi::Ffi::Bind()                                 \
                                    .Ctx<ffi::ThreadPool>()                      \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<TYPE>>()                    \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Ret<ffi::Buffer<ffi::F32>>()                \
                                    .Ret<ffi::Buffer<TYPE>>()                    \
                                    .Ret<ffi::Buffer<ffi::F32>>()                \
                                    .Attr<float>("factor")                       \
                                    .Attr<float>("cap")                          \
                                    .Attr<int64_t>("window"))

JETSERVE_ATTENTION(jetserve_attention_f32, float, ffi::F32);
JETSERVE_ATTENTION(jetserve_attention_bf16, uint16_t, ffi::BF16);
JETSERVE_ATTENTION(jetserve_attention_s8, int8_t, ffi::S8);

}  // namespace jetserve
