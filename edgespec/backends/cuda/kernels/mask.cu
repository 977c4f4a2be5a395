// The mask [batch, 1, rows, slots] of a call, of what the host sends of it: of the first `length`
// slots of a lane a row sees those from `first` on; of the `width` slots behind those, what
// `visible` says; and none behind.

struct AttentionMask {
  unsigned long long lengths;  // int [batch]
  unsigned long long firsts;   // int [batch, rows]
  unsigned long long visible;  // bool [batch, rows, width]
  unsigned long long mask;     // bool [batch, 1, rows, slots]
  int rows, width, slots, unused;
};

// Blocks in y are rows, in z lanes.
extern "C" __global__ void attention_mask(const AttentionMask of) {
  const int slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot >= of.slots) return;
  const long long row = static_cast<long long>(blockIdx.z) * of.rows + blockIdx.y;
  const int length = reinterpret_cast<const int*>(of.lengths)[blockIdx.z];
  bool sees = false;
  if (slot < length)
    sees = slot >= reinterpret_cast<const int*>(of.firsts)[row];
  else if (slot - length < of.width)
    sees = reinterpret_cast<const bool*>(of.visible)[row * of.width + slot - length];
  reinterpret_cast<bool*>(of.mask)[row * of.slots + slot] = sees;
}
