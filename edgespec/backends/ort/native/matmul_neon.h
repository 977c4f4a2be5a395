// The product on registers of 128 bits of 64-bit ARM: a quad, 4 outputs by 4 inputs, is a register of
// the weight, and a line is 4 of them. A file brings `Dot`, which adds a quad's products to 4 sums;
// `kSigned` says whether it takes weights of 8 bits as signed: they are around zero then, and need
// no correction. Those of 4 bits are the same number as either.
#pragma once

#include <arm_neon.h>

#include "matmul_kernel.h"

namespace edgespec {
namespace {

constexpr int kQuad = 4;                                         // outputs
constexpr int kQuads = static_cast<int>(kPanel) / kQuad;         // of a panel
constexpr int64_t kQuadBytes = 16, kLinesBytes = kTiles * kLine;  // the lines of all tiles
constexpr int64_t kStep = 16;                                    // inputs, a register of a row

// The largest number of rows whose sums fit the registers beside what they are made of, and how
// many quads of outputs are done at once for fewer rows.
constexpr int kNeonRows = 8;
constexpr int quads_at_once(int rows) { return rows == 1 ? 16 : rows == 2 ? 8 : rows <= 4 ? 4 : 2; }

// The lines of `kStep` inputs.
template <int kBits>
constexpr int64_t lines_of_step() {
  return kBits == 4 ? 2 : 4;
}

// Fetches what follows while quads of the panel are done, each line in one of the passes over them.
template <int kBits>
void fetch_step(const Block& block, int64_t step, int pass, int passes, const uint8_t*& ahead) {
  if (step % passes != pass) return;
  for (int64_t line = 0; line < lines_of_step<kBits>(); ++line) fetch_ahead(block, ahead);
}

inline uint8x16_t low_halves(uint8x16_t both) { return vandq_u8(both, vdupq_n_u8(0xf)); }
inline uint8x16_t high_halves(uint8x16_t both) { return vshrq_n_u8(both, 4); }

// Adds the sums of a quad of a block to a row's results.
inline void add_results(int32x4_t sums, float row_scale, float32x4_t weight_scales,
                        float* results) {
  const float32x4_t scale = vmulq_n_f32(weight_scales, row_scale);
  vst1q_f32(results, vfmaq_f32(vld1q_f32(results), vcvtq_f32_s32(sums), scale));
}

inline const float* scales_of(const Block& block) {
  return reinterpret_cast<const float*>(block.values + block.lines * kLinesBytes);
}

// sums += the products of 4 of a step's inputs.
template <typename Dot, int kBits, int kInputs, int kRows>
inline void add_quad(int32x4_t (&sums)[kRows], uint8x16_t values, const int8x16_t (&x)[kRows]) {
  EDGESPEC_UNROLL
  for (int r = 0; r < kRows; ++r) Dot::template add<kBits, kInputs>(sums[r], values, x[r]);
}

// sums += the products of one line of a step.
template <typename Dot, int kBits, int kLineOfStep, int kRows, int kSome>
inline void add_line(int32x4_t (&sums)[kSome][kRows], const uint8_t* line,
                     const int8x16_t (&x)[kRows]) {
  EDGESPEC_UNROLL
  for (int q = 0; q < kSome; ++q) {
    const uint8x16_t values = vld1q_u8(line + q * kQuadBytes);
    if constexpr (kBits == 4) {
      add_quad<Dot, kBits, 2 * kLineOfStep>(sums[q], low_halves(values), x);
      add_quad<Dot, kBits, 2 * kLineOfStep + 1>(sums[q], high_halves(values), x);
    } else if constexpr (Dot::kSigned) {
      add_quad<Dot, kBits, kLineOfStep>(sums[q], veorq_u8(values, vdupq_n_u8(0x80)), x);
    } else {
      add_quad<Dot, kBits, kLineOfStep>(sums[q], values, x);
    }
  }
}

// The rows of a group by a block, some quads of outputs after the other.
template <typename Dot, int kBits, int kRows>
void add_dots(const Block& block, float (*results)[kPanel]) {
  constexpr int kSome = quads_at_once(kRows), kPasses = kQuads / kSome;
  constexpr bool kCorrected = kBits == 4 || !Dot::kSigned;
  const uint8_t* ahead = block.ahead;
  for (int pass = 0; pass < kPasses; ++pass) {
    int32x4_t sums[kSome][kRows];
    EDGESPEC_UNROLL
    for (int q = 0; q < kSome; ++q) {
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) sums[q][r] = vdupq_n_s32(kCorrected ? block.corrections[r] : 0);
    }
    const uint8_t* at = block.values + pass * kSome * kQuadBytes;
    const int64_t steps = block.lines / lines_of_step<kBits>();
    for (int64_t step = 0; step < steps; ++step) {
      fetch_step<kBits>(block, step, pass, kPasses, ahead);
      int8x16_t x[kRows];
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) x[r] = vld1q_s8(block.x + r * kSpan + step * kStep);
      add_line<Dot, kBits, 0>(sums, at, x);
      add_line<Dot, kBits, 1>(sums, at + kLinesBytes, x);
      if constexpr (kBits == 8) {
        add_line<Dot, kBits, 2>(sums, at + 2 * kLinesBytes, x);
        add_line<Dot, kBits, 3>(sums, at + 3 * kLinesBytes, x);
      }
      at += lines_of_step<kBits>() * kLinesBytes;
    }
    EDGESPEC_UNROLL
    for (int q = 0; q < kSome; ++q) {
      const int64_t column = (pass * kSome + q) * kQuad;
      const float32x4_t weight_scales = vld1q_f32(scales_of(block) + column);
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        add_results(sums[q][r], block.scales[r], weight_scales, results[r] + column);
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
