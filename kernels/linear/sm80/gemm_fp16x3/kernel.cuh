// The fp16x3 GEMM for sm_80 and newer GPUs: float32 at `highest`, by cp.async, ldmatrix and
// mma.sync.
//
//   out [m, n] float32 = epilogue(x weight^T)
//   x [m, k], weight [n, k]: split into hi and lo (split/split.cuh), row-major, with k padded to a
//   multiple of 64
//
// launch_chunk (linear_sm80.cu) launches it. This file puts the kernel together:
//
//   config.cuh     constants
//   mainloop.cuh   copies, fragments, products
//   epilogue.cuh   results and mask
//
// The work. A block computes a tile of 128 x 128 results, and each of its 2 x 4 warps 64 x 32 of
// them. K is divided into k-tiles of 32. A k-tile has three products, which the tensor cores add to
// accumulators:
//
//   accumulators += x_lo weight_hi + x_hi weight_lo     in lo's scale, 2^11 times too large
//   accumulators *= 2^-11
//   accumulators += x_hi weight_hi
//
// float32 units then add the accumulators to the sums of all k-tiles (promotion, in Results).
// docs/SPLIT.md, step 4, says why this order of products and compensated promotions are accurate.
//
// Why it is fast. Copies for later k-tiles, loads of fragments, promotion and products of the
// tensor cores are interleaved, so that the tensor cores seldom wait:
//
//   global memory --cp.async--> ring of 4 stages, in shared memory
//                 --ldmatrix--> fragments, in registers
//                 --mma-------> accumulators --promotion--> sums

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/memory.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm80/gemm_fp16x3/config.cuh"
#include "linear/sm80/gemm_fp16x3/epilogue.cuh"
#include "linear/sm80/gemm_fp16x3/mainloop.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm80::gemm_fp16x3 {

// The kernel: a block for each tile. k is the padded k. Matrix is always split::ScaledMatrix;
// is_built (linear_sm80.cu) says why the kernel is a template.
template <typename Matrix>
__global__ void __launch_bounds__(Sm80Config::kThreads, 1)
    gemm_fp16x3_sm80_kernel(const __grid_constant__ Matrix x, const __grid_constant__ Matrix weight,
                            int k, const TileOrder tiles,
                            const __grid_constant__ Epilogue<float> epilogue) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_start = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32;
  constexpr int kWarpsInARow = Sm80Config::kTileColumns / Sm80Config::kWarpColumns;
  const int warp_row = warp / kWarpsInARow * Sm80Config::kWarpRows;
  const int warp_column = warp % kWarpsInARow * Sm80Config::kWarpColumns;
  const TilePosition tile = tiles.find(blockIdx.x);
  const int first_row = tile.x_tile * Sm80Config::kTileRows;
  const int first_column = tile.weight_tile * Sm80Config::kTileColumns;
  Copies copies(x, weight, first_row, /*weight_row=*/first_column, k, shared_start);
  MmaFragments fragments(shared_start, warp_row, warp_column);
  Results results;

  // Start the copies of all stages but one, and load the first fragments.
  for (int i = 0; i < Sm80Config::kStages - 1; ++i) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) copies.copy_quarter(quarter);
  }
  ptx::wait_copies<1>();  // stage 0, which is read next, has arrived, and stage 1 too
  __syncthreads();
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    fragments.load_b(/*stage=*/0, /*k_step=*/0, quarter);
  }
  fragments.load_a(/*stage=*/0, /*k_step=*/0, /*fragment=*/0);

  // Mainloop. The first k-tile promotes accumulators of zeros.
  uint32_t stage = 0;
  const int k_tiles = (k + Sm80Config::kKTileDepth - 1) / Sm80Config::kKTileDepth;
  for (int i = 0; i < k_tiles; ++i) multiply_k_tile(copies, fragments, results, stage);

#pragma unroll
  for (int i = 0; i < Sm80Config::kXFragments; ++i) {
    results.promote(i);
    Results::remove_lo_scale(results.sums[i]);
  }

  // Epilogue, after all copies into the shared memory that it reuses.
  ptx::wait_copies<0>();
  __syncthreads();
  float* const staged = reinterpret_cast<float*>(shared) + warp * Sm80Config::kSubtileFloats;
  const WarpOutput output{epilogue, x.exponent, weight.exponent, first_row + warp_row,
                          first_column + warp_column};
  store_warp_results(results.sums, staged, output);
#endif
}

}  // namespace kernels::sm80::gemm_fp16x3
