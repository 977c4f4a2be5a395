// Attention with AVX-512 (F, BW, DQ, VL). Compiled with its own flags; nothing here may be called
// before the machine was asked for them.
#include <immintrin.h>

#include "attention_kernel.h"

namespace edgespec {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kTile = 16, kPanel = 16;

  static EDGESPEC_INLINE __mmask16 below(int64_t n) {
    return n >= kLanes ? static_cast<__mmask16>(0xffff)
                       : static_cast<__mmask16>(n <= 0 ? 0 : (1u << n) - 1u);
  }

  static EDGESPEC_INLINE F all(float value) { return _mm512_set1_ps(value); }
  static EDGESPEC_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static EDGESPEC_INLINE F load(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static EDGESPEC_INLINE F load(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
  }
  static EDGESPEC_INLINE F load_part(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(below(n), p);
  }
  static EDGESPEC_INLINE F load_part(const uint16_t* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(below(n), p));
  }
  static EDGESPEC_INLINE F load_part(const int8_t* p, int64_t n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(below(n), p)));
  }
  static EDGESPEC_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static EDGESPEC_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static EDGESPEC_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static EDGESPEC_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // a NaN in b stays
  static EDGESPEC_INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
  static EDGESPEC_INLINE F zero_below(F x, float limit, F y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), y);
  }
  static EDGESPEC_INLINE F between(F x, int64_t from, int64_t to, float other) {
    const __mmask16 kept = below(to) & static_cast<__mmask16>(~below(from));
    return _mm512_mask_mov_ps(all(other), kept, x);
  }

  // 2^n, n being the last bits of 1.5 * 2^23 + n
  static EDGESPEC_INLINE F power(F shifted) {
    const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)));
  }

  static EDGESPEC_INLINE float first(F x) { return _mm512_cvtss_f32(x); }

  static EDGESPEC_INLINE float sum_of_lanes(F x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  static EDGESPEC_INLINE float largest_lane(F x) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  static EDGESPEC_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static EDGESPEC_INLINE void store_part(float* p, F x, int64_t n) {
    _mm512_mask_storeu_ps(p, below(n), x);
  }
  static EDGESPEC_INLINE void store(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static EDGESPEC_INLINE void store_part(uint16_t* p, F x, int64_t n) {
    _mm256_mask_storeu_epi16(p, below(n),
                             _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // Lane i of the result is the sum of the lanes of the i-th: halves are added, then quarters, and
  // so on, of two vectors at a time.
  static EDGESPEC_INLINE F sums_of(const F* given) {
    // where the steps below put each
    constexpr int order[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
    F half[8], quarter[4], pair[2];
    for (int i = 0; i < 8; ++i) {
      const F a = given[order[i]], b = given[order[i + 8]];
      half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; ++i) {
      const F a = half[i], b = half[i + 4];
      quarter[i] =
          _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
      const F a = quarter[i], b = quarter[i + 2];
      pair[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88),
                         _mm512_shuffle_ps(pair[0], pair[1], 0xdd));
  }

  template <int R, int K>
  static EDGESPEC_INLINE void store_sums(const F* sums, float* out, int64_t row) {
    const F all = sums_of(sums);
    if constexpr (R == 1) {
      store(out, all);
    } else if constexpr (R == 2) {
      _mm256_storeu_ps(out, _mm512_castps512_ps256(all));
      _mm256_storeu_ps(out + row, _mm512_extractf32x8_ps(all, 1));
    } else {
      static_assert(R == 4);
      _mm_storeu_ps(out, _mm512_castps512_ps128(all));
      _mm_storeu_ps(out + row, _mm512_extractf32x4_ps(all, 1));
      _mm_storeu_ps(out + 2 * row, _mm512_extractf32x4_ps(all, 2));
      _mm_storeu_ps(out + 3 * row, _mm512_extractf32x4_ps(all, 3));
    }
  }
};

}  // namespace

const AttentionKernels attention_avx512 = {write_of_level<Avx512>, attend_of_level<Avx512>,
                                          combine_of_level<Avx512>};

}  // namespace edgespec
