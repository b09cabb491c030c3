// The converter warps of gemm_one_product_kernel. They turn the float32 weight into scaled fp16
// numbers (hi), in global memory, just ahead of the TMA loads of the same kernel. A pass of its own
// would write hi to memory, and the GEMM would read it back. Here the GEMM reads hi from L2, and
// the warps that convert would be idle otherwise.
//
// The parts of a row-major weight [N, K], in rows x elements of K. A k-tile is 64 of K.
//
//   weight: groups of weight tiles.       weight tile, 256 x K: what a cluster multiplies for a
//   All clusters together multiply        tile of out. Each of the cluster's two blocks multiplies
//   about one group at a time.            a panel, 128 x K, which is a grid of patches.
//
//             +---------------+           patch column      0       1       2
//   group 0   | weight tile 0 |  ----->   k-tiles         0 - 3   4 - 7   8 - 11  ...
//             +---------------+                         +-------+-------+-------+--
//             | weight tile 1 |           patch row 0   | patch | patch | patch |
//             +---------------+           ...           |  ...  |  ...  |  ...  |     panel 0
//   group 1   | weight tile 2 |           patch row 3   | patch | patch | patch |
//             +---------------+                         +-------+-------+-------+--
//             | weight tile 3 |           patch row 4   | patch | patch | patch |     panel 1
//             +---------------+           ...           |  ...  |  ...  |  ...  |
//
//   patch, 32 x 256: what a converter     piece, 8 x 64: what the warp loads to shared memory at a
//   warp takes and converts at a time,    time. A lane converts an octet, 1 x 8, at a time, and has
//   in 16 pieces, p0 first, p15 last.     two octets of each piece.
//
//   k-tile         0    1    2    3       k         0 - 7   8 - 15   ...   56 - 63
//   rows  0 -  7   p0   p4   p8  p12      row 0     octet   octet    ...   octet
//   rows  8 - 15   p1   p5   p9  p13      row 1     octet   octet    ...   octet
//   rows 16 - 23   p2   p6  p10  p14      ...
//   rows 24 - 31   p3   p7  p11  p15      row 7     octet   octet    ...   octet
//
// The pieces of a transposed weight [K, N] are 32 x 16. They, too, are quarters of the k-tiles of a
// patch: k-tile 0 is p0 to p3, which are side by side, k-tile 1 is p4 to p7, and so on.
//
// A converter warp repeats four steps (convert_weight). Each step has a counter, which is 0 at
// first. producer_k_tile is in shared memory, the others are in global memory. All lanes of a warp
// call the functions together. The end of this file shows that no warp waits forever.
//
//   1. take_patch          takes the next patch, in the order in which the clusters need them
//      next_patch            the number of the next patch (PatchOrder), for the warps of all blocks
//
//   2. wait_for_producer   waits until the patch is needed soon; otherwise L2 might evict its hi
//                          before it is read
//      producer_k_tile       the latest k-tile that this block's producer has begun, counted over
//                            all of its tiles
//
//   3. convert_patch       converts the patch (converter_patch.cuh)
//      row_subnormals        [n]: the subnormals in row n, scaled (converter_subnormals.cuh)
//
//   4. publish             tells the producers
//      converted_patches     [panel][k-tile]: how many of the panel's 4 patches at this k-tile are
//                            converted; the producer loads the panel's k-tile when the count is 4
//                            (wait_converted)
//
// Memory ordering. Only converted_patches announces that other data has been written: hi. Ordinary
// stores (PTX's generic proxy) write hi and TMA (the async proxy) reads it, so a release and an
// acquire are not enough. Both sides also have a proxy fence:
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

#include "common/bits.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter_layouts.cuh"
#include "linear/sm90/gemm_one_product/converter_patch.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// The patches in the order in which the clusters need them: those of group 0 first, one patch
// column after the other, then those of group 1.
//
// Example: x [1024, 8192], weight [8192, 8192], 66 clusters. x has 4 tiles, all multiplied at once.
// The weight has 32, of which 66 / 4 = 16.5, rounded up to 17 (weight_tiles_at_once), are
// multiplied at once. They are a group. K has 128 k-tiles, which are 32 patch columns.
//
//   group 0: weight tiles 0 - 16,    17 * 8 = 136 patch rows,   136 * 32 = 4352 patches
//   group 1: weight tiles 17 - 31,   15 * 8 = 120 patch rows,   120 * 32 = 3840 patches
//
//   Patch 5000 is number 5000 - 4352 = 648 of group 1.
//     648 = 5 * 120 + 48, so its patch column is 5 and its patch row is 136 + 48 = 184.
//     These are k-tiles 20 to 23, and rows 184 * 32 = 5888 to 5919, of weight tile 184 / 8 = 23.
//
// The deadline of a patch is a number of k-tiles: every cluster multiplies at least that many
// before it needs the patch. A warp may begin to convert it kLead = 24 k-tiles earlier. For
// example, cluster 26 multiplies weight tile 6, with patch 1408 (k-tiles 40 to 43), and then weight
// tile 23, with patch 5000. Its k-tiles are counted over both:
//
//   k-tile          0        16          40                    124  128        148              255
//   weight tile     6 --------------------------------------------- 23 ---------------------------
//   patch 1408               may begin   deadline
//   patch 5000                                                 may begin       deadline
struct PatchOrder {
  const WeightConversion& conversion;
  int patch_columns;
  int patch_rows;
  int patch_rows_of_group;  // the last group may have fewer
  int clusters;

