// The order in which the tiles of a result are made.

#pragma once

#include <cuda_runtime.h>

namespace kernels {

struct Tile {
  int x, weight;
};

// Bands of eight tiles of x: tiles that are made at once share both operands in L2.
struct TileOrder {
  static constexpr int kBand = 8;
  int x_tiles, weight_tiles;

  __host__ __device__ int count() const { return x_tiles * weight_tiles; }
  __host__ __device__ Tile find(int index) const {
    const int band = index / (kBand * weight_tiles);
    const int rest = index - band * (kBand * weight_tiles);
    const int size = min(kBand, x_tiles - band * kBand);
    return {band * kBand + rest % size, rest / size};
  }
};

}  // namespace kernels
