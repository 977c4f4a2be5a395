// The gated delta net of one key head. A level of instructions gives vectors of any width, its file
// includes this one, and nothing here is shared between levels.
//
// `L` is a level: `F`, `kWidth` floats; `kVectors`, of how many the columns of a state are at once,
// and `kWideVectors` where each state is read once; loads, stores and arithmetic, each lane for
// itself. Columns do not depend on each other, so that the width decides no bit. What is added up
// within a row is added as 16 sums, of the elements mod 16.
#include <cmath>

#include "recurrence.h"
#include "row_math.h"

namespace edgespec {
namespace {

constexpr float kMinLogDecay = -60.0f;  // exp(-60) is 9e-27; less would be slow, and change nothing

// ---- rows

EDGESPEC_INLINE void silu(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= sigmoid(x[i]);
}

EDGESPEC_INLINE float inverse_rms(const float* x, int64_t count, float epsilon) {
  return 1.0f / __builtin_sqrtf(dot_of(x, x, count) / static_cast<float>(count) + epsilon);
}

EDGESPEC_INLINE void to_unit(float* x, int64_t count, float epsilon, float scale) {
  const float inverse = inverse_rms(x, count, epsilon);
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] * inverse * scale;
}

// SiLU of the convolution of some channels, from `first` on.
EDGESPEC_INLINE void convolve(const DeltaNetCall& call, int64_t sequence, const int32_t* window,
                              int64_t first, int64_t count, float* out) {
  const int64_t channels = call.channels();
  for (int64_t back = 0; back < call.kernel; ++back) {
    const int64_t at = window[back];
    const float* x =
        (at >= 0 ? call.mixed + (sequence * call.rows + at) * channels
                 : call.conv_state + (sequence * (call.kernel - 1) - 1 - at) * channels) +
        first;
    const float* tap = call.taps + (call.kernel - 1 - back) * channels + first;
    if (back == 0) {
      for (int64_t i = 0; i < count; ++i) out[i] = x[i] * tap[i];
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = __builtin_fmaf(x[i], tap[i], out[i]);
    }
  }
  silu(out, count);
}

// The log of a decay; in double precision, where libraries agree once it is rounded.
EDGESPEC_INLINE float log_decay(float x, float speed) {
  const double wide = static_cast<double>(x);
  const double step = wide > 0 ? wide + log1p(exp(-wide)) : log1p(exp(wide));
  return static_cast<float>(step) * speed;
}

EDGESPEC_INLINE float decay_of(float log) {
  const float limited = log < kMinLogDecay ? kMinLogDecay : log;
  return static_cast<float>(exp(static_cast<double>(limited)));
}

// Whether a row changes nothing: rows of zeros fill up, and must not change the sign of a zero.
EDGESPEC_INLINE bool is_nothing(const float* key, int64_t count, float log) {
  if (log != 0.0f) return false;
  bool zero = true;
  for (int64_t i = 0; i < count; ++i) zero = zero && key[i] == 0.0f;
  return zero;
}

// ---- states

// A row as a state takes it in: the columns of its update begin at those that are worked on.
struct Update {
  const float* key = nullptr;
  const float* update = nullptr;
  float decay = 1.0f;
  bool nothing = false;
};

// A row that reads a state.
struct Reader {
  const float* key = nullptr;
  const float* query = nullptr;
  float* value = nullptr;  // becomes the update
  float* out = nullptr;
  float decay = 1.0f, rate = 0.0f, alike = 0.0f;  // alike: q'k
};

// Columns of a state, [dk] rows of them.
struct Columns {
  float* data = nullptr;
  int64_t stride = 0;
};

template <class L, int V>
struct Vectors {
  typename L::F v[V];
};

// Goes once over V vectors of columns: takes a row in, if any, and writes what comes out; lets
// another row read that, if any.
template <class L, int V, bool kTakes, bool kReads>
EDGESPEC_INLINE void sweep(int64_t key_dim, const Columns& from, const Columns& to,
                           const Update& update, const Reader& reader) {
  using F = typename L::F;
  F u[V], known[V], read[V];
  const F decay = L::all(update.decay);
  for (int v = 0; v < V; ++v) {
    if constexpr (kTakes) u[v] = L::load(update.update + v * L::kWidth);
    known[v] = read[v] = L::all(0.0f);
  }
  const float* source = from.data;
  float* target = to.data;
  for (int64_t i = 0; i < key_dim; ++i, source += from.stride, target += to.stride) {
    F taken, key, query;
    if constexpr (kTakes) taken = L::all(update.key[i]);
    if constexpr (kReads) key = L::all(reader.key[i]), query = L::all(reader.query[i]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      F m = L::load(source + v * L::kWidth);
      if constexpr (kTakes) {
        m = L::fma(taken, u[v], L::mul(decay, m));
        L::store(target + v * L::kWidth, m);
      }
      if constexpr (kReads) {
        known[v] = L::fma(key, m, known[v]);
        read[v] = L::fma(query, m, read[v]);
      }
    }
  }
  if constexpr (kReads) {
    const F d = L::all(reader.decay), minus_d = L::all(-reader.decay);
    const F rate = L::all(reader.rate), alike = L::all(reader.alike);
    for (int v = 0; v < V; ++v) {
      float* value = reader.value + v * L::kWidth;
      const F found = L::mul(rate, L::fma(minus_d, known[v], L::load(value)));
      L::store(value, found);
      L::store(reader.out + v * L::kWidth, L::fma(alike, found, L::mul(d, read[v])));
    }
  }
}

template <class L, int V>
EDGESPEC_INLINE void copy_columns(int64_t key_dim, const Columns& from, const Columns& to) {
  if (from.data == to.data) return;
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int v = 0; v < V; ++v) {
      const int64_t at = v * L::kWidth;
      L::store(to.data + i * to.stride + at, L::load(from.data + i * from.stride + at));
    }
  }
}

