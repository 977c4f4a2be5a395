// The product in plain C++: what every other level has to reproduce bit by bit.

#include <cmath>
#include <cstring>

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
      group.scales[b * group.count + r] = scale.scale;
      group.corrections[b * group.count + r] = -shape.middle() * sum;
    }
  }
}

// The unsigned value of an input and an output of a block of a panel.
int32_t value_at(const MatMulShape& shape, const uint8_t* block, int64_t input, int64_t output) {
  const int64_t inputs = shape.bits == 4 ? 8 : 4;  // of a line
  const int64_t line = input / inputs * kTiles + output / kTile;
  const uint8_t byte = block[line * kLine + output % kTile * 4 + input % 4];
  if (shape.bits == 8) return byte;
  return input % 8 < 4 ? byte & 0xf : byte >> 4;
}

// The outputs of one row in one panel.
void multiply_row(const MatMulShape& shape, const uint8_t* panel, const RowGroup& group, int64_t r,
                  float* results) {
  for (int64_t b = 0; b < shape.blocks(); ++b) {
    const uint8_t* block = panel + b * shape.block_bytes();
    float weight_scales[kPanel];
    std::memcpy(weight_scales, block + shape.values_bytes(), sizeof weight_scales);
    for (int64_t o = 0; o < kPanel; ++o) {
      int32_t sum = group.corrections[b * group.count + r];
      for (int64_t i = 0; i < shape.block; ++i) {
        sum += value_at(shape, block, i, o) * *group.at(r, b * shape.block + i);
      }
      const float scale = group.scales[b * group.count + r] * weight_scales[o];
      results[o] = std::fma(static_cast<float>(sum), scale, results[o]);
    }
  }
}

void multiply(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
              const RoundedRows& rows, float* y) {
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t g = 0; g < rows.num_groups; ++g) {
      const RowGroup group = rows.group(g);
      for (int64_t r = 0; r < group.count; ++r) {
        float results[kPanel] = {};
        multiply_row(shape, weight + panel * shape.panel_bytes(), group, r, results);
        for (int64_t o = 0; o < kPanel && panel * kPanel + o < shape.out; ++o) {
          y[(group.first + r) * shape.out + panel * kPanel + o] = results[o];
        }
      }
    }
  }
}

}  // namespace

const MatMulKernels matmul_portable = {8, quantize, multiply};

}  // namespace edgespec
