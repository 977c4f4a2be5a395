// Runs the product by tiles on a stand-in of AMX's tile registers: arrays in memory, with the
// arithmetic and the demands of Intel's description of the instructions. Its results must have the
// portable level's bits. It is no run of AMX.
//
// Beside that, what AMX's trial says to a process that never asked for the registers.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "matmul_amx.h"
#include "matmul_proof.h"

namespace edgespec {

const MatMulKernels matmul_avx512_vnni = {};  // of AMX's file only its trial is called

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

void demand(bool holds, const char* what) {
  if (holds) return;
  std::printf("AMX would fault: %s\n", what);
  std::exit(1);
}

class TilesInMemory {
 public:
  explicit TilesInMemory(const TileConfig& config) {
    demand(config.palette == 1 && config.start_row == 0, "palette");
    for (int t = 0; t < 8; ++t) {
      demand(config.rows[t] <= 16 && config.row_bytes[t] <= 64, "more than a tile has");
      demand((config.rows[t] == 0) == (config.row_bytes[t] == 0), "rows without bytes");
    }
    for (int t = 8; t < 16; ++t) demand(config.rows[t] + config.row_bytes[t] == 0, "tiles 8 to 15");
    for (uint8_t byte : config.reserved) demand(byte == 0, "reserved");
    config_ = config;
    std::memset(tiles_, 0, sizeof tiles_);
  }
  ~TilesInMemory() { config_ = {}; }

  template <int kTileNumber>
  static void zero() {
    demand(rows(kTileNumber) > 0, "not configured");
    std::memset(tiles_[kTileNumber], 0, sizeof tiles_[kTileNumber]);
  }
  template <int kTileNumber>
  static void load(const void* at, int64_t distance) {
    zero<kTileNumber>();
    for (int r = 0; r < rows(kTileNumber); ++r) {
      std::memcpy(tiles_[kTileNumber][r], static_cast<const uint8_t*>(at) + r * distance,
                  static_cast<size_t>(bytes(kTileNumber)));
    }
  }
  template <int kTileNumber>
  static void store(void* at, int64_t distance) {
    demand(rows(kTileNumber) > 0, "not configured");
    for (int r = 0; r < rows(kTileNumber); ++r) {
      std::memcpy(static_cast<uint8_t*>(at) + r * distance, tiles_[kTileNumber][r],
                  static_cast<size_t>(bytes(kTileNumber)));
    }
  }
  // TDPBSUD
  template <int kSumsTile, int kSigned, int kUnsigned>
  static void add_products() {
    demand(kSumsTile != kSigned && kSumsTile != kUnsigned && kSigned != kUnsigned, "same tiles");
    demand(rows(kSumsTile) == rows(kSigned), "rows of the sums");
    demand(bytes(kSumsTile) == bytes(kUnsigned), "columns of the sums");
    demand(bytes(kSigned) == 4 * rows(kUnsigned), "inputs");
    for (int m = 0; m < rows(kSumsTile); ++m) {
      for (int k = 0; k < bytes(kSigned); ++k) {
        const auto x = static_cast<int8_t>(tiles_[kSigned][m][k]);
        for (int n = 0; n < bytes(kSumsTile) / 4; ++n) {
          int32_t sum;
          std::memcpy(&sum, &tiles_[kSumsTile][m][4 * n], 4);
          sum += x * tiles_[kUnsigned][k / 4][4 * n + k % 4];
          std::memcpy(&tiles_[kSumsTile][m][4 * n], &sum, 4);
        }
      }
    }
  }

 private:
  static int rows(int tile) { return config_.rows[tile]; }
  static int bytes(int tile) { return config_.row_bytes[tile]; }

  static TileConfig config_;
  static uint8_t tiles_[8][16][64];
};

TileConfig TilesInMemory::config_;
uint8_t TilesInMemory::tiles_[8][16][64];

// The memory of rounded rows, just as much as they need.
struct Memory {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> corrections;
  std::vector<float> sums;
  RoundedRows rows;

