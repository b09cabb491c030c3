// The converter warps of gemm_one_product_kernel. They turn the float32 weight into scaled fp16, in
// global memory, just ahead of the TMA loads of the same kernel. This file decides which warp
// converts which part of the weight, and when; converter_patch.cuh converts the part:
//
//   1. A converter warp takes the next patch of the weight. The warps of all blocks take patches
//      from one counter, in the order in which the clusters need them (PatchOrder).
//   2. It waits until the patch is needed soon (wait_for_producer). Otherwise L2 might evict the
//      fp16 weight before it is read.
//   3. It converts the patch, and tells the producers so (publish).
//
// A producer waits before it loads a k-tile that is not converted (wait_converted). The end of this
// file shows that no warp waits forever.
//
// A pass of its own would write the fp16 weight to memory, and the GEMM would read it back. Here
// the GEMM reads it from L2, and the warps that convert would be idle otherwise.
//
// The parts of the weight [N, K], in rows x elements of K:
//
//   weight tile   256 x K    what a cluster multiplies for a tile of out
//   panel         128 x K    half of a weight tile: what one of the cluster's two blocks multiplies
//   patch         32 x 256   what a converter warp converts at a time: 4 k-tiles, of 64 each
//
// Patches form a grid, with patch rows along N and patch columns along K: a panel has 4 patch rows,
// and K = 8192 has 32 patch columns.
//
// Four counters connect the warps. All of them are 0 at first. producer_k_tile is in shared memory,
// the others are in global memory.
//
//   next_patch          The number of the next patch to take (PatchOrder).
//   converted_patches   [panel][k-tile]: how many of the panel's 4 patches at this k-tile are
//                       converted. The producer loads the panel's k-tile when the count is 4.
//   producer_k_tile     The latest k-tile that this block's producer has begun, counted over all of
//                       its tiles. The block's converter warps wait for it.
//   row_subnormals      [n]: the scaled count of row n (converter_subnormals.cuh). Only converter
//                       warps use it.
//
// Memory ordering. Only converted_patches announces that other data has been written: hi, the fp16
// weight. Ordinary stores (PTX's generic proxy) write hi and TMA (the async proxy) reads it, so a
// release and an acquire are not enough. Both sides also have a proxy fence:
//
//   converter (publish)         each lane: store hi, fence.proxy.async
//                               __syncwarp
//                               a lane for each of the patch's k-tiles: red.release of the counter
//
//   producer (wait_converted)   each lane: ld.acquire of the counter
//                               __syncwarp
//                               each lane: fence.proxy.async
//                               lane 0: TMA load of hi

#pragma once

#include <cstdint>

#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter_layouts.cuh"
#include "linear/sm90/gemm_one_product/converter_patch.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// The patches in the order in which the clusters need them. The clusters multiply the weight in
// turns: all of them together multiply weight_tiles_at_once weight tiles, then the next ones. The
// patches of turn 0 come first, one patch column after the other, then those of turn 1.
//
// Example: x [1024, 8192], weight [8192, 8192], 66 clusters. x has 4 tiles, all multiplied at once.
// The weight has 32, of which 66 / 4 = 16.5, rounded up to 17, are multiplied at once. A weight
// tile has 8 patch rows. K has 128 k-tiles, which are 32 patch columns.
//
//   turn 0: weight tiles 0 - 16,    17 * 8 = 136 patch rows,   136 * 32 = 4352 patches
//   turn 1: weight tiles 17 - 31,   15 * 8 = 120 patch rows,   120 * 32 = 3840 patches
//
//   Patch 5000 is number 5000 - 4352 = 648 of turn 1.
//     648 = 5 * 120 + 48, so its patch column is 5 and its patch row is 136 + 48 = 184.
//     These are k-tiles 20 to 23, and rows 184 * 32 = 5888 to 5919, of weight tile 184 / 8 = 23.
//
// The next picture shows when patch 5000 is needed (Patch::first_k_tile_of_use), and patch 1408 of
// turn 0 (k-tiles 40 to 43 of weight tile 6). A warp may begin a patch kLead = 24 k-tiles earlier.
// Cluster 26 multiplies weight tile 6 and then weight tile 23. Its k-tiles are counted over both:
//
//   k-tile          0        16          40                    124  128        148              255
//   weight tile     6 --------------------------------------------- 23 ---------------------------
//   patch 1408               may begin   needed
//   patch 5000                                                 may begin       needed
struct PatchOrder {
  const WeightConversion& conversion;
  int patch_columns;
  int patch_rows;
  int patch_rows_of_turn;  // the last turn may have fewer
  int clusters;

