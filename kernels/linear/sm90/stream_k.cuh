// The stream-K schedule of the fp16x3 GEMM: which tiles, and which part of K of them, each cluster
// multiplies, and how clusters share the tiles of the last wave.
//
// K is divided into k-groups of 128. A tile of out takes all k-groups of K. Tiles are numbered
// (tile_order.cuh). Clusters first compute whole tiles, one each in a wave: cluster c computes
// tiles c, c + clusters, c + 2 * clusters, and so on. The remaining tiles, too few for one more
// wave, would leave clusters idle. So they are put end to end along K, and this row of k-groups is
// cut into one range for each cluster. A range is as a rule the end of one tile and the beginning
// of the next.
//
// A work tile is a tile and a range of its k-groups, assigned to one cluster. The cluster with the
// last k-group of a tile finishes the tile: it adds the partial sums that the other clusters have
// stored in global memory, and computes the epilogue.
//
// Example: 3 clusters, 5 tiles of 9 k-groups. One wave of whole tiles (0, 1, 2) is followed by
// tiles 3 and 4, which are 18 k-groups end to end. Ranges begin at k-groups 0, 6 and 12 of these
// 18:
//
//                 tile 3                      tile 4
//   k-group       0  1  2  3  4  5  6  7  8 | 0  1  2  3  4  5  6  7  8
//   cluster       0  0  0  0  0  0  1  1  1 | 1  1  1  2  2  2  2  2  2
//
//   cluster 0:  tile 0, k-groups 0-8, finishes
//               tile 3, k-groups 0-5, stores partial sums
//   cluster 1:  tile 1, k-groups 0-8, finishes
//               tile 4, k-groups 0-2, stores partial sums
//               tile 3, k-groups 6-8, adds cluster 0's partial sums, finishes
//   cluster 2:  tile 2, k-groups 0-8, finishes
//               tile 4, k-groups 3-8, adds cluster 1's partial sums, finishes
//
// Each cluster multiplies 15 k-groups. Without sharing, two clusters would multiply 18, and one 9.
// x [128, 8192], weight [4096, 8192] takes a third of the time on an H200 with sharing.
//
// A cluster processes its range from the last tile to the first (cluster 1 above: tile 4 before
// tile 3), for two reasons. All clusters are then at about the same place of K, so L2 serves them.
// And a partial sum is stored early, before another cluster needs it; a cluster never stores
// anything after it has waited for another one.
//
// `Schedule::plan` runs on the host (launch.cu); the kernel gets the Schedule as an argument and
// asks it for one work tile after the other.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/ptx/cluster.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90 {

// The cost model of the schedule. Its unit of time is the row-group: the time in which a cluster
// multiplies one row of x over one k-group, with the 256 rows of weight of its tile. That is 13 ns
// on an H200.
struct StreamKConfig {
  // Clusters in a grid, at most: the largest GPU of compute capability 9.0 has 144 multiprocessors.
  static constexpr int kMaxClusters = 72;
  // Each k-group of a tile takes this many row-groups more than the tile has rows.
  static constexpr int kGroupOverhead = 80;
  // The finishing cluster adds partial sums in this many row-groups for each row of x and each
  // cluster that has stored some.
  static constexpr int kAddingPerRow = 2;

  // Partial sums go through global memory, which costs as much as some k-groups. So tiles are cut
  // under three conditions, all in k-groups: where cutting saves kMinSaving or more, into ranges of
  // kMinRange or more, and not nearer to the beginning or end of a tile than kMinPart.
  static constexpr int kMinSaving = 3;
  static constexpr int kMinRange = 2;
  static constexpr int kMinPart = 2;

  // The time of one k-group of a tile, in row-groups.
  static int64_t group_time(int64_t rows) { return rows + kGroupOverhead; }

  // The k-groups that each cluster's range should have at least if several share a tile of `rows`
  // rows and `k_groups` k-groups. With L k-groups a range, k_groups / L clusters share the tile,
  // and adding their partial sums takes kAddingPerRow * rows * k_groups / L. This function returns
  // the L at which adding takes as long as multiplying a range, L * group_time(rows). (More sharers
  // would make adding the longer part.)
  static int min_range(int k_groups, int64_t rows) {
    const double adding_in_groups =
        static_cast<double>(kAddingPerRow * rows) / static_cast<double>(group_time(rows));
    return std::max(static_cast<int>(std::sqrt(k_groups * adding_in_groups)), kMinRange);
  }
};

