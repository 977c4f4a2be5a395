// The product by AVX-512 VNNI: 64 products of bytes an instruction, summed by fours in 32 bits.

#include <immintrin.h>

#include "matmul_kernel.h"

namespace edgespec {
namespace {

using Ints = __m512i;
using Floats = __m512;

Ints load(const void* at) { return _mm512_loadu_si512(at); }

__mmask16 lanes(int64_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff)
                     : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1u);
}

// The values of a line: of 8 bits as they are, of 4 bits those in the low or in the high halves.
template <int kBits>
Ints low_values(const uint8_t* line) {
  if constexpr (kBits == 8) return load(line);
  return _mm512_and_si512(load(line), _mm512_set1_epi8(0xf));
}

Ints high_values(const uint8_t* line) {
  return _mm512_and_si512(_mm512_srli_epi16(load(line), 4), _mm512_set1_epi8(0xf));
}

// sums += products of unsigned by signed bytes, by fours. As an intrinsic GCC 12 copies the sums
// around it.
void add_products(Ints& sums, Ints unsigned_bytes, Ints signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// sums += values of four lines * the rows' values for them.
template <int kRows>
void add_lines(Ints (&sums)[kRows][kTiles], const Ints (&values)[kTiles], const int8_t* x) {
  EDGESPEC_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Ints some = _mm512_set1_epi32(four(x + r * kSpan));
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) add_products(sums[r][t], values[t], some);
  }
}

struct Avx512Vnni {
  static constexpr int kMostRows = 4;     // their sums in all tiles of a panel are 16 registers
  static constexpr int kMostGroups = 15;  // their results are 15 KB

  static float reach_of(const float* x, int64_t count) {
    Ints largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
      const Floats some = _mm512_maskz_loadu_ps(lanes(count - i), x + i);
      const Ints magnitudes =
          _mm512_and_si512(_mm512_castps_si512(some), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_max_epu32(largest, magnitudes);
    }
    const auto found = static_cast<int>(_mm512_reduce_max_epu32(largest));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(found)));
  }

  static int32_t round_block(const float* x, int64_t count, int64_t block, const Scale& scale,
                             int8_t* values) {
    const Floats divisor = _mm512_set1_ps(scale.scale), factor = _mm512_set1_ps(scale.inverse);
    Ints sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < block; i += 16) {
      const Floats some = _mm512_maskz_loadu_ps(lanes(count - i), x + i);
      const Floats units =
          scale.divides ? _mm512_div_ps(some, divisor) : _mm512_mul_ps(some, factor);
      // Of a NaN min gives its second operand, and the conversion the lowest number
      const Ints whole = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_set1_ps(kLargest), units));
      const Ints kept = _mm512_max_epi32(whole, _mm512_set1_epi32(-128));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), _mm512_cvtepi32_epi8(kept));
      sum = _mm512_add_epi32(sum, kept);
    }
    return _mm512_reduce_add_epi32(sum);
  }

  // Each line of the weight is read and unpacked once for all the rows.
  template <int kBits, int kBlock, int kRows>
  static void add_block(const Block& block, Results<Avx512Vnni>& results) {
    Ints sums[kRows][kTiles];
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Ints correction = _mm512_set1_epi32(block.corrections[r]);
      EDGESPEC_UNROLL
      for (int t = 0; t < kTiles; ++t) sums[r][t] = correction;
    }
    const uint8_t *at = block.values, *ahead = block.ahead;
    const int8_t* x = block.x;
    for (int64_t line = 0; line < kLines<kBits, kBlock>; ++line) {
      fetch_ahead(block, ahead);
      Ints values[kTiles];
      EDGESPEC_UNROLL
      for (int t = 0; t < kTiles; ++t) values[t] = low_values<kBits>(at + t * kLine);
      add_lines(sums, values, x);
      x += 4;
      if constexpr (kBits == 4) {
        keep_order();
        EDGESPEC_UNROLL
        for (int t = 0; t < kTiles; ++t) values[t] = high_values(at + t * kLine);
        add_lines(sums, values, x);
        x += 4;
      }
      at += kTiles * kLine;
    }
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const Floats weight_scales = _mm512_loadu_ps(reinterpret_cast<const float*>(at) + t * kTile);
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* result = results.of[r] + t * kTile;
        const Floats scale = _mm512_mul_ps(_mm512_set1_ps(block.scales[r]), weight_scales);
        const Floats sum = _mm512_cvtepi32_ps(sums[r][t]);
        _mm512_store_ps(result, _mm512_fmadd_ps(sum, scale, _mm512_load_ps(result)));
      }
    }
  }
};

}  // namespace

const MatMulKernels matmul_avx512_vnni = kernels_of<Avx512Vnni>();

}  // namespace edgespec
