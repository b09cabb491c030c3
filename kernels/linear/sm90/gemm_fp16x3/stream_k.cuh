// The stream-K schedule of the fp16x3 GEMM: which tiles each cluster multiplies, and how clusters
// share the tiles of the last wave along K.
//
// K is counted in k-groups of 128. Tiles are computed in waves. In a whole wave, each cluster
// computes one tile, with all its k-groups: cluster c has tile c in the first wave, tile
// c + clusters in the second, and so on. (tile_order.cuh numbers the tiles.) The last wave has the
// remaining tiles, which are fewer than the clusters, or none. If it saves enough time
// (cutting_pays), clusters share these tiles: they are put end to end along K, and the line of all
// their k-groups is cut into one range for each cluster. A range often has the end of one tile and
// the beginning of the next. Otherwise each of these tiles is computed whole, by one cluster.
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
// for two reasons:
//
//   L2         A cluster with parts of two tiles goes from the beginning of K to its end. (Cluster
//              1 multiplies k-groups 0 to 2, then 6 to 8.) So it is often at the same place of K as
//              others (at first as cluster 0, at last as cluster 2), and finds in L2 what they
//              read.
//   no hang    Fact 2 below depends on this order.
//
// Schedule::plan runs on the host (launch.cuh). The kernel gets the Schedule as an argument.
//
// ----- Why no cluster waits forever
//
// The cluster that finishes a shared tile waits in a loop until the others have stored their
// partial sums of the tile. Three facts:
//
//   1. Each cluster that it waits for has a part of the tile, and so stores partial sums
//      (assign_ranges leaves no range empty that begins inside a tile).
//   2. A cluster stores its own partial sums before it waits. It stores the sums of the last
//      tile of its range, which it takes first, and waits in the first tile, which it takes last.
//   3. A cluster waits only for clusters with smaller numbers: their k-groups of the tile come
//      before its own k-groups.
//
// A cluster that waits still occupies its multiprocessors, so there may be no room to start others.
// One of two conditions is enough for all waits to end:
//
//            All clusters run at once               Blocks start in the order of their numbers
//
//   why      Each stores its partial sums           The first cluster that has not ended runs. It
//            without waiting (facts 1 and 2).       waits only for clusters that have ended (fact
//                                                   3), so it ends, and makes room for another one.
//
//   holds    The host launches no more clusters     On every GPU and driver seen. CUDA does not
//            than run at once when previous         guarantee it.
//            kernels have ended
//            (count_gemm_clusters, in
//            launch_gemm.cuh). The next kernel,
//            which may start early (PDL), starts
//            only after all blocks of this one
//            have started.
//
//   fails    For example, if this kernel runs in    Not seen.
//            two streams at the same time, or in
//            a stream that is confined to fewer
//            multiprocessors than were counted
//            (a green context).
//
// To depend on neither condition, set the environment variable KERNELS_STREAM_K to 0. Tiles are
// then never cut, and no cluster waits for another.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/ptx/cluster.cuh"
#include "common/ptx/registers.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// The constants of the schedule, and the cost model behind them. The unit of time is the row time:
// the time in which a cluster multiplies one row of x, over one k-group, by the 256 rows of the
// weight of a tile. It is 12 to 13 ns on an H200. The model was fitted to the measured times of 253
// products (docs/EXPERIMENTS.md, "Stream-K at `highest`").
struct StreamKConfig {
  // The most clusters in a grid. The chip of compute capability 9.0 has 144 multiprocessors, two
  // for each cluster; an H200 uses 132 of them.
  static constexpr int kMaxClusters = 72;
  // A k-group of a tile takes as many row times as the tile has rows, and this many more.
  static constexpr int kKGroupOverhead = 80;
  // Adding the partial sums that one cluster has stored takes this many row times for each row.
  static constexpr int kAddingPerRow = 2;

  // Limits of cutting, in k-groups, because storing and adding partial sums costs time. Tiles are
  // cut only if that saves kMinSaving or more. Each part of a cut tile has kMinPart or more.
  static constexpr int kMinSaving = 3;
  static constexpr int kMinPart = 2;

