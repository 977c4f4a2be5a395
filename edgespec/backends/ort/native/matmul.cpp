// edgespec::LowBitMatMul: the operator, and the proof of a level of instructions.

#include "matmul.h"

#include <cstring>
#include <string>
#include <vector>

#include "levels.h"
#include "operator.h"

namespace edgespec {
namespace {

// Weights of a piece of work: enough that starting it costs nothing beside it.
constexpr int64_t kPieceBytes = 64 * 1024;
constexpr size_t kMaxPieces = 256;

// Memory for the rounded rows of a call, kept from call to call of a thread.
RoundedRows room_for(const MatMulShape& shape, const MatMulKernels& kernels, int64_t num_rows) {
  thread_local std::vector<uint8_t> memory;
  const auto values = static_cast<size_t>(num_rows * shape.spans() * kSpan);
  const auto scales = static_cast<size_t>(num_rows * shape.blocks()) * sizeof(float);
  const size_t needed = values + 2 * scales + kLine;
  if (memory.size() < needed) memory.resize(needed);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  uint8_t* base = memory.data() + (kLine - address % kLine) % kLine;
  RoundedRows rows;
  rows.num_rows = num_rows;
  rows.num_groups = (num_rows + kernels.most_rows - 1) / kernels.most_rows;
  rows.spans = shape.spans();
  rows.blocks = shape.blocks();
  rows.values = reinterpret_cast<int8_t*>(base);
  rows.scales = reinterpret_cast<float*>(base + values);
  rows.corrections = reinterpret_cast<int32_t*>(base + values + scales);
  return rows;
}

class LowBitMatMul {
 public:
  static constexpr const char* name = "LowBitMatMul";

  // x [..., in] and the packed weight; docs of the layout stand in matmul.h.
  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = {{kFloat}, {kUint8}};
    return ports;
  }
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}};
    return ports;
  }

  explicit LowBitMatMul(const Info& info) {
    shape_.in = info.integer("K");
    shape_.out = info.integer("N");
    shape_.bits = static_cast<int>(info.integer("bits"));
    shape_.block = info.integer("block_size");
    rounding_.scale = info.real_or("activation_scale", 0.0f);
    if (rounding_.scale > 0) {
      rounding_.kind = Rounding::kStatic;
    } else if (info.integer_or("round_by_row", 0) != 0) {
      rounding_.kind = Rounding::kRow;
    }
    if (info.integer("layout_version") != kLayoutVersion) {
      throw GraphError("its weight is packed for another version of the kernels");
    }
    if (shape_.in < 1 || shape_.out < 1 || (shape_.bits != 4 && shape_.bits != 8) ||
        (shape_.block != 32 && shape_.block != 64 && shape_.block != kSpan)) {
      throw GraphError("no kernel for these sizes");
    }
  }

  void compute(const Context& context) const {
    const auto x = context.input<float>(0);
    const auto weight = context.input<uint8_t>(1);
    if (x.dims.empty() || x.dims.back() != shape_.in) {
      throw GraphError("its rows are not " + std::to_string(shape_.in) + " wide");
    }
    if (weight.count() != shape_.bytes()) {
      throw GraphError("its weight has " + std::to_string(weight.count()) + " bytes instead of " +
                       std::to_string(shape_.bytes()));
    }
    Dims dims = x.dims;
    dims.back() = shape_.out;
    const auto y = context.output<float>(0, dims);
    const int64_t num_rows = x.count() / shape_.in;
    if (num_rows == 0) return;
    const MatMulKernels& kernels = *level().matmul;
    const RoundedRows rows = room_for(shape_, kernels, num_rows);
    quantize(context, kernels, x.data, rows);
    const int64_t panels = shape_.panels();
    const int64_t pieces = num_pieces();
    context.parallel_for(static_cast<size_t>(pieces), [&](size_t i) {
      const int64_t piece = static_cast<int64_t>(i);
      kernels.multiply(shape_, weight.data, panels * piece / pieces, panels * (piece + 1) / pieces,
                       rows, y.data);
    });
  }

 private:
  void quantize(const Context& context, const MatMulKernels& kernels, const float* x,
                const RoundedRows& rows) const {
    auto one = [&](size_t i) {
      kernels.quantize(shape_, rounding_, x, rows.group(static_cast<int64_t>(i)));
    };
    constexpr int64_t kWorthThreads = 64 * 1024;  // inputs
    if (rows.num_rows * shape_.in >= kWorthThreads) {
      context.parallel_for(static_cast<size_t>(rows.num_groups), one);
    } else {
      for (int64_t g = 0; g < rows.num_groups; ++g) one(static_cast<size_t>(g));
    }
  }

  int64_t num_pieces() const {
    const int64_t wanted = shape_.bytes() / kPieceBytes + 1;
    const int64_t most = static_cast<int64_t>(kMaxPieces);
    const int64_t pieces = wanted < most ? wanted : most;
    return pieces < shape_.panels() ? pieces : shape_.panels();
  }

  MatMulShape shape_;
  RowRounding rounding_;
};

