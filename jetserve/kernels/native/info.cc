// What the library says about itself.

#include "common.h"

// The name of the instruction set that its kernels were written for, of those that the compiler was allowed to use.
extern "C" const char* jetserve_instructions() {
#if defined(JETSERVE_VNNI)
  return "AVX-512 VNNI";
#elif defined(JETSERVE_AVX512)
  return "AVX-512";
#elif defined(JETSERVE_AVX2)
  return "AVX2";
#elif defined(JETSERVE_DOTPROD)
  return "NEON dot product";
#else
  return "portable";
#endif
}

// Which compiler made it.
extern "C" const char* jetserve_compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}
