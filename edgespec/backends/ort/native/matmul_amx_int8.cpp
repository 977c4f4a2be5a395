// The product by AMX-INT8. Few rows, which wait for memory anyhow, are multiplied by AVX-512 VNNI:
// sums are exact, so that their bits are the same.

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include "matmul_amx.h"

namespace edgespec {
namespace {

constexpr int64_t kFewRows = 4;

// The tiles of the calling thread. What another library had configured is there again afterwards.
class AmxTiles {
 public:
  explicit AmxTiles(const TileConfig& config) {
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    configure(config);
  }
  ~AmxTiles() {
    if (before_.palette == 0) {
      release();
    } else {
      configure(before_);
    }
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  static void configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { __asm__ volatile("tilerelease"); }

  template <int kTileNumber>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTileNumber));
  }
  template <int kTileNumber>
  static void load(const void* at, int64_t distance) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(at), "r"(distance), "i"(kTileNumber)
                     : "memory");
  }
  template <int kTileNumber>
  static void store(void* at, int64_t distance) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(at), "r"(distance), "i"(kTileNumber)
                     : "memory");
  }
  // TDPBSUD; the assembler has the operands from the last to the first.
  template <int kSumsTile, int kSigned, int kUnsigned>
  static void add_products() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     :
                     : "i"(kSumsTile), "i"(kSigned), "i"(kUnsigned));
  }

 private:
  TileConfig before_;
};

void quantize_rows(const MatMulShape& shape, RowRounding rounding, const float* x,
                   const RowGroup& group) {
  matmul_avx512_vnni.quantize(shape, rounding, x, group);
}

void multiply_rows(const MatMulShape& shape, const uint8_t* weight, int64_t first, int64_t last,
                   const RoundedRows& rows, float* y) {
  const auto by = rows.num_rows <= kFewRows ? matmul_avx512_vnni.multiply
                                            : multiply_by_tiles<AmxTiles>;
  by(shape, weight, first, last, rows, y);
}

// A small product, 1 * 2 + 1 * 3 + 1 * 4 + 1 * 250, with no object that a fault would leave behind.
bool tiles_multiply() {
  alignas(64) static const int8_t row[kTileInputs] = {1, 1, 1, 1};
  alignas(64) static const uint8_t lines[kTileInputs / 4 * kLine] = {2, 3, 4, 250};
  alignas(64) int32_t sums[kTile] = {};
  AmxTiles::configure(config_of(1, kTileInputs));
  AmxTiles::zero<kSums>();
  AmxTiles::load<kRowsTile>(row, kTileInputs);
  AmxTiles::load<kEvenTile>(lines, kLine);
  AmxTiles::add_products<kSums, kRowsTile, kEvenTile>();
  AmxTiles::store<kSums>(sums, kLine);
  AmxTiles::release();
  return sums[0] == 259 && sums[1] == 0;
}

// What SIGILL did before, and where the thread that tries goes on after one.
struct sigaction before_trial;
sigjmp_buf after_fault;
pthread_t trying;

// The fault of another thread goes where it would have gone; with no handler there the process
// ends, as its instruction faults once more.
void on_fault(int number, siginfo_t* info, void* context) {
  if (pthread_equal(trying, pthread_self()) != 0) siglongjmp(after_fault, 1);
  if ((before_trial.sa_flags & SA_SIGINFO) != 0) {
    before_trial.sa_sigaction(number, info, context);
  } else if (before_trial.sa_handler == SIG_DFL || before_trial.sa_handler == SIG_IGN) {
    sigaction(SIGILL, &before_trial, nullptr);
  } else {
    before_trial.sa_handler(number);
  }
}

bool try_tiles() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  trying = pthread_self();
  if (sigaction(SIGILL, &action, &before_trial) != 0) return false;
  volatile bool runs = false;
  if (sigsetjmp(after_fault, 1) == 0) runs = tiles_multiply();
  sigaction(SIGILL, &before_trial, nullptr);
  return runs;
}

}  // namespace

bool amx_runs() {
  static const bool runs = try_tiles();
  return runs;
}

const MatMulKernels matmul_amx_int8 = {kTileRows, quantize_rows, multiply_rows};

}  // namespace edgespec
