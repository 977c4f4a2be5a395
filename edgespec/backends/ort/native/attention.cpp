// edgespec::TreeAttention: the operator, how a call is cut into pieces of work, and the proof of a
// level of instructions.

#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "levels.h"
#include "norm_gate.h"
#include "numbers.h"
#include "operator.h"

namespace edgespec {
namespace {

constexpr int64_t kManyPieces = 8;       // shared well by a few threads
constexpr int64_t kSmallWork = 1 << 16;  // products that one thread has done before others begin
constexpr int64_t kLanes = 16;
constexpr int64_t kLineBytes = 64;

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t padded(int64_t dim) { return divided_up(dim, kLanes) * kLanes; }

// ---- paths

// The path of a row by what it sees of the slots behind `length`. Slots that do not stand side by
// side with their positions are appended to `slots`.
Path path_of(const uint8_t* visible, int64_t columns, int64_t length, int64_t first,
             std::vector<int32_t>& slots) {
  const auto find = [&](int64_t from, int value) {
    if (from >= columns) return columns;
    const void* at = std::memchr(visible + from, value, static_cast<size_t>(columns - from));
    return at == nullptr ? columns : static_cast<const uint8_t*>(at) - visible;
  };
  int64_t column = find(0, 0), seen = column;
  Path path;
  path.straight = length + column;
  while ((column = find(column, 1)) < columns) {
    slots.push_back(static_cast<int32_t>(length + column));
    ++seen;
    ++column;
  }
  if (seen == 0 || first >= length + seen) return Path{};  // it only fills up
  path.first = first;
  path.end = length + seen;
  return path;
}

struct Paths {
  std::vector<Path> paths;  // [B, S]
  std::vector<int32_t> slots;
  int64_t longest = 0;

