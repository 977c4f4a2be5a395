// edgespec::LowBitHead: the product by an lm_head, and the search through its logits while they are
// in the cache; and the proof of a level of instructions.

#include "head.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "head_kernel.h"
#include "levels.h"
#include "matmul.h"
#include "numbers.h"
#include "operator.h"
#include "packed.h"

namespace edgespec {
namespace {

constexpr int64_t kPanelsOfPart = kPart / kPanel;
constexpr int64_t kMostPieces = 32;  // of the ids: what is found in each is joined

// Memory for what is found in pieces of the ids: the largest logits of each row, a sum for each
// part of a row, and whether a row was finite in a piece. Kept from call to call of a thread. What
// the last of the largest is in one piece, all pieces of the row know as the floor: which of them is
// first decides how much is compared, and not what is found.
class Findings {
 public:
  void reset(const Search& search, int64_t num_rows, int64_t num_pieces) {
    count_ = search.count;
    num_rows_ = num_rows;
    num_parts_ = search.sums ? search.parts() : 0;
    largest_.resize(static_cast<size_t>(num_pieces * num_rows * count_));
    filled_.assign(static_cast<size_t>(num_pieces * num_rows), 0);
    finite_.assign(static_cast<size_t>(num_pieces * num_rows), 1);
    sums_.resize(static_cast<size_t>(num_rows * num_parts_));
    floors_.assign(static_cast<size_t>(num_rows), -INFINITY);
  }

  // Looks through a part of a row within a piece.
  void look(const HeadKernels& kernels, int64_t piece, int64_t row, int64_t part,
            const float* logits, int64_t count) {
    const auto at = static_cast<size_t>(piece * num_rows_ + row);
    float* floor = &floors_[static_cast<size_t>(row)];
    Largest largest{&largest_[at * static_cast<size_t>(count_)], count_, filled_[at], 0.0f};
    __atomic_load(floor, &largest.floor, __ATOMIC_RELAXED);
    PartSum* sum =
        num_parts_ > 0 ? &sums_[static_cast<size_t>(row * num_parts_ + part)] : nullptr;
    if (!kernels.look(logits, count, part * kPart, largest, sum)) finite_[at] = 0;
    filled_[at] = largest.filled;
    if (largest.filled < count_) return;
    float last = largest.at[count_ - 1].value;
    if (last > largest.floor) __atomic_store(floor, &last, __ATOMIC_RELAXED);
  }

  // Joins what was found of a row in all pieces.
  void join(int64_t row, int64_t num_pieces, const Places& places) const {
    Candidate memory[kMostTop];
    Largest all{memory, count_, 0, -INFINITY};
    places.finite[row] = true;
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      const auto at = static_cast<size_t>(piece * num_rows_ + row);
      const Candidate* own = &largest_[at * static_cast<size_t>(count_)];
      for (int64_t i = 0; i < filled_[at] && has_place(all, own[i].value); ++i) {
        put(all, own[i].value, own[i].id);
      }
      if (finite_[at] == 0) places.finite[row] = false;
    }
    for (int64_t i = 0; i < count_; ++i) {
      places.ids[row * count_ + i] = memory[i].id;
      places.values[row * count_ + i] = memory[i].value;
    }
    places.logsumexp[row] = num_parts_ > 0 ? logsumexp(row) : NAN;
  }

 private:
  float logsumexp(int64_t row) const {
    const PartSum* parts = &sums_[static_cast<size_t>(row * num_parts_)];
    double peak = -INFINITY, sum = 0;
    for (int64_t i = 0; i < num_parts_; ++i) {
      if (std::isnan(parts[i].peak)) return NAN;
      peak = parts[i].peak > peak ? parts[i].peak : peak;
    }
    if (peak == -INFINITY) return NAN;
    for (int64_t i = 0; i < num_parts_; ++i) {
      if (parts[i].sum > 0) sum += parts[i].sum * std::exp(parts[i].peak - peak);
    }
    return static_cast<float>(peak + std::log(sum));
  }

