// The product by AVX2, which multiplies bytes and adds pairs of products in 16 bits. Of values of 4
// bits eight such pairs fit: 8 * 2 * 15 * 128 = 30720; so 32 inputs are added up in 16 bits, and then
// in 32. Longer values are taken in two parts: their lower 4 bits, and the others.

#include "matmul_ymm.h"

namespace edgespec {
namespace {

struct Avx2Dot {
  static constexpr int kMostRows = 4;
  static constexpr int kSteps = 2;  // 32 inputs

  template <Values kValues, int kSteps, int kRows>
  static EDGESPEC_INLINE void add(Ints (&sums)[kRows][kHalves], const uint8_t* at, const int8_t* x,
                  const Codes& codes) {
    add_part<kValues, 0, kSteps>(sums, at, x, codes);
    if constexpr (kValues != Values::k4) {
      keep_order();
      add_part<kValues, 1, kSteps>(sums, at, x, codes);
    }
  }

 private:
  // A part of the values of 4 inputs: the lower 4 bits, or the bits above.
  template <Values kValues, int kPart, int kQuad>
  static EDGESPEC_INLINE Ints part_of(const uint8_t* step, const Codes& codes) {
    if constexpr (kValues == Values::k8) {
      return bits_of<4 * kPart>(load(step + kQuad * kLinesBytes), 0xf);
    }
    if constexpr (kValues == Values::kCodes) {
      const Ints table = table_of(kPart == 0 ? codes.low : codes.high);
      return _mm256_shuffle_epi8(table, halves_of<kQuad>(step));
    }
    return kPart == 0 ? halves_of<kQuad>(step) : upper_of<kQuad>(step);
  }

  template <Values kValues, int kPart, int kQuad, int kRows>
  static EDGESPEC_INLINE void add_quad(Ints (&pairs)[kRows][kHalves], const uint8_t* step, const int8_t* x,
                       const Codes& codes) {
    add_pairs(pairs, part_of<kValues, kPart, kQuad>(step, codes),
              part_of<kValues, kPart, kQuad>(step + 32, codes), x + 4 * kQuad);
  }

  template <Values kValues, int kPart, int kSteps, int kRows>
  static EDGESPEC_INLINE void add_part(Ints (&sums)[kRows][kHalves], const uint8_t* at, const int8_t* x,
                       const Codes& codes) {
    Ints pairs[kRows][kHalves];
    clear(pairs);
    EDGESPEC_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      add_quad<kValues, kPart, 0>(pairs, at, x, codes);
      add_quad<kValues, kPart, 1>(pairs, at, x, codes);
      add_quad<kValues, kPart, 2>(pairs, at, x, codes);
      add_quad<kValues, kPart, 3>(pairs, at, x, codes);
      at += kLines<kValues> * kLinesBytes;
      x += kStep;
    }
    add_up(sums, pairs, kPart == 0 ? 1 : 16);
  }

  template <int kRows>
  static EDGESPEC_INLINE void clear(Ints (&pairs)[kRows][kHalves]) {
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      pairs[r][0] = _mm256_setzero_si256();
      pairs[r][1] = _mm256_setzero_si256();
    }
  }

  template <int kRows>
  static EDGESPEC_INLINE void add_pairs(Ints (&pairs)[kRows][kHalves], Ints first, Ints second, const int8_t* x) {
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Ints some = _mm256_set1_epi32(four(x + r * kSpan));
      add_pair(pairs[r][0], first, some);
      add_pair(pairs[r][1], second, some);
    }
  }

  // One after the other: as a tree, which GCC would make of it, sums have too few registers.
  static void add_pair(Ints& pairs, Ints unsigned_bytes, Ints signed_bytes) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(unsigned_bytes, signed_bytes));
    __asm__("" : "+x"(pairs));
  }

  template <int kRows>
  static EDGESPEC_INLINE void add_up(Ints (&sums)[kRows][kHalves], const Ints (&pairs)[kRows][kHalves],
                     short times) {
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      EDGESPEC_UNROLL
      for (int h = 0; h < kHalves; ++h) {
        const Ints some = _mm256_madd_epi16(pairs[r][h], _mm256_set1_epi16(times));
        sums[r][h] = _mm256_add_epi32(sums[r][h], some);
      }
    }
  }
};

}  // namespace

const MatMulKernels matmul_avx2 = kernels_of<Ymm<Avx2Dot>>();

}  // namespace edgespec
