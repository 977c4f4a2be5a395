// The attention of one piece of a call, over vectors of 16 floats. A level of instructions gives
// the vectors, its file includes this one, and nothing here is shared between levels.
//
// `L` is a level: `F`, 16 floats; `kTile`, of how many F `sums` gives the sums at once; loads,
// stores and arithmetic, each lane for itself.
#include <string.h>

#include "attention.h"
#include "inlining.h"

namespace edgespec {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kRowScores = kChunk + kLanes;  // a tile may write behind the chunk
constexpr int64_t kManyRows = 8;   // more rows than that read keys from the first-level cache
constexpr int64_t kUnrolled = 8;   // vectors of a key that are multiplied without a loop
// The rows of a piece that come first wait for memory: what they read is on its way before.
constexpr int64_t kAhead = 8192;  // bytes
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kInfinity = __builtin_inff();

// Whether a level has registers for tiles that gain from longer runs: narrower ones lose by them.
template <class L>
constexpr bool kLongRuns = L::kTile >= 16;
template <class L>
constexpr int64_t kBlockKeys = kLongRuns<L> ? 64 : 32;  // that fit into the first-level cache

EDGESPEC_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
EDGESPEC_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
EDGESPEC_INLINE int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// 2^x for x <= 0; 0 below -126. The polynomial is off by 2e-9, all with rounding by 8e-8.
template <class L>
EDGESPEC_INLINE typename L::F exp2_of(typename L::F x) {
  using F = typename L::F;
  const F magic = L::all(12582912.0f);                // 1.5 * 2^23: its last bit is 1
  const F clamped = L::larger(L::all(-126.0f), x);    // a NaN stays
  const F shifted = L::add(clamped, magic);
  const F f = L::sub(clamped, L::sub(shifted, magic));
  F y = L::all(0x1.41fbbcp-13f);
  y = L::fma(y, f, L::all(0x1.5f3e52p-10f));
  y = L::fma(y, f, L::all(0x1.3b2d4cp-7f));
  y = L::fma(y, f, L::all(0x1.c6aee8p-5f));
  y = L::fma(y, f, L::all(0x1.ebfbdcp-3f));
  y = L::fma(y, f, L::all(0x1.62e430p-1f));
  y = L::fma(y, f, L::all(1.0f));
  return L::zero_below(x, -126.0f, L::mul(y, L::power(shifted)));
}

template <class L>
EDGESPEC_INLINE float exp2_of_one(float x) {
  return L::first(exp2_of<L>(L::all(x)));
}

// ---- rows of a cache by type: floats, halves, or codes with a scale behind them

template <class T>
struct Row {
  static constexpr bool kScaled = false;
  static EDGESPEC_INLINE int64_t size(int64_t dim) { return dim; }
};

template <>
struct Row<int8_t> {
  static constexpr bool kScaled = true;
  static EDGESPEC_INLINE int64_t size(int64_t dim) { return dim + kScaleBytes; }
};

EDGESPEC_INLINE float scale_of(const int8_t* row, int64_t dim) {
  float scale;
  memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

template <class L, class T>
EDGESPEC_INLINE void store_row(const float* x, int64_t dim, T* row) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) L::store(row + d, L::load(x + d));
  if (d < dim) L::store_part(row + d, L::load_part(x + d, dim - d), dim - d);
}

// Codes from -127 to 127, rounded to nearest even; a row's scale is its own. A row with NaN or Inf
// has a scale that says so.
template <class L>
EDGESPEC_INLINE void store_row(const float* x, int64_t dim, int8_t* row) {
  float largest = 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = __builtin_fabsf(x[d]);
    largest = largest >= size ? largest : size;
    if (size != size) {
      largest = size;
      break;
    }
  }
  const float scale = largest / 127.0f;
  const bool usable = largest > 1e-30f && largest < kInfinity;
  const float inverse = usable ? 127.0f / largest : 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float magic = 12582912.0f;
    const float code = usable ? x[d] * inverse : 0.0f;
    row[d] = usable ? static_cast<int8_t>((code + magic) - magic) : static_cast<int8_t>(1);
  }
  const float stored = largest < kInfinity && !usable ? 0.0f : scale;
  memcpy(row + dim, &stored, sizeof stored);
}

