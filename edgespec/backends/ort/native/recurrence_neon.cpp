// The gated delta net with the vectors of 64-bit ARM, which all such CPUs have.
#include <arm_neon.h>

#include "recurrence_kernel.h"

namespace edgespec {
namespace {

struct Neon {
  using F = float32x4_t;
  static constexpr int kWidth = 4, kVectors = 4, kWideVectors = 8;

  static EDGESPEC_INLINE F all(float value) { return vdupq_n_f32(value); }
  static EDGESPEC_INLINE F load(const float* p) { return vld1q_f32(p); }
  static EDGESPEC_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
  static EDGESPEC_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
};

}  // namespace

const DeltaNetKernels delta_net_neon = {run_piece<Neon>};

}  // namespace edgespec