  __device__ PatchOrder(const WeightConversion& conversion, int weight_tiles, int clusters)
      : conversion(conversion), clusters(clusters) {
    constexpr int kPatchRowsOfTile = BlockConfig::kClusterSize * ConverterConfig::kPatchesPerPanel;
    patch_columns =
        (conversion.k_tiles + ConverterConfig::kPatchKTiles - 1) / ConverterConfig::kPatchKTiles;
    patch_rows = weight_tiles * kPatchRowsOfTile;
    patch_rows_of_turn = conversion.weight_tiles_at_once * kPatchRowsOfTile;
  }

  __device__ unsigned count() const { return static_cast<unsigned>(patch_rows) * patch_columns; }

  // The patch of this number, 0 <= number < count().
  __device__ __forceinline__ Patch find(int number) const {
    const int turn = number / (patch_rows_of_turn * patch_columns);
    const int number_in_turn = number - turn * patch_rows_of_turn * patch_columns;
    const int first_patch_row = turn * patch_rows_of_turn;
    const int patch_rows_here = min(patch_rows_of_turn, patch_rows - first_patch_row);
    const int patch_column = number_in_turn / patch_rows_here;
    const int patch_row_in_turn = number_in_turn - patch_column * patch_rows_here;
    const int patch_row = first_patch_row + patch_row_in_turn;
    const int first_k_tile = patch_column * ConverterConfig::kPatchKTiles;
    const int64_t first_n = patch_row * ConverterConfig::kPatchRows;
    return {first_n, first_k_tile, first_k_tile_of_use(turn, first_k_tile)};
  }

  // Returns how many k-tiles a cluster multiplies, at least, before it needs this k-tile of a
  // weight tile of the turn. For patch 5000 above: 17 * 4 = 68 tiles of out come before turn 1. A
  // cluster has multiplied 68 / 66 = 1 of them, which is 128 k-tiles. (The division rounds down, so
  // that no conversion is late.) It first needs the patch at its k-tile 128 + 20 = 148.
  __device__ __forceinline__ int first_k_tile_of_use(int turn, int k_tile) const {
    const int tiles_before = turn * conversion.weight_tiles_at_once * conversion.x_tiles_at_once;
    const int tiles_of_cluster = tiles_before / clusters;
    return tiles_of_cluster * conversion.k_tiles + k_tile;
  }
};

// Takes the next patch. Returns its number to lane 0, and 0 to the other lanes. All lanes of a warp
// call it.
__device__ __forceinline__ unsigned take_patch(const WeightConversion& conversion) {
  return threadIdx.x % 32 == 0 ? atomicAdd(conversion.next_patch, 1u) : 0;
}

// Waits until this block's producer has begun a k-tile that is at most kLead k-tiles before the
// patch's first use. (The patch may be for another cluster, but all clusters are at about the same
// k-tile.) All lanes of a warp call it.
__device__ __forceinline__ void wait_for_producer(const Patch& patch, int* producer_k_tile) {
  if (threadIdx.x % 32 == 0) {
    while (atomicAdd(producer_k_tile, 0) + ConverterConfig::kLead < patch.first_k_tile_of_use) {
      __nanosleep(200);
    }
  }
  __syncwarp();
}

// Tells the producers that a patch is converted ("Memory ordering"). All lanes of a warp call it.
__device__ __forceinline__ void publish(const WeightConversion& conversion, const Patch& patch) {
  const int lane = threadIdx.x % 32;
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (lane < ConverterConfig::kPatchKTiles && patch.first_k_tile + lane < conversion.k_tiles) {
    const int64_t panel = patch.first_n / OneProductConfig::kBlockWeightRows;
    ptx::add_release(
        conversion.converted_patches + panel * conversion.k_tiles + patch.first_k_tile + lane, 1);
  }
}

