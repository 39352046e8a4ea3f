// The attention kernel on buffers of exactly their size, aligned to their elements and no better, and on batches that it
// must refuse. Compiled with the sanitizers and run by test_native_variants.py; prints the cases that ran.

#include "attention.cc"

#include "native_harness.h"

namespace jetserve {
namespace {

struct Case {
  std::vector<int32_t> old, fresh;  // tokens in the pages, and in this batch, of each sequence
  int64_t N = 4, K = 2, H = 24, page_size = 16, padding = 0;
  int64_t window = 0;
  float cap = 0;
  bool alibi = false, sinks = false;
};

// One call. Before it, `spoil` may break the batch.
template <typename Page, ffi::DataType kType>
struct Call {
  Case c;
  int64_t S, T, P, pages;
  Array<float> q, k, v, scale, slopes, sinks, out;
  Array<Page> values;
  Array<int32_t> positions, starts, table;

  static int64_t Tokens(const Case& c) {
    int64_t total = c.padding;
    for (int32_t fresh : c.fresh) total += fresh;
    return total;
  }
  static int64_t PagesEach(const Case& c) {
    int64_t most = 1;
    for (size_t s = 0; s < c.old.size(); ++s) most = std::max<int64_t>(most, (c.old[s] + c.fresh[s]) / c.page_size + 1);
    return most;
  }

  explicit Call(const Case& given)
      : c(given), S(c.old.size()), T(Tokens(c)), P(PagesEach(c)), pages(S * P + 1),
        q({T, c.N, c.H}, 0.5f), k({T, c.K, c.H}, 0.25f), v({T, c.K, c.H}, 1.0f),
        scale({kType == ffi::S8 ? pages : 0, c.page_size, 2 * c.K}, 1.0f), slopes({c.alibi ? c.N : 0}, 0.1f),
        sinks({c.sinks ? c.N : 0}, -30.0f), out({T, c.N, c.H}), values({pages, c.page_size, 2 * c.K, c.H}, static_cast<Page>(kType == ffi::BF16 ? 0x3f80 : 1)),
        positions({T}), starts({S + 1}), table({S, P}) {
    int32_t t = 0;
    for (int64_t s = 0; s < S; ++s) {
      for (int32_t i = 0; i < c.fresh[s]; ++i) positions.data()[t++] = c.old[s] + i;
      starts.data()[s + 1] = t;
    }
    for (int64_t i = 0; i < S * P; ++i) table.data()[i] = i + 1;
  }

  ffi::Error Run() {
    TwoThreads threads;
    auto floats = [](Array<float>& a) { return ffi::Buffer<ffi::F32>(&a.buffer); };
    auto numbers = [](Array<int32_t>& a) { return ffi::Buffer<ffi::S32>(&a.buffer); };
    ffi::Buffer<kType> paged(&values.buffer);
    return AttentionImpl<Page, kType>(
        threads.pool, floats(q), floats(k), floats(v), paged, floats(scale), numbers(positions), numbers(starts),
        numbers(table), floats(slopes), floats(sinks), floats(out), paged, floats(scale), 0.125f, c.cap, c.window);
  }
};

// All values are 1, in the pages and in the batch, so every result of a token is, and that of padding 0. Sinks weigh next
// to nothing.
template <typename Page, ffi::DataType kType>
void Check(const Case& c) {
  Call<Page, kType> call(c);
  Require(call.Run().success(), "a good batch was refused");
  const int64_t size = c.N * c.H;
  for (int64_t i = 0; i < call.T * size; ++i) {
    const float expected = i < (call.T - c.padding) * size ? 1.0f : 0.0f;
    Require(std::fabs(call.out.data()[i] - expected) < 0.02f, "a result is wrong");
  }
}

template <typename F>
void Refused(const F& spoil) {
  Case c;
  c.old = {3, 0}, c.fresh = {1, 5};
  Call<float, ffi::F32> call(c);
  spoil(call);
  Require(call.Run().failure(), "a bad batch was taken");
}

int Main() {
  std::vector<Case> cases(9);
  for (Case& c : cases) c.old = {0, 37, 5, 100}, c.fresh = {1, 1, 33, 17};
  cases[1].H = 8, cases[1].page_size = 1;
  cases[2].N = 20, cases[2].K = 1, cases[2].padding = 7;
  cases[3].window = 3;
  cases[4].cap = 2, cases[4].alibi = true, cases[4].sinks = true;
  cases[5].H = 256, cases[5].old = {0}, cases[5].fresh = {2};
  cases[6].old = {}, cases[6].fresh = {}, cases[6].padding = 0;
  cases[7].old = {}, cases[7].fresh = {}, cases[7].padding = 3;
  cases[8].old = {4, 0, 6}, cases[8].fresh = {1, 0, 1};
  for (const Case& c : cases) {
    Check<float, ffi::F32>(c);
    Check<uint16_t, ffi::BF16>(c);
    Check<int8_t, ffi::S8>(c);
  }
  Refused([](auto& call) { call.table.data()[0] = call.pages; });
  Refused([](auto& call) { call.table.data()[1] = -1, call.positions.data()[0] = 20; });
  Refused([](auto& call) { call.positions.data()[2] = INT32_MAX; });
  Refused([](auto& call) { call.positions.data()[2] = -1; });
  Refused([](auto& call) { call.starts.data()[2] = INT32_MAX; });
  Refused([](auto& call) { call.starts.data()[1] = -1; });
  Refused([](auto& call) { call.starts.data()[0] = 1; });
  Refused([](auto& call) { call.q.dims[2] = 12; });
  Refused([](auto& call) { call.q.dims[1] = 3; });
  std::printf("%zu cases\n", 3 * cases.size());
  return 0;
}

}  // namespace
}  // namespace jetserve

int main() { return jetserve::Main(); }
