// The converter warps of gemm_one_product_kernel. They turn the float32 weight into scaled fp16, in
// global memory, just ahead of the TMA loads of the same kernel.
//
//   source     [N, K] float32, row-major, or its transpose [K, N]
//   exponent   [N] int, of each row of the weight
//   hi         [k-tile][N][64] fp16
//
// All three are members of WeightConversion::weight. For each n and each k < K,
//
//   hi[k / 64][n][k % 64] = source[n][k] * 2^exponent[n], rounded to nearest
//
// and hi is 0 for k >= K. The previous kernel, split_x_kernel, has found the exponents from a
// sample of each row.
//
// The converter warps call convert_weight (gemm_one_product.cuh). The producer warp calls
// wait_converted before it loads a k-tile (gemm_one_product_mainloop.cuh).
//
// Why in this kernel: a pass of its own would write the fp16 weight to memory, and the GEMM would
// read it back. Here the GEMM reads it from L2, and the warps that convert would be idle otherwise.
//
// Four counters connect the warps. All of them are 0 at first. `progress` is in shared memory, the
// others are in global memory.
//
//   next                   The next unit of work: 32 rows x 4 k-tiles. A converter warp takes it by
//                          atomicAdd.
//   ready[panel][k-tile]   How many of the 4 units of a panel (128 rows) are converted at this
//                          k-tile. The producer loads the panel's k-tile when the count is 4.
//   progress               The latest k-tile that this block's producer has begun, counted over all
//                          of its tiles. It keeps the block's converter warps from running so far
//                          ahead that L2 evicts hi before it is read.
//   subnormals[row]        How many elements of a row have lost bits in fp16, weighted (see below).
//                          The converter warps that add to it also read it.
//
// Memory ordering. Only the counter `ready` announces that other data, hi, has been written. As
// ordinary stores (PTX's generic proxy) write hi and TMA (the async proxy) reads it, a release and
// an acquire are not enough, and both sides have a proxy fence:
//
//   converter   each lane: store hi, fence.proxy.async
//               __syncwarp
//               four lanes, one for each k-tile of the unit: red.release of ready
//
//   producer    each lane: ld.acquire of ready
//               __syncwarp
//               each lane: fence.proxy.async
//               lane 0: TMA load of hi
//
// The counter `subnormals` decides which rows need TF32. fp16 has 11 significant bits, as TF32 has,
// but only from 2^-14 on. A smaller element is subnormal and has lost bits. In each k-tile of a
// row, count_subnormals takes the share of subnormals among the nonzero elements, which is 0 if all
// elements are zero. If the mean of the k-tiles' shares exceeds 1/32, a converter warp puts an
// infinity into the row, so that its tiles are computed again (gemm_one_product.cuh).

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/convert_weight_layouts.cuh"
#include "linear/sm90/gemm_one_product_arguments.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"

