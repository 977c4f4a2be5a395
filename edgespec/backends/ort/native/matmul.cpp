// edgespec::LowBitMatMul, NormLowBitMatMul and GatedLowBitMatMul: the operators, and the proof of a
// level of instructions.

#include "matmul.h"

#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "levels.h"
#include "matmul_proof.h"
#include "norm_gate_rows.h"
#include "operator.h"
#include "packed.h"

namespace edgespec {
namespace {

// Weights of a piece of work: enough that starting it costs nothing beside it.
constexpr int64_t kPieceBytes = 64 * 1024;
constexpr int64_t kMaxPieces = 256;

// Memory for the rounded rows of a call, kept from call to call of a thread.
RoundedRows room_for(const MatMulShape& shape, const MatMulKernels& kernels, int64_t num_rows) {
  thread_local std::vector<uint8_t> memory;
  const auto values = static_cast<size_t>(num_rows * shape.spans() * kSpan);
  const auto scales = static_cast<size_t>(num_rows * shape.blocks()) * sizeof(float);
  const size_t needed = values + 3 * scales + kLine;
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
  rows.sums = reinterpret_cast<float*>(base + values + 2 * scales);
  return rows;
}

// Rows that are multiplied as they are.
class GivenRows {
 public:
  static std::vector<Port> inputs() { return {{kFloat}}; }

  explicit GivenRows(const Info&) {}

  struct Call {
    Dims dims;
    int64_t n = 0;
    const float* x = nullptr;

    int64_t count() const { return count_of(dims) / n; }
  };

  Call open(const Context& context, size_t) const {
    const auto x = context.input<float>(0);
    if (x.dims.empty() || x.dims.back() < 1) throw GraphError("it needs rows");
    return {x.dims, x.dims.back(), x.data};
  }
};

// The inputs and outputs of a product of rows, and its name.
struct OfGiven {
  static constexpr const char* name = "LowBitMatMul";
  using Rows = GivenRows;
  static constexpr bool made = false, sums = false;
};
struct OfNorm {
  static constexpr const char* name = "NormLowBitMatMul";
  using Rows = NormRows;
  static constexpr bool made = true, sums = true;
};
struct OfGate {
  static constexpr const char* name = "GatedLowBitMatMul";
  using Rows = GateRows;
  static constexpr bool made = true, sums = false;
};

// Rows by one weight or by several, all of the same inputs, bits and block size: the rows are
// rounded once for all of them. Rows that are made of the inputs are rounded group by group, before
// they leave the cache.
template <typename Kind>
class LowBitMatMul {
 public:
  static constexpr const char* name = Kind::name;

  // What rows are made of; behind rows that are made, biases of all weights one behind the other;
  // and packed weights as matmul.h describes them.
  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = [] {
      std::vector<Port> rows = Kind::Rows::inputs();
      if (Kind::made) rows.push_back({kFloat, kOptional});
      return with(rows, {kUint8, kVariadic});
    }();
    return ports;
  }
  // The sum in front of the norm, where the operator has one; and a y [..., out] for each weight.
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports =
        with(Kind::sums ? std::vector<Port>{{kFloat, kOptional}} : std::vector<Port>{},
             {kFloat, kVariadic});
    return ports;
  }

