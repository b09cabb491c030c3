// The order in which a GEMM's output tiles are computed, chosen so that tiles that run at the same
// time find their operands in L2.
//
// A GPU computes tiles of neighbouring numbers at about the same time. Numbered row by row, these
// tiles would need one tile of x and many tiles of the weight. Here tiles are numbered in bands of
// eight tiles of x, and column by column inside a band. Tiles that run at the same time then form a
// near-square block of out, and share tiles of x as well as tiles of the weight in L2.
//
// The numbers of 10 x 3 tiles (x_tiles = 10 along M, weight_tiles = 3 along N of out [M, N]):
//
//                 weight tile
//   x tile        0    1    2
//        0        0    8   16
//        1        1    9   17       band 0: x tiles 0 to 7
//       ...      ...  ...  ...
//        7        7   15   23
//        8       24   26   28       band 1: x tiles 8 and 9; the last band may have fewer than 8
//        9       25   27   29

#pragma once

#include <cuda_runtime.h>

namespace kernels {

// The position of a tile: which tile of x and which tile of the weight it multiplies.
struct TilePosition {
  int x_tile;       // number along M
  int weight_tile;  // number along N
};

struct TileOrder {
  static constexpr int kBand = 8;  // tiles of x in a band

  int x_tiles;
  int weight_tiles;

  __host__ __device__ int count() const { return x_tiles * weight_tiles; }

  // The position of the tile of this number, 0 <= number < count().
  __host__ __device__ TilePosition find(int number) const {
    const int band = number / (kBand * weight_tiles);
    const int number_in_band = number - band * (kBand * weight_tiles);
    const int tiles_in_column = min(kBand, x_tiles - band * kBand);
    return {band * kBand + number_in_band % tiles_in_column, number_in_band / tiles_in_column};
  }

  // The position in the order along N, in which x and the weight are exchanged: bands of eight
  // tiles of the weight, numbered row by row inside a band.
  __host__ __device__ TilePosition find_along_n(int number) const {
    const TileOrder along_n{/*x_tiles=*/weight_tiles, /*weight_tiles=*/x_tiles};
    const TilePosition exchanged = along_n.find(number);
    return {/*x_tile=*/exchanged.weight_tile, /*weight_tile=*/exchanged.x_tile};
  }
};

}  // namespace kernels
