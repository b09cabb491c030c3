// The launch of split_x_kernel (split_x.cuh), which runs before both float32 GEMMs, and the
// operands that it gets.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "launchers.h"
#include "linear/sm90/split_x.cuh"
#include "linear/split/split.cuh"
#include "linear/split/split_row.cuh"

namespace kernels::sm90 {

// Describes a float32 operand, whose hi and lo are k-tiled if a kernel stores them. hi, lo,
// exponent and row_state are null: the caller sets those that it needs.
inline split::ScaledMatrix describe_operand(const void* source, int64_t rows, int64_t row_stride) {
  split::ScaledMatrix matrix{};
  matrix.source = static_cast<const float*>(source);
  matrix.rows = rows;
  matrix.row_stride = row_stride;
  matrix.is_k_tiled = true;
  return matrix;
}

// Launches the kernel that splits x, samples the weight, and clears the first bytes_to_clear bytes
// of the workspace.
inline void launch_split_x(const LinearArguments& call, const split::ScaledMatrix& x,
                           const split::ScaledMatrix& weight, size_t bytes_to_clear,
                           cudaStream_t stream) {
  SplitXArguments args{};
  args.x = x;
  args.weight = weight;
  args.weight_is_transposed = call.weight_is_transposed;
  args.k = call.k;
  args.cleared = static_cast<unsigned*>(call.workspace);
  args.cleared_size = static_cast<int64_t>(bytes_to_clear / sizeof(unsigned));
  const int threads = split::threads_of_row(call.k);
  const int warps = threads / 32;
  // Each warp samples kRows rows of the weight.
  args.sampling_blocks = blocks_of(call.n, warps * SampleConfig::kRows);
  // A warp splits a row of x that fits into its registers, and a block splits a longer row.
  const bool is_short = call.k <= split::SplitConfig::kKeptByWarp;
  args.splitter = is_short ? split::Splitter::kWarp : split::Splitter::kBlock;
  const int splitting_blocks = blocks_of(call.m, is_short ? warps : 1);
  Grid grid{};
  grid.blocks = args.sampling_blocks + splitting_blocks;
  grid.threads = threads;
  grid.stream = stream;
  grid.has_pdl = true;
  launch_or_throw(grid, split_x_kernel, args);
}

}  // namespace kernels::sm90