  explicit LowBitMatMul(const Info& info) : rows_(info), form_(info), shapes_(form_.shapes(info)) {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const auto weight = info.constant<uint8_t>(inputs().size() - 1 + i);
      constants_.push_back(weight ? checked(weight, shapes_[i]) : nullptr);
    }
  }

  void compute(const Context& context) const {
    const auto made = rows_.open(context, 0);
    const int64_t in = shapes_[0].in;
    if (made.n != in) throw GraphError("its rows are not " + std::to_string(in) + " wide");
    const std::vector<Product> products = products_of(context, made.dims);
    const int64_t num_rows = made.count();
    if (num_rows == 0) return;
    const MatMulKernels& kernels = *level().matmul;
    const RoundedRows rows = room_for(shapes_[0], kernels, num_rows);
    quantize(context, kernels, made, rows);
    const int64_t panels = products.back().last, pieces = num_pieces(panels);
    context.parallel_for(static_cast<size_t>(pieces), [&](size_t i) {
      const int64_t piece = static_cast<int64_t>(i);
      const int64_t begin = panels * piece / pieces, end = panels * (piece + 1) / pieces;
      for (const Product& one : products) {
        const int64_t first = begin > one.first ? begin : one.first;
        const int64_t last = end < one.last ? end : one.last;
        if (first < last) {
          kernels.multiply(*one.shape, one.weight, first - one.first, last - one.first, rows,
                           one.y);
          one.add_bias(first - one.first, last - one.first, num_rows);
        }
      }
    });
  }

 private:
  // A weight and what it makes; its panels are [first, last) of those of all weights.
  struct Product {
    const MatMulShape* shape;
    const uint8_t* weight;
    const float* bias;  // null: none
    float* y;
    int64_t first, last;

    // Adds the bias to the columns of panels [begin, end).
    void add_bias(int64_t begin, int64_t end, int64_t num_rows) const {
      if (bias == nullptr) return;
      const int64_t from = begin * kPanel;
      const int64_t to = end * kPanel < shape->out ? end * kPanel : shape->out;
      for (int64_t r = 0; r < num_rows; ++r) {
        float* row = y + r * shape->out;
        for (int64_t o = from; o < to; ++o) row[o] += bias[o];
      }
    }
  };

  std::vector<Product> products_of(const Context& context, Dims dims) const {
    const size_t weights = inputs().size() - 1, results = outputs().size() - 1;
    if (context.num_inputs() != shapes_.size() + weights ||
        context.num_outputs() != shapes_.size() + results) {
      throw GraphError("it has not as many weights and outputs as sizes N");
    }
    std::vector<Product> products;
    const float* bias = bias_of(context);
    int64_t first = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const MatMulShape& shape = shapes_[i];
      const uint8_t* weight = constants_[i];
      if (weight == nullptr) weight = checked(context.input<uint8_t>(i + weights), shape);
      dims.back() = shape.out;
      const auto y = context.output<float>(i + results, dims);
      if (!y) throw GraphError("an output that nobody reads");
      products.push_back({&shape, weight, bias, y.data, first, first + shape.panels()});
      if (bias != nullptr) bias += shape.out;
      first += shape.panels();
    }
    return products;
  }

  const float* bias_of(const Context& context) const {
    if constexpr (!Kind::made) return nullptr;
    const auto bias = context.input<float>(inputs().size() - 2);
    if (!bias) return nullptr;
    int64_t outputs = 0;
    for (const MatMulShape& shape : shapes_) outputs += shape.out;
    if (bias.count() != outputs) {
      throw GraphError("it needs " + std::to_string(outputs) + " biases, not " +
                       std::to_string(bias.count()));
    }
    return bias.data;
  }

  static const uint8_t* checked(const Tensor<const uint8_t>& weight, const MatMulShape& shape) {
    check_bytes(weight.count(), shape);
    return weight.data;
  }

  void quantize(const Context& context, const MatMulKernels& kernels,
                const typename Kind::Rows::Call& made, const RoundedRows& rows) const {
    std::atomic<bool> failed{false};
    auto one = [&](size_t i) {
      RowGroup group = rows.group(static_cast<int64_t>(i));
      if constexpr (Kind::made) {
        const float* x = made_rows(made, group.first, group.count);
        group.first = 0;
        failed = failed || x == nullptr;
        if (x != nullptr) kernels.quantize(shapes_[0], form_.rounding, x, group);
      } else {
        kernels.quantize(shapes_[0], form_.rounding, made.x, group);
      }
    };
    constexpr int64_t kWorthThreads = (Kind::made ? 16 : 64) * 1024;  // inputs
    if (rows.num_rows * shapes_[0].in >= kWorthThreads) {
      context.parallel_for(static_cast<size_t>(rows.num_groups), one);
    } else {
      for (int64_t g = 0; g < rows.num_groups; ++g) one(static_cast<size_t>(g));
    }
    if (failed) throw std::bad_alloc();
  }

  // Rows in memory of the thread; null where there is none.
  static const float* made_rows(const typename Kind::Rows::Call& made, int64_t first,
                                int64_t count) noexcept {
    thread_local std::vector<float> memory;
    const auto needed = static_cast<size_t>(count * made.n);
    try {
      if (memory.size() < needed) memory.resize(needed);
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    made.make(first, count, memory.data());
    return memory.data();
  }

  int64_t num_pieces(int64_t panels) const {
    const int64_t wanted = panels * shapes_[0].panel_bytes() / kPieceBytes + 1;
    const int64_t pieces = wanted < kMaxPieces ? wanted : kMaxPieces;
    return pieces < panels ? pieces : panels;
  }

  static std::vector<Port> with(std::vector<Port> ports, Port last) {
    ports.push_back(last);
    return ports;
  }

  typename Kind::Rows rows_;
  PackedForm form_;
  std::vector<MatMulShape> shapes_;
  std::vector<const uint8_t*> constants_;  // weights; null where they come with each call
};

