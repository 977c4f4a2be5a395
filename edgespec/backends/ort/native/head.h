// What is looked for in rows of logits: the largest of them, the logarithm of the sum of their
// exponentials, and whether all are numbers. The head looks while they are in the cache, so that
// they need not be written.
//
// Larger comes first, equal ones by their ids; a NaN counts as largest, and -0 equals 0. The sum is
// made of parts of kPart ids, from id 0 on: within a part 16 sums in a fixed order, and parts in
// their order. So what is found in a row depends on that row alone: not on other rows, on threads,
// or on the level of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

constexpr int64_t kPart = 512;  // ids
constexpr int64_t kMostTop = 64;

struct Candidate {
  float value;
  int32_t id;
};

// The largest logits of a row so far, in their order; room for `count`. Elsewhere in the row there
// are as many that are not below `floor`: what is below it has no place.
struct Largest {
  Candidate* at;
  int64_t count;
  int64_t filled;
  float floor;
};

// What a part adds to the sum of exponentials: e^peak * sum.
struct PartSum {
  float peak;
  float sum;
};

struct HeadKernels {
  // Looks through a part of a row, or the first logits of one: `count` from the id `first` on. What
  // comes before has been looked through. Without `sum` no sum is made. Returns whether all are
  // finite.
  bool (*look)(const float* logits, int64_t count, int64_t first, Largest& largest, PartSum* sum);
};

extern const HeadKernels head_portable;
extern const HeadKernels head_avx2;
extern const HeadKernels head_avx512;

// Whether kernels give the same bits as the portable ones on a small problem.
bool proves_itself(const HeadKernels& kernels);

// What is looked for in the first `ids` logits of each row.
struct Search {
  int64_t count;  // of the largest
  int64_t ids;
  bool sums;  // of exponentials

  int64_t parts() const { return (ids + kPart - 1) / kPart; }
};

// Where what is found is written: `count` of each row, and one of each row.
struct Places {
  int64_t* ids;
  float* values;
  float* logsumexp;  // NaN without sums
  bool* finite;
};

// Looks through rows that stand `stride` logits apart, on the calling thread.
void find(const HeadKernels& kernels, const Search& search, const float* logits, int64_t num_rows,
          int64_t stride, const Places& places);

}  // namespace edgespec
