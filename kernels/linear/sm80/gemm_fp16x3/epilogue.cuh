// The epilogue of gemm_fp16x3_sm80_kernel (kernel.cuh).

#pragma once

#include <cstdint>

#include "linear/epilogue.cuh"
#include "linear/sm80/gemm_fp16x3/config.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm80::gemm_fp16x3 {

// Writes the sums of one subtile to the warp's shared memory. Fragment i of x has two row blocks of
// 8 rows, and fragment j of the weight has 8 columns. In each block of 8 x 8 sums, lane 4 g + c
// has columns 2 c and 2 c + 1 of row g.
__device__ __forceinline__ void stage_subtile(
    const float (&sums)[Sm80Config::kXFragments][Sm80Config::kWeightFragments][4],
    int first_fragment, float* staged, int lane) {
#pragma unroll
  for (int i = 0; i < Sm80Config::kSubtileFragments; ++i) {
#pragma unroll
    for (int row_block = 0; row_block < 2; ++row_block) {
#pragma unroll
      for (int j = 0; j < Sm80Config::kWeightFragments; ++j) {
        const float* const neighbours = &sums[first_fragment + i][j][row_block * 2];
        const int staged_row = i * Sm80Config::kMmaM + row_block * 8 + lane / 4;
        const int column_of_lane = j * Sm80Config::kMmaN + lane % 4 * 2;
        *reinterpret_cast<float2*>(staged + staged_row * Sm80Config::kSubtilePitch +
                                   column_of_lane) = make_float2(neighbours[0], neighbours[1]);
      }
    }
  }
}

// The epilogue, the exponents of all rows of x and of the weight, and the warp's place in out.
struct WarpOutput {
  const Epilogue<float>& epilogue;
  const int* x_exponent;
  const int* weight_exponent;
  int first_row;
  int first_column;
};

// The bias and the exponent of the weight in the four columns of out that a lane stores.
struct LaneColumns {
  float bias[4];
  int exponent[4];

  __device__ __forceinline__ LaneColumns(const WarpOutput& output, int first_column) {
    const Epilogue<float>& epilogue = output.epilogue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first_column + i;
      const bool exists = column < epilogue.n;
      // Without a bias -0 is added, which changes no number; +0 would change -0.
      bias[i] = exists && epilogue.bias != nullptr ? epilogue.bias[column] : -0.0f;
      exponent[i] = exists ? output.weight_exponent[column] : 0;
    }
  }
};

// Finishes and stores a warp's results, one subtile of 32 rows after the other. The sums pass
// through the warp's shared memory, `staged`, so that a lane gets four neighbouring columns of a
// row to store.
__device__ __forceinline__ void store_warp_results(
    const float (&sums)[Sm80Config::kXFragments][Sm80Config::kWeightFragments][4], float* staged,
    const WarpOutput& output) {
  constexpr int kLanesOfRow = Sm80Config::kSubtileColumns / 4;
  const int lane = threadIdx.x % 32;
  const int staged_column = lane % kLanesOfRow * 4;
  const int first_column = output.first_column + staged_column;  // the lane's
  const LaneColumns columns(output, first_column);
#pragma unroll
  for (int first_fragment = 0; first_fragment < Sm80Config::kXFragments;
       first_fragment += Sm80Config::kSubtileFragments) {
    stage_subtile(sums, first_fragment, staged, lane);
    __syncwarp();
#pragma unroll 1
    for (int staged_row = lane / kLanesOfRow; staged_row < Sm80Config::kSubtileRows;
         staged_row += 32 / kLanesOfRow) {
      const int row = output.first_row + first_fragment * Sm80Config::kMmaM + staged_row;
      const bool exists = row < output.epilogue.m;
      const float* const staged_sums =
          staged + staged_row * Sm80Config::kSubtilePitch + staged_column;
      const int x_exponent = exists ? output.x_exponent[row] : 0;
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        z[i] = split::unscale(staged_sums[i], x_exponent + columns.exponent[i]) + columns.bias[i];
      }
      store_four_results</*kLaneBit=*/1>(output.epilogue, exists, row, first_column, z);
    }
    __syncwarp();
  }
}

}  // namespace kernels::sm80::gemm_fp16x3
