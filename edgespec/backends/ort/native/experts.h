// A mixture of experts of low-bit weights, for rows whose experts a router chose: the layout of an
// expert in memory, and the order in which results are added.
//
// All experts of a layer stand in one tensor, one after the other. An expert is two weights, each
// in panels as matmul.h describes: gate and up [inner, hidden] with their panels in turn, and then
// down [hidden, inner], which may be of another form. So the chosen ones are read from their first
// byte to their last.
//
// An expert is multiplied by all rows that chose it, at once. What a row's experts give, times their
// weights, is added in the order of the experts' numbers, the first to 0; no product is fused into a
// sum. So the bits of a row depend on that row, its experts and their weights alone.
#pragma once

#include <cstdint>
#include <vector>

#include "matmul.h"

namespace edgespec {

struct ExpertsShape {
  int64_t count = 0;
  int64_t hidden = 0;
  int64_t inner = 0;
  MatMulShape form;       // of gate and up, which have sizes of their own
  MatMulShape down_form;  // of down
  // What the scales of each expert's gate, up and down are multiplied by, or one for all.
  std::vector<float> globals = {1.0f};

  int64_t inner_panels() const { return (inner + kPanel - 1) / kPanel; }
  MatMulShape gate_up() const { return sized(form, hidden, 2 * inner_panels() * kPanel); }
  MatMulShape down() const { return sized(down_form, inner, hidden); }
  static MatMulShape sized(MatMulShape shape, int64_t in, int64_t out) {
    shape.in = in;
    shape.out = out;
    return shape;
  }
  // A product of an expert: 0 gate, 1 up, 2 down.
  MatMulShape of_expert(MatMulShape shape, int64_t expert, int64_t part) const {
    shape.global = globals[globals.size() == 1 ? 0 : static_cast<size_t>(3 * expert + part)];
    return shape;
  }
  int64_t expert_bytes() const { return gate_up().bytes() + down().bytes(); }
};

}  // namespace edgespec
