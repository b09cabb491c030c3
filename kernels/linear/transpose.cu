// Transposed copies, for products that read along an operand's other dimension: from [columns,
// rows], to [rows, columns], float32.

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
// Blocks of a copy that is seldom needed: most only find that out.
constexpr int64_t kFewBlocks = 256;

// to [rows, columns] = from [columns, rows]^T, unless is_needed points to a 0. A block a tile at a
// time.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const float* from, int64_t from_stride, bool from_aligned, float* to,
                     int64_t to_stride, bool to_aligned, int64_t rows, int64_t columns,
                     const unsigned* is_needed) {
  __shared__ float tile[kTile][kPitch];
  start_next_kernel();
  wait_for_previous_kernel();
  if (is_needed != nullptr && *is_needed == 0) return;
  const int64_t tiles_down = divide_up(rows, kTile), tiles = tiles_down * divide_up(columns, kTile);
  const int across = threadIdx.x % (kTile / 4) * 4, down = threadIdx.x / (kTile / 4);
  for (int64_t at = blockIdx.x; at < tiles; at += gridDim.x) {
    const int64_t first_row = at % tiles_down * kTile, first_column = at / tiles_down * kTile;
#pragma unroll
    for (int i = down; i < kTile; i += kRows) {
      const int64_t column = first_column + i, row = first_row + across;
      float v[4] = {};
      if (column < columns) {
        load_floats(v, from + column * from_stride + row, 0, rows - row, from_aligned);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[i][across + j] = v[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = down; i < kTile; i += kRows) {
      const int64_t row = first_row + i, column = first_column + across;
      if (row >= rows) continue;
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = tile[across + j][i];
      const int64_t count = columns - column;
      store_four(to + row * to_stride + column, v, count, to_aligned && count >= 4);
    }
    __syncthreads();  // before the next tile takes the place of this one
  }
}

}  // namespace kernels::transpose_tiles

namespace kernels::cuda {

int transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
              int64_t columns, const unsigned* is_needed, CUstream_st* stream) {
  using namespace transpose_tiles;
  const bool is_sure = is_needed == nullptr;
  const int64_t tiles = divide_up(rows, kTile) * divide_up(columns, kTile);
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, is_sure ? INT_MAX : kFewBlocks));
  return status_of([&] {
    launch_grid({blocks, kThreads, 0, stream, /*has_pdl=*/!is_sure}, transpose_kernel, from,
                from_stride, has_aligned_rows(from, 4 * from_stride), to, to_stride,
                has_aligned_rows(to, 4 * to_stride), rows, columns, is_needed);
  });
}

}  // namespace kernels::cuda
