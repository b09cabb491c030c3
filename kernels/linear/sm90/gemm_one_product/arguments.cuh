// gemm_one_product_kernel (kernel.cuh): its constants, its modes, and its arguments, which
// launch.cuh fills in.

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
  // multiplies 64 rows of operand A by 256 rows of operand B. Operand A is the weight: each
  // consumer warpgroup of the two blocks has 64 rows of the weight, and each of its warps 16.
  // Operand B is x: all warpgroups of both blocks multiply by all 256 rows of x.
  static constexpr int kTileRows = 256;
  static constexpr int kWarpWeightRows = 16;
  static constexpr int kWarpgroupWeightRows = 4 * kWarpWeightRows;
  static constexpr int kBlockWeightRows = kWarpgroupWeightRows * BlockConfig::kConsumerWarpgroups;
  static constexpr int kTileWeightRows = kBlockWeightRows * BlockConfig::kClusterSize;
  // Rows of x that each block of a cluster loads, for both blocks.
  static constexpr int kXRowsPerBlock = kTileRows / BlockConfig::kClusterSize;
  // Float32 accumulators of a thread: a warpgroup's 64 x 256 sums over its 128 threads.
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
  // One for each converter warp: 3, 4 and 5. A converter's lanes meet there (convert_whole_patch).
  static constexpr int kFirstConverterBarrier =
      kFirstEpilogueBarrier + BlockConfig::kConsumerWarpgroups;

  // Registers of a thread after setmaxnreg. The workers are the producer warp and the converter
  // warps. Consumers of GradientMode need more registers, because they keep the packed
  // results of a tile beside the accumulators of the next one. The workers need fewer there,
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
  // blocks at a time. A row block is 8 rows (sm90/fragment.cuh). A warp stages it as one float4 a
  // lane. One more float4 is padding (see StagedAccumulatorsReader).
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
  // of x, which TMA stores. A warp has two buffers for boxes: it writes one while TMA reads the
  // other.
  static constexpr int kGradientBoxRows = 64;
  static constexpr int kGradientBuffers = 2;
  static_assert(kTileRows % kGradientBoxRows == 0, "a tile has whole boxes of results");
};

// ----- modes

// A mode says what the kernel computes, and from which operands. It is a type: one of the four
// below, HalfMode to RedoMode. Templates call it Mode, and ask it for types and flags. In all modes
// two warpgroups multiply and one warp loads. The other three warps convert the weight in
// ConvertMode, and are idle in other modes.
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

// Computes out = relu(x weight^T + bias) / divisor in T, a half type: __half or __nv_bfloat16. x
// may be [M, K] or [K, M], the weight [N, K] or [K, N]. These layouts are chosen at run time: a
// kernel for each is hardly faster and takes longer to compile (docs/EXPERIMENTS.md, "Hopper's
// products").
template <typename T>
using HalfMode = ModeOf<ModeKind::kHalf, T, T>;

// Computes gradients, in the types and layouts of HalfMode: out [N, M] = weight x^T, without
// bias, ReLU or division (launch.cuh, "The operands of GradientMode"). The consumers store a tile's
// results by TMA while they multiply the next tile.
template <typename T>
using GradientMode = ModeOf<ModeKind::kGradient, T, T>;

// Computes out = relu(x weight^T + bias) / divisor in float32, from fp16 operands in k-tiled
// layout. Rows of both operands are scaled by powers of two. split_x.cuh has made the fp16 x. The
// converter warps make the fp16 weight, from float32 [N, K] or [K, N].
using ConvertMode = ModeOf<ModeKind::kConvert, __half, float>;

// Computes the tiles that ConvertMode has listed, from row-major float32 operands, which TMA
// rounds to TF32. (A transposed weight was copied to row-major before.) TF32 has float32's range,
// so nothing is scaled.
using RedoMode = ModeOf<ModeKind::kRedo, ptx::Tf32, float>;

// ----- arguments

// The parameters of the converter warps. converter.cuh explains the counters.
struct WeightConversion {
  split::ScaledMatrix weight;
  unsigned* next_patch;
  // [panels][k_tiles], each from 0 to kPatchesPerPanel. A panel is 128 rows of the weight.
  unsigned* converted_patches;
  unsigned* row_subnormals;  // [N]
  int k_tiles;               // how many K has
  // All clusters together multiply about x_tiles_at_once times weight_tiles_at_once tiles of out at
  // a time. Both numbers are for the first tiles of x (the first band of TileOrder): each tile of
  // the weight is used for the first time there, and must be converted by then.
  int x_tiles_at_once;
  int weight_tiles_at_once;
};

// The tiles to compute again, by their numbers in TileOrder. ConvertMode writes the list, and
// RedoMode, which runs after it, reads it.
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

// The kernel's arguments.
template <typename Mode>
struct OneProductArguments {
  // Elements of K in a k-tile: 64 of 16-bit types, 32 of TF32.
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

  // The number of tiles. With C clusters, cluster c has the tiles with the indices c, c + C,
  // c + 2 C and so on. (In ConvertMode it leaves out those of a row of x with kNeedsTf32.)
  __device__ int tile_count() const {
    return Mode::kIsRedo ? static_cast<int>(*redo.count) : tile_order.count();
  }

  // The tile with this index. In ConvertMode, neighbouring clusters share a tile of the weight
  // (tile_order.cuh), and the converters use the same order. In half types they share a tile of x
  // (find_along_n), which takes slightly less time.
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

// Returns which panel of the weight a block multiplies for a tile. A panel is 128 rows
// (OneProductConfig::kBlockWeightRows). `rank` is the block's number in its cluster.
__device__ inline int weight_panel(const TilePosition& tile, int rank) {
  return tile.weight_tile * BlockConfig::kClusterSize + rank;
}

// The part of a tile that a consumer warpgroup computes: kTileRows rows of x, from first_m on, by
// kWarpgroupWeightRows rows of the weight, from first_n on.
struct WarpgroupTile {
  int first_m;
  int first_n;
};

}  // namespace kernels::sm90::gemm_one_product
