// A number of half precision in plain C++.
#pragma once

#include <cstdint>
#include <cstring>

#include "inlining.h"

namespace edgespec {
namespace {

EDGESPEC_INLINE float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t bits = static_cast<uint32_t>(half & 0x7fffu) << 13;
  float out;
  if (bits >= 0x0f800000u) {  // Inf or NaN; a NaN becomes quiet
    bits |= 0x7f800000u;
    if (bits != 0x7f800000u) bits |= 0x00400000u;
  } else if (bits >= 0x00800000u) {
    bits += 0x38000000u;
  } else {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(half & 0x3ffu) * 0x1p-24f;
    memcpy(&bits, &value, sizeof bits);
  }
  bits |= sign;
  memcpy(&out, &bits, sizeof out);
  return out;
}

}  // namespace
}  // namespace edgespec
