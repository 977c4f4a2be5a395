// The product of rows by a weight of 4 or 8 bits: its layout in memory, and what each level of
// instructions computes of it.
//
// A weight [out, in] stands in panels of 64 outputs, one after the other, so that it is read from
// its first byte to its last. A panel is its blocks of `block` inputs in order, the last one filled
// up with zeros. A block is its values and then 64 float32 scales, one per output. Values are
// unsigned around 8 or 128, in lines of 64 bytes, of which each has 16 outputs. Four lines, for the
// four tiles of 16 outputs in order, have
//   8 bits: the same 4 inputs, those of one output side by side;
//   4 bits: 4 inputs in the low halves, and the next 4 in the high ones.
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
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kTile = 16;  // outputs of a line
constexpr int kTiles = 4;      // of a panel
constexpr int64_t kPanel = kTiles * kTile;
constexpr int64_t kScalesBytes = kPanel * 4;

constexpr int64_t kSpan = 128;             // inputs; the longest block
constexpr float kLargest = 127.0f;         // of a rounded value
constexpr float kLargestFloat = 3.402823466e38f;
constexpr float kSmallestReach = 1e-30f;   // of a row's magnitudes; below it all of it is zero

struct MatMulShape {
  int64_t in = 0;
  int64_t out = 0;
  int bits = 4;
  int64_t block = 32;  // or 64 or 128

  int64_t blocks() const { return (in + block - 1) / block; }
  int64_t spans() const { return (in + kSpan - 1) / kSpan; }
  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
  int64_t values_bytes() const { return kPanel * block * bits / 8; }  // of a block of a panel
  int64_t block_bytes() const { return values_bytes() + kScalesBytes; }
  int64_t panel_bytes() const { return blocks() * block_bytes(); }
  int64_t bytes() const { return panels() * panel_bytes(); }
  int middle() const { return bits == 4 ? 8 : 128; }
};

// How a row becomes bytes: a scale per block of it, one per row, or one that is given.
enum class Rounding { kBlock, kRow, kStatic };

struct RowRounding {
  Rounding kind = Rounding::kBlock;
  float scale = 0;  // of kStatic
};

// What a value is divided by to be rounded: by a scale that is given, as QuantizeLinear does; or
// multiplied by how many units the reach of a block or a row has. Of what is not finite it is NaN.
struct Scale {
  float scale;
  float inverse;
  bool divides;

  float units(float x) const { return divides ? x / scale : x * inverse; }
};

inline Scale scale_of(RowRounding rounding, float reach) {
  if (rounding.kind == Rounding::kStatic) {
    return {reach <= kLargestFloat ? rounding.scale : __builtin_nanf(""), 0.0f, true};
  }
  if (reach < kSmallestReach) return {0.0f, 0.0f, false};
  return {reach / kLargest, kLargest / reach, false};
}

// Rows rounded to bytes, in groups of rows that are multiplied together. A group has its values
// [spans, rows, kSpan], so that rows stand at a fixed distance; and per block of each row [blocks,
// rows] a scale, and what the middle of the weight's unsigned values adds to a sum, negated.
struct RowGroup {
  int64_t first = 0;  // row
  int64_t count = 0;
  int8_t* values = nullptr;
  float* scales = nullptr;
  int32_t* corrections = nullptr;

  // Where a row's values from `input` on stand, up to the end of its span.
  int8_t* at(int64_t row, int64_t input) const {
    return values + (input / kSpan * count + row) * kSpan + input % kSpan;
  }
};

// Rows of a call, split evenly into groups of at most `most`.
struct RoundedRows {
  int64_t num_rows = 0;
  int64_t num_groups = 0;
  int64_t spans = 0;
  int64_t blocks = 0;
  int8_t* values = nullptr;
  float* scales = nullptr;
  int32_t* corrections = nullptr;

  int64_t begin(int64_t group) const { return num_rows * group / num_groups; }
  RowGroup group(int64_t index) const {
    const int64_t first = begin(index);
    return {first, begin(index + 1) - first, values + first * spans * kSpan, scales + first * blocks,
            corrections + first * blocks};
  }
};

struct MatMulKernels {
  int64_t most_rows;  // of a group
  // Rounds the rows of a group, which stand in x [num_rows, in].
  void (*quantize)(const MatMulShape& shape, RowRounding rounding, const float* x,
                   const RowGroup& group);
  // Writes the columns of panels [first, last) of y [num_rows, out].
  void (*multiply)(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
                   const RoundedRows& rows, float* y);
};

extern const MatMulKernels matmul_portable;
extern const MatMulKernels matmul_avx2;
extern const MatMulKernels matmul_avx_vnni;
extern const MatMulKernels matmul_avx512_vnni;
extern const MatMulKernels matmul_amx_int8;
extern const MatMulKernels matmul_neon;
extern const MatMulKernels matmul_neon_dotprod;
extern const MatMulKernels matmul_neon_i8mm;

// y [num_rows, out] of x [num_rows, in], on the calling thread.
void multiply(const MatMulKernels& kernels, const MatMulShape& shape, RowRounding rounding,
              const uint8_t* weight, const float* x, int64_t num_rows, float* y);

// Whether the instructions of AMX run, where the CPU lists them and the operating system grants their
// registers: tried once, with the fault caught that some machines give.
bool amx_runs();

// Whether kernels give the same bits as the portable ones on a small problem.
bool proves_itself(const MatMulKernels& kernels);

}  // namespace edgespec
