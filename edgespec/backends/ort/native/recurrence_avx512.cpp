// The gated delta net with AVX-512. Compiled with its own flags; nothing here may be called before
// the machine was asked for them.
#include <immintrin.h>

#include "recurrence_kernel.h"

namespace edgespec {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16, kVectors = 4, kWideVectors = 8;

  // Once into a register: compilers would read it again for each product.
  static EDGESPEC_INLINE F all(float value) {
    F x = _mm512_set1_ps(value);
    asm("" : "+v"(x));
    return x;
  }
  static EDGESPEC_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static EDGESPEC_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static EDGESPEC_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace

const DeltaNetKernels delta_net_avx512 = {run_piece<Avx512>};

}  // namespace edgespec