  __device__ PatchOrder(const WeightConversion& conversion, int weight_tiles, int clusters)
      : conversion(conversion), clusters(clusters) {
    constexpr int kPatchRowsPerTile =
        BlockConfig::kClusterSize * ConverterConfig::kPatchRowsPerPanel;
    patch_columns = (conversion.k_tiles + ConverterConfig::kKTilesPerPatch - 1) /
                    ConverterConfig::kKTilesPerPatch;
    patch_rows = weight_tiles * kPatchRowsPerTile;
    patch_rows_of_group = conversion.weight_tiles_at_once * kPatchRowsPerTile;
  }

  __device__ unsigned count() const { return static_cast<unsigned>(patch_rows) * patch_columns; }

  // The patch of this number, 0 <= number < count().
  __device__ __forceinline__ Patch find(int number) const {
    const int group = number / (patch_rows_of_group * patch_columns);
    const int first_patch_row = group * patch_rows_of_group;
    const int number_in_group = number - first_patch_row * patch_columns;
    const int patch_rows_here = min(patch_rows_of_group, patch_rows - first_patch_row);
    const int patch_column = number_in_group / patch_rows_here;
    const int patch_row_in_group = number_in_group - patch_column * patch_rows_here;
    const int patch_row = first_patch_row + patch_row_in_group;
    const int first_k_tile = patch_column * ConverterConfig::kKTilesPerPatch;
    const int64_t first_n = patch_row * ConverterConfig::kRowsPerPatch;
    return {first_n, first_k_tile, deadline_of(group, first_k_tile)};
  }

  // Returns the deadline of the group's patches that begin at k_tile. For patch 5000 above:
  // 17 * 4 = 68 tiles of out come before group 1. A cluster has multiplied 68 / 66 = 1 of them,
  // which is 128 k-tiles. (The division rounds down, so that no conversion is late.) The deadline
  // is 128 + 20 = 148.
  __device__ __forceinline__ int deadline_of(int group, int k_tile) const {
    const int tiles_before = group * conversion.weight_tiles_at_once * conversion.x_tiles_at_once;
    const int tiles_of_cluster = tiles_before / clusters;
    return tiles_of_cluster * conversion.k_tiles + k_tile;
  }
};

// Takes the next patch. Returns its number to lane 0, and 0 to the other lanes.
__device__ __forceinline__ unsigned take_patch(const WeightConversion& conversion) {
  return threadIdx.x % 32 == 0 ? atomicAdd(conversion.next_patch, 1u) : 0;
}

// For producer_k_tile, which one warp writes while others read it.
__device__ __forceinline__ int load_atomically(int* source) { return atomicAdd(source, 0); }
__device__ __forceinline__ void store_atomically(int* target, int value) {
  atomicExch(target, value);
}

// Waits until this block's producer is at most kLead k-tiles before the patch's deadline. (The
// patch may be for another cluster, but all clusters are at about the same k-tile.)
__device__ __forceinline__ void wait_for_producer(const Patch& patch, int* producer_k_tile) {
  if (threadIdx.x % 32 == 0) {
    while (load_atomically(producer_k_tile) + ConverterConfig::kLead < patch.deadline) {
      __nanosleep(200);
    }
  }
  __syncwarp();
}

// Tells the producers that a patch is converted ("Memory ordering").
__device__ __forceinline__ void publish(const WeightConversion& conversion, const Patch& patch) {
  const int lane = threadIdx.x % 32;
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (lane < ConverterConfig::kKTilesPerPatch && patch.first_k_tile + lane < conversion.k_tiles) {
    const int64_t panel = patch.first_n / OneProductConfig::kBlockWeightRows;
    ptx::add_release(
        conversion.converted_patches + panel * conversion.k_tiles + patch.first_k_tile + lane, 1);
  }
}

struct ConverterWarp {
  PieceRing& ring;       // the warp's buffers in shared memory
  int barrier;           // a named barrier for its lanes
  int* producer_k_tile;  // of its block
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

// Waits, in the producer warp, until a panel is converted at k_tile. Returns how many successive
// k-tiles are converted, from k_tile on: 1 to 32, as each lane asks for one.
__device__ inline int wait_converted(const WeightConversion& conversion, int panel, int k_tile) {
  const int own_k_tile = k_tile + threadIdx.x % 32;
  const unsigned* const converted =
      conversion.converted_patches + static_cast<int64_t>(panel) * conversion.k_tiles + own_k_tile;
  unsigned missing;  // a bit for each lane whose k-tile is not converted
  bool first_is_missing;
  do {
    const bool is_converted = own_k_tile < conversion.k_tiles &&
                              ptx::load_acquire(converted) == ConverterConfig::kPatchRowsPerPanel;
    missing = ~__ballot_sync(0xffffffff, is_converted);
    first_is_missing = (missing & 1) != 0;
  } while (first_is_missing);
  // Orders the TMA loads, which lane 0 issues, after the acquires of all lanes.
  __syncwarp();
  ptx::fence_proxy_async_global();
  if (missing == 0) return 32;
  const int first_missing_lane = lowest_bit(missing);
  return first_missing_lane;
}

// ----- Why no warp waits forever
//
// Let P be the first patch, in the order of PatchOrder, that is not converted yet. Points 1 to 4
// show that P will be converted, then the next patch, and so on until all are. (If no tile reads
// hi, no warp converts the weight, and none waits for it.)
//
//   1. Every cluster's k-tiles before P's deadline, counted over all its tiles, are converted. They
//      need only patches with earlier deadlines, which come before P, because patches are sorted by
//      deadline: the deadline grows with the patch column in a group, and the next group begins at
//      least k_tiles later, because a group has at least one tile of out for each cluster
//      (weight_tiles_at_once is rounded up).
//
//   2. So each producer loads all of its k-tiles before P's deadline. The stage that it waits for
//      becomes empty, because it holds an earlier k-tile: both producers of the cluster load that
//      one, and the consumers multiply it.
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
