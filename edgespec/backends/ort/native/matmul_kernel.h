// What all vectorized levels of the product have in common: which rows meet which block of the
// weight when. A level brings its instructions as a struct `Level`:
//   kMostRows    rows whose sums fit its registers
//   kMostGroups  groups of so many rows whose results stay in the first cache
//   reach_of     the largest magnitude of some floats
//   round_block  rounds floats to bytes, and gives their sum
//   widen        makes floats of a panel's numbers of half precision, times a factor
//   multiply_bytes  makes floats of a panel's bytes, times a factor of each
//   add_block    adds the product of kRows rows by a block to their results
//
// Each file that includes this is compiled with its own instructions, so that nothing here may be
// shared between them: all stands in an unnamed namespace.
#pragma once

#include "inlining.h"
#include "matmul.h"

// Loops over registers: left as loops, they would keep them in memory.
#define EDGESPEC_UNROLL _Pragma("GCC unroll 16")

namespace edgespec {
namespace {

constexpr int64_t kAhead = 16384;  // bytes of the weight that are on their way
// The same where one row meets short blocks of 8 bits. A level for which another distance was
// measured to be faster has it here.
template <typename Level>
constexpr int64_t kShortAhead = kAhead;

// How the values of a weight stand in their lines.
enum class Values { k4, kCodes, k6, k8 };

// The lines of a tile of a step.
template <Values kValues>
constexpr int kLines = kValues == Values::k8 ? 4 : kValues == Values::k6 ? 3 : 2;
constexpr int kQuadsOfStep = kStep / 4;
constexpr int64_t kLinesBytes = kTiles * kLine;  // of all tiles

// The numbers of a codebook for instructions that look bytes up: as they are; unsigned; and the
// lower and the upper halves of these.
struct Codes {
  int8_t numbers[16];
  uint8_t all[16], low[16], high[16];

  explicit Codes(Codebook codebook) {
    for (int i = 0; i < 16; ++i) {
      numbers[i] = kCodebooks[static_cast<int>(codebook)][i];
      all[i] = static_cast<uint8_t>(numbers[i] + kCodesMiddle);
      low[i] = all[i] & 0xf;
      high[i] = all[i] >> 4;
    }
  }
};

// A block of a panel, and a group of rows that is multiplied by it.
struct Block {
  const uint8_t* values;
  int64_t steps;
  const float* weight_scales;
  const float* minimums;  // negated
  const Codes* codes;
  const int8_t* x;
  const float* scales;
  const int32_t* corrections;
  const float* sums;
  const uint8_t* ahead;  // what is fetched meanwhile: so much a line
  int64_t ahead_step;
  bool near;  // whether that is better in the first cache than in the second
};

// What a group of rows adds up to in a panel.
template <typename Level>
struct alignas(64) Results {
  float of[Level::kMostRows][kPanel];
};

template <bool kNear>
inline void fetch(const uint8_t* at) {
  if constexpr (kNear) {
    __builtin_prefetch(at, 0, 3);
  } else {
    __builtin_prefetch(at, 0, 2);
  }
}

// Fetches what follows the block, in steps that the groups of a call share. Into the second cache,
// where more can be on its way at once; or `kNear`, into the first.
template <bool kNear = false>
inline void fetch_ahead(const Block& block, const uint8_t*& ahead) {
  fetch<kNear>(ahead);
  fetch<kNear>(ahead + kLine);
  if (block.ahead_step > 2 * kLine) {
    fetch<kNear>(ahead + 2 * kLine);
    fetch<kNear>(ahead + 3 * kLine);
    fetch<kNear>(ahead + 4 * kLine);
    if (block.ahead_step > 5 * kLine) fetch<kNear>(ahead + 5 * kLine);
  }
  ahead += block.ahead_step;
  __asm__("" : "+r"(ahead));  // all addresses of a loop, computed before it, would fill registers
}

// Keeps what is read below from being read above, where it would take registers of the sums.
inline void keep_order() { __asm__ volatile("" ::: "memory"); }

inline int32_t four(const int8_t* x) {
  int32_t bytes;
  __builtin_memcpy(&bytes, x, sizeof bytes);
  return bytes;
}

template <typename Level>
void quantize(const MatMulShape& shape, RowRounding rounding, const float* x,
              const RowGroup& group) {
  for (int64_t r = 0; r < group.count; ++r) {
    const float* row = x + (group.first + r) * shape.in;
    float reach = rounding.kind == Rounding::kRow ? Level::reach_of(row, shape.in) : 0.0f;
    for (int64_t b = 0; b < shape.blocks(); ++b) {
      const int64_t begin = b * shape.block;
      const int64_t count = shape.in - begin < shape.block ? shape.in - begin : shape.block;
      if (rounding.kind != Rounding::kRow) reach = Level::reach_of(row + begin, count);
      const Scale scale = scale_of(rounding, reach);
      int8_t* values = group.at(r, begin);
      const int32_t sum = Level::round_block(row + begin, count, shape.block, scale, values);
      group.put(shape, b, r, scale.scale, sum);
    }
  }
}

// The scales and negated minimums of a block's outputs, made once for all groups of rows.
template <typename Level>
class WeightScales {
 public:
  explicit WeightScales(const MatMulShape& shape) : shape_(shape) {}

