// Computes the results of rows that hold infinity or NaN: the last kernel of the float32 `highest`
// path.
//
//   x [m, k], weight [n, k], bias [n], out [m, n]; mask [m, (n + 7) / 8]
//
// out[i][j] is wrong after the GEMM if row i of x or row j of the weight is kNonfinite (RowState in
// split.cuh). This kernel computes these results from the float32 operands. If no row is
// kNonfinite, it ends quickly: it reads one flag after the GEMM of sm90/, and the states of all
// rows after that of sm80/.
//
// The sum of such a result is infinite or NaN, because one of its terms x[i][e] * weight[j][e] is.
// The finite terms cannot change that, so most of them are left out. The remaining terms are added
// in double, in which products and sums of finite floats do not overflow, so that only infinite
// elements make a term or a partial sum infinite, and the order of the terms does not matter.

#pragma once

#include <cmath>
#include <cstdint>

#include "common/bits.cuh"
#include "common/launch.cuh"
#include "linear/epilogue.cuh"
#include "linear/split/split.cuh"

namespace kernels::nonfinite {

struct NonfiniteConfig {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;  // they divide the K of a tile among them
  static constexpr int kBlocksPerMultiprocessor = 4;
  // A tile is 4 rows of out, from 4 rows of x, and 8 columns, from 8 rows of the weight: 32
  // results, one for each lane of a warp, and one byte of the mask for each row.
  static constexpr int kTileRows = 4;
  static constexpr int kTileColumns = 8;
};
static_assert(NonfiniteConfig::kTileRows * NonfiniteConfig::kTileColumns == 32,
              "each lane of the first warp has one result of a tile");
static_assert(NonfiniteConfig::kTileColumns == 8, "a tile has whole bytes of the mask");

// Returns whether one of the kCount rows from first_row on is kNonfinite.
template <int kCount>
__device__ bool has_nonfinite_row(const split::ScaledMatrix& matrix, int64_t first_row) {
  bool is_found = false;
#pragma unroll
  for (int64_t row = first_row; row < first_row + kCount; ++row) {
    const bool exists = row < matrix.rows;
    const bool is_nonfinite = exists && matrix.row_state[row] == split::kNonfinite;
    is_found |= is_nonfinite;
  }
  return is_found;
}

// Returns where a row of the matrix begins. Past the end, it is the last row.
__device__ __forceinline__ const float* row_or_last(const split::Float32Matrix& matrix,
                                                    int64_t row) {
  return matrix.source_row(min(row, matrix.rows - 1));
}

// Returns whether an element of K is infinite or NaN in one of the kCount rows from first_row on.
template <int kCount>
__device__ __forceinline__ bool has_nonfinite_element(const split::Float32Matrix& matrix,
                                                      int64_t first_row, int64_t element) {
  bool is_found = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float value = row_or_last(matrix, first_row + i)[element];
    const bool is_finite = fabsf(value) < INFINITY;  // false for NaN, too
    is_found |= !is_finite;
  }
  return is_found;
}

// Returns the first row of a tile. Tiles are numbered along N first, weight_tiles in a row.
__device__ __forceinline__ int64_t first_row_of(int64_t number, int64_t weight_tiles) {
  return number / weight_tiles * NonfiniteConfig::kTileRows;
}

// Returns the first column of a tile, which is its first row of the weight.
__device__ __forceinline__ int64_t first_column_of(int64_t number, int64_t weight_tiles) {
  return number % weight_tiles * NonfiniteConfig::kTileColumns;
}

struct OutTile {
  const split::ScaledMatrix& x;
  const split::ScaledMatrix& weight;
  int first_row;
  int first_column;
};

