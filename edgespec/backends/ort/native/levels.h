// The levels of instructions that kernels were written for, and which of them is in use.
//
// A level is usable where the CPU has its instructions and its kernels gave the same bits as the
// portable ones on a small problem, which is tried once, when the level is first asked for: the
// best one as soon as a kernel runs.
#pragma once

#include <string>
#include <vector>

namespace edgespec {

struct AttentionKernels;
struct DeltaNetKernels;
struct HeadKernels;
struct MatMulKernels;
struct RowKernels;

struct Level {
  const char* name;
  bool cpu_has_it;
  const MatMulKernels* matmul;
  const AttentionKernels* attention;
  const RowKernels* rows;
  const DeltaNetKernels* delta_net;
  const HeadKernels* head;
};

// The usable levels, the best one first; the portable one is always the last.
std::vector<Level> usable_levels();
// The level whose kernels run: the best one, until another is chosen.
const Level& level();
// Whether there is a usable level of that name; it is in use afterwards.
bool use_level(const std::string& name);

}  // namespace edgespec