// Rotates the halves of a head's first elements: cos x1 - sin x2, sin x1 + cos x2.
template <class L>
EDGESPEC_INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t rotary,
                            int64_t dim, float* out) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = min_of(kLanes, half - i);
    const auto x1 = L::load_part(x + i, n), x2 = L::load_part(x + half + i, n);
    const auto c = L::load_part(cos + i, n), s = L::load_part(sin + i, n);
    const auto zero = L::all(0.0f);
    L::store_part(out + i, L::fma(x1, c, L::sub(zero, L::mul(x2, s))), n);
    L::store_part(out + half + i, L::fma(x1, s, L::mul(x2, c)), n);
  }
  memcpy(out + rotary, x + rotary, static_cast<size_t>(dim - rotary) * sizeof(float));
}

template <class L, class T>
void write_rows(const AttentionPlan& plan, int64_t b, int64_t h) {
  const AttentionCall& call = *plan.call;
  const int64_t dim = call.dim, size = Row<T>::size(dim), half = call.rotary / 2;
  const int64_t first = (b * call.kv_heads + h) * call.slots + call.write_indices[b];
  T* keys = static_cast<T*>(call.keys) + first * size;
  T* values = static_cast<T*>(call.values) + first * size;
  float turned[kMaxHeadDim];
  for (int64_t r = 0; r < call.key_rows; ++r) {
    const int64_t row = b * call.key_rows + r;
    const float* k = call.k + (row * call.kv_heads + h) * dim;
    if (call.cos != nullptr) {
      rotate<L>(k, call.cos + row * half, call.sin + row * half, call.rotary, dim, turned);
      k = turned;
    }
    store_row<L>(k, dim, keys + r * size);
    store_row<L>(call.v + (row * call.kv_heads + h) * dim, dim, values + r * size);
  }
}

// ---- keys by position

// Where the row of a position stands: at its own place, or at that of `slots[position]`.
template <class T>
struct Keys {
  const T* base;
  int64_t size;  // of a row
  const int32_t* slots;

  EDGESPEC_INLINE const T* row(int64_t position) const {
    return base + (slots == nullptr ? position : static_cast<int64_t>(slots[position])) * size;
  }
};

// ---- scores

// sums += the products of a vector of R queries and K keys.
template <class L, class T, int R, bool kFirst>
EDGESPEC_INLINE void add_scores(const float* q, int64_t q_size, const T* const* key, int64_t d,
                                typename L::F* sums) {
  using F = typename L::F;
  constexpr int K = L::kTile / R;
  F query[R];
  for (int r = 0; r < R; ++r) query[r] = L::load(q + r * q_size + d);
  for (int k = 0; k < K; ++k) {
    if constexpr (kFirst) __builtin_prefetch(reinterpret_cast<const char*>(key[k] + d) + kAhead);
    const F x = L::load(key[k] + d);
    for (int r = 0; r < R; ++r) sums[r * K + k] = L::fma(query[r], x, sums[r * K + k]);
  }
}

// The products of R queries and K keys, R * K of them: `scores[r * kRowScores + k]`.
template <class L, class T, int R, bool kFirst>
EDGESPEC_INLINE void score_tile(const float* q, int64_t q_size, const Keys<T>& keys, int64_t from,
                                int64_t to, int64_t dim, float* scores) {
  using F = typename L::F;
  constexpr int K = L::kTile / R;
  const T* key[K];
  for (int k = 0; k < K; ++k) key[k] = keys.row(min_of(from + k, to - 1));
  F sums[R * K];
  for (int i = 0; i < R * K; ++i) sums[i] = L::all(0.0f);
  int64_t d = 0;
  if constexpr (kLongRuns<L>) {
    for (; d + kUnrolled * kLanes <= dim; d += kUnrolled * kLanes) {
      _Pragma("GCC unroll 8")
      for (int64_t i = 0; i < kUnrolled; ++i)
        add_scores<L, T, R, kFirst>(q, q_size, key, d + i * kLanes, sums);
    }
  }
  for (; d + kLanes <= dim; d += kLanes) add_scores<L, T, R, kFirst>(q, q_size, key, d, sums);
  if (d < dim) {
    for (int k = 0; k < K; ++k) {
      const F x = L::load_part(key[k] + d, dim - d);
      for (int r = 0; r < R; ++r)
        sums[r * K + k] = L::fma(L::load(q + r * q_size + d), x, sums[r * K + k]);
    }
  }
  L::template store_sums<R, K>(sums, scores, kRowScores);
}