  int64_t count_ = 0, num_rows_ = 0, num_parts_ = 0;
  std::vector<Candidate> largest_;
  std::vector<int64_t> filled_;
  std::vector<char> finite_;
  std::vector<PartSum> sums_;
  std::vector<float> floors_;  // read and written by all threads
};

Findings& findings() {
  thread_local Findings here;
  return here;
}

// Memory for the logits of a part of all rows; null where there is none.
float* logits_of_part(int64_t num_rows) noexcept {
  thread_local std::vector<float> memory;
  const auto needed = static_cast<size_t>(num_rows * kPart);
  try {
    if (memory.size() < needed) memory.resize(needed);
  } catch (const std::exception&) {
    return nullptr;
  }
  return memory.data();
}

// Rows by the weight of an lm_head.
//
// Inputs: x [lanes, rows, in]; the weight; `written` [lanes]: whether the logits of a lane's rows
// are; `search` [3]: how many of the largest, of the first so many ids, and whether sums are made.
// Outputs: logits [lanes, rows, out], of which those of other lanes are left as they are; and what
// was found: ids and values [lanes, rows, count], logsumexp and finite [lanes, rows].
class LowBitHead {
 public:
  static constexpr const char* name = "LowBitHead";

  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = {{kFloat}, {kUint8}, {kBool}, {kInt64}};
    return ports;
  }
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}, {kInt64}, {kFloat}, {kFloat}, {kBool}};
    return ports;
  }

  explicit LowBitHead(const Info& info) : form_(info) {
    const std::vector<MatMulShape> shapes = form_.shapes(info);
    if (shapes.size() != 1) throw GraphError("it has one weight");
    form_.shape = shapes[0];
  }

  void compute(const Context& context) const {
    const MatMulShape& shape = form_.shape;
    const auto x = context.input<float>(0);
    const auto weight = context.input<uint8_t>(1);
    const auto written = context.input<bool>(2);
    const auto asked = context.input<int64_t>(3);
    if (x.dims.size() != 3 || x.dims[2] != shape.in) {
      throw GraphError("its rows are not " + std::to_string(shape.in) + " wide");
    }
    const int64_t lanes = x.dims[0], rows_of_lane = x.dims[1];
    if (written.count() != lanes) throw GraphError("it is not said which lanes are written");
    check_bytes(weight.count(), shape);
    const Search search = search_of(asked);
    const auto logits = context.output<float>(0, {lanes, rows_of_lane, shape.out});
    const Dims found = {lanes, rows_of_lane, search.count}, one = {lanes, rows_of_lane};
    const auto ids = context.output<int64_t>(1, found);
    const auto values = context.output<float>(2, found);
    const auto logsumexp = context.output<float>(3, one);
    const auto finite = context.output<bool>(4, one);
    if (!logits || !ids || !values || !logsumexp || !finite) {
      throw GraphError("an output that nobody reads");
    }
    const int64_t num_rows = lanes * rows_of_lane;
    if (num_rows == 0) return;
    const MatMulKernels& kernels = *level().matmul;
    const RoundedRows rows = rounded_rows(context, kernels, form_, x.data, num_rows);
    bool writes = false;
    for (int64_t lane = 0; lane < lanes; ++lane) writes = writes || written.data[lane];
    const int64_t parts = writes ? (shape.out + kPart - 1) / kPart : search.parts();
    const int64_t pieces = parts < kMostPieces ? parts : kMostPieces;
    Findings& all = findings();
    all.reset(search, num_rows, pieces);
    std::atomic<bool> failed{false};
    context.parallel_for(static_cast<size_t>(pieces), [&](size_t i) {
      const auto piece = static_cast<int64_t>(i);
      float* here = logits_of_part(num_rows);
      if (here == nullptr) {
        failed = true;
        return;
      }
      for (int64_t part = parts * piece / pieces; part < parts * (piece + 1) / pieces; ++part) {
        const int64_t first = part * kPart;
        MatMulShape own = shape;
        own.out = shape.out - first < kPart ? shape.out - first : kPart;
        kernels.multiply(own, weight.data + part * kPanelsOfPart * shape.panel_bytes(), 0,
                         own.panels(), rows, here);
        for (int64_t row = 0; row < num_rows; ++row) {
          const float* some = here + row * own.out;
          if (written.data[row / rows_of_lane]) {
            std::memcpy(logits.data + row * shape.out + first, some,
                        static_cast<size_t>(own.out) * sizeof(float));
          }
          const int64_t within = search.ids - first < own.out ? search.ids - first : own.out;
          if (within > 0) all.look(*level().head, piece, row, part, some, within);
        }
      }
    });
    if (failed) throw std::bad_alloc();
    const Places places{ids.data, values.data, logsumexp.data, finite.data};
    for (int64_t row = 0; row < num_rows; ++row) all.join(row, pieces, places);
  }

 private:
  Search search_of(const Tensor<const int64_t>& asked) const {
    if (asked.count() != 3) throw GraphError("its search has not three sizes");
    const Search search{asked.data[0], asked.data[1], asked.data[2] != 0};
    if (search.ids < 1 || search.ids > form_.shape.out || search.count < 1 ||
        search.count > kMostTop || search.count > search.ids) {
      throw GraphError("it cannot find " + std::to_string(search.count) + " of " +
                       std::to_string(search.ids) + " logits");
    }
    return search;
  }

  PackedForm form_;
};

}  // namespace

const HeadKernels head_portable = {look};

void find(const HeadKernels& kernels, const Search& search, const float* logits, int64_t num_rows,
          int64_t stride, const Places& places) {
  Findings& all = findings();
  all.reset(search, num_rows, 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t part = 0; part < search.parts(); ++part) {
      const int64_t first = part * kPart;
      const int64_t count = search.ids - first < kPart ? search.ids - first : kPart;
      all.look(kernels, 0, row, part, logits + row * stride + first, count);
    }
    all.join(row, 1, places);
  }
}

bool proves_itself(const HeadKernels& kernels) {
  constexpr int64_t kRows = 4, kIds = 2 * kPart + 77;
  ProofNumbers numbers;
  std::vector<float> logits = numbers.reals(kRows * kIds);
  logits[2 * kIds + 5] = -INFINITY;
  logits[3 * kIds + kIds - 1] = NAN;
  for (int64_t count : {1, 2, 7}) {
    std::vector<char> found[2];
    for (int i = 0; i < 2; ++i) {
      int64_t ids[7 * kRows];
      float values[8 * kRows];
      bool finite[kRows];
      const Search search{count, kIds, true};
      const Places places{ids, values, values + 7 * kRows, finite};
      find(i == 0 ? head_portable : kernels, search, logits.data(), kRows, kIds, places);
      auto keep = [&](const void* at, size_t bytes) {
        const char* some = static_cast<const char*>(at);
        found[i].insert(found[i].end(), some, some + bytes);
      };
      keep(ids, static_cast<size_t>(kRows * count) * sizeof(int64_t));
      keep(values, static_cast<size_t>(kRows * count) * sizeof(float));
      keep(values + 7 * kRows, 2 * sizeof(float));  // a NaN has any sign
      keep(finite, sizeof finite);
    }
    if (found[0] != found[1]) return false;
  }
  return true;
}

std::vector<const OrtCustomOp*> head_operators() {
  static const Operator<LowBitHead> low_bit_head;
  return {&low_bit_head};
}

}  // namespace edgespec
