// Transposed copies: from [columns, rows], to [rows, columns], float32.

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels::transpose_tiles {

constexpr int kTile = 64;                      // elements a side, by way of shared memory
constexpr int kPitch = kTile + 1;              // a column's elements lie in different banks
constexpr int kThreads = 256;                  // each moves four neighbours at a time
constexpr int kRows = kThreads / (kTile / 4);  // of a tile at once
constexpr int64_t kFewBlocks = 256;            // of a copy that is seldom needed

// Copies nothing where is_needed points to a 0.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const __grid_constant__ Transposition t, const unsigned* is_needed) {
  __shared__ float tile[kTile][kPitch];
  start_next_kernel();
  wait_for_previous_kernel();
  if (is_needed != nullptr && *is_needed == 0) return;
  const bool from_aligned = has_aligned_rows(t.from, 4 * t.from_stride);
  const bool to_aligned = has_aligned_rows(t.to, 4 * t.to_stride);
  const int64_t tiles_down = divide_up(t.rows, kTile);
  const int64_t tiles = tiles_down * divide_up(t.columns, kTile);
  const int across = threadIdx.x % (kTile / 4) * 4, down = threadIdx.x / (kTile / 4);
  for (int64_t at = blockIdx.x; at < tiles; at += gridDim.x) {
    const int64_t first_row = at % tiles_down * kTile, first_column = at / tiles_down * kTile;
#pragma unroll
    for (int i = down; i < kTile; i += kRows) {
      const int64_t column = first_column + i, row = first_row + across;
      float v[4] = {};
      if (column < t.columns) {
        load_floats(v, t.from + column * t.from_stride + row, 0, t.rows - row, from_aligned);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[i][across + j] = v[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = down; i < kTile; i += kRows) {
      const int64_t row = first_row + i, column = first_column + across;
      if (row >= t.rows) continue;
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = tile[across + j][i];
      const int64_t count = t.columns - column;
      store_four(t.to + row * t.to_stride + column, v, count, to_aligned && count >= 4);
    }
    __syncthreads();  // before the next tile takes the place of this one
  }
}

inline int launch(const Transposition& t, const unsigned* is_needed, CUstream_st* stream) {
  const int64_t tiles = divide_up(t.rows, kTile) * divide_up(t.columns, kTile);
  const int64_t blocks = std::min(tiles, is_needed != nullptr ? kFewBlocks : INT_MAX);
  return status_of([&] {
    launch_grid({static_cast<int>(blocks), kThreads, 0, stream, /*has_pdl=*/is_needed != nullptr},
                transpose_kernel, t, is_needed);
  });
}

}  // namespace kernels::transpose_tiles

int kernels::cuda::transpose(const Transposition& transposition, const unsigned* is_needed,
                             CUstream_st* stream) {
  return transpose_tiles::launch(transposition, is_needed, stream);
}
