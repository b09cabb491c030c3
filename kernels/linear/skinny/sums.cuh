// The end of a tile in skinny_kernel (skinny.cu): adds up the sums of lanes and blocks, in double,
// and stores results and mask.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "linear/skinny/config.cuh"

namespace kernels::skinny {

// The totals of a warp in a tile, [kTileRows][kWarpColumns]: the sums of its lanes, added up and
// spread over the lanes by add_lanes. Neighbours share a total if there are fewer totals than
// lanes:
//
//   kTileRows   kCount   totals of lane l    kTotalsPerLane   kLanesOfTotal
//       2          8     l / 4                    1                4
//       8         32     l                        1                1
//      16         64     2 l and 2 l + 1          2                1
template <int kTileRows>
struct WarpTotals {
  static constexpr int kCount = kTileRows * SkinnyConfig::kWarpColumns;
  static constexpr int kTotalsPerLane = kCount < 32 ? 1 : kCount / 32;
  static constexpr int kLanesOfTotal = kCount < 32 ? 32 / kCount : 1;

  __host__ __device__ static constexpr int first_of(int lane) {
    return lane / kLanesOfTotal * kTotalsPerLane;
  }
};
static_assert(WarpTotals<2>::first_of(/*lane=*/27) == 6, "lanes 24 to 27 have total 6");
static_assert(WarpTotals<16>::first_of(/*lane=*/27) == 54, "lane 27 has totals 54 and 55");

// Two lanes that are `distance` apart have two sums each. The lower lane returns the total of the
// first sums, the upper lane that of the second sums. Each sends the sum whose total the other one
// returns.
template <typename T>
__device__ __forceinline__ double add_pair(T first, T second, int distance) {
  const bool is_upper = (threadIdx.x & distance) != 0;
  const T kept = is_upper ? second : first;
  const T sent = is_upper ? first : second;
  return double{kept} + double{__shfl_xor_sync(0xffffffff, sent, distance)};
}

// Each of the 32 lanes of a warp has kCount sums. Adds sum i of all lanes, for each i, and spreads
// the totals over the lanes as WarpTotals says. Lanes exchange sums at distances of 16, 8, 4, 2 and
// 1, one in each call of the recursion. Each exchange halves the sums that a lane has, unless it
// has just one. Lane 27, whose number is 11011 in binary, has these sums after each exchange:
//
//   distance       16        8         4         2         1
//   kCount = 8     4 - 7     6, 7      6         6         6
//   kCount = 64    32 - 63   48 - 63   48 - 55   52 - 55   54, 55
template <int kDistance = 16, typename T, int kCount, int kTotals>
__device__ __forceinline__ void add_lanes(const T (&sums)[kCount], double (&totals)[kTotals]) {
  if constexpr (kDistance == 0) {  // after the last exchange
    static_assert(kCount == kTotals, "the sums that a lane has left are its totals");
#pragma unroll
    for (int i = 0; i < kTotals; ++i) totals[i] = sums[i];
  } else if constexpr (kCount == 1) {  // both lanes keep the sum
    const double left[1] = {sums[0] + __shfl_xor_sync(0xffffffff, sums[0], kDistance)};
    add_lanes<kDistance / 2>(left, totals);
  } else {
    constexpr int kHalf = kCount / 2;
    double left[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) left[i] = add_pair(sums[i], sums[kHalf + i], kDistance);
    add_lanes<kDistance / 2>(left, totals);
  }
}

// The two buffers of a block for sums, in shared memory: double [kTileRows][kTileColumns] each.
struct SumBuffers {
  double* current;
  double* previous;  // of the tile before

  __device__ void swap() {
    double* const swapped = current;
    current = previous;
    previous = swapped;
  }
};

// Stores a warp's totals of a tile to `sums`, a buffer that the cluster's other blocks read. The
// first of the lanes with the same total stores it.
template <int kTileRows>
__device__ __forceinline__ void share_totals(
    const double (&totals)[WarpTotals<kTileRows>::kTotalsPerLane], double* sums) {
  using Totals = WarpTotals<kTileRows>;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const bool stores_totals = lane % Totals::kLanesOfTotal == 0;
  if (!stores_totals) return;
#pragma unroll
  for (int i = 0; i < Totals::kTotalsPerLane; ++i) {
    const int total = Totals::first_of(lane) + i;
    const int row = total / SkinnyConfig::kWarpColumns;
    const int column = warp * SkinnyConfig::kWarpColumns + total % SkinnyConfig::kWarpColumns;
    sums[row * SkinnyConfig::kTileColumns + column] = totals[i];
  }
}

// Returns the sum of all blocks' sums of an element. `block_sum` points to this block's, in shared
// memory, and the other blocks of the cluster have theirs at the same place. All loads are issued
// before the first one is waited for. The sums are added in pairs, always in the same order.
__device__ __forceinline__ double sum_of_blocks(const double* block_sum) {
  const int cluster_size = ptx::cluster_nctarank();
  const uint32_t address = ptx::shared_address(block_sum);
  double block_sums[SkinnyConfig::kMaxClusterSize];
#pragma unroll
  for (int i = 0; i < SkinnyConfig::kMaxClusterSize; ++i) {
    const bool exists = i < cluster_size;
    block_sums[i] = exists ? ptx::load_shared_cluster(ptx::map_shared(address, i)) : 0;
  }
#pragma unroll
  for (int half = SkinnyConfig::kMaxClusterSize / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) block_sums[i] += block_sums[i + half];
  }
  return block_sums[0];
}

