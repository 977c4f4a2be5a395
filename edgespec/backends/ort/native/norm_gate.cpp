// edgespec::RmsNorm and edgespec::Gate: norms and gates that no product reads alone; and the proof
// of a level of instructions.

#include "norm_gate.h"

#include <cstring>
#include <vector>

#include "norm_gate_rows.h"
#include "numbers.h"
#include "operator.h"

namespace edgespec {
namespace {

constexpr int64_t kPieceElements = 16 * 1024;  // that a thread makes at a time, at least

// Writes all rows of a call.
template <typename Call>
void write_rows(const Context& context, const Call& call, float* y) {
  const int64_t rows = call.count(), elements = rows * call.n;
  const int64_t pieces = elements / kPieceElements < rows ? elements / kPieceElements + 1 : rows;
  context.parallel_for(static_cast<size_t>(pieces), [&](size_t i) {
    const int64_t piece = static_cast<int64_t>(i), first = rows * piece / pieces;
    call.make(first, rows * (piece + 1) / pieces - first, y + first * call.n);
  });
}

class RmsNorm {
 public:
  static constexpr const char* name = "RmsNorm";

  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = NormRows::inputs();
    return ports;
  }
  // y as x, and the sum.
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}, {kFloat, kOptional}};
    return ports;
  }

  explicit RmsNorm(const Info& info) : rows_(info) {}

  void compute(const Context& context) const {
    const NormRows::Call call = rows_.open(context, 1);
    const auto y = context.output<float>(0, call.dims);
    if (y) write_rows(context, call, y.data);
  }

 private:
  NormRows rows_;
};

class Gate {
 public:
  static constexpr const char* name = "Gate";

  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = GateRows::inputs();
    return ports;
  }
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}};
    return ports;
  }

  explicit Gate(const Info& info) : rows_(info) {}

  void compute(const Context& context) const {
    const GateRows::Call call = rows_.open(context, 1);
    const auto y = context.output<float>(0, call.dims);
    if (y) write_rows(context, call, y.data);
  }

 private:
  GateRows rows_;
};

// What all functions make of some numbers.
std::vector<float> results_of(const RowKernels& kernels, int64_t n) {
  ProofNumbers numbers;
  const auto count = static_cast<size_t>(n);
  std::vector<float> a(count), b(count), out(count), all;
  for (size_t i = 0; i < count; ++i) {
    a[i] = i % 5 == 4 ? 40 * numbers.real() : numbers.real();
    b[i] = numbers.real();
  }
  const auto keep = [&] { all.insert(all.end(), out.begin(), out.end()); };
  kernels.add(a.data(), b.data(), n, out.data());
  keep();
  kernels.norm(a.data(), b.data(), 1e-6f, n, out.data());
  keep();
  for (Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kSigmoid}) {
    kernels.gate(activation, a.data(), b.data(), n, out.data());
    keep();
  }
  return all;
}

}  // namespace

bool proves_itself(const RowKernels& kernels) {
  for (int64_t n : {1, 15, 16, 100, 300}) {
    const auto found = results_of(kernels, n), wanted = results_of(rows_portable, n);
    if (std::memcmp(found.data(), wanted.data(), wanted.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

std::vector<const OrtCustomOp*> norm_gate_operators() {
  static const Operator<RmsNorm> rms_norm;
  static const Operator<Gate> gate;
  return {&rms_norm, &gate};
}

}  // namespace edgespec