  explicit Paths(const AttentionCall& call) {
    const int64_t rows = call.batch * call.rows;
    std::vector<size_t> begins;
    for (int64_t row = 0; row < rows; ++row) {
      begins.push_back(slots.size());
      const int64_t first = call.first == nullptr ? 0 : std::max<int64_t>(call.first[row], 0);
      paths.push_back(path_of(call.visible + row * call.columns, call.columns,
                              call.lengths[row / call.rows], first, slots));
      longest = std::max(longest, paths.back().end);
    }
    for (size_t row = 0; row < paths.size(); ++row) paths[row].slots = slots.data() + begins[row];
  }
};

// ---- pieces

// A thread's own memory, kept from call to call, at the beginning of a cache line.
float* scratch_of(const AttentionPlan& plan) {
  const int64_t rows = plan.piece_rows * plan.group, width = padded(plan.call->dim);
  // as attention_kernel.h divides it
  const int64_t scores = kChunk + kLanes, marks = 6 * plan.piece_rows + rows / 4 + 1;
  const int64_t floats = rows * (3 * width + scores + 2) + 5 * scores + marks + kLineBytes;
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) {
    memory = std::vector<float>(static_cast<size_t>(floats));
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (kLineBytes - address % kLineBytes) % kLineBytes / sizeof(float);
}

AttentionPlan plan_of(const AttentionCall& call, const Paths& paths) {
  AttentionPlan plan;
  plan.call = &call;
  plan.paths = paths.paths.data();
  plan.group = call.heads / call.kv_heads;
  plan.row_pieces = std::max<int64_t>(1, divided_up(call.rows, kMaxPieceRows / plan.group));
  plan.piece_rows = divided_up(call.rows, plan.row_pieces);
  plan.chunks = divided_up(paths.longest, kChunk);
  const int64_t pieces = call.batch * call.kv_heads * plan.row_pieces;
  if (pieces < kManyPieces) {
    const int64_t wanted = divided_up(kManyPieces, pieces);
    plan.chunk_pieces = std::max<int64_t>(1, std::min(wanted, plan.chunks / 2));
  }
  plan.piece_chunks = std::max<int64_t>(1, divided_up(plan.chunks, plan.chunk_pieces));
  plan.writes_first = plan.row_pieces * plan.chunk_pieces > 1;
  return plan;
}

struct OneThread {
  template <typename Body>
  void parallel_for(size_t total, const Body& body) const {
    for (size_t i = 0; i < total; ++i) body(i);
  }
};

// Runs a piece with a thread's memory; where there is none, no exception may leave it.
template <typename Body>
void with_scratch(const AttentionPlan& plan, std::atomic<bool>& failed, const Body& body) noexcept {
  try {
    body(scratch_of(plan));
  } catch (const std::exception&) {
    failed = true;
  }
}

template <typename Threads>
void run_pieces(const AttentionPlan& plan, const AttentionKernels& kernels,
                const Threads& threads) {
  const AttentionCall& call = *plan.call;
  const int64_t heads = call.kv_heads, lanes = call.batch * heads;
  std::atomic<bool> failed{false};
  if (plan.writes_first) {
    threads.parallel_for(static_cast<size_t>(lanes), [&](size_t i) {
      const int64_t lane = static_cast<int64_t>(i);
      kernels.write(plan, lane / heads, lane % heads);
    });
  }
  const int64_t by_lane = plan.row_pieces * plan.chunk_pieces;
  threads.parallel_for(static_cast<size_t>(lanes * by_lane), [&](size_t i) {
    const int64_t lane = static_cast<int64_t>(i) / by_lane, piece = static_cast<int64_t>(i) % by_lane;
    with_scratch(plan, failed, [&](float* scratch) {
      kernels.attend(plan, lane / heads, lane % heads, piece / plan.chunk_pieces,
                     piece % plan.chunk_pieces, scratch);
    });
  });
  if (plan.chunk_pieces > 1) {
    threads.parallel_for(static_cast<size_t>(lanes * call.rows), [&](size_t i) {
      const int64_t lane = static_cast<int64_t>(i) / call.rows;
      with_scratch(plan, failed, [&](float* scratch) {
        kernels.combine(plan, lane / heads, lane % heads, static_cast<int64_t>(i) % call.rows,
                        scratch);
      });
    });
  }
  if (failed) throw std::bad_alloc();
}

template <typename Threads>
void attend(const AttentionCall& call, const AttentionKernels& kernels, const Threads& threads) {
  const Paths paths(call);
  AttentionPlan plan = plan_of(call, paths);
  // Kept from call to call; each chunk of a path is written before it is read
  thread_local std::vector<Partial> partials;
  thread_local std::vector<float> sums;
  if (plan.chunk_pieces > 1) {
    const int64_t places = call.batch * call.rows * call.heads * plan.chunks;
    const auto num_sums = static_cast<size_t>(places * padded(call.dim));
    if (partials.size() < static_cast<size_t>(places)) partials.resize(static_cast<size_t>(places));
    if (sums.size() < num_sums) sums.resize(num_sums);
    plan.partials = partials.data();
    plan.sums = sums.data();
  }
  if (call.rows * call.heads * call.dim * paths.longest < kSmallWork) {
    run_pieces(plan, kernels, OneThread{});
  } else {
    run_pieces(plan, kernels, threads);
  }
}

// Whether there is a byte that is no bool: one is neither seen nor not seen.
bool has_other_bytes(const uint8_t* bytes, int64_t count) {
  uint8_t all = 0;
  for (int64_t i = 0; i < count; ++i) all |= bytes[i];
  return all > 1;
}

// GraphError for indices that lead out of the caches.
void check_indices(const AttentionCall& call) {
  if (has_other_bytes(call.visible, call.batch * call.rows * call.columns)) {
    throw GraphError("what rows see has a byte that is neither 0 nor 1");
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t start = call.write_indices[b], length = call.lengths[b];
    if (start < 0 || start > call.slots - call.key_rows) {
      throw GraphError("rows from slot " + std::to_string(start) + " on go behind a cache of " +
                       std::to_string(call.slots));
    }
    if (length < 0 || length > call.slots) {
      throw GraphError("no " + std::to_string(length) + " rows in a cache of " +
                       std::to_string(call.slots));
    }
    for (int64_t row = b * call.rows; row < (b + 1) * call.rows; ++row) {
      const int64_t within = std::min(call.columns, call.slots - length);
      const uint8_t* behind = call.visible + row * call.columns + within;
      if (std::memchr(behind, 1, static_cast<size_t>(call.columns - within)) != nullptr) {
        throw GraphError("a row sees a slot behind a cache of " + std::to_string(call.slots));
      }
    }
  }
}

// ---- the operators, one per type of the caches

struct Float32Cache {
  static constexpr const char* name = "TreeAttention";
  static constexpr CacheType type = CacheType::kFloat32;
  static constexpr ElementType element = kFloat;
  static constexpr int64_t bytes = 4, extra = 0;
};
struct Float16Cache {
  static constexpr const char* name = "TreeAttentionFloat16";
  static constexpr CacheType type = CacheType::kFloat16;
  static constexpr ElementType element = kFloat16;
  static constexpr int64_t bytes = 2, extra = 0;
};
struct Int8Cache {
  static constexpr const char* name = "TreeAttentionInt8";
  static constexpr CacheType type = CacheType::kInt8;
  static constexpr ElementType element = kInt8;
  static constexpr int64_t bytes = 1, extra = kScaleBytes;
};

template <typename Cache>
class TreeAttention {
 public:
  static constexpr const char* name = Cache::name;

