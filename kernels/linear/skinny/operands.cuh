// The operands of skinny_kernel (skinny.cu), and their products: a block keeps its range of x in
// shared memory, and each warp streams its columns of the weight through registers.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/sizes.h"
#include "linear/skinny/config.cuh"

namespace kernels::skinny {

// -------------------------------------------------------------------------- a row of x in a k-step

// The layout in shared memory of a row of x in one k-step: 128 elements, four for each lane. As
// floats the four are one 16-byte vector. As doubles they are two vectors, and the second vectors
// of all lanes follow the first ones, so that the accesses of a warp have no bank conflicts:
//
//              lane 0       lane 1       lane 2      ...
//   float    x0 x1 x2 x3  x4 x5 x6 x7  x8 x9 ...
//
//   double      x0 x1        x4 x5        x8 x9           first vectors
//               x2 x3        x6 x7       x10 x11          second vectors
constexpr int kSecondVector = 32 * kVectorBytes;  // bytes from a lane's first vector to its second

// Stores this lane's four elements of a row, which begins at `row`, as T, float or double.
template <typename T>
__device__ void store_k_step(uint8_t* row, float4 v) {
  uint8_t* const target = row + threadIdx.x % 32 * kVectorBytes;
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float4*>(target) = v;
  } else {
    *reinterpret_cast<double2*>(target) = {v.x, v.y};
    *reinterpret_cast<double2*>(target + kSecondVector) = {v.z, v.w};
  }
}

// Loads this lane's four elements. `address` is that of the lane's first vector in shared memory.
__device__ inline void load_k_step(uint32_t address, float (&v)[4]) {
  const float4 four = ptx::load_shared_float4(address);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
__device__ inline void load_k_step(uint32_t address, double (&v)[4]) {
  const double2 low = ptx::load_shared_double2(address);
  const double2 high = ptx::load_shared_double2(address + kSecondVector);
  v[0] = low.x;
  v[1] = low.y;
  v[2] = high.x;
  v[3] = high.y;
}

// Copies the block's range of x to `x` in shared memory: k_range elements of each row, from
// block_first_k on. Elements past the last row and past whole_k are zeros. A warp copies one row of
// one k-step at a time: copy number i is that of row i % kTileRows in k-step i / kTileRows.
template <int kTileRows>
__device__ void load_x(const SkinnyArguments& arguments, uint8_t* x, int first_row,
                       int block_first_k, int k_range) {
  constexpr int kRowBytes = SkinnyConfig::kKStepDepth * sizeof(Sum<kTileRows>);  // in one k-step
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int k_steps = k_range / SkinnyConfig::kKStepDepth;
#pragma unroll 4
  for (int i = warp; i < k_steps * kTileRows; i += SkinnyConfig::kWarps) {
    const int row = first_row + i % kTileRows;
    const int k_step = i / kTileRows;
    const int k = block_first_k + k_step * SkinnyConfig::kKStepDepth + lane * SkinnyConfig::kLaneK;
    const bool exists = row < arguments.epilogue.m && k < arguments.whole_k();
    const float4* const source =
        reinterpret_cast<const float4*>(arguments.x + row * arguments.x_stride + k);
    store_k_step<Sum<kTileRows>>(x + i * kRowBytes, exists ? __ldg(source) : float4{});
  }
}

// ---------------------------------------------------------------------------- weights and products

// The weights that this lane multiplies next, a k-tile: v[k_step][column] has 4 elements of K of
// one of the warp's columns. When a k-step has been multiplied, load_next replaces its weights by
// those of the same k-step of the next k-tile, which may be the first one of the cluster's next
// tile:
//
//   after                     v[0]      v[1]
//   the constructor           k-tile 0  k-tile 0
//   load_next(/*k_step=*/0)   k-tile 1  k-tile 0
//   load_next(/*k_step=*/1)   k-tile 1  k-tile 1
//   load_next(/*k_step=*/0)   k-tile 2  k-tile 1
class PrefetchedWeights {
 public:
  float4 v[SkinnyConfig::kKStepsPerKTile][SkinnyConfig::kWarpColumns]{};

  // Loads the first k-tile of a tile of the weight. The block's range of K begins at block_first_k.
  __device__ PrefetchedWeights(const SkinnyArguments& arguments, int tile, int block_first_k)
      : arguments_(arguments),
        lane_first_k_(block_first_k + static_cast<int>(threadIdx.x % 32) * SkinnyConfig::kLaneK),
        tile_(tile) {
    find_columns();
#pragma unroll
    for (int k_step = 0; k_step < SkinnyConfig::kKStepsPerKTile; ++k_step) load_next(k_step);
  }

  // The k-steps of a k-tile are replaced in order.
  __device__ void load_next(int k_step) {
    load(k_step);
    const bool is_last_k_step = k_step == SkinnyConfig::kKStepsPerKTile - 1;
    if (is_last_k_step) advance();
  }

 private:
  // Past the last column, the last one is loaded instead, so that all addresses are valid; the
  // results are not stored.
  __device__ void find_columns() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int first_column = tile_ * SkinnyConfig::kTileColumns + warp * SkinnyConfig::kWarpColumns;
    const int column = min(first_column, arguments_.epilogue.n - 1);
    source_ = arguments_.weight + column * arguments_.weight_stride + lane_first_k_;
    columns_after_ = arguments_.epilogue.n - 1 - column;
  }

  // Loads the weights of a k-step. They are 0 past whole_k, and after the last tile.
  __device__ void load(int k_step) {
    const int offset = k_tile_ * SkinnyConfig::kKTileDepth + k_step * SkinnyConfig::kKStepDepth;
    const bool exists =
        lane_first_k_ + offset < arguments_.whole_k() && tile_ < arguments_.weight_tiles;
#pragma unroll
    for (int i = 0; i < SkinnyConfig::kWarpColumns; ++i) {
      const float* const address =
          source_ + min(i, columns_after_) * arguments_.weight_stride + offset;
      v[k_step][i] = ptx::load_global_float4_if(exists, address);
    }
  }

  __device__ void advance() {
    if (++k_tile_ < arguments_.k_tiles) return;
    k_tile_ = 0;
    tile_ += arguments_.tile_step();
    find_columns();
  }

  const SkinnyArguments& arguments_;
  const int lane_first_k_;  // this lane's K in the block's first k-step
  // The tile of the weight, and its k-tile, that load_next loads.
  int tile_;
  int k_tile_ = 0;       // counted from the beginning of the block's range of K
  const float* source_;  // the weight of the warp's first column, at lane_first_k_
  int columns_after_;    // how many columns exist after the warp's first
};

