// edgespec::Experts: rows by the experts that a router chose for them.

#include "experts.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "levels.h"
#include "norm_gate.h"
#include "operator.h"
#include "packed.h"

namespace edgespec {
namespace {

constexpr int64_t kPieceBytes = 128 * 1024;     // of weights, that a thread reads at a time
constexpr int64_t kMostRows = 256;              // of a call that are computed together
constexpr int64_t kWorthThreads = 64 * 1024;    // elements

// The rows that chose one expert: places [first, first + count) of all chosen ones in the order of
// the experts' numbers.
struct Group {
  int64_t expert, first, count;
};

// Which rows go to which experts. A place is one row at one of its experts.
struct Routing {
  std::vector<Group> groups;   // of experts that somebody chose
  std::vector<int64_t> rows;   // of places
  std::vector<float> weights;  // of places
  std::vector<int64_t> places; // [rows, chosen], in the order of the experts' numbers

  int64_t num_places() const { return static_cast<int64_t>(rows.size()); }
};

// Weights of a row's experts, divided by their sum if `normalized`.
void row_weights(const float* given, int64_t chosen, bool normalized, float* weights) {
  float sum = 0.0f;
  for (int64_t j = 0; j < chosen; ++j) sum += given[j];
  for (int64_t j = 0; j < chosen; ++j) weights[j] = normalized ? given[j] / sum : given[j];
}

Routing route(const int64_t* ids, const float* weights, int64_t num_rows, int64_t chosen,
              int64_t experts, bool normalized) {
  std::vector<int64_t> next(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < num_rows * chosen; ++i) {
    if (ids[i] < 0 || ids[i] >= experts) {
      throw GraphError("there is no expert " + std::to_string(ids[i]));
    }
    ++next[static_cast<size_t>(ids[i]) + 1];
  }
  Routing routing;
  for (int64_t e = 0; e < experts; ++e) {
    const auto at = static_cast<size_t>(e);
    const int64_t count = next[at + 1];
    if (count > 0) routing.groups.push_back({e, next[at], count});
    next[at + 1] += next[at];
  }
  const auto total = static_cast<size_t>(num_rows * chosen);
  routing.rows.resize(total);
  routing.weights.resize(total);
  routing.places.resize(total);
  std::vector<float> own(static_cast<size_t>(chosen));
  for (int64_t row = 0; row < num_rows; ++row) {
    row_weights(weights + row * chosen, chosen, normalized, own.data());
    for (int64_t j = 0; j < chosen; ++j) {
      const auto expert = static_cast<size_t>(ids[row * chosen + j]);
      const auto place = static_cast<size_t>(next[expert]++);
      routing.rows[place] = row;
      routing.weights[place] = own[static_cast<size_t>(j)];
    }
  }
  std::vector<int64_t> filled(static_cast<size_t>(num_rows), 0);
  for (size_t place = 0; place < total; ++place) {
    const int64_t row = routing.rows[place];
    const int64_t at = row * chosen + filled[static_cast<size_t>(row)]++;
    routing.places[static_cast<size_t>(at)] = static_cast<int64_t>(place);
  }
  return routing;
}

// Memory of a thread, kept from call to call, of which pieces are taken from the front.
class Room {
 public:
  void begin(size_t bytes) {
    if (size_ < bytes) {
      memory_.reset(new uint8_t[bytes + kLine]);
      size_ = bytes;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    at_ = memory_.get() + (kLine - address % kLine) % kLine;
  }
  // `count` elements at a multiple of a line.
  template <typename T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += bytes_of<T>(count);
    return taken;
  }
  template <typename T>
  static size_t bytes_of(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
  }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  size_t size_ = 0;
  uint8_t* at_ = nullptr;
};

size_t rounded_bytes(const MatMulShape& shape, int64_t num_rows) {
  return Room::bytes_of<int8_t>(num_rows * shape.spans() * kSpan) +
         3 * Room::bytes_of<float>(num_rows * shape.blocks());
}

RoundedRows take_rounded(Room& room, const MatMulShape& shape, const MatMulKernels& kernels,
                         int64_t num_rows) {
  RoundedRows rows;
  rows.num_rows = num_rows;
  rows.num_groups = (num_rows + kernels.most_rows - 1) / kernels.most_rows;
  rows.spans = shape.spans();
  rows.blocks = shape.blocks();
  rows.values = room.take<int8_t>(num_rows * rows.spans * kSpan);
  rows.scales = room.take<float>(num_rows * rows.blocks);
  rows.corrections = room.take<int32_t>(num_rows * rows.blocks);
  rows.sums = room.take<float>(num_rows * rows.blocks);
  return rows;
}

class Experts {
 public:
  static constexpr const char* name = "Experts";

