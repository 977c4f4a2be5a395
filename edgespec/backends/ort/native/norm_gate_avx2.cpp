// Norms and gates with AVX2 and FMA. Compiled with its own flags; nothing here may be called before
// the machine was asked for them.
#include "norm_gate_kernel.h"

namespace edgespec {

const RowKernels rows_avx2 = {add, norm, gate};

}  // namespace edgespec
