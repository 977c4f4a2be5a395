// Norms and gates in plain loops over independent elements or sums, which compilers turn into the
// vectors of the level that a file is compiled for: every operation is rounded by itself, so that
// the bits stay. Each level's file includes this, and nothing here is shared between levels.
#pragma once

#include <string.h>

#include "norm_gate.h"

namespace edgespec {
namespace {

constexpr int64_t kSums = 16;

inline int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^-x for x from 0 to 126: attention's polynomial.
inline float exp2_below(float x) {
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
inline float sigmoid(float x) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kOne = 0x3f800000;
  constexpr int32_t kFarthest = 0x42fc0000;  // 126
  const float log2_e = 1.44269504088896340736f;
  const int32_t magnitude = bits_of(x) & kMagnitude;
  const int32_t reach = bits_of(float_of(magnitude) * log2_e);
  const float e = exp2_below(float_of(reach < kFarthest ? reach : kFarthest));
  const int32_t below = bits_of(x) >> 31;  // all bits, or none
  const float above = float_of((bits_of(e) & below) | (kOne & ~below));
  const int32_t is_nan = magnitude > kInfinity ? -1 : 0;
  return float_of(bits_of(above / (1.0f + e)) | is_nan);
}

struct Silu {
  static float of(float x) { return x * sigmoid(x); }
};

// 2 u = 2 sqrt(2 / pi) * (x + 0.044715 x^3)  (arXiv 1606.08415, section 2)
struct GeluTanh {
  static float of(float x) {
    const float inner = __builtin_fmaf(x * x * 0.044715f, x, x);
    return x * sigmoid(inner * 1.59576912160573071176f);
  }
};

struct Sigmoid {
  static float of(float x) { return sigmoid(x); }
};

void add(const float* __restrict__ a, const float* __restrict__ b, int64_t n,
         float* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

inline float sum_of_squares(const float* __restrict__ x, int64_t n) {
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int64_t l = 0; l < kSums; ++l) sums[l] = __builtin_fmaf(x[i + l], x[i + l], sums[l]);
  }
  for (int64_t l = 0; i + l < n; ++l) sums[l] = __builtin_fmaf(x[i + l], x[i + l], sums[l]);
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

void norm(const float* __restrict__ x, const float* __restrict__ weight, float epsilon, int64_t n,
          float* __restrict__ out) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const float scale = 1.0f / __builtin_sqrtf(mean + epsilon);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

template <typename Function>
inline void gated(const float* __restrict__ gate, const float* __restrict__ up, int64_t n,
                  float* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) out[i] = Function::of(gate[i]) * up[i];
}

void gate(Activation activation, const float* __restrict__ by, const float* __restrict__ up,
          int64_t n, float* __restrict__ out) {
  switch (activation) {
    case Activation::kSilu:
      return gated<Silu>(by, up, n, out);
    case Activation::kGeluTanh:
      return gated<GeluTanh>(by, up, n, out);
    case Activation::kSigmoid:
      return gated<Sigmoid>(by, up, n, out);
  }
}

}  // namespace
}  // namespace edgespec