// Computes sums for a tile's 32 results: of those terms along K in which one of the tile's rows of
// x or of the weight is infinite or NaN. The warps divide K among them, and each stores its sums to
// warp_sums[warp]: result j is that of row j / 8 and column j % 8 of the tile. Rows and columns
// past the last of out get sums, too, which are not used.
//
// A warp takes 32 elements at a time. At first each lane looks at one of them, in all rows of the
// tile. Then each lane has one of the 32 results, and adds its term at each element that was found.
__device__ __forceinline__ void sum_nonfinite_terms(
    const OutTile& tile, int64_t k, double (&warp_sums)[NonfiniteConfig::kWarps][32]) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const bool is_x_nonfinite = has_nonfinite_row<NonfiniteConfig::kTileRows>(tile.x, tile.first_row);
  const bool is_weight_nonfinite =
      has_nonfinite_row<NonfiniteConfig::kTileColumns>(tile.weight, tile.first_column);
  const auto is_nonfinite = [&](int64_t element) {
    return (is_x_nonfinite &&
            has_nonfinite_element<NonfiniteConfig::kTileRows>(tile.x, tile.first_row, element)) ||
           (is_weight_nonfinite && has_nonfinite_element<NonfiniteConfig::kTileColumns>(
                                       tile.weight, tile.first_column, element));
  };
  const float* const x_row =
      row_or_last(tile.x, tile.first_row + lane / NonfiniteConfig::kTileColumns);
  const float* const weight_row =
      row_or_last(tile.weight, tile.first_column + lane % NonfiniteConfig::kTileColumns);
  double sum = 0;
  for (int64_t first = warp * 32; first < k; first += NonfiniteConfig::kThreads) {
    const int64_t own_element = first + lane;
    const bool own_is_nonfinite = own_element < k && is_nonfinite(own_element);
    uint32_t found = __ballot_sync(0xffffffff, own_is_nonfinite);  // bit i: element first + i
    while (found != 0) {
      const int64_t found_element = first + lowest_bit(found);
      found = without_lowest_bit(found);
      sum = fma(double{x_row[found_element]}, double{weight_row[found_element]}, sum);
    }
  }
  warp_sums[warp][lane] = sum;
}

// Stores the results of a tile, and their bits of the mask. Each lane of the first warp has z, the
// sum plus bias, of the result in this row and column of out. If is_replaced, the result and the
// bit replace those that the GEMM has stored. All lanes of the warp call it.
//
// The eight lanes of a row of x share a byte of the mask, which the first of them stores. Example:
// lanes 8 to 15 have the second row, so lane 8 takes bits 8 to 15 of both ballots.
__device__ __forceinline__ void store_replacements(const Epilogue<float>& epilogue, int row,
                                                   int column, bool is_replaced, float z) {
  const int lane = threadIdx.x % 32;
  const int first_lane = lane / NonfiniteConfig::kTileColumns * NonfiniteConfig::kTileColumns;
  const uint32_t replaced = (__ballot_sync(0xffffffff, is_replaced) >> first_lane) & 0xff;
  const bool passes = is_replaced && mask_bit(z);
  const uint32_t bits = (__ballot_sync(0xffffffff, passes) >> first_lane) & 0xff;
  if (is_replaced) *epilogue.out_at(row, column) = epilogue.finish(z);
  if (epilogue.mask != nullptr && lane == first_lane && replaced != 0) {
    uint8_t* const byte = epilogue.mask_at(row, column);
    *byte = static_cast<uint8_t>((*byte & ~replaced) | bits);
  }
}

// Replaces the results of a tile that belong to a kNonfinite row of x or of the weight. Lane j of
// the first warp adds the warps' shares of result j, and the bias. The other warps do nothing.
__device__ __forceinline__ void replace_results(
    const OutTile& tile, const Epilogue<float>& epilogue,
    const double (&warp_sums)[NonfiniteConfig::kWarps][32]) {
  const bool is_first_warp = threadIdx.x < 32;
  if (!is_first_warp) return;
  const int lane = threadIdx.x % 32;
  const int row = tile.first_row + lane / NonfiniteConfig::kTileColumns;
  const int column = tile.first_column + lane % NonfiniteConfig::kTileColumns;
  const bool exists = row < epilogue.m && column < epilogue.n;
  const bool is_replaced =
      exists && (has_nonfinite_row<1>(tile.x, row) || has_nonfinite_row<1>(tile.weight, column));
  double sum = is_replaced && epilogue.bias != nullptr ? epilogue.bias[column] : 0;
  for (const auto& lane_sums : warp_sums) sum += lane_sums[lane];
  store_replacements(epilogue, row, column, is_replaced, static_cast<float>(sum));
}

