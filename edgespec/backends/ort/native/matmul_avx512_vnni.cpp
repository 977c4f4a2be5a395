// The product by AVX-512 VNNI: 64 products of bytes an instruction, summed by fours in 32 bits.

#include <immintrin.h>

#include "matmul.h"

// Loops over registers: left as loops, they would keep them in memory.
#define EDGESPEC_UNROLL _Pragma("GCC unroll 16")

namespace edgespec {
namespace {

constexpr int64_t kAhead = 4096;  // bytes of the weight that are on their way, at least

using Ints = __m512i;
using Floats = __m512;

Ints load(const void* at) { return _mm512_loadu_si512(at); }

Ints magnitudes(Floats x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

__mmask16 lanes(int64_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff)
                     : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1u);
}

float reach_of(const float* x, int64_t count) {
  Ints largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const Floats some = _mm512_maskz_loadu_ps(lanes(count - i), x + i);
    largest = _mm512_max_epu32(largest, magnitudes(some));
  }
  return _mm_cvtss_f32(_mm_castsi128_ps(
      _mm_cvtsi32_si128(static_cast<int>(_mm512_reduce_max_epu32(largest)))));
}

// Rounds a block of a row to `values`; returns their sum.
int32_t round_block(const float* x, int64_t count, int64_t block, const Scale& scale,
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

void quantize(const MatMulShape& shape, RowRounding rounding, const float* x,
              const RowGroup& group) {
  for (int64_t r = 0; r < group.count; ++r) {
    const float* row = x + (group.first + r) * shape.in;
    float reach = rounding.kind == Rounding::kRow ? reach_of(row, shape.in) : 0.0f;
    for (int64_t b = 0; b < shape.blocks(); ++b) {
      const int64_t begin = b * shape.block;
      const int64_t count = shape.in - begin < shape.block ? shape.in - begin : shape.block;
      if (rounding.kind == Rounding::kBlock) reach = reach_of(row + begin, count);
      const Scale scale = scale_of(rounding, reach);
      const int32_t sum = round_block(row + begin, count, shape.block, scale, group.at(r, begin));
      group.scales[b * group.count + r] = scale.scale;
      group.corrections[b * group.count + r] = -shape.middle() * sum;
    }
  }
}

// ---- the product

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

// Keeps what is read below from being read above, where it would take registers of the sums.
void keep_order() { __asm__ volatile("" ::: "memory"); }

Ints four(const int8_t* x) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x)); }

constexpr int kMostRows = 6;     // whose sums in all tiles of a panel fit the registers
constexpr int kMostGroups = 10;  // whose results stay in the first cache

// A block of a panel, and a group of rows that is multiplied by it.
struct Block {
  const uint8_t* values;  // then the scales
  int64_t lines;          // per tile
  const int8_t* x;
  const float* scales;
  const int32_t* corrections;
  const uint8_t* ahead;  // what is fetched meanwhile: so much a line
  int64_t ahead_step;
};

// What a group of rows adds up to in a panel: [rows, outputs of a panel].
struct alignas(64) Results {
  float of[kMostRows][kPanel];
};

void fetch(const uint8_t* at) { _mm_prefetch(at, _MM_HINT_T0); }

// sums += values of four lines * the rows' values for them.
template <int kRows>
void add_lines(Ints (&sums)[kRows][kTiles], const Ints (&values)[kTiles], const int8_t* x) {
  EDGESPEC_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Ints some = four(x + r * kSpan);
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) add_products(sums[r][t], values[t], some);
  }
}

// Adds the product of kRows rows by a block to their results; each line of the weight is read and
// unpacked once for all the rows.
template <int kBits, int kRows>
void add_block(const Block& block, Results& results) {
  Ints sums[kRows][kTiles];
  EDGESPEC_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Ints correction = _mm512_set1_epi32(block.corrections[r]);
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) sums[r][t] = correction;
  }
  const uint8_t* at = block.values;
  const uint8_t* ahead = block.ahead;
  const int8_t* x = block.x;
  for (int64_t line = 0; line < block.lines; ++line) {
    fetch(ahead);
    fetch(ahead + kLine);
    if (block.ahead_step > 2 * kLine) {
      fetch(ahead + 2 * kLine);
      fetch(ahead + 3 * kLine);
      fetch(ahead + 4 * kLine);
    }
    ahead += block.ahead_step;
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

using AddRows = void (*)(const Block&, Results&);

// A function for each number of rows up to kMostRows.
template <int kBits>
constexpr AddRows kByRows[kMostRows + 1] = {
    nullptr,           add_block<kBits, 1>, add_block<kBits, 2>, add_block<kBits, 3>,
    add_block<kBits, 4>, add_block<kBits, 5>, add_block<kBits, 6>,
};

// Writes what groups [first, last) of the rows are in a panel. The weight's blocks are read in the
// order in which they stand, each of them for all groups.
template <int kBits>
void multiply_groups(const MatMulShape& shape, const uint8_t* panel, const RoundedRows& rows,
                     int64_t first, int64_t last, int64_t column, float* y) {
  Results results[kMostGroups];
  for (int64_t g = first; g < last; ++g) {
    for (int64_t r = 0; r < rows.group(g).count; ++r) {
      for (int t = 0; t < kTiles; ++t) {
        _mm512_store_ps(results[g - first].of[r] + t * kTile, _mm512_setzero_ps());
      }
    }
  }
  const int64_t bytes = shape.block_bytes(), lines = shape.values_bytes() / (kTiles * kLine);
  const int64_t share = bytes / (last - first);  // that each group fetches of what comes
  const int64_t ahead = bytes > kAhead ? bytes : kAhead;
  for (int64_t b = 0; b < shape.blocks(); ++b) {
    for (int64_t g = first; g < last; ++g) {
      const RowGroup group = rows.group(g);
      const Block block{panel + b * bytes, lines, group.at(0, b * shape.block),
                        group.scales + b * group.count, group.corrections + b * group.count,
                        panel + b * bytes + ahead + (g - first) * share, share / lines};
      kByRows<kBits>[group.count](block, results[g - first]);
    }
  }
  for (int64_t g = first; g < last; ++g) {
    const RowGroup group = rows.group(g);
    for (int64_t r = 0; r < group.count; ++r) {
      for (int t = 0; t < kTiles; ++t) {
        _mm512_mask_storeu_ps(y + (group.first + r) * shape.out + column + t * kTile,
                              lanes(shape.out - column - t * kTile),
                              _mm512_load_ps(results[g - first].of[r] + t * kTile));
      }
    }
  }
}

void multiply(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
              const RoundedRows& rows, float* y) {
  const auto some_groups = shape.bits == 4 ? multiply_groups<4> : multiply_groups<8>;
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* base = weight + panel * shape.panel_bytes();
    for (int64_t g = 0; g < rows.num_groups; g += kMostGroups) {
      const int64_t end = rows.num_groups < g + kMostGroups ? rows.num_groups : g + kMostGroups;
      some_groups(shape, base, rows, g, end, panel * kPanel, y);
    }
  }
}

}  // namespace

const MatMulKernels matmul_avx512_vnni = {kMostRows, quantize, multiply};

}  // namespace edgespec
