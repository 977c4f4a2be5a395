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
  std::vector<float> reals(int64_t count) {
    std::vector<float> made(static_cast<size_t>(count));
    for (float& value : made) value = real();
    return made;
  }

 private:
  uint64_t state_ = 1;
};

}  // namespace edgespec