struct ConverterWarp {
  PieceRing& ring;       // the warp's part of shared memory
  int barrier;           // a named barrier for its lanes
  int* producer_k_tile;  // see the counters at the top
};

// Converts patches until none is left. Each converter warp calls it. is_needed() returns whether
// any tile reads the fp16 weight. All blocks get the same answer.
template <typename Layout, typename IsNeeded>
__device__ void convert_weight(const PatchOrder& order, int64_t k, const ConverterWarp& warp,
                               const IsNeeded& is_needed) {
  const WeightConversion& conversion = order.conversion;
  const unsigned patches = order.count();
  const unsigned first_number = take_patch(conversion);
  // The atomic operation above and the loads of is_needed are in flight at the same time. A variant
  // that converts the first patch before it calls is_needed was slower (docs/EXPERIMENTS.md,
  // "Hopper's products", "At `high` and in half types").
  if (!is_needed()) return;
  unsigned number = __shfl_sync(0xffffffff, first_number, 0);
  while (number < patches) {
    const unsigned next_number = take_patch(conversion);  // arrives during the conversion
    const Patch patch = order.find(static_cast<int>(number));
    wait_for_producer(patch, warp.producer_k_tile);
    convert_patch<Layout>(conversion, k, patch, warp.ring, warp.barrier);
    publish(conversion, patch);
    number = __shfl_sync(0xffffffff, next_number, 0);
  }
}

// Waits until a panel is converted at k_tile. Returns how many successive k-tiles, from k_tile on,
// are converted: 1 to 32, one for each lane. The producer asks again only after these. All lanes of
// the producer warp call it.
__device__ inline int wait_converted(const WeightConversion& conversion, int panel, int k_tile) {
  const int own_k_tile = k_tile + threadIdx.x % 32;
  const unsigned* const converted =
      conversion.converted_patches + static_cast<int64_t>(panel) * conversion.k_tiles + own_k_tile;
  unsigned missing;  // a bit for each lane whose k-tile is not converted
  bool first_is_missing;
  do {
    const bool is_converted = own_k_tile < conversion.k_tiles &&
                              ptx::load_acquire(converted) == ConverterConfig::kPatchesPerPanel;
    missing = ~__ballot_sync(0xffffffff, is_converted);
    first_is_missing = (missing & 1) != 0;
  } while (first_is_missing);
  // Orders the TMA loads, which lane 0 issues, after the acquires of all lanes.
  __syncwarp();
  ptx::fence_proxy_async_global();
  if (missing == 0) return 32;
  const int first_missing_lane = __ffs(missing) - 1;
  return first_missing_lane;
}

// ----- Why no warp waits forever
//
// Let P be the first patch, in the order of PatchOrder, that is not converted yet, and U its
// first_k_tile_of_use. Points 1 to 4 show that P will be converted, then the next patch, and so on
// until all are. (If no tile reads the fp16 weight, nobody converts it, and nobody waits for it.)
//
//   1. Every cluster's k-tiles before U, counted over all its tiles, are converted. A k-tile needs
//      only patches whose first_k_tile_of_use is not after it, and patches are sorted by
//      first_k_tile_of_use, so the patches that are needed before U come before P. They are
//      sorted because first_k_tile_of_use grows with the patch column in a turn, and the next turn
//      begins at least k_tiles later: a turn has at least one tile of out for each cluster
//      (weight_tiles_at_once is rounded up).
//
//   2. So each producer loads all of its k-tiles before U. The stage that it waits for becomes
//      empty, because it holds an earlier k-tile: both producers of the cluster load that one, and
//      the consumers multiply it.
//
//   3. If a converter warp has taken P, it converts P. Its earlier patches are converted. Its wait
//      for the producer ends, too: after the k-tiles of point 2, the producer begins the next one,
//      or has none and calls finish (mainloop.cuh).
//
//   4. If no warp has taken P, one will. Warps take patches in order, so all patches that are taken
//      come before P, and are converted. Their warps take further patches, and one of them takes P.
//
// The blocks need not all be on the GPU at once, because only a running block takes patches.

}  // namespace kernels::sm90::gemm_one_product
