// The constants of gemm_single_kernel, which its three files use: gemm_single.cuh (mainloop),
// convert_weight.cuh (converter warps) and gemm_single_epilogue.cuh (epilogue).

#pragma once

#include <cuda_fp16.h>

#include "linear/fp16x3/split.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_single {

struct Config {
  // The block tile. wgmma's instruction m64n256 multiplies 64 rows of operand A by 256 rows of
  // operand B. Operand A is the weight: each consumer warpgroup multiplies 64 rows of it, called
  // features because they are the columns of out. Operand B is x, which both warpgroups share.
  static constexpr int kWarpgroupFeatures = 64;
  static constexpr int kWarpFeatures = kWarpgroupFeatures / 4;  // wgmma gives each warp 16
  static constexpr int kWeightRows = kWarpgroupFeatures * BlockConfig::kConsumerWarpgroups;
  static constexpr int kXRows = 256;
  // The blocks of a cluster multiply the same rows of x. Each block loads its share and multicasts
  // it to both.
  static constexpr int kXRowsPerBlock = kXRows / BlockConfig::kClusterSize;
  // Float32 accumulators of a thread: 64 x 256 products over 128 threads.
  static constexpr int kAccumulators = kWarpgroupFeatures * kXRows / 128;

  // The k-tile: as many bytes of K as the widest swizzle of TMA and wgmma, so 64 elements of a
  // 16-bit type or 32 of float32.
  static constexpr int kKTileBytes = 128;
  static constexpr int kXBytes = kXRows * kKTileBytes;  // of one stage in shared memory
  static constexpr int kWeightBytes = kWeightRows * kKTileBytes;
  static constexpr int kStages = 4;  // as many as shared memory holds

  // TMA copies an operand that is not k-tiled in boxes: 64 rows x 128 bytes of K, or for a
  // transposed operand 64 of K x 64 rows, which have 128 bytes too.
  static constexpr int kBoxRows = 64;
  static constexpr int kBoxBytes = kBoxRows * kKTileBytes;

  // Registers of a thread after setmaxnreg. "Worker" is the warpgroup of the TMA producer and the
  // converters. A gradient's consumers keep packed results beside their accumulators, and take the
  // registers for them from the workers, of which only the producer has work there.
  static constexpr int kWorkerRegisters = 88;
  static constexpr int kConsumerRegisters = 208;
  static constexpr int kGradientWorkerRegisters = 24;
  static constexpr int kGradientConsumerRegisters = 240;

  // The epilogue subtile of StagedSums: blocks of 8 rows of x that the epilogue stages at a time,
  // with 32 lanes of a warp and one float4 of padding (see StagedSumsReader).
  static constexpr int kSubtileBlocks = 2;
  static constexpr int kSubtiles = kXRows / (8 * kSubtileBlocks);
  static constexpr int kStagedLanes = 32 + 1;
  static constexpr int kBlockPitch = 4 * kStagedLanes;  // from one block to the next, in float4
  // The epilogue subtile of half types on the fast path, in rows of x.
  static constexpr int kHalfSubtileRows = 64;
  // The epilogue subtile of gradients: a box of one warp's 16 features x 64 rows of x, which TMA
  // stores. A warp has two boxes in shared memory, so that one is written while TMA reads the
  // other.
  static constexpr int kGradientBoxRows = 64;
  static constexpr int kGradientBoxes = 2;

  static_assert(kKTileBytes / sizeof(__half) == fp16x3::kKTileWidth,
                "a k-tile of fp16 is one k-tile of a matrix in k-tiled layout");
  static_assert(kBoxRows == kKTileBytes / sizeof(__half),
                "the box of a transposed 16-bit operand is square, so all boxes have one size");
  static_assert(kWarpgroupFeatures == kBoxRows,
                "a consumer warpgroup multiplies one box of weight");
  static_assert(kXRowsPerBlock % kBoxRows == 0, "a block loads whole boxes of x");
  static_assert(BlockConfig::fits(kWorkerRegisters, kConsumerRegisters),
                "warpgroups exchange the registers that the block was launched with");
  static_assert(BlockConfig::fits(kGradientWorkerRegisters, kGradientConsumerRegisters),
                "warpgroups exchange the registers that the block was launched with");
  static_assert(kXRows % (8 * kSubtileBlocks) == 0, "a tile has whole epilogue subtiles");
  static_assert(kXRows % kHalfSubtileRows == 0, "a tile has whole epilogue subtiles");
  static_assert(kXRows % kGradientBoxRows == 0, "a tile has whole boxes of results");
};

}  // namespace kernels::sm90::gemm_single
