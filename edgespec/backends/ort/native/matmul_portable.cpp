// The product in plain C++: what every other level has to reproduce bit by bit.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "matmul.h"

namespace edgespec {
namespace {

uint32_t magnitude(float value) {
  uint32_t pattern;
  std::memcpy(&pattern, &value, sizeof pattern);
  return pattern & 0x7fffffffu;  // NaN is above infinity, and infinity above all numbers
}

// The largest magnitude of x; NaN where x has one.
float reach_of(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t one = magnitude(x[i]);
    if (one > largest) largest = one;
  }
  float reach;
  std::memcpy(&reach, &largest, sizeof reach);
  return reach;
}

int8_t rounded(float units) {
  float value = std::nearbyintf(units);  // to even where two are as near
  if (!(value >= -128.0f)) value = -128.0f;  // NaN too
  if (value > 127.0f) value = 127.0f;
  return static_cast<int8_t>(value);
}

void quantize(const MatMulShape& shape, RowRounding rounding, const float* x,
              const RowGroup& group) {
  for (int64_t r = 0; r < group.count; ++r) {
    const float* row = x + (group.first + r) * shape.in;
    float reach = rounding.kind == Rounding::kRow ? reach_of(row, shape.in) : 0.0f;
    for (int64_t b = 0; b < shape.blocks(); ++b) {
      const int64_t begin = b * shape.block;
      const int64_t count = shape.in - begin < shape.block ? shape.in - begin : shape.block;
      if (rounding.kind != Rounding::kRow) reach = reach_of(row + begin, count);
      const Scale scale = scale_of(rounding, reach);
      int32_t sum = 0;
      for (int64_t i = 0; i < shape.block; ++i) {
        const int8_t value = i < count ? rounded(scale.units(row[begin + i])) : int8_t{0};
        *group.at(r, begin + i) = value;
        sum += value;
      }
      group.put(shape, b, r, scale.scale, sum);
    }
  }
}

// The unsigned value of an input and an output of a block of a panel.
int32_t value_at(const MatMulShape& shape, const uint8_t* block, int64_t input, int64_t output) {
  const int64_t lines = kStep * shape.bits / 32, quad = input % kStep / 4;  // of a step
  const uint8_t* step = block + input / kStep * lines * kTiles * kLine;
  const int64_t within = output / kTile * kLine + output % kTile * 4 + input % 4;
  if (shape.bits == 8) return step[quad * kTiles * kLine + within];
  const uint8_t both = step[quad / 2 * kTiles * kLine + within];
  const int32_t low = quad % 2 == 0 ? both & 0xf : both >> 4;
  if (shape.codebook != Codebook::kNone) {
    return kCodebooks[static_cast<int>(shape.codebook)][low] + kCodesMiddle;
  }
  if (shape.bits == 4) return low;
  return low | (step[2 * kTiles * kLine + within] >> 2 * quad & 3) << 4;
}

float half_at(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return float_of_half(half);
}

// The scales of a block's outputs, or with `part` 1 their minimums.
void scales_of(const MatMulShape& shape, const uint8_t* panel, int64_t b, int part, float* scales) {
  const int64_t shared = b / shape.super_block, first = shared * shape.super_block;
  const uint8_t* factors = panel + first * shape.block_bytes() + shared * shape.factor_bytes();
  const uint8_t* at = panel + b * shape.block_bytes() + (shared + 1) * shape.factor_bytes() +
                      shape.values_bytes() + part * kPanel * shape.scale_bytes();
  for (int64_t o = 0; o < kPanel; ++o) {
    if (shape.scales == Scales::kFloat32) {
      std::memcpy(&scales[o], at + 4 * o, sizeof(float));
      scales[o] *= shape.global;
    } else if (!shape.has_factors()) {
      scales[o] = half_at(at + 2 * o) * shape.global;
    } else {
      const bool is_signed = shape.scales == Scales::kSuper;
      const int byte = is_signed ? static_cast<int8_t>(at[o]) : at[o];
      const float factor = half_at(factors + part * 2 * kPanel + 2 * o) * shape.global;
      scales[o] = static_cast<float>(byte) * factor;
    }
  }
}

// A block of a panel.
struct OpenBlock {
  int16_t values[kPanel][kSpan];
  float scales[kPanel];
  float minimums[kPanel] = {};

  OpenBlock(const MatMulShape& shape, const uint8_t* panel, int64_t b) {
    const uint8_t* block =
        panel + b * shape.block_bytes() + (b / shape.super_block + 1) * shape.factor_bytes();
    for (int64_t o = 0; o < kPanel; ++o) {
      for (int64_t i = 0; i < shape.block; ++i) {
        values[o][i] = static_cast<int16_t>(value_at(shape, block, i, o));
      }
    }
    scales_of(shape, panel, b, 0, scales);
    if (shape.has_minimums()) scales_of(shape, panel, b, 1, minimums);
  }
};

// Adds what a block of inputs gives to the first `count` results of a row.
void add_block(const MatMulShape& shape, const OpenBlock& block, const RowGroup& group, int64_t b,
               int64_t r, int64_t count, float* results) {
  const int64_t at = b * group.count + r;
  const int8_t* x = group.at(r, b * shape.block);
  for (int64_t o = 0; o < count; ++o) {
    int32_t sum = shape.has_minimums() ? 0 : group.corrections[at];
    for (int64_t i = 0; i < shape.block; ++i) sum += block.values[o][i] * x[i];
    const float scale = group.scales[at] * block.scales[o];
    results[o] = std::fma(static_cast<float>(sum), scale, results[o]);
    if (shape.has_minimums()) results[o] = std::fma(group.sums[at], -block.minimums[o], results[o]);
  }
}

void multiply(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
              const RoundedRows& rows, float* y) {
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t column = panel * kPanel;
    const int64_t count = shape.out - column < kPanel ? shape.out - column : kPanel;
    for (int64_t b = 0; b < shape.blocks(); ++b) {
      const OpenBlock block(shape, weight + panel * shape.panel_bytes(), b);
      for (int64_t g = 0; g < rows.num_groups; ++g) {
        const RowGroup group = rows.group(g);
        for (int64_t r = 0; r < group.count; ++r) {
          float* results = y + (group.first + r) * shape.out + column;
          if (b == 0) std::fill_n(results, count, 0.0f);
          add_block(shape, block, group, b, r, count, results);
        }
      }
    }
  }
}

}  // namespace

const MatMulKernels matmul_portable = {8, quantize, multiply};

}  // namespace edgespec
