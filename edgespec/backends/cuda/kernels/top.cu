// The largest logits of each row, descending, equal ones by their ids, and the logarithm of the sum
// of all exponentials. A NaN counts as largest, and -0 equals 0, as on the host. First each part of a
// row on its own, then the parts of a row together.

constexpr int TOP_THREADS = 256, TOP_EACH = 16;  // a part has their product of ids

struct TopParts {
  unsigned long long logits;  // float [rows, stride]
  unsigned long long keys;    // [rows, parts, count]
  unsigned long long sums;    // float [rows, parts]: of exp(logit - the part's largest)
  int stride, ids, parts, count;
};

struct TopRows {
  unsigned long long keys, sums;  // of all parts
  unsigned long long ids;         // int [rows, count]
  unsigned long long values;      // float [rows, count]
  unsigned long long logsumexp;   // float [rows]; NaN where a logit is NaN or Inf
  int parts, count;
};

// Larger for a larger logit, and of equal ones for a smaller id; never 0.
__device__ unsigned long long top_key(float value, int id) {
  unsigned int bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) bits = 0x7FFFFFFFu;  // NaN
  bits ^= bits >> 31 ? 0xFFFFFFFFu : 0x80000000u;
  return static_cast<unsigned long long>(bits) << 32 | static_cast<unsigned int>(0x7FFFFFFF - id);
}

__device__ float top_value(unsigned long long key) {
  const unsigned int bits = static_cast<unsigned int>(key >> 32);
  return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}

// The largest of what the threads of a block hold.
__device__ unsigned long long largest_of(unsigned long long own) {
  __shared__ unsigned long long all[TOP_THREADS];
  all[threadIdx.x] = own;
  __syncthreads();
  for (int half = TOP_THREADS / 2; half; half /= 2) {
    if (threadIdx.x < half && all[threadIdx.x + half] > all[threadIdx.x])
      all[threadIdx.x] = all[threadIdx.x + half];
    __syncthreads();
  }
  const unsigned long long found = all[0];
  __syncthreads();
  return found;
}

// The sum of what the threads of a block hold, always in the same order.
__device__ float sum_of(float own) {
  __shared__ float all[TOP_THREADS];
  all[threadIdx.x] = own;
  __syncthreads();
  for (int half = TOP_THREADS / 2; half; half /= 2) {
    if (threadIdx.x < half) all[threadIdx.x] += all[threadIdx.x + half];
    __syncthreads();
  }
  const float found = all[0];
  __syncthreads();
  return found;
}

// Blocks in x are parts, in y rows.
extern "C" __global__ void top_parts(const TopParts of) {
  const long long row = blockIdx.y, place = row * of.parts + blockIdx.x;
  const float* logits = reinterpret_cast<const float*>(of.logits) + row * of.stride;
  const int first = blockIdx.x * (TOP_THREADS * TOP_EACH) + threadIdx.x;
  unsigned long long own[TOP_EACH];
#pragma unroll
  for (int i = 0; i < TOP_EACH; ++i) {
    const int id = first + i * TOP_THREADS;
    own[i] = id < of.ids ? top_key(logits[id], id) : 0;
  }
  unsigned long long* keys = reinterpret_cast<unsigned long long*>(of.keys) + place * of.count;
  unsigned long long last = ~0ull, peak = 0;
  for (int i = 0; i < of.count; ++i) {
    unsigned long long next = 0;  // of this thread, behind the last one found
#pragma unroll
    for (int j = 0; j < TOP_EACH; ++j)
      if (own[j] < last && own[j] > next) next = own[j];
    last = largest_of(next);
    if (i == 0) peak = last;
    if (threadIdx.x == 0) keys[i] = last;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TOP_EACH; ++i) {
    const float value = top_value(own[i]);
    const bool finite = (__float_as_uint(value) & 0x7F800000u) != 0x7F800000u;
    if (own[i]) sum += finite ? expf(value - top_value(peak)) : __uint_as_float(0x7FFFFFFFu);
  }
  sum = sum_of(sum);
  if (threadIdx.x == 0) reinterpret_cast<float*>(of.sums)[place] = sum;
}

// Blocks in x are rows; each thread has one part, whose keys descend.
extern "C" __global__ void top_rows(const TopRows of) {
  const long long row = blockIdx.x, place = row * of.parts + threadIdx.x;
  const bool has_part = threadIdx.x < of.parts;
  const unsigned long long* keys =
      reinterpret_cast<const unsigned long long*>(of.keys) + place * of.count;
  unsigned long long peak = 0;
  int at = 0;
  for (int i = 0; i < of.count; ++i) {
    const unsigned long long next = has_part && at < of.count ? keys[at] : 0;
    const unsigned long long found = largest_of(next);
    if (next == found) ++at;
    if (i == 0) peak = found;
    if (threadIdx.x == 0) {
      const int id = 0x7FFFFFFF - static_cast<int>(found & 0x7FFFFFFFu);
      reinterpret_cast<int*>(of.ids)[row * of.count + i] = id;
      reinterpret_cast<float*>(of.values)[row * of.count + i] = top_value(found);
    }
  }
  float sum = 0.0f;
  if (has_part)
    sum = reinterpret_cast<const float*>(of.sums)[place] * expf(top_value(keys[0]) - top_value(peak));
  sum = sum_of(sum);
  if (threadIdx.x == 0)
    reinterpret_cast<float*>(of.logsumexp)[row] = top_value(peak) + logf(sum);
}