// One cluster's unit of work: the k-groups begin <= i < end of a tile.
struct WorkTile {
  int tile;
  int begin;
  int end;

  // False for the work tile after the cluster's last one.
  __device__ bool exists() const { return begin < end; }
};

struct Schedule {
  int waves;     // of whole tiles, one for each cluster
  int k_groups;  // of a tile
  // The range of each cluster in the last wave is begin[cluster] <= i < begin[cluster + 1]. The
  // k-groups of all tiles of the last wave are numbered end to end.
  int begin[StreamKConfig::kMaxClusters + 1];

  // ------------------------------------------------------------------------------------------ host

  // Plans `tiles` tiles of `k_groups_of_tile` k-groups on `clusters` clusters. rows_of(tile)
  // returns how many rows of x a tile has, max_rows at most. Returns how many clusters have work:
  // the grid.
  template <typename RowsOf>
  int plan(int tiles, int k_groups_of_tile, int clusters, int64_t max_rows, const RowsOf& rows_of) {
    waves = tiles / clusters;
    k_groups = k_groups_of_tile;
    const Loads loads = count_loads(tiles, clusters, rows_of);
    if (cutting_pays(loads, clusters, max_rows)) {
      assign_ranges(loads, tiles, clusters, max_rows, rows_of);
    } else {
      assign_uncut_tiles(tiles, clusters);
    }
    if (waves > 0) return clusters;
    // Without a whole wave, only the clusters whose ranges begin before the end have work.
    const int all = begin[clusters];
    return static_cast<int>(std::lower_bound(begin, begin + clusters, all) - begin);
  }

  // ---------------------------------------------------------------------------------------- device

  // The cluster's work tile number `index`, in the order in which the cluster processes them.
  __device__ WorkTile work_tile(int index) const {
    const int cluster = ptx::clusterid();
    const int clusters = gridDim.x / BlockConfig::kClusterSize;
    if (index < waves) return {cluster + index * clusters, 0, k_groups};
    const int range_begin = begin[cluster];
    const int range_end = begin[cluster + 1];
    if (range_begin == range_end) return {};
    // Tiles of the last wave are counted from 0 here. The range's last tile comes first. An index
    // past the range's first tile makes tile_begin + k_groups <= range_begin: no work tile.
    const int tile = (range_end - 1) / k_groups - (index - waves);
    const int tile_begin = tile * k_groups;
    return {waves * clusters + tile, max(range_begin - tile_begin, 0),
            min(range_end - tile_begin, k_groups)};
  }

  // The same. All lanes of a warp call it, and the compiler sees that they get the same value.
  __device__ WorkTile uniform_work_tile(int index) const {
    const WorkTile work = work_tile(index);
    return {ptx::uniform(work.tile), ptx::uniform(work.begin), ptx::uniform(work.end)};
  }

  // Whether the cluster with this work tile finishes the tile.
  __device__ bool finishes(const WorkTile& work) const { return work.end == k_groups; }

  // Whether the range of `cluster` begins inside `tile` or later, so that the cluster before it has
  // k-groups of the tile, too. `tile` is a tile of the last wave that the calling cluster finishes,
  // and `cluster` the caller or one before it. (In the example above, for tile 3: true for cluster
  // 1, whose range begins at k-group 6, and false for cluster 0.)
  __device__ bool begins_inside(int cluster, int tile) const {
    const int clusters = gridDim.x / BlockConfig::kClusterSize;
    return begin[cluster] > (tile - waves * clusters) * k_groups;
  }

 private:
  // Rows of x, summed over tiles. (Times k_groups, they are row-groups without the overhead.)
  struct Loads {
    int64_t whole_tiles[StreamKConfig::kMaxClusters] = {};  // each cluster's tiles of whole waves
    int64_t longest = 0;  // the most that one cluster has if no tile is cut
    int64_t sum = 0;      // all tiles
  };

