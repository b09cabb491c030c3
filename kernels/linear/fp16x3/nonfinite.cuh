// Computes the results of rows that hold infinity or NaN: the last kernel of the float32 `highest`
// path.
//
//   x [m, k], weight [n, k], bias [n], out [m, n]; mask [m, (n + 7) / 8]
//
// The state of such a row is kNonfinite (RowState in split.cuh). out[i][j] is wrong after the GEMM
// if row i of x or row j of the weight is kNonfinite. This kernel computes these results from the
// float32 operands, and leaves all others alone.
//
// Sums are in double. Products and sums of finite floats do not overflow double. So a sum is
// infinite or NaN only because of an element that is, and never because of the order of the sum.
//
// Called by launch_highest (sm90/launch.cu) and launch_chunk (sm80/launch.cu). Such rows are rare,
// so the kernel ends quickly if there are none: on sm90 it reads one flag, on sm80 the states of
// all rows.

#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"

namespace kernels::nonfinite {

struct NonfiniteConfig {
  static constexpr int kThreads = 256;  // of a block; they divide the K of a tile among them
  static constexpr int kWarps = kThreads / 32;
  // A tile is 4 rows of x and 8 of the weight: 32 results, one for each lane of a warp, and for
  // each row of x one byte of the mask.
  static constexpr int kXRows = 4;
  static constexpr int kWeightRows = 8;
};
static_assert(NonfiniteConfig::kXRows * NonfiniteConfig::kWeightRows == 32,
              "each lane of the first warp finishes one result of a tile");
static_assert(NonfiniteConfig::kWeightRows == 8, "a tile has whole bytes of the mask");

// Returns whether one of the kCount rows from first_row on is kNonfinite.
template <int kCount>
__device__ bool has_nonfinite_row(const fp16x3::SplitMatrix& matrix, int64_t first_row) {
  bool is_found = false;
#pragma unroll
  for (int64_t row = first_row; row < first_row + kCount; ++row) {
    is_found |= row < matrix.rows && matrix.state[row] == fp16x3::kNonfinite;
  }
  return is_found;
}

// Loads element i of a row as a double. A row past the matrix's last is read as the last.
__device__ __forceinline__ double load(const fp16x3::SplitMatrix& matrix, int64_t row, int64_t i) {
  return double{matrix.source[min(row, matrix.rows - 1) * matrix.row_stride + i]};
}

// The first rows of x and of the weight of a tile.
struct TileRows {
  int m;
  int n;
};

// Returns where the tile of this number begins. `tiles_n` is the number of tiles along N.
__device__ __forceinline__ TileRows find_tile(int64_t tile, int64_t tiles_n) {
  return {static_cast<int>(tile / tiles_n * NonfiniteConfig::kXRows),
          static_cast<int>(tile % tiles_n * NonfiniteConfig::kWeightRows)};
}

// Adds up the 32 sums of a tile. Each thread sums every kThreads-th element of K. Each warp then
// adds up its lanes' sums, and stores them to warp_sums[warp]: result j is that of row j / 8 of x
// and row j % 8 of the weight. Rows past a matrix's last get sums, too, which are not used.
__device__ __forceinline__ void multiply_tile(const fp16x3::SplitMatrix& x,
                                              const fp16x3::SplitMatrix& weight, int64_t k,
                                              const TileRows& first,
                                              double (&warp_sums)[NonfiniteConfig::kWarps][32]) {
  using Config = NonfiniteConfig;
  double sums[Config::kXRows][Config::kWeightRows] = {};
  for (int64_t element = threadIdx.x; element < k; element += Config::kThreads) {
    double a[Config::kXRows];
#pragma unroll
    for (int m = 0; m < Config::kXRows; ++m) a[m] = load(x, first.m + m, element);
#pragma unroll
    for (int n = 0; n < Config::kWeightRows; ++n) {
      const double b = load(weight, first.n + n, element);
#pragma unroll
      for (int m = 0; m < Config::kXRows; ++m) sums[m][n] = fma(a[m], b, sums[m][n]);
    }
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const double lane_sum = sums[j / Config::kWeightRows][j % Config::kWeightRows];
    const double sum = fp16x3::reduce_warp(lane_sum, [](double a, double b) { return a + b; });
    if (threadIdx.x % 32 == j) warp_sums[threadIdx.x / 32][j] = sum;
  }
}

// Runs after the GEMM. Block b has the tiles b, b + gridDim.x, b + 2 gridDim.x and so on. Before
// every kThreads of its tiles, each of its threads looks for kNonfinite rows in one of them.
//
// has_nonfinite points to a flag that is 0 if no row is kNonfinite, or is null.
__global__ void __launch_bounds__(NonfiniteConfig::kThreads)
    nonfinite_kernel(const __grid_constant__ fp16x3::SplitMatrix x,
                     const __grid_constant__ fp16x3::SplitMatrix weight, int64_t k,
                     const __grid_constant__ Epilogue<float> epilogue,
                     const unsigned* has_nonfinite) {
  using Config = NonfiniteConfig;
  wait_for_previous_kernel();
  if (has_nonfinite != nullptr && *has_nonfinite == 0) return;
  __shared__ double warp_sums[Config::kWarps][32];  // each warp's share of the tile's 32 sums
  __shared__ bool has_work[Config::kThreads];       // a flag for each of the block's next tiles
  const int64_t tiles_n = divide_up(weight.rows, Config::kWeightRows);
  const int64_t tiles = divide_up(x.rows, Config::kXRows) * tiles_n;
  const int lane = threadIdx.x % 32;
  // i counts the block's tiles, modulo kThreads.
  for (int64_t tile = blockIdx.x, i = 0; tile < tiles;
       tile += gridDim.x, i = (i + 1) % Config::kThreads) {
    // Look for work: each thread in one of the block's next kThreads tiles.
    if (i == 0) {
      const int64_t own_tile = tile + int64_t{threadIdx.x} * gridDim.x;
      __syncthreads();
      has_work[threadIdx.x] =
          own_tile < tiles &&
          (has_nonfinite_row<Config::kXRows>(x, own_tile / tiles_n * Config::kXRows) ||
           has_nonfinite_row<Config::kWeightRows>(weight,
                                                  own_tile % tiles_n * Config::kWeightRows));
      __syncthreads();
    }
    if (!has_work[i]) continue;
    const TileRows first = find_tile(tile, tiles_n);
    multiply_tile(x, weight, k, first, warp_sums);
    __syncthreads();
    // The first warp finishes the tile: lane j has result j, which is the kernel's own if its row
    // of x or of the weight is kNonfinite. Other results are left as the GEMM has stored them.
    if (threadIdx.x < 32) {
      const int row = first.m + lane / Config::kWeightRows;
      const int column = first.n + lane % Config::kWeightRows;
      const bool is_own = row < epilogue.m && column < epilogue.n &&
                          (has_nonfinite_row<1>(x, row) || has_nonfinite_row<1>(weight, column));
      double sum = is_own && epilogue.bias != nullptr ? epilogue.bias[column] : 0;
      for (const auto& lane_sums : warp_sums) sum += lane_sums[lane];
      const float z = static_cast<float>(sum);

      // The eight lanes of a row of x share a byte of the mask. The first of them writes it, and
      // keeps the bits of results that are not the kernel's own. Example: lanes 8 to 15 have the
      // second row, so lane 8 takes bits 8 to 15 of both ballots.
      const int first_lane = lane / Config::kWeightRows * Config::kWeightRows;
      const uint32_t own_bits = __ballot_sync(0xffffffff, is_own) >> first_lane & 0xff;
      const uint32_t bits = __ballot_sync(0xffffffff, is_own && mask_bit(z)) >> first_lane & 0xff;
      if (is_own) *epilogue.out_at(row, column) = epilogue.finish(z);
      if (epilogue.mask != nullptr && lane == first_lane && own_bits != 0) {
        uint8_t* const byte = epilogue.mask_at(row, column);
        *byte = static_cast<uint8_t>((*byte & ~own_bits) | bits);
      }
    }
    __syncthreads();  // warp_sums has been read before the next tile's sums are written
  }
}

// Launches the kernel on `stream`.
inline void launch(const fp16x3::SplitMatrix& x, const fp16x3::SplitMatrix& weight, int64_t k,
                   const Epilogue<float>& epilogue, const unsigned* has_nonfinite,
                   cudaStream_t stream, bool has_pdl) {
  // If a row of the weight is kNonfinite, every (n / 8)-th tile has work. n / 8 is often a power of
  // two; the number of blocks is odd, so that these tiles still go to different blocks.
  const int blocks = 2 * device_attribute(cudaDevAttrMultiProcessorCount) + 1;
  launch_grid({blocks, NonfiniteConfig::kThreads, 0, stream, has_pdl}, nonfinite_kernel, x, weight,
              k, epilogue, has_nonfinite);
}

}  // namespace kernels::nonfinite
