// Rows that an operator makes of its inputs before it uses them: a norm, with a sum in front of it
// where there is one, or a gate. Operators that write them, and products that round them at once,
// have these inputs.
#pragma once

#include <string>
#include <vector>

#include "levels.h"
#include "norm_gate.h"
#include "operator.h"

namespace edgespec {

// RMSNorm of x, or of the sum of a residual and x, or of a residual and the norm of x.
class NormRows {
 public:
  // x [..., n], the weight of the norm before the sum [n], the residual as x, and the weight [n].
  static std::vector<Port> inputs() {
    return {{kFloat}, {kFloat, kOptional}, {kFloat, kOptional}, {kFloat}};
  }

  explicit NormRows(const Info& info) : epsilon_(info.real("epsilon")) {
    if (!(epsilon_ >= 0)) throw GraphError("no kernel for this epsilon");
  }

  // The rows of one call.
  struct Call {
    Dims dims;
    int64_t n = 0;
    float epsilon = 0;
    const float *x = nullptr, *inner = nullptr, *residual = nullptr, *weight = nullptr;
    float* sum = nullptr;  // as x, where there is a residual
    const RowKernels* kernels = nullptr;

    int64_t count() const { return count_of(dims) / n; }
    void make(int64_t first, int64_t count, float* out) const {
      for (int64_t row = first; row < first + count; ++row, out += n) {
        const float* from = x + row * n;
        if (inner != nullptr) {
          kernels->norm(from, inner, epsilon, n, out);
          from = out;
        }
        if (residual != nullptr) {
          float* to = sum + row * n;
          kernels->add(residual + row * n, from, n, to);
          from = to;
        }
        kernels->norm(from, weight, epsilon, n, out);
      }
    }
  };

  // The sum, if there is one, is output `sum_index`.
  Call open(const Context& context, size_t sum_index) const {
    const auto x = context.input<float>(0), inner = context.input<float>(1);
    const auto residual = context.input<float>(2), weight = context.input<float>(3);
    Call call;
    if (x.dims.empty() || x.dims.back() < 1) throw GraphError("it needs rows");
    call.dims = x.dims;
    call.n = x.dims.back();
    for (const auto* one : {&inner, &weight}) {
      if (*one && one->count() != call.n) {
        throw GraphError("a weight has " + std::to_string(one->count()) + " elements for rows of " +
                         std::to_string(call.n));
      }
    }
    if (residual && residual.dims != x.dims) throw GraphError("it needs as many residuals as rows");
    if (inner && !residual) throw GraphError("it needs a residual behind a norm");
    if (residual) {
      call.sum = context.output<float>(sum_index, x.dims).data;
      if (call.sum == nullptr) throw GraphError("it needs room for the sum");
    }
    call.epsilon = epsilon_;
    call.x = x.data;
    call.inner = inner.data;
    call.residual = residual.data;
    call.weight = weight.data;
    call.kernels = level().rows;
    return call;
  }

 private:
  float epsilon_;
};

// activation(gate) * up
class GateRows {
 public:
  // gate [..., n] and up [..., n]; or both side by side, [..., 2 n].
  static std::vector<Port> inputs() { return {{kFloat}, {kFloat, kOptional}}; }

  explicit GateRows(const Info& info) {
    const int64_t number = info.integer("activation");
    if (number < 0 || number >= kNumActivations) throw GraphError("no kernel for this activation");
    activation_ = static_cast<Activation>(number);
  }

  struct Call {
    Dims dims;
    int64_t n = 0;
    int64_t distance = 0;  // of rows
    Activation activation{};
    const float *gate = nullptr, *up = nullptr;
    const RowKernels* kernels = nullptr;

    int64_t count() const { return count_of(dims) / n; }
    void make(int64_t first, int64_t count, float* out) const {
      for (int64_t row = first; row < first + count; ++row, out += n) {
        kernels->gate(activation, gate + row * distance, up + row * distance, n, out);
      }
    }
  };

  Call open(const Context& context, size_t) const {
    const auto gate = context.input<float>(0), up = context.input<float>(1);
    const int64_t width = gate.dims.empty() ? 0 : gate.dims.back();
    if (width < 1 || (!up && width % 2 != 0)) throw GraphError("it needs rows, or halves of rows");
    if (up && up.dims != gate.dims) throw GraphError("it needs as many rows as gates");
    Call call;
    call.dims = gate.dims;
    call.n = up ? width : width / 2;
    call.dims.back() = call.n;
    call.distance = width;
    call.activation = activation_;
    call.gate = gate.data;
    call.up = up ? up.data : gate.data + call.n;
    call.kernels = level().rows;
    return call;
  }

 private:
  Activation activation_{};
};

}  // namespace edgespec
