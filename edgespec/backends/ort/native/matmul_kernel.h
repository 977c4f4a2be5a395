// What all vectorized levels of the product have in common: which rows meet which block of the
// weight when. A level brings its instructions as a struct `Level`:
//   kMostRows    rows whose sums fit its registers
//   kMostGroups  groups of so many rows whose results stay in the first cache
//   reach_of     the largest magnitude of some floats
//   round_block  rounds floats to bytes, and gives their sum
//   add_block    adds the product of kRows rows by a block of kBlock inputs to their results
//
// Each file that includes this is compiled with its own instructions, so that nothing here may be
// shared between them: all stands in an unnamed namespace.
#pragma once

#include "matmul.h"

// Loops over registers: left as loops, they would keep them in memory.
#define EDGESPEC_UNROLL _Pragma("GCC unroll 16")

namespace edgespec {
namespace {

constexpr int64_t kAhead = 8192;  // bytes of the weight that are on their way

// Of a tile of a block.
template <int kBits, int kBlock>
constexpr int64_t kLines = kBlock * kBits / 32;

// A block of a panel, and a group of rows that is multiplied by it.
struct Block {
  const uint8_t* values;  // then the scales
  int64_t lines;          // per tile
  const int8_t* x;
  const float* scales;
  const int32_t* corrections;
  const uint8_t* ahead;  // what is fetched meanwhile: so much a line
  int64_t ahead_step;
};

// What a group of rows adds up to in a panel.
template <typename Level>
struct alignas(64) Results {
  float of[Level::kMostRows][kPanel];
};

inline void fetch(const uint8_t* at) { __builtin_prefetch(at, 0, 3); }

// Fetches what follows the block, in steps that the groups of a call share.
inline void fetch_ahead(const Block& block, const uint8_t*& ahead) {
  fetch(ahead);
  fetch(ahead + kLine);
  if (block.ahead_step > 2 * kLine) {
    fetch(ahead + 2 * kLine);
    fetch(ahead + 3 * kLine);
    fetch(ahead + 4 * kLine);
  }
  ahead += block.ahead_step;
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

// A function for each number of rows up to Level::kMostRows.
template <typename Level, int kBits, int kBlock, int kRows>
void add_rows(int64_t rows, const Block& block, Results<Level>& results) {
  if (rows == kRows) {
    Level::template add_block<kBits, kBlock, kRows>(block, results);
  } else if constexpr (kRows > 1) {
    add_rows<Level, kBits, kBlock, kRows - 1>(rows, block, results);
  }
}

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
template <typename Level, int kBits, int kBlock>
void multiply_groups(const MatMulShape& shape, const uint8_t* panel, const RowGroup* groups,
                     int64_t num_groups, int64_t column, float* y) {
  constexpr int64_t lines = kLines<kBits, kBlock>, bytes = lines * kTiles * kLine + 4 * kPanel;
  Results<Level> results[Level::kMostGroups];
  for (int64_t g = 0; g < num_groups; ++g) clear(groups[g], results[g].of);
  const int64_t share = bytes / num_groups;  // that each group fetches of what comes
  // The first group waits for a block, the others find it: it has to be there in time for that one
  const int64_t ahead = num_groups > 1 ? kAhead + bytes : kAhead;
  for (int64_t b = 0; b < shape.blocks(); ++b) {
    const uint8_t* values = panel + b * bytes;
    for (int64_t g = 0; g < num_groups; ++g) {
      const RowGroup& group = groups[g];
      const Block block{values,
                        lines,
                        group.at(0, b * kBlock),
                        group.scales + b * group.count,
                        group.corrections + b * group.count,
                        values + ahead + g * share,
                        share / lines};
      add_rows<Level, kBits, kBlock, Level::kMostRows>(group.count, block, results[g]);
    }
  }
  for (int64_t g = 0; g < num_groups; ++g) put_out(shape, groups[g], results[g].of, column, y);
}

template <typename Level, int kBits>
auto groups_by(int64_t block) {
  if (block == 32) return multiply_groups<Level, kBits, 32>;
  return block == 64 ? multiply_groups<Level, kBits, 64> : multiply_groups<Level, kBits, 128>;
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
  if (!shape.plain()) return matmul_portable.multiply(shape, weight, first, last, rows, y);
  multiply_panels<Level>(shape, weight, first, last, rows, y,
                         shape.bits == 4 ? groups_by<Level, 4>(shape.block)
                                         : groups_by<Level, 8>(shape.block));
}

template <typename Level>
constexpr MatMulKernels kernels_of() {
  return {Level::kMostRows, quantize<Level>, multiply<Level>};
}

}  // namespace
}  // namespace edgespec
