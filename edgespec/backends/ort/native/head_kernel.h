// The search through a part of a row, in vectors of 16 floats as GCC and Clang know them. Each file
// that includes this is compiled with its own instructions, so that nothing here may be shared
// between them: all stands in an unnamed namespace. No product is fused into a sum, so that all
// levels give the same bits.
#pragma once

#include <cmath>
#include <cstring>

#include "head.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed within a file alone

namespace edgespec {
namespace {

constexpr int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

inline Floats load(const float* at) {
  Floats some;
  std::memcpy(&some, at, sizeof some);
  return some;
}

inline Floats all(float value) { return Floats{} + value; }

// The first `count` floats, at most 16, and behind them the first one again.
inline Floats load_some(const float* at, int64_t count) {
  Floats some = all(at[0]);
  std::memcpy(&some, at, static_cast<size_t>(count) * sizeof(float));
  return some;
}

inline Ints bits_of(const Floats& some) {
  Ints bits;
  std::memcpy(&bits, &some, sizeof bits);
  return bits;
}

inline Floats floats_of(const Ints& bits) {
  Floats some;
  std::memcpy(&some, &bits, sizeof some);
  return some;
}

inline Floats larger(const Floats& a, const Floats& b) { return a > b ? a : b; }

// All ones where a float is NaN or Inf.
inline Ints not_finite(const Floats& some) {
  constexpr int32_t kExponent = 0x7f800000;
  return (bits_of(some) & kExponent) == kExponent;
}

inline bool any(const Ints& flags) {
  int32_t found = 0;
  for (int64_t i = 0; i < kLanes; ++i) found |= flags[i];
  return found != 0;
}

inline float largest_of(const Floats& some) {
  float largest = some[0];
  for (int64_t i = 1; i < kLanes; ++i) largest = some[i] > largest ? some[i] : largest;
  return largest;
}

// The sum of 16 floats: the halves, their halves, and so on.
inline float sum_of(const Floats& some) {
  float sums[kLanes];
  std::memcpy(sums, &some, sizeof sums);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// e^x of x <= 0: 2^n times a polynomial in what is left of x, within 2 units of the last place;
// below -87 it stays near 1e-38.
inline Floats exponential(const Floats& given) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats x = larger(given, all(-87.0f));
  const Floats shifted = x * 1.44269504f + kRounds;
  const Floats n = shifted - kRounds;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // n ln 2 in two parts
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = (bits_of(shifted) - bits_of(all(kRounds))) << 23;
  return floats_of(bits_of(p) + exponent);
}

// Whether a logit stands before another that has a smaller id.
inline bool before(float value, float other) {
  return std::isnan(value) ? !std::isnan(other) : value > other;
}

inline bool has_place(const Largest& largest, float value) {
  if (value < largest.floor) return false;
  return largest.filled < largest.count || before(value, largest.at[largest.count - 1].value);
}

// Puts a logit in its place; those that are there have smaller ids.
inline void put(Largest& largest, float value, int64_t id) {
  if (largest.filled < largest.count) ++largest.filled;
  int64_t place = largest.filled - 1;
  for (; place > 0 && before(value, largest.at[place - 1].value); --place) {
    largest.at[place] = largest.at[place - 1];
  }
  largest.at[place] = {value, static_cast<int32_t>(id)};
}

inline void put_all(const float* logits, int64_t count, int64_t first, Largest& largest) {
  for (int64_t i = 0; i < count; ++i) {
    if (has_place(largest, logits[i])) put(largest, logits[i], first + i);
  }
}

// The first of the largest alone: it is searched where the peak is larger.
inline void put_peak(const float* logits, float peak, int64_t first, Largest& largest) {
  int64_t i = 0;
  while (logits[i] != peak) ++i;
  put(largest, logits[i], first + i);
}

// The sum of e^(logit - peak) of finite logits.
inline float sum_of_exponentials(const float* logits, int64_t count, float peak) {
  Floats sums{};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) sums += exponential(load(logits + i) - peak);
  if (whole < count) {
    Floats some = exponential(load_some(logits + whole, count - whole) - peak);
    for (int64_t i = count - whole; i < kLanes; ++i) some[i] = 0.0f;
    sums += some;
  }
  return sum_of(sums);
}

// The same where some are not finite: -Inf adds nothing, and NaN or Inf give NaN.
inline PartSum odd_sum(const float* logits, int64_t count) {
  float peak = -INFINITY, sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(logits[i]) || logits[i] == INFINITY) return {NAN, NAN};
    peak = logits[i] > peak ? logits[i] : peak;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (logits[i] != -INFINITY) sum += exponential(all(logits[i] - peak))[0];
  }
  return {peak, sum};
}

bool look(const float* logits, int64_t count, int64_t first, Largest& largest, PartSum* sum) {
  const int64_t whole = count / kLanes * kLanes;
  Floats peaks = load_some(logits, count < kLanes ? count : kLanes);
  Ints odd = not_finite(peaks);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats some = load(logits + i);
    peaks = larger(some, peaks);
    odd |= not_finite(some);
  }
  if (whole < count) {
    const Floats some = load_some(logits + whole, count - whole);
    peaks = larger(some, peaks);
    odd |= not_finite(some);
  }
  if (any(odd)) {
    put_all(logits, count, first, largest);
    if (sum != nullptr) *sum = odd_sum(logits, count);
    return false;
  }
  const float peak = largest_of(peaks);
  if (has_place(largest, peak)) {
    if (largest.count == 1) {
      put_peak(logits, peak, first, largest);
    } else {
      put_all(logits, count, first, largest);
    }
  }
  if (sum != nullptr) *sum = {peak, sum_of_exponentials(logits, count, peak)};
  return true;
}

}  // namespace
}  // namespace edgespec
