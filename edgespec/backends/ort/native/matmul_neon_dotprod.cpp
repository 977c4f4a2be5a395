// The product by the dot products of ARMv8.2: 16 products of signed bytes an instruction, summed by
// fours in 32 bits.

#include "matmul_neon.h"

namespace edgespec {
namespace {

struct DotProduct {
  static constexpr bool kSigned = true;

  template <Values kValues, int kInputs>
  static void add(int32x4_t& sums, uint8x16_t values, int8x16_t x) {
    sums = vdotq_laneq_s32(sums, vreinterpretq_s8_u8(values), x, kInputs);
  }
};

struct NeonDotprod : NeonRounding {
  template <Values kValues, bool kMinimums, int kRows>
  static void add_block(const Block& block, Results<NeonDotprod>& results) {
    add_dots<DotProduct, kValues, kMinimums, kRows>(block, results.of);
  }
};

}  // namespace

const MatMulKernels matmul_neon_dotprod = kernels_of<NeonDotprod>();

}  // namespace edgespec