  const float* scales() const { return scales_; }
  const float* minimums() const { return minimums_; }

  // Takes what the blocks behind `at` share.
  void share(const uint8_t* at) {
    Level::widen(at, shape_.global, factors_);
    if (shape_.has_minimums()) Level::widen(at + 2 * kPanel, -shape_.global, factors_ + kPanel);
  }

  // Takes what stands behind the values of a block.
  void take(const uint8_t* at) {
    scales_ = own_;
    switch (shape_.scales) {
      case Scales::kFloat32:
        scales_ = reinterpret_cast<const float*>(at);
        if (shape_.global == 1.0f) break;
        for (int64_t o = 0; o < kPanel; ++o) own_[o] = scales_[o] * shape_.global;
        scales_ = own_;
        break;
      case Scales::kFloat16Min:
        Level::widen(at + 2 * kPanel, -shape_.global, minimums_);
        [[fallthrough]];
      case Scales::kFloat16:
        Level::widen(at, shape_.global, own_);
        break;
      case Scales::kSuper:
        Level::template multiply_bytes<true>(at, factors_, own_);
        break;
      case Scales::kSuperMin:
        Level::template multiply_bytes<false>(at, factors_, own_);
        Level::template multiply_bytes<false>(at + kPanel, factors_ + kPanel, minimums_);
        break;
    }
  }

