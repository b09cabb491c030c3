// The kernel that runs before each float32 GEMM on Hopper. It prepares both operands:
//
//   x [m, k]        is split into fp16 (split/split.cuh): hi and lo for the fp16x3 GEMM, hi alone
//                   for the GEMM with one product
//   weight [n, k]   gets an exponent for each row, from a sample of the row's elements; the GEMM
//                   scales the weight itself, and splits it (fp16x3) or rounds it (one product)
//
// docs/DESIGN.md ("gemm_fp16x3 on Hopper") says why x is split in advance and the weight is not.
//
// One launch does both jobs, because they do not depend on each other. The sample reads few bytes
// and mostly waits for memory, so its blocks run beside those that split x.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "launchers.h"
#include "linear/sm90/sample_weight.cuh"
#include "linear/split/split.cuh"
#include "linear/split/split_row.cuh"

namespace kernels::sm90 {

// -------------------------------------------------------------------------------------- the kernel

//   blocks 0 .. sampling_blocks - 1    sample the weight: a warp for each kRows rows
//   the blocks after them              split x: a warp or a block for each row
//   all blocks                         first set the cleared_size numbers at `cleared` to 0: the
//                                      GEMM's counters and flags
__global__ void __launch_bounds__(split::SplitConfig::kThreads)
    split_x_kernel(const __grid_constant__ split::ScaledMatrix x,
                   const __grid_constant__ split::ScaledMatrix weight, bool weight_is_transposed,
                   int64_t k, int sampling_blocks, split::Splitter splitter, unsigned* cleared,
                   int64_t cleared_size) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  start_next_kernel();
  wait_for_previous_kernel();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < cleared_size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    cleared[i] = 0;
  }
  const split::Form form = split::form_of(x.lo);
  // The block's number among those that split x; below 0 if it samples the weight.
  const int x_block = static_cast<int>(blockIdx.x) - sampling_blocks;
  const bool splits_x = x_block >= 0;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (splits_x) {
    const bool warp_has_row = splitter == split::Splitter::kWarp;
    // The warps of the sampling blocks come before those that split x.
    const int64_t m = warp_has_row ? warp - sampling_blocks * (blockDim.x / 32) : x_block;
    if (m < x.rows) split::split_row(x, form, m, k, splitter);
    return;
  }
  sample_weight(weight, form, weight_is_transposed, warp * SampleConfig::kRows, k);
#endif
}

// -------------------------------------------------------------------------------------- the launch

// Describes a float32 operand, whose hi and lo are k-tiled if a kernel stores them. All pointers
// but `source` are null: the caller sets those that it needs.
inline split::ScaledMatrix describe_operand(const void* source, int64_t rows, int64_t row_stride) {
  split::ScaledMatrix matrix{};
  matrix.source = static_cast<const float*>(source);
  matrix.rows = rows;
  matrix.row_stride = row_stride;
  matrix.is_k_tiled = true;
  return matrix;
}

// Launches the kernel, which also clears the first bytes_to_clear bytes of the workspace.
inline void launch_split_x(const LinearArguments& call, const split::ScaledMatrix& x,
                           const split::ScaledMatrix& weight, size_t bytes_to_clear,
                           cudaStream_t stream) {
  const int threads = split::threads_of_row(call.k);
  const int warps = threads / 32;
  const int sampling_blocks = divide_up_to_int(call.n, warps * SampleConfig::kRows);
  // A warp splits a row of x that fits into its registers, and a block splits a longer row.
  const bool is_short = call.k <= split::SplitConfig::kKeptByWarp;
  const auto splitter = is_short ? split::Splitter::kWarp : split::Splitter::kBlock;
  const int splitting_blocks = divide_up_to_int(call.m, is_short ? warps : 1);
  const auto cleared = static_cast<unsigned*>(call.workspace);
  const auto cleared_size = static_cast<int64_t>(bytes_to_clear / sizeof(unsigned));
  Grid grid{};
  grid.blocks = sampling_blocks + splitting_blocks;
  grid.threads = threads;
  grid.stream = stream;
  grid.has_pdl = true;
  launch_or_throw(grid, split_x_kernel, x, weight, call.weight_is_transposed, call.k,
                  sampling_blocks, splitter, cleared, cleared_size);
}

}  // namespace kernels::sm90
