// The small operations between matmuls, each of which XLA would make several calls of.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace jetserve {
namespace {

ffi::Error RmsNormImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                       ffi::ResultBuffer<ffi::F32> y, float epsilon) {
  const int64_t T = x.dimensions()[0], D = x.dimensions()[1], whole = D / kLanes * kLanes;
  if (static_cast<int64_t>(scale.element_count()) != D) {
    return ffi::Error::InvalidArgument("found a scale of another size than the rows");
  }
  ForRows(pool, T, [&](int64_t t) {
    const float* from = x.typed_data() + t * D;
    const float* by = scale.typed_data();
    float* to = y->typed_data() + t * D;
    VecF squares = {};
    for (int64_t i = 0; i < whole; i += kLanes) squares += LoadF(from + i) * LoadF(from + i);
    float total = Sum(squares);
    for (int64_t i = whole; i < D; ++i) total += from[i] * from[i];
    const float factor = 1 / std::sqrt(total / static_cast<float>(D) + epsilon);
    for (int64_t i = 0; i < whole; i += kLanes) StoreF(to + i, LoadF(from + i) * factor * LoadF(by + i));
    for (int64_t i = whole; i < D; ++i) to[i] = from[i] * factor * by[i];
  });
  return ffi::Error::Success();
}

// Rotates the heads of one token.
void Rotate(const float* from, float* to, int64_t heads, int64_t H, const float* cosine, const float* sine) {
  const int64_t half = H / 2;
  for (int64_t n = 0; n < heads; ++n, from += H, to += H) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = from[i], second = from[half + i];
      to[i] = first * cosine[i] - second * sine[i];
      to[half + i] = second * cosine[i] + first * sine[i];
    }
  }
}

ffi::Error RopeImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                    ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::F32> inverse_frequencies,
                    ffi::ResultBuffer<ffi::F32> new_q, ffi::ResultBuffer<ffi::F32> new_k) {
  const int64_t T = q.dimensions()[0], N = q.dimensions()[1], K = k.dimensions()[1], H = q.dimensions()[2];
  if (H % 2 || static_cast<int64_t>(inverse_frequencies.element_count()) != H / 2 || k.dimensions()[2] != static_cast<size_t>(H) ||
      k.dimensions()[0] != static_cast<size_t>(T) || static_cast<int64_t>(positions.element_count()) != T) {
    return ffi::Error::InvalidArgument("found queries, keys, positions and frequencies that do not belong together");
  }
  ForRows(pool, T, [&](int64_t t) {
    std::vector<float> room(H);
    float *cosine = room.data(), *sine = cosine + H / 2;
    for (int64_t i = 0; i < H / 2; ++i) {
      const float angle = static_cast<float>(positions.typed_data()[t]) * inverse_frequencies.typed_data()[i];
      cosine[i] = std::cos(angle), sine[i] = std::sin(angle);
    }
    Rotate(q.typed_data() + t * N * H, new_q->typed_data() + t * N * H, N, H, cosine, sine);
    Rotate(k.typed_data() + t * K * H, new_k->typed_data() + t * K * H, K, H, cosine, sine);
  });
  return ffi::Error::Success();
}

// The first index of the greatest of V numbers; -1 if that is not finite, or any is NaN.
int32_t Argmax(const float* x, int64_t V) {
  const int64_t whole = V / kLanes * kLanes;
  VecF top = Splat(-std::numeric_limits<float>::infinity());
  VecI poison = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const VecF v = LoadF(x + i);
    top = v > top ? v : top, poison |= v != v;
  }
  float best = -std::numeric_limits<float>::infinity();
  bool has_nan = false;
  auto see = [&](float v) { best = std::max(best, v), has_nan |= v != v; };
  for (int l = 0; l < kLanes; ++l) see(top[l]), has_nan |= poison[l] != 0;
  for (int64_t i = whole; i < V; ++i) see(x[i]);
  return has_nan || !std::isfinite(best) ? -1 : static_cast<int32_t>(std::find(x, x + V, best) - x);
}

ffi::Error ArgmaxImpl(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> indices) {
  const int64_t S = x.dimensions()[0], V = x.dimensions()[1];
  ParallelFor(pool, S, [&](int64_t s) { indices->typed_data()[s] = Argmax(x.typed_data() + s * V, V); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jetserve_rms_norm, RmsNormImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jetserve_rope, RopeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jetserve_argmax, ArgmaxImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());

}  // namespace jetserve
