// The constants of gemm_single_kernel. They are shared by gemm_single.cuh (mainloop),
// gemm_single_arguments.cuh (modes and arguments), convert_weight.cuh (converter warps), and
// gemm_single_epilogue.cuh, gemm_single_epilogue_half.cuh and gemm_single_gradient.cuh (results).

#pragma once

#include <cuda_fp16.h>

#include "linear/fp16x3/split.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_single {

struct Config {
  // The block tile. wgmma's instruction m64n256 multiplies 64 rows of operand A by 256 rows of
  // operand B. Operand A is the weight, and each consumer warpgroup has 64 rows of it, which make
  // 64 columns of out. Operand B is x, which both warpgroups share.
  static constexpr int kWarpgroupColumns = 64;
  static constexpr int kWarpColumns = kWarpgroupColumns / 4;  // wgmma gives each warp 16
  static constexpr int kBlockColumns = kWarpgroupColumns * BlockConfig::kConsumerWarpgroups;
  static constexpr int kXRows = 256;
  // The blocks of a cluster multiply the same rows of x. Each loads its share, for all blocks.
  static constexpr int kXRowsPerBlock = kXRows / BlockConfig::kClusterSize;
  // Float32 accumulators of a thread: a warpgroup's 64 x 256 sums over its 128 threads.
  static constexpr int kAccumulators = kWarpgroupColumns * kXRows / 128;

  // The k-tile, in bytes of a row: the widest swizzle of TMA and wgmma. These are 64 elements of a
  // 16-bit type, or 32 of float32.
  static constexpr int kKTileBytes = 128;
  // Bytes of x and of the weight in one stage of shared memory.
  static constexpr int kXBytes = kXRows * kKTileBytes;
  static constexpr int kWeightBytes = kBlockColumns * kKTileBytes;
  static constexpr int kStages = 4;  // as many as shared memory holds

  // TMA copies an operand in the caller's layout in boxes of 64 lines of 128 bytes:
  //
  //   operand     line                              box
  //   [rows, K]   one row, 128 bytes of K           64 rows x one k-tile
  //   [K, rows]   one k, 64 rows of a 16-bit type   one k-tile x 64 rows
  //
  // (An operand in k-tiled layout, fp16x3/split.cuh, needs no boxes: its tile is one copy.)
  static constexpr int kBoxRows = 64;
  static constexpr int kBoxBytes = kBoxRows * kKTileBytes;

  // Numbers of the named barriers. 0 is that of __syncthreads.
  static constexpr int kFirstEpilogueBarrier = 1;  // one for each consumer warpgroup: 1 and 2
  static constexpr int kFirstConverterBarrier =    // one for each converter warp: 3, 4 and 5
      kFirstEpilogueBarrier + BlockConfig::kConsumerWarpgroups;

  // Registers of a thread after setmaxnreg. The workers are the warpgroup of the TMA producer and
  // the converters. Consumers of GradientTraits keep the packed results of a tile beside the
  // accumulators of the next one. The registers for these come from the workers, which convert
  // nothing there.
  static constexpr int kWorkerRegisters = 88;
  static constexpr int kConsumerRegisters = 208;
  static constexpr int kGradientWorkerRegisters = 24;
  static constexpr int kGradientConsumerRegisters = 240;

  // The epilogue subtile of StagedSums, in row blocks. 8 rows of x are a row block (and 8 columns
  // of wgmma's accumulators). A warp stages a row block as one float4 a lane. One more float4 is
  // padding (see StagedSumsReader).
  static constexpr int kRowBlocks = kXRows / 8;
  static constexpr int kSubtileRowBlocks = 2;
  static constexpr int kSubtiles = kRowBlocks / kSubtileRowBlocks;
  static constexpr int kStagedLanes = 32 + 1;
  static constexpr int kRowBlockPitch = 4 * kStagedLanes;  // in float4: 4 warps
  // The epilogue subtile of half types in the fast epilogue, in rows of x.
  static constexpr int kHalfSubtileRows = 64;
  // The epilogue subtile of gradients: a box of one warp's 16 columns x 64 rows of x, which TMA
  // stores. A warp has two boxes in shared memory: it writes one while TMA reads the other.
  static constexpr int kGradientBoxRows = 64;
  static constexpr int kGradientBoxes = 2;

  static_assert(kKTileBytes / sizeof(__half) == fp16x3::kKTileHalves,
                "a k-tile of fp16 is one k-tile of a matrix in k-tiled layout");
  static_assert(kBoxRows == kKTileBytes / sizeof(__half),
                "the box of a transposed 16-bit operand is square, so all boxes have one size");
  static_assert(kWarpgroupColumns == kBoxRows, "a consumer warpgroup multiplies one box of weight");
  static_assert(kXRowsPerBlock % kBoxRows == 0, "a block loads whole boxes of x");
  static_assert(BlockConfig::fits(kWorkerRegisters, kConsumerRegisters),
                "warpgroups exchange the registers that the block was launched with");
  static_assert(BlockConfig::fits(kGradientWorkerRegisters, kGradientConsumerRegisters),
                "warpgroups exchange the registers that the block was launched with");
  static_assert(kRowBlocks % kSubtileRowBlocks == 0, "a tile has whole epilogue subtiles");
  static_assert(kXRows % kHalfSubtileRows == 0, "a tile has whole epilogue subtiles");
  static_assert(kXRows % kGradientBoxRows == 0, "a tile has whole boxes of results");
};

}  // namespace kernels::sm90::gemm_single
