// The product on registers of 256 bits, for the levels that have no wider ones: a line of the weight
// is two registers, and a tile is done after the other. A level brings `Dot`: for how many rows it has
// registers, how many steps it takes at once, and what they add to the sums.
#pragma once

#include <immintrin.h>

#include "matmul_kernel.h"

namespace edgespec {
namespace {

using Ints = __m256i;
using Floats = __m256;

constexpr int kHalves = 2;  // registers of a line

inline Ints load(const void* at) { return _mm256_loadu_si256(static_cast<const Ints*>(at)); }

inline Ints table_of(const uint8_t* codes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// Those bits of bytes that stand from the lowest or from another one on, of which `mask` are kept.
template <int kFirst>
EDGESPEC_INLINE Ints bits_of(Ints bytes, char mask) {
  const Ints moved = kFirst == 0 ? bytes : _mm256_srli_epi16(bytes, kFirst);
  return _mm256_and_si256(moved, _mm256_set1_epi8(mask));
}

// The values of 4 bits of 4 inputs of a step of half a tile.
template <int kQuad>
EDGESPEC_INLINE Ints halves_of(const uint8_t* step) {
  return bits_of<kQuad % 2 * 4>(load(step + kQuad / 2 * kLinesBytes), 0xf);
}

// The upper two bits of values of 6.
template <int kQuad>
EDGESPEC_INLINE Ints upper_of(const uint8_t* step) {
  return bits_of<2 * kQuad>(load(step + 2 * kLinesBytes), 3);
}

// The first `count` floats, and zeros behind them.
inline Floats first_floats(const float* x, int64_t count) {
  if (count >= 8) return _mm256_loadu_ps(x);
  alignas(32) float some[8] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = x[i];
  return _mm256_load_ps(some);
}

inline int32_t sum_of(Ints ints) {
  alignas(32) int32_t some[8];
  _mm256_store_si256(reinterpret_cast<Ints*>(some), ints);
  int32_t sum = 0;
  for (int32_t one : some) sum += one;
  return sum;
}

template <typename Dot>
struct Ymm {
  static constexpr int kMostRows = Dot::kMostRows;       // their sums in a tile fit 16 registers
  static constexpr int kMostGroups = 60 / kMostRows;  // their results are 15 KB

  static float reach_of(const float* x, int64_t count) {
    Ints largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 8) {
      const Ints bits = _mm256_castps_si256(first_floats(x + i, count - i));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    alignas(32) uint32_t some[8];
    _mm256_store_si256(reinterpret_cast<Ints*>(some), largest);
    uint32_t found = 0;
    for (uint32_t one : some) found = one > found ? one : found;
    float reach;
    __builtin_memcpy(&reach, &found, sizeof reach);
    return reach;
  }

  static int32_t round_block(const float* x, int64_t count, int64_t block, const Scale& scale,
                             int8_t* values) {
    const Floats divisor = _mm256_set1_ps(scale.scale), factor = _mm256_set1_ps(scale.inverse);
    Ints sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < block; i += 8) {
      const Floats some = first_floats(x + i, count - i);
      const Floats units =
          scale.divides ? _mm256_div_ps(some, divisor) : _mm256_mul_ps(some, factor);
      // Of a NaN min gives its second operand, and the conversion the lowest number
      const Ints whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(kLargest), units));
      const Ints kept = _mm256_max_epi32(whole, _mm256_set1_epi32(-128));
      const __m128i words =
          _mm_packs_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(values + i), _mm_packs_epi16(words, words));
      sum = _mm256_add_epi32(sum, kept);
    }
    return sum_of(sum);
  }

  static void widen(const uint8_t* halves, float factor, float* floats) {
    for (int64_t o = 0; o < kPanel; o += 8) {
      const auto* at = reinterpret_cast<const __m128i*>(halves + 2 * o);
      const Floats some = _mm256_cvtph_ps(_mm_loadu_si128(at));
      _mm256_store_ps(floats + o, _mm256_mul_ps(some, _mm256_set1_ps(factor)));
    }
  }

  template <bool kSigned>
  static void multiply_bytes(const uint8_t* bytes, const float* factors, float* floats) {
    for (int64_t o = 0; o < kPanel; o += 8) {
      const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + o));
      const Ints wide = kSigned ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some);
      const Floats made = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_load_ps(factors + o));
      _mm256_store_ps(floats + o, made);
    }
  }

  template <Values kValues, bool kMinimums, int kRows>
  static void add_block(const Block& block, Results<Ymm>& results) {
    const uint8_t* ahead = block.ahead;
    for (int t = 0; t < kTiles; ++t) add_tile<kValues, kMinimums, kRows>(block, t, ahead, results);
  }

 private:
  // sums += the products of some steps. Fetches what comes in one of the tiles for each line.
  template <Values kValues, int kSteps, int kRows>
  static EDGESPEC_INLINE void add_steps(Ints (&sums)[kRows][kHalves], const Block& block, int tile, int64_t step,
                        const uint8_t*& ahead) {
    constexpr int64_t lines = kLines<kValues>;
    for (int64_t i = 0; i < kSteps * lines; ++i) {
      if ((step * lines + i) % kTiles == tile) fetch_ahead(block, ahead);
    }
    const uint8_t* at = block.values + tile * kLine + step * lines * kLinesBytes;
    Dot::template add<kValues, kSteps>(sums, at, block.x + step * kStep, *block.codes);
  }

  template <Values kValues, bool kMinimums, int kRows>
  static void add_tile(const Block& block, int tile, const uint8_t*& ahead,
                       Results<Ymm>& results) {
    Ints sums[kRows][kHalves];
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Ints correction = _mm256_set1_epi32(kMinimums ? 0 : block.corrections[r]);
      sums[r][0] = correction;
      sums[r][1] = correction;
    }
    constexpr int kSteps = Dot::kSteps;
    if (kSteps > 1 && block.steps == 1) {
      add_steps<kValues, 1>(sums, block, tile, 0, ahead);
    } else {
      for (int64_t step = 0; step < block.steps; step += kSteps) {
        add_steps<kValues, kSteps>(sums, block, tile, step, ahead);
      }
    }
    EDGESPEC_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      const int column = tile * static_cast<int>(kTile) + h * 8;
      const Floats weight_scales = _mm256_loadu_ps(block.weight_scales + column);
      const Floats minimums = _mm256_load_ps(block.minimums + column);
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* at_result = results.of[r] + column;
        const Floats scale = _mm256_mul_ps(_mm256_set1_ps(block.scales[r]), weight_scales);
        const Floats sum = _mm256_cvtepi32_ps(sums[r][h]);
        Floats result = _mm256_fmadd_ps(sum, scale, _mm256_load_ps(at_result));
        if (kMinimums) result = _mm256_fmadd_ps(_mm256_set1_ps(block.sums[r]), minimums, result);
        _mm256_store_ps(at_result, result);
      }
    }
  }
};

}  // namespace
}  // namespace edgespec
