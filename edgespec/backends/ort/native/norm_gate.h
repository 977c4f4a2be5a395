// What stands before a product in a layer, row by row: RMSNorm (arXiv 1910.07467) and the gate of a
// gated MLP (arXiv 2002.05202).
//
// The bits of a row depend on that row alone, and are the same on every level of instructions:
//   norm  16 sums of squares over the element mod 16, by ascending element, with fused
//         multiply-add; of these l + (l+8), then + (l+4), + (l+2), + (l+1);
//         scale = 1 / sqrt(sum / n + epsilon); y = x * scale * weight, from left to right;
//   gate  sigmoid(x) of e = 2^(-|x| * log2(e)) by one polynomial: 1 / (1 + e), or e / (1 + e) below
//         zero. GELU by tanh is x * sigmoid(2 u), u being what tanh is taken of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

// By the number that the attribute `activation` has.
enum class Activation { kSilu, kGeluTanh, kSigmoid };
constexpr int64_t kNumActivations = 3;

// Rows of n elements. No output stands where an input does.
struct RowKernels {
  // out = a + b
  void (*add)(const float* a, const float* b, int64_t n, float* out);
  // out = x / rms(x) * weight
  void (*norm)(const float* x, const float* weight, float epsilon, int64_t n, float* out);
  // out = activation(gate) * up
  void (*gate)(Activation activation, const float* gate, const float* up, int64_t n, float* out);
};

extern const RowKernels rows_portable;
extern const RowKernels rows_avx2;
extern const RowKernels rows_avx512;

// Whether kernels give the same bits as the portable ones on a small problem.
bool proves_itself(const RowKernels& kernels);

}  // namespace edgespec
