// The product of rows by a weight of 4, 6 or 8 bits: its layout in memory, and what each level of
// instructions computes of it.
//
// A weight [out, in] stands in panels of 64 outputs, one after the other, so that it is read from
// its first byte to its last. A panel is its blocks of `block` inputs in order, the last one filled
// up. A block is its values, then a scale for each of the 64 outputs, and then a minimum for each,
// where it has minimums. Where scales and minimums are bytes, they are multiplied by factors that
// `super_block` blocks share; these stand in front of the first of them.
//
// Values stand in lines of 64 bytes, of which each has 16 outputs, so that four lines are for the
// four tiles of 16 outputs. A line has 4 inputs, those of one output side by side:
//   8 bits: 4 lines a tile have 16 inputs;
//   4 bits: 2 lines, with 4 inputs in the low halves and the next 4 in the high ones;
//   6 bits: 2 lines as of 4 bits, and then one with the upper two bits, of the first 4 inputs lowest.
// Values are unsigned: around the middle of their range; or with minimums from zero on; or they are
// places in a codebook of signed numbers.
//
// A row is rounded to signed bytes, a scale per block. Sums of a block are exact in 32 bits; then
//   y = fma(float(sum), row scale * weight scale, y), and with minimums
//   y = fma(row scale * float(sum of the row's bytes), -minimum, y), block after block.
// So the bits of a row depend on that row and on the weight alone: not on other rows, on threads,
// or on the level of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

constexpr int kLayoutVersion = 2;  // of 1 are float32 scales of 4 and 8 bits, read as ever
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kTile = 16;  // outputs of a line
constexpr int kTiles = 4;      // of a panel
constexpr int64_t kPanel = kTiles * kTile;
constexpr int64_t kStep = 16;  // inputs whose lines stand together

constexpr int64_t kSpan = 128;             // inputs; the longest block
constexpr float kLargest = 127.0f;         // of a rounded value
constexpr float kLargestFloat = 3.402823466e38f;
constexpr float kSmallestReach = 1e-30f;   // of a row's magnitudes; below it all of it is zero

// What blocks have of each output, and in the last two with a factor that some of them share.
enum class Scales {
  kFloat32,
  kFloat16,
  kFloat16Min,  // a minimum as well
  kSuper,       // a signed byte
  kSuperMin,    // two bytes, scale and minimum
};

// The numbers that values of 4 bits stand for. Of fp4 they are twice those of E2M1.
enum class Codebook { kNone, kIq4Nl, kFp4 };
constexpr int8_t kCodebooks[][16] = {
    {},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
constexpr int kCodesMiddle = 128;

struct MatMulShape {
  int64_t in = 0;
  int64_t out = 0;
  int bits = 4;        // or 6 or 8
  int64_t block = 32;  // or 16, 64 or 128
  Scales scales = Scales::kFloat32;
  int64_t super_block = 1;  // blocks that share factors
  Codebook codebook = Codebook::kNone;
  float global = 1.0f;  // factors are multiplied by it, without these scales and minimums

  bool has_minimums() const {
    return scales == Scales::kFloat16Min || scales == Scales::kSuperMin;
  }
  bool has_factors() const { return scales == Scales::kSuper || scales == Scales::kSuperMin; }
  int64_t blocks() const { return (in + block - 1) / block; }
  int64_t spans() const { return (in + kSpan - 1) / kSpan; }
  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
  int64_t lines() const { return block * bits / 32; }                 // of a tile of a block
  int64_t values_bytes() const { return kPanel * block * bits / 8; }  // of a block of a panel
  int64_t scale_bytes() const {  // of an output
    return scales == Scales::kFloat32 ? 4 : has_factors() ? 1 : 2;
  }
  int64_t block_bytes() const {
    return values_bytes() + kPanel * scale_bytes() * (has_minimums() ? 2 : 1);
  }
  int64_t factor_bytes() const { return has_factors() ? kPanel * (has_minimums() ? 4 : 2) : 0; }
  int64_t panel_bytes() const {
    return blocks() * block_bytes() + (blocks() + super_block - 1) / super_block * factor_bytes();
  }
  int64_t bytes() const { return panels() * panel_bytes(); }
  // What stands for zero.
  int middle() const {
    if (has_minimums()) return 0;
    return codebook == Codebook::kNone ? 1 << (bits - 1) : kCodesMiddle;
  }
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
// rows] a scale; what the middle of the weight's unsigned values adds to a sum, negated; and for a
// weight with minimums their sum times the scale. `corrections` are then what a middle of -128 would
// ask for, for instructions that take signed values alone.
struct RowGroup {
  int64_t first = 0;  // row
  int64_t count = 0;
  int8_t* values = nullptr;
  float* scales = nullptr;
  int32_t* corrections = nullptr;
  float* sums = nullptr;

  void put(const MatMulShape& shape, int64_t block, int64_t row, float scale, int32_t sum) const {
    const int64_t at = block * count + row;
    scales[at] = scale;
    corrections[at] = -shape.middle() * sum;
    if (!shape.has_minimums()) return;
    corrections[at] = 128 * sum;
    sums[at] = scale * static_cast<float>(sum);
  }

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
  float* sums = nullptr;

  int64_t begin(int64_t group) const { return num_rows * group / num_groups; }
  RowGroup group(int64_t index) const {
    const int64_t first = begin(index);
    return {first, begin(index + 1) - first, values + first * spans * kSpan, scales + first * blocks,
            corrections + first * blocks, sums + first * blocks};
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
