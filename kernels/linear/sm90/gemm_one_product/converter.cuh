// The converter warps of gemm_one_product_kernel. They turn the float32 weight into scaled fp16, in
// global memory, just ahead of the TMA loads of the same kernel. This file decides which warp
// converts which patch, and when. converter_patch.cuh converts one patch.
//
// The parts of the weight [N, K], in rows x elements of K:
//
//   weight tile   256 x K    what a cluster multiplies for a tile of out
//   panel         128 x K    what one of the cluster's blocks multiplies: half of a weight tile
//   patch         32 x 256   what a converter warp converts at a time: 4 k-tiles, of 64 each
//   piece         8 x 64     what the warp loads to shared memory at a time: a sixteenth of a patch
//                            (32 x 16 if the weight is transposed)
//   octet         1 x 8      what a lane converts at a time. A piece has 64 octets, two for each
//                            lane
//
// Patches form a grid, with patch rows along N and patch columns along K: a panel has 4 patch rows,
// and K = 8192 has 32 patch columns. A weight group is all weight tiles that the clusters multiply
// at the same time (PatchOrder).
//
// The converter warps call convert_weight (kernel.cuh). The producer warp calls wait_converted
// before it loads a k-tile (mainloop.cuh).
//
// Why in this kernel: a pass of its own would write the fp16 weight to memory, and the GEMM would
// read it back. Here the GEMM reads it from L2, and the warps that convert would be idle otherwise.
//
// Four counters connect the warps. All of them are 0 at first. producer_k_tile is in shared memory,
// the others are in global memory.
//
//   next_patch          The number of the next patch (see PatchOrder). Converter warps of all
//                       blocks take patches from this counter, by atomicAdd.
//   converted_patches   [panel][k-tile]: how many of the panel's 4 patches at this k-tile are
//                       converted. The producer loads the panel's k-tile when the count is 4.
//   producer_k_tile     The latest k-tile that this block's producer has begun, counted over all of
//                       its tiles. It keeps the block's converter warps from running so far ahead
//                       that L2 evicts the fp16 weight before it is read.
//   row_subnormals      [n]: how many subnormals row n has, each k-tile's count scaled as if the
//                       k-tile had no zeros (converter_subnormals.cuh). Only converter warps use
//                       it.
//
// Memory ordering. Only the counter converted_patches announces that other data has been written:
// hi, the fp16 weight. Ordinary stores (PTX's generic proxy) write hi and TMA (the async proxy)
// reads it, so a release and an acquire are not enough. Both sides also have a proxy fence:
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

// The patches in the order in which the clusters need them. All clusters together multiply
// weight_tiles_at_once weight tiles at a time, a weight group. The patches of the first weight
// group come first, one patch column after the other, then those of the next weight group.
//
// Example: x [1024, 8192], weight [8192, 8192], 66 clusters. x has 4 tiles, all multiplied at once.
// The weight has 32, of which 66 / 4 = 16.5, rounded up to 17, are multiplied at once. A weight
// tile has 8 patch rows. K has 128 k-tiles, which are 32 patch columns.
//
//   weight group 0: weight tiles 0 - 16,    17 * 8 = 136 patch rows,   136 * 32 = 4352 patches
//   weight group 1: weight tiles 17 - 31,   15 * 8 = 120 patch rows,   120 * 32 = 3840 patches
//
//   Patch 5000 is number 5000 - 4352 = 648 of weight group 1.
//     648 = 5 * 120 + 48, so its patch column is 5 and its patch row is 136 + 48 = 184.
//     These are k-tiles 20 to 23, and rows 184 * 32 = 5888 to 5919 of the weight.
struct PatchOrder {
  const WeightConversion& conversion;
  int patch_columns;
  int patch_rows;
  int patch_rows_of_group;  // of a whole weight group
  int clusters;

  // `weight_tiles` are those of the whole weight, and `clusters` those of the grid.
  __device__ PatchOrder(const WeightConversion& conversion, int weight_tiles, int clusters)
      : conversion(conversion), clusters(clusters) {
    constexpr int kPatchRowsOfTile = BlockConfig::kClusterSize * ConverterConfig::kPatchesPerPanel;
    patch_columns =
        (conversion.k_tiles + ConverterConfig::kPatchKTiles - 1) / ConverterConfig::kPatchKTiles;
    patch_rows = weight_tiles * kPatchRowsOfTile;
    patch_rows_of_group = conversion.weight_tiles_at_once * kPatchRowsOfTile;
  }

  __device__ unsigned count() const { return static_cast<unsigned>(patch_rows) * patch_columns; }

  // The patch of this number, 0 <= number < count().
  __device__ __forceinline__ Patch find(int number) const {
    const int weight_group = number / (patch_rows_of_group * patch_columns);
    const int number_in_group = number - weight_group * patch_rows_of_group * patch_columns;
    const int first_patch_row = weight_group * patch_rows_of_group;
    // The last weight group may have fewer patch rows than the others.
    const int patch_rows_here = min(patch_rows_of_group, patch_rows - first_patch_row);
    const int patch_column = number_in_group / patch_rows_here;
    const int patch_row_in_group = number_in_group - patch_column * patch_rows_here;
    const int patch_row = first_patch_row + patch_row_in_group;
    const int first_k_tile = patch_column * ConverterConfig::kPatchKTiles;
    const int64_t first_n = patch_row * ConverterConfig::kPatchRows;
    return {first_n, first_k_tile, first_use(weight_group, first_k_tile)};
  }

