// The product of rows by a weight of 4 or 8 bits: its layout in memory, and what each level of
// instructions computes of it.
//
// A weight [out, in] stands in tiles of 16 outputs, a tile after the other. A tile is its blocks of
// `block` inputs in order, the last one filled up with zeros. A block is its values and then 16
// float32 scales, one per output. Values are unsigned around 8 or 128, 64 bytes a line:
//   8 bits: of 4 inputs, for output after output;
//   4 bits: the same in the low halves, and of the next 4 inputs in the high ones.
//
// A row is rounded to signed bytes, a scale per block. Sums of a block are exact in 32 bits; then
//   y = fma(float(sum), row scale * weight scale, y), block after block.
// So the bits of a row depend on that row and on the weight alone: not on other rows, on threads,
// or on the level of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

constexpr int kLayoutVersion = 1;
constexpr int64_t kTile = 16;  // outputs that stand side by side
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kScalesBytes = kTile * 4;

constexpr float kLargest = 127.0f;         // of a rounded value
constexpr float kSmallestReach = 1e-30f;   // of a row's magnitudes; below it all of it is zero

struct MatMulShape {
  int64_t in = 0;
  int64_t out = 0;
  int bits = 4;
  int64_t block = 32;  // a multiple of 32

  int64_t blocks() const { return (in + block - 1) / block; }
  int64_t padded_in() const { return blocks() * block; }
  int64_t tiles() const { return (out + kTile - 1) / kTile; }
  int64_t values_bytes() const { return kTile * block * bits / 8; }  // of a block of a tile
  int64_t block_bytes() const { return values_bytes() + kScalesBytes; }
  int64_t tile_bytes() const { return blocks() * block_bytes(); }
  int64_t bytes() const { return tiles() * tile_bytes(); }
  int middle() const { return bits == 4 ? 8 : 128; }
};

// Rows rounded to bytes: values [rows, padded_in]; per row and block a scale, and what the middle of
// the weight's unsigned values adds to a sum, negated.
struct QuantizedRows {
  const int8_t* values;
  const float* scales;         // [rows, blocks]
  const int32_t* corrections;  // [rows, blocks]
};

// How a row becomes bytes: a scale per block of it, one per row, or one that is given.
enum class Rounding { kBlock, kRow, kStatic };

struct RowRounding {
  Rounding kind = Rounding::kBlock;
  float scale = 0;  // of kStatic
};

struct MatMulKernels {
  // Rounds one row x [in] to bytes.
  void (*quantize)(const MatMulShape& shape, RowRounding rounding, const float* x, int8_t* values,
                   float* scales, int32_t* corrections);
  // Writes columns of tiles [first, last) of y [num_rows, out]; rows of y stand `stride` floats
  // apart.
  void (*multiply)(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
                   const QuantizedRows& rows, int64_t num_rows, float* y, int64_t stride);
};

extern const MatMulKernels matmul_portable;
extern const MatMulKernels matmul_avx512_vnni;

// Whether kernels give the same bits as the portable ones on a small problem.
bool proves_itself(const MatMulKernels& kernels);

}  // namespace edgespec
