// The product by what every 64-bit ARM has: products of bytes in 16 bits, added up by pairs.

#include "matmul_neon.h"

namespace edgespec {
namespace {

struct NeonDot {
  static constexpr bool kSigned = true;

  template <Values kValues, int kInputs>
  static void add(int32x4_t& sums, uint8x16_t values, int8x16_t x) {
    const int8x16_t w = vreinterpretq_s8_u8(values);
    const int8x16_t four =
        vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), kInputs));
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(four));
    const int16x8_t high = vmull_high_s8(w, four);
    if constexpr (kValues != Values::k8) {
      sums = vpadalq_s16(sums, vpaddq_s16(low, high));
    } else {  // a pair of -128 * -128 would not fit 16 bits
      sums = vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
  }
};

struct Neon : NeonRounding {
  template <Values kValues, bool kMinimums, int kRows>
  static void add_block(const Block& block, Results<Neon>& results) {
    add_dots<NeonDot, kValues, kMinimums, kRows>(block, results.of);
  }
};

}  // namespace

const MatMulKernels matmul_neon = kernels_of<Neon>();

}  // namespace edgespec
