// Plans the stream-K schedule of the fp16x3 GEMM: whether the tiles of the last wave are cut, and
// where. Host code. stream_k.cuh explains the words (wave, line, range, cut), and has the example
// that the comments below use. Three quantities occur:
//
//   load    of a work tile: its rows of x times its k-groups. Clusters get equal loads.
//   time    in row times (PlanConfig). It also counts kKGroupOverhead for each k-group. Loads leave
//           that out, because tiles of one product have nearly the same rows.
//   place   in the last wave's line, in k-groups: where ranges begin and end

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "linear/sm90/gemm_fp16x3/stream_k.cuh"
#include "linear/sm90/gemm_fp16x3/tiles.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// The constants of a plan, and the cost model behind them. The unit of time is the row time: the
// time in which a cluster multiplies one row of x, over one k-group, by the 256 rows of the weight
// of a tile. It is 12 to 13 ns on an H200. The model was fitted to the measured times of 253
// products (docs/EXPERIMENTS.md, "Stream-K at `highest`").
struct PlanConfig {
  // A k-group of a tile takes as many row times as the tile has rows, and this many more.
  static constexpr int kKGroupOverhead = 80;
  // Adding the partial sums that one cluster has stored takes this many row times for each row.
  static constexpr int kAddingPerRow = 2;

  // Limits of cutting, in k-groups: tiles are cut only if that saves kMinSaving or more, and each
  // part of a cut tile has kMinPart or more.
  static constexpr int kMinSaving = 3;
  static constexpr int kMinPart = 2;

  // The time of one k-group of a tile, in row times.
  static int64_t k_group_time(int64_t rows) { return rows + kKGroupOverhead; }

  // The fewest k-groups that a range should have if clusters share a tile of `rows` rows and
  // `k_groups` k-groups. With ranges of L k-groups, the time of the tile is
  //
  //   L * k_group_time(rows)                   each multiplies its range, all at the same time
  //   + k_groups / L * kAddingPerRow * rows    then one of them adds the partial sums of the others
  //
  // This time is least where both terms are equal. The function returns that L, rounded down, but
  // at least kMinPart.
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

// The two schedules of a product between which plan_schedule chooses.
class Planner {
 public:
  // A tile has k_groups k-groups. `clusters` is at most StreamKConfig::kMaxClusters.
  Planner(const TilePartition& tiles, int k_groups, int clusters)
      : k_groups_(k_groups),
        clusters_(clusters),
        max_rows_(tiles.max_rows()),
        whole_waves_(tiles.count() / clusters),
        last_wave_tiles_(tiles.count() % clusters) {
    const auto load_of = [&](int tile) {
      const int64_t rows = tiles.rows_of(tiles.find(tile)).size;
      return rows * k_groups;
    };
    const int first_of_last_wave = whole_waves_ * clusters;
    for (int tile = 0; tile < first_of_last_wave; ++tile) {
      load_in_whole_waves_[tile % clusters] += load_of(tile);
    }
    for (int i = 0; i < last_wave_tiles_; ++i) {
      load_before_[i + 1] = load_before_[i] + load_of(first_of_last_wave + i);
    }
  }

  // Returns whether to cut the tiles of the last wave. With the loads of clusters if no tile is
  // cut, this pays if
  //
  //   busiest load - mean load  >=  kMinSaving * max_rows
  //
  // (Both sides are multiplied by `clusters` here, so that they are whole numbers.)
  bool cutting_pays() const {
    int64_t busiest_load = 0;  // if no tile is cut
    for (int cluster = 0; cluster < clusters_; ++cluster) {
      int64_t load = load_in_whole_waves_[cluster];
      if (cluster < last_wave_tiles_) load += load_before_[cluster + 1] - load_before_[cluster];
      busiest_load = std::max(busiest_load, load);
    }
    const int64_t saved_load_times_clusters = busiest_load * clusters_ - total_load();
    return saved_load_times_clusters >= PlanConfig::kMinSaving * max_rows_ * clusters_;
  }

  // Returns the schedule in which no tile is cut.
  Schedule uncut() const {
    Schedule schedule{whole_waves_, k_groups_, /*range_begins=*/{}};
    for (int cluster = 0; cluster <= clusters_; ++cluster) {
      schedule.range_begins[cluster] = std::min(cluster, last_wave_tiles_) * k_groups_;
    }
    return schedule;
  }

