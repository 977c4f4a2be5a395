// Attention in plain C++. Compilers make vectors of it where the machine fuses multiply-add by
// itself, as on 64-bit ARM; elsewhere it is slow, and what the other levels are proven against.
#include "attention_kernel.h"
#include "half.h"

namespace edgespec {
namespace {

EDGESPEC_INLINE uint16_t half_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits == 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits >= 0x38800000u) {  // normal: round to nearest even
    const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
    const uint32_t out = (rounded - 0x38000000u) >> 13;
    return static_cast<uint16_t>(sign | (out < 0x7c00u ? out : 0x7c00u));
  }
  float small;
  memcpy(&small, &bits, sizeof small);
  small += 0.5f;  // its last bit is 2^-24
  memcpy(&bits, &small, sizeof bits);
  return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
}

struct Portable {
  struct F {
    float x[kLanes];
  };
  static constexpr int kTile = 1, kPanel = 1;

#define EDGESPEC_EACH(expression)                             \
  F out;                                                      \
  for (int i = 0; i < kLanes; ++i) out.x[i] = (expression);    \
  return out

  static EDGESPEC_INLINE F all(float value) { EDGESPEC_EACH(value); }
  static EDGESPEC_INLINE F load(const float* p) { EDGESPEC_EACH(p[i]); }
  static EDGESPEC_INLINE F load(const uint16_t* p) { EDGESPEC_EACH(float_of_half(p[i])); }
  static EDGESPEC_INLINE F load(const int8_t* p) { EDGESPEC_EACH(static_cast<float>(p[i])); }
  static EDGESPEC_INLINE F load_part(const float* p, int64_t n) {
    EDGESPEC_EACH(i < n ? p[i] : 0.0f);
  }
  static EDGESPEC_INLINE F load_part(const uint16_t* p, int64_t n) {
    EDGESPEC_EACH(i < n ? float_of_half(p[i]) : 0.0f);
  }
  static EDGESPEC_INLINE F load_part(const int8_t* p, int64_t n) {
    EDGESPEC_EACH(i < n ? static_cast<float>(p[i]) : 0.0f);
  }
  static EDGESPEC_INLINE F add(F a, F b) { EDGESPEC_EACH(a.x[i] + b.x[i]); }
  static EDGESPEC_INLINE F sub(F a, F b) { EDGESPEC_EACH(a.x[i] - b.x[i]); }
  static EDGESPEC_INLINE F mul(F a, F b) { EDGESPEC_EACH(a.x[i] * b.x[i]); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) {
    EDGESPEC_EACH(__builtin_fmaf(a.x[i], b.x[i], c.x[i]));
  }
  // a NaN in b stays
  static EDGESPEC_INLINE F larger(F a, F b) { EDGESPEC_EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
  static EDGESPEC_INLINE F zero_below(F x, float limit, F y) {
    EDGESPEC_EACH(x.x[i] < limit ? 0.0f : y.x[i]);
  }
  static EDGESPEC_INLINE F between(F x, int64_t from, int64_t to, float other) {
    EDGESPEC_EACH(i >= from && i < to ? x.x[i] : other);
  }
#undef EDGESPEC_EACH

  // 2^n, n being the last bits of 1.5 * 2^23 + n
  static EDGESPEC_INLINE F power(F shifted) {
    F out;
    for (int i = 0; i < kLanes; ++i) {
      uint32_t bits;
      memcpy(&bits, &shifted.x[i], sizeof bits);
      bits = (bits << 23) + 0x3f800000u;
      memcpy(&out.x[i], &bits, sizeof bits);
    }
    return out;
  }

  static EDGESPEC_INLINE float first(F x) { return x.x[0]; }

  static EDGESPEC_INLINE float sum_of_lanes(F x) {
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) x.x[i] += x.x[i + half];
    return x.x[0];
  }

  static EDGESPEC_INLINE float largest_lane(F x) {
    float out = x.x[0];
    for (int i = 1; i < kLanes; ++i) out = out > x.x[i] ? out : x.x[i];
    return out;
  }

  static EDGESPEC_INLINE void store(float* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = x.x[i];
  }
  static EDGESPEC_INLINE void store_part(float* p, F x, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = x.x[i];
  }
  static EDGESPEC_INLINE void store(uint16_t* p, F x) { store_part(p, x, kLanes); }
  static EDGESPEC_INLINE void store_part(uint16_t* p, F x, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = half_of_float(x.x[i]);
  }

  template <int R, int K>
  static EDGESPEC_INLINE void store_sums(const F* sums, float* out, int64_t row) {
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < K; ++k) out[r * row + k] = sum_of_lanes(sums[r * K + k]);
  }
};

}  // namespace

const AttentionKernels attention_portable = {write_of_level<Portable>, attend_of_level<Portable>,
                                          combine_of_level<Portable>};

}  // namespace edgespec
