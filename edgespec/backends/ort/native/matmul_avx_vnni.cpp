// The product by AVX-VNNI: 32 products of bytes an instruction, for CPUs without AVX-512.

#include "matmul_ymm.h"

namespace edgespec {
namespace {

struct AvxVnniDot {
  static constexpr int kMostRows = 6;
  template <int kBits>
  static constexpr int lines = 1;

  template <int kBits, int kRows>
  static void add(Ints (&sums)[kRows][kHalves], const uint8_t* line, const int8_t* x) {
    add_products(sums, low_values<kBits>(line), low_values<kBits>(line + 32), x);
    if constexpr (kBits == 4) {
      add_products(sums, high_values(line), high_values(line + 32), x + 4);
    }
  }

 private:
  template <int kRows>
  static void add_products(Ints (&sums)[kRows][kHalves], Ints first, Ints second,
                           const int8_t* x) {
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Ints some = _mm256_set1_epi32(four(x + r * kSpan));
      add_products(sums[r][0], first, some);
      add_products(sums[r][1], second, some);
    }
  }

  // As an intrinsic GCC 12 copies the sums around it
  static void add_products(Ints& sums, Ints unsigned_bytes, Ints signed_bytes) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(unsigned_bytes), "x"(signed_bytes));
  }
};

}  // namespace

const MatMulKernels matmul_avx_vnni = kernels_of<Ymm<AvxVnniDot>>();

}  // namespace edgespec
