// The gated delta net with AVX2 and FMA. Compiled with its own flags; nothing here may be called
// before the machine was asked for them.
#include <immintrin.h>

#include "recurrence_kernel.h"

namespace edgespec {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8, kVectors = 2, kWideVectors = 2;

  // Once into a register: compilers would read it again for each product.
  static EDGESPEC_INLINE F all(float value) {
    F x = _mm256_set1_ps(value);
    asm("" : "+x"(x));
    return x;
  }
  static EDGESPEC_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  static EDGESPEC_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static EDGESPEC_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace

const DeltaNetKernels delta_net_avx2 = {run_piece<Avx2>};

}  // namespace edgespec
