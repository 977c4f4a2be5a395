// The search through rows of logits by AVX2.

#include "head_kernel.h"

namespace edgespec {

const HeadKernels head_avx2 = {look};

}  // namespace edgespec