  // The time of one k-group of a tile, in row times.
  static int64_t k_group_time(int64_t rows) { return rows + kKGroupOverhead; }

  // The fewest k-groups that a range should have if clusters share a tile of `rows` rows and
  // `k_groups` k-groups.
  //
  // With ranges of L k-groups, k_groups / L clusters share the tile. The time of the tile is
  //
  //   L * k_group_time(rows)                   each multiplies its range, all at the same time
  //   + k_groups / L * kAddingPerRow * rows    then one of them adds all partial sums
  //
  // A sum of one term proportional to L and one to 1 / L is least where the two are equal. This
  // function returns that L, rounded down, but at least kMinPart.
  static int min_range(int k_groups, int64_t rows) {
    const double adding_in_k_groups =
        static_cast<double>(kAddingPerRow * rows) / static_cast<double>(k_group_time(rows));
    return std::max(static_cast<int>(std::sqrt(k_groups * adding_in_k_groups)), kMinPart);
  }
};

// Returns false if the environment has KERNELS_STREAM_K=0. The variable is read once.
inline bool is_cutting_allowed() {
  static const bool is_allowed = [] {
    const char* const setting = std::getenv("KERNELS_STREAM_K");
    return setting == nullptr || std::strcmp(setting, "0") != 0;
  }();
  return is_allowed;
}

// One cluster's unit of work: the k-groups begin <= i < end of a tile.
struct WorkTile {
  int tile;  // the tile's number
  int begin;
  int end;

  // False for the work tile that follows the cluster's last one.
  __device__ bool exists() const { return begin < end; }
  __device__ int k_groups() const { return end - begin; }
};

// Which work tiles each cluster computes, and in which order.
struct Schedule {
  int whole_waves;
  int k_groups;  // k-groups of one tile
  // Cluster c has the range range_begins[c] <= i < range_begins[c + 1] of the last wave's line of
  // k-groups.
  int range_begins[StreamKConfig::kMaxClusters + 1];

  // ----- host

  // Plans `tiles` tiles of `k_groups_of_tile` k-groups for `clusters` clusters. row_count(tile) is
  // the number of rows of x of the tile with this number, at most max_rows. Returns the size of the
  // grid, in clusters. Clusters behind the last one that has work are left out.
  template <typename RowCount>
  int plan(int tiles, int k_groups_of_tile, int clusters, int64_t max_rows,
           const RowCount& row_count) {
    whole_waves = tiles / clusters;
    k_groups = k_groups_of_tile;
    const Loads loads = count_loads(tiles, clusters, row_count);  // how much work the clusters have
    if (is_cutting_allowed() && cutting_pays(loads, clusters, max_rows)) {
      assign_ranges(loads, tiles, clusters, max_rows, row_count);
    } else {
      assign_uncut_tiles(tiles, clusters);
    }
    if (whole_waves > 0) return clusters;
    // Without a whole wave, only the clusters whose ranges begin before the line's end have work.
    const int end_of_line = range_begins[clusters];
    const int* const first_without_work =
        std::lower_bound(range_begins, range_begins + clusters, end_of_line);
    return static_cast<int>(first_without_work - range_begins);
  }

  // ----- device

