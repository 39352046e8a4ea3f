// What the kernels need to be called without XLA: a thread pool, buffers, and a test's way to fail. Included after a kernel.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jetserve {

// XLA's interface, of which the kernels use the thread pool: two threads, joined at the end.
class TwoThreads {
 public:
  TwoThreads() : pool(*ffi::CtxDecoding<ffi::ThreadPool>::Decode(Api(), nullptr, diagnostic_)) {}
  ~TwoThreads() {
    for (std::thread& thread : threads()) thread.join();
    threads().clear();
  }

 private:
  static std::vector<std::thread>& threads() {
    static std::vector<std::thread> all;
    return all;
  }
  static XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    threads().emplace_back(args->task, args->data);
    return nullptr;
  }
  static XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
    *args->num_threads = 2;
    return nullptr;
  }
  static const XLA_FFI_Api* Api() {
    static XLA_FFI_Api api{};
    api.XLA_FFI_ThreadPool_Schedule = Schedule;
    api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
    return &api;
  }

  ffi::DiagnosticEngine diagnostic_;

 public:
  ffi::ThreadPool pool;
};

// An array on the heap that begins `offset` bytes, one element, after what malloc aligned, and ends where its allocation
// ends.
template <typename T>
struct Array {
  std::vector<int64_t> dims;
  std::unique_ptr<char[]> room;
  XLA_FFI_Buffer buffer{};

  explicit Array(std::vector<int64_t> sizes, T value = T{}, int64_t offset = sizeof(T)) : dims(std::move(sizes)) {
    int64_t count = 1;
    for (int64_t size : dims) count *= size;
    room.reset(new char[count * sizeof(T) + offset]);
    buffer.data = room.get() + offset;
    buffer.rank = dims.size(), buffer.dims = dims.data();
    std::fill_n(data(), count, value);
  }
  T* data() { return static_cast<T*>(buffer.data); }
};

inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

}  // namespace jetserve
