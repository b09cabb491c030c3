// The tiles of the fp16x3 GEMM (kernel.cuh): which rows of x each has. choose_tiles.h chooses them.
//
// All tiles of a product have 128 rows, or all have 64, or some have 176 and the others 160. Tiles
// of 176 and of 160 rows are dealt out evenly to the clusters.
//
//   rows of the tiles            largest_x_tiles     other_rows
//   all kRows128                 0                   kRows128
//   all kRows64                  0                   kRows64
//   kLargestRows and kRows160    0 to x_tiles        kRows160
//
// In the last case, the tile of weight decides which of the x_tiles tiles along M are the largest.
// Example: M = 1024, x_tiles = 6 and largest_x_tiles = 4, so that 4 * 176 + 2 * 160 = 1024. X is a
// tile of 176 rows, l one of 160.
//
//                    x tile   0  1  2  3  4  5
//   weight tile 0             X  X  X  X  l  l     shift 0
//   weight tile 1             l  l  X  X  X  X     shift 4
//   weight tile 2             X  X  l  l  X  X     shift 8 % 6 = 2
//   weight tile 3             X  X  X  X  l  l     shift 12 % 6 = 0
//
// The pattern X X X X l l is rotated by weight tile * largest_x_tiles % x_tiles places, the shift.
// Without the rotation, some clusters would get only tiles of 176. With 66 clusters, for instance,
// cluster c computes tiles c, c + 66, c + 132 and so on; all of these are x tile c % 6, as 66 is a
// multiple of 6.

#pragma once

#include <cuda_runtime.h>

#include "linear/sm90/gemm_fp16x3/config.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_fp16x3 {

struct TilePartition {
  TileOrder order;      // numbers the tiles
  int largest_x_tiles;  // how many of the x_tiles tiles along M have kLargestRows rows
  int other_rows;       // rows of the other tiles

  __host__ __device__ int count() const { return order.count(); }
  __host__ __device__ TilePosition find(int number) const { return order.find(number); }

  // Rows of x that TMA loads for every tile. For a tile of 160, the last 16 of 176 come after the
  // tile's own rows, and are not multiplied.
  __host__ __device__ int max_rows() const {
    const bool may_have_largest = other_rows == Fp16x3Config::kRows160;
    return may_have_largest ? Fp16x3Config::kLargestRows : other_rows;
  }

  // Returns how many of the first `places` places of the repeated pattern have a tile of 176. The
  // pattern has pattern_length places, of which the first largest_in_pattern have one.
  __host__ __device__ static constexpr unsigned count_largest(unsigned places,
                                                              unsigned largest_in_pattern,
                                                              unsigned pattern_length) {
    const unsigned largest_in_whole_patterns = places / pattern_length * largest_in_pattern;
    const unsigned rest = places % pattern_length;
    return largest_in_whole_patterns + (rest < largest_in_pattern ? rest : largest_in_pattern);
  }

  struct RowRange {
    int begin;
    int size;
  };

  // The rows of x of a tile. Example, as above: weight tile 2, x tile 4. The shift is 2, so weight
  // tile 2 begins at place 2 of the repeated pattern
  //
  //   place    0  1  2  3  4  5  6  7  8  9 10 11 ...
  //            X  X  X  X  l  l  X  X  X  X  l  l ...
  //   x tile         0  1  2  3  4  5
  //
  // x tile 4 is at place 6, which is place 0 of the pattern: a tile of 176. Of the tiles before it,
  // those at places 2 and 3 have 176. So its rows begin at 4 * 160 + 2 * 16 = 672.
  __host__ __device__ constexpr RowRange rows_of(const TilePosition& tile) const {
    const unsigned pattern_length = order.x_tiles;
    const unsigned largest_in_pattern = largest_x_tiles;
    const unsigned shift = tile.weight_tile * largest_in_pattern % pattern_length;
    const unsigned place = shift + tile.x_tile;
    const unsigned largest_before = count_largest(place, largest_in_pattern, pattern_length) -
                                    count_largest(shift, largest_in_pattern, pattern_length);
    const int begin =
        tile.x_tile * other_rows + largest_before * (Fp16x3Config::kLargestRows - other_rows);
    const bool is_largest = place % pattern_length < largest_in_pattern;
    return {begin, is_largest ? Fp16x3Config::kLargestRows : other_rows};
  }
};
static_assert(TilePartition{TileOrder{/*x_tiles=*/6, /*weight_tiles=*/4}, 4, Fp16x3Config::kRows160}
                      .rows_of(TilePosition{/*x_tile=*/4, /*weight_tile=*/2})
                      .begin == 672,
              "the example of rows_of");

}  // namespace kernels::sm90::gemm_fp16x3