template <class L, class T, int R, bool kFirst>
EDGESPEC_INLINE void score_rows(const float* q, int64_t q_size, const Keys<T>& keys, int64_t from,
                                int64_t to, int64_t dim, float* scores) {
  constexpr int K = L::kTile / R;
  for (int64_t j = from; j < to; j += K)
    score_tile<L, T, R, kFirst>(q, q_size, keys, j, to, dim, scores + j);
}

// The same of any number of queries that stand side by side.
template <class L, class T, bool kFirst = false>
EDGESPEC_INLINE void score(int64_t rows, const float* q, int64_t q_size, const Keys<T>& keys,
                           int64_t from, int64_t to, int64_t dim, float* scores) {
  int64_t r = 0;
  if constexpr (L::kTile >= 4)
    for (; r + 4 <= rows; r += 4)
      score_rows<L, T, 4, kFirst>(q + r * q_size, q_size, keys, from, to, dim, scores + r * kRowScores);
  if constexpr (L::kTile >= 2)
    for (; r + 2 <= rows; r += 2)
      score_rows<L, T, 2, kFirst>(q + r * q_size, q_size, keys, from, to, dim, scores + r * kRowScores);
  for (; r < rows; ++r)
    score_rows<L, T, 1, kFirst>(q + r * q_size, q_size, keys, from, to, dim, scores + r * kRowScores);
}

// ---- sums of values

