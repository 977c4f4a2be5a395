// The product by AVX2, which multiplies bytes and adds pairs of products in 16 bits. Of values of 4
// bits eight such pairs fit: 8 * 2 * 15 * 128 = 30720; so 32 inputs are added up in 16 bits, and then
// in 32. Values of 8 bits are taken as two of 4.

#include "matmul_ymm.h"

namespace edgespec {
namespace {

struct Avx2Dot {
  static constexpr int kMostRows = 4;
  template <int kBits>
  static constexpr int lines = kBits;  // 32 inputs

  template <int kBits, int kRows>
  static void add(Ints (&sums)[kRows][kHalves], const uint8_t* line, const int8_t* x) {
    Ints pairs[kRows][kHalves];
    clear(pairs);
    EDGESPEC_UNROLL
    for (int i = 0; i < lines<kBits>; ++i) {
      const uint8_t* at = line + i * kTiles * kLine;
      add_pairs(pairs, low_values<4>(at), low_values<4>(at + 32), x + i * kInputs<kBits>);
      if constexpr (kBits == 4) {
        add_pairs(pairs, high_values(at), high_values(at + 32), x + i * kInputs<kBits> + 4);
      }
    }
    add_up(sums, pairs, 1);
    if constexpr (kBits == 8) {
      keep_order();
      clear(pairs);
      EDGESPEC_UNROLL
      for (int i = 0; i < lines<kBits>; ++i) {
        const uint8_t* at = line + i * kTiles * kLine;
        add_pairs(pairs, high_values(at), high_values(at + 32), x + i * kInputs<kBits>);
      }
      add_up(sums, pairs, 16);
    }
  }

 private:
  template <int kRows>
  static void clear(Ints (&pairs)[kRows][kHalves]) {
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      pairs[r][0] = _mm256_setzero_si256();
      pairs[r][1] = _mm256_setzero_si256();
    }
  }

  template <int kRows>
  static void add_pairs(Ints (&pairs)[kRows][kHalves], Ints first, Ints second, const int8_t* x) {
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
  static void add_up(Ints (&sums)[kRows][kHalves], const Ints (&pairs)[kRows][kHalves],
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
