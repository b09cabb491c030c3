// The order in which the tiles of a result are made.

#pragma once

#include <cuda_runtime.h>

namespace kernels {

struct Tile {
  int x, weight;
};

// Groups of tiles of x, and in a group one tile of the weight after the other: tiles that are made
// at once share both operands in L2.
struct TileOrder {
  static constexpr int kGroup = 8;
  int x_tiles, weight_tiles;

  __host__ __device__ int count() const { return x_tiles * weight_tiles; }
  __host__ __device__ Tile find(int index) const {
    const int group = index / (kGroup * weight_tiles);
    const int rest = index - group * (kGroup * weight_tiles);
    const int size = min(kGroup, x_tiles - group * kGroup);
    return {group * kGroup + rest % size, rest / size};
  }
};

}  // namespace kernels