  template <typename RowsOf>
  Loads count_loads(int tiles, int clusters, const RowsOf& rows_of) const {
    Loads loads;
    for (int tile = 0; tile < tiles; ++tile) {
      int64_t& of_cluster = loads.whole_tiles[tile % clusters];
      const int64_t rows = rows_of(tile);
      loads.sum += rows;
      loads.longest = std::max(loads.longest, of_cluster + rows);
      const bool is_in_last_wave = tile >= waves * clusters;
      if (!is_in_last_wave) of_cluster += rows;
    }
    return loads;
  }

  // Whether sharing the last wave's tiles evenly would save the busiest cluster kMinSaving k-groups
  // of the widest tile or more: (longest - sum / clusters) * k_groups >= kMinSaving * max_rows.
  bool cutting_pays(const Loads& loads, int clusters, int64_t max_rows) const {
    const int64_t saved_rows_times_clusters = loads.longest * clusters - loads.sum;
    return saved_rows_times_clusters * k_groups >= StreamKConfig::kMinSaving * max_rows * clusters;
  }

  // Gives one whole tile of the last wave to each cluster, as long as there are tiles.
  void assign_uncut_tiles(int tiles, int clusters) {
    const int tiles_of_last_wave = tiles - waves * clusters;
    for (int cluster = 0; cluster <= clusters; ++cluster) {
      begin[cluster] = std::min(cluster, tiles_of_last_wave) * k_groups;
    }
  }

  // Cuts the last wave into ranges so that all clusters have about the same load. In the example
  // above, with tiles of 176 rows: all tiles are 5 * 176 * 9 row-groups, a fair share is 15 * 176,
  // of which 9 * 176 are the cluster's whole tile. So a range gets a budget of 6 * 176.
  template <typename RowsOf>
  void assign_ranges(const Loads& loads, int tiles, int clusters, int64_t max_rows,
                     const RowsOf& rows_of) {
    const int64_t min_budget = StreamKConfig::min_range(k_groups, max_rows) * max_rows;
    const int64_t fair_load = loads.sum * k_groups / clusters;
    const int first_tile = waves * clusters;
    int tile = first_tile;
    int k_group = 0;  // of the tile: the next one to assign
    // Row-groups that the cluster should get. A range is a whole number of k-groups, so a rest
    // remains, or the budget is overdrawn; the next cluster inherits that.
    int64_t budget = 0;
    for (int cluster = 0; cluster < clusters; ++cluster) {
      begin[cluster] = (tile - first_tile) * k_groups + k_group;
      // Each cluster gets min_budget or more, even if its whole tiles are a fair load already. An
      // empty range inside a tile would be an error: the cluster that finishes the tile would wait
      // for partial sums of a cluster that has none.
      budget += std::max(fair_load - loads.whole_tiles[cluster] * k_groups, min_budget);
      while (tile < tiles) {
        const int64_t rows = rows_of(tile);
        const int64_t added = groups_to_add(budget, rows, k_group);
        if (added == 0) break;
        budget -= added * rows;
        k_group += static_cast<int>(added);
        const bool has_rest = k_group < k_groups;
        if (has_rest) break;
        ++tile;
        k_group = 0;
      }
    }
    begin[clusters] = (tiles - first_tile) * k_groups;
  }

  // How many k-groups of a tile, from k_group on, a budget of row-groups pays for, rounded to the
  // nearest; 0 if the cluster should leave the tile to the next one.
  int64_t groups_to_add(int64_t budget, int64_t rows, int k_group) const {
    const int64_t rest = k_groups - k_group;
    const int64_t paid = std::max(budget + rows / 2, int64_t{0}) / rows;
    int64_t added = std::min(paid, rest);
    const bool leaves_small_part = rest - added < StreamKConfig::kMinPart;
    if (leaves_small_part) added = rest;
    const bool is_small_beginning = k_group == 0 && added < StreamKConfig::kMinPart;
    if (is_small_beginning) added = 0;
    return added;
  }
};

}  // namespace kernels::sm90
