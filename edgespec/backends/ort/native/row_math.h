// What kernels of rows need: the sigmoid, and sums of a fixed order, in plain loops that compilers
// turn into the vectors of the level that a file is compiled for. Every operation is rounded by
// itself, so the bits stay. Each level's file includes this, and nothing here is shared between them.
#pragma once

#include <cstdint>
#include <cstring>

#include "inlining.h"

namespace edgespec {
namespace {

constexpr int64_t kSums = 16;

EDGESPEC_INLINE int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

EDGESPEC_INLINE float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^-x for x from 0 to 126. The polynomial is off by 2e-9, all with rounding by 8e-8.
EDGESPEC_INLINE float exp2_of_minus(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: its last bit is 1
  const float shifted = magic - x;
  const float f = (magic - shifted) - x;
  float y = 0x1.41fbbcp-13f;
  y = __builtin_fmaf(y, f, 0x1.5f3e52p-10f);
  y = __builtin_fmaf(y, f, 0x1.3b2d4cp-7f);
  y = __builtin_fmaf(y, f, 0x1.c6aee8p-5f);
  y = __builtin_fmaf(y, f, 0x1.ebfbdcp-3f);
  y = __builtin_fmaf(y, f, 0x1.62e430p-1f);
  y = __builtin_fmaf(y, f, 1.0f);
  const uint32_t exponent = static_cast<uint32_t>(bits_of(shifted)) << 23;
  return y * float_of(static_cast<int32_t>(exponent + 0x3f800000u));
}

// Choices are made of bits: compilers leave a loop as it is where numbers are compared.
EDGESPEC_INLINE float sigmoid(float x) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kOne = 0x3f800000;
  constexpr int32_t kFarthest = 0x42fc0000;  // 126
  const float log2_e = 1.44269504088896340736f;
  const int32_t magnitude = bits_of(x) & kMagnitude;
  const int32_t reach = bits_of(float_of(magnitude) * log2_e);
  const float e = exp2_of_minus(float_of(reach < kFarthest ? reach : kFarthest));
  const int32_t below = bits_of(x) >> 31;  // all bits, or none
  const float above = float_of((bits_of(e) & below) | (kOne & ~below));
  const int32_t is_nan = magnitude > kInfinity ? -1 : 0;
  return float_of(bits_of(above / (1.0f + e)) | is_nan);
}

// The sum of products of elements: 16 sums, of the elements mod 16.
EDGESPEC_INLINE float dot_of(const float* x, const float* y, int64_t count) {
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int64_t l = 0; l < kSums; ++l) sums[l] = __builtin_fmaf(x[i + l], y[i + l], sums[l]);
  }
  for (int64_t l = 0; i + l < count; ++l) sums[l] = __builtin_fmaf(x[i + l], y[i + l], sums[l]);
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

}  // namespace
}  // namespace edgespec