 private:
  const MatMulShape& shape_;
  const float* scales_ = nullptr;
  alignas(64) float own_[kPanel];
  alignas(64) float minimums_[kPanel];
  alignas(64) float factors_[2 * kPanel];
};

// A function for each number of rows up to Level::kMostRows.
template <typename Level, Values kValues, bool kMinimums, int kRows>
void add_rows(int64_t rows, const Block& block, Results<Level>& results) {
  if (rows == kRows) {
    Level::template add_block<kValues, kMinimums, kRows>(block, results);
  } else if constexpr (kRows > 1) {
    add_rows<Level, kValues, kMinimums, kRows - 1>(rows, block, results);
  }
}

// What is done with a block of a panel: once for all groups of rows, and for each of them.
template <typename Level>
struct RowsOf {
  template <Values kValues, bool kMinimums>
  struct Of {
    void begin(const Block&) {}
    void add(int64_t rows, const Block& block, Results<Level>& results) {
      add_rows<Level, kValues, kMinimums, Level::kMostRows>(rows, block, results);
    }
  };
};

inline void clear(const RowGroup& group, float (*results)[kPanel]) {
  for (int64_t r = 0; r < group.count; ++r) {
    for (int64_t o = 0; o < kPanel; ++o) results[r][o] = 0.0f;
  }
}

// Writes the columns of y from `column` on that a panel has.
inline void put_out(const MatMulShape& shape, const RowGroup& group, const float (*results)[kPanel],
                    int64_t column, float* y) {
  const int64_t there = shape.out - column < kPanel ? shape.out - column : kPanel;
  for (int64_t r = 0; r < group.count; ++r) {
    float* to = y + (group.first + r) * shape.out + column;
    for (int64_t o = 0; o < there; ++o) to[o] = results[r][o];
  }
}

// Writes what some groups of the rows are in a panel, from `column` on. The weight's blocks are read
// in the order in which they stand, each of them for all groups.
template <typename Level, typename Product>
void multiply_groups(const MatMulShape& shape, const uint8_t* panel, const RowGroup* groups,
                     int64_t num_groups, int64_t column, float* y) {
  const int64_t values_bytes = shape.values_bytes(), bytes = shape.block_bytes();
  const int64_t factor_bytes = shape.factor_bytes(), lines = shape.lines();
  Product product;
  Results<Level> results[Level::kMostGroups];
  for (int64_t g = 0; g < num_groups; ++g) clear(groups[g], results[g].of);
  // What is fetched for a block, by all groups and by each; that blocks share counts in each of them
  const int64_t fetched = bytes + factor_bytes / shape.super_block, share = fetched / num_groups;
  // The first group waits for a block, the others find it: it has to be there in time for that one
  const bool alone = num_groups == 1 && groups[0].count == 1;
  const bool is_short = alone && shape.bits == 8 && shape.block <= 32;
  const int64_t distance = is_short ? kShortAhead<Level> : kAhead;
  const uint8_t* ahead = panel + distance + (num_groups > 1 ? bytes : 0);
  const Codes codes(shape.codebook);
  WeightScales<Level> of_weight(shape);
  Block block;
  block.steps = shape.block / kStep;
  block.codes = &codes;
  block.ahead_step = share / lines;
  // As measured: where there is little to do for a line, and lines stand in even distances
  const bool little = groups[0].count == 1 || (shape.bits == 8 && shape.block > 32);
  block.near = shape.scales == Scales::kFloat32 && num_groups == 1 && little && distance == kAhead;
  int64_t own = 0;  // blocks that still share what was taken
  for (int64_t b = 0; b < shape.blocks(); ++b, --own) {
    if (factor_bytes > 0 && own == 0) {
      of_weight.share(panel);
      panel += factor_bytes;
      own = shape.super_block;
    }
    of_weight.take(panel + values_bytes);
    block.values = panel;
    block.weight_scales = of_weight.scales();
    block.minimums = of_weight.minimums();
    block.ahead = ahead;
    product.begin(block);
    for (int64_t g = 0; g < num_groups; ++g) {
      const RowGroup& group = groups[g];
      const int64_t at = b * group.count;
      block.x = group.at(0, b * shape.block);
      block.scales = group.scales + at;
      block.corrections = group.corrections + at;
      block.sums = group.sums + at;
      product.add(group.count, block, results[g]);
      block.ahead += share;
    }
    panel += bytes;
    ahead += fetched;
  }
  for (int64_t g = 0; g < num_groups; ++g) put_out(shape, groups[g], results[g].of, column, y);
}

// The function for the values of a weight, with `Products::Of` for them.
template <typename Level, typename Products>
auto groups_of(const MatMulShape& shape) {
  using V = Values;
  if (shape.codebook != Codebook::kNone) {
    return multiply_groups<Level, typename Products::template Of<V::kCodes, false>>;
  }
  if (shape.has_minimums()) {
    if (shape.bits == 4) return multiply_groups<Level, typename Products::template Of<V::k4, true>>;
    return shape.bits == 6 ? multiply_groups<Level, typename Products::template Of<V::k6, true>>
                           : multiply_groups<Level, typename Products::template Of<V::k8, true>>;
  }
  if (shape.bits == 4) return multiply_groups<Level, typename Products::template Of<V::k4, false>>;
  return shape.bits == 6 ? multiply_groups<Level, typename Products::template Of<V::k6, false>>
                         : multiply_groups<Level, typename Products::template Of<V::k8, false>>;
}

// Calls some_groups for each panel, and for as many groups of the rows at a time as a level takes.
template <typename Level, typename SomeGroups>
void multiply_panels(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
                     const RoundedRows& rows, float* y, SomeGroups some_groups) {
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t* base = weight + panel * shape.panel_bytes();
    for (int64_t done = 0; done < rows.num_groups; done += Level::kMostGroups) {
      const int64_t left = rows.num_groups - done;
      const int64_t count = left < Level::kMostGroups ? left : Level::kMostGroups;
      RowGroup groups[Level::kMostGroups];
      for (int64_t g = 0; g < count; ++g) groups[g] = rows.group(done + g);
      some_groups(shape, base, groups, count, panel * kPanel, y);
    }
  }
}

template <typename Level>
void multiply(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
              const RoundedRows& rows, float* y) {
  multiply_panels<Level>(shape, weight, first, last, rows, y, groups_of<Level, RowsOf<Level>>(shape));
}

template <typename Level>
constexpr MatMulKernels kernels_of() {
  return {Level::kMostRows, quantize<Level>, multiply<Level>};
}

}  // namespace
}  // namespace edgespec
