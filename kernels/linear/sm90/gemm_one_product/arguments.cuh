// gemm_one_product_kernel (kernel.cuh): its constants, its modes, and its arguments.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx/wgmma.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_one_product {

// ----- constants

struct OneProductConfig {
  // The tile of a cluster: 256 rows of x by 256 rows of the weight. wgmma's instruction m64n256
  // multiplies 64 rows of operand A by 256 rows of operand B. Operand A is the weight, of which
  // each of the cluster's four consumer warpgroups has 64 rows, and each of its warps 16. Operand B
  // is x: all warpgroups multiply by all 256 rows of x.
  static constexpr int kTileRows = 256;
  static constexpr int kWarpWeightRows = 16;
  static constexpr int kWarpgroupWeightRows = 4 * kWarpWeightRows;
  static constexpr int kBlockWeightRows = kWarpgroupWeightRows * BlockConfig::kConsumerWarpgroups;
  static constexpr int kTileWeightRows = kBlockWeightRows * BlockConfig::kClusterSize;
  // Rows of x that each block of a cluster loads, for both blocks.
  static constexpr int kXRowsPerBlock = kTileRows / BlockConfig::kClusterSize;
  // Float32 accumulators of a thread.
  static constexpr int kAccumulators =
      kWarpgroupWeightRows * kTileRows / BlockConfig::kWarpgroupThreads;

  // A row of a k-tile: 64 elements of a 16-bit type, or 32 of float32.
  static constexpr int kRowBytes = split::kKTileRowBytes;
  // Bytes of x and of the weight in one stage of shared memory.
  static constexpr int kXBytes = kTileRows * kRowBytes;
  static constexpr int kWeightBytes = kBlockWeightRows * kRowBytes;
  static constexpr int kStages = 4;  // as many as shared memory holds

  // TMA copies an operand in the caller's layout in boxes of 64 lines of 128 bytes:
  //
  //   operand     line                              box
  //   [rows, K]   one row, 128 bytes of K           64 rows x one k-tile
  //   [K, rows]   one k, 64 rows of a 16-bit type   one k-tile x 64 rows
  //
  // (Of an operand in k-tiled layout, split/split.cuh, one copy loads all rows.)
  static constexpr int kBoxRows = 64;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  static_assert(kBoxRows == kRowBytes / sizeof(__half),
                "the box of a transposed 16-bit operand is square, so all boxes have one size");
  static_assert(kWarpgroupWeightRows == kBoxRows,
                "a consumer warpgroup multiplies one box of weight");
  static_assert(kXRowsPerBlock % kBoxRows == 0, "a block loads whole boxes of x");

  // Numbers of the named barriers. __syncthreads uses 0.
  static constexpr int kFirstEpilogueBarrier = 1;  // one for each consumer warpgroup: 1 and 2
  // One for each converter warp: 3, 4 and 5 (PieceLoader).
  static constexpr int kFirstConverterBarrier =
      kFirstEpilogueBarrier + BlockConfig::kConsumerWarpgroups;

  // Registers of a thread after setmaxnreg. Consumers of GradientMode need more, because they keep
  // the packed results of a tile beside the accumulators of the next one. Its workers need fewer,
  // because they convert nothing.
  static constexpr int kWorkerRegisters = 88;
  static constexpr int kConsumerRegisters = 208;
  static constexpr int kGradientWorkerRegisters = 24;
  static constexpr int kGradientConsumerRegisters = 240;
  static_assert(BlockConfig::fits(kWorkerRegisters, kConsumerRegisters) &&
                    BlockConfig::fits(kGradientWorkerRegisters, kGradientConsumerRegisters),
                "warpgroups exchange the registers that the block was launched with");

  // ----- How the epilogues stage results in shared memory (shared_memory.cuh)

  // StagedAccumulators (float32, and the general epilogue of half types): a subtile of two row
  // blocks at a time. A warp stages a row block as 32 float4, one a lane, and one more as
  // padding (see StagedAccumulatorsReader).
  static constexpr int kRowBlocks = kTileRows / FragmentConfig::kRowBlockRows;
  static constexpr int kSubtileRowBlocks = 2;
  static constexpr int kSubtiles = kRowBlocks / kSubtileRowBlocks;
  static constexpr int kStagedLanes = 32 + 1;
  // From a staged row block to the next, in float4: four warps.
  static constexpr int kRowBlockPitch = 4 * kStagedLanes;
  static_assert(kRowBlocks % kSubtileRowBlocks == 0, "a tile has whole subtiles");

  // StagedRows (the fast epilogue of half types): 64 rows of out at a time.
  static constexpr int kStagedRows = 64;
  static_assert(kTileRows % kStagedRows == 0, "a tile is staged in whole parts");

  // PackedGradient (gradients of half types): a box of one warp's 16 rows of the weight x 64 rows
  // of x, which TMA stores. A warp writes one of its two buffers while TMA reads the other.
  static constexpr int kGradientBoxRows = 64;
  static constexpr int kGradientBuffers = 2;
  static_assert(kTileRows % kGradientBoxRows == 0, "a tile has whole boxes of results");
};

