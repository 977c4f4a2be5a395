// Attention with AVX2, FMA and F16C: 16 floats are two vectors. Compiled with its own flags;
// nothing here may be called before the machine was asked for them.
#include <immintrin.h>

#include "attention_kernel.h"

namespace edgespec {
namespace {

struct Avx2 {
  struct F {
    __m256 low, high;
  };
  static constexpr int kTile = 4, kPanel = 4;

  // Ones where the lane's number is below n.
  static EDGESPEC_INLINE __m256i below(int64_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
  }

  static EDGESPEC_INLINE F all(float value) {
    return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
  }
  static EDGESPEC_INLINE F load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static EDGESPEC_INLINE F load(const uint16_t* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)),
            _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  static EDGESPEC_INLINE F load(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
  }
  static EDGESPEC_INLINE F load_part(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, below(n)), _mm256_maskload_ps(p + 8, below(n - 8))};
  }
  template <class T>
  static EDGESPEC_INLINE F load_part(const T* p, int64_t n) {
    T whole[kLanes] = {};
    memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
    return load(whole);
  }
  static EDGESPEC_INLINE F add(F a, F b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static EDGESPEC_INLINE F sub(F a, F b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  static EDGESPEC_INLINE F mul(F a, F b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static EDGESPEC_INLINE F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  // a NaN in b stays
  static EDGESPEC_INLINE F larger(F a, F b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  static EDGESPEC_INLINE F zero_below(F x, float limit, F y) {
    const __m256 least = _mm256_set1_ps(limit);
    return {_mm256_and_ps(_mm256_cmp_ps(x.low, least, _CMP_NLT_UQ), y.low),
            _mm256_and_ps(_mm256_cmp_ps(x.high, least, _CMP_NLT_UQ), y.high)};
  }
  static EDGESPEC_INLINE __m256 between(__m256 x, int64_t from, int64_t to, float other) {
    const __m256i kept = _mm256_andnot_si256(below(from), below(to));
    return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(kept));
  }
  static EDGESPEC_INLINE F between(F x, int64_t from, int64_t to, float other) {
    return {between(x.low, from, to, other), between(x.high, from - 8, to - 8, other)};
  }

  static EDGESPEC_INLINE __m256 power(__m256 shifted) {
    const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
  }
  // 2^n, n being the last bits of 1.5 * 2^23 + n
  static EDGESPEC_INLINE F power(F shifted) { return {power(shifted.low), power(shifted.high)}; }

  static EDGESPEC_INLINE float first(F x) { return _mm256_cvtss_f32(x.low); }

  static EDGESPEC_INLINE float sum_of_lanes(F x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  static EDGESPEC_INLINE float largest_lane(F x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  static EDGESPEC_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
  }
  static EDGESPEC_INLINE void store_part(float* p, F x, int64_t n) {
    _mm256_maskstore_ps(p, below(n), x.low);
    _mm256_maskstore_ps(p + 8, below(n - 8), x.high);
  }
  static EDGESPEC_INLINE void store(uint16_t* p, F x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m128i* halves = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.low, nearest));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.high, nearest));
  }
  static EDGESPEC_INLINE void store_part(uint16_t* p, F x, int64_t n) {
    uint16_t whole[kLanes];
    store(whole, x);
    memcpy(p, whole, static_cast<size_t>(n) * sizeof(uint16_t));
  }

  // The i-th is the sum of the lanes of the i-th: halves are added, then quarters, and so on.
  static EDGESPEC_INLINE __m128 sums_of(const F* x) {
    __m256 half[4];
    for (int i = 0; i < 4; ++i) half[i] = _mm256_add_ps(x[i].low, x[i].high);
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(half[0], half[1], 0x20),
                                    _mm256_permute2f128_ps(half[0], half[1], 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(half[2], half[3], 0x20),
                                    _mm256_permute2f128_ps(half[2], half[3], 0x31));
    const __m256 pairs =
        _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    const __m256 acbd =
        _mm256_add_ps(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xdd));
    return _mm_unpacklo_ps(_mm256_castps256_ps128(acbd), _mm256_extractf128_ps(acbd, 1));
  }

  template <int R, int K>
  static EDGESPEC_INLINE void store_sums(const F* sums, float* out, int64_t row) {
    const __m128 all = sums_of(sums);
    if constexpr (R == 1) {
      _mm_storeu_ps(out, all);
    } else if constexpr (R == 2) {
      _mm_storel_pi(reinterpret_cast<__m64*>(out), all);
      _mm_storeh_pi(reinterpret_cast<__m64*>(out + row), all);
    } else {
      static_assert(R == 4);
      float each[4];
      _mm_storeu_ps(each, all);
      for (int r = 0; r < R; ++r) out[r * row] = each[r];
    }
  }
};

}  // namespace

const AttentionKernels attention_avx2 = {write_of_level<Avx2>, attend_of_level<Avx2>,
                                          combine_of_level<Avx2>};

}  // namespace edgespec