namespace kernels::sm90::gemm_one_product {

// Scales eight neighbours along K and rounds them to fp16.
//
// `least` finds subnormal elements. It packs two 16-bit numbers, one for even and one for odd
// elements. Each becomes the least of itself and of all (magnitude bits - 1), as unsigned integers.
// The caller starts with kNoSubnormal, which is 0x03ff twice:
//
//   element     magnitude bits    - 1               makes the number smaller
//   zero        0x0000            0xffff (wraps)    no
//   subnormal   0x0001 - 0x03ff   0x0000 - 0x03fe   yes
//   normal      0x0400 - ...      0x03ff - ...      no
__device__ inline uint4 round_octet(const float (&v)[fp16x3::kOctet], float scale,
                                    uint32_t* least) {
  uint32_t hi[fp16x3::kOctet / 2];
#pragma unroll
  for (int j = 0; j < fp16x3::kOctet / 2; ++j) {
    const __half2 pair = __floats2half2_rn(v[2 * j] * scale, v[2 * j + 1] * scale);
    hi[j] = *reinterpret_cast<const uint32_t*>(&pair);
    *least = __viaddmin_u16x2(hi[j] & 0x7fff7fff, 0xffffffff, *least);
  }
  return make_uint4(hi[0], hi[1], hi[2], hi[3]);
}

// Counts the subnormals of a row in one k-tile, and adds the scaled count to subnormals[row]. Eight
// lanes have a row, with an octet of eight elements each.
//
// has_many_subnormals asks whether a row has more than one subnormal for 32 nonzero elements. The
// nonzero elements of a whole row of the weight are not counted, so the row's subnormals are
// compared with K, which includes zeros. To make up for that, the count of a k-tile is scaled from
// its nonzero elements to all 64, as if the zeros had the same share of subnormals. The scaled
// count is rounded down, and 0 if all elements are zero.
//
// Example: of 64 elements, 32 are zeros, 28 normal and 4 subnormal. It adds 4 * 64 / 32 = 8.
__device__ inline void count_subnormals(const WeightConversion& conversion, int64_t row,
                                        const uint4& octet) {
  const uint32_t pairs[] = {octet.x, octet.y, octet.z, octet.w};
  // Counts in fp16, exact up to 2048: elements with even index in .x, odd in .y.
  __half2 nonzeros = __float2half2_rn(0);
  __half2 normals = nonzeros;
#pragma unroll
  for (const uint32_t bits : pairs) {
    const __half2 pair = *reinterpret_cast<const __half2*>(&bits);
    nonzeros = __hadd2(nonzeros, __hne2(pair, __float2half2_rn(0)));
    normals = __hadd2(normals, __hge2(__habs2(pair), __float2half2_rn(fp16x3::kSmallHi)));
  }
  // .x counts nonzero elements, .y normal ones: first of the lane, then of the row's eight lanes.
  __half2 sum = __hadd2(__lows2half2(nonzeros, normals), __highs2half2(nonzeros, normals));
  for (int bit = 1; bit < 8; bit *= 2) sum = __hadd2(sum, __shfl_xor_sync(0xffffffff, sum, bit));
  const unsigned nonzero_count = __half2int_rz(__low2half(sum));
  const unsigned lost = nonzero_count - __half2int_rz(__high2half(sum));
  if (threadIdx.x % 8 == 0 && lost != 0) {
    atomicAdd(conversion.subnormals + row, lost * ConvertWeightConfig::kKTileDepth / nonzero_count);
  }
}

// Counts the subnormals of some batches of a unit that this warp has converted: `batches` has a bit
// for each. All of them have the row-major shape, 8 rows x 64 of K. `hi_k_tile` points to row 0 of
// the unit's first k-tile, and the next k-tile is k_tile_elements further. Counting follows the
// conversion of the whole unit, as counting in every batch would slow the conversion down.
__device__ __forceinline__ void count_batches(const WeightConversion& conversion, int64_t first_row,
                                              const __half* hi_k_tile, int64_t k_tile_elements,
                                              uint32_t batches) {
  using C = ConvertWeightConfig;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (; batches != 0; batches &= batches - 1) {  // clears the lowest bit
    const int batch = __ffs(batches) - 1;
    const int k_tile = batch / C::kBatchesPerKTile;
    const int64_t row = first_row + batch % C::kBatchesPerKTile * C::kRowMajorBatchRows + lane / 8;
    const __half* const source = hi_k_tile + k_tile * k_tile_elements +
                                 row * fp16x3::kKTileNumbers + lane % 8 * fp16x3::kOctet;
    uint4 octets[C::kOctetsPerBatch];
#pragma unroll
    for (int i = 0; i < C::kOctetsPerBatch; ++i) {
      octets[i] = *reinterpret_cast<const uint4*>(source + 4 * i * fp16x3::kKTileNumbers);
    }
#pragma unroll
    for (int i = 0; i < C::kOctetsPerBatch; ++i) {
      count_subnormals(conversion, row + 4 * i, octets[i]);
    }
  }
}

// Waits until the oldest batch in flight has arrived in shared memory, for all lanes. All lanes
// have then read the batch before it, so that batch's slot is free for the next load.
__device__ __forceinline__ void wait_for_batch(int barrier) {
  ptx::wait_copies<ConvertWeightConfig::kSlots - 2>();
  ptx::barrier_sync(barrier, 32);
}

// Converts the lane's octets of a batch, and stores them to hi. Returns round_octet's `least`.
//
// `slot` has the batch in shared memory. batch_in_k_tile is the batch's number in the k-tile, 0 to
// 3. scale[i] is that of row Layout::row(lane, i). `target` is where the lane's first octet of the
// k-tile goes: octet 0 of batch 0. The distance from there to its other octets is the same in all
// lanes, so it is computed for lane 0, whose first octet is at row 0 and k 0.
template <typename Layout>
__device__ __forceinline__ uint32_t convert_batch(const Batch& slot, int lane, int batch_in_k_tile,
                                                  const float (&scale)[Layout::kRows],
                                                  __half* target) {
  uint32_t least = ConvertWeightConfig::kNoSubnormal;
#pragma unroll
  for (int octet = 0; octet < ConvertWeightConfig::kOctetsPerBatch; ++octet) {
    alignas(16) float v[fp16x3::kOctet];
    Layout::read(slot, lane, octet, v);
    const int i = Layout::row_number(batch_in_k_tile, octet);
    const int distance = Layout::row(0, i) * fp16x3::kKTileNumbers + Layout::k(0, batch_in_k_tile);
    *reinterpret_cast<uint4*>(target + distance) = round_octet(v, scale[i], &least);
  }
  return least;
}

// Converts a whole unit, from `first_row` and `k_tile` on, of a weight in this layout. Returns
// whether anything was added to the counters of subnormals. All lanes of a warp call it, and meet
// at `barrier`.
//
// Layout is RowMajor or Transposed. The warp keeps a ring of four batches in shared memory. It
// converts one batch while the next three are loaded.
template <typename Layout>
__device__ __forceinline__ bool convert_whole_unit(const WeightConversion& conversion,
                                                   int64_t first_row, int k_tile, BatchRing& ring,
                                                   int barrier) {
  using C = ConvertWeightConfig;
  const fp16x3::SplitMatrix& weight = conversion.weight;
  const int lane = threadIdx.x % 32;
  const int64_t row_stride = weight.row_stride;
  const int64_t k_tile_elements = weight.rows * fp16x3::kKTileNumbers;
  const int64_t k = int64_t{k_tile} * C::kKTileDepth;
  __half* const hi_k_tile = weight.hi + k_tile * k_tile_elements;
  __half* target =
      hi_k_tile + (first_row + Layout::row(lane, 0)) * fp16x3::kKTileNumbers + Layout::k(lane, 0);
  const uint64_t policy = ptx::evict_first_policy();
  const float* const source = Layout::first_source(weight, first_row, k, lane);
  const auto load = [&](int batch) {
    Layout::load(ring[batch % C::kSlots], source, row_stride, batch, lane, policy);
  };

  float scale[Layout::kRows];
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
    const int64_t row = first_row + Layout::row(lane, i);
    scale[i] = fp16x3::power_of_two(__ldg(weight.exponent + row));
  }

