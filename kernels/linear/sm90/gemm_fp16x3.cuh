// The float32 GEMM of `highest` on Hopper (fp16x3): out [M, N] = x [M, K] weight [N, K]^T, with the
// accuracy of float32 and better, by three fp16 tensor-core products.
//
//   x       split before by split_x.cuh: rows scaled by powers of two, then fp16 hi and lo, so that
//   a
//           scaled element is hi + lo / 2^11
//   weight  float32; this kernel scales and splits it on the way to the tensor cores, so that the
//           weight is read once and its halves are never written to memory
//   out     float32, after bias, ReLU and division (gemm_fp16x3_epilogue.cuh)
//
// launch.cu launches the kernel. docs/SPLIT.md proves the error bound.
//
// ----- The arithmetic
//
//   x w  =  x_hi w_hi  +  (x_lo w_hi + x_hi w_lo) / 2^11        (x_lo w_lo / 2^22 is left out)
//           "hi product"  "lo products"
//
// Tensor cores truncate when they add to an accumulator. Two measures keep the errors below those
// of float32 sums. The lo products are added before the hi products, as small terms would lose
// their bits in a large sum. And after a promotion interval of K the accumulators are promoted:
// added to float32 sums in other registers, rounded to nearest. The next product then overwrites
// the accumulators.
//
// ----- The pipeline
//
// A cluster of two blocks computes a tile: 256 features (rows of the weight), 128 in each block,
// and up to 176 rows of x, which the blocks share. K goes through shared memory in k-tiles of 32;
// five stages hold one each.
//
//      global memory                 a stage                        a consumer warpgroup
//
//   weight [128, 32] float32 --TMA--> weight [128, 32] float32 ---> loads its 64 rows, scales and
//   splits
//                                                                   them: fragments hi | lo,
//                                                                   registers
//   x [176, 32] hi | lo ------TMA--->  x [176, 32] hi | lo -----------------+        |
//     each block loads half                                        operand B|        |operand A
//     for both (multicast)                                                  v        v
//                                                                   wgmma: accumulators [64, 176]
//                                                                           |
//                                                                           | promotion
//                                                                           v
//                                                                   sums [64, 176], float32
//                                                                   registers
//
// Warpgroups 0 and 1 are consumers. Warpgroup 2 has the producer warp, which starts the TMA copies,
// and the loader warp, which loads what the epilogue reads.
//
// ----- The mainloop: one k-group, which is four k-tiles, 128 of K
//
// "hi 0" is the hi product of k-tile 0, "lo 0" its lo products, "conv 0" the conversion of the
// weight of k-tile 0; 0' is k-tile 0 of the next k-group. P is a promotion; S scales the
// accumulators by 2^-11. The tensor cores work asynchronously: the warpgroup converts a k-tile
// while the product before it is computed. Registers hold the fragments of two k-tiles, so conv 2
// overwrites those of k-tile 0 after lo 0 has ended. Time runs to the right.
//
//   promotion interval 128 (K from 4096 on)
//     tensor cores        | hi 0 | hi 1 |P| lo 0 | lo 1 | lo 2 | lo 3 |S| hi 2 | hi 3 | hi 0'| hi
//     1'|P conversion   conv 0 |conv 1|               |conv 2|conv 3| |conv0'|conv1'| stages
//     released                                   0, 1                            2, 3
//
//   The same for the other intervals, products and promotions alone:
//     128               hi 0 hi 1 P lo 0 lo 1 lo 2 lo 3 S hi 2 hi 3 hi 0' hi 1' P lo 0' ...
//      64 (K < 4096)    hi 0 hi 1 P lo 0 lo 1 lo 2 lo 3 S hi 2 hi 3 P hi 0' hi 1' P lo 0' ...
//      32 (K < 2048)    hi 0 P hi 1 P lo 0 lo 1 lo 2 lo 3 S hi 2 P hi 3 P hi 0' P hi 1' P lo 0' ...
//
// So hi products of 128, 64 or 32 of K are added up between promotions. The lo products are always
// those of a whole k-group, because they are 2^-11 times as large and their truncation matters
// less.
//
// ----- Why it is fast
//
// Conversion costs little beside the products: with both operands split beforehand, which a wrong
// kernel tried, the time was only 1% shorter. A tensor core idles while its warpgroup promotes or
// scales, so the second warpgroup starts half a k-group after the first, and fills these gaps. The
// epilogue of one tile overlaps with the loads of the next one. Clusters share the tiles of the
// last wave (stream_k.cuh).

