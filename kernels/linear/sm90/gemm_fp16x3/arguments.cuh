// The arguments of the fp16x3 GEMM (kernel.cuh), a block's shared memory, and the work tiles of a
// launch.

#pragma once

#include <cstdint>

#include "common/ptx/registers.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_fp16x3/config.cuh"
#include "linear/sm90/gemm_fp16x3/stream_k.cuh"
#include "linear/sm90/gemm_fp16x3/tiles.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// Memory for the partial sums of tiles that clusters share (stream_k.cuh). Each cluster has room
// for the partial sums of one tile, and stores no more.
struct PartialSums {
  // [block of the cluster][row block][consumer thread]: the thread's four sums in the row block
  // (row_block_of, fragment.cuh)
  using Sums =
      float4[BlockConfig::kClusterSize][Fp16x3Config::kRowBlocks][BlockConfig::kConsumerThreads];
  // [block of the cluster][consumer warp]: 1 when the warp has stored all its sums
  using Flags = unsigned[BlockConfig::kClusterSize][BlockConfig::kConsumerWarps];

  Sums* sums;         // [clusters]
  Flags* are_stored;  // [clusters], zeros when the kernel starts
};

struct Fp16x3Arguments {
  Epilogue<float> epilogue;
  split::ScaledMatrix x;       // split into hi and lo
  split::ScaledMatrix weight;  // without hi and lo: the consumers split it in registers
  int k;
  // Both are 0 when the first launch starts.
  unsigned* has_overflowed;  // 1 if a row of the weight is kOverflowed
  unsigned* has_nonfinite;   // 1 if a row of x or of the weight is kNonfinite
  bool is_second_launch;
  TilePartition tiles;
  Schedule schedule;
  PartialSums partials;
};

// ----- shared memory, for mainloop and epilogue

// A tile's exponents and biases. The loader warp loads them while the consumers multiply the tile.
struct EpilogueInputs {
  int x_exponent[Fp16x3Config::kLargestRows];
  struct alignas(8) Column {
    int exponent;
    float bias;
  } columns[Fp16x3Config::kBlockWeightRows];
  int first_m;               // the tile's first row of x
  int end_m;                 // one past the tile's last row of x that exists
  int first_n;               // the block's first row of weight
  int allows_fast_epilogue;  // 1 if the block's part of the tile may take the fast epilogue
};

using Fp16x3Pipeline = Pipeline<Fp16x3Config::kStages>;

struct Fp16x3SharedMemory {
  uint8_t x[Fp16x3Config::kStages][Fp16x3Config::kXBytes];
  uint8_t weight[Fp16x3Config::kStages][Fp16x3Config::kWeightBytes];
  // A subtile of each thread's sums, in the general epilogue.
  float4 staging[BlockConfig::kConsumerWarpgroups][Fp16x3Config::kSubtileRowBlocks]
                [BlockConfig::kWarpgroupThreads];
  EpilogueInputs epilogue_inputs[2];  // this work tile's, and the next one's
  Fp16x3Pipeline::Barriers barriers;
};
static_assert(sizeof(Fp16x3SharedMemory) <= 227 * 1024, "a block has no more shared memory");
static_assert(Fp16x3Config::kXBytes % 1024 == 0 && Fp16x3Config::kWeightBytes % 1024 == 0,
              "the 128-byte swizzle repeats every 1024 bytes, so k-tiles begin at multiples of it");

// ----- the work tiles of a launch

// Returns the first row of the weight that block `rank` of a cluster multiplies for a tile.
__device__ inline int first_n_of_block(const TilePosition& tile, int rank) {
  return (tile.weight_tile * BlockConfig::kClusterSize + rank) * Fp16x3Config::kBlockWeightRows;
}

// Returns whether this launch computes the tiles of a weight tile (RowState). All lanes of a warp
// call it. All warps of all clusters get the same answer, whenever they ask: in the second launch,
// the state of a row may change from kOverflowed to kNonfinite, but not to or from kExact.
__device__ inline bool computes_weight_tile(const Fp16x3Arguments& args, int weight_tile) {
  if (!args.is_second_launch) return true;
  bool has_inexact = false;
  for (int i = threadIdx.x % 32; i < Fp16x3Config::kTileWeightRows; i += 32) {
    const int n = weight_tile * Fp16x3Config::kTileWeightRows + i;
    has_inexact |= n < args.epilogue.n && __ldcg(args.weight.row_state + n) != split::kExact;
  }
  return ptx::uniform(__any_sync(0xffffffff, has_inexact)) != 0;
}

// Calls body(work, tile) for each work tile of this cluster that this launch computes, in the order
// of the schedule. All lanes of a warp call it. With kIsUniform, the compiler sees that all of them
// get the same work tiles.
template <bool kIsUniform = false, typename Body>
__device__ __forceinline__ void for_each_work_tile(const Fp16x3Arguments& args, const Body& body) {
  for (int i = 0;; ++i) {
    const WorkTile work =
        kIsUniform ? args.schedule.uniform_work_tile(i) : args.schedule.work_tile(i);
    if (!work.exists()) break;
    const TilePosition tile = args.tiles.find(work.tile);
    if (computes_weight_tile(args, tile.weight_tile)) body(work, tile);
  }
}

}  // namespace kernels::sm90::gemm_fp16x3
