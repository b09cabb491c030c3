// The stream-K schedule of the fp16x3 GEMM: which tiles each cluster multiplies, and how clusters
// share the tiles of the last wave along K.
//
// K is counted in k-groups of 128. In a whole wave, each cluster computes one tile, with all its
// k-groups: cluster c has tile c in the first wave, tile c + clusters in the second, and so on
// (tile_order.cuh numbers the tiles). The last wave has the remaining tiles, which are fewer than
// the clusters. If it saves enough time, clusters share these tiles: they are put end to end along
// K, and the line of all their k-groups is cut into one range for each cluster. A range often has
// the end of one tile and the beginning of the next. Otherwise each of these tiles is computed
// whole, by one cluster.
//
// A work tile is a tile and a range of its k-groups, assigned to one cluster. The cluster that has
// the last k-group of a tile finishes the tile: it adds the partial sums that the other clusters
// have stored in global memory, and computes the epilogue.
//
// Example: 3 clusters, 5 tiles of 9 k-groups. The first wave is tiles 0, 1 and 2. The last wave is
// tiles 3 and 4, which are a line of 18 k-groups. The clusters' ranges begin at 0, 6 and 12:
//
//                 tile 3                    | tile 4
//   k-group       0  1  2  3  4  5  6  7  8 | 0  1  2  3  4  5  6  7  8
//   cluster       0  0  0  0  0  0  1  1  1 | 1  1  1  2  2  2  2  2  2
//
//   cluster 0     tile 0, k-groups 0 to 8    finishes
//                 tile 3, k-groups 0 to 5    stores partial sums
//
//   cluster 1     tile 1, k-groups 0 to 8    finishes
//                 tile 4, k-groups 0 to 2    stores partial sums
//                 tile 3, k-groups 6 to 8    adds the partial sums of cluster 0, finishes
//
//   cluster 2     tile 2, k-groups 0 to 8    finishes
//                 tile 4, k-groups 3 to 8    adds the partial sums of cluster 1, finishes
//
// Each cluster multiplies 15 k-groups. If tiles were not shared, two clusters would multiply 18
// each, and one 9.
//
// A cluster takes the tiles of its range in reverse order (cluster 1 above: tile 4 before tile 3),
// for two reasons. First, the cluster then begins at the beginning of K, as others do, and so often
// finds in L2 what others have just read: cluster 1 multiplies k-groups 0 to 2, then 6 to 8.
// Second, fact 2 below depends on this order.
//
// ----- Why no cluster waits forever
//
// The cluster that finishes a shared tile waits in a loop until the others have stored their
// partial sums of the tile. Three facts:
//
//   1. Each cluster that it waits for has a part of the tile, and so stores partial sums
//      (Planner::cut leaves no range empty that begins inside a tile).
//   2. A cluster stores its own partial sums before it waits. It stores the sums of the last
//      tile of its range, which it takes first, and waits in the first tile, which it takes last.
//   3. A cluster waits only for clusters with smaller numbers: their k-groups of the tile come
//      before its own k-groups.
//
// A cluster that waits still occupies its multiprocessors, so there may be no room to start others.
// One of two conditions is enough for all waits to end:
//
//   All clusters run at once. Then each stores its partial sums without waiting (facts 1 and 2).
//   The host launches no more clusters than run at once when previous kernels have ended
//   (count_gemm_clusters). The next kernel, which may start early (PDL), starts only after all
//   blocks of this one have started. The condition fails, for example, if this kernel runs in two
//   streams at the same time, or in a stream that is confined to fewer multiprocessors than were
//   counted (a green context).
//
//   Blocks start in the order of their numbers. Then the first cluster that has not ended runs, and
//   waits only for clusters that have ended (fact 3), so it ends, and makes room for another one.
//   The condition holds on every GPU and driver seen, but CUDA does not guarantee it.
//
// With the environment variable KERNELS_STREAM_K=0, tiles are never cut, and no cluster waits.

#pragma once

#include "common/ptx/cluster.cuh"
#include "common/ptx/registers.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_fp16x3 {

struct StreamKConfig {
  // The most clusters in a grid. The chip of compute capability 9.0 has 144 multiprocessors, two
  // for each cluster; an H200 uses 132 of them.
  static constexpr int kMaxClusters = 72;
};

// One cluster's unit of work: the k-groups begin <= i < end of a tile.
struct WorkTile {
  int tile;  // the tile's number
  int begin;
  int end;

  // False for the work tile that follows the cluster's last one.
  __device__ bool exists() const { return begin < end; }
  __device__ int k_groups() const { return end - begin; }
};

// Which work tiles each cluster computes, and in which order. plan_schedule.h plans it.
struct Schedule {
  int whole_waves;
  int k_groups;  // k-groups of one tile
  // Cluster c has the range range_begins[c] <= i < range_begins[c + 1] of the last wave's line of
  // k-groups.
  int range_begins[StreamKConfig::kMaxClusters + 1];

  // Returns this cluster's work tile number `index`: 0, 1, 2 and so on, until one does not exist.
  __device__ WorkTile work_tile(int index) const {
    const int cluster = ptx::clusterid();
    const int clusters = gridDim.x / BlockConfig::kClusterSize;
    if (index < whole_waves) return {cluster + index * clusters, 0, k_groups};
    const int range_begin = range_begins[cluster];
    const int range_end = range_begins[cluster + 1];
    if (range_begin == range_end) return {};
    // The next indices are the tiles of the range, from the last one to the first. Cluster 1 of the
    // example has the range 6 to 12, in tiles of 9 k-groups:
    //
    //   index   tile of the last wave   begin_in_tile         end_in_tile
    //     1     1, from 9 on            max(6 - 9, 0) = 0     min(12 - 9, 9) = 3
    //     2     0, from 0 on            max(6 - 0, 0) = 6     min(12 - 0, 9) = 9
    const int last_tile_of_range = (range_end - 1) / k_groups;
    const int tile_of_last_wave = last_tile_of_range - (index - whole_waves);
    const int tile_begin = tile_of_last_wave * k_groups;  // its place in the line of k-groups
    const bool is_before_range = tile_begin + k_groups <= range_begin;
    if (is_before_range) return {};
    const int tile = whole_waves * clusters + tile_of_last_wave;
    const int begin_in_tile = max(range_begin - tile_begin, 0);
    const int end_in_tile = min(range_end - tile_begin, k_groups);
    return {tile, begin_in_tile, end_in_tile};
  }

  // Returns work_tile(index), which the compiler then sees as uniform. All lanes of a warp call it.
  __device__ WorkTile uniform_work_tile(int index) const {
    const WorkTile work = work_tile(index);
    return {ptx::uniform(work.tile), ptx::uniform(work.begin), ptx::uniform(work.end)};
  }

  // Returns whether the work tile's cluster finishes the tile.
  __device__ bool has_last_k_group(const WorkTile& work) const { return work.end == k_groups; }

  // Returns whether `cluster` shares `tile`, which is in the last wave, with the cluster before it.
  // The cluster that finishes the tile asks for itself, then for the cluster before, and so on
  // until the answer is no. For tile 3 in the example above, the answer is yes for cluster 1, whose
  // range begins at 6, and no for cluster 0.
  __device__ bool shares_with_previous(int cluster, int tile) const {
    const int clusters = gridDim.x / BlockConfig::kClusterSize;
    const int range_begin = range_begins[cluster];
    const int tile_begin = (tile - whole_waves * clusters) * k_groups;
    return range_begin > tile_begin;
  }
};

}  // namespace kernels::sm90::gemm_fp16x3