// sums[r][d..] += p[r][j] * v[j][d..] for j from `from` to `to`; P vectors of each of R rows.
template <class L, class T, int R, int P, bool kFirst>
EDGESPEC_INLINE void weigh_panel(const float* p, const Keys<T>& values, int64_t from, int64_t to,
                                 int64_t d, float* sums, int64_t sums_size) {
  using F = typename L::F;
  F acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < P; ++i) acc[r][i] = L::load(sums + r * sums_size + d + i * kLanes);
  for (int64_t j = from; j < to; ++j) {
    const T* row = values.row(j) + d;
    F weight[R];
    for (int r = 0; r < R; ++r) weight[r] = L::all(p[r * kRowScores + j]);
    for (int i = 0; i < P; ++i) {
      if constexpr (kFirst)
        __builtin_prefetch(reinterpret_cast<const char*>(row + i * kLanes) + kAhead);
      const F x = L::load(row + i * kLanes);
      for (int r = 0; r < R; ++r) acc[r][i] = L::fma(weight[r], x, acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < P; ++i) L::store(sums + r * sums_size + d + i * kLanes, acc[r][i]);
}

template <class L, class T, int R>
EDGESPEC_INLINE void weigh_tail(const float* p, const Keys<T>& values, int64_t from, int64_t to,
                                int64_t d, int64_t left, float* sums, int64_t sums_size) {
  using F = typename L::F;
  F acc[R];
  for (int r = 0; r < R; ++r) acc[r] = L::load(sums + r * sums_size + d);
  for (int64_t j = from; j < to; ++j) {
    const F x = L::load_part(values.row(j) + d, left);
    for (int r = 0; r < R; ++r) acc[r] = L::fma(L::all(p[r * kRowScores + j]), x, acc[r]);
  }
  for (int r = 0; r < R; ++r) L::store(sums + r * sums_size + d, acc[r]);
}

template <class L, class T, int R, bool kFirst>
EDGESPEC_INLINE void weigh_rows(const float* p, const Keys<T>& values, int64_t from, int64_t to,
                                int64_t dim, float* sums, int64_t sums_size) {
  constexpr int P = L::kPanel / R;
  int64_t d = 0;
  for (; d + P * kLanes <= dim; d += P * kLanes)
    weigh_panel<L, T, R, P, kFirst>(p, values, from, to, d, sums, sums_size);
  for (; d + kLanes <= dim; d += kLanes)
    weigh_panel<L, T, R, 1, kFirst>(p, values, from, to, d, sums, sums_size);
  if (d < dim) weigh_tail<L, T, R>(p, values, from, to, d, dim - d, sums, sums_size);
}

template <class L, class T, bool kFirst = false>
EDGESPEC_INLINE void weigh(int64_t rows, const float* p, const Keys<T>& values, int64_t from,
                           int64_t to, int64_t dim, float* sums, int64_t sums_size) {
  if (from >= to) return;
  int64_t r = 0;
  if constexpr (L::kPanel >= 4)
    for (; r + 4 <= rows; r += 4)
      weigh_rows<L, T, 4, kFirst>(p + r * kRowScores, values, from, to, dim, sums + r * sums_size,
                          sums_size);
  if constexpr (L::kPanel >= 2)
    for (; r + 2 <= rows; r += 2)
      weigh_rows<L, T, 2, kFirst>(p + r * kRowScores, values, from, to, dim, sums + r * sums_size,
                          sums_size);
  for (; r < rows; ++r)
    weigh_rows<L, T, 1, kFirst>(p + r * kRowScores, values, from, to, dim, sums + r * sums_size,
                        sums_size);
}

// ---- a piece

// What a row sees of a chunk, counted from the chunk's first position: nothing before `from`;
// before `straight` position and slot go side by side; nothing from `to` on.
struct Seen {
  int64_t from, straight, to;
};

EDGESPEC_INLINE Seen seen_of(const Path& path, int64_t base) {
  const int64_t from = max_of(path.first, base) - base;
  const int64_t to = min_of(path.end, base + kChunk) - base;
  if (from >= to) return {0, 0, 0};
  return {from, max_of(min_of(path.straight - base, to), from), to};
}

template <class L>
EDGESPEC_INLINE Partial weights_of(const Seen& seen, const float* scales, float* scores) {
  using F = typename L::F;
  const int64_t begin = seen.from / kLanes * kLanes;
  F largest = L::all(-kInfinity);
  for (int64_t j = begin; j < seen.to; j += kLanes) {
    F x = L::load(scores + j);
    if (scales != nullptr) x = L::mul(x, L::load(scales + j));
    x = L::between(x, seen.from - j, seen.to - j, -kInfinity);
    L::store(scores + j, x);
    largest = L::larger(largest, x);
  }
  const float top = L::largest_lane(largest);
  F sums = L::all(0.0f);
  for (int64_t j = begin; j < seen.to; j += kLanes) {
    const F p = exp2_of<L>(L::sub(L::load(scores + j), L::all(top)));
    L::store(scores + j, p);
    sums = L::add(sums, p);
  }
  return {top, L::sum_of_lanes(sums)};
}

// A row's sums of the chunks so far, and those of one chunk more.
template <class L>
EDGESPEC_INLINE void join(Partial* so_far, float* sums, Partial chunk,
                          const float* more, int64_t size, bool begun) {
  if (!begun) {
    *so_far = chunk;
    memcpy(sums, more, static_cast<size_t>(size) * sizeof(float));
    return;
  }
  const float top = so_far->largest > chunk.largest ? so_far->largest : chunk.largest;
  const float a = exp2_of_one<L>(so_far->largest - top), b = exp2_of_one<L>(chunk.largest - top);
  so_far->largest = top;
  so_far->sum = __builtin_fmaf(so_far->sum, a, chunk.sum * b);
  const auto old_share = L::all(a), new_share = L::all(b);
  for (int64_t d = 0; d < size; d += kLanes) {
    const auto new_part = L::mul(L::load(more + d), new_share);
    L::store(sums + d, L::fma(L::load(sums + d), old_share, new_part));
  }
}

// Divided by the sum of weights; minus zero becomes zero, for its sign depends on keys of weight
// zero.
template <class L>
EDGESPEC_INLINE void put_out(const float* sums, float sum, int64_t dim, float* out) {
  const auto inverse = L::all(1.0f / sum), zero = L::all(0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const auto x = L::add(L::mul(L::load(sums + d), inverse), zero);
    if (d + kLanes <= dim)
      L::store(out + d, x);
    else
      L::store_part(out + d, x, dim - d);
  }
}

template <class L, class T>
struct Piece {
  const AttentionPlan& plan;
  const AttentionCall& call;
  int64_t b, h, first_row, tokens, group, rows, dim, width;  // rows: tokens * group
  const Path* paths;                                // of the tokens
  const T *keys, *values;                                    // of the KV head
  float *q, *scores, *sums, *totals, *key_scales, *value_scales, *own_scales;
  Partial* so_far;
  unsigned char* begun;
  Seen* seen;

  EDGESPEC_INLINE Piece(const AttentionPlan& of, int64_t sequence, int64_t kv_head,
                        int64_t tile, float* scratch)
      : plan(of), call(*of.call), b(sequence), h(kv_head) {
    first_row = tile * plan.piece_rows;
    tokens = min_of(plan.piece_rows, call.rows - first_row);
    group = plan.group;
    rows = tokens * group;
    dim = call.dim;
    width = padded(dim);
    paths = plan.paths + b * call.rows + first_row;
    const int64_t head = (b * call.kv_heads + h) * call.slots * Row<T>::size(dim);
    keys = static_cast<const T*>(call.keys) + head;
    values = static_cast<const T*>(call.values) + head;
    q = scratch;
    scores = q + rows * width;
    sums = scores + rows * kRowScores;
    totals = sums + rows * width;
    key_scales = totals + rows * width;
    value_scales = key_scales + kRowScores;
    own_scales = value_scales + kRowScores;
    float* rest = own_scales + 2 * kRowScores;
    so_far = reinterpret_cast<Partial*>(rest);
    seen = reinterpret_cast<Seen*>(rest + 2 * rows);
    begun = reinterpret_cast<unsigned char*>(seen + tokens);
  }

  // Queries times scale, for powers of two.
  void load_queries() {
    const float scale = call.scale * kLog2E;
    const int64_t half = call.rotary / 2;
    float turned[kMaxHeadDim];
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = b * call.rows + first_row + t;
      // the last rotations are those of the queries
      const int64_t turn = (b + 1) * call.key_rows - call.rows + first_row + t;
      for (int64_t g = 0; g < group; ++g) {
        const float* x = call.q + (row * call.heads + h * group + g) * dim;
        if (call.cos != nullptr) {
          rotate<L>(x, call.cos + turn * half, call.sin + turn * half, call.rotary, dim, turned);
          x = turned;
        }
        float* out = q + (t * group + g) * width;
        for (int64_t d = 0; d < dim; ++d) out[d] = x[d] * scale;
        for (int64_t d = dim; d < width; ++d) out[d] = 0.0f;
      }
    }
  }

  // The span of positions that rows from `begin` to `end` see side by side with their slots; rows
  // that see none do not count.
  EDGESPEC_INLINE Seen span(int64_t begin, int64_t end) const {
    Seen all = {kChunk, 0, 0};
    for (int64_t t = begin; t < end; ++t) {
      if (seen[t].from >= seen[t].straight) continue;
      all.from = min_of(all.from, seen[t].from);
      all.straight = max_of(all.straight, seen[t].straight);
    }
    return all;
  }

  EDGESPEC_INLINE int64_t block_keys() const {
    return rows > kManyRows ? kBlockKeys<L> : static_cast<int64_t>(kChunk);
  }

  // The scores of all rows; those of positions that a row does not see are anything.
  void score_chunk(int64_t base) {
    const int64_t size = Row<T>::size(dim), step = block_keys();
    const Keys<T> straight = {keys + base * size, size, nullptr};
    const Seen all = span(0, tokens);
    constexpr int64_t kTileRows = 4;
    for (int64_t j = all.from / step * step; j < all.straight; j += step) {
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const int64_t count = min_of(kTileRows, rows - r);
        const Seen here = span(r / group, (r + count - 1) / group + 1);
        const int64_t from = max_of(here.from, j), to = min_of(here.straight, j + step);
        if (from >= to) continue;
        float *own = q + r * width, *into = scores + r * kRowScores;
        if (r == 0)
          score<L, T, true>(count, own, width, straight, from, to, dim, into);
        else
          score<L, T>(count, own, width, straight, from, to, dim, into);
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      if (seen[t].straight >= seen[t].to) continue;
      const Keys<T> apart = {keys, size, paths[t].slots + (base - paths[t].straight)};
      const int64_t r = t * group;
      score<L, T>(group, q + r * width, width, apart, seen[t].straight, seen[t].to, dim,
               scores + r * kRowScores);
    }
  }

  // The scales of rows of codes: of a token's keys and values by position.
  void load_scales(int64_t base) {
    if constexpr (Row<T>::kScaled) {
      const Seen all = span(0, tokens);
      for (int64_t j = all.from; j < all.straight; ++j) {
        key_scales[j] = scale_of(keys + (base + j) * Row<T>::size(dim), dim);
        value_scales[j] = scale_of(values + (base + j) * Row<T>::size(dim), dim);
      }
    }
  }

  // The two for one token: those of the chunk, or a copy with the token's own slots.
  EDGESPEC_INLINE void scales_of(int64_t t, int64_t base, const float** of_keys,
                                 const float** of_values) {
    *of_keys = *of_values = nullptr;
    if constexpr (Row<T>::kScaled) {
      *of_keys = key_scales;
      *of_values = value_scales;
      if (seen[t].straight >= seen[t].to) return;
      float *own_keys = own_scales, *own_values = own_scales + kRowScores;
      memcpy(own_keys, key_scales, sizeof(float) * kRowScores);
      memcpy(own_values, value_scales, sizeof(float) * kRowScores);
      for (int64_t j = seen[t].straight; j < seen[t].to; ++j) {
        const int64_t slot = paths[t].slots[base + j - paths[t].straight];
        own_keys[j] = scale_of(keys + slot * Row<T>::size(dim), dim);
        own_values[j] = scale_of(values + slot * Row<T>::size(dim), dim);
      }
      *of_keys = own_keys;
      *of_values = own_values;
    }
  }

  // Scores become weights; what the chunk leaves of each row goes to `left`.
  void weigh_scores(int64_t base, Partial* left) {
    load_scales(base);
    for (int64_t t = 0; t < tokens; ++t) {
      if (seen[t].from >= seen[t].to) continue;
      const float *of_keys, *of_values;
      scales_of(t, base, &of_keys, &of_values);
      for (int64_t r = t * group; r < (t + 1) * group; ++r) {
        float* own = scores + r * kRowScores;
        left[r] = weights_of<L>(seen[t], of_keys, own);
        if (of_values != nullptr)
          for (int64_t j = seen[t].from / kLanes * kLanes; j < seen[t].to; j += kLanes)
            L::store(own + j, L::mul(L::load(own + j), L::load(of_values + j)));
      }
    }
  }

  // The sums of p * v of the chunk, into `sums`. A value counts for the rows alone that see it: it
  // may be a NaN of another path.
  void weigh_values(int64_t base) {
    memset(sums, 0, sizeof(float) * static_cast<size_t>(rows * width));
    const int64_t size = Row<T>::size(dim), step = block_keys();
    const Keys<T> straight = {values + base * size, size, nullptr};
    const Seen all = span(0, tokens);
    constexpr int64_t kTileRows = 4;
    for (int64_t j = all.from / step * step; j < all.straight; j += step) {
      for (int64_t r = 0; r < rows; r += kTileRows)
        weigh_tile(straight, r, min_of(kTileRows, rows - r), j, j + step);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      if (seen[t].straight >= seen[t].to) continue;
      const Keys<T> apart = {values, size, paths[t].slots + (base - paths[t].straight)};
      const int64_t r = t * group;
      weigh<L, T>(group, scores + r * kRowScores, apart, seen[t].straight, seen[t].to, dim,
               sums + r * width, width);
    }
  }

  // What rows see in common they read together; before and behind that each reads its own.
  EDGESPEC_INLINE void weigh_tile(const Keys<T>& straight, int64_t r, int64_t count, int64_t begin,
                                  int64_t end) {
    int64_t from = begin, to = end;
    for (int64_t i = r; i < r + count; ++i) {
      from = max_of(from, seen[i / group].from);
      to = min_of(to, seen[i / group].straight);
    }
    float *p = scores + r * kRowScores, *out = sums + r * width;
    if (from >= to) {
      for (int64_t i = 0; i < count; ++i) weigh_alone(straight, r + i, begin, end);
      return;
    }
    for (int64_t i = 0; i < count; ++i) weigh_alone(straight, r + i, begin, from);
    if (r == 0)
      weigh<L, T, true>(count, p, straight, from, to, dim, out, width);
    else
      weigh<L, T>(count, p, straight, from, to, dim, out, width);
    for (int64_t i = 0; i < count; ++i) weigh_alone(straight, r + i, to, end);
  }

  EDGESPEC_INLINE void weigh_alone(const Keys<T>& straight, int64_t r, int64_t begin, int64_t end) {
    const Seen& own = seen[r / group];
    const int64_t from = max_of(begin, own.from), to = min_of(end, own.straight);
    weigh<L, T>(1, scores + r * kRowScores, straight, from, to, dim, sums + r * width, width);
  }

  EDGESPEC_INLINE float* out_of(int64_t r) const {
    const int64_t row = b * call.rows + first_row + r / group;
    return call.out + (row * call.heads + h * group + r % group) * dim;
  }

  void run(int64_t split) {
    int64_t first = INT64_MAX, end = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      if (paths[t].end == 0) continue;
      first = min_of(first, paths[t].first);
      end = max_of(end, paths[t].end);
    }
    if (end > 0) {
      load_queries();
      memset(begun, 0, static_cast<size_t>(rows));
      const int64_t from = max_of(first / kChunk, split * plan.piece_chunks);
      const int64_t to = min_of((end + kChunk - 1) / kChunk,
                                (split + 1) * plan.piece_chunks);
      for (int64_t chunk = from; chunk < to; ++chunk) run_chunk(chunk);
    }
    if (plan.chunk_pieces > 1) return;
    for (int64_t r = 0; r < rows; ++r) {
      if (paths[r / group].end == 0)
        memset(out_of(r), 0, sizeof(float) * static_cast<size_t>(dim));
      else
        put_out<L>(totals + r * width, so_far[r].sum, dim, out_of(r));
    }
  }

  void run_chunk(int64_t chunk) {
    Partial left[kMaxPieceRows];
    const int64_t base = chunk * kChunk;
    for (int64_t t = 0; t < tokens; ++t) seen[t] = seen_of(paths[t], base);
    score_chunk(base);
    weigh_scores(base, left);
    weigh_values(base);
    for (int64_t r = 0; r < rows; ++r) {
      if (seen[r / group].from >= seen[r / group].to) continue;
      const float* own = sums + r * width;
      if (plan.chunk_pieces > 1) {
        const int64_t row = ((b * call.kv_heads + h) * call.rows + first_row) * group + r;
        const int64_t place = row * plan.chunks + chunk;
        plan.partials[place] = left[r];
        memcpy(plan.sums + place * width, own, sizeof(float) * static_cast<size_t>(width));
      } else {
        join<L>(so_far + r, totals + r * width, left[r], own, width, begun[r] != 0);
        begun[r] = 1;
      }
    }
  }
};