#pragma once

#include <cstddef>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/gemm_fp16x3_arguments.cuh"
#include "linear/sm90/gemm_fp16x3_epilogue.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"

namespace kernels::sm90 {

// A block's shared memory. TMA and wgmma's swizzle need the k-tiles at multiples of 1024 bytes.
struct GemmMemory {
  uint8_t x[GemmFp16x3Config::kStages][GemmFp16x3Config::kXBytes];
  uint8_t weight[GemmFp16x3Config::kStages][GemmFp16x3Config::kWeightBytes];
  float4 staging[BlockConfig::kConsumerWarpgroups][GemmFp16x3Config::kSubtileBlocks][128];
  EpilogueInputs epilogue_inputs[2];  // of this work tile, and of the next
  Barriers<GemmFp16x3Config::kStages> barriers;
};
static_assert(sizeof(GemmMemory) <= 227 * 1024, "a block has no more shared memory");
static_assert(GemmFp16x3Config::kXBytes % 1024 == 0 && GemmFp16x3Config::kWeightBytes % 1024 == 0,
              "k-tiles begin at multiples of 1024 bytes");

// ------------------------------------------------------------------------------------- producer
// warp

// Copies the k-tiles of all work tiles into the stages, one after the other. All lanes of the
// producer warp call it; lane 0 copies. `base` is the address of the block's GemmMemory.
__device__ inline void run_producer(uint32_t base, const CUtensorMap& x_map,
                                    const CUtensorMap& weight_map, const GemmArguments& p) {
  using Config = GemmFp16x3Config;
  const uint32_t full = base + offsetof(GemmMemory, barriers.full);
  const uint32_t empty = base + offsetof(GemmMemory, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  // Each block loads half of the rows of x, into both blocks.
  const int rows_of_half = p.tiles.max_rows() / BlockConfig::kClusterSize;
  const uint32_t x = base + offsetof(GemmMemory, x) + rank * rows_of_half * Config::kRowBytes;
  // Both halves of x and the block's own weight arrive at the block's `full` barrier.
  const uint32_t bytes = p.tiles.max_rows() * Config::kRowBytes + Config::kWeightBytes;
  const uint32_t weight = base + offsetof(GemmMemory, weight);
  PipelineState<Config::kStages> state;
  for_each_work_tile(p, [&](const WorkTile& work, const Tile& tile) {
    if (threadIdx.x % 32 != 0) return;
    const int row = p.tiles.rows_of(tile).begin + rank * rows_of_half;
    const int weight_row = first_feature(tile, rank);
    const int begin = work.begin * Config::kTilesPerGroup;
    const int end = work.end * Config::kTilesPerGroup;
    for (int k_tile = begin; k_tile < end; ++k_tile) {
      const uint32_t arrived = full + 8 * state.stage;
      ptx::mbarrier_wait(empty + 8 * state.stage, state.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(arrived, bytes);
      ptx::copy_tensor_multicast(x + state.stage * Config::kXBytes, &x_map, 0, row, k_tile, arrived,
                                 BlockConfig::kBothBlocks);
      ptx::copy_tensor(weight + state.stage * Config::kWeightBytes, &weight_map,
                       k_tile * Config::kKTile, weight_row, arrived);
      state.advance();
    }
  });
}

// ------------------------------------------------------------------------------- consumer
// warpgroups

// The number of rows of x in a tile, as a type, so that functions can be overloaded on it.
template <int kRows>
using Rows = std::integral_constant<int, kRows>;

// A warp's 16 rows of the weight in a k-tile, split: operand A of the wgmma instructions, of which
// each takes 16 of K and four registers of hi or lo.
struct Fragments {
  uint32_t hi[GemmFp16x3Config::kK16PerTile][4];
  uint32_t lo[GemmFp16x3Config::kK16PerTile][4];
};

// A thread of a consumer warpgroup, and its part of a tile. Lane 4 * g + c has rows g and g + 8 of
// the warp's fragments, which are two neighbouring rows of the weight (fragment_row).
template <int kPromotionInterval>
struct Consumer {
  using Config = GemmFp16x3Config;
  using State = PipelineState<Config::kStages>;
  static_assert(kPromotionInterval == 32 || kPromotionInterval == 64 || kPromotionInterval == 128,
                "the three time lines at the top of this file");

  // Whether a promotion interval begins with hi 1, hi 3 and every other hi product but hi 2, to
  // which lo products have been added before.
  static constexpr bool kPromotesEachTile = kPromotionInterval == 32;
  // Whether one begins with hi 0 of the next k-group.
  static constexpr bool kPromotesEachHalf = kPromotionInterval <= 64;

  uint32_t base;          // address of the block's GemmMemory
  uint32_t remote_empty;  // address of the first `empty` barrier of block (lane % 2) of the cluster
  uint32_t weight;        // address of the lane's first vector of weight in stage 0
  uint64_t x_descriptor;  // of x in stage 0
  float scale[2];         // 2^exponent of the lane's two rows of the weight
  float accumulators[Config::kSums];
  float sums[Config::kSums];

  // A row of a k-tile of weight is 128 bytes: 8 vectors of 4 floats. TMA's swizzle puts vector v of
  // row n at place v ^ n % 8 of the row. The lane reads vectors c and 4 + c of its rows. This
  // function stores the address of vector c of the first row in stage 0.
  __device__ Consumer(uint32_t base, int lane, int row) : base(base) {
    const int c = lane % 4;
    weight = base + offsetof(GemmMemory, weight) + row * Config::kRowBytes + (c ^ row % 8) * 16;
    remote_empty = ptx::map_shared(base + offsetof(GemmMemory, barriers.empty),
                                   lane % BlockConfig::kClusterSize);
    x_descriptor = ptx::matrix_descriptor<Config::kRowBytes>(base + offsetof(GemmMemory, x));
  }

  // Waits for a stage, and converts the lane's part of its weight to fragments.
  //
  // Of 16 neighbours of K, lane c loads floats 4 c .. 4 c + 3 at once. wgmma wants columns 2 c and
  // 2 c + 1 in the fragment's first half and columns 8 + 2 c and 9 + 2 c in the second. The lane
  // puts its first two floats into the first half and the other two into the second:
  //
  //   column of the fragment    0  1 |  2  3 |  4  5 |  6  7 ||  8  9 | 10 11 | 12 13 | 14 15
  //   lane                      c=0  |  c=1  |  c=2  |  c=3  ||  c=0  |  c=1  |  c=2  |  c=3
  //   float (place along K)     0  1 |  4  5 |  8  9 | 12 13 ||  2  3 |  6  7 | 10 11 | 14 15
  //
  // So K is permuted, and the product is right because x is stored in the same order (split.cuh).
  __device__ void convert(Fragments& f, const State& at) const {
    ptx::mbarrier_wait(base + offsetof(GemmMemory, barriers.full) + 8 * at.stage, at.parity);
    const uint32_t stage = weight + at.stage * Config::kWeightBytes;
#pragma unroll
    for (int s = 0; s < Config::kK16PerTile; ++s) {  // 16 of K: 64 bytes of a row
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The first row's number is even and the second is the next one: its place differs in bit
        // 0.
        const uint32_t address = (stage ^ (s * 64 | r * 16)) + r * Config::kRowBytes;
        const float4 v = ptx::load_shared_four(address);
        const float scaled[4] = {v.x * scale[r], v.y * scale[r], v.z * scale[r], v.w * scale[r]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int reg = 2 * half + r;
          fp16x3::split_pair(scaled[2 * half], scaled[2 * half + 1], &f.hi[s][reg], &f.lo[s][reg]);
        }
      }
    }
  }

  // The wgmma descriptor of x in a stage. A descriptor's low bits are an address / 16.
  __device__ uint64_t descriptor(const State& at) const {
    return x_descriptor + at.stage * (Config::kXBytes >> 4);
  }

  // Starts the lo products of a k-tile: x_hi w_lo + x_lo w_hi, which is 2^11 times too large.
  // `accumulates`: adds them to the accumulators instead of overwriting these.
  template <int kRows>
  __device__ void multiply_lo(Rows<kRows> rows, const Fragments& f, const State& at,
                              bool accumulates) {
    const uint64_t x_hi = descriptor(at);
    const uint64_t x_lo = x_hi + Config::kDescriptorLo;
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < Config::kK16PerTile; ++s) {
      const uint64_t offset = s * ptx::kDescriptorK16;
      ptx::wgmma(rows, accumulators, f.lo[s], x_hi + offset, accumulates || s > 0);
      ptx::wgmma(rows, accumulators, f.hi[s], x_lo + offset, true);
    }
    ptx::wgmma_commit_group();
  }

  // Starts the hi product of a k-tile.
  template <int kRows>
  __device__ void multiply_hi(Rows<kRows> rows, const Fragments& f, const State& at,
                              bool accumulates) {
    const uint64_t x_hi = descriptor(at);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < Config::kK16PerTile; ++s) {
      const uint64_t offset = s * ptx::kDescriptorK16;
      ptx::wgmma(rows, accumulators, f.hi[s], x_hi + offset, accumulates || s > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Promotes, if a promotion interval begins here, then starts the hi product of a k-tile.
  template <bool kBeginsInterval, int kRows>
  __device__ void multiply_next_hi(Rows<kRows> rows, const Fragments& f, const State& at) {
    if constexpr (kBeginsInterval) promote(rows);
    multiply_hi(rows, f, at, /*accumulates=*/!kBeginsInterval);
  }

  // Waits for all products, and adds the accumulators to the sums.
  template <int kRows>
  __device__ void promote(Rows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) sums[j] += accumulators[j];
  }

  // Waits for all products, and gives the sums of lo products their true size.
  template <int kRows>
  __device__ void scale_lo_products(Rows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) accumulators[j] *= 1 / fp16x3::kLoScale;
  }

  // Tells the producers of both blocks that this warp has read a stage.
  __device__ void release(const State& at) const {
    if constexpr (kPromotionInterval == 32) {
      // This kernel has no register left for remote_empty.
      release_stage(base + offsetof(GemmMemory, barriers.empty) + 8 * at.stage);
    } else if (threadIdx.x % 32 < BlockConfig::kClusterSize) {
      ptx::mbarrier_arrive_mapped(remote_empty + 8 * at.stage);
    }
  }

  // The mainloop: adds the products of `k_groups` k-groups to the sums. The stages begin at *state,
  // which is advanced. `starts_second`: tells the second warpgroup, in the middle of the first
  // k-group, to start. The time lines at the top of this file show the order.
  template <int kRows>
  __device__ void multiply(Rows<kRows> rows, int k_groups, bool starts_second, State* state) {
    Fragments even;  // of k-tiles 0 and 2
    Fragments odd;   // of k-tiles 1 and 3
    State tile0 = *state;
    State tile1 = tile0.next();

    // hi 0 and hi 1 of the first k-group
    convert(even, tile0);
    multiply_hi(rows, even, tile0, /*accumulates=*/false);
    convert(odd, tile1);
    multiply_next_hi<kPromotesEachTile>(rows, odd, tile1);

    for (int k_group = 0;;) {
      promote(rows);

      // lo 0 to lo 3
      const State tile2 = tile1.next();
      const State tile3 = tile2.next();
      multiply_lo(rows, even, tile0, /*accumulates=*/false);
      multiply_lo(rows, odd, tile1, true);
      ptx::wgmma_wait_group<1>();  // lo 0 has ended, so `even` may change
      convert(even, tile2);
      multiply_lo(rows, even, tile2, true);
      if (k_group == 0 && starts_second) {
        ptx::barrier_arrive(Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
      }
      ptx::wgmma_wait_group<1>();  // lo 1 has ended
      release(tile0);
      release(tile1);
      convert(odd, tile3);
      multiply_lo(rows, odd, tile3, true);
      scale_lo_products(rows);

      // hi 2 and hi 3, on top of the lo products
      multiply_hi(rows, even, tile2, /*accumulates=*/true);
      multiply_next_hi<kPromotesEachTile>(rows, odd, tile3);
      tile0 = tile3.next();
      tile1 = tile0.next();
      ++k_group;
      if (k_group == k_groups) {
        promote(rows);
        release(tile2);
        release(tile3);
        break;
      }

      // hi 0 and hi 1 of the next k-group
      ptx::wgmma_wait_group<1>();  // hi 2 has ended, so `even` may change
      convert(even, tile0);
      multiply_next_hi<kPromotesEachHalf>(rows, even, tile0);
      ptx::wgmma_wait_group<1>();  // hi 3 has ended
      release(tile2);
      release(tile3);
      convert(odd, tile1);
      multiply_next_hi<kPromotesEachTile>(rows, odd, tile1);
    }
    *state = tile0;
  }

  // The same, for a tile with a number of rows of x that is known at run time.
  __device__ void multiply(int rows, int k_groups, bool starts_second, State* state) {
    if (rows == Config::kSmallRows) {
      multiply(Rows<Config::kSmallRows>{}, k_groups, starts_second, state);
    } else if (rows == Config::kMediumRows) {
      multiply(Rows<Config::kMediumRows>{}, k_groups, starts_second, state);
    } else if (kPromotionInterval == 128 && rows == Config::kNarrowRows) {  // K >= kLongK alone
      multiply(Rows<Config::kNarrowRows>{}, k_groups, starts_second, state);
    } else {
      multiply(Rows<Config::kWideRows>{}, k_groups, starts_second, state);
    }
  }
};

// Multiplies and stores all work tiles of the cluster: this block's features, of which each of the
// two warpgroups has 64.
template <int kPromotionInterval>
__device__ __forceinline__ void run_consumer(const GemmArguments& p, uint32_t base,
                                             GemmMemory& shared, int warpgroup) {
  using Config = GemmFp16x3Config;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int first_row_of_warp = threadIdx.x / 32 * Config::kWarpWeightRows;
  const int first_row_of_lane = first_row_of_warp + fragment_row(g, 0);
  Consumer<kPromotionInterval> consumer(base, lane, first_row_of_lane);
  PipelineState<Config::kStages> state;
  int work_tiles = 0;
  for (int i = 0;; ++i) {
    const WorkTile work = p.schedule.uniform_work_tile(i);
    if (!work.exists()) break;
    const Tile tile = p.tiles.find(work.tile);
    if (!is_computed(p, tile.weight)) continue;

    // The scales of the lane's rows of the weight. Rows past N have those of the last row.
    const int first_row = first_feature(tile, ptx::cluster_ctarank()) + first_row_of_warp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = min(first_row + fragment_row(g, r), p.epilogue.n - 1);
      consumer.scale[r] = fp16x3::power_of_two(__ldcg(p.weight.exponent + n));
    }

    // mainloop. The accumulators' zeros are overwritten by the first product. They are there for
    // the compiler: wgmma's asm statement reads the accumulators, so that without the zeros the
    // last tile's would have to stay in registers during its epilogue.
#pragma unroll
    for (int j = 0; j < Config::kSums; ++j) {
      consumer.sums[j] = 0;
      consumer.accumulators[j] = 0;
    }
    if (warpgroup == 1) {
      ptx::barrier_sync(Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
    }
    const int rows = p.tiles.rows_of(tile).size;
    const bool starts_second = warpgroup == 0;
    consumer.multiply(rows, work.end - work.begin, starts_second, &state);

    // epilogue
    sync_with_loader(warpgroup);
    if (!p.schedule.finishes(work)) {
      store_partial_sums(p, rows, consumer.sums);
    } else {
      const bool is_shared = work.begin > 0;
      if (is_shared) add_partial_sums(p, work.tile, rows, consumer.sums);
      store_results(p, shared.epilogue_inputs[work_tiles % 2], shared.staging[warpgroup],
                    consumer.sums);
    }
    ++work_tiles;
  }
}

// ---------------------------------------------------------------------------------------- the
// kernel

// The second run's preparation: chooses new exponents for the block's rows of weight that
// overflowed fp16, by their largest elements. A warp takes a row at a time. Each block does this
// for the rows that it multiplies; blocks with the same rows write the same values.
__device__ inline void rescale_overflowed_rows(const GemmArguments& p) {
  using Config = GemmFp16x3Config;
  constexpr int kWarps = BlockConfig::kThreads / 32;
  for_each_work_tile(p, [&](const WorkTile&, const Tile& tile) {
    const int first_row = first_feature(tile, ptx::cluster_ctarank());
    for (int i = threadIdx.x / 32; i < Config::kWeightRows; i += kWarps) {
      const int row = first_row + i;
      if (row >= p.epilogue.n || __ldcg(p.weight.state + row) != fp16x3::kOverflowed) continue;
      const float largest = largest_of_row(p.weight.from + row * p.weight.row_stride, p.k, 1);
      if (threadIdx.x % 32 != 0) continue;
      const bool is_finite = largest < INFINITY;
      // As for x, the largest element comes into [2^14, 2^15).
      p.weight.exponent[row] = is_finite ? min(14 - ilogbf(largest), kMostOfPairs) : 0;
      if (is_finite) continue;
      // The kernel after this one computes the results of rows with infinity or NaN.
      p.weight.state[row] = fp16x3::kNonfinite;
      *p.has_nonfinite = 1;
    }
  });
  __syncthreads();
}

// x_map describes x, split and k-tiled, in boxes of half a tile's rows and a k-tile; weight_map the
// weight in boxes of kWeightRows rows and a k-tile.
template <int kPromotionInterval>
__global__ void KERNELS_CLUSTER __launch_bounds__(BlockConfig::kThreads, 1)
    gemm_fp16x3_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ GemmArguments p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Config = GemmFp16x3Config;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  GemmMemory& shared = *reinterpret_cast<GemmMemory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  // Every lane has the same value; that the compiler knows it is worth 1% of an H200's time.
  const int warpgroup = ptx::uniform(threadIdx.x / 128);
  start_next_kernel();
  if (p.is_second_run) {
    wait_for_previous_kernel();
    if (__ldcg(p.has_overflowed) == 0) return;  // in both blocks of the cluster
  }
  const bool is_first_of_producer = threadIdx.x == BlockConfig::kConsumerThreads;
  if (is_first_of_producer) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<Config::kStages>(base + offsetof(GemmMemory, barriers.full),
                                 base + offsetof(GemmMemory, barriers.empty));
  wait_for_previous_kernel();
  if (p.is_second_run) rescale_overflowed_rows(p);
  const bool is_producer = warpgroup == BlockConfig::kConsumerWarpgroups;
  if (is_producer) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int warp = threadIdx.x / 32 - BlockConfig::kConsumerWarps;
    if (warp == 0) run_producer(base, x_map, weight_map, p);
    if (warp == 1) load_epilogue_inputs(p, shared.epilogue_inputs);
    // Warps 2 and 3 have nothing to do.
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    run_consumer<kPromotionInterval>(p, base, shared, warpgroup);
  }
  // A block stays until the other one no longer reads its barriers or copies to its memory.
  ptx::cluster_sync();
#endif
}

}  // namespace kernels::sm90
