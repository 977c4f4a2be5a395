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

// The unsigned values of 4 inputs of a step of a tile.
template <Values kValues, int kQuad>
EDGESPEC_INLINE Ints values_of(const uint8_t* step, const Codes& codes) {
  if constexpr (kValues == Values::k8) return load(step + kQuad * kLinesBytes);
  const Ints both = load(step + kQuad / 2 * kLinesBytes);
  const Ints half = kQuad % 2 == 0 ? both : _mm512_srli_epi16(both, 4);
  const Ints low = _mm512_and_si512(half, _mm512_set1_epi8(0xf));
  if constexpr (kValues == Values::kCodes) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.all));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), low);
  }
  if constexpr (kValues == Values::k6) {
    const Ints upper = load(step + 2 * kLinesBytes);
    const Ints placed = kQuad < 2 ? _mm512_slli_epi16(upper, 4 - 2 * kQuad)
                                  : _mm512_srli_epi16(upper, 2 * kQuad - 4);
    constexpr int kAndOr = 0xea;  // placed & mask | low
    return _mm512_ternarylogic_epi32(placed, _mm512_set1_epi8(0x30), low, kAndOr);
  }
  return low;
}

// sums += products of unsigned by signed bytes, by fours. As an intrinsic GCC 12 copies the sums
// around it.
void add_products(Ints& sums, Ints unsigned_bytes, Ints signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// sums += values of 4 inputs of a panel * the rows' values for them.
template <Values kValues, int kQuad, int kRows>
EDGESPEC_INLINE void add_quad(Ints (&sums)[kRows][kTiles], const uint8_t* step, const Codes& codes,
              const int8_t* x) {
  Ints values[kTiles];
  EDGESPEC_UNROLL
  for (int t = 0; t < kTiles; ++t) values[t] = values_of<kValues, kQuad>(step + t * kLine, codes);
  EDGESPEC_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Ints some = _mm512_set1_epi32(four(x + 4 * kQuad + r * kSpan));
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) add_products(sums[r][t], values[t], some);
  }
}

// How many quads of inputs are a round of the loop over a block, and lines of a tile.
template <Values kValues>
constexpr int kQuadsOfRound = kValues == Values::k8 ? 1 : kValues == Values::k6 ? 4 : 2;
template <Values kValues>
constexpr int kLinesOfRound = kLines<kValues> * kQuadsOfRound<kValues> / kQuadsOfStep;

// sums += the products of a block.
template <Values kValues, bool kNear, int kRows>
EDGESPEC_INLINE void add_lines(Ints (&sums)[kRows][kTiles], const Block& block) {
  const uint8_t *at = block.values, *ahead = block.ahead - (kNear ? kAhead / 2 : 0);
  const int8_t* x = block.x;
  constexpr int kQuads = kQuadsOfRound<kValues>;
  for (int64_t quad = 0; quad < block.steps * kQuadsOfStep; quad += kQuads) {
    EDGESPEC_UNROLL
    for (int line = 0; line < kLinesOfRound<kValues>; ++line) fetch_ahead<kNear>(block, ahead);
    add_quad<kValues, 0>(sums, at, *block.codes, x);
    if constexpr (kQuads > 1) {
      keep_order();
      add_quad<kValues, 1>(sums, at, *block.codes, x);
    }
    if constexpr (kQuads > 2) {
      keep_order();
      add_quad<kValues, 2>(sums, at, *block.codes, x);
      keep_order();
      add_quad<kValues, 3>(sums, at, *block.codes, x);
    }
    at += kLinesOfRound<kValues> * kLinesBytes;
    x += 4 * kQuads;
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

  static void widen(const uint8_t* halves, float factor, float* floats) {
    for (int64_t o = 0; o < kPanel; o += kTile) {
      const auto* at = reinterpret_cast<const __m256i*>(halves + 2 * o);
      const __m512 some = _mm512_cvtph_ps(_mm256_loadu_si256(at));
      _mm512_store_ps(floats + o, _mm512_mul_ps(some, _mm512_set1_ps(factor)));
    }
  }

  template <bool kSigned>
  static void multiply_bytes(const uint8_t* bytes, const float* factors, float* floats) {
    for (int64_t o = 0; o < kPanel; o += kTile) {
      const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + o));
      const __m512i wide = kSigned ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some);
      const __m512 made = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_load_ps(factors + o));
      _mm512_store_ps(floats + o, made);
    }
  }

  // Each line of the weight is read and unpacked once for all the rows.
  template <Values kValues, bool kMinimums, int kRows>
  static void add_block(const Block& block, Results<Avx512Vnni>& results) {
    Ints sums[kRows][kTiles];
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Ints correction = _mm512_set1_epi32(kMinimums ? 0 : block.corrections[r]);
      EDGESPEC_UNROLL
      for (int t = 0; t < kTiles; ++t) sums[r][t] = correction;
    }
    if (!kMinimums && (kRows == 1 || kValues == Values::k8) && block.near) {
      add_lines<kValues, true>(sums, block);
    } else {
      add_lines<kValues, false>(sums, block);
    }
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const Floats weight_scales = _mm512_loadu_ps(block.weight_scales + t * kTile);
      const Floats minimums = _mm512_load_ps(block.minimums + t * kTile);
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* at_result = results.of[r] + t * kTile;
        const Floats scale = _mm512_mul_ps(_mm512_set1_ps(block.scales[r]), weight_scales);
        const Floats sum = _mm512_cvtepi32_ps(sums[r][t]);
        Floats result = _mm512_fmadd_ps(sum, scale, _mm512_load_ps(at_result));
        if (kMinimums) result = _mm512_fmadd_ps(_mm512_set1_ps(block.sums[r]), minimums, result);
        _mm512_store_ps(at_result, result);
      }
    }
  }
};

template <>
constexpr int64_t kShortAhead<Avx512Vnni> = 4096;  // 0.82 of the time; with AVX2 1.34

}  // namespace

const MatMulKernels matmul_avx512_vnni = kernels_of<Avx512Vnni>();

}  // namespace edgespec