  // Load the first three batches. Then wait for each batch, load the one three later, and convert.
#pragma unroll
  for (int batch = 0; batch < C::kSlots - 1; ++batch) {
    load(batch);
    ptx::commit_copies();
  }
  uint32_t subnormal_batches = 0;  // a bit for each batch of the row-major shape
#pragma unroll 1
  for (int first = 0; first < C::kBatchesPerUnit; first += C::kBatchesPerKTile) {
#pragma unroll
    for (int batch_in_k_tile = 0; batch_in_k_tile < C::kBatchesPerKTile; ++batch_in_k_tile) {
      const int batch = first + batch_in_k_tile;
      wait_for_batch(barrier);
      if (batch + C::kSlots - 1 < C::kBatchesPerUnit) load(batch + C::kSlots - 1);
      ptx::commit_copies();
      const uint32_t least =
          convert_batch<Layout>(ring[batch % C::kSlots], lane, batch_in_k_tile, scale, target);
      if (least != C::kNoSubnormal) {
        subnormal_batches |= Layout::batches_to_count(first, batch_in_k_tile);
      }
    }
    target += k_tile_elements;
  }

  // Count the subnormals of the batches in which a lane has found one.
  subnormal_batches = __reduce_or_sync(0xffffffff, subnormal_batches);
  const bool any_counted = subnormal_batches != 0;
  // Other lanes may have written what count_batches reads.
  if (!Layout::kCountsOwnOctets && any_counted) __syncwarp();
  count_batches(conversion, first_row, hi_k_tile, k_tile_elements, subnormal_batches);
  return any_counted;
}

