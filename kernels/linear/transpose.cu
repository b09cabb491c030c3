// A transposed copy of a float32 matrix: target [rows, columns] = source [columns, rows]^T. Strides
// may be larger than a row, and rows need not be aligned.
//
// run_gemm.h uses it for operands in a layout that the product's kernel cannot read, and
// sm90/gemm_one_product/launch.cuh for a transposed weight when tiles have to be computed again in
// TF32.
//
// Why it is fast: global memory is fast only along rows, where neighbouring threads access
// neighbouring elements, but a direct copy would read or write down columns. So the matrix passes
// through shared memory in square tiles. Both matrices are accessed along their rows, four floats a
// thread, and only shared memory is read down its columns:
//
//     source                   shared memory                    target
//
//     a b c d                  a b c d                          a e i m
//     e f g h    along rows    e f g h    down the columns      b f j n
//     i j k l   ----------->   i j k l   ----------------->     c g k o
//     m n o p                  m n o p                          d h l p

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"

namespace kernels::transpose_tiles {

struct TransposeConfig {
  static constexpr int kTile = 64;  // elements a side of a tile
  // Floats from one row of the tile to the next in shared memory. The odd number spreads the
  // elements of a column over all banks.
  static constexpr int kPitch = kTile + 1;
  static constexpr int kThreads = 256;
  static constexpr int kVector = 4;  // neighbouring elements that a thread moves at a time
  // A segment is the part of a row of `source`, or of a row of `target`, that is in one tile.
  static constexpr int kThreadsPerSegment = kTile / kVector;
  static constexpr int kSegmentsAtOnce = kThreads / kThreadsPerSegment;
  // The most blocks of a copy that may turn out not to be needed (is_needed below): enough to keep
  // a GPU busy if it is, and few enough to take little time if it is not.
  static constexpr int64_t kFewBlocks = 256;

  static_assert(kTile % kVector == 0, "a segment is a whole number of vectors");
  static_assert(kTile % kSegmentsAtOnce == 0, "all threads move equally many segments of a tile");
};

// A tile in shared memory: [column][row] of `target`.
using SharedTile = float[TransposeConfig::kTile][TransposeConfig::kPitch];

// The part of a tile that a thread moves: kVector elements, from `place` on, of every
// kSegmentsAtOnce-th segment, from first_segment on.
struct Share {
  int place;
  int first_segment;

  __device__ Share()
      : place(threadIdx.x % TransposeConfig::kThreadsPerSegment * TransposeConfig::kVector),
        first_segment(threadIdx.x / TransposeConfig::kThreadsPerSegment) {}
};

// Reads the tile that begins at this row and column of `target`, along the rows of `source`, which
// are columns of `target`.
__device__ __forceinline__ void read_tile(const Transposition& t, int64_t first_row,
                                          int64_t first_column, const Share& share,
                                          SharedTile& tile) {
  constexpr int kVector = TransposeConfig::kVector;
  const bool is_aligned = has_aligned_rows(t.source, sizeof(float) * t.source_stride);
#pragma unroll
  for (int segment = share.first_segment; segment < TransposeConfig::kTile;
       segment += TransposeConfig::kSegmentsAtOnce) {
    const int64_t column = first_column + segment;
    const int64_t row = first_row + share.place;
    float v[kVector] = {};
    if (column < t.columns) {
      load_floats(v, t.source + column * t.source_stride + row, /*i=*/0, t.rows - row, is_aligned);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) tile[segment][share.place + j] = v[j];
  }
}

__device__ __forceinline__ void write_tile(const Transposition& t, int64_t first_row,
                                           int64_t first_column, const Share& share,
                                           const SharedTile& tile) {
  constexpr int kVector = TransposeConfig::kVector;
  const bool is_aligned = has_aligned_rows(t.target, sizeof(float) * t.target_stride);
#pragma unroll
  for (int segment = share.first_segment; segment < TransposeConfig::kTile;
       segment += TransposeConfig::kSegmentsAtOnce) {
    const int64_t row = first_row + segment;
    const int64_t column = first_column + share.place;
    if (row >= t.rows) continue;
    float v[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) v[j] = tile[share.place + j][segment];
    // The elements of the row from `column` on: 0 or less past its end.
    const int64_t count = t.columns - column;
    store_four(t.target + row * t.target_stride + column, v, count, is_aligned && count >= kVector);
  }
}

// Makes the copy, unless is_needed (launchers.h) points to a 0. A block's tiles are gridDim.x
// apart.
__global__ void __launch_bounds__(TransposeConfig::kThreads)
    transpose_kernel(const __grid_constant__ Transposition t, const unsigned* is_needed) {
  constexpr int kTile = TransposeConfig::kTile;
  __shared__ SharedTile tile;
  start_next_kernel();
  wait_for_previous_kernel();  // which writes *is_needed
  if (is_needed != nullptr && *is_needed == 0) return;

  const int64_t row_tiles = divide_up(t.rows, kTile);
  const int64_t tiles = row_tiles * divide_up(t.columns, kTile);
  const Share share;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t first_row = index % row_tiles * kTile;
    const int64_t first_column = index / row_tiles * kTile;
    read_tile(t, first_row, first_column, share, tile);
    __syncthreads();
    write_tile(t, first_row, first_column, share, tile);
    __syncthreads();  // all threads have read the tile that the next one replaces
  }
}

}  // namespace kernels::transpose_tiles

namespace kernels::cuda {

int transpose(const Transposition& t, const unsigned* is_needed, CUstream_st* stream) {
  using transpose_tiles::TransposeConfig;
  const int64_t tiles =
      divide_up(t.rows, TransposeConfig::kTile) * divide_up(t.columns, TransposeConfig::kTile);
  const bool is_conditional = is_needed != nullptr;
  const int64_t max_blocks = is_conditional ? TransposeConfig::kFewBlocks : INT_MAX;
  Grid grid{};
  grid.blocks = static_cast<int>(std::min(tiles, max_blocks));
  grid.threads = TransposeConfig::kThreads;
  grid.stream = stream;
  // With PDL, the start of a copy that may not be needed overlaps the kernel that decides.
  grid.has_pdl = is_conditional;
  return status_of([&] { launch_or_throw(grid, transpose_tiles::transpose_kernel, t, is_needed); });
}

}  // namespace kernels::cuda
