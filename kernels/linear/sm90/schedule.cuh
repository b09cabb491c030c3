// stream-K: which tiles of the result each cluster multiplies, and how clusters share the tiles of
// the last round along K.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/ptx/cluster.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90 {

// Clusters make whole tiles in rounds. The remaining tiles, too few for a round, are put end to end
// along K, and each cluster makes a share of them: the end of a tile and the beginning of the next,
// as a rule. The cluster with a cut tile's last steps adds the partial sums that the others store
// in memory. So all clusters end at about the same time, and a result of few tiles has work for
// all: x [128, 8192], weight [4096, 8192] takes a third of the time on an H200.
struct Schedule {
  static constexpr int kMostClusters = 72;
  // Partial sums in memory cost as much as some steps. So tiles are cut where that saves kWorth of
  // them, into shares of kLeast or more, and not nearer to a tile's ends than kSliver.
  static constexpr int kWorth = 3, kLeast = 2, kSliver = 2;
  // A step takes the time of its rows and kOverhead more, 13 ns a row on an H200. One cluster adds
  // a tile's partial sums, which takes as long as kAdding steps for each row of each.
  static constexpr int kOverhead = 80, kAdding = 2;

  // The steps of a share, so that adding a tile's partial sums takes as long as a share.
  static int least_share(int steps, int64_t rows) {
    const double added = static_cast<double>(kAdding * rows) / (rows + kOverhead);
    return std::max(static_cast<int>(std::sqrt(steps * added)), kLeast);
  }

  int rounds;                    // of whole tiles
  int steps;                     // along K, in a tile: of 128, four stages
  int begin[kMostClusters + 1];  // of each cluster's share, in steps since the first tile of all

  // Plans `tiles` tiles of rows_of(tile) rows of x, `most_rows` at most. Returns how many clusters
  // have work.
  template <typename RowsOf>
  int plan(int tiles, int steps_of_tile, int clusters, int64_t most_rows, const RowsOf& rows_of) {
    rounds = tiles / clusters, steps = steps_of_tile;
    const int first = rounds * clusters;
    // Rows of each cluster's whole tiles, with those of the last round if none is cut, and of all.
    int64_t rows[kMostClusters] = {}, longest = 0, sum = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t height = rows_of(tile), of_cluster = rows[tile % clusters] + height;
      longest = std::max(longest, of_cluster);
      sum += height;
      if (tile < first) rows[tile % clusters] = of_cluster;
    }
    const int64_t least = least_share(steps, most_rows) * most_rows;
    const bool cuts = (longest * clusters - sum) * steps >= kWorth * most_rows * clusters;
    int tile = first, step = 0;
    int64_t due = 0;  // rows times steps
    for (int cluster = 0; cluster < clusters; ++cluster) {
      begin[cluster] = (tile - first) * steps + step;
      if (!cuts) {
        tile = std::min(tile + 1, tiles);
        continue;
      }
      // No share is empty where a tile is cut, as the next cluster would wait for it.
      due += std::max(sum * steps / clusters - rows[cluster] * steps, least);
      while (tile < tiles) {
        const int64_t height = rows_of(tile), rest = steps - step;
        int64_t added = std::min(std::max(due + height / 2, int64_t{0}) / height, rest);
        if (rest - added < kSliver) added = rest;
        if (step == 0 && added < kSliver) break;
        step += static_cast<int>(added), due -= added * height;
        if (step < steps) break;
        step = 0, ++tile;
      }
    }
    begin[clusters] = (tiles - first) * steps;
    if (rounds > 0) return clusters;
    return static_cast<int>(std::lower_bound(begin, begin + clusters, begin[clusters]) - begin);
  }

  // A cluster's work at a time: steps of a tile.
  struct Part {
    int tile, begin, end;

    __device__ bool exists() const { return begin < end; }
  };

  // A share begins with its last tile. All clusters are then at about the same place of K, where L2
  // serves them, and a partial sum is stored before another cluster needs it.
  __device__ Part part(int index) const {
    const int cluster = ptx::clusterid(), clusters = gridDim.x / kClusterSize;
    if (index < rounds) return {cluster + index * clusters, 0, steps};
    const int first = begin[cluster], last = begin[cluster + 1];
    if (first == last) return {};
    const int tile = (last - 1) / steps - (index - rounds), start = tile * steps;
    return {rounds * clusters + tile, max(first - start, 0), min(last - start, steps)};
  }
  // The same, by all lanes of a warp.
  __device__ Part uniform_part(int index) const {
    const Part own = part(index);
    return {ptx::uniform(own.tile), ptx::uniform(own.begin), ptx::uniform(own.end)};
  }

  __device__ bool finishes(const Part& part) const { return part.end == steps; }

  // Whether a cluster's share begins inside this tile of the last round, so that the cluster before
  // it makes some of the tile too.
  __device__ bool is_cut_by(int cluster, int tile) const {
    const int clusters = gridDim.x / kClusterSize;
    return begin[cluster] > (tile - rounds * clusters) * steps;
  }
};

}  // namespace kernels::sm90