// Converts a unit of either layout at the edge of the weight, where some rows or some of K do not
// exist, without shared memory. Eight lanes have a row, eight k each. A lane has every fourth
// row from lane_row on. Returns whether anything was added to the counters of subnormals. All lanes
// of a warp call it.
template <typename Layout>
__device__ bool convert_edge_unit(const WeightConversion& conversion, int64_t k, int64_t lane_row,
                                  int k_tile) {
  using C = ConvertWeightConfig;
  constexpr int kRowsPerLane = C::kUnitRows / 4;
  const fp16x3::SplitMatrix& weight = conversion.weight;
  bool any_counted = false;
#pragma unroll 1
  for (int i = 0; i < C::kUnitKTiles * kRowsPerLane; ++i) {
    const int64_t own_row = lane_row + i % kRowsPerLane * 4;
    const int own_k_tile = k_tile + i / kRowsPerLane;
    const int64_t own_k = int64_t{own_k_tile} * C::kKTileDepth + threadIdx.x % 8 * fp16x3::kOctet;
    uint32_t least = C::kNoSubnormal;
    uint4 octet = {};
    if (own_row < weight.rows && own_k < fp16x3::padded(k)) {
      float v[fp16x3::kOctet];
      if constexpr (Layout::kIsTransposed) {
        for (int j = 0; j < fp16x3::kOctet; ++j) {
          const bool exists = own_k + j < k;
          v[j] = exists ? weight.source[(own_k + j) * weight.row_stride + own_row] : 0;
        }
      } else {
        load_floats(v, weight.source + own_row * weight.row_stride, own_k, k,
                    /*is_aligned=*/true);
      }
      octet = round_octet(v, fp16x3::power_of_two(__ldg(weight.exponent + own_row)), &least);
      __half* const target =
          weight.hi + (own_k_tile * weight.rows + own_row) * fp16x3::kKTileNumbers;
      *reinterpret_cast<uint4*>(target + own_k % C::kKTileDepth) = octet;
    }
    if (__any_sync(0xffffffff, least != C::kNoSubnormal)) {
      count_subnormals(conversion, own_row, octet);
      any_counted = true;
    }
  }
  return any_counted;
}

// Puts an infinity into the unit's part of a row if too many subnormals have been counted in the
// row so far. Each lane calls it for a row of its own. The last unit of the row to add its count
// sees the whole count, so no row is missed. The load is an acquire, as an ordinary load might find
// an old count in L1.
__device__ __forceinline__ void mark_row_for_tf32(const WeightConversion& conversion, int64_t k,
                                                  int64_t row, int k_tile) {
  const fp16x3::SplitMatrix& weight = conversion.weight;
  if (row < weight.rows &&
      fp16x3::has_many_subnormals(ptx::load_acquire(conversion.subnormals + row), k)) {
    weight.hi[(k_tile * weight.rows + row) * fp16x3::kKTileNumbers] = __float2half(INFINITY);
  }
}

// Takes the next unit. Returns the unit's number to lane 0, and 0 to the other lanes. All lanes of
// a warp call it.
__device__ __forceinline__ unsigned take_unit(const WeightConversion& conversion) {
  return threadIdx.x % 32 == 0 ? atomicAdd(conversion.next, 1u) : 0;
}

// A unit of work: 32 rows x 4 k-tiles of the weight.
struct Unit {
  int64_t row;    // the first one
  int k_tile;     // the first one
  int first_use;  // a cluster multiplies at least this many k-tiles before it needs the unit
};

