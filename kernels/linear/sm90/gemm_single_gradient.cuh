// How gemm_single_kernel stores a gradient, which has no epilogue. gemm_single_epilogue.cuh says
// which thread has which result; the notation is the same here.

#pragma once

#include <cstdint>

#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/sm90/gemm_single_config.cuh"
#include "linear/sm90/gemm_single_epilogue.cuh"

namespace kernels::sm90::gemm_single {

// A thread's results in a tile of a gradient. The caller packs them to T when the tile's
// accumulators are complete, and stores them a box at a time while the next tile is multiplied.
// For K = 1024, the kernel takes 5% less time on an H200 than if it stores them at once.
//
// out is [N, M]: a line of out is a column, and rows of x are neighbours in it. So two results of a
// thread that are neighbours along x are neighbours in out too, and nothing is transposed. A box is
// a warp's 16 columns x 64 rows of x. As each warp has its own boxes, the warpgroup needs no
// barrier.
template <typename T>
struct PackedGradient {
  static constexpr int kBoxes = Config::kXRows / Config::kGradientBoxRows;
  static constexpr int kPairsPerBox = Config::kGradientBoxRows / 16;  // pairs of row blocks
  // [box][pair][word]: word 2 h + b has column half h, and two rows of row block b of the pair.
  uint32_t words[kBoxes][kPairsPerBox][4];
  // How many boxes of the packed tile are stored. At first no tile is packed, so no box is left.
  int stored = kBoxes;

  // Rounds the accumulators of a complete tile to T, in pairs.
  template <int kSums>
  __device__ void pack(const float (&sums)[kSums]) {
    stored = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int pair = 0; pair < kPairsPerBox; ++pair) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int row_block = (box * kPairsPerBox + pair) * 2 + word % 2;
          const int column_half = word / 2;
          const float* const two_rows = sums + accumulator_index(row_block, column_half);
          words[box][pair][word] = ptx::pack<T>(two_rows[0], two_rows[1]);
        }
      }
    }
  }

  // Stores the next box of the tile at (row, column). Registers cannot be indexed at run time, so
  // there is one copy of `store` for each box.
  __device__ void store_next(const CUtensorMap& map, int row, int column, Staging<T>& staging) {
    static_assert(kBoxes == 4, "each box has a line here");
    const int box = stored;
    ++stored;
    if (box == 0) return store<0>(map, row, column, staging);
    if (box == 1) return store<1>(map, row, column, staging);
    if (box == 2) return store<2>(map, row, column, staging);
    if (box == 3) return store<3>(map, row, column, staging);
  }

  // Stores a box of the tile, by stmatrix to shared memory and by TMA from there. `row` and
  // `column` are the first ones of the warpgroup. All lanes of a warp call it.
  template <int kBox>
  __device__ void store(const CUtensorMap& map, int row, int column, Staging<T>& staging) const {
    static_assert(kBox < kBoxes);
    constexpr int kLineBytes = Config::kGradientBoxRows * sizeof(T);
    static_assert(kLineBytes == 128, "lines have the length of TMA's widest swizzle");
    const int warp = threadIdx.x % 128 / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t box =
        ptx::shared_address(staging.gradient_boxes[warp][kBox % Config::kGradientBoxes]);
    // stmatrix: lane l gives the address of line l % 8 of matrix l / 8. Matrix 2 h + b has the
    // lines of column half h, and row block b of the pair.
    const int line = lane / 16 * 8 + lane % 8;
    const int block_of_pair = lane / 8 % 2;
    // Waits until TMA has read the box that was in this buffer before.
    if (lane == 0) ptx::wait_stores_read<Config::kGradientBoxes - 1>();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kPairsPerBox; ++pair) {
      // TMA's swizzle: vector v of a line is at v ^ (line % 8), and line % 8 is lane % 8.
      const int vector = (pair * 2 + block_of_pair) ^ lane % 8;
      ptx::store_matrices(box + line * kLineBytes + vector * 16, words[kBox][pair]);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      ptx::store_tensor(&map, row + kBox * Config::kGradientBoxRows,
                        column + warp * Config::kWarpColumns, box);
      ptx::commit_stores();
    }
  }
};

}  // namespace kernels::sm90::gemm_single
