// What operators with packed weights have in common: their attributes, and rows that are rounded
// once for all that multiplies them.
#pragma once

#include <cstdint>

#include "matmul.h"
#include "operator.h"

namespace edgespec {

// How the weights of a node are packed, and how its rows are rounded; `out` is left to the node.
// GraphError where there is no kernel for it.
struct PackedForm {
  MatMulShape shape;
  RowRounding rounding;

  explicit PackedForm(const Info& info);
};

// GraphError where a weight has not the bytes of its shape.
void check_bytes(int64_t bytes, const MatMulShape& shape);

// Rounds the rows x [num_rows, in] of a call, on the threads of the session. They are valid until
// this thread rounds others.
RoundedRows rounded_rows(const Context& context, const MatMulKernels& kernels,
                         const PackedForm& form, const float* x, int64_t num_rows);

}  // namespace edgespec
