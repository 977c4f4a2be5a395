// edgespec::GatedDeltaNet: the operator, the order in which rows of a tree are computed, and the
// proof of a level of instructions.

#include "recurrence.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "levels.h"
#include "numbers.h"
#include "operator.h"

namespace edgespec {
namespace {

constexpr int64_t kSmallWork = 1 << 14;  // elements of states that one thread has read soon
constexpr int64_t kLineFloats = 16;
constexpr int64_t kStructFloats = 16;  // more than a row's structs take, as part_of divides scratch

// ---- the order of rows

// The rows of one sequence: parents first, and a row's descendants before its siblings, so that few
// states have to be kept at once.
class Tree {
 public:
  Tree(const uint8_t* mask, int64_t rows) : parents_(rows, -1), left_(rows, 0), buffers_(rows, -1) {
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* seen = mask + row * rows;
      int64_t parent = row - 1;  // it has the largest index of those that the row follows
      while (parent >= 0 && seen[parent] == 0) --parent;
      parents_[row] = static_cast<int32_t>(parent);
      if (parent >= 0) ++left_[parent];
    }
  }

  const std::vector<int32_t>& parents() const { return parents_; }

  // Appends the steps; returns how many buffers they need.
  int64_t plan(std::vector<DeltaStep>& steps) {
    const auto rows = static_cast<int32_t>(parents_.size());
    std::vector<int32_t> next(parents_.size(), -1), first(parents_.size() + 1, -1), waiting;
    for (int32_t row = rows - 1; row >= 0; --row) {
      int32_t& head = first[static_cast<size_t>(parents_[row] + 1)];
      next[row] = head;
      head = row;
    }
    for (int32_t row = first[0]; row >= 0; row = next[row]) {
      waiting.push_back(row);
      while (!waiting.empty()) {
        const int32_t one = waiting.back();
        waiting.pop_back();
        steps.push_back(step_of(one));
        const size_t begin = waiting.size();
        for (int32_t child = first[one + 1]; child >= 0; child = next[child]) {
          waiting.push_back(child);
        }
        std::reverse(waiting.begin() + static_cast<std::ptrdiff_t>(begin), waiting.end());
      }
    }
    return count_;
  }

 private:
  DeltaStep step_of(int32_t row) {
    DeltaStep step;
    step.row = row;
    step.parent = parents_[row];
    if (step.parent < 0) return step;  // it reads the present state
    int32_t& buffer = buffers_[step.parent];
    if (buffer < 0) {
      const int32_t before = parents_[step.parent];
      step.takes_parent = true;
      step.from = before < 0 ? -1 : buffers_[before];
      // in place where nobody else reads the state before the parent any more
      buffer = before >= 0 && left_[before] == 0 ? step.from : new_buffer();
      step.to = buffer;
    } else {
      step.from = buffer;
    }
    if (--left_[step.parent] == 0 && left_[row] == 0) free_.push_back(buffer);
    return step;
  }

  int32_t new_buffer() {
    if (free_.empty()) return count_++;
    const int32_t found = free_.back();
    free_.pop_back();
    return found;
  }

  std::vector<int32_t> parents_;
  std::vector<int32_t> left_;     // children that were not computed yet
  std::vector<int32_t> buffers_;  // where the state behind a row is
  std::vector<int32_t> free_;
  int32_t count_ = 0;
};

struct Order {
  std::vector<DeltaStep> steps;
  std::vector<int32_t> windows;
  DeltaNetPlan plan;

  Order(const DeltaNetCall& call, const uint8_t* mask) {
    steps.reserve(static_cast<size_t>(call.batch * call.rows));
    for (int64_t b = 0; b < call.batch; ++b) {
      Tree tree(mask + b * call.rows * call.rows, call.rows);
      plan.buffers = std::max(plan.buffers, tree.plan(steps));
      for (int64_t row = 0; row < call.rows; ++row) add_window(call, tree.parents(), row);
    }
    plan.call = &call;
    plan.steps = steps.data();
    plan.windows = windows.data();
  }