  // q [B, S, heads * D], k and v [B, R, kv_heads * D], past_key and past_value [B, kv_heads, C, D]
  // (int8: D + 4), write_indices [B], lengths [B], visible [B, S, V], first [B, S] and, to rotate
  // q and k, cos and sin [B, R, rotary / 2]: as in AttentionCall. Before that the heads of q and k
  // are normed, where there are weights for it: q_norm and k_norm [D].
  static const std::vector<Port>& inputs() {
    static const std::vector<Port> ports = {
        {kFloat},         {kFloat}, {kFloat}, {Cache::element}, {Cache::element}, {kInt64},
        {kInt64},         {kBool},  {kInt64}, {kFloat, kOptional}, {kFloat, kOptional},
        {kFloat, kOptional}, {kFloat, kOptional}};
    return ports;
  }
  // out [B, S, heads * D], and the caches: the same memory as the past ones where it is bound so,
  // otherwise copies.
  static const std::vector<Port>& outputs() {
    static const std::vector<Port> ports = {{kFloat}, {Cache::element}, {Cache::element}};
    return ports;
  }

  explicit TreeAttention(const Info& info)
      : heads_(info.integer("num_heads")),
        kv_heads_(info.integer("kv_num_heads")),
        scale_(info.real("scale")),
        norm_epsilon_(info.real_or("norm_epsilon", 0.0f)) {
    if (heads_ < 1 || kv_heads_ < 1 || heads_ % kv_heads_ != 0 ||
        heads_ / kv_heads_ > kMaxPieceRows || !(scale_ > 0)) {
      throw GraphError("no kernel for these heads or this scale");
    }
  }

