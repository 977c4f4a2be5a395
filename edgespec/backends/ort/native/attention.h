// Attention of the rows of a call over a KV cache that is written in place; the rows are a tree.
//
// A row attends to the keys of its own path, by logical position: the slots that all rows see are
// positions 0, 1, ...; behind them, in the order of their slots, come those that the row sees of
// the rest. All sums run by position. So the bits of a row depend on its query and on the keys and
// values of its path: not on the rows beside it, on their slots, on threads, or on the level of
// instructions. In float32:
//   score  the query times scale * log2(e); 16 sums over d mod 16, by ascending d, with fused
//          multiply-add; of these l + (l+8), then + (l+4), + (l+2), + (l+1);
//   chunk  256 positions, aligned to position 0: the largest score m, p = 2^(score - m) by one
//          polynomial; the sum of p as 16 sums over the position mod 16 and then as above; the sum
//          of p * v by fused multiply-add, by ascending position;
//   row    the chunks of which it sees something, in ascending order:
//          sum = fma(sum, 2^(m_before - m), sum_of_chunk * 2^(m_of_chunk - m)).
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgespec {

constexpr int64_t kChunk = 256;       // positions
constexpr int64_t kMaxPieceRows = 128;  // rows times heads of a KV head that one piece of work has
constexpr int64_t kMaxHeadDim = 512;

// kInt8: a row is a code for each of its elements and, behind them, its scale in float32.
enum class CacheType { kFloat32, kFloat16, kInt8 };
constexpr int64_t kScaleBytes = 4;

struct AttentionCall {
  int64_t batch = 0;
  int64_t rows = 0;      // S, queries of a sequence
  int64_t key_rows = 0;  // R >= S, keys and values that are written; the last S are the queries'
  int64_t heads = 0, kv_heads = 0, dim = 0;
  int64_t slots = 0;    // of a KV head in the caches
  int64_t columns = 0;  // V, of `visible`
  int64_t rotary = 0;   // leading elements of a head that are rotated, in halves; 0: none
  CacheType cache_type = CacheType::kFloat32;
  float scale = 0;
  const float* q = nullptr;  // [B, S, heads * dim]
  const float* k = nullptr;  // [B, R, kv_heads * dim]
  const float* v = nullptr;
  const float* cos = nullptr;  // [B, R, rotary / 2], of the keys; the last S rows are the queries'
  const float* sin = nullptr;
  void* keys = nullptr;    // [B, kv_heads, slots, dim], or dim + kScaleBytes bytes
  void* values = nullptr;
  const int64_t* write_indices = nullptr;  // [B], the slot of the first of the R rows
  const int64_t* lengths = nullptr;        // [B], slots that all rows see
  // [B, S, V], the slots from the length on; the output of a row that sees none of them is zero:
  // it only fills up
  const uint8_t* visible = nullptr;
  const int64_t* first = nullptr;  // [B, S], the first position that a row sees; null: 0
  float* out = nullptr;            // [B, S, heads * dim]
};

// The path of a row. Positions below `straight` stand in the slot of the same number, the others, up
// to `end`, in slots[position - straight]. The row sees those from `first` on; end 0: nothing.
struct Path {
  int64_t first = 0, straight = 0, end = 0;
  const int32_t* slots = nullptr;
};

// What one chunk leaves of one row and head, beside the sum of p * v.
struct Partial {
  float largest = 0;
  float sum = 0;
};

// How a call is cut into pieces of work.
struct AttentionPlan {
  const AttentionCall* call = nullptr;
  const Path* paths = nullptr;                 // [B, S]
  int64_t group = 1;                           // heads of a KV head
  int64_t piece_rows = 1, row_pieces = 1;      // rows of a piece, pieces of a sequence's rows
  int64_t piece_chunks = 1, chunk_pieces = 1;  // chunks of a piece, pieces of a path
  int64_t chunks = 0;                          // of the longest path
  bool writes_first = false;                   // keys and values are there before any piece begins
  Partial* partials = nullptr;  // [B, kv_heads, S * group, chunks] where there are chunk_pieces
  float* sums = nullptr;        // [B, kv_heads, S * group, chunks, dim filled up to 16]
};

struct AttentionKernels {
  // Writes the keys and values of one KV head into the caches.
  void (*write)(const AttentionPlan& plan, int64_t sequence, int64_t kv_head);
  // Attends with one piece of the rows, over one piece of their chunks.
  void (*attend)(const AttentionPlan& plan, int64_t sequence, int64_t kv_head, int64_t row_piece,
                 int64_t chunk_piece, float* scratch);
  // Adds up what the chunk pieces left of one row.
  void (*combine)(const AttentionPlan& plan, int64_t sequence, int64_t kv_head, int64_t row,
                  float* scratch);
};

extern const AttentionKernels attention_portable;
extern const AttentionKernels attention_avx2;
extern const AttentionKernels attention_avx512;
extern const AttentionKernels attention_neon;

// Attends on the calling thread.
void attend(const AttentionKernels& kernels, const AttentionCall& call);

// Whether kernels give the same bits as the portable ones on a small problem.
bool proves_itself(const AttentionKernels& kernels);

}  // namespace edgespec