  void add_window(const DeltaNetCall& call, const std::vector<int32_t>& parents, int64_t row) {
    int64_t at = row, before = call.kernel - 1;  // rows of conv_state that were not read yet
    for (int64_t back = 0; back < call.kernel; ++back) {
      windows.push_back(static_cast<int32_t>(at >= 0 ? at : -1 - --before));
      if (at >= 0) at = parents[static_cast<size_t>(at)];
    }
  }
};

// ---- pieces

// A thread's own memory, kept from call to call, at the beginning of a cache line.
float* scratch_of(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + kLineFloats) {
    memory = std::vector<float>(static_cast<size_t>(floats + kLineFloats));
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

struct OneThread {
  template <typename Body>
  void parallel_for(size_t total, const Body& body) const {
    for (size_t i = 0; i < total; ++i) body(i);
  }
};

template <typename Threads>
void run_pieces(const DeltaNetPlan& plan, const DeltaNetKernels& kernels, const Threads& threads) {
  const DeltaNetCall& call = *plan.call;
  const int64_t floats = delta_net_scratch(plan);
  std::atomic<bool> failed{false};
  threads.parallel_for(static_cast<size_t>(call.batch * call.key_heads), [&](size_t i) {
    const int64_t piece = static_cast<int64_t>(i);
    try {
      kernels.run(plan, piece / call.key_heads, piece % call.key_heads, scratch_of(floats));
    } catch (const std::bad_alloc&) {  // it must not leave the body
      failed = true;
    }
  });
  if (failed) throw std::bad_alloc();
}

template <typename Threads>
void run(const DeltaNetCall& call, const uint8_t* mask, const DeltaNetKernels& kernels,
         const Threads& threads) {
  const Order order(call, mask);
  const int64_t state = call.batch * call.value_heads * call.key_dim * call.value_dim;
  if (state * (call.rows + call.committed) < kSmallWork) {
    run_pieces(order.plan, kernels, OneThread{});
  } else {
    run_pieces(order.plan, kernels, threads);
  }
}

// ---- the operator

class GatedDeltaNet {
 public:
  static constexpr const char* name = "GatedDeltaNet";

  // mixed [B, S, C], gate [B, S, Hv * dv], decay and rate [B, S, Hv], tree_mask [B, S, S] (the rows
  // of the call that a row follows, itself included), conv_state [B, K - 1, C], state
  // [B, Hv, dk, dv], committed rows [B, P, W], taps [K, C], speed and bias [Hv], norm [dv]: as in
  // DeltaNetCall.
  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = {{kFloat}, {kFloat}, {kFloat}, {kFloat},
                                            {kBool},  {kFloat}, {kFloat}, {kFloat},
                                            {kFloat}, {kFloat}, {kFloat}, {kFloat}};
    return ports;
  }
  // out [B, S, Hv * dv], the state with the committed rows, and the rows of this call [B, S, W].
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}, {kFloat}, {kFloat}};
    return ports;
  }

  explicit GatedDeltaNet(const Info& info) {
    form_.key_heads = info.integer("num_key_heads");
    form_.value_heads = info.integer("num_value_heads");
    form_.unit_epsilon = info.real("unit_epsilon");
    form_.q_scale = info.real("q_scale");
    form_.k_scale = info.real("k_scale");
    form_.norm_epsilon = info.real("norm_epsilon");
    const bool heads = form_.key_heads >= 1 && form_.value_heads >= form_.key_heads &&
                       form_.value_heads % form_.key_heads == 0;
    if (!heads) throw GraphError("no kernel for these heads");
  }

  void compute(const Context& context) const {
    const auto mixed = context.input<float>(0), gate = context.input<float>(1);
    const auto decay = context.input<float>(2), rate = context.input<float>(3);
    const auto mask = context.input<uint8_t>(4);
    const auto conv_state = context.input<float>(5), state = context.input<float>(6);
    const auto taken = context.input<float>(7), taps = context.input<float>(8);
    const auto speed = context.input<float>(9), bias = context.input<float>(10);
    const auto norm = context.input<float>(11);
    DeltaNetCall call = form_;
    check(mixed.dims.size() == 3 && state.dims.size() == 4, "rows, and a state of heads");
    call.batch = mixed.dims[0];
    call.rows = mixed.dims[1];
    call.key_dim = state.dims[2];
    call.value_dim = state.dims[3];
    check(call.key_dim >= 1 && call.value_dim >= 1, "heads of at least one element");
    check(taken.dims.size() == 3 && taps.dims.size() == 2, "committed rows and taps");
    call.committed = taken.dims[1];
    call.kernel = taps.dims[0];
    const int64_t B = call.batch, S = call.rows, heads = call.value_heads;
    check(S > 0, "a row");
    check(call.kernel >= 1 && taps.dims[1] == call.channels(), "a tap for each channel");
    check(mixed.dims[2] == call.channels(), "queries, keys and values as wide as its heads");
    check(state.dims == Dims({B, heads, call.key_dim, call.value_dim}), "a state for each sequence");
    check(gate.dims == Dims({B, S, call.values()}), "a gate for each value");
    check(decay.dims == Dims({B, S, heads}) && rate.dims == decay.dims, "a decay and a rate a head");
    check(mask.dims == Dims({B, S, S}), "what each row follows");
    check(conv_state.dims == Dims({B, call.kernel - 1, call.channels()}), "rows before the call");
    check(taken.dims == Dims({B, call.committed, call.width()}), "committed rows of its width");
    check(speed.dims == Dims({heads}) && bias.dims == Dims({heads}), "a speed and a bias a head");
    check(norm.dims == Dims({call.value_dim}), "a weight of the norm for each element");
    call.mixed = mixed.data;
    call.gate = gate.data;
    call.decay = decay.data;
    call.rate = rate.data;
    call.conv_state = conv_state.data;
    call.state = state.data;
    call.taken = taken.data;
    call.taps = taps.data;
    call.speed = speed.data;
    call.bias = bias.data;
    call.norm = norm.data;
    call.out = written(context, 0, gate.dims);
    call.present = written(context, 1, state.dims);
    call.left = written(context, 2, {B, S, call.width()});
    if (B > 0) run(call, mask.data, *level().delta_net, context);
  }

 private:
  static void check(bool holds, const char* what) {
    if (!holds) throw GraphError(std::string("it needs ") + what);
  }

  static float* written(const Context& context, size_t index, const Dims& dims) {
    const auto found = context.output<float>(index, dims);
    if (!found) throw GraphError("it needs all of its outputs");
    return found.data;
  }

  DeltaNetCall form_;
};

