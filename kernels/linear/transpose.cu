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
constexpr int kEach = kTile / kRows;           // a thread's fours of a tile
// Blocks of a copy that is seldom needed: to find that out takes them 2 us less than a block a
// tile.
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
    const int64_t row = first_row + across, column = first_column + down;
    const bool is_whole = first_column + kTile <= columns && row + 4 <= rows && from_aligned;
    float v[kEach][4] = {};
    if (is_whole) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        load_floats(v[i], from + (column + i * kRows) * from_stride + row, 0, 4, true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int64_t at_column = column + i * kRows;
        if (at_column < columns) {
          load_floats(v[i], from + at_column * from_stride, row, rows, from_aligned);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[down + i * kRows][across + j] = v[i][j];
    }
    __syncthreads();
    const int64_t count = columns - first_column - across;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int in_tile = down + i * kRows;
      if (first_row + in_tile >= rows) continue;
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = tile[across + j][in_tile];
      float* const line = to + (first_row + in_tile) * to_stride + first_column + across;
      store_four(line, four, count, to_aligned && count >= 4);
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
