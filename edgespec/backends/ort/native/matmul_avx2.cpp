// The product by AVX2, which adds pairs of products in 16 bits: exactly so for what is unsigned and
// at most 127.

#include "matmul_ymm.h"

namespace edgespec {
namespace {

struct Avx2Dot {
  static constexpr int kMostRows = 4;

  template <int kBits>
  static void add(Ints& sums, Ints unsigned_bytes, Ints signed_bytes) {
    if constexpr (kBits == 4) {
      add_pairs(sums, unsigned_bytes, signed_bytes, 1);
    } else {
      // The highest bit by itself: with it a pair of products would not fit 16 bits
      const Ints low = _mm256_and_si256(unsigned_bytes, _mm256_set1_epi8(0x7f));
      const Ints high =
          _mm256_and_si256(_mm256_srli_epi16(unsigned_bytes, 7), _mm256_set1_epi8(1));
      add_pairs(sums, low, signed_bytes, 1);
      add_pairs(sums, high, signed_bytes, 128);
    }
  }

 private:
  static void add_pairs(Ints& sums, Ints unsigned_bytes, Ints signed_bytes, short times) {
    const Ints pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(times)));
  }
};

}  // namespace

const MatMulKernels matmul_avx2 = kernels_of<Ymm<Avx2Dot>>();

}  // namespace edgespec
