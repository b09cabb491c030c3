// Transposed copies, for products that read along an operand's other dimension: from [columns,
// rows], to [rows, columns], float32.

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

// to [rows, columns] = from [columns, rows]^T. A block a tile.
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const float* from, int64_t from_stride, bool from_aligned, float* to,
                     int64_t to_stride, bool to_aligned, int64_t rows, int64_t columns) {
  __shared__ float tile[kTile][kPitch];
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * kTile;
  const int across = threadIdx.x % (kTile / 4) * 4, down = threadIdx.x / (kTile / 4);
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
}

}  // namespace kernels::transpose_tiles

namespace kernels::cuda {

int transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
              int64_t columns, CUstream_st* stream) {
  using namespace transpose_tiles;
  const dim3 grid(blocks_of(rows, kTile), blocks_of(columns, kTile));
  return launch<transpose_kernel>(grid, kThreads, stream, from, from_stride,
                                  has_aligned_rows(from, 4 * from_stride), to, to_stride,
                                  has_aligned_rows(to, 4 * to_stride), rows, columns);
}

}  // namespace kernels::cuda
