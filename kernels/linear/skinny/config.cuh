// The constants and the arguments of skinny_kernel (skinny.cu).

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/cluster.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels::skinny {

// docs/EXPERIMENTS.md, "Few rows", has the times of other values of kWarpColumns, kKStepsPerKTile
// and kTileEndTime.
struct SkinnyConfig {
  static constexpr int kWarps = 8;  // in a block
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpColumns = 4;
  static constexpr int kTileColumns = kWarps * kWarpColumns;
  static constexpr int kLaneK = 4;  // elements of K of a lane in a k-step: one float4
  static constexpr int kKStepDepth = 32 * kLaneK;  // elements of K of a warp in a k-step
  static constexpr int kKStepsPerKTile = 2;        // a k-tile is what a warp prefetches
  static constexpr int kKTileDepth = kKStepsPerKTile * kKStepDepth;
  // With two blocks on a multiprocessor, one loads while the other adds up sums.
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kMaxBytes = 112 * 1024;  // a block's dynamic shared memory
  static_assert(kBlocksPerMultiprocessor * (kMaxBytes + 1024) <= 228 * 1024,
                "two blocks, with 1 KiB each that CUDA reserves, fit into a Hopper multiprocessor");
  // The most blocks of a cluster: the largest size that every GPU with clusters supports.
  static constexpr int kMaxClusterSize = 8;
  // The most k-tiles over which a lane should sum in float, so that few roundings add up.
  static constexpr int kMaxFloatKTiles = 4;
  // The estimated time of the end of a tile, in k-tiles (divide_work).
  static constexpr int kTileEndTime = 1;
};

// The type in which a lane sums its products, for tiles of kTileRows rows of x.
template <int kTileRows>
using Sum = std::conditional_t<(kTileRows > 4), float, double>;

// The arguments of skinny_kernel. The launch sets `k_tiles` when it has chosen the cluster size.
struct SkinnyArguments {
  const float* x;
  const float* weight;
  int64_t x_stride;
  int64_t weight_stride;
  Epilogue<float> epilogue;
  int k;
  int x_tiles;       // tiles of kTileRows rows
  int weight_tiles;  // tiles of kTileColumns columns
  int k_tiles = 0;   // k-tiles that each block of a cluster multiplies

  explicit SkinnyArguments(const LinearArguments& call, int tile_rows)
      : x(static_cast<const float*>(call.x)),
        weight(static_cast<const float*>(call.weight)),
        x_stride(call.x_stride),
        weight_stride(call.weight_stride),
        epilogue(call),
        k(static_cast<int>(call.k)),
        x_tiles(divide_up_to_int(call.m, tile_rows)),
        weight_tiles(divide_up_to_int(call.n, SkinnyConfig::kTileColumns)) {}

  // Returns how far apart a cluster's tiles of the weight are, which is also the number of clusters
  // that share a tile of x (skinny_kernel has an example).
  __device__ int tile_step() const { return ptx::nclusterid() / x_tiles; }

  // Returns K without the elements after the last whole float4.
  __device__ int whole_k() const { return k / SkinnyConfig::kLaneK * SkinnyConfig::kLaneK; }
};

// The shared memory of a block: the sums of two tiles, double [2][kTileRows][kTileColumns], and the
// block's range of x, Sum<kTileRows> [k_steps][kTileRows][kKStepDepth].
template <int kTileRows>
constexpr size_t shared_bytes(int k_tiles) {
  return kTileRows * (2 * SkinnyConfig::kTileColumns * sizeof(double) +
                      k_tiles * SkinnyConfig::kKTileDepth * sizeof(Sum<kTileRows>));
}

}  // namespace kernels::skinny