std::vector<float> product(const MatMulKernels& kernels, const MatMulShape& shape,
                           RowRounding rounding, const std::vector<uint8_t>& weight,
                           const std::vector<float>& x, int64_t num_rows) {
  std::vector<float> y(static_cast<size_t>(num_rows * shape.out));
  multiply(kernels, shape, rounding, weight.data(), x.data(), num_rows, y.data());
  return y;
}

}  // namespace

MatMulShape form_of(const Info& info, const std::string& prefix) {
  static const char* const scales[] = {"float32", "float16", "float16_min", "super", "super_min"};
  static const char* const codebooks[] = {"", "iq4_nl", "fp4"};
  MatMulShape shape;
  auto named = [&](const char* name) { return prefix + name; };
  shape.bits = static_cast<int>(info.integer(named("bits").c_str()));
  shape.block = info.integer(named("block_size").c_str());
  const int64_t version = info.integer("layout_version");
  if (version < 1 || version > kLayoutVersion) {
    throw GraphError("its weight is packed for another version of the kernels");
  }
  shape.scales = static_cast<Scales>(info.place_in(scales, named("scales").c_str()));
  shape.codebook = static_cast<Codebook>(info.place_in(codebooks, named("codebook").c_str()));
  shape.super_block = info.integer_or(named("super_block").c_str(), 1);
  const bool bits_fit = shape.bits == 4 || shape.bits == 6 || shape.bits == 8;
  const bool block_fits = shape.block == 16 || shape.block == 32 || shape.block == 64 ||
                          shape.block == kSpan;
  constexpr int64_t kMostShared = 1 << 20;  // blocks: sums of sizes fit 64 bits
  const bool shared = shape.has_factors()
                          ? shape.super_block >= 1 && shape.super_block <= kMostShared
                          : shape.super_block == 1;
  const bool coded = shape.codebook != Codebook::kNone;
  if (!bits_fit || !block_fits || !shared || (coded && (shape.bits != 4 || shape.has_minimums()))) {
    throw GraphError("no kernel for these sizes");
  }
  return shape;
}

std::vector<float> global_scales(const Info& info, size_t count) {
  std::vector<float> found = info.reals("global_scales");
  if (found.empty()) found.resize(count, 1.0f);
  if (found.size() != count) throw GraphError("it has not as many global scales as weights");
  return found;
}

PackedForm::PackedForm(const Info& info) : shape(form_of(info)) {
  shape.in = info.integer("K");
  if (shape.in < 1) throw GraphError("no kernel for these sizes");
  rounding.scale = info.real_or("activation_scale", 0.0f);
  if (rounding.scale > 0) {
    rounding.kind = Rounding::kStatic;
  } else if (info.integer_or("round_by_row", 0) != 0) {
    rounding.kind = Rounding::kRow;
  }
}

