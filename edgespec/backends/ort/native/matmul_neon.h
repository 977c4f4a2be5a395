// The product on registers of 128 bits of 64-bit ARM: a quad, 4 outputs by 4 inputs, is a register of
// the weight, and a line is 4 of them. A file brings `Dot`, which adds a quad's products to 4 sums;
// `kSigned` says whether it takes values as signed: those of 8 bits are around zero then. Those of 4
// and 6 bits are the same number as either.
#pragma once

#include <arm_neon.h>

#include "matmul_kernel.h"

namespace edgespec {
namespace {

constexpr int kQuad = 4;                                  // outputs
constexpr int kQuads = static_cast<int>(kPanel) / kQuad;  // of a panel
constexpr int64_t kQuadBytes = 16;

// The largest number of rows whose sums fit the registers beside what they are made of, and how
// many quads of outputs are done at once for fewer rows.
constexpr int kNeonRows = 8;
constexpr int quads_at_once(int rows) { return rows == 1 ? 16 : rows == 2 ? 8 : rows <= 4 ? 4 : 2; }

// Fetches what follows while quads of the panel are done, each line in one of the passes over them.
template <Values kValues>
void fetch_step(const Block& block, int64_t step, int pass, int passes, const uint8_t*& ahead) {
  if (step % passes != pass) return;
  for (int line = 0; line < kLines<kValues>; ++line) fetch_ahead(block, ahead);
}

inline uint8x16_t low_halves(uint8x16_t both) { return vandq_u8(both, vdupq_n_u8(0xf)); }
inline uint8x16_t high_halves(uint8x16_t both) { return vshrq_n_u8(both, 4); }

// Adds the sums of a quad of a block to a row's results.
template <bool kMinimums>
EDGESPEC_INLINE void add_results(int32x4_t sums, const Block& block, int row, int64_t column,
                        float* results) {
  const float32x4_t scale = vmulq_n_f32(vld1q_f32(block.weight_scales + column), block.scales[row]);
  float32x4_t result = vfmaq_f32(vld1q_f32(results + column), vcvtq_f32_s32(sums), scale);
  if (kMinimums) {
    result = vfmaq_f32(result, vdupq_n_f32(block.sums[row]), vld1q_f32(block.minimums + column));
  }
  vst1q_f32(results + column, result);
}

// The codes as a level takes them.
template <bool kSigned>
EDGESPEC_INLINE uint8x16_t table_of(const Codes& codes) {
  return kSigned ? vreinterpretq_u8_s8(vld1q_s8(codes.numbers)) : vld1q_u8(codes.all);
}

// The values of a quad: of the first or the last 8 inputs of a step, the first 4 and the next.
template <Values kValues, bool kSigned, int kEight>
EDGESPEC_INLINE uint8x16x2_t values_of(const uint8_t* step, uint8x16_t table) {
  if constexpr (kValues == Values::k8) {
    const uint8x16_t flip = vdupq_n_u8(kSigned ? 0x80 : 0);
    const uint8_t* at = step + 2 * kEight * kLinesBytes;
    return {{veorq_u8(vld1q_u8(at), flip), veorq_u8(vld1q_u8(at + kLinesBytes), flip)}};
  }
  const uint8x16_t both = vld1q_u8(step + kEight * kLinesBytes);
  const uint8x16_t low = low_halves(both), high = high_halves(both);
  if constexpr (kValues == Values::kCodes) {
    return {{vqtbl1q_u8(table, low), vqtbl1q_u8(table, high)}};
  }
  if constexpr (kValues == Values::k6) {
    const uint8x16_t two = vdupq_n_u8(0x30), upper = vld1q_u8(step + 2 * kLinesBytes);
    const uint8x16_t first = kEight == 0 ? vshlq_n_u8(upper, 4) : upper;
    const uint8x16_t next = kEight == 0 ? vshlq_n_u8(upper, 2) : vshrq_n_u8(upper, 2);
    return {{vorrq_u8(low, vandq_u8(first, two)), vorrq_u8(high, vandq_u8(next, two))}};
  }
  return {{low, high}};
}

// What the sums of a row begin with. Signed instructions take values of 8 bits around zero, and the
// numbers of a codebook as they are.
template <Values kValues, bool kMinimums, bool kSigned>
EDGESPEC_INLINE int32_t begin_of(int32_t correction) {
  constexpr bool kAroundZero = kSigned && (kValues == Values::k8 || kValues == Values::kCodes);
  return kAroundZero == kMinimums ? correction : 0;
}

// sums += the products of 4 of a step's inputs.
template <typename Dot, Values kValues, int kInputs, int kRows>
EDGESPEC_INLINE void add_quad(int32x4_t (&sums)[kRows], uint8x16_t values, const int8x16_t (&x)[kRows]) {
  EDGESPEC_UNROLL
  for (int r = 0; r < kRows; ++r) Dot::template add<kValues, kInputs>(sums[r], values, x[r]);
}

// sums += the products of 8 of a step's inputs.
template <typename Dot, Values kValues, int kEight, int kRows, int kSome>
EDGESPEC_INLINE void add_eight(int32x4_t (&sums)[kSome][kRows], const uint8_t* step, uint8x16_t table,
                      const int8x16_t (&x)[kRows]) {
  EDGESPEC_UNROLL
  for (int q = 0; q < kSome; ++q) {
    const uint8x16x2_t values =
        values_of<kValues, Dot::kSigned, kEight>(step + q * kQuadBytes, table);
    add_quad<Dot, kValues, 2 * kEight>(sums[q], values.val[0], x);
    add_quad<Dot, kValues, 2 * kEight + 1>(sums[q], values.val[1], x);
  }
}

// The rows of a group by a block, some quads of outputs after the other.
template <typename Dot, Values kValues, bool kMinimums, int kRows>
void add_dots(const Block& block, float (*results)[kPanel]) {
  constexpr int kSome = quads_at_once(kRows), kPasses = kQuads / kSome;
  const uint8x16_t table = table_of<Dot::kSigned>(*block.codes);
  const uint8_t* ahead = block.ahead;
  for (int pass = 0; pass < kPasses; ++pass) {
    int32x4_t sums[kSome][kRows];
    EDGESPEC_UNROLL
    for (int q = 0; q < kSome; ++q) {
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sums[q][r] =
            vdupq_n_s32(begin_of<kValues, kMinimums, Dot::kSigned>(block.corrections[r]));
      }
    }
    const uint8_t* at = block.values + pass * kSome * kQuadBytes;
    for (int64_t step = 0; step < block.steps; ++step) {
      fetch_step<kValues>(block, step, pass, kPasses, ahead);
      int8x16_t x[kRows];
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) x[r] = vld1q_s8(block.x + r * kSpan + step * kStep);
      add_eight<Dot, kValues, 0>(sums, at, table, x);
      add_eight<Dot, kValues, 1>(sums, at, table, x);
      at += kLines<kValues> * kLinesBytes;
    }
    EDGESPEC_UNROLL
    for (int q = 0; q < kSome; ++q) {
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int64_t column = (pass * kSome + q) * kQuad;
        add_results<kMinimums>(sums[q][r], block, r, column, results[r]);
      }
    }
  }
}

