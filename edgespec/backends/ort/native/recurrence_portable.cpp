// The gated delta net in plain C++. Compilers make vectors of it where the machine fuses
// multiply-add by itself, as on 64-bit ARM; elsewhere it is slow, and what the other levels are
// proven against.
#include "recurrence_kernel.h"

namespace edgespec {
namespace {

struct Portable {
  static constexpr int kWidth = 4, kVectors = 4, kWideVectors = 8;
  struct F {
    float x[kWidth];
  };

#define EDGESPEC_EACH(expression)                             \
  F out;                                                      \
  for (int i = 0; i < kWidth; ++i) out.x[i] = (expression);   \
  return out

  static EDGESPEC_INLINE F all(float value) { EDGESPEC_EACH(value); }
  static EDGESPEC_INLINE F load(const float* p) { EDGESPEC_EACH(p[i]); }
  static EDGESPEC_INLINE F mul(F a, F b) { EDGESPEC_EACH(a.x[i] * b.x[i]); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) {
    EDGESPEC_EACH(__builtin_fmaf(a.x[i], b.x[i], c.x[i]));
  }
#undef EDGESPEC_EACH
  static EDGESPEC_INLINE void store(float* p, F x) {
    for (int i = 0; i < kWidth; ++i) p[i] = x.x[i];
  }
};

}  // namespace

const DeltaNetKernels delta_net_portable = {run_piece<Portable>};

}  // namespace edgespec
