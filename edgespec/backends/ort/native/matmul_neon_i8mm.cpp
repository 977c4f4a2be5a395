// The product by the products of matrices of ARMv8.6: 2 outputs by 8 inputs by 2 rows an
// instruction. A row that is alone has dot products of unsigned by signed bytes.

#include "matmul_neon.h"

namespace edgespec {
namespace {

struct MixedDot {
  static constexpr bool kSigned = false;

  template <Values kValues, int kInputs>
  static void add(int32x4_t& sums, uint8x16_t values, int8x16_t x) {
    sums = vusdotq_laneq_s32(sums, values, x, kInputs);
  }
};

// Two outputs of a quad by two rows: those of the first output, then those of the second.
struct Sums {
  int32x4_t of[2];
};

inline uint8x16_t outputs_of(uint8x16_t first_inputs, uint8x16_t next_inputs, int half) {
  const uint32x4_t a = vreinterpretq_u32_u8(first_inputs), b = vreinterpretq_u32_u8(next_inputs);
  return vreinterpretq_u8_u32(half == 0 ? vzip1q_u32(a, b) : vzip2q_u32(a, b));
}

// sums += the products of 8 inputs of a quad, of which each register has 4.
template <int kPairs>
EDGESPEC_INLINE void add_matrices(Sums (&sums)[kPairs], uint8x16_t first_inputs, uint8x16_t next_inputs,
                         const int8x16_t (&x)[kPairs]) {
  EDGESPEC_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint8x16_t outputs = outputs_of(first_inputs, next_inputs, half);
    EDGESPEC_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      sums[p].of[half] = vusmmlaq_s32(sums[p].of[half], outputs, x[p]);
    }
  }
}

// sums += the products of 8 inputs of a step.
template <Values kValues, int kEight, int kPairs, int kSome>
EDGESPEC_INLINE void add_eight(Sums (&sums)[kSome][kPairs], const uint8_t* step, uint8x16_t table,
                      const int8x16_t (&x)[kPairs]) {
  EDGESPEC_UNROLL
  for (int q = 0; q < kSome; ++q) {
    const uint8x16x2_t values = values_of<kValues, false, kEight>(step + q * kQuadBytes, table);
    add_matrices(sums[q], values.val[0], values.val[1], x);
  }
}

// 16 inputs of the rows as pairs: the first 8 of both rows, and the next 8. A row without another is
// its own.
template <int kRows, int kPairs>
EDGESPEC_INLINE void load_pairs(const int8_t* x, int8x16_t (&pairs)[2][kPairs]) {
  EDGESPEC_UNROLL
  for (int p = 0; p < kPairs; ++p) {
    const int other = 2 * p + 1 < kRows ? 2 * p + 1 : 2 * p;
    const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(x + 2 * p * kSpan));
    const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(x + other * kSpan));
    pairs[0][p] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
    pairs[1][p] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
  }
}

template <Values kValues, bool kMinimums, int kRows>
void add_pairs(const Block& block, float (*results)[kPanel]) {
  constexpr int kPairs = (kRows + 1) / 2;
  constexpr int kSome = quads_at_once(2 * kPairs), kPasses = kQuads / kSome;
  const uint8x16_t table = table_of<false>(*block.codes);
  const uint8_t* ahead = block.ahead;
  for (int pass = 0; pass < kPasses; ++pass) {
    Sums sums[kSome][kPairs];
    EDGESPEC_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      const int other = 2 * p + 1 < kRows ? 2 * p + 1 : 2 * p;
      const int32_t first = begin_of<kValues, kMinimums, false>(block.corrections[2 * p]);
      const int32_t next = begin_of<kValues, kMinimums, false>(block.corrections[other]);
      const int32x4_t both = vzip1q_s32(vdupq_n_s32(first), vdupq_n_s32(next));
      EDGESPEC_UNROLL
      for (int q = 0; q < kSome; ++q) sums[q][p] = {{both, both}};
    }
    const uint8_t* at = block.values + pass * kSome * kQuadBytes;
    for (int64_t step = 0; step < block.steps; ++step) {
      fetch_step<kValues>(block, step, pass, kPasses, ahead);
      int8x16_t x[2][kPairs];
      load_pairs<kRows>(block.x + step * kStep, x);
      add_eight<kValues, 0>(sums, at, table, x[0]);
      add_eight<kValues, 1>(sums, at, table, x[1]);
      at += kLines<kValues> * kLinesBytes;
    }
    EDGESPEC_UNROLL
    for (int q = 0; q < kSome; ++q) {
      const int64_t column = (pass * kSome + q) * kQuad;
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Sums& both = sums[q][r / 2];
        const int32x4_t own =
            r % 2 == 0 ? vuzp1q_s32(both.of[0], both.of[1]) : vuzp2q_s32(both.of[0], both.of[1]);
        add_results<kMinimums>(own, block, r, column, results[r]);
      }
    }
  }
}

struct NeonI8mm : NeonRounding {
  template <Values kValues, bool kMinimums, int kRows>
  static void add_block(const Block& block, Results<NeonI8mm>& results) {
    if constexpr (kRows == 1) {
      add_dots<MixedDot, kValues, kMinimums, kRows>(block, results.of);
    } else {
      add_pairs<kValues, kMinimums, kRows>(block, results.of);
    }
  }
};

}  // namespace

const MatMulKernels matmul_neon_i8mm = kernels_of<NeonI8mm>();

}  // namespace edgespec
