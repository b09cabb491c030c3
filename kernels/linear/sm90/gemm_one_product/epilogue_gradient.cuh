// How gemm_one_product_kernel stores gradients in half types (GradientMode), which have no
// epilogue. sm90/fragment.cuh explains row blocks (of m), column blocks (of n) and words.

#pragma once

#include <cstdint>

#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/tma.cuh"
#include "common/sizes.h"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// A thread's results in a tile of a gradient. The caller packs them when the tile's accumulators
// are complete, and stores them a box at a time while the next tile is multiplied
// (run_gradient_consumer, kernel.cuh). For K = 1024, that takes 5% less time on an H200 than
// storing them at once (docs/EXPERIMENTS.md, "The gradient of the weight in half types").
//
// out is [N, M], so the two neighbouring m of which a thread has results are neighbours in memory,
// too, and nothing is transposed. A line is the results of one n. A box is a warp's 16 lines x 64
// m. As each warp has its own boxes, the warpgroup needs no barrier.
template <typename T>
struct PackedGradient {
  static constexpr int kBoxes = OneProductConfig::kTileRows / OneProductConfig::kGradientBoxRows;
  static constexpr int kPairsPerBox =
      OneProductConfig::kGradientBoxRows / FragmentConfig::kPairRows;
  // [box][pair of row blocks][word]. A word has two neighbouring m of one n (pair_word).
  uint32_t words[kBoxes][kPairsPerBox][4];
  // At first no tile is packed, so no box is left.
  int stored_boxes = kBoxes;

  // Rounds the accumulators of a complete tile to T, in pairs.
  __device__ void pack(const float (&accumulators)[OneProductConfig::kAccumulators]) {
    stored_boxes = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int pair = 0; pair < kPairsPerBox; ++pair) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int row_block = (box * kPairsPerBox + pair) * 2 + pair_word(word).row_block;
          const int column_block = pair_word(word).column_block;
          words[box][pair][word] =
              ptx::pack<T>(accumulators[fragment_index(row_block, column_block, 0)],
                           accumulators[fragment_index(row_block, column_block, 1)]);
        }
      }
    }
  }

  // Stores the next box of the packed tile, which must have one left. warpgroup_tile is the place
  // of that tile. Registers cannot be indexed at run time, so there is a `store` for each box.
  __device__ void store_next(const CUtensorMap& map, const WarpgroupTile& warpgroup_tile,
                             Staging<T>& staging) {
    static_assert(kBoxes == 4, "each box has a line here");
    const int box = stored_boxes;
    ++stored_boxes;
    if (box == 0) {
      store<0>(map, warpgroup_tile, staging);
    } else if (box == 1) {
      store<1>(map, warpgroup_tile, staging);
    } else if (box == 2) {
      store<2>(map, warpgroup_tile, staging);
    } else if (box == 3) {
      store<3>(map, warpgroup_tile, staging);
    }
  }

  // Stores a box of the tile, by stmatrix to shared memory and by TMA from there. All lanes of a
  // warp call it.
  template <int kBox>
  __device__ void store(const CUtensorMap& map, const WarpgroupTile& warpgroup_tile,
                        Staging<T>& staging) const {
    static_assert(kBox < kBoxes);
    constexpr int kLineBytes = OneProductConfig::kGradientBoxRows * sizeof(T);
    static_assert(kLineBytes == 128, "lines have the length of TMA's widest swizzle");
    const int warp = threadIdx.x % BlockConfig::kWarpgroupThreads / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t box_address = ptx::shared_address(
        staging.gradient_boxes[warp][kBox % OneProductConfig::kGradientBuffers]);
    // stmatrix takes from lane l the address of line l % 8 of matrix l / 8. Matrix i is word i of
    // all lanes: the eight lines of its column block, and the eight m of its row block.
    const int line = lane / 16 * 8 + lane % 8;
    const int block_of_pair = pair_word(lane / 8).row_block;
    // Waits until TMA has read the box that was in this buffer before.
    if (lane == 0) ptx::wait_stores_read<OneProductConfig::kGradientBuffers - 1>();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kPairsPerBox; ++pair) {
      // TMA's swizzle: vector v of a line is at place v ^ (line % 8), and line % 8 is lane % 8.
      const int vector = pair * 2 + block_of_pair;
      const int place = vector ^ lane % 8;
      ptx::store_matrices(box_address + line * kLineBytes + place * kVectorBytes,
                          words[kBox][pair]);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      // m comes first, because it is contiguous in out.
      ptx::store_tensor(&map, warpgroup_tile.first_m + kBox * OneProductConfig::kGradientBoxRows,
                        warpgroup_tile.first_n + warp * OneProductConfig::kWarpWeightRows,
                        box_address);
      ptx::commit_stores();
    }
  }
};

}  // namespace kernels::sm90::gemm_one_product