// ----- modes

// A mode says what the kernel computes, and from which operands. It is a type: one of the four
// below, HalfMode to RedoMode. Templates call it Mode, and ask it for types and flags.
enum class ModeKind { kHalf, kGradient, kConvert, kRedo };

template <ModeKind kKind, typename ElementType, typename OutType>
struct ModeOf {
  using Element = ElementType;  // the type of the operands in shared memory
  using Out = OutType;          // the type of bias and out, and of the caller's operands
  static constexpr bool kIsHalfType = kKind == ModeKind::kHalf || kKind == ModeKind::kGradient;
  static constexpr bool kIsGradient = kKind == ModeKind::kGradient;
  static constexpr bool kConvertsWeight = kKind == ModeKind::kConvert;
  static constexpr bool kIsRedo = kKind == ModeKind::kRedo;
};

// T is __half or __nv_bfloat16. x may be [M, K] or [K, M], the weight [N, K] or [K, N]. The layouts
// are chosen at run time: a kernel for each is hardly faster and takes longer to compile
// (docs/EXPERIMENTS.md, "Hopper's products").
template <typename T>
using HalfMode = ModeOf<ModeKind::kHalf, T, T>;

// out [N, M] = weight x^T, in the types and layouts of HalfMode, without bias, ReLU or division
// (launch.cuh, "The operands of GradientMode").
template <typename T>
using GradientMode = ModeOf<ModeKind::kGradient, T, T>;

// Both operands are scaled fp16 numbers in k-tiled layout. split_x.cuh has made those of x. The
// converter warps make those of the weight, from float32 [N, K] or [K, N].
using ConvertMode = ModeOf<ModeKind::kConvert, __half, float>;

// Both operands are row-major float32, which TMA rounds to TF32. Nothing is scaled.
using RedoMode = ModeOf<ModeKind::kRedo, ptx::Tf32, float>;

// ----- arguments

// The parameters of the converter warps. converter.cuh explains the counters.
struct WeightConversion {
  split::ScaledMatrix weight;
  unsigned* next_patch;
  // [panels][k_tiles], each from 0 to kPatchRowsPerPanel. A panel is 128 rows of the weight.
  unsigned* converted_patches;
  unsigned* row_subnormals;  // [N]
  int k_tiles;               // how many K has
  // All clusters together multiply about x_tiles_at_once times weight_tiles_at_once tiles of out at
  // a time, in the first band of TileOrder (tile_order.cuh). This band uses each tile of the weight
  // for the first time, so conversion has to keep ahead of it.
  int x_tiles_at_once;
  int weight_tiles_at_once;
};

// The tiles to compute again, by their numbers in TileOrder. ConvertMode writes the list, and
// RedoMode reads it.
struct RedoList {
  unsigned* count;      // 0 at first
  unsigned* is_listed;  // [all tiles], 0 at first
  int* tiles;           // [all tiles], of which the first `count` are set

  // Lists a tile once, even if several warps of both blocks add it.
  __device__ void add(int tile) const {
    const bool is_new = atomicExch(is_listed + tile, 1u) == 0;
    if (is_new) tiles[atomicAdd(count, 1u)] = tile;
  }
};

template <typename Mode>
struct OneProductArguments {
  static constexpr int kKTileDepth = OneProductConfig::kRowBytes / sizeof(typename Mode::Element);

  Epilogue<typename Mode::Out> epilogue;
  int k;
  TileOrder tile_order;
  bool x_is_transposed;
  bool weight_is_transposed;
  RedoList redo;                // ConvertMode and RedoMode
  WeightConversion conversion;  // ConvertMode
  const int* x_exponent;        // ConvertMode: [M], rows of x were scaled by 2^x_exponent

  __device__ int k_tiles() const { return (k + kKTileDepth - 1) / kKTileDepth; }

  // The number of tiles, also of those that ConvertMode leaves out.
  __device__ int tile_count() const {
    return Mode::kIsRedo ? static_cast<int>(*redo.count) : tile_order.count();
  }

  // The tile with this index. In ConvertMode, neighbouring clusters share a tile of the weight, and
  // the converters use the same order. In half types they share a tile of x, which takes slightly
  // less time.
  __device__ TilePosition tile_at(int index) const {
    if constexpr (Mode::kIsRedo) {
      return tile_order.find(redo.tiles[index]);
    } else if constexpr (Mode::kConvertsWeight) {
      return tile_order.find(index);
    } else {
      return tile_order.find_along_n(index);
    }
  }
};

// ----- blocks and warpgroups of a tile

// Returns which panel of the weight, kBlockWeightRows rows, block `rank` of a cluster multiplies
// for a tile.
__device__ inline int weight_panel(const TilePosition& tile, int rank) {
  return tile.weight_tile * BlockConfig::kClusterSize + rank;
}

// The part of a tile that a consumer warpgroup computes: kTileRows rows of x by
// kWarpgroupWeightRows rows of the weight.
struct WarpgroupTile {
  int first_m;
  int first_n;
};

}  // namespace kernels::sm90::gemm_one_product
