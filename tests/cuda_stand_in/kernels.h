// What CUDA C means on the host, for tests: the project's own kernels are compiled behind this and
// run by the stand-in of a driver. A block's threads take turns from one __syncthreads to the next,
// in any order that is asked for, so that what depends on the order shows.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

struct Index {
  unsigned x, y, z;
};

static Index blockIdx, threadIdx, blockDim, gridDim;

namespace stand_in {

const size_t STACK_BYTES = 64 << 10;
const int LAUNCH_FAILED = 719;

// A thread's own stack is made by makecontext; from then on jumps change stacks, which cost less
struct Thread {
  ucontext_t start;
  jmp_buf place;
  Index index;
  bool begun, done;
};

static ucontext_t first;
static jmp_buf scheduler;
static Thread* running;
static std::function<void()> kernel;

static void begin() {
  kernel();
  running->done = true;
  _longjmp(scheduler, 1);
}

static void wait() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

// Lets a thread run to its next barrier or its end
static void resume(Thread& thread) {
  running = &thread;
  threadIdx = thread.index;
  if (_setjmp(scheduler)) return;
  if (thread.begun) _longjmp(thread.place, 1);
  thread.begun = true;
  swapcontext(&first, &thread.start);
}

// The numbers below a count, as they come or shuffled
static std::vector<unsigned> in_order(unsigned count, std::mt19937* random) {
  std::vector<unsigned> out(count);
  for (unsigned i = 0; i < count; ++i) out[i] = i;
  if (random) std::shuffle(out.begin(), out.end(), *random);
  return out;
}

static int run_block(std::vector<Thread>& threads, std::vector<char>& stacks,
                     std::mt19937* random) {
  for (unsigned i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.begun = thread.done = false;
    thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
    thread.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.start, begin, 0);
  }
  for (;;) {
    size_t done = 0;
    for (unsigned i : in_order(threads.size(), random)) {
      resume(threads[i]);
      done += threads[i].done;
    }
    if (done == threads.size()) return 0;
    if (done) return LAUNCH_FAILED;  // some wait for others that have ended
  }
}

static int run(std::function<void()> of, const unsigned* grid, const unsigned* block,
               unsigned seed) {
  std::mt19937 random(seed);
  kernel = std::move(of);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  std::vector<Thread> threads(block[0] * block[1] * block[2]);
  static std::vector<char> stacks;
  stacks.resize(std::max(stacks.size(), threads.size() * STACK_BYTES));
  for (unsigned i : in_order(grid[0] * grid[1] * grid[2], seed ? &random : nullptr)) {
    blockIdx = {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
    if (int code = run_block(threads, stacks, seed ? &random : nullptr)) return code;
  }
  return 0;
}

// PTX of a float, to the nearest and ties to even
static unsigned short ptx(const char* instruction, float value) {
  if (strcmp(instruction, "\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(out) : \"f\"(value)")) {
    fprintf(stderr, "the stand-in does not know asm(%s)\n", instruction);
    abort();
  }
  if (std::isnan(value)) return 0x7FFF;
  unsigned short sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7C00;
  int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return sign | static_cast<unsigned short>(((exponent + 14) << 10) + steps);
}

}  // namespace stand_in

#define __global__
#define __device__ static inline
#define __shared__ static
#define asm(...) out = stand_in::ptx(#__VA_ARGS__, value)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

static inline void __syncthreads() { stand_in::wait(); }

static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A kernel that takes one structure by value, as the driver finds it
#define KERNEL(name, Structure)                                                             \
  extern "C" {                                                                              \
  size_t bytes_##name = sizeof(Structure);                                                  \
  int run_##name(const void* from, const unsigned* grid, const unsigned* block, unsigned seed) { \
    Structure structure;                                                                    \
    memcpy(&structure, from, sizeof structure);                                             \
    return stand_in::run([&] { name(structure); }, grid, block, seed);                      \
  }                                                                                         \
  }