// A small generator of numbers, the same everywhere.
class Numbers {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float real() { return static_cast<float>(static_cast<int32_t>(next() % 20001) - 10000) / 3000; }

 private:
  uint64_t state_ = 1;
};

std::vector<uint8_t> some_weight(const MatMulShape& shape, Numbers& numbers) {
  std::vector<uint8_t> weight(static_cast<size_t>(shape.bytes()));
  for (int64_t at = 0; at < shape.bytes(); at += shape.block_bytes()) {
    for (int64_t i = 0; i < shape.values_bytes(); ++i) {
      weight[static_cast<size_t>(at + i)] = static_cast<uint8_t>(numbers.next());
    }
    for (int64_t o = 0; o < kPanel; ++o) {
      const float scale = numbers.real();
      std::memcpy(&weight[static_cast<size_t>(at + shape.values_bytes() + 4 * o)], &scale, 4);
    }
  }
  return weight;
}

std::vector<float> product(const MatMulKernels& kernels, const MatMulShape& shape,
                           RowRounding rounding, const std::vector<uint8_t>& weight,
                           const std::vector<float>& x, int64_t num_rows) {
  const RoundedRows rows = room_for(shape, kernels, num_rows);
  for (int64_t g = 0; g < rows.num_groups; ++g) {
    kernels.quantize(shape, rounding, x.data(), rows.group(g));
  }
  std::vector<float> y(static_cast<size_t>(num_rows * shape.out));
  kernels.multiply(shape, weight.data(), 0, shape.panels(), rows, y.data());
  return y;
}

}  // namespace

bool proves_itself(const MatMulKernels& kernels) {
  Numbers numbers;
  for (int bits : {4, 8}) {
    for (int64_t num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 80}) {
      const MatMulShape shape{90, 150, bits, 32};
      const std::vector<uint8_t> weight = some_weight(shape, numbers);
      std::vector<float> x(static_cast<size_t>(num_rows * shape.in));
      for (float& value : x) value = numbers.real();
      for (RowRounding rounding : {RowRounding{Rounding::kBlock}, RowRounding{Rounding::kRow},
                                   RowRounding{Rounding::kStatic, 0.02f}}) {
        const auto found = product(kernels, shape, rounding, weight, x, num_rows);
        const auto wanted = product(matmul_portable, shape, rounding, weight, x, num_rows);
        if (std::memcmp(found.data(), wanted.data(), wanted.size() * sizeof(float)) != 0) {
          return false;
        }
      }
    }
  }
  return true;
}

std::vector<const OrtCustomOp*> matmul_operators() {
  static const Operator<LowBitMatMul> low_bit_matmul;
  return {&low_bit_matmul};
}

}  // namespace edgespec
