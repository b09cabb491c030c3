// Makes again the results of rows of x [m, k] and weight [n, k] that hold infinity or NaN, which
// the split carries as zeros. Sums are in double, in which nothing finite overflows: a result is
// infinite or NaN as the rows demand, in whatever order they are added up.

#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"

namespace kernels::nonfinite {

// A block makes tiles of 4 rows of x and 8 of the weight, a byte of the mask each: a result a lane.
constexpr int kThreads = 256, kXRows = 4, kWeightRows = 8;

template <int kCount>
__device__ bool is_marked(const fp16x3::SplitMatrix& matrix, int64_t first) {
  bool is_found = false;
#pragma unroll
  for (int64_t row = first; row < first + kCount; ++row) {
    is_found |= row < matrix.rows && matrix.state[row] == fp16x3::kNonfinite;
  }
  return is_found;
}

// Runs after the product. has_nonfinite, if not null, tells whether any row is kNonfinite.
__global__ void __launch_bounds__(kThreads)
    nonfinite_kernel(const __grid_constant__ fp16x3::SplitMatrix x,
                     const __grid_constant__ fp16x3::SplitMatrix weight, int64_t k,
                     const __grid_constant__ Epilogue<float> p, const unsigned* has_nonfinite) {
  wait_for_previous_kernel();
  if (has_nonfinite != nullptr && *has_nonfinite == 0) return;
  __shared__ double of_warp[kThreads / 32][32];  // a tile's sums
  __shared__ bool is_wanted[kThreads];           // of the block's next tiles
  const int64_t tiles_n = divide_up(weight.rows, kWeightRows);
  const int64_t tiles = divide_up(x.rows, kXRows) * tiles_n;
  const int lane = threadIdx.x % 32;
  for (int64_t at = blockIdx.x, i = 0; at < tiles; at += gridDim.x, i = (i + 1) % kThreads) {
    if (i == 0) {  // find the marked rows
      const int64_t own = at + int64_t{threadIdx.x} * gridDim.x;
      __syncthreads();
      is_wanted[threadIdx.x] =
          own < tiles && (is_marked<kXRows>(x, own / tiles_n * kXRows) ||
                          is_marked<kWeightRows>(weight, own % tiles_n * kWeightRows));
      __syncthreads();
    }
    if (!is_wanted[i]) continue;
    const int first_m = at / tiles_n * kXRows, first_n = at % tiles_n * kWeightRows;
    double results[kXRows][kWeightRows] = {};  // multiply
    for (int64_t i = threadIdx.x; i < k; i += kThreads) {
      const auto load = [i](const fp16x3::SplitMatrix& matrix, int64_t row) {
        return double{matrix.from[min(row, matrix.rows - 1) * matrix.row_stride + i]};
      };
      double a[kXRows];
#pragma unroll
      for (int m = 0; m < kXRows; ++m) a[m] = load(x, first_m + m);
#pragma unroll
      for (int n = 0; n < kWeightRows; ++n) {
        const double b = load(weight, first_n + n);
#pragma unroll
        for (int m = 0; m < kXRows; ++m) results[m][n] = fma(a[m], b, results[m][n]);
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const double own = results[i / kWeightRows][i % kWeightRows];
      const double sum = fp16x3::reduce_warp(own, [](double a, double b) { return a + b; });
      if (lane == i) of_warp[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // epilogue
      const int row = first_m + lane / kWeightRows, column = first_n + lane % kWeightRows;
      const bool is_own =
          row < p.m && column < p.n && (is_marked<1>(x, row) || is_marked<1>(weight, column));
      double sum = is_own && p.bias != nullptr ? p.bias[column] : 0;
      for (const auto& sums : of_warp) sum += sums[lane];
      const float z = static_cast<float>(sum);
      const int first = lane / kWeightRows * kWeightRows;
      const uint32_t own = __ballot_sync(0xffffffff, is_own) >> first & 0xff;
      const uint32_t bits = __ballot_sync(0xffffffff, is_own && mask_bit(z)) >> first & 0xff;
      if (is_own) *p.out_at(row, column) = p.finish(z);
      if (p.mask != nullptr && lane == first && own != 0) {
        uint8_t* const byte = p.mask_at(row, column);
        *byte = static_cast<uint8_t>((*byte & ~own) | bits);
      }
    }
    __syncthreads();  // before the next tile's sums
  }
}

inline void launch(const fp16x3::SplitMatrix& x, const fp16x3::SplitMatrix& weight, int64_t k,
                   const Epilogue<float>& epilogue, const unsigned* has_nonfinite,
                   cudaStream_t stream, bool has_pdl) {
  // An odd number, so that tiles of a row of the weight go to different blocks.
  const int blocks = 2 * device_attribute(cudaDevAttrMultiProcessorCount) + 1;
  launch_grid({blocks, kThreads, 0, stream, has_pdl}, nonfinite_kernel, x, weight, k, epilogue,
              has_nonfinite);
}

}  // namespace kernels::nonfinite