  void compute(const Context& context) const {
    const auto q = context.input<float>(0), k = context.input<float>(1);
    const auto v = context.input<float>(2);
    const auto past_keys = context.input<uint8_t>(3), past_values = context.input<uint8_t>(4);
    const auto write_indices = context.input<int64_t>(5), lengths = context.input<int64_t>(6);
    const auto visible = context.input<uint8_t>(7);
    const auto first = context.input<int64_t>(8);
    const auto cos = optional(context, 9), sin = optional(context, 10);
    const auto q_norm = optional(context, 11), k_norm = optional(context, 12);
    check(q.dims.size() == 3 && k.dims.size() == 3, "rows of queries and keys");
    AttentionCall call;
    call.batch = q.dims[0];
    call.rows = q.dims[1];
    call.key_rows = k.dims[1];
    call.heads = heads_;
    call.kv_heads = kv_heads_;
    call.dim = q.dims[2] / heads_;
    call.cache_type = Cache::type;
    call.scale = scale_;
    check(call.dim >= 1 && call.dim <= kMaxHeadDim, "heads of at most 512 elements");
    check(q.dims[2] == heads_ * call.dim && call.key_rows >= call.rows, "a key for each query");
    check(k.dims == Dims({call.batch, call.key_rows, kv_heads_ * call.dim}), "keys as wide as it says");
    check(v.dims == k.dims, "as many values as keys");
    check(past_keys.dims.size() == 4, "a cache of keys");
    call.slots = past_keys.dims[2];
    const Dims cache_dims = {call.batch, kv_heads_, call.slots, call.dim + Cache::extra};
    check(past_keys.dims == cache_dims && past_values.dims == cache_dims, "caches of its heads");
    check(write_indices.dims == Dims({call.batch}) && lengths.dims == Dims({call.batch}),
          "an index and a length for each sequence");
    check(visible.dims.size() == 3 && visible.dims[0] == call.batch && visible.dims[1] == call.rows,
          "what each row sees");
    check(first.dims == Dims({call.batch, call.rows}), "the first position of each row");
    call.columns = visible.dims[2];
    if (cos) {
      check(cos.dims.size() == 3 && cos.dims == sin.dims && cos.dims[0] == call.batch &&
                cos.dims[1] == call.key_rows && 2 * cos.dims[2] <= call.dim,
            "a rotation for each key");
      call.rotary = 2 * cos.dims[2];
      call.cos = cos.data;
      call.sin = sin.data;
    }
    call.q = q.data;
    call.k = k.data;
    call.v = v.data;
    call.write_indices = write_indices.data;
    call.lengths = lengths.data;
    call.visible = visible.data;
    call.first = first.data;
    check_indices(call);
    call.out = context.output<float>(0, q.dims).data;
    call.keys = cache_of(context, 1, past_keys);
    call.values = cache_of(context, 2, past_values);
    if (call.batch * call.key_rows == 0) return;
    if (q_norm || k_norm) {
      check(q_norm.dims == Dims({call.dim}) && k_norm.dims == q_norm.dims,
            "weights for the norms of queries and of keys");
      norm_heads(context, q_norm.data, k_norm.data, call);
    }
    attend(call, *level().attention, context);
  }

 private:
  // An input at the end that older graphs do not have.
  static Tensor<const float> optional(const Context& context, size_t index) {
    return index < context.num_inputs() ? context.input<float>(index) : Tensor<const float>{};
  }

  // Lets a call read normed queries and keys, from memory that is kept from call to call.
  void norm_heads(const Context& context, const float* q_norm, const float* k_norm,
                  AttentionCall& call) const {
    const int64_t q_rows = call.batch * call.rows, k_rows = call.batch * call.key_rows;
    const int64_t q_width = call.heads * call.dim, k_width = call.kv_heads * call.dim;
    thread_local std::vector<float> memory;
    const auto needed = static_cast<size_t>(q_rows * q_width + k_rows * k_width);
    if (memory.size() < needed) memory.resize(needed);
    float *q = memory.data(), *k = q + q_rows * q_width;
    const RowKernels& kernels = *level().rows;
    const auto norm = [&](const float* x, int64_t count, const float* weight, float* out) {
      for (int64_t i = 0; i < count; i += call.dim) {
        kernels.norm(x + i, weight, norm_epsilon_, call.dim, out + i);
      }
    };
    // k has as many rows as q, or more
    const auto row = [&](size_t i) {
      const int64_t r = static_cast<int64_t>(i);
      if (r < q_rows) norm(call.q + r * q_width, q_width, q_norm, q + r * q_width);
      norm(call.k + r * k_width, k_width, k_norm, k + r * k_width);
    };
    if (static_cast<int64_t>(needed) < kSmallWork) {
      for (int64_t r = 0; r < k_rows; ++r) row(static_cast<size_t>(r));
    } else {
      context.parallel_for(static_cast<size_t>(k_rows), row);
    }
    call.q = q;
    call.k = k;
  }

  static void check(bool holds, const char* what) {
    if (!holds) throw GraphError(std::string("it needs ") + what);
  }

  static void* cache_of(const Context& context, size_t index, const Tensor<const uint8_t>& past) {
    const auto present = context.output<uint8_t>(index, past.dims);
    if (present.data == nullptr) throw GraphError("it needs a cache to write to");
    if (present.data != past.data) {
      std::memcpy(present.data, past.data, static_cast<size_t>(past.count() * Cache::bytes));
    }
    return present.data;
  }

