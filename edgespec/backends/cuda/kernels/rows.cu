// Rows of keys and values, of all layers in one launch. A tensor is a cache or an output, [heads,
// rows, row_bytes]; `sources` and `targets` are tables of their addresses on the device, one entry
// for each block in x, or where `tables` is not set nothing: then the offsets are the addresses.
// Blocks in y are heads, those in z share a row. Strides, offsets and rows are in bytes, all multiples of 16 where `wide` is
// set, else of 2.

struct MoveRows {
  unsigned long long sources, targets;
  long long source_offset, target_offset, row_bytes, source_head_bytes, target_head_bytes;
  int count, wide, tables, unused;
  int from[128], to[128];
};

template <typename Part>
__device__ void move_parts(const MoveRows& move, const char* source, char* target) {
  const long long step = static_cast<long long>(gridDim.z) * blockDim.x * sizeof(Part);
  for (long long at = (static_cast<long long>(blockIdx.z) * blockDim.x + threadIdx.x) * sizeof(Part);
       at < move.row_bytes; at += step) {
    // One thread moves its part of all rows in their order, so that a row may go to where a later
    // one has already left
    for (int i = 0; i < move.count; ++i) {
      Part part = {};
      if (move.from[i] >= 0)
        part = *reinterpret_cast<const Part*>(source + move.from[i] * move.row_bytes + at);
      *reinterpret_cast<Part*>(target + move.to[i] * move.row_bytes + at) = part;
    }
  }
}

// Row from[i] of each source becomes row to[i] of its target; zeros where from[i] is negative.
extern "C" __global__ void move_rows(const MoveRows move) {
  const char* source = reinterpret_cast<const char*>(move.source_offset);
  char* target = reinterpret_cast<char*>(move.target_offset);
  if (move.tables) {
    source = reinterpret_cast<const char* const*>(move.sources)[blockIdx.x] + move.source_offset +
             blockIdx.y * move.source_head_bytes;
    target = reinterpret_cast<char* const*>(move.targets)[blockIdx.x] + move.target_offset +
             blockIdx.y * move.target_head_bytes;
  }
  if (move.wide)
    move_parts<uint4>(move, source, target);
  else
    move_parts<unsigned short>(move, source, target);
}

struct CopyRows {
  unsigned long long sources, targets;
  long long source_offset, target_offset, size, source_head_bytes, target_head_bytes;
  int wide, unused;
};

template <typename Part>
__device__ void copy_parts(long long size, const char* source, char* target) {
  const long long step = static_cast<long long>(gridDim.z) * blockDim.x * sizeof(Part);
  for (long long at = (static_cast<long long>(blockIdx.z) * blockDim.x + threadIdx.x) * sizeof(Part);
       at < size; at += step)
    *reinterpret_cast<Part*>(target + at) = *reinterpret_cast<const Part*>(source + at);
}

// `size` bytes, which are rows one behind the other, of each head of each source to its target.
extern "C" __global__ void copy_rows(const CopyRows copy) {
  const char* source = reinterpret_cast<const char* const*>(copy.sources)[blockIdx.x] +
                       copy.source_offset + blockIdx.y * copy.source_head_bytes;
  char* target = reinterpret_cast<char* const*>(copy.targets)[blockIdx.x] + copy.target_offset +
                 blockIdx.y * copy.target_head_bytes;
  if (copy.wide)
    copy_parts<uint4>(copy.size, source, target);
  else
    copy_parts<unsigned short>(copy.size, source, target);
}