template <class L, int V>
EDGESPEC_INLINE void take_and_read(int64_t key_dim, const Columns& from, const Columns& to,
                                   const Update& update, const Reader& reader) {
  if (update.nothing) {
    copy_columns<L, V>(key_dim, from, to);
    sweep<L, V, false, true>(key_dim, to, to, update, reader);
  } else {
    sweep<L, V, true, true>(key_dim, from, to, update, reader);
  }
}

// What the rows of one value head are made of, by row of the call.
struct HeadRows {
  const DeltaStep* steps = nullptr;
  Reader* readers = nullptr;   // [S]
  const Update* updates = nullptr;  // [S], the same rows
  const Update* taken = nullptr;  // committed rows that change something
  int64_t num_taken = 0;
  float* buffers = nullptr;  // [buffers, dk, kStateColumns]
};

template <class L, int V>
void run_columns(const DeltaNetCall& call, const HeadRows& head, const float* state, float* present,
                 int64_t column) {
  constexpr int64_t kColumns = V * L::kWidth;
  const int64_t dk = call.key_dim, dv = call.value_dim;
  const Columns before = {const_cast<float*>(state) + column, dv}, now = {present + column, dv};
  const auto buffer = [&](int32_t index) {
    return index < 0 ? now : Columns{head.buffers + index * dk * kStateColumns, kColumns};
  };
  const auto reader = [&](int32_t row) {
    Reader found = head.readers[row];
    found.value += column;
    found.out += column;
    return found;
  };
  const auto shifted = [&](Update found) {
    found.update += column;
    return found;
  };
  // Where several rows are taken in, their columns stand side by side meanwhile: rows of a state
  // that are far apart drive each other out of the first cache.
  const Reader first = reader(head.steps[0].row);
  Columns from = before;
  for (int64_t i = 0; i + 1 < head.num_taken; ++i) {
    const Columns between = {head.buffers, kColumns};
    sweep<L, V, true, false>(dk, from, between, shifted(head.taken[i]), first);
    from = between;
  }
  if (head.num_taken == 0) {
    copy_columns<L, V>(dk, before, now);
    sweep<L, V, false, true>(dk, now, now, Update{}, first);
  } else {
    sweep<L, V, true, true>(dk, from, now, shifted(head.taken[head.num_taken - 1]), first);
  }
  for (int64_t i = 1; i < call.rows; ++i) {
    const DeltaStep& step = head.steps[i];
    if (step.takes_parent) {
      take_and_read<L, V>(dk, buffer(step.from), buffer(step.to),
                          shifted(head.updates[step.parent]), reader(step.row));
    } else {
      const Columns same = buffer(step.from);
      sweep<L, V, false, true>(dk, same, same, Update{}, reader(step.row));
    }
  }
}

// One column after the other, where no vector fits.
struct OneColumn {
  using F = float;
  static constexpr int kWidth = 1;
  static EDGESPEC_INLINE F all(float value) { return value; }
  static EDGESPEC_INLINE F load(const float* p) { return *p; }
  static EDGESPEC_INLINE void store(float* p, F x) { *p = x; }
  static EDGESPEC_INLINE F mul(F a, F b) { return a * b; }
  static EDGESPEC_INLINE F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
};

