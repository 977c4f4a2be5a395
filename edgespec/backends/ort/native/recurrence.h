// edgespec::GatedDeltaNet: what its levels of instructions share with the operator.
//
// A recurrent layer of a hybrid (gated delta net, arXiv 2412.06464) between its projections: the
// causal convolution and SiLU, heads of unit length, the recurrence, and the gated norm. Along the
// path of a row, a head with the state M [dk, dv], the decay d and the rate b has
//   u = b (v - d M'k),   o = d M'q + (q'k) u,   M <- d M + k u'
// The rows of a call stand in any tree. They leave no state, but their keys, updates u and logs of
// d: those that were accepted go into the next call, which takes them in by M <- d M + k u' before
// its own rows begin.
//
// A state takes rows in one after the other, in a call as between calls, and each sum has a fixed
// order. So the bits of a row depend on the rows of its path alone: not on how they were spread
// over calls, nor on what else a call holds, nor on threads or levels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

struct DeltaNetCall {
  int64_t batch = 0, rows = 0, committed = 0;  // B, S, P
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int64_t kernel = 0;  // K, rows that the convolution reads
  float unit_epsilon = 0, q_scale = 0, k_scale = 0, norm_epsilon = 0;
  const float* mixed = nullptr;      // [B, S, C]: queries, keys and values before the convolution
  const float* gate = nullptr;       // [B, S, value_heads * value_dim]
  const float* decay = nullptr;      // [B, S, value_heads]
  const float* rate = nullptr;       // [B, S, value_heads]
  const float* conv_state = nullptr;  // [B, K - 1, C], the last rows before the call
  const float* state = nullptr;      // [B, value_heads, dk, dv]
  const float* taken = nullptr;      // [B, P, W], committed rows; those that fill up are zeros
  const float* taps = nullptr;       // [K, C], the row itself last
  const float* speed = nullptr;      // [value_heads], what steps are multiplied by
  const float* bias = nullptr;       // [value_heads], of the steps
  const float* norm = nullptr;       // [value_dim]
  float* out = nullptr;              // [B, S, value_heads * value_dim]
  float* present = nullptr;          // as `state`, which may be the same memory
  float* left = nullptr;             // [B, S, W]: keys, updates, logs of the decays

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }      // C
  int64_t width() const { return keys() + values() + value_heads; }  // W
  int64_t group() const { return value_heads / key_heads; }
};

// One row of a sequence in the order in which they are computed, each behind its parent. It reads
// the state in the buffer `from`; where it is its parent's first child, that is the state before
// the parent, which is taken in and goes to `to`. Buffer -1 is the present state, which no row of
// the call changes.
struct DeltaStep {
  int32_t row = 0, parent = -1, from = -1, to = -1;
  bool takes_parent = false;
};

struct DeltaNetPlan {
  const DeltaNetCall* call = nullptr;
  const DeltaStep* steps = nullptr;  // [B, S]
  // [B, S, K], the rows that the convolution reads, itself first: one of the call, or -1 - a row of
  // conv_state
  const int32_t* windows = nullptr;
  int64_t buffers = 0;  // that a sequence needs at most
};

// Columns of a state that are worked on at once, at most, where rows of a call follow each other.
constexpr int64_t kStateColumns = 64;

struct DeltaNetKernels {
  // Computes all rows of one key head, and of the value heads that share it.
  void (*run)(const DeltaNetPlan& plan, int64_t sequence, int64_t key_head, float* scratch);
};

// The floats of scratch that a piece of the call needs.
int64_t delta_net_scratch(const DeltaNetPlan& plan);

extern const DeltaNetKernels delta_net_portable;
extern const DeltaNetKernels delta_net_avx2;
extern const DeltaNetKernels delta_net_avx512;
extern const DeltaNetKernels delta_net_neon;

// Whether kernels give the same bits as the portable ones on a small problem.
bool proves_itself(const DeltaNetKernels& kernels);

}  // namespace edgespec