  // Returns the schedule in which the tiles of the last wave are cut, such that all clusters have
  // about the same load. A cluster's quota is its share of the last wave's load: a fair load, less
  // what the cluster has in whole waves, but at least the load of min_range k-groups. The quotas
  // are put end to end along the line, and find_cut moves the ends to places where tiles may be
  // cut.
  //
  // In the example, with tiles of 176 rows, the total load is 5 * 9 * 176 = 7920 and a fair load
  // 7920 / 3 = 2640. Each cluster has 9 * 176 = 1584 in the whole wave, so its quota is 1056. The
  // quotas end at 1056, 2112 and 3168, and the ranges after 6, 12 and 18 k-groups.
  //
  // Invariant: a range that begins inside a tile is not empty, so no cluster waits for partial sums
  // that nobody stores. This holds because min_range is at least kMinPart: every quota is at least
  // the load of kMinPart k-groups of the tile with the most rows, so that two cuts inside one tile
  // are at least kMinPart k-groups apart. (tests/linear/test_linear_schedule.py tests it.)
  Schedule cut() const {
    const int64_t fair_load = total_load() / clusters_;
    const int64_t min_quota = PlanConfig::min_range(k_groups_, max_rows_) * max_rows_;
    Schedule schedule{whole_waves_, k_groups_, /*range_begins=*/{}};
    int64_t load_of_quotas = 0;  // of this cluster and of those before it
    for (int cluster = 0; cluster < clusters_; ++cluster) {
      load_of_quotas += std::max(fair_load - load_in_whole_waves_[cluster], min_quota);
      schedule.range_begins[cluster + 1] = find_cut(load_of_quotas);
    }
    // The sum of the quotas, which are rounded, may be less than the line.
    schedule.range_begins[clusters_] = last_wave_tiles_ * k_groups_;
    return schedule;
  }

 private:
  int64_t total_load() const {
    return std::accumulate(load_in_whole_waves_, load_in_whole_waves_ + clusters_,
                           load_before_[last_wave_tiles_]);
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
  int find_cut(int64_t load_of_quotas) const {
    const bool is_past_line = load_of_quotas >= load_before_[last_wave_tiles_];
    if (is_past_line) return last_wave_tiles_ * k_groups_;
    const int64_t* const next_tile =
        std::upper_bound(load_before_, load_before_ + last_wave_tiles_, load_of_quotas);
    const int tile = static_cast<int>(next_tile - load_before_) - 1;
    const int64_t load_in_tile = load_of_quotas - load_before_[tile];
    const int64_t rows = (load_before_[tile + 1] - load_before_[tile]) / k_groups_;
    const int64_t nearest_k_group = (load_in_tile + rows / 2) / rows;
    int cut_in_tile = static_cast<int>(nearest_k_group);
    if (nearest_k_group < PlanConfig::kMinPart) cut_in_tile = 0;
    if (nearest_k_group > k_groups_ - PlanConfig::kMinPart) cut_in_tile = k_groups_;
    return tile * k_groups_ + cut_in_tile;
  }

  int k_groups_;  // of one tile
  int clusters_;
  int64_t max_rows_;  // no tile has more
  int whole_waves_;
  int last_wave_tiles_;
  // The load of each cluster in the whole waves.
  int64_t load_in_whole_waves_[StreamKConfig::kMaxClusters] = {};
  // The load of the last wave's line before each of its tiles, and at last the load of all.
  int64_t load_before_[StreamKConfig::kMaxClusters + 1] = {};
};

// A schedule, and the number of clusters up to the last one that has work: the size of the grid.
struct Plan {
  Schedule schedule;
  int clusters;
};

// Plans `tiles`, each of k_groups k-groups, for a GPU on which `clusters` clusters run at once.
inline Plan plan_schedule(const TilePartition& tiles, int k_groups, int clusters) {
  const Planner planner(tiles, k_groups, clusters);
  const bool is_cut = is_cutting_allowed() && planner.cutting_pays();
  Plan plan{is_cut ? planner.cut() : planner.uncut(), clusters};
  if (plan.schedule.whole_waves > 0) return plan;
  const int* const begins = plan.schedule.range_begins;
  const int end_of_line = begins[clusters];
  plan.clusters =
      static_cast<int>(std::lower_bound(begins, begins + clusters, end_of_line) - begins);
  return plan;
}

}  // namespace kernels::sm90::gemm_fp16x3