template <class L>
void run_head(const DeltaNetCall& call, const HeadRows& head, const float* state, float* present) {
  static_assert(L::kVectors * L::kWidth <= kStateColumns);
  const int64_t dv = call.value_dim;
  int64_t column = 0;
  if (call.rows == 1 && head.num_taken <= 1) {
    constexpr int64_t kWide = L::kWideVectors * L::kWidth;
    for (; column + kWide <= dv; column += kWide) {
      run_columns<L, L::kWideVectors>(call, head, state, present, column);
    }
  }
  constexpr int64_t kColumns = L::kVectors * L::kWidth;
  for (; column + kColumns <= dv; column += kColumns) {
    run_columns<L, L::kVectors>(call, head, state, present, column);
  }
  for (; column + L::kWidth <= dv; column += L::kWidth) {
    run_columns<L, 1>(call, head, state, present, column);
  }
  for (; column < dv; ++column) run_columns<OneColumn, 1>(call, head, state, present, column);
}

// ---- a piece

template <class T>
EDGESPEC_INLINE T* part_of(float*& scratch, int64_t count) {
  static_assert(sizeof(T) % sizeof(float) == 0);
  T* found = reinterpret_cast<T*>(scratch);
  scratch += (count * static_cast<int64_t>(sizeof(T) / sizeof(float)) + 15) / 16 * 16;
  return found;
}

template <class L>
void run_piece(const DeltaNetPlan& plan, int64_t sequence, int64_t key_head, float* scratch) {
  const DeltaNetCall& call = *plan.call;
  const int64_t rows = call.rows, dk = call.key_dim, dv = call.value_dim, width = call.width();
  float* queries = part_of<float>(scratch, rows * dk);
  float* alike = part_of<float>(scratch, rows);
  Reader* readers = part_of<Reader>(scratch, rows);
  Update* updates = part_of<Update>(scratch, rows);
  Update* taken = part_of<Update>(scratch, call.committed);
  float* buffers = scratch;
  float* left = call.left + sequence * rows * width;
  const float* committed = call.taken + sequence * call.committed * width;
  const int64_t first_key = key_head * dk, group = call.group();
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* window = plan.windows + (sequence * rows + row) * call.kernel;
    float* query = queries + row * dk;
    float* key = left + row * width + first_key;
    convolve(call, sequence, window, first_key, dk, query);
    convolve(call, sequence, window, call.keys() + first_key, dk, key);
    convolve(call, sequence, window, 2 * call.keys() + key_head * group * dv, group * dv,
             left + row * width + call.keys() + key_head * group * dv);
    to_unit(query, dk, call.unit_epsilon, call.q_scale);
    to_unit(key, dk, call.unit_epsilon, call.k_scale);
    alike[row] = dot_of(query, key, dk);
  }
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    HeadRows of;
    of.steps = plan.steps + sequence * rows;
    of.readers = readers;
    of.updates = updates;
    of.taken = taken;
    of.buffers = buffers;
    for (int64_t i = 0; i < call.committed; ++i) {
      const float* row = committed + i * width;
      const float log = row[call.keys() + call.values() + head];
      if (is_nothing(row + first_key, dk, log)) continue;
      taken[of.num_taken++] = {row + first_key, row + call.keys() + head * dv, decay_of(log), false};
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = sequence * rows + row, own = at * call.value_heads + head;
      float* there = left + row * width;
      const float log = log_decay(call.decay[own] + call.bias[head], call.speed[head]);
      there[call.keys() + call.values() + head] = log;
      const float decay = decay_of(log);
      float* key = there + first_key;
      float* value = there + call.keys() + head * dv;
      updates[row] = {key, value, decay, is_nothing(key, dk, log)};
      float* out = call.out + at * call.values() + head * dv;
      readers[row] = {key,   queries + row * dk,         value,     out,
                      decay, sigmoid(call.rate[own]), alike[row]};
    }
    const int64_t state = (sequence * call.value_heads + head) * dk * dv;
    run_head<L>(call, of, call.state + state, call.present + state);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = (sequence * rows + row) * call.values() + head * dv;
      float* out = call.out + at;
      const float* gate = call.gate + at;
      const float inverse = inverse_rms(out, dv, call.norm_epsilon);
      for (int64_t i = 0; i < dv; ++i) {
        out[i] = out[i] * inverse * call.norm[i] * (gate[i] * sigmoid(gate[i]));
      }
    }
  }
}

}  // namespace
}  // namespace edgespec
