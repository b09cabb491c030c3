// The constants of the fp16x3 GEMM (kernel.cuh). A "row" without the name of its matrix is a row of
// x and of out; eight of them are a row block (fragment.cuh).

#pragma once

#include "common/sizes.h"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_fp16x3 {

struct Fp16x3Config {
  // ----- The tile: 256 rows of weight, and 176, 160, 128 or 64 rows of x (kernel.cuh)
  //
  // A wgmma instruction multiplies A [64, 16] by B [16, rows]. A is the weight, in registers, 16
  // rows in each warp of a warpgroup. B is x, in shared memory. So each consumer warpgroup has 64
  // of the block's rows of weight, and all of the tile's rows of x.
  static constexpr int kWarpWeightRows = 16;
  static constexpr int kWarpgroupWeightRows = 4 * kWarpWeightRows;
  static constexpr int kBlockWeightRows = kWarpgroupWeightRows * BlockConfig::kConsumerWarpgroups;
  static constexpr int kTileWeightRows = kBlockWeightRows * BlockConfig::kClusterSize;

  // Rows of x in a tile.
  //   176  The most that fit: a thread has rows / 2 accumulators, and as many sums, in registers.
  //   160  Mixed with tiles of 176, so that no tile has many rows past M: 1024 rows are exactly 4
  //        tiles of 176 and 2 of 160, but 6 tiles of 176 have 1056. Only where K is at least
  //        kInterval128FromK.
  //   128  For all tiles of a product with few tiles, if this takes less time (choose_tiles.h).
  //    64  The same, for a product with even fewer tiles.
  static constexpr int kLargestRows = 176;
  static constexpr int kRows160 = 160;
  static constexpr int kRows128 = 128;
  static constexpr int kRows64 = 64;
  static_assert(kLargestRows % 8 == 0 && kRows160 % 8 == 0,
                "wgmma takes multiples of 8 rows of operand B");

  // Sums of a thread for the largest tile, and as many accumulators: 64 * 176 / 128 threads = 88.
  static constexpr int kSums = kWarpgroupWeightRows * kLargestRows / BlockConfig::kWarpgroupThreads;
  static constexpr int kRowBlocks = kLargestRows / FragmentConfig::kRowBlockRows;

  // ----- The pipeline
  //
  // A row of a k-tile is 32 floats of the weight, or hi and lo of 32 elements of x.
  static constexpr int kRowBytes = split::kKTileRowBytes;
  static constexpr int kKTileDepth = split::k_tile_depth(split::Form::kWithLo);
  static_assert(kRowBytes == kKTileDepth * sizeof(float), "a k-tile of a row of weight");
  // The distance from hi to lo in shared memory: a row of x has 32 hi first, then 32 lo.
  static constexpr int kHiBytes = kKTileDepth * sizeof(__half);
  static constexpr int kWgmmasPerKTile = kKTileDepth / 16;

  static constexpr int kWeightBytes = kBlockWeightRows * kRowBytes;
  static constexpr int kXBytes = kLargestRows * kRowBytes;
  // Five stages, each of 16 KiB of weight and at most 22 KiB of x, are 190 KiB. Six do not fit into
  // the 227 KiB that a block may have.
  static constexpr int kStages = 5;

  // k-tiles in a k-group, the unit in which the mainloop and the stream-K schedule count K.
  static constexpr int kKTilesPerKGroup = 4;
  // Returns how many k-groups cover K. TMA writes zeros for the elements past K.
  static int k_groups(int k) {
    return static_cast<int>(divide_up(k, kKTilesPerKGroup * kKTileDepth));
  }

  // ----- The promotion interval: 32 of K, but 64 or 128 from these K on (docs/SPLIT.md, step 4)
  static constexpr int kInterval64FromK = 2048;
  static constexpr int kInterval128FromK = 4096;

  // ----- Registers of a thread
  //
  // A consumer has 88 accumulators, 88 sums, and 32 registers of split weight, so that 24 remain.
  static constexpr int kWorkerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(BlockConfig::fits(kWorkerRegisters, kConsumerRegisters),
                "setmaxnreg only moves registers within the block");

  // ----- The subtile that the general epilogue takes at a time: 2 row blocks
  static constexpr int kSubtileRowBlocks = 2;
  static constexpr int kSubtileRows = FragmentConfig::kRowBlockRows * kSubtileRowBlocks;
  static constexpr int kSubtiles = kLargestRows / kSubtileRows;
  static_assert(kLargestRows % kSubtileRows == 0 && kRows160 % kSubtileRows == 0 &&
                    kRows128 % kSubtileRows == 0 && kRows64 % kSubtileRows == 0,
                "tiles are whole subtiles");

  // ----- Numbers of the named barriers; __syncthreads uses 0
  static constexpr int kFirstEpilogueBarrier = 1;  // one for each consumer warpgroup: 1 and 2
  // The second consumer warpgroup waits at it until the first lets it start (let_second_start).
  static constexpr int kSecondStartsBarrier =
      kFirstEpilogueBarrier + BlockConfig::kConsumerWarpgroups;
};

}  // namespace kernels::sm90::gemm_fp16x3