  // Returns this cluster's work tile number `index`. The cluster asks for 0, 1, 2 and so on, until
  // one does not exist.
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
    //   index   tile of the last wave   begin                 end
    //     1     1, from 9 on            max(6 - 9, 0) = 0     min(12 - 9, 9) = 3
    //     2     0, from 0 on            max(6 - 0, 0) = 6     min(12 - 0, 9) = 9
    const int last_tile_of_range = (range_end - 1) / k_groups;
    const int tile_of_last_wave = last_tile_of_range - (index - whole_waves);
    const int tile_begin = tile_of_last_wave * k_groups;  // its place in the line of k-groups
    const bool is_before_range = tile_begin + k_groups <= range_begin;
    if (is_before_range) return {};
    return {whole_waves * clusters + tile_of_last_wave, max(range_begin - tile_begin, 0),
            min(range_end - tile_begin, k_groups)};
  }

  // Returns work_tile(index) so that the compiler sees that it is uniform. All lanes of a warp call
  // it.
  __device__ WorkTile uniform_work_tile(int index) const {
    const WorkTile work = work_tile(index);
    return {ptx::uniform(work.tile), ptx::uniform(work.begin), ptx::uniform(work.end)};
  }

  // Returns whether a work tile has the last k-group of its tile. Its cluster finishes the tile.
  __device__ bool has_last_k_group(const WorkTile& work) const { return work.end == k_groups; }

  // Returns whether `cluster` shares a tile of the last wave with the cluster before it: whether
  // its range begins after the tile's beginning. The cluster that finishes the tile finds all
  // clusters that share it: it asks for itself, then for the cluster before, and so on until the
  // answer is no. For tile 3 in the example above, the answer is yes for cluster 1, whose range
  // begins at 6, and no for cluster 0.
  __device__ bool shares_with_previous(int cluster, int tile) const {
    const int clusters = gridDim.x / BlockConfig::kClusterSize;
    return range_begins[cluster] > (tile - whole_waves * clusters) * k_groups;
  }

 private:
  // ----- host: where the last wave's line is cut
  //
  // Two units occur below. Loads and quotas are in row times (StreamKConfig): the load of a work
  // tile is its rows of x times its k-groups. (This leaves out kKGroupOverhead, which matters
  // little, as tiles of one product have nearly the same rows.) Places in the line, cuts and ranges
  // are in k-groups. Only find_cut converts loads to k-groups.

  struct Loads {
    // The load of each cluster in the whole waves.
    int64_t in_whole_waves[StreamKConfig::kMaxClusters] = {};
    // The load of the busiest cluster if the tiles of the last wave are not cut.
    int64_t busiest_uncut = 0;
    // The sum of all loads, with the last wave.
    int64_t total = 0;
  };

  template <typename RowCount>
  Loads count_loads(int tiles, int clusters, const RowCount& row_count) const {
    Loads loads;
    for (int tile = 0; tile < tiles; ++tile) {
      int64_t& cluster_load = loads.in_whole_waves[tile % clusters];
      const int64_t load = int64_t{row_count(tile)} * k_groups;
      loads.total += load;
      loads.busiest_uncut = std::max(loads.busiest_uncut, cluster_load + load);
      const bool is_in_last_wave = tile >= whole_waves * clusters;
      if (!is_in_last_wave) cluster_load += load;
    }
    return loads;
  }

  // Returns whether the tiles of the last wave should be cut. If all clusters have the same load,
  // each has total / clusters, and the busiest cluster saves busiest_uncut - total / clusters. This
  // must be at least the load of kMinSaving k-groups of the tile with the most rows. (Both are
  // multiplied by `clusters` here, so that they are whole numbers.)
  bool cutting_pays(const Loads& loads, int clusters, int64_t max_rows) const {
    const int64_t saved_load_times_clusters = loads.busiest_uncut * clusters - loads.total;
    return saved_load_times_clusters >= StreamKConfig::kMinSaving * max_rows * clusters;
  }

  // The ranges if tiles are not cut: one tile of the last wave for each cluster, as long as there
  // are tiles.
  void assign_uncut_tiles(int tiles, int clusters) {
    const int tiles_of_last_wave = tiles - whole_waves * clusters;
    for (int cluster = 0; cluster <= clusters; ++cluster) {
      range_begins[cluster] = std::min(cluster, tiles_of_last_wave) * k_groups;
    }
  }

  // The ranges if tiles are cut, such that all clusters have about the same load. A cluster's quota
  // is its share of the last wave's load: a fair load, less what the cluster has in whole waves,
  // but at least the load of min_range k-groups. The quotas are put end to end along the line, and
  // find_cut moves the ends to places where tiles may be cut.
  //
  // In the example above, with tiles of 176 rows, the total load is 5 * 9 * 176 = 7920 and a fair
  // load 7920 / 3 = 2640. Each cluster has 9 * 176 = 1584 in the whole wave, so its quota is 1056.
  // The quotas end at 1056, 2112 and 3168, and the ranges after 6, 12 and 18 k-groups.
  //
  // Invariant: a range that begins inside a tile is not empty, so no cluster waits for partial sums
  // that nobody stores. It holds because every quota is at least the load of kMinPart k-groups of
  // the tile with the most rows. So two cuts inside one tile are at least kMinPart k-groups apart.
  // (tests/linear/test_linear_schedule.py tests the invariant.)
  template <typename RowCount>
  void assign_ranges(const Loads& loads, int tiles, int clusters, int64_t max_rows,
                     const RowCount& row_count) {
    const Line line = make_line(tiles, clusters, row_count);
    const int64_t fair_load = loads.total / clusters;
    const int64_t min_quota = StreamKConfig::min_range(k_groups, max_rows) * max_rows;
    int64_t load_of_quotas = 0;  // of this cluster and of those before it
    range_begins[0] = 0;
    for (int cluster = 0; cluster < clusters; ++cluster) {
      load_of_quotas += std::max(fair_load - loads.in_whole_waves[cluster], min_quota);
      range_begins[cluster + 1] = find_cut(line, load_of_quotas);
    }
    // The last range ends with the line, even if the sum of the quotas, which are rounded, is less.
    range_begins[clusters] = line.tiles * k_groups;
  }

  // The tiles of the last wave, put end to end.
  struct Line {
    int tiles = 0;
    int64_t rows[StreamKConfig::kMaxClusters] = {};  // of each tile
    // The load of the tiles before each tile, and then the load of all.
    int64_t load_before[StreamKConfig::kMaxClusters + 1] = {};
  };

  template <typename RowCount>
  Line make_line(int tiles, int clusters, const RowCount& row_count) const {
    const int first_tile = whole_waves * clusters;
    Line line;
    line.tiles = tiles - first_tile;
    for (int i = 0; i < line.tiles; ++i) {
      line.rows[i] = row_count(first_tile + i);
      line.load_before[i + 1] = line.load_before[i] + line.rows[i] * k_groups;
    }
    return line;
  }

  // Returns after how many k-groups the line is cut if quotas end at this load. The cut is at the
  // nearest k-group, or at an end of the tile if that end is fewer than kMinPart k-groups away.
  // With the tiles 3 and 4 of the example, each with a load of 9 * 176 = 1584:
  //
  //   quotas end at       in the tile   after k-groups   the tile is cut after   the line after
  //
  //   2112 = 12.0 * 176   4             3.0              3                       12
  //   2200 = 12.5 * 176   4             3.5              4, rounded              13
  //   1760 = 10.0 * 176   4             1.0              0, as 1 < kMinPart      9, uncut
  //   1408 =  8.0 * 176   3             8.0              9, as 1 < kMinPart      9, uncut
  int find_cut(const Line& line, int64_t load_of_quotas) const {
    const int64_t* const next_tile =
        std::upper_bound(line.load_before, line.load_before + line.tiles + 1, load_of_quotas);
    const int tile = static_cast<int>(next_tile - line.load_before) - 1;
    const bool is_past_line = tile == line.tiles;
    if (is_past_line) return line.tiles * k_groups;
    const int64_t load_in_tile = load_of_quotas - line.load_before[tile];
    const int64_t rows = line.rows[tile];
    const int64_t nearest_k_group = (load_in_tile + rows / 2) / rows;
    int cut_in_tile = static_cast<int>(nearest_k_group);
    if (nearest_k_group < StreamKConfig::kMinPart) cut_in_tile = 0;
    if (nearest_k_group > k_groups - StreamKConfig::kMinPart) cut_in_tile = k_groups;
    return tile * k_groups + cut_in_tile;
  }
};

}  // namespace kernels::sm90::gemm_fp16x3