// Returns an element of x weight^T + bias: the sum over the blocks of the cluster, plus the
// products of the last k % 4 elements of K, plus the bias. `block_sum` is as in sum_of_blocks.
template <int kTileRows>
__device__ float add_rest_and_bias(const SkinnyArguments& arguments, const double* block_sum,
                                   int row, int column) {
  double sum = sum_of_blocks(block_sum);
  const float* const x = arguments.x + row * arguments.x_stride;
  const float* const weight = arguments.weight + column * arguments.weight_stride;
#pragma unroll 1
  for (int k = arguments.whole_k(); k < arguments.k; ++k) {
    sum = fma(double{x[k]}, double{weight[k]}, sum);
  }
  // A partial sum in float may have overflowed although the whole sum is finite. Then all products
  // are summed again, in double. The loop ends once the sum is NaN, because it then stays NaN.
  constexpr bool kMayOverflow = std::is_same_v<Sum<kTileRows>, float>;
  if (kMayOverflow && !isfinite(sum)) {
    sum = 0;
    for (int k = 0; k < arguments.k && !isnan(sum); ++k) {
      sum = fma(double{x[k]}, double{weight[k]}, sum);
    }
  }
  if (arguments.epilogue.bias != nullptr) sum += __ldg(arguments.epilogue.bias + column);
  return static_cast<float>(sum);
}

// A tile whose sums all blocks of the cluster have stored. `sums` are this block's.
struct FinishedTile {
  const double* sums;
  int first_row;
  int first_column;
};

// Stores one result of a tile for each lane, and their mask. Eight neighbouring lanes have the
// eight results of one byte of the tile's mask, which the first of them stores: `byte` is its
// number in the tile. A tile [kTileRows][32] has 4 bytes in each row: byte b is in row b / 4, and
// its columns begin at b % 4 * 8. All lanes of a warp call this function. Nothing is stored for a
// byte past the tile's last, and for rows and columns past those of out.
template <int kTileRows>
__device__ __forceinline__ void store_byte_of_tile(const SkinnyArguments& arguments,
                                                   const FinishedTile& tile, int byte, int lane) {
  constexpr int kBytesPerRow = SkinnyConfig::kTileColumns / 8;
  constexpr int kBytes = kTileRows * kBytesPerRow;
  const Epilogue<float>& epilogue = arguments.epilogue;
  const int row_of_tile = byte / kBytesPerRow;
  const int column_of_tile = byte % kBytesPerRow * 8 + lane % 8;
  const int row = tile.first_row + row_of_tile;
  const int column = tile.first_column + column_of_tile;
  const bool exists = byte < kBytes && row < epilogue.m && column < epilogue.n;
  float z = 0;
  if (exists) {
    const double* const sum = tile.sums + row_of_tile * SkinnyConfig::kTileColumns + column_of_tile;
    z = add_rest_and_bias<kTileRows>(arguments, sum, row, column);
    *epilogue.out_at(row, column) = epilogue.finish(z);
  }
  if (epilogue.mask != nullptr) {
    const uint32_t bits = __ballot_sync(0xffffffff, exists && mask_bit(z)) >> (lane / 8 * 8);
    const bool stores_byte = exists && lane % 8 == 0;
    if (stores_byte) *epilogue.mask_at(row, column) = static_cast<uint8_t>(bits);
  }
}

// Stores this block's share of the results and mask of a tile. Eight lanes store a byte of the mask
// and its 8 results, so a warp stores 4 bytes at once. They are cluster_size apart, as the blocks
// of the cluster take bytes in turn. For a cluster of 2 blocks:
//
//   lanes              0 - 7   8 - 15   16 - 23   24 - 31
//   warp 0, block 0      0        2         4         6
//   warp 0, block 1      1        3         5         7
//   warp 1, block 0      8       10        12        14
//   warp 1, block 1      9       11        13        15
//   ...
//   warp 7, block 1     57       59        61        63
template <int kTileRows>
__device__ void store_share_of_tile(const SkinnyArguments& arguments, const FinishedTile& tile) {
  const int rank = ptx::cluster_ctarank();
  const int cluster_size = ptx::cluster_nctarank();
  constexpr int kBytes = kTileRows * SkinnyConfig::kTileColumns / 8;
  constexpr int kBytesPerWarp = 32 / 8;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int first_byte_of_warp = warp * kBytesPerWarp * cluster_size + rank;
  const int bytes_at_once = SkinnyConfig::kWarps * kBytesPerWarp * cluster_size;
  // The other lanes stay in the loop as long as lane 0, for the ballot in store_byte_of_tile.
  for (int byte_of_lane_0 = first_byte_of_warp; byte_of_lane_0 < kBytes;
       byte_of_lane_0 += bytes_at_once) {
    const int byte_of_lane = byte_of_lane_0 + lane / 8 * cluster_size;
    store_byte_of_tile<kTileRows>(arguments, tile, byte_of_lane, lane);
  }
}

}  // namespace kernels::skinny
