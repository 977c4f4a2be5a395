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

int8_t rounded(float x, float scale) {
  float value = std::nearbyintf(x / scale);  // to even where two are as near
  if (!(value >= -128.0f)) value = -128.0f;  // NaN too
  if (value > 127.0f) value = 127.0f;
  return static_cast<int8_t>(value);
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
    int32_t sum = 0;
    for (int64_t i = 0; i < shape.block; ++i) {
      const int8_t value = i < count && scale != 0 ? rounded(x[begin + i], scale) : int8_t{0};
      values[begin + i] = value;
      sum += value;
    }
    scales[b] = scale;
    corrections[b] = -shape.middle() * sum;
  }
}

// The unsigned value of an input and an output of a block.
int32_t value_at(const MatMulShape& shape, const uint8_t* block, int64_t input, int64_t output) {
  if (shape.bits == 8) return block[input / 4 * kLine + output * 4 + input % 4];
  const uint8_t pair = block[input / 8 * kLine + output * 4 + input % 4];
  return input % 8 < 4 ? pair & 0xf : pair >> 4;
}

void multiply(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
              const QuantizedRows& rows, int64_t num_rows, float* y, int64_t stride) {
  const int64_t blocks = shape.blocks();
  for (int64_t tile = first; tile < last; ++tile) {
    const uint8_t* base = weight + tile * shape.tile_bytes();
    for (int64_t row = 0; row < num_rows; ++row) {
      const int8_t* x = rows.values + row * shape.padded_in();
      float result[kTile] = {};
      for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = base + b * shape.block_bytes();
        float weight_scales[kTile];
        std::memcpy(weight_scales, block + shape.values_bytes(), sizeof weight_scales);
        for (int64_t o = 0; o < kTile; ++o) {
          int32_t sum = rows.corrections[row * blocks + b];
          for (int64_t i = 0; i < shape.block; ++i) {
            sum += value_at(shape, block, i, o) * x[b * shape.block + i];
          }
          const float scale = rows.scales[row * blocks + b] * weight_scales[o];
          result[o] = std::fma(static_cast<float>(sum), scale, result[o]);
        }
      }
      for (int64_t o = 0; o < kTile && tile * kTile + o < shape.out; ++o) {
        y[row * stride + tile * kTile + o] = result[o];
      }
    }
  }
}

}  // namespace

const MatMulKernels matmul_portable = {quantize, multiply};

}  // namespace edgespec