template <class L, class T>
void attend_piece(const AttentionPlan& plan, int64_t b, int64_t h, int64_t tile,
                  int64_t split, float* scratch) {
  if (!plan.writes_first) write_rows<L, T>(plan, b, h);
  Piece<L, T>(plan, b, h, tile, scratch).run(split);
}

// ---- the doors

template <class L>
void write_of_level(const AttentionPlan& plan, int64_t b, int64_t h) {
  switch (plan.call->cache_type) {
    case CacheType::kFloat32: return write_rows<L, float>(plan, b, h);
    case CacheType::kFloat16: return write_rows<L, uint16_t>(plan, b, h);
    default: return write_rows<L, int8_t>(plan, b, h);
  }
}

template <class L>
void attend_of_level(const AttentionPlan& plan, int64_t b, int64_t h, int64_t tile,
                     int64_t split, float* scratch) {
  switch (plan.call->cache_type) {
    case CacheType::kFloat32: return attend_piece<L, float>(plan, b, h, tile, split, scratch);
    case CacheType::kFloat16: return attend_piece<L, uint16_t>(plan, b, h, tile, split, scratch);
    default: return attend_piece<L, int8_t>(plan, b, h, tile, split, scratch);
  }
}

template <class L>
void combine_of_level(const AttentionPlan& plan, int64_t b, int64_t h, int64_t row,
                      float* totals) {
  const AttentionCall& call = *plan.call;
  const int64_t width = padded(call.dim);
  const Path& path = plan.paths[b * call.rows + row];
  for (int64_t g = 0; g < plan.group; ++g) {
    float* out = call.out + ((b * call.rows + row) * call.heads + h * plan.group + g) * call.dim;
    if (path.end == 0) {
      memset(out, 0, sizeof(float) * static_cast<size_t>(call.dim));
      continue;
    }
    const int64_t own = ((b * call.kv_heads + h) * call.rows + row) * plan.group + g;
    const int64_t from = path.first / kChunk;
    const int64_t to = (path.end + kChunk - 1) / kChunk;
    Partial so_far = {0.0f, 0.0f};
    for (int64_t chunk = from; chunk < to; ++chunk) {
      const int64_t place = own * plan.chunks + chunk;
      join<L>(&so_far, totals, plan.partials[place], plan.sums + place * width, width,
              chunk > from);
    }
    put_out<L>(totals, so_far.sum, call.dim, out);
  }
}

}  // namespace
}  // namespace edgespec