std::vector<MatMulShape> PackedForm::shapes(const Info& info) const {
  const std::vector<int64_t> sizes = info.integers("N");
  const std::vector<float> globals = global_scales(info, sizes.size());
  std::vector<MatMulShape> found;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 1) throw GraphError("no kernel for these sizes");
    found.push_back(shape);
    found.back().out = sizes[i];
    found.back().global = globals[i];
  }
  if (found.empty()) throw GraphError("no kernel for these sizes");
  return found;
}

void check_bytes(int64_t bytes, const MatMulShape& shape) {
  if (bytes == shape.bytes()) return;
  throw GraphError("its weight has " + std::to_string(bytes) + " bytes instead of " +
                   std::to_string(shape.bytes()));
}

RoundedRows rounded_rows(const Context& context, const MatMulKernels& kernels,
                         const PackedForm& form, const float* x, int64_t num_rows) {
  const RoundedRows rows = room_for(form.shape, kernels, num_rows);
  auto one = [&](size_t i) {
    kernels.quantize(form.shape, form.rounding, x, rows.group(static_cast<int64_t>(i)));
  };
  constexpr int64_t kWorthThreads = 64 * 1024;  // inputs
  if (num_rows * form.shape.in >= kWorthThreads) {
    context.parallel_for(static_cast<size_t>(rows.num_groups), one);
  } else {
    for (int64_t g = 0; g < rows.num_groups; ++g) one(static_cast<size_t>(g));
  }
  return rows;
}

void multiply(const MatMulKernels& kernels, const MatMulShape& shape, RowRounding rounding,
              const uint8_t* weight, const float* x, int64_t num_rows, float* y) {
  const RoundedRows rows = room_for(shape, kernels, num_rows);
  for (int64_t g = 0; g < rows.num_groups; ++g) {
    kernels.quantize(shape, rounding, x, rows.group(g));
  }
  kernels.multiply(shape, weight, 0, shape.panels(), rows, y);
}

bool proves_itself(const MatMulKernels& kernels) {
  constexpr RowRounding roundings[] = {
      {Rounding::kBlock, 0}, {Rounding::kRow, 0}, {Rounding::kStatic, 0.02f}};
  // All values, scales and codebooks, each block
  const MatMulShape forms[] = {
      {0, 0, 4, 32},
      {0, 0, 4, 64},
      {0, 0, 4, 128},
      {0, 0, 8, 32},
      {0, 0, 8, 64},
      {0, 0, 8, 128},
      {0, 0, 4, 16, Scales::kFloat16Min},
      {0, 0, 4, 32, Scales::kSuperMin, 2},
      {0, 0, 6, 64, Scales::kFloat16},
      {0, 0, 6, 16, Scales::kSuper, 2},
      {0, 0, 6, 32, Scales::kSuperMin, 8},
      {0, 0, 8, 16, Scales::kSuperMin, 1},
      {0, 0, 4, 32, Scales::kSuper, 2, Codebook::kIq4Nl},
      {0, 0, 4, 16, Scales::kFloat16, 1, Codebook::kFp4, 0.3f},
  };
  ProofNumbers numbers;
  int turn = 0;
  for (MatMulShape shape : forms) {
    for (int64_t num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 35, 70}) {
      shape.in = shape.block + 26;
      shape.out = turn % 2 == 0 ? 70 : 130;
      const std::vector<uint8_t> weight = some_weight(shape, numbers);
      const std::vector<float> x = numbers.reals(num_rows * shape.in);
      const RowRounding rounding = roundings[turn++ % 3];
      const auto found = product(kernels, shape, rounding, weight, x, num_rows);
      const auto wanted = product(matmul_portable, shape, rounding, weight, x, num_rows);
      if (std::memcmp(found.data(), wanted.data(), wanted.size() * sizeof(float)) != 0) {
        return false;
      }
    }
  }
  return true;
}

std::vector<const OrtCustomOp*> matmul_operators() {
  static const Operator<LowBitMatMul<OfGiven>> given;
  static const Operator<LowBitMatMul<OfNorm>> normed;
  static const Operator<LowBitMatMul<OfGate>> gated;
  return {&given, &normed, &gated};
}

}  // namespace edgespec