  int64_t heads_, kv_heads_;
  float scale_, norm_epsilon_;
};

// ---- the proof

// A call of two sequences over two chunks, the rows of which are small trees; one row fills up.
struct ProofCall {
  static constexpr int64_t kSlots = kChunk + 40;
  AttentionCall call;
  std::vector<float> q, k, v, cos, sin, out;
  std::vector<uint8_t> keys, values, visible;
  std::vector<int64_t> write_indices, lengths, first;

  ProofCall(CacheType type, int64_t rows, int64_t dim) {
    call.batch = 2;
    call.rows = call.key_rows = call.columns = rows;
    call.heads = 6;
    call.kv_heads = 2;
    call.dim = dim;
    call.slots = kSlots;
    call.rotary = dim / 2 * 2;
    call.cache_type = type;
    call.scale = 0.2f;
    fill();
  }

  void fill() {
    ProofNumbers numbers;
    const int64_t tokens = call.batch * call.rows;
    q = numbers.reals(tokens * call.heads * call.dim);
    k = numbers.reals(tokens * call.kv_heads * call.dim);
    v = numbers.reals(tokens * call.kv_heads * call.dim);
    cos = numbers.reals(tokens * call.rotary / 2);
    sin = numbers.reals(tokens * call.rotary / 2);
    out.assign(q.size(), 0.0f);
    lengths = {kChunk + 30 - call.rows, 5};
    write_indices = lengths;
    first = std::vector<int64_t>(static_cast<size_t>(tokens), 3);
    visible.assign(static_cast<size_t>(tokens * call.columns), 0);
    for (int64_t row = 0; row < tokens; ++row) {
      const int64_t own = row % call.rows;
      for (int64_t other = 0; other <= own; ++other) {
        const bool seen = other == own || numbers.next() % 2 == 0;
        if (row != tokens - 1) visible[static_cast<size_t>(row * call.columns + other)] = seen;
      }
    }
    fill_caches(numbers);
  }

  // Patterns of bits that are numbers in all types.
  void fill_caches(ProofNumbers& numbers) {
    const int64_t bytes = call.cache_type == CacheType::kFloat32   ? 4 * call.dim
                          : call.cache_type == CacheType::kFloat16 ? 2 * call.dim
                                                                   : call.dim + kScaleBytes;
    keys.assign(static_cast<size_t>(call.batch * call.kv_heads * kSlots * bytes), 0);
    for (uint8_t& byte : keys) byte = static_cast<uint8_t>(numbers.next() % 0x3f);
    values = keys;
  }

  void run(const AttentionKernels& kernels) {
    call.q = q.data();
    call.k = k.data();
    call.v = v.data();
    call.cos = cos.data();
    call.sin = sin.data();
    call.out = out.data();
    call.keys = keys.data();
    call.values = values.data();
    call.visible = visible.data();
    call.lengths = lengths.data();
    call.write_indices = write_indices.data();
    call.first = first.data();
    edgespec::attend(kernels, call);
  }

  bool same_bits(const ProofCall& other) const {
    return std::memcmp(out.data(), other.out.data(), out.size() * sizeof(float)) == 0 &&
           keys == other.keys && values == other.values;
  }
};

}  // namespace

void attend(const AttentionKernels& kernels, const AttentionCall& call) {
  attend(call, kernels, OneThread{});
}

bool proves_itself(const AttentionKernels& kernels) {
  for (CacheType type : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8}) {
    for (int64_t rows : {1, 6}) {
      ProofCall found(type, rows, 38), wanted(type, rows, 38);
      found.run(kernels);
      wanted.run(attention_portable);
      if (!found.same_bits(wanted)) return false;
    }
  }
  return true;
}

std::vector<const OrtCustomOp*> attention_operators() {
  static const Operator<TreeAttention<Float32Cache>> float32;
  static const Operator<TreeAttention<Float16Cache>> float16;
  static const Operator<TreeAttention<Int8Cache>> int8;
  return {&float32, &float16, &int8};
}

}  // namespace edgespec
