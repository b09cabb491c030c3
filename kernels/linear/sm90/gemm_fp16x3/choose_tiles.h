// Chooses how many rows of x a tile of the fp16x3 GEMM has, so that the estimated time is shortest
// for M, N and K. Host code.
//
// The largest tiles, of 176 rows, are the most efficient ones, because each k-group has an overhead
// that does not depend on the rows. But if a result has few of them, either some clusters have no
// work, or many clusters share each tile along K, and one of them has to add the partial sums of
// all.
//
// Example: x [160, 13592] times weight [256, 13592], on 66 clusters. One tile of 160 rows has work
// for fewer than 10 clusters, because a cluster's range of K has a minimum length
// (PlanConfig::min_range). Three tiles of 64 rows have work for more than 30, and take less time.
//
// The unit of time is the row time (PlanConfig, plan_schedule.h).

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "linear/sm90/gemm_fp16x3/config.cuh"
#include "linear/sm90/gemm_fp16x3/plan_schedule.h"
#include "linear/sm90/gemm_fp16x3/tiles.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_fp16x3 {

inline TileOrder cover_with_tiles(int64_t m, int64_t n, int rows) {
  return {divide_up_to_int(m, rows), divide_up_to_int(n, Fp16x3Config::kTileWeightRows)};
}

// The estimated time of the last wave, which has `tiles` tiles, fewer than there are clusters. The
// clusters share the tiles along K, unless it takes less time to leave some clusters without work.
inline double estimate_last_wave(int tiles, int rows, int k_groups, int clusters) {
  const double k_group_time = PlanConfig::k_group_time(rows);
  // How many clusters share a tile, on average.
  const double max_sharers = static_cast<double>(k_groups) / PlanConfig::min_range(k_groups, rows);
  const double sharers = std::min(clusters / static_cast<double>(tiles), max_sharers);
  // The time to store and add partial sums, but at least that of kMinSaving k-groups, so that
  // sharing is estimated to be faster only if it saves each cluster at least so many.
  const double adding_time =
      std::max(PlanConfig::kMinSaving * k_group_time, PlanConfig::kAddingPerRow * sharers * rows);
  const double uncut_time = k_groups * k_group_time;
  const double shared_time = k_groups / sharers * k_group_time + adding_time;
  return std::min(uncut_time, shared_time);
}

inline double estimate_time(const TileOrder& tiles, int rows, int k_groups, int clusters) {
  const double k_group_time = PlanConfig::k_group_time(rows);
  const int whole_waves = tiles.count() / clusters;
  const int remaining_tiles = tiles.count() % clusters;
  const double whole_waves_time = whole_waves * k_groups * k_group_time;
  if (remaining_tiles == 0) return whole_waves_time;
  return whole_waves_time + estimate_last_wave(remaining_tiles, rows, k_groups, clusters);
}

// Returns how many of the x_tiles tiles along M have 176 rows if the others have 160: as few as
// cover M. In units of 16 rows, a tile of 160 has 10 and one of 176 has 11. Example: M = 1024 is 64
// units. Six tiles of 160 have 60, so 4 of the 6 have 176. For K below kInterval128FromK all have
// 176, because kernels of shorter intervals have no code for tiles of 160.
inline int count_largest_x_tiles(int64_t m, int k, int x_tiles) {
  constexpr int kUnit = Fp16x3Config::kLargestRows - Fp16x3Config::kRows160;
  constexpr int kUnitsOfRows160 = Fp16x3Config::kRows160 / kUnit;
  static_assert(Fp16x3Config::kRows160 % kUnit == 0, "a tile of 160 rows is whole units");
  if (k < Fp16x3Config::kInterval128FromK) return x_tiles;
  const int needed_units = divide_up_to_int(m, kUnit);
  const int units_if_all_160 = x_tiles * kUnitsOfRows160;
  return std::clamp(needed_units - units_if_all_160, 0, x_tiles);
}

// Chooses the tiles of x [m, k] times weight [n, k], for a GPU on which `clusters` clusters run at
// once.
inline TilePartition choose_tiles(int64_t m, int64_t n, int k, int clusters) {
  const int k_groups = Fp16x3Config::k_groups(k);

  const TileOrder mixed = cover_with_tiles(m, n, Fp16x3Config::kLargestRows);
  const int largest_x_tiles = count_largest_x_tiles(m, k, mixed.x_tiles);
  const int mean_rows =
      Fp16x3Config::kRows160 +
      (Fp16x3Config::kLargestRows - Fp16x3Config::kRows160) * largest_x_tiles / mixed.x_tiles;
  TilePartition best{mixed, largest_x_tiles, /*other_rows=*/Fp16x3Config::kRows160};
  double best_time = estimate_time(mixed, mean_rows, k_groups, clusters);

  for (const int rows : {Fp16x3Config::kRows128, Fp16x3Config::kRows64}) {
    const TileOrder tiles = cover_with_tiles(m, n, rows);
    const double time = estimate_time(tiles, rows, k_groups, clusters);
    if (time < best_time) {
      best_time = time;
      best = {tiles, /*largest_x_tiles=*/0, /*other_rows=*/rows};
    }
  }
  return best;
}

}  // namespace kernels::sm90::gemm_fp16x3
