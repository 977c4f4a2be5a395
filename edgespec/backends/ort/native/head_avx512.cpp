// The search through rows of logits by AVX-512.

#include "head_kernel.h"

namespace edgespec {

const HeadKernels head_avx512 = {look};

}  // namespace edgespec
