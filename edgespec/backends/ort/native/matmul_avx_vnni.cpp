// The product by AVX-VNNI: 32 products of bytes an instruction, for CPUs without AVX-512.

#include "matmul_ymm.h"

namespace edgespec {
namespace {

struct AvxVnniDot {
  static constexpr int kMostRows = 6;
  static constexpr int kSteps = 1;

  template <Values kValues, int kSteps, int kRows>
  static EDGESPEC_INLINE void add(Ints (&sums)[kRows][kHalves], const uint8_t* at, const int8_t* x,
                  const Codes& codes) {
    add_quad<kValues, 0>(sums, at, x, codes);
    add_quad<kValues, 1>(sums, at, x, codes);
    add_quad<kValues, 2>(sums, at, x, codes);
    add_quad<kValues, 3>(sums, at, x, codes);
  }

 private:
  template <Values kValues, int kQuad>
  static EDGESPEC_INLINE Ints values_of(const uint8_t* step, const Codes& codes) {
    if constexpr (kValues == Values::k8) return load(step + kQuad * kLinesBytes);
    const Ints low = halves_of<kQuad>(step);
    if constexpr (kValues == Values::kCodes) return _mm256_shuffle_epi8(table_of(codes.all), low);
    if constexpr (kValues == Values::k6) {
      return _mm256_or_si256(low, _mm256_slli_epi16(upper_of<kQuad>(step), 4));
    }
    return low;
  }

  template <Values kValues, int kQuad, int kRows>
  static EDGESPEC_INLINE void add_quad(Ints (&sums)[kRows][kHalves], const uint8_t* step, const int8_t* x,
                       const Codes& codes) {
    add_products(sums, values_of<kValues, kQuad>(step, codes),
                 values_of<kValues, kQuad>(step + 32, codes), x + 4 * kQuad);
  }

  template <int kRows>
  static EDGESPEC_INLINE void add_products(Ints (&sums)[kRows][kHalves], Ints first, Ints second,
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