// ---- the proof

// Two sequences, of which one has rows to take in: a tree, or one row.
struct ProofCall {
  DeltaNetCall call;
  std::vector<float> mixed, gate, decay, rate, conv_state, state, taken, taps, speed, bias, norm;
  std::vector<float> out, left;
  std::vector<uint8_t> mask;

  ProofCall(int64_t rows, int64_t value_dim) {
    call.batch = 2;
    call.rows = rows;
    call.committed = 2;
    call.key_heads = 2;
    call.value_heads = 4;
    call.key_dim = 19;
    call.value_dim = value_dim;
    call.kernel = 3;
    call.unit_epsilon = call.norm_epsilon = 1e-6f;
    call.q_scale = 0.1f;
    call.k_scale = 0.3f;
    fill();
  }

  void fill() {
    ProofNumbers numbers;
    const int64_t tokens = call.batch * call.rows, heads = call.value_heads;
    mixed = numbers.reals(tokens * call.channels());
    gate = numbers.reals(tokens * call.values());
    decay = numbers.reals(tokens * heads);
    rate = numbers.reals(tokens * heads);
    conv_state = numbers.reals(call.batch * (call.kernel - 1) * call.channels());
    state = numbers.reals(call.batch * heads * call.key_dim * call.value_dim);
    taken = numbers.reals(call.batch * call.committed * call.width());
    for (int64_t row = 0; row < call.batch * call.committed; ++row) {
      float* logs = taken.data() + row * call.width() + call.keys() + call.values();
      for (int64_t h = 0; h < heads; ++h) logs[h] = -logs[h] * logs[h];
    }
    std::fill(taken.end() - call.width(), taken.end(), 0.0f);  // it fills up
    taps = numbers.reals(call.kernel * call.channels());
    speed = numbers.reals(heads);
    for (float& value : speed) value = -value * value;
    bias = numbers.reals(heads);
    norm = numbers.reals(call.value_dim);
    out.assign(gate.size(), 0.0f);
    left.assign(static_cast<size_t>(tokens * call.width()), 0.0f);
    mask.assign(static_cast<size_t>(tokens * call.rows), 0);
    for (int64_t row = 0; row < tokens; ++row) {
      const int64_t own = row % call.rows;
      mask[static_cast<size_t>(row * call.rows + own)] = 1;
      if (own > 0) mask[static_cast<size_t>(row * call.rows + (own - 1) / 2)] = 1;
    }
  }

  void run_on(const DeltaNetKernels& kernels) {
    call.mixed = mixed.data();
    call.gate = gate.data();
    call.decay = decay.data();
    call.rate = rate.data();
    call.conv_state = conv_state.data();
    call.state = call.present = state.data();
    call.taken = taken.data();
    call.taps = taps.data();
    call.speed = speed.data();
    call.bias = bias.data();
    call.norm = norm.data();
    call.out = out.data();
    call.left = left.data();
    run(call, mask.data(), kernels, OneThread{});
  }

  bool same_bits(const ProofCall& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(out, other.out) && same(state, other.state) && same(left, other.left);
  }
};

}  // namespace

int64_t delta_net_scratch(const DeltaNetPlan& plan) {
  const DeltaNetCall& call = *plan.call;
  const int64_t rows = call.rows * (call.key_dim + 1 + 2 * kStructFloats);
  const int64_t count = std::max<int64_t>(plan.buffers, 1);  // rows that are taken in need one
  const int64_t buffers = count * call.key_dim * kStateColumns;
  return rows + call.committed * kStructFloats + buffers + 6 * kLineFloats;
}

bool proves_itself(const DeltaNetKernels& kernels) {
  // columns of every width: of many vectors, of one, and what is left
  for (const auto& [rows, value_dim] : {std::pair<int64_t, int64_t>{1, 150}, {7, 85}}) {
    ProofCall found(rows, value_dim), wanted(rows, value_dim);
    found.run_on(kernels);
    wanted.run_on(delta_net_portable);
    if (!found.same_bits(wanted)) return false;
  }
  return true;
}

std::vector<const OrtCustomOp*> recurrence_operators() {
  static const Operator<GatedDeltaNet> gated_delta_net;
  return {&gated_delta_net};
}

}  // namespace edgespec
