// float32 as the type that an engine computes in, rounded to the nearest, ties to even: a device
// does it in no time, and a CPU does not.

struct Convert {
  unsigned long long source, target;
  long long count;
  int kind, unused;  // 1: float16, 2: bfloat16
};

__device__ unsigned short to_float16(float value) {
  unsigned short out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

__device__ unsigned short to_bfloat16(float value) {
  const unsigned int bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;  // NaN
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

extern "C" __global__ void convert(const Convert of) {
  const float* source = reinterpret_cast<const float*>(of.source);
  unsigned short* target = reinterpret_cast<unsigned short*>(of.target);
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < of.count;
       i += static_cast<long long>(gridDim.x) * blockDim.x)
    target[i] = of.kind == 1 ? to_float16(source[i]) : to_bfloat16(source[i]);
}
