// Norms and gates with what every CPU of this kind has: what every other level has to reproduce bit
// by bit.
#include "norm_gate_kernel.h"

namespace edgespec {

const RowKernels rows_portable = {add, norm, gate};

}  // namespace edgespec
