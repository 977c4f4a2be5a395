// The product on registers of 256 bits, for the levels that have no wider ones: a line of the weight
// is two registers, and a tile is done after the other. A level brings `Dot`: for how many rows it has
// registers, how many lines it takes at once, and what they add to the sums.
#pragma once

#include <immintrin.h>

#include "matmul_kernel.h"

namespace edgespec {
namespace {

using Ints = __m256i;
using Floats = __m256;

constexpr int kHalves = 2;  // registers of a line

template <int kBits>
constexpr int kInputs = 32 / kBits;  // of a line

inline Ints load(const void* at) { return _mm256_loadu_si256(static_cast<const Ints*>(at)); }

template <int kBits>
Ints low_values(const uint8_t* line) {
  if constexpr (kBits == 8) return load(line);
  return _mm256_and_si256(load(line), _mm256_set1_epi8(0xf));
}

inline Ints high_values(const uint8_t* line) {
  return _mm256_and_si256(_mm256_srli_epi16(load(line), 4), _mm256_set1_epi8(0xf));
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

  template <int kBits, int kBlock, int kRows>
  static void add_block(const Block& block, Results<Ymm>& results) {
    const uint8_t* ahead = block.ahead;
    for (int t = 0; t < kTiles; ++t) add_tile<kBits, kBlock, kRows>(block, t, ahead, results);
  }

 private:
  template <int kBits, int kBlock, int kRows>
  static void add_tile(const Block& block, int tile, const uint8_t*& ahead,
                       Results<Ymm>& results) {
    constexpr int64_t lines = kLines<kBits, kBlock>;
    Ints sums[kRows][kHalves];
    EDGESPEC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Ints correction = _mm256_set1_epi32(block.corrections[r]);
      sums[r][0] = correction;
      sums[r][1] = correction;
    }
    const uint8_t* at = block.values + tile * kLine;
    const int8_t* x = block.x;
    constexpr int64_t step = Dot::template lines<kBits>;
    for (int64_t line = 0; line < lines; line += step) {
      for (int64_t i = line; i < line + step; ++i) {
        if (i % kTiles == tile) fetch_ahead(block, ahead);
      }
      Dot::template add<kBits>(sums, at, x);
      at += step * kTiles * kLine;
      x += step * kInputs<kBits>;
    }
    const auto* scales = reinterpret_cast<const float*>(block.values + lines * kTiles * kLine);
    EDGESPEC_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      const int column = tile * static_cast<int>(kTile) + h * 8;
      const Floats weight_scales = _mm256_loadu_ps(scales + column);
      EDGESPEC_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* result = results.of[r] + column;
        const Floats scale = _mm256_mul_ps(_mm256_set1_ps(block.scales[r]), weight_scales);
        const Floats sum = _mm256_cvtepi32_ps(sums[r][h]);
        _mm256_store_ps(result, _mm256_fmadd_ps(sum, scale, _mm256_load_ps(result)));
      }
    }
  }
};

}  // namespace
}  // namespace edgespec
