// Host code that chooses the tiles of the fp16x3 GEMM for M, N and K: how many rows of x each has,
// by an estimate of the time.
//
// Wide tiles load x and the weight least often. But M may leave the last of them mostly empty, and
// few tiles leave clusters idle, or make many of them share a tile along K (stream_k.cuh). Smaller
// tiles are then faster: x [160, 13592], weight [256, 13592] takes 230 us on an H200 as one tile of
// 160 rows that 53 clusters share.
//
// launch.cu calls choose_tiles. All times are in row-groups (StreamKConfig): the time in which a
// cluster multiplies one row of x over one k-group, 13 ns on an H200.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "linear/sm90/gemm_fp16x3_arguments.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/stream_k.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90 {

// The number of tiles along M and N, if tiles have `rows` rows of x.
inline TileOrder tiles_of(int64_t m, int64_t n, int rows) {
  constexpr int kFeatures = GemmFp16x3Config::kWeightRows * BlockConfig::kClusterSize;
  return {blocks_of(m, rows), blocks_of(n, kFeatures)};
}

// The time of `tiles` tiles (fewer than clusters, so not a whole wave) that `clusters` clusters
// share along K, or compute uncut if that is faster.
inline double estimate_last_wave(int tiles, int rows, int k_groups, int clusters) {
  using Config = StreamKConfig;
  const double group_time = Config::group_time(rows);
  // Clusters that share a tile, on average: all clusters take part, but ranges have a minimum.
  const double max_sharers = static_cast<double>(k_groups) / Config::min_range(k_groups, rows);
  const double sharers = std::min(clusters / static_cast<double>(tiles), max_sharers);
  // Partial sums cost the finishing cluster this time, and never less than cutting must save.
  const double adding =
      std::max(Config::kMinSaving * group_time, Config::kAddingPerRow * sharers * rows);
  const double uncut = k_groups * group_time;
  const double shared = k_groups / sharers * group_time + adding;
  return std::min(uncut, shared);
}

// The time of all tiles: whole waves, then the last one.
inline double estimate_time(const TileOrder& tiles, int rows, int k_groups, int clusters) {
  const double group_time = StreamKConfig::group_time(rows);
  const int waves = tiles.count() / clusters;
  const int rest = tiles.count() % clusters;
  const double whole_waves = waves * k_groups * group_time;
  if (rest == 0) return whole_waves;
  return whole_waves + estimate_last_wave(rest, rows, k_groups, clusters);
}

// How many of the tiles along M are wide (176 rows) if the others are narrow (160). As few as cover
// M: with M in units of 16 rows, narrow tiles have 10 and wide ones 11. Example: M = 1024 is 64
// units in 6 tiles, so that 64 - 6 * 10 = 4 are wide. For K below kLongK there are no narrow tiles,
// as the kernels of the shorter promotion intervals do not have them.
inline int count_wide_tiles(int64_t m, int k, int x_tiles) {
  using Config = GemmFp16x3Config;
  constexpr int kUnit = Config::kWideRows - Config::kNarrowRows;
  constexpr int kUnitsOfNarrow = Config::kNarrowRows / kUnit;
  static_assert(Config::kNarrowRows % kUnit == 0, "a narrow tile is whole units");
  if (k < Config::kLongK) return x_tiles;
  return std::clamp(blocks_of(m, kUnit) - x_tiles * kUnitsOfNarrow, 0, x_tiles);
}

// The tiles for x [m, k] and weight [n, k] on a GPU that runs `clusters` clusters at once. Wide
// tiles mixed with narrow ones, unless tiles of 128 or of 64 rows are estimated to take less time.
inline GemmTiles choose_tiles(int64_t m, int64_t n, int k, int clusters) {
  using Config = GemmFp16x3Config;
  const int k_groups = Config::k_groups(k);

  const TileOrder large = tiles_of(m, n, Config::kWideRows);
  const int wide = count_wide_tiles(m, k, large.x_tiles);
  const int mean_rows =
      Config::kNarrowRows + (Config::kWideRows - Config::kNarrowRows) * wide / large.x_tiles;
  GemmTiles best{{large}, wide, Config::kNarrowRows};
  double best_time = estimate_time(large, mean_rows, k_groups, clusters);

  for (const int rows : {Config::kMediumRows, Config::kSmallRows}) {
    const TileOrder tiles = tiles_of(m, n, rows);
    const double time = estimate_time(tiles, rows, k_groups, clusters);
    if (time < best_time) {
      best_time = time;
      best = {{tiles}, 0, rows};
    }
  }
  return best;
}

}  // namespace kernels::sm90