// The order of the units is that in which the clusters need them. Each cluster multiplies one tile
// at a time, so at any time weight_tiles_at_once tiles of the weight are multiplied: a wave. All
// units of a wave's first four k-tiles come first, then those of its next four, and so on; then
// comes the next wave.
//
// Example: x [1024, 8192], weight [8192, 8192], 66 clusters. x has 4 tiles, all multiplied at once.
// The weight has 32, of which 17 are multiplied at once. A tile of the weight has 256 rows, which
// are 8 unit rows (of 32 rows each). K has 128 k-tiles, which are 32 units.
//
//   wave 0: tiles 0 - 16 of the weight, 17 * 8 = 136 unit rows, 136 * 32 = 4352 units
//   wave 1: tiles 17 - 31,              15 * 8 = 120 unit rows, 120 * 32 = 3840 units
//
//   Unit 5000 is number 5000 - 4352 = 648 of wave 1.
//     648 = 5 * 120 + 48, so its k-tiles are 5 * 4 = 20 to 23, and its unit row is 136 + 48 = 184.
//     These are rows 184 * 32 = 5888 to 5919 of the weight.
//   When is unit 5000 used?
//     17 * 4 = 68 tiles of out come before wave 1. A cluster has multiplied 68 / 66 = 1 of them,
//     which is 128 k-tiles. (The division rounds down, so that no conversion is late.) A cluster
//     first needs the unit at its k-tile 128 + 20 = 148, which is first_use.
struct UnitOrder {
  int units_along_k;
  int unit_rows;  // of the whole weight; a unit row is 32 of its rows
  int unit_rows_of_wave;
  int clusters;

  // For `weight_tiles` tiles of the whole weight, and `clusters` clusters of the grid.
  __device__ UnitOrder(const WeightConversion& conversion, int weight_tiles, int clusters)
      : clusters(clusters) {
    using C = ConvertWeightConfig;
    constexpr int kUnitRowsOfTile = BlockConfig::kClusterSize * C::kUnitsPerPanel;
    units_along_k = (conversion.k_tiles + C::kUnitKTiles - 1) / C::kUnitKTiles;
    unit_rows = weight_tiles * kUnitRowsOfTile;
    unit_rows_of_wave = conversion.weight_tiles_at_once * kUnitRowsOfTile;
  }

  __device__ unsigned count() const { return static_cast<unsigned>(unit_rows) * units_along_k; }

  // The unit of this number, 0 <= number < count().
  __device__ __forceinline__ Unit find(const WeightConversion& conversion, int number) const {
    using C = ConvertWeightConfig;
    const int wave = number / (unit_rows_of_wave * units_along_k);
    const int number_in_wave = number - wave * unit_rows_of_wave * units_along_k;
    const int first_unit_row = wave * unit_rows_of_wave;
    // The last wave may have fewer unit rows than the others.
    const int own_unit_rows = min(unit_rows_of_wave, unit_rows - first_unit_row);
    const int unit_k = number_in_wave / own_unit_rows;
    const int k_tile = unit_k * C::kUnitKTiles;
    const int64_t row = (first_unit_row + number_in_wave - unit_k * own_unit_rows) * C::kUnitRows;
    const int tiles_before = wave * conversion.weight_tiles_at_once * conversion.x_tiles_at_once;
    const int tiles_of_cluster = tiles_before / clusters;
    return {row, k_tile, tiles_of_cluster * conversion.k_tiles + k_tile};
  }
};

// Waits until this block's producer has begun a k-tile that is at most kLead k-tiles before the
// unit's first use. In the example above: k-tile 148 - 24 = 124. All lanes of a warp call it.
//
// This wait and the producers' waits for `ready` cannot form a circle: units are taken in the order
// of their use, and a warp waits only for k-tiles that come before its unit is used.
__device__ __forceinline__ void wait_for_turn(const Unit& unit, int* progress) {
  if (threadIdx.x % 32 == 0) {
    while (atomicAdd(progress, 0) + ConvertWeightConfig::kLead < unit.first_use) __nanosleep(200);
  }
  __syncwarp();
}

