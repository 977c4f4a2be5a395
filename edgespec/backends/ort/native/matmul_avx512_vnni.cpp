// The product by AVX-512 VNNI: 64 products of bytes an instruction, summed by fours in 32 bits.

#include <immintrin.h>

#include "matmul.h"

namespace edgespec {
namespace {

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

void quantize(const MatMulShape& shape, RowRounding rounding, const float* x, int8_t* values,
              float* scales, int32_t* corrections) {
  float reach = rounding.kind == Rounding::kRow ? reach_of(x, shape.in) : 0.0f;
  for (int64_t b = 0; b < shape.blocks(); ++b) {
    const int64_t begin = b * shape.block;
    const int64_t count = shape.in - begin < shape.block ? shape.in - begin : shape.block;
    float scale = rounding.scale;
    if (rounding.kind != Rounding::kStatic) {
      if (rounding.kind == Rounding::kBlock) reach = reach_of(x + begin, count);
      scale = reach < kSmallestReach ? 0.0f : reach / kLargest;
    }
    const bool zero = scale == 0.0f;
    const Floats divisor = _mm512_set1_ps(zero ? 1.0f : scale);
    Ints sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < shape.block; i += 16) {
      const __mmask16 there = zero ? __mmask16{0} : lanes(count - i);
      const Floats units = _mm512_div_ps(_mm512_maskz_loadu_ps(there, x + begin + i), divisor);
      // Of a NaN min gives its second operand, and the conversion the lowest number
      const Ints whole = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_set1_ps(kLargest), units));
      const Ints kept = _mm512_max_epi32(whole, _mm512_set1_epi32(-128));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + begin + i), _mm512_cvtepi32_epi8(kept));
      sum = _mm512_add_epi32(sum, kept);
    }
    scales[b] = scale;
    corrections[b] = -shape.middle() * _mm512_reduce_add_epi32(sum);
  }
}

// ---- the product

// The values of a line: of 8 bits as they are; of 4 bits the low halves, then the high ones.
template <int kBits>
struct Line {
  static constexpr int kInputs = kBits == 4 ? 8 : 4;
  Ints low, high;

  explicit Line(const uint8_t* at) {
    const Ints both = load(at);
    if constexpr (kBits == 4) {
      const Ints half = _mm512_set1_epi8(0xf);
      low = _mm512_and_si512(both, half);
      high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    } else {
      low = both;
    }
  }
};

Ints four(const int8_t* x) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x)); }

struct Work {
  const MatMulShape& shape;
  const uint8_t* weight;
  const QuantizedRows& rows;
  float* y;
  int64_t stride;
};

// kRows rows by kTiles tiles: each line of the weight is read and unpacked once for all the rows.
template <int kBits, int kRows, int kTiles>
void multiply_some(const Work& work, int64_t tile, int64_t row) {
  const MatMulShape& shape = work.shape;
  const int64_t blocks = shape.blocks(), padded = shape.padded_in();
  const int64_t tile_bytes = shape.tile_bytes();
  const int64_t lines = shape.values_bytes() / kLine;
  const uint8_t* weight = work.weight + tile * tile_bytes;
  const int8_t* x = work.rows.values + row * padded;
  const float* row_scales = work.rows.scales + row * blocks;
  const int32_t* corrections = work.rows.corrections + row * blocks;
  Floats result[kRows][kTiles];
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTiles; ++t) result[r][t] = _mm512_setzero_ps();
  }
  for (int64_t b = 0; b < blocks; ++b) {
    Ints sums[kRows][kTiles];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) {
        sums[r][t] = _mm512_set1_epi32(corrections[r * blocks + b]);
      }
    }
    for (int64_t line = 0; line < lines; ++line) {
      for (int t = 0; t < kTiles; ++t) {
        const Line<kBits> values(weight + t * tile_bytes + line * kLine);
        for (int r = 0; r < kRows; ++r) {
          const int8_t* some = x + r * padded + line * Line<kBits>::kInputs;
          sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], values.low, four(some));
          if constexpr (kBits == 4) {
            sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], values.high, four(some + 4));
          }
        }
      }
    }
    for (int t = 0; t < kTiles; ++t) {
      const Floats scales = _mm512_loadu_ps(
          reinterpret_cast<const float*>(weight + t * tile_bytes + lines * kLine));
      for (int r = 0; r < kRows; ++r) {
        const Floats scale = _mm512_mul_ps(_mm512_set1_ps(row_scales[r * blocks + b]), scales);
        result[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][t]), scale, result[r][t]);
      }
    }
    weight += shape.block_bytes();
    x += shape.block;
  }
  for (int t = 0; t < kTiles; ++t) {
    const int64_t column = (tile + t) * kTile;
    for (int r = 0; r < kRows; ++r) {
      _mm512_mask_storeu_ps(work.y + (row + r) * work.stride + column, lanes(shape.out - column),
                            result[r][t]);
    }
  }
}

using Some = void (*)(const Work&, int64_t tile, int64_t row);

constexpr int kMostRows = 8;

// A function for each number of rows up to kMostRows, by kTiles tiles.
template <int kBits, int kTiles>
constexpr Some kByRows[kMostRows] = {
    multiply_some<kBits, 1, kTiles>, multiply_some<kBits, 2, kTiles>,
    multiply_some<kBits, 3, kTiles>, multiply_some<kBits, 4, kTiles>,
    multiply_some<kBits, 5, kTiles>, multiply_some<kBits, 6, kTiles>,
    multiply_some<kBits, 7, kTiles>, multiply_some<kBits, 8, kTiles>,
};

template <int kBits, int kTiles>
void all_rows(const Work& work, int64_t tile, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; row += kMostRows) {
    const int64_t left = num_rows - row;
    kByRows<kBits, kTiles>[(left < kMostRows ? left : kMostRows) - 1](work, tile, row);
  }
}

template <int kBits>
void multiply_bits(const Work& work, int64_t first, int64_t last, int64_t num_rows) {
  int64_t tile = first;
  for (; tile + 2 <= last; tile += 2) all_rows<kBits, 2>(work, tile, num_rows);
  for (; tile < last; ++tile) all_rows<kBits, 1>(work, tile, num_rows);
}

void multiply(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
              const QuantizedRows& rows, int64_t num_rows, float* y, int64_t stride) {
  const Work work{shape, weight, rows, y, stride};
  if (shape.bits == 4) {
    multiply_bits<4>(work, first, last, num_rows);
  } else {
    multiply_bits<8>(work, first, last, num_rows);
  }
}

}  // namespace

const MatMulKernels matmul_avx512_vnni = {quantize, multiply};

}  // namespace edgespec
