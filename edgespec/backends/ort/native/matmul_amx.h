// The product by tiles of AMX, for many rows: 16 rows by 64 inputs, times 64 inputs by 16 outputs, an
// instruction. The lines of the weight are what a tile of inputs by outputs is made of: its row is 4
// inputs of 16 outputs. Values that are not bytes are unpacked into the first cache, once for all rows.
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
  for (int64_t i = 0; i < bytes; i += kLine) fetch<false>(from + i);
}

// The lines of a block as they are with values of 8 bits.
template <Values kValues>
void unpack(const Block& block, uint8_t* unpacked) {
  const __m512i mask = _mm512_set1_epi8(0xf), two = _mm512_set1_epi8(0x30);
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(block.codes->all)));
  constexpr int64_t bytes = kLines<kValues> * kLinesBytes;  // of a step
  for (int64_t step = 0; step < block.steps; ++step) {
    const uint8_t* at = block.values + step * bytes;
    fetch_all(block.ahead + step * bytes, bytes);
    for (int64_t tile = 0; tile < kLinesBytes; tile += kLine) {
      EDGESPEC_UNROLL
      for (int quad = 0; quad < kQuadsOfStep; ++quad) {
        const __m512i both = _mm512_loadu_si512(at + quad / 2 * kLinesBytes + tile);
        const __m512i half = quad % 2 == 0 ? both : _mm512_srli_epi16(both, 4);
        __m512i own = _mm512_and_si512(half, mask);
        if (kValues == Values::kCodes) own = _mm512_shuffle_epi8(table, own);
        if (kValues == Values::k6) {
          const __m512i upper = _mm512_loadu_si512(at + 2 * kLinesBytes + tile);
          const __m512i placed = quad < 2 ? _mm512_slli_epi16(upper, 4 - 2 * quad)
                                          : _mm512_srli_epi16(upper, 2 * quad - 4);
          own = _mm512_or_si512(own, _mm512_and_si512(placed, two));
        }
        _mm512_store_si512(unpacked + (step * kQuadsOfStep + quad) * kLinesBytes + tile, own);
      }
    }
  }
  fetch_all(block.ahead + block.steps * bytes, 4 * kPanel);
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
template <bool kMinimums>
void add_results(const int32_t (*sums)[kPanel], const Block& block, int64_t rows,
                 float (*results)[kPanel]) {
  __m512 of_weight[kTiles], minimums[kTiles];
  EDGESPEC_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    of_weight[t] = _mm512_loadu_ps(block.weight_scales + t * kTile);
    minimums[t] = _mm512_load_ps(block.minimums + t * kTile);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const __m512i correction = _mm512_set1_epi32(kMinimums ? 0 : block.corrections[r]);
    const __m512 of_row = _mm512_set1_ps(block.scales[r]);
    EDGESPEC_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      float* at = results[r] + t * kTile;
      const __m512i sum =
          _mm512_add_epi32(_mm512_load_si512(&sums[r][t * kTile]), correction);
      const __m512 scale = _mm512_mul_ps(of_row, of_weight[t]);
      __m512 result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_load_ps(at));
      if (kMinimums) result = _mm512_fmadd_ps(_mm512_set1_ps(block.sums[r]), minimums[t], result);
      _mm512_store_ps(at, result);
    }
  }
}

template <typename Tiles>
struct ByTiles {
  static constexpr int kMostRows = kTileRows;
  static constexpr int kMostGroups = 4;  // their results are 16 KB

  static void widen(const uint8_t* halves, float factor, float* floats) {
    for (int64_t o = 0; o < kPanel; o += kTile) {
      const auto* at = reinterpret_cast<const __m256i*>(halves + 2 * o);
      const __m512 some = _mm512_cvtph_ps(_mm256_loadu_si256(at));
      _mm512_store_ps(floats + o, _mm512_mul_ps(some, _mm512_set1_ps(factor)));
    }
  }

  template <bool kSigned>
  static void multiply_bytes(const uint8_t* bytes, const float* factors, float* floats) {
    for (int64_t o = 0; o < kPanel; o += kTile) {
      const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + o));
      const __m512i wide = kSigned ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some);
      const __m512 made = _mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_load_ps(factors + o));
      _mm512_store_ps(floats + o, made);
    }
  }

  // As RowsOf of matmul_kernel.h.
  template <Values kValues, bool kMinimums>
  class Of {
   public:
    void begin(const Block& block) {
      lines_ = kValues == Values::k8 ? block.values : unpacked_;
      if constexpr (kValues != Values::k8) unpack<kValues>(block, unpacked_);
    }

    void add(int64_t rows, const Block& block, Results<ByTiles>& results) {
      const int64_t lines = block.steps * kLines<kValues>;
      if (kValues == Values::k8) fetch_all(block.ahead, block.ahead_step * lines);
      const int64_t inputs = inputs_of_tile(block.steps * kStep);
      clear_sums<Tiles>();
      for (int64_t i = 0; i < block.steps * kStep; i += inputs) {
        Tiles::template load<kRowsTile>(block.x + i, kSpan);
        add_tiles<Tiles, 0>(lines_ + i / 4 * kLinesBytes);
      }
      store_sums<Tiles>(sums_);
      add_results<kMinimums>(sums_, block, rows, results.of);
    }

   private:
    const uint8_t* lines_ = nullptr;
    alignas(64) int32_t sums_[kTileRows][kPanel];
    alignas(64) uint8_t unpacked_[kPanel * kSpan];
  };
};

// Groups differ by one row at most, and the last is a largest one. The tiles have the rows of the
// largest: of a smaller group they read a row too many, which is the next group's, and its sums go
// nowhere.
template <typename Tiles>
void multiply_by_tiles(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
                       const RoundedRows& rows, float* y) {
  const int64_t most = (rows.num_rows + rows.num_groups - 1) / rows.num_groups;
  const Tiles tiles(config_of(most, inputs_of_tile(shape.block)));
  multiply_panels<ByTiles<Tiles>>(shape, weight, first, last, rows, y,
                                  groups_of<ByTiles<Tiles>, ByTiles<Tiles>>(shape));
}

}  // namespace
}  // namespace edgespec