// Block b has the tiles b, b + gridDim.x, b + 2 gridDim.x and so on, and takes kThreads of them at
// once. Each thread finds out whether one of these tiles has work, that is, a kNonfinite row. Then
// all threads together compute the tiles that have work, one after the other. has_nonfinite points
// to a flag that is 0 if no row is kNonfinite, or is null if there is no flag.
__global__ void __launch_bounds__(NonfiniteConfig::kThreads,
                                  NonfiniteConfig::kBlocksPerMultiprocessor)
    nonfinite_kernel(const __grid_constant__ split::ScaledMatrix x,
                     const __grid_constant__ split::ScaledMatrix weight, int64_t k,
                     const __grid_constant__ Epilogue<float> epilogue,
                     const unsigned* has_nonfinite) {
  wait_for_previous_kernel();
  if (has_nonfinite != nullptr && *has_nonfinite == 0) return;
  __shared__ double warp_sums[NonfiniteConfig::kWarps][32];
  __shared__ bool has_work[NonfiniteConfig::kThreads];  // for each of the kThreads tiles
  const int64_t weight_tiles = divide_up(weight.rows, NonfiniteConfig::kTileColumns);
  const int64_t tiles = divide_up(x.rows, NonfiniteConfig::kTileRows) * weight_tiles;
  const int64_t step = gridDim.x;  // from one of the block's tiles to the next
  for (int64_t first_number = blockIdx.x; first_number < tiles;
       first_number += NonfiniteConfig::kThreads * step) {
    const int64_t own_number = first_number + threadIdx.x * step;
    has_work[threadIdx.x] =
        own_number < tiles &&
        (has_nonfinite_row<NonfiniteConfig::kTileRows>(x, first_row_of(own_number, weight_tiles)) ||
         has_nonfinite_row<NonfiniteConfig::kTileColumns>(
             weight, first_column_of(own_number, weight_tiles)));
    __syncthreads();
    for (int i = 0; i < NonfiniteConfig::kThreads; ++i) {
      const int64_t number = first_number + i * step;
      if (number >= tiles) break;
      if (!has_work[i]) continue;
      const OutTile tile{x, weight, static_cast<int>(first_row_of(number, weight_tiles)),
                         static_cast<int>(first_column_of(number, weight_tiles))};
      sum_nonfinite_terms(tile, k, warp_sums);
      __syncthreads();
      replace_results(tile, epilogue, warp_sums);
      __syncthreads();  // warp_sums has been read before the next tile's sums are written
    }
    __syncthreads();  // all threads have read has_work before it is written again
  }
}

// Launches the kernel on `stream`. has_pdl is Grid::has_pdl (common/launch.cuh).
inline void launch(const split::ScaledMatrix& x, const split::ScaledMatrix& weight, int64_t k,
                   const Epilogue<float>& epilogue, const unsigned* has_nonfinite,
                   cudaStream_t stream, bool has_pdl) {
  // As many blocks as run at once, less one to make the number odd. If a row of the weight is
  // kNonfinite, the tiles with work are n / 8 tiles apart. An even number of blocks may share a
  // large divisor with n / 8, and then a few blocks get all of the work. Example: of 528 blocks,
  // four for each multiprocessor of an H200, only every 16th would have work with n = 8192, because
  // 16 divides 528 and n / 8.
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  Grid grid{};
  grid.blocks = NonfiniteConfig::kBlocksPerMultiprocessor * multiprocessors - 1;
  grid.threads = NonfiniteConfig::kThreads;
  grid.stream = stream;
  grid.has_pdl = has_pdl;
  launch_or_throw(grid, nonfinite_kernel, x, weight, k, epilogue, has_nonfinite);
}

}  // namespace kernels::nonfinite
