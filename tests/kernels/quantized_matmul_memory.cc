// The matmul kernel on buffers of exactly their size, aligned to their elements and no better, on shapes that fill no
// vector, and on weights that it must refuse. Compiled with the sanitizers and run by test_native_variants.py; prints the
// cases that ran.

#include "quantized_matmul.cc"

#include "native_harness.h"

namespace jetserve {
namespace {

constexpr float kScale = 0.5f, kOffset = 0.25f, kBias = 2.0f;
constexpr int kStored = 3;  // every value of every weight

struct Shape {
  int64_t T, K, N, bits, block;
  bool is_half, has_offset, has_bias, quantize;
};

// One call with two weights of one shape. Before it, `spoil` may break the arguments.
struct Call {
  Shape s;
  Array<float> x, bias, y, z;
  Array<uint8_t> weight;
  std::vector<int64_t> attributes;
  int64_t args = 4;

  static int64_t Padded(const Shape& s) { return (s.K + kStep - 1) / kStep * kStep; }
  static Weight Layout(const Shape& s) {
    return Weight(nullptr, s.N, Padded(s) / kStep, s.block / kStep, s.bits, s.is_half, s.has_offset);
  }

  // What x is to hold at k, in each row: outliers here and there, the first one in a group of rows and the last.
  static float X(int64_t t, int64_t k) { return k % 64 == (t + 31) % 64 ? 40.0f : 1.0f; }

  explicit Call(const Shape& shape)
      : s(shape), x({s.T, s.K}, 1.0f), bias({s.has_bias ? s.N : 0}, kBias), y({s.T, s.N}), z({s.T, s.N}),
        weight({Layout(s).tiles * Layout(s).tile_bytes}, s.bits == 4 ? kStored * 17 : kStored, 4) {
    const Weight w = Layout(s);
    for (int64_t block = 0; block < w.tiles * w.blocks; ++block) {
      for (int64_t i = 0; i < w.head_bytes; i += s.is_half ? 2 : 4) {
        const float value = i < kLanes * (s.is_half ? 2 : 4) ? kScale : kOffset;
        const uint16_t half = value == kScale ? 0x3800 : 0x3400;
        std::memcpy(weight.data() + block * w.block_bytes + i, s.is_half ? static_cast<const void*>(&half) : &value, s.is_half ? 2 : 4);
      }
    }
    for (int64_t i = 0; i < s.T * s.K; ++i) x.data()[i] = X(i / s.K, i % s.K);
    for (int i = 0; i < 2; ++i) attributes.insert(attributes.end(), {s.bits, s.block, s.is_half, s.has_offset});
  }

  ffi::Error Run() {
    TwoThreads threads;
    XLA_FFI_ArgType arg_types[4] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
    XLA_FFI_RetType ret_types[2] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
    weight.buffer.dtype = XLA_FFI_DataType_U8;
    for (Array<float>* a : {&x, &bias, &y, &z}) a->buffer.dtype = XLA_FFI_DataType_F32;
    void *operands[4] = {&weight.buffer, &bias.buffer, &weight.buffer, &bias.buffer}, *results[2] = {&y.buffer, &z.buffer};
    XLA_FFI_Args given{sizeof(XLA_FFI_Args), nullptr, args, arg_types, operands};
    XLA_FFI_Rets wanted{sizeof(XLA_FFI_Rets), nullptr, 2, ret_types, results};
    return MatmulImpl(threads.pool, ffi::Buffer<ffi::F32>(&x.buffer), ffi::RemainingArgs(&given, 0),
                      ffi::RemainingRets(&wanted, 0), {attributes.data(), attributes.size()}, s.quantize);
  }
};

void Check(const Shape& s) {
  Call call(s);
  Require(call.Run().success(), "a good weight was refused");
  for (int64_t t = 0; t < s.T; ++t) {
    float sum = 0;
    for (int64_t k = 0; k < s.K; ++k) sum += Call::X(t, k);
    const float expected = sum * (kScale * kStored + (s.has_offset ? kOffset : 0)) + (s.has_bias ? kBias : 0);
    for (Array<float>* result : {&call.y, &call.z}) {
      for (int64_t n = 0; n < s.N; ++n) {
        Require(std::fabs(result->data()[t * s.N + n] / expected - 1) < 0.001f, "a result is wrong");
      }
    }
  }
}

template <typename F>
void Refused(const F& spoil) {
  Call call({5, 96, 20, 4, 32, true, true, true, true});
  spoil(call);
  Require(call.Run().failure(), "bad arguments were taken");
}

int Main() {
  int cases = 0;
  for (int64_t T : {0, 1, 2, 3, 7, 66}) {
    for (auto [K, block] : {std::pair<int64_t, int64_t>{1, 32}, {100, 64}, {1100, 32}}) {
      for (int64_t N : {1, 23}) {
        for (int bits : {4, 8}) {
          for (int switches = 0; switches < 16; ++switches) {
            const bool has_offset = (switches & 2) != 0;
            if (bits == 4 && !has_offset) continue;
            Check({T, K, N, bits, block, (switches & 1) != 0, has_offset, (switches & 4) != 0, (switches & 8) != 0}), ++cases;
          }
        }
      }
    }
  }
  Refused([](Call& call) { call.attributes[kBits] = 5; });
  for (int64_t block : {int64_t{0}, int64_t{-32}, int64_t{33}, int64_t{64}, int64_t{1} << 62}) {
    Refused([&](Call& call) { call.attributes[kBlock] = block; });
  }
  Refused([](Call& call) { call.attributes[kIsHalf] = 0; });
  Refused([](Call& call) { call.attributes[kHasOffset] = 0; });
  Refused([](Call& call) { call.attributes.pop_back(); });
  Refused([](Call& call) { call.args = 3; });
  Refused([](Call& call) { call.weight.dims[0] -= 1; });
  Refused([](Call& call) { call.weight.buffer.data = call.weight.data() - 1; });
  Refused([](Call& call) { call.bias.dims[0] -= 1; });
  Refused([](Call& call) { call.x.dims[1] = 64; });
  Refused([](Call& call) { call.x.dims[1] = 0; });
  std::printf("%d cases\n", cases);
  return 0;
}

}  // namespace
}  // namespace jetserve

int main() { return jetserve::Main(); }
