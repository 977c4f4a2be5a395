// Attention with the vectors of 64-bit ARM: 16 floats are four of them. All such CPUs have what it
// needs, conversion of half precision included.
#include <arm_neon.h>

#include "attention_kernel.h"

namespace edgespec {
namespace {

struct Neon {
  struct F {
    float32x4_t of[4];
  };
  static constexpr int kTile = 4, kPanel = 4;

#define EDGESPEC_EACH(expression)                             \
  F out;                                                      \
  for (int i = 0; i < 4; ++i) out.of[i] = (expression);       \
  return out

  static EDGESPEC_INLINE F all(float value) { EDGESPEC_EACH(vdupq_n_f32(value)); }
  static EDGESPEC_INLINE F load(const float* p) { EDGESPEC_EACH(vld1q_f32(p + 4 * i)); }
  static EDGESPEC_INLINE F load(const uint16_t* p) {
    EDGESPEC_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
  }
  static EDGESPEC_INLINE F load(const int8_t* p) {
    const int8x16_t codes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
  }
  template <class T>
  static EDGESPEC_INLINE F load_part(const T* p, int64_t n) {
    T whole[kLanes] = {};
    memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
    return load(whole);
  }
  static EDGESPEC_INLINE F add(F a, F b) { EDGESPEC_EACH(vaddq_f32(a.of[i], b.of[i])); }
  static EDGESPEC_INLINE F sub(F a, F b) { EDGESPEC_EACH(vsubq_f32(a.of[i], b.of[i])); }
  static EDGESPEC_INLINE F mul(F a, F b) { EDGESPEC_EACH(vmulq_f32(a.of[i], b.of[i])); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) {
    EDGESPEC_EACH(vfmaq_f32(c.of[i], a.of[i], b.of[i]));
  }
  static EDGESPEC_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
  }
  // a NaN in b stays
  static EDGESPEC_INLINE F larger(F a, F b) { EDGESPEC_EACH(larger(a.of[i], b.of[i])); }
  static EDGESPEC_INLINE float32x4_t zero_where(uint32x4_t mask, float32x4_t y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), mask));
  }
  static EDGESPEC_INLINE F zero_below(F x, float limit, F y) {
    EDGESPEC_EACH(zero_where(vcltq_f32(x.of[i], vdupq_n_f32(limit)), y.of[i]));
  }
  // Ones where the lane's number, from `first` on, is below n.
  static EDGESPEC_INLINE uint32x4_t below(int first, int64_t n) {
    const int32_t numbers[4] = {first, first + 1, first + 2, first + 3};
    return vcltq_s32(vld1q_s32(numbers), vdupq_n_s32(static_cast<int32_t>(n)));
  }
  static EDGESPEC_INLINE F between(F x, int64_t from, int64_t to, float other) {
    EDGESPEC_EACH(vbslq_f32(vbicq_u32(below(4 * i, to), below(4 * i, from)), x.of[i],
                            vdupq_n_f32(other)));
  }
  static EDGESPEC_INLINE float32x4_t power(float32x4_t shifted) {
    const uint32x4_t bits = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
    return vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(0x3f800000u)));
  }
  // 2^n, n being the last bits of 1.5 * 2^23 + n
  static EDGESPEC_INLINE F power(F shifted) { EDGESPEC_EACH(power(shifted.of[i])); }
#undef EDGESPEC_EACH

  static EDGESPEC_INLINE float first(F x) { return vgetq_lane_f32(x.of[0], 0); }

  // Lane l of the sixteen plus lane l + 8, and of these l plus l + 4.
  static EDGESPEC_INLINE float32x4_t four_sums(F x) {
    return vaddq_f32(vaddq_f32(x.of[0], x.of[2]), vaddq_f32(x.of[1], x.of[3]));
  }

  static EDGESPEC_INLINE float sum_of_lanes(F x) {
    const float32x4_t four = four_sums(x);
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
  }

  static EDGESPEC_INLINE float largest_lane(F x) {
    const float32x4_t four = larger(larger(x.of[0], x.of[1]), larger(x.of[2], x.of[3]));
    float each[4];
    vst1q_f32(each, four);
    float out = each[0];
    for (int i = 1; i < 4; ++i) out = out > each[i] ? out : each[i];
    return out;
  }

  static EDGESPEC_INLINE void store(float* p, F x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.of[i]);
  }
  static EDGESPEC_INLINE void store(uint16_t* p, F x) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.of[i])));
  }
  template <class T>
  static EDGESPEC_INLINE void store_part(T* p, F x, int64_t n) {
    T whole[kLanes];
    store(whole, x);
    memcpy(p, whole, static_cast<size_t>(n) * sizeof(T));
  }

  // The i-th is the sum of the lanes of the i-th, in the order of sum_of_lanes.
  static EDGESPEC_INLINE float32x4_t two_sums(F a, F b) {
    const float64x2_t x = vreinterpretq_f64_f32(four_sums(a));
    const float64x2_t y = vreinterpretq_f64_f32(four_sums(b));
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)),
                     vreinterpretq_f32_f64(vzip2q_f64(x, y)));
  }
  static EDGESPEC_INLINE float32x4_t sums_of(const F* x) {
    return vpaddq_f32(two_sums(x[0], x[1]), two_sums(x[2], x[3]));
  }

  template <int R, int K>
  static EDGESPEC_INLINE void store_sums(const F* sums, float* out, int64_t row) {
    const float32x4_t all = sums_of(sums);
    if constexpr (R == 1) {
      vst1q_f32(out, all);
    } else if constexpr (R == 2) {
      vst1_f32(out, vget_low_f32(all));
      vst1_f32(out + row, vget_high_f32(all));
    } else {
      static_assert(R == 4);
      float each[4];
      vst1q_f32(each, all);
      for (int r = 0; r < R; ++r) out[r * row] = each[r];
    }
  }
};

}  // namespace

const AttentionKernels attention_neon = {write_of_level<Neon>, attend_of_level<Neon>,
                                         combine_of_level<Neon>};

}  // namespace edgespec
