// Packed weights of any form, made of numbers that are the same everywhere.
#pragma once

#include <cstring>
#include <vector>

#include "matmul.h"
#include "numbers.h"

namespace edgespec {

// Any bytes, with scales that are numbers.
inline std::vector<uint8_t> some_weight(const MatMulShape& shape, ProofNumbers& numbers) {
  std::vector<uint8_t> weight(static_cast<size_t>(shape.bytes()));
  for (uint8_t& byte : weight) byte = static_cast<uint8_t>(numbers.next());
  uint8_t* at = weight.data();
  const int64_t behind = shape.block_bytes() - shape.values_bytes();
  for (int64_t i = 0; i < shape.panels() * shape.blocks(); ++i) {
    if (i % shape.blocks() % shape.super_block == 0) {
      numbers.put_halves(at, shape.factor_bytes() / 2);
      at += shape.factor_bytes();
    }
    at += shape.values_bytes();
    if (shape.scales == Scales::kFloat32) {
      for (int64_t o = 0; o < kPanel; ++o) {
        const float scale = numbers.real();
        std::memcpy(at + 4 * o, &scale, 4);
      }
    } else if (!shape.has_factors()) {
      numbers.put_halves(at, behind / 2);
    }
    at += behind;
  }
  return weight;
}

}  // namespace edgespec
