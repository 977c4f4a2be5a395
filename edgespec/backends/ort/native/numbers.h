// A small generator of numbers, the same everywhere, for the proofs of levels of instructions.
#pragma once

#include <cstdint>
#include <vector>

namespace edgespec {

class ProofNumbers {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float real() { return static_cast<float>(static_cast<int32_t>(next() % 20001) - 10000) / 3000; }
  // Numbers of half precision: of any sign, up to 2, a few of them subnormal.
  void put_halves(uint8_t* at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t half = next() & 0xbfffu;
      at[2 * i] = static_cast<uint8_t>(half);
      at[2 * i + 1] = static_cast<uint8_t>(half >> 8);
    }
  }
  std::vector<float> reals(int64_t count) {
    std::vector<float> made(static_cast<size_t>(count));
    for (float& value : made) value = real();
    return made;
  }

 private:
  uint64_t state_ = 1;
};

}  // namespace edgespec
