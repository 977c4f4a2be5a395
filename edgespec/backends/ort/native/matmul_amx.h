// The product by tiles of AMX, for many rows: 16 rows by 64 inputs, times 64 inputs by 16 outputs, an
// instruction. The lines of the weight are what a tile of inputs by outputs is made of: its row is 4
// inputs of 16 outputs. Values of 4 bits are unpacked into the first cache, once for all rows.
//
// `Tiles` is what has the registers. An object of it has them configured while it lives; on them
//   zero, load, store   a tile, of rows at a fixed distance in memory
//   add_products        sums += signed bytes of rows * unsigned bytes of the weight
#pragma once

#include <immintrin.h>

#include "matmul_kernel.h"

namespace edgespec {
namespace {

// As LDTILECFG reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 0;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileInputs = 64;

// The registers: sums of the four tiles of outputs, a tile of rows, two of the weight in turn.
constexpr int kSums = 0, kRowsTile = 4, kEvenTile = 5, kOddTile = 6;

inline TileConfig config_of(int64_t rows, int64_t inputs) {
  TileConfig config;
  config.palette = 1;
  for (int t = kSums; t < kSums + kTiles; ++t) {
    config.rows[t] = static_cast<uint8_t>(rows);
    config.row_bytes[t] = kLine;
  }
  config.rows[kRowsTile] = static_cast<uint8_t>(rows);
  config.row_bytes[kRowsTile] = static_cast<uint16_t>(inputs);
  for (int t = kEvenTile; t <= kOddTile; ++t) {
    config.rows[t] = static_cast<uint8_t>(inputs / 4);
    config.row_bytes[t] = kLine;
  }
  return config;
}

constexpr int64_t inputs_of_tile(int64_t block) { return block < kTileInputs ? block : kTileInputs; }

inline void fetch_all(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) fetch(from + i);
}

// The lines of a block of 4 bits, as they are with 8.
template <int kBlock>
void unpack(const uint8_t* values, const uint8_t* ahead, uint8_t* unpacked) {
  constexpr int64_t bytes = kTiles * kLine;  // the lines of all tiles
  const __m512i low = _mm512_set1_epi8(0xf);
  for (int64_t line = 0; line < kLines<4, kBlock>; ++line) {
    fetch_all(ahead + line * bytes, bytes);
    for (int64_t i = 0; i < bytes; i += kLine) {
      const __m512i both = _mm512_loadu_si512(values + line * bytes + i);
      uint8_t* to = unpacked + 2 * line * bytes + i;
      _mm512_store_si512(to, _mm512_and_si512(both, low));
      _mm512_store_si512(to + bytes, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
  }
  fetch_all(ahead + kLines<4, kBlock> * bytes, 4 * kPanel);
}

// sums += a tile of rows * a tile of the weight, for each of the panel's tiles of outputs.
template <typename Tiles, int kTileOfPanel>
void add_tiles(const uint8_t* lines) {
  constexpr int kWeight = kTileOfPanel % 2 == 0 ? kEvenTile : kOddTile;
  Tiles::template load<kWeight>(lines + kTileOfPanel * kLine, kTiles * kLine);
  Tiles::template add_products<kSums + kTileOfPanel, kRowsTile, kWeight>();
  if constexpr (kTileOfPanel + 1 < kTiles) add_tiles<Tiles, kTileOfPanel + 1>(lines);
}

template <typename Tiles, int kTileOfPanel = 0>
void clear_sums() {
  Tiles::template zero<kSums + kTileOfPanel>();
  if constexpr (kTileOfPanel + 1 < kTiles) clear_sums<Tiles, kTileOfPanel + 1>();
}

template <typename Tiles, int kTileOfPanel = 0>
void store_sums(int32_t (*sums)[kPanel]) {
  Tiles::template store<kSums + kTileOfPanel>(&sums[0][kTileOfPanel * kTile],
                                              sizeof sums[0]);
  if constexpr (kTileOfPanel + 1 < kTiles) store_sums<Tiles, kTileOfPanel + 1>(sums);
}

// results += the sums of a block, scaled.
inline void add_results(const int32_t (*sums)[kPanel], const float* weight_scales, int64_t rows,
                        const float* scales, const int32_t* corrections, float (*results)[kPanel]) {
  __m512 of_weight[kTiles];
  EDGESPEC_UNROLL
  for (int t = 0; t < kTiles; ++t) of_weight[t] = _mm512_loadu_ps(weight_scales + t * kTile);
  for (int64_t r = 0; r < rows; ++r) {
    const __m512i correction = _mm512_set1_epi32(corrections[r]);
    const __m512 of_row = _mm512_set1_ps(scales[r]);
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      float* result = results[r] + t * kTile;
      const __m512i sum =
          _mm512_add_epi32(_mm512_load_si512(&sums[r][t * kTile]), correction);
      const __m512 scale = _mm512_mul_ps(of_row, of_weight[t]);
      _mm512_store_ps(result,
                      _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_load_ps(result)));
    }
  }
}

template <typename Tiles>
struct ByTiles {
  static constexpr int kMostRows = kTileRows;
  static constexpr int kMostGroups = 4;  // their results are 16 KB

