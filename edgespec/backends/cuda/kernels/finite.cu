// Whether the rows of each lane hold NaN or Inf: their exponents have all bits set.

struct NotFinite {
  unsigned long long values;  // [lanes, count]
  unsigned long long flags;   // int [lanes], set where there is one
  long long count;
  int kind, unused;  // 0: float32, 1: float16, 2: bfloat16
};

template <typename Bits>
__device__ bool any_not_finite(const void* values, long long first, long long count, Bits mask) {
  const Bits* bits = static_cast<const Bits*>(values) + first;
  bool found = false;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x)
    found |= (bits[i] & mask) == mask;
  return found;
}

// Blocks in z are lanes.
extern "C" __global__ void not_finite(const NotFinite of) {
  const void* values = reinterpret_cast<const void*>(of.values);
  const long long first = blockIdx.z * of.count;
  bool found;
  if (of.kind == 0)
    found = any_not_finite<unsigned int>(values, first, of.count, 0x7F800000u);
  else if (of.kind == 1)
    found = any_not_finite<unsigned short>(values, first, of.count, 0x7C00);
  else
    found = any_not_finite<unsigned short>(values, first, of.count, 0x7F80);
  if (found) reinterpret_cast<int*>(of.flags)[blockIdx.z] = 1;
}
