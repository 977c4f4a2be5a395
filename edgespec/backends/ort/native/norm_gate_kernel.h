// Norms and gates in plain loops over independent elements or sums (`row_math.h`). Each level's file
// includes this, and nothing here is shared between levels.
#pragma once

#include "norm_gate.h"
#include "row_math.h"

namespace edgespec {
namespace {

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

void norm(const float* __restrict__ x, const float* __restrict__ weight, float epsilon, int64_t n,
          float* __restrict__ out) {
  const float mean = dot_of(x, x, n) / static_cast<float>(n);
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
