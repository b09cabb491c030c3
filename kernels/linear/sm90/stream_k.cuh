// stream-K: which tiles each cluster multiplies, and how clusters share those of the last wave.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/ptx/cluster.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90 {

// Clusters make whole tiles in waves. The remaining tiles, too few for a wave, are put end to end
// along K, in rounds of 128, and each cluster makes a range of these: as a rule the end of a tile
// and the beginning of the next. The cluster with a cut tile's last rounds adds the partial sums of
// the others: x [128, 8192], weight [4096, 8192] takes a third of the time on an H200.
struct Schedule {
  static constexpr int kMostClusters = 72;
  // Partial sums in memory cost as much as some rounds. So tiles are cut where that saves kWorth
  // of them, into ranges of kLeast or more, and not nearer to a tile's ends than kSliver.
  static constexpr int kWorth = 3, kLeast = 2, kSliver = 2;
  // A round takes the time of its rows and kOverhead more, 13 ns a row on an H200. One cluster adds
  // a tile's partial sums, which takes as long as kAdding rounds for each row of each.
  static constexpr int kOverhead = 80, kAdding = 2;

  // The rounds of a range, so that adding a tile's partial sums takes as long as a range.
  static int least_range(int rounds, int64_t rows) {
    const double added = static_cast<double>(kAdding * rows) / (rows + kOverhead);
    return std::max(static_cast<int>(std::sqrt(rounds * added)), kLeast);
  }

  int waves;                     // of whole tiles
  int rounds;                    // of a tile
  int begin[kMostClusters + 1];  // of each cluster's range, in rounds of the last wave

  // Plans tiles of rows_of(tile) rows of x, `most_rows` at most. Returns how many clusters work.
  template <typename RowsOf>
  int plan(int tiles, int rounds_of_tile, int clusters, int64_t most_rows, const RowsOf& rows_of) {
    waves = tiles / clusters, rounds = rounds_of_tile;
    const int first = waves * clusters;
    // Rows of each cluster's whole tiles, with those of the last wave if none is cut, and of all.
    int64_t rows[kMostClusters] = {}, longest = 0, sum = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t height = rows_of(tile), of_cluster = rows[tile % clusters] + height;
      longest = std::max(longest, of_cluster);
      sum += height;
      if (tile < first) rows[tile % clusters] = of_cluster;
    }
    const int64_t least = least_range(rounds, most_rows) * most_rows;
    const bool cuts = (longest * clusters - sum) * rounds >= kWorth * most_rows * clusters;
    int tile = first, round = 0;
    int64_t due = 0;  // rows times rounds
    for (int cluster = 0; cluster < clusters; ++cluster) {
      begin[cluster] = (tile - first) * rounds + round;
      if (!cuts) {
        tile = std::min(tile + 1, tiles);
        continue;
      }
      // No range is empty where a tile is cut, as the next cluster would wait for it.
      due += std::max(sum * rounds / clusters - rows[cluster] * rounds, least);
      while (tile < tiles) {
        const int64_t height = rows_of(tile), rest = rounds - round;
        int64_t added = std::min(std::max(due + height / 2, int64_t{0}) / height, rest);
        if (rest - added < kSliver) added = rest;
        if (round == 0 && added < kSliver) break;
        round += static_cast<int>(added), due -= added * height;
        if (round < rounds) break;
        round = 0, ++tile;
      }
    }
    begin[clusters] = (tiles - first) * rounds;
    if (waves > 0) return clusters;
    return static_cast<int>(std::lower_bound(begin, begin + clusters, begin[clusters]) - begin);
  }

  // A cluster makes one of these at a time: rounds of a tile.
  struct WorkItem {
    int tile, begin, end;

    __device__ bool exists() const { return begin < end; }
  };

  // A range begins with its last tile. All clusters are then at about the same place of K, where L2
  // serves them, and a partial sum is stored before another cluster needs it.
  __device__ WorkItem item(int index) const {
    const int cluster = ptx::clusterid(), clusters = gridDim.x / kClusterSize;
    if (index < waves) return {cluster + index * clusters, 0, rounds};
    const int first = begin[cluster], last = begin[cluster + 1];
    if (first == last) return {};
    const int tile = (last - 1) / rounds - (index - waves), start = tile * rounds;
    return {waves * clusters + tile, max(first - start, 0), min(last - start, rounds)};
  }
  // The same, by all lanes of a warp.
  __device__ WorkItem uniform_item(int index) const {
    const WorkItem own = item(index);
    return {ptx::uniform(own.tile), ptx::uniform(own.begin), ptx::uniform(own.end)};
  }

  __device__ bool finishes(const WorkItem& item) const { return item.end == rounds; }

  // Whether the cluster before this one makes some of the tile too.
  __device__ bool is_cut_by(int cluster, int tile) const {
    const int clusters = gridDim.x / kClusterSize;
    return begin[cluster] > (tile - waves * clusters) * rounds;
  }
};

}  // namespace kernels::sm90
