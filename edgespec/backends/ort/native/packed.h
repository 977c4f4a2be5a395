// What operators with packed weights have in common: their attributes, and rows that are rounded
// once for all that multiplies them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "matmul.h"
#include "operator.h"

namespace edgespec {

// How the weights of a node are packed, and how its rows are rounded; `out` is left to the node.
// GraphError where there is no kernel for it.
struct PackedForm {
  MatMulShape shape;
  RowRounding rounding;

  explicit PackedForm(const Info& info);

  // Of the node's weights, one or more; GraphError where they cannot be.
  std::vector<MatMulShape> shapes(const Info& info) const;
};

// The form of a node's weights without their sizes, by the attributes whose names begin with
// `prefix`. GraphError where there is no kernel for it.
MatMulShape form_of(const Info& info, const std::string& prefix = "");

// What the scales of each of `count` weights are multiplied by.
std::vector<float> global_scales(const Info& info, size_t count);

// GraphError where a weight has not the bytes of its shape.
void check_bytes(int64_t bytes, const MatMulShape& shape);

// Rounds the rows x [num_rows, in] of a call, on the threads of the session. They are valid until
// this thread rounds others.
RoundedRows rounded_rows(const Context& context, const MatMulKernels& kernels,
                         const PackedForm& form, const float* x, int64_t num_rows);

}  // namespace edgespec