  // As multiply_groups of matmul_kernel.h does it.
  template <int kBits, int kBlock>
  static void multiply_groups(const MatMulShape& shape, const uint8_t* panel,
                              const RowGroup* groups, int64_t num_groups, int64_t column,
                              float* y) {
    constexpr int64_t values_bytes = kLines<kBits, kBlock> * kTiles * kLine;
    constexpr int64_t bytes = values_bytes + 4 * kPanel;
    Results<ByTiles> results[kMostGroups];
    alignas(64) int32_t sums[kTileRows][kPanel];
    alignas(64) uint8_t unpacked[kBits == 4 ? kPanel * kBlock : kLine];
    for (int64_t g = 0; g < num_groups; ++g) clear(groups[g], results[g].of);
    const int64_t share = bytes / num_groups;
    for (int64_t b = 0; b < shape.blocks(); ++b) {
      const uint8_t* values = panel + b * bytes;
      const uint8_t* ahead = values + kAhead + bytes;
      const auto* weight_scales = reinterpret_cast<const float*>(values + values_bytes);
      if constexpr (kBits == 4) unpack<kBlock>(values, ahead, unpacked);
      for (int64_t g = 0; g < num_groups; ++g) {
        const RowGroup& group = groups[g];
        if constexpr (kBits == 8) fetch_all(ahead + g * share, share);
        multiply_block<kBlock>(group.at(0, b * kBlock), kBits == 4 ? unpacked : values, sums);
        add_results(sums, weight_scales, group.count, group.scales + b * group.count,
                    group.corrections + b * group.count, results[g].of);
      }
    }
    for (int64_t g = 0; g < num_groups; ++g) put_out(shape, groups[g], results[g].of, column, y);
  }

 private:
  template <int kBlock>
  static void multiply_block(const int8_t* x, const uint8_t* lines, int32_t (*sums)[kPanel]) {
    constexpr int64_t inputs = inputs_of_tile(kBlock);
    clear_sums<Tiles>();
    EDGESPEC_UNROLL
    for (int64_t i = 0; i < kBlock; i += inputs) {
      Tiles::template load<kRowsTile>(x + i, kSpan);
      add_tiles<Tiles, 0>(lines + i / 4 * kTiles * kLine);
    }
    store_sums<Tiles>(sums);
  }
};

template <typename Tiles, int kBits>
auto groups_by_tiles(int64_t block) {
  using Level = ByTiles<Tiles>;
  if (block == 32) return Level::template multiply_groups<kBits, 32>;
  return block == 64 ? Level::template multiply_groups<kBits, 64>
                     : Level::template multiply_groups<kBits, 128>;
}

// Groups differ by one row at most, and the last is a largest one. The tiles have the rows of the
// largest: of a smaller group they read a row too many, which is the next group's, and its sums go
// nowhere.
template <typename Tiles>
void multiply_by_tiles(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
                       const RoundedRows& rows, float* y) {
  if (!shape.plain()) return matmul_portable.multiply(shape, weight, first, last, rows, y);
  const int64_t most = (rows.num_rows + rows.num_groups - 1) / rows.num_groups;
  const Tiles tiles(config_of(most, inputs_of_tile(shape.block)));
  multiply_panels<ByTiles<Tiles>>(shape, weight, first, last, rows, y,
                                  shape.bits == 4 ? groups_by_tiles<Tiles, 4>(shape.block)
                                                  : groups_by_tiles<Tiles, 8>(shape.block));
}

}  // namespace
}  // namespace edgespec