  // x [..., hidden], the numbers and the weights of each row's experts [..., chosen], and all
  // experts as experts.h describes them; and what each expert's rows are multiplied by before gate
  // and up [experts, hidden], and before down [experts, inner].
  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = {{kFloat},  {kInt64},            {kFloat},
                                            {kUint8},  {kFloat, kOptional}, {kFloat, kOptional}};
    return ports;
  }
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}};
    return ports;
  }

  explicit Experts(const Info& info) {
    shape_.count = info.integer("experts");
    shape_.hidden = info.integer("hidden");
    shape_.inner = info.integer("inner");
    shape_.form = form_of(info);
    const bool own_down = info.integer_or("down_bits", 0) != 0;
    shape_.down_form = own_down ? form_of(info, "down_") : shape_.form;
    const std::vector<float> globals = info.reals("global_scales");
    if (!globals.empty()) shape_.globals = globals;
    if (info.integer_or("round_by_row", 0) != 0) rounding_.kind = Rounding::kRow;
    normalized_ = info.integer_or("normalized", 0) != 0;
    const int64_t activation = info.integer("activation");
    if (shape_.count < 1 || shape_.hidden < 1 || shape_.inner < 1 ||
        activation < 0 || activation >= kNumActivations) {
      throw GraphError("no kernel for these sizes");
    }
    const auto num_globals = static_cast<int64_t>(shape_.globals.size());
    if (num_globals != 1 && num_globals != 3 * shape_.count) {
      throw GraphError("it has not as many global scales as weights");
    }
    activation_ = static_cast<Activation>(activation);
    gate_up_ = shape_.gate_up();
    down_ = shape_.down();
  }

  void compute(const Context& context) const {
    const auto x = context.input<float>(0);
    const auto ids = context.input<int64_t>(1);
    const auto weights = context.input<float>(2);
    const auto experts = context.input<uint8_t>(3);
    if (x.dims.empty() || x.dims.back() != shape_.hidden) {
      throw GraphError("its rows are not " + std::to_string(shape_.hidden) + " wide");
    }
    if (experts.count() != shape_.count * shape_.expert_bytes()) {
      throw GraphError("its experts have " + std::to_string(experts.count()) +
                       " bytes instead of " +
                       std::to_string(shape_.count * shape_.expert_bytes()));
    }
    const int64_t num_rows = x.count() / shape_.hidden;
    const int64_t chosen = ids.dims.empty() ? 0 : ids.dims.back();
    if (chosen < 1 || ids.dims != weights.dims || ids.count() != num_rows * chosen) {
      throw GraphError("it needs the experts of each row, and as many weights");
    }
    const auto hidden_scales = context.input<float>(4), inner_scales = context.input<float>(5);
    if ((hidden_scales && hidden_scales.count() != shape_.count * shape_.hidden) ||
        (inner_scales && inner_scales.count() != shape_.count * shape_.inner)) {
      throw GraphError("it needs a scale for each input of each expert, or none");
    }
    const Weights given{experts.data, hidden_scales.data, inner_scales.data};
    const auto y = context.output<float>(0, x.dims);
    if (!y) return;
    for (int64_t first = 0; first < num_rows; first += kMostRows) {
      const int64_t count = std::min(kMostRows, num_rows - first);
      const Routing routing =
          route(ids.data + first * chosen, weights.data + first * chosen, count, chosen,
                shape_.count, normalized_);
      compute_rows(context, routing, count, x.data + first * shape_.hidden, given,
                   y.data + first * shape_.hidden);
    }
  }

 private:
  // What a call reads of all experts; no scales where there are none.
  struct Weights {
    const uint8_t* experts;
    const float *hidden_scales, *inner_scales;
  };

  // Where the rows of a group stand, rounded for gate and up and for down.
  struct Rounded {
    RoundedRows hidden, inner;
  };

  // What is computed on the way: what gate and up give, the inner rows, and what experts give.
  struct Scratch {
    float *gathered = nullptr, *gate_up = nullptr, *inner = nullptr, *out = nullptr;
    std::vector<Rounded> rounded;
    bool shared = false;  // all groups are of the one row of a call, which is rounded once
  };

  Scratch scratch_for(Room& room, const MatMulKernels& kernels, const Routing& routing,
                      bool one_row) const {
    const int64_t places = routing.num_places();
    Scratch scratch;
    scratch.shared = one_row && routing.groups.size() == routing.rows.size();
    size_t bytes = Room::bytes_of<float>(places * gate_up_.out) +
                   Room::bytes_of<float>(places * shape_.inner) +
                   Room::bytes_of<float>(places * shape_.hidden);
    for (const Group& group : routing.groups) {
      bytes += rounded_bytes(gate_up_, group.count) + rounded_bytes(down_, group.count);
    }
    // Rows of x are gathered where later stands what experts give
    room.begin(bytes);
    scratch.gate_up = room.take<float>(places * gate_up_.out);
    scratch.inner = room.take<float>(places * shape_.inner);
    scratch.out = scratch.gathered = room.take<float>(places * shape_.hidden);
    for (const Group& group : routing.groups) {
      Rounded one;
      one.hidden = scratch.shared && !scratch.rounded.empty()
                       ? scratch.rounded[0].hidden
                       : take_rounded(room, gate_up_, kernels, group.count);
      one.inner = take_rounded(room, down_, kernels, group.count);
      scratch.rounded.push_back(one);
    }
    return scratch;
  }

  void compute_rows(const Context& context, const Routing& routing, int64_t num_rows,
                    const float* x, const Weights& given, float* y) const {
    thread_local Room room;
    const MatMulKernels& kernels = *level().matmul;
    const RowKernels& row_kernels = *level().rows;
    const bool one_row = num_rows == 1 && given.hidden_scales == nullptr;
    const Scratch scratch = scratch_for(room, kernels, routing, one_row);
    const int64_t groups = static_cast<int64_t>(routing.groups.size());
    const int64_t places = routing.num_places();

    // Each group's rows, rounded
    some_threads(context, scratch.shared ? 1 : groups, places * shape_.hidden, [&](int64_t g) {
      const Group& group = routing.groups[static_cast<size_t>(g)];
      float* rows = scratch.gathered + group.first * shape_.hidden;
      for (int64_t i = 0; i < group.count; ++i) {
        const int64_t row = routing.rows[static_cast<size_t>(group.first + i)];
        std::copy_n(x + row * shape_.hidden, shape_.hidden, rows + i * shape_.hidden);
        if (given.hidden_scales != nullptr) {
          multiply_by(given.hidden_scales + group.expert * shape_.hidden, shape_.hidden,
                      rows + i * shape_.hidden);
        }
      }
      quantize(kernels, gate_up_, rows, scratch.rounded[static_cast<size_t>(g)].hidden);
    });

    // Gate and up, a few panels of both at a time
    in_pieces(context, groups, shape_.inner_panels(), 2 * gate_up_.panel_bytes(),
              [&](int64_t g, int64_t first, int64_t last) {
                const Group& group = routing.groups[static_cast<size_t>(g)];
                const uint8_t* weight = given.experts + group.expert * shape_.expert_bytes();
                float* both = scratch.gate_up + group.first * gate_up_.out;
                multiply_both(kernels, group.expert, weight, first, last,
                              scratch.rounded[static_cast<size_t>(g)].hidden, both);
                float* inner = scratch.inner + group.first * shape_.inner;
                for (int64_t i = 0; i < group.count; ++i) {
                  gate(row_kernels, first, last, both + i * gate_up_.out,
                       inner + i * shape_.inner);
                }
              });
    some_threads(context, groups, places * shape_.inner, [&](int64_t g) {
      const Group& group = routing.groups[static_cast<size_t>(g)];
      float* inner = scratch.inner + group.first * shape_.inner;
      for (int64_t i = 0; given.inner_scales != nullptr && i < group.count; ++i) {
        multiply_by(given.inner_scales + group.expert * shape_.inner, shape_.inner,
                    inner + i * shape_.inner);
      }
      quantize(kernels, down_, inner, scratch.rounded[static_cast<size_t>(g)].inner);
    });

    in_pieces(context, groups, down_.panels(), down_.panel_bytes(),
              [&](int64_t g, int64_t first, int64_t last) {
                const Group& group = routing.groups[static_cast<size_t>(g)];
                const uint8_t* weight =
                    given.experts + group.expert * shape_.expert_bytes() + gate_up_.bytes();
                kernels.multiply(shape_.of_expert(down_, group.expert, 2), weight, first, last,
                                 scratch.rounded[static_cast<size_t>(g)].inner,
                                 scratch.out + group.first * shape_.hidden);
              });
    some_threads(context, num_rows, places * shape_.hidden, [&](int64_t row) {
      add_up(routing, row, places / num_rows, scratch.out, y + row * shape_.hidden);
    });
  }

  // Panels [first, last) of gate and of up, which stand in turn.
  void multiply_both(const MatMulKernels& kernels, int64_t expert, const uint8_t* weight,
                     int64_t first, int64_t last, const RoundedRows& rows, float* both) const {
    const MatMulShape gate = shape_.of_expert(gate_up_, expert, 0);
    const MatMulShape up = shape_.of_expert(gate_up_, expert, 1);
    if (gate.global == up.global) {
      return kernels.multiply(gate, weight, 2 * first, 2 * last, rows, both);
    }
    for (int64_t panel = 2 * first; panel < 2 * last; ++panel) {
      kernels.multiply(panel % 2 == 0 ? gate : up, weight, panel, panel + 1, rows, both);
    }
  }

  static void multiply_by(const float* scales, int64_t n, float* row) {
    for (int64_t i = 0; i < n; ++i) row[i] *= scales[i];
  }

  void quantize(const MatMulKernels& kernels, const MatMulShape& shape, const float* x,
                const RoundedRows& rows) const {
    for (int64_t g = 0; g < rows.num_groups; ++g) {
      kernels.quantize(shape, rounding_, x, rows.group(g));
    }
  }

  // The inner columns of panels [first, last), of the panels of gate and up in turn.
  void gate(const RowKernels& kernels, int64_t first, int64_t last, const float* both,
            float* inner) const {
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t column = panel * kPanel;
      const float* from = both + 2 * column;
      kernels.gate(activation_, from, from + kPanel, std::min(kPanel, shape_.inner - column),
                   inner + column);
    }
  }

  void add_up(const Routing& routing, int64_t row, int64_t chosen, const float* out,
              float* y) const {
    for (int64_t j = 0; j < chosen; ++j) {
      const int64_t place = routing.places[static_cast<size_t>(row * chosen + j)];
      const float weight = routing.weights[static_cast<size_t>(place)];
      const float* from = out + place * shape_.hidden;
      if (j == 0) {
        for (int64_t i = 0; i < shape_.hidden; ++i) y[i] = weight * from[i];
      } else {
        for (int64_t i = 0; i < shape_.hidden; ++i) y[i] += weight * from[i];
      }
    }
  }

  // body(i) for each i below `count`, on other threads where so many elements are worth it.
  template <typename Body>
  static void some_threads(const Context& context, int64_t count, int64_t elements,
                           const Body& body) {
    auto one = [&](size_t i) { body(static_cast<int64_t>(i)); };
    if (elements >= kWorthThreads) return context.parallel_for(static_cast<size_t>(count), one);
    for (int64_t i = 0; i < count; ++i) body(i);
  }

  // body(group, first, last) for the panels of each group's weight, in pieces.
  template <typename Body>
  static void in_pieces(const Context& context, int64_t groups, int64_t panels,
                        int64_t panel_bytes, const Body& body) {
    const int64_t wanted = (panels * panel_bytes + kPieceBytes - 1) / kPieceBytes;
    const int64_t pieces = std::min(wanted, panels);
    context.parallel_for(static_cast<size_t>(groups * pieces), [&](size_t i) {
      const int64_t g = static_cast<int64_t>(i) / pieces, p = static_cast<int64_t>(i) % pieces;
      body(g, panels * p / pieces, panels * (p + 1) / pieces);
    });
  }

  ExpertsShape shape_;
  MatMulShape gate_up_, down_;
  RowRounding rounding_;
  Activation activation_{};
  bool normalized_ = false;
};

}  // namespace

std::vector<const OrtCustomOp*> experts_operators() {
  static const Operator<Experts> experts;
  return {&experts};
}

}  // namespace edgespec