  Memory(const MatMulShape& shape, int64_t num_rows, int64_t most_rows) {
    values.resize(static_cast<size_t>(num_rows * shape.spans() * kSpan));
    scales.resize(static_cast<size_t>(num_rows * shape.blocks()));
    corrections.resize(scales.size());
    sums.resize(scales.size());
    rows.num_rows = num_rows;
    rows.num_groups = (num_rows + most_rows - 1) / most_rows;
    rows.spans = shape.spans();
    rows.blocks = shape.blocks();
    rows.values = values.data();
    rows.scales = scales.data();
    rows.corrections = corrections.data();
    rows.sums = sums.data();
  }
};

void compare(const MatMulShape& shape, int64_t num_rows, ProofNumbers& numbers) {
  const std::vector<uint8_t> weight = some_weight(shape, numbers);
  std::vector<float> x(static_cast<size_t>(num_rows * shape.in));
  for (float& value : x) value = numbers.real();
  std::vector<float> wanted(static_cast<size_t>(num_rows * shape.out)), found(wanted.size());

  Memory plain(shape, num_rows, matmul_portable.most_rows);
  for (int64_t g = 0; g < plain.rows.num_groups; ++g) {
    matmul_portable.quantize(shape, {}, x.data(), plain.rows.group(g));
  }
  matmul_portable.multiply(shape, weight.data(), 0, shape.panels(), plain.rows, wanted.data());

  Memory tiled(shape, num_rows, kTileRows);
  for (int64_t g = 0; g < tiled.rows.num_groups; ++g) {
    matmul_portable.quantize(shape, {}, x.data(), tiled.rows.group(g));
  }
  multiply_by_tiles<TilesInMemory>(shape, weight.data(), 0, shape.panels(), tiled.rows,
                                   found.data());
  char what[100];
  std::snprintf(what, sizeof what, "%d bits, blocks of %d, %d inputs, %d rows", shape.bits,
                static_cast<int>(shape.block), static_cast<int>(shape.in),
                static_cast<int>(num_rows));
  expect(std::memcmp(found.data(), wanted.data(), found.size() * sizeof(float)) == 0, what);
}

void handler(int) {}

}  // namespace
}  // namespace edgespec

int main() {
  using namespace edgespec;
  ProofNumbers numbers;
  int count = 0;
  const MatMulShape forms[] = {
      {0, 70, 4, 32},
      {0, 70, 4, 64},
      {0, 70, 4, 128},
      {0, 70, 8, 32},
      {0, 70, 8, 64},
      {0, 70, 8, 128},
      {0, 70, 4, 16, Scales::kFloat16Min},
      {0, 70, 4, 32, Scales::kSuperMin, 8},
      {0, 70, 6, 64, Scales::kFloat16},
      {0, 70, 6, 16, Scales::kSuper, 16},
      {0, 70, 6, 128, Scales::kSuperMin, 1},
      {0, 70, 8, 16, Scales::kSuperMin, 3},
      {0, 70, 4, 32, Scales::kSuper, 8, Codebook::kIq4Nl},
      {0, 70, 4, 16, Scales::kFloat16, 1, Codebook::kFp4, 0.3f},
  };
  for (MatMulShape shape : forms) {
    for (int64_t num_rows : {1, 5, 15, 16, 17, 31, 33, 60, 61, 65, 130}) {
      shape.in = num_rows % 2 == 0 ? 129 : 300;
      compare(shape, num_rows, numbers);
      ++count;
    }
  }
  std::signal(SIGILL, handler);
  expect(!amx_runs(), "AMX ran in a process that never asked for its registers");
  expect(std::signal(SIGILL, SIG_DFL) == handler, "the handler of SIGILL is another one");
  std::printf("%d products, %d failures\n", count, failures);
  return failures == 0 ? 0 : 1;
}