// Converts a unit, and marks its rows that have too many subnormals. `k` is K. All lanes of a warp
// call it, and meet at `barrier`.
template <typename Layout>
__device__ __forceinline__ void convert_unit(const WeightConversion& conversion, int64_t k,
                                             const Unit& unit, BatchRing& ring, int barrier) {
  using C = ConvertWeightConfig;
  const int lane = threadIdx.x % 32;
  const bool is_whole = unit.row + C::kUnitRows <= conversion.weight.rows &&
                        int64_t{unit.k_tile + C::kUnitKTiles} * C::kKTileDepth <= k;
  bool any_counted;  // whether anything was added to subnormals
  if (is_whole) {
    any_counted = convert_whole_unit<Layout>(conversion, unit.row, unit.k_tile, ring, barrier);
  } else {
    any_counted = convert_edge_unit<Layout>(conversion, k, unit.row + lane / 8, unit.k_tile);
  }
  if (any_counted) {
    __syncwarp();  // all lanes have added their counts
    mark_row_for_tf32(conversion, k, unit.row + lane, unit.k_tile);
  }
}

// Tells the producers that a unit is converted: see "Memory ordering" at the top. All lanes of a
// warp call it.
__device__ __forceinline__ void publish(const WeightConversion& conversion, const Unit& unit) {
  const int lane = threadIdx.x % 32;
  ptx::fence_proxy_async_global();
  __syncwarp();
  if (lane < ConvertWeightConfig::kUnitKTiles && unit.k_tile + lane < conversion.k_tiles) {
    const int64_t panel = unit.row / Config::kBlockColumns;
    ptx::add_release(conversion.ready + panel * conversion.k_tiles + unit.k_tile + lane, 1);
  }
}

// Converts units until none is left: each converter warp calls this. The warps of all blocks take
// units from one counter, so a warp mostly converts what other blocks multiply.
//
// `weight_tiles` is the number of tiles of the whole weight, and `clusters` that of the grid. The
// warp's lanes meet at `barrier`. `progress` is that of this block's producer. `is_needed` returns
// whether any tile reads hi at all; the answer is the same in all blocks.
template <typename Layout, typename IsNeeded>
__device__ void convert_weight(const WeightConversion& conversion, int64_t k, int weight_tiles,
                               int clusters, BatchRing& ring, int barrier, int* progress,
                               const IsNeeded& is_needed) {
  const UnitOrder order(conversion, weight_tiles, clusters);
  const unsigned units = order.count();
  const unsigned first = take_unit(conversion);
  // The atomic operation above and the loads of is_needed are in flight at the same time. The
  // producers wait for the first unit, but converting it before is_needed is called makes the
  // kernel slower (docs/EXPERIMENTS.md, "Hopper's products").
  if (!is_needed()) return;
  unsigned number = __shfl_sync(0xffffffff, first, 0);
  while (number < units) {
    const unsigned next_number = take_unit(conversion);  // arrives during the conversion
    const Unit unit = order.find(conversion, static_cast<int>(number));
    wait_for_turn(unit, progress);
    convert_unit<Layout>(conversion, k, unit, ring, barrier);
    publish(conversion, unit);
    number = __shfl_sync(0xffffffff, next_number, 0);
  }
}

// Waits until a panel is converted at a k-tile. Lane i looks at k-tile k_tile + i. Returns how many
// successive k-tiles, from k_tile on, are converted: 1 to 32. The producer asks again only after
// these. All lanes of the producer warp call it.
__device__ inline int wait_converted(const WeightConversion& conversion, int panel, int k_tile) {
  const int own_k_tile = k_tile + threadIdx.x % 32;
  const unsigned* const ready =
      conversion.ready + static_cast<int64_t>(panel) * conversion.k_tiles + own_k_tile;
  unsigned missing;  // a bit for each lane
  do {
    const bool is_ready = own_k_tile < conversion.k_tiles &&
                          ptx::load_acquire(ready) == ConvertWeightConfig::kUnitsPerPanel;
    missing = ~__ballot_sync(0xffffffff, is_ready);
  } while (missing & 1);
  // Orders the TMA loads, which lane 0 issues, after the acquires of all lanes.
  __syncwarp();
  ptx::fence_proxy_async_global();
  return missing == 0 ? 32 : __ffs(missing) - 1;
}

}  // namespace kernels::sm90::gemm_one_product