// The first `count` floats, and zeros behind them.
inline float32x4_t first_floats(const float* x, int64_t count) {
  if (count >= kQuad) return vld1q_f32(x);
  float some[kQuad] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = x[i];
  return vld1q_f32(some);
}

struct NeonRounding {
  static constexpr int kMostRows = kNeonRows;
  static constexpr int kMostGroups = 7;  // their results are 14 KB

  static float reach_of(const float* x, int64_t count) {
    uint32x4_t largest = vdupq_n_u32(0);
    for (int64_t i = 0; i < count; i += kQuad) {
      const uint32x4_t bits = vreinterpretq_u32_f32(first_floats(x + i, count - i));
      largest = vmaxq_u32(largest, vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
    }
    const uint32_t found = vmaxvq_u32(largest);
    float reach;
    __builtin_memcpy(&reach, &found, sizeof reach);
    return reach;
  }

  static int32_t round_block(const float* x, int64_t count, int64_t block, const Scale& scale,
                             int8_t* values) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int64_t i = 0; i < block; i += 2 * kQuad) {
      const int32x4_t a = rounded(first_floats(x + i, count - i), scale);
      const int32x4_t b = rounded(first_floats(x + i + kQuad, count - i - kQuad), scale);
      vst1_s8(values + i, vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b))));
      sum = vaddq_s32(sum, vaddq_s32(a, b));
    }
    return vaddvq_s32(sum);
  }

  static void widen(const uint8_t* halves, float factor, float* floats) {
    for (int64_t o = 0; o < kPanel; o += kQuad) {
      const uint16x4_t four = vreinterpret_u16_u8(vld1_u8(halves + 2 * o));
      vst1q_f32(floats + o, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(four)), factor));
    }
  }

  // Compilers make vectors of it.
  template <bool kSigned>
  static void multiply_bytes(const uint8_t* bytes, const float* factors,
                             float* __restrict floats) {
    for (int64_t o = 0; o < kPanel; ++o) {
      const int byte = kSigned ? static_cast<int8_t>(bytes[o]) : bytes[o];
      floats[o] = static_cast<float>(byte) * factors[o];
    }
  }

 private:
  static int32x4_t rounded(float32x4_t some, const Scale& scale) {
    const float32x4_t units = scale.divides ? vdivq_f32(some, vdupq_n_f32(scale.scale))
                                            : vmulq_n_f32(some, scale.inverse);
    // Of a NaN and a number maxnm gives the number
    const float32x4_t kept = vmaxnmq_f32(units, vdupq_n_f32(-128.0f));
    return vminq_s32(vcvtnq_s32_f32(kept), vdupq_n_s32(127));
  }
};

}  // namespace
}  // namespace edgespec