// A lane's sums of the products of a tile, [kTileRows][kWarpColumns].
template <int kTileRows>
using LaneSums = Sum<kTileRows>[kTileRows * SkinnyConfig::kWarpColumns];

// `x_address` is that of this lane's elements in the k-step's first row of x, in shared memory.
template <int kTileRows>
__device__ __forceinline__ void multiply_k_step(LaneSums<kTileRows>& lane_sums,
                                                const PrefetchedWeights& weights, int k_step,
                                                uint32_t x_address) {
#pragma unroll
  for (int row = 0; row < kTileRows; ++row) {
    Sum<kTileRows> a[4];
    load_k_step(x_address + row * SkinnyConfig::kKStepDepth * sizeof(Sum<kTileRows>), a);
#pragma unroll
    for (int i = 0; i < SkinnyConfig::kWarpColumns; ++i) {
      const float4& b = weights.v[k_step][i];
      Sum<kTileRows>& sum = lane_sums[row * SkinnyConfig::kWarpColumns + i];
      // In this order ptxas finds registers for the sums of 16 rows.
      sum = fma(a[3], Sum<kTileRows>{b.w}, sum);
      sum = fma(a[2], Sum<kTileRows>{b.z}, sum);
      sum = fma(a[1], Sum<kTileRows>{b.y}, sum);
      sum = fma(a[0], Sum<kTileRows>{b.x}, sum);
    }
  }
}

// Adds the products of a tile, over the block's range of K, to this lane's sums. `x` is the range
// of x in shared memory. Afterwards `weights` has the first k-tile of the cluster's next tile.
template <int kTileRows>
__device__ __forceinline__ void multiply_tile(const SkinnyArguments& arguments, const uint8_t* x,
                                              PrefetchedWeights& weights,
                                              LaneSums<kTileRows>& lane_sums) {
  uint32_t x_address = ptx::shared_address(x + threadIdx.x % 32 * kVectorBytes);
  for (int k_tile = 0; k_tile < arguments.k_tiles; ++k_tile) {
#pragma unroll
    for (int k_step = 0; k_step < SkinnyConfig::kKStepsPerKTile; ++k_step) {
      multiply_k_step<kTileRows>(lane_sums, weights, k_step, x_address);
      weights.load_next(k_step);
      x_address += kTileRows * SkinnyConfig::kKStepDepth * sizeof(Sum<kTileRows>);
    }
  }
}

}  // namespace kernels::skinny