  // Returns how many k-tiles a cluster multiplies before it needs this k-tile of a tile of the
  // weight group.
  //
  // In the example above, for patch 5000: 17 * 4 = 68 tiles of out come before weight group 1. A
  // cluster has multiplied 68 / 66 = 1 of them, which is 128 k-tiles. (The division rounds down, so
  // that no conversion is late.) It first needs the patch at its k-tile 128 + 20 = 148.
  __device__ __forceinline__ int first_use(int weight_group, int k_tile) const {
    const int tiles_before =
        weight_group * conversion.weight_tiles_at_once * conversion.x_tiles_at_once;
    const int tiles_of_cluster = tiles_before / clusters;
    return tiles_of_cluster * conversion.k_tiles + k_tile;
  }
};

// Takes the next patch. Returns the patch's number to lane 0, and 0 to the other lanes. All lanes
// of a warp call it.
__device__ __forceinline__ unsigned take_patch(const WeightConversion& conversion) {
  return threadIdx.x % 32 == 0 ? atomicAdd(conversion.next_patch, 1u) : 0;
}

// Waits until this block's producer has begun a k-tile that is at most kLead k-tiles before the
// patch's first use. In the example above: k-tile 148 - 24 = 124. All lanes of a warp call it. (The
// end of this file shows that no warp waits forever.)
__device__ __forceinline__ void wait_for_turn(const Patch& patch, int* producer_k_tile) {
  if (threadIdx.x % 32 == 0) {
    while (atomicAdd(producer_k_tile, 0) + ConverterConfig::kLead < patch.first_use) {
      __nanosleep(200);
    }
  }
  __syncwarp();
}

// Tells the producers that a patch is converted: see "Memory ordering" at the top. All lanes of a
// warp call it.
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

// The memory and the barrier of one converter warp, and the counter of its block's producer.
struct ConverterWarp {
  PieceRing& ring;       // the warp's part of shared memory
  int barrier;           // a named barrier for its lanes
  int* producer_k_tile;  // see the counters at the top
};

// Converts patches until none is left. Each converter warp calls it. The warps of all blocks take
// patches from one counter, so a warp mostly converts what other blocks multiply. `k` is K.
// is_needed() returns whether any tile reads the fp16 weight. All blocks get the same answer.
template <typename Layout, typename IsNeeded>
__device__ void convert_weight(const PatchOrder& order, int64_t k, const ConverterWarp& warp,
                               const IsNeeded& is_needed) {
  const WeightConversion& conversion = order.conversion;
  const unsigned patches = order.count();
  const unsigned first_number = take_patch(conversion);
  // The atomic operation above and the loads of is_needed are in flight at the same time. A variant
  // that converts the first patch before it calls is_needed was slower (docs/EXPERIMENTS.md,
  // "Hopper's products", under "At `high` and in half types").
  if (!is_needed()) return;
  unsigned number = __shfl_sync(0xffffffff, first_number, 0);
  while (number < patches) {
    const unsigned next_number = take_patch(conversion);  // arrives during the conversion
    const Patch patch = order.find(static_cast<int>(number));
    wait_for_turn(patch, warp.producer_k_tile);
    convert_patch<Layout>(conversion, k, patch, warp.ring, warp.barrier);
    publish(conversion, patch);
    number = __shfl_sync(0xffffffff, next_number, 0);
  }
}

// Waits until a panel is converted at a k-tile. Lane i looks at k-tile k_tile + i. Returns how many
// successive k-tiles, from k_tile on, are converted: 1 to 32. The producer asks again only after
// these. All lanes of the producer warp call it. (The wait ends: see below.)
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
// Let P be the first patch, in the order of PatchOrder, that is not converted yet. Nothing that
// must happen before P is converted needs P or a later patch. So P will be converted, then the next
// patch, and so on until all are.
//
// K-tiles are counted as in producer_k_tile and first_use: over all tiles of a cluster.
//
// Lemma: a k-tile before P's first use needs only converted patches. Patches are sorted by first
// use, and the k-tile needs only patches whose first use is at this k-tile or before it. They come
// before P, so they are converted.
//
//   Why the patches are sorted: in a weight group, first_use grows with the patch column. The next
//   group's first use is at least k_tiles later, because a group has at least one tile of out for
//   each cluster (weight_tiles_at_once is rounded up).
//
// The waits until P is converted, each of which ends:
//
//   who waits            for what           why the wait ends
//
//   a producer, with a   converted          The patches that it waits for are converted (lemma).
//   k-tile before P's    patches
//   first use
//                        an empty stage     The stage holds an earlier k-tile, which needs only
//                                           converted patches, too. So both producers of the
//                                           cluster load it, and the consumers multiply it.
//
//   the converter warp   its turn           By the rows above, its block's producer loads all of
//   that has P (all its  (wait_for_turn)    its k-tiles before P's first use. Then it begins the
//   earlier patches are                     next one, or has none and calls finish (mainloop.cuh).
//   converted)
//
//   P itself             a warp, if none    Warps take patches in order, so all patches that are
//                        has taken it yet   taken come before P, and are converted. Their warps
//                                           take further patches, and one of them takes P.
//
// The blocks need not all be on the GPU at once, because only a running block takes patches.

}  // namespace kernels::sm90::gemm_one_product
