// The mainloop of the fp16x3 GEMM (kernel.cuh): a producer warp loads k-tiles to the stages of
// shared memory, and consumer warpgroups split the weight and multiply.
//
// The k-tiles 0 to 3 are a k-group, and 0' to 3' the next one. The words for products and steps:
//
//   hi 0      the hi product of k-tile 0, x_hi w_hi (asynchronous, on the tensor cores)
//   lo 0      both lo products of k-tile 0, x_hi w_lo + x_lo w_hi
//   c 0       conversion of k-tile 0 of the weight: scale, split (by the warpgroup's threads)
//   * 2^-11   accumulators *= 2^-11, which gives the lo products their true size
//   promote   sums += accumulators; the next product overwrites the accumulators
//
// The table has the steps of a consumer warpgroup, for a promotion interval of 128. Before a step,
// the warpgroup waits for products, and may free the stages of a pair of k-tiles. The products "in
// flight" run during the step. After it, the next products are started. The last column names the
// promotion that adds them to the sums: A, B and C are lines of a picture in docs/SPLIT.md, step 4,
// which explains the order.
//
//   function              step        waits for      frees   in flight   then starts   promoted in
//
//   start_first_k_group   c 0         -              -       -           hi 0          A
//                         c 1         -              -       hi 0        hi 1          A
//
//   finish_k_group        promote A   hi 0, hi 1     -       -           lo 0, lo 1    B
//                         c 2         lo 0           -       lo 1        lo 2          B
//                         c 3         lo 1           0, 1    lo 2        lo 3          B
//                         * 2^-11     lo 2, lo 3     -       -           hi 2, hi 3    B
//
//   start_next_k_group    c 0'        hi 2           -       hi 3        hi 0'         B
//                         c 1'        hi 3           2, 3    hi 0'       hi 1'         B
//
//   finish_k_group        promote B   hi 0', hi 1'   -       -           lo 0', lo 1'  C
//                         ...
//
// The registers have room for two converted k-tiles. So c 2 overwrites k-tile 0, and first waits
// for its last product, lo 0. Only the newest product is then in flight (wgmma_wait_group<1>).
//
// Shorter intervals have further promotions of hi products. (Lo products are always added up over a
// k-group: they are so small that their truncation hardly matters.) A constant of Fp16x3Consumer
// turns each of them on:
//
//   constant              true for intervals   promotes before
//   kPromotesEachPair     64 and 32            hi 0'
//   kPromotesEachKTile    32                   hi 1, hi 3 and hi 1'

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_fp16x3/arguments.cuh"
#include "linear/sm90/gemm_fp16x3/config.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/k_order.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// ----- the producer warp

// Copies the k-tiles of all work tiles (stream_k.cuh) into the stages, each as soon as its stage is
// empty. All lanes of the producer warp call it; lane 0 copies. `shared_base` is the shared-memory
// address of the block's Fp16x3SharedMemory.
__device__ inline void run_producer(const Fp16x3Pipeline& pipeline, uint32_t shared_base,
                                    const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                    const Fp16x3Arguments& args) {
  const int rank = ptx::cluster_ctarank();
  // Each block loads half of the rows of x, and writes them to both blocks.
  const int rows_of_block = args.tiles.max_rows() / BlockConfig::kClusterSize;
  const uint32_t x_address = shared_base + offsetof(Fp16x3SharedMemory, x) +
                             rank * rows_of_block * Fp16x3Config::kRowBytes;
  // A stage's `full` barrier waits for x, from both blocks, and the block's own weight.
  const uint32_t bytes =
      args.tiles.max_rows() * Fp16x3Config::kRowBytes + Fp16x3Config::kWeightBytes;
  const uint32_t weight_address = shared_base + offsetof(Fp16x3SharedMemory, weight);
  Fp16x3Pipeline::State state;
  for_each_work_tile(args, [&](const WorkTile& work, const TilePosition& tile) {
    if (threadIdx.x % 32 != 0) return;
    const int m = args.tiles.rows_of(tile).begin + rank * rows_of_block;
    const int n = first_n_of_block(tile, rank);
    const int begin = work.begin * Fp16x3Config::kKTilesPerKGroup;
    const int end = work.end * Fp16x3Config::kKTilesPerKGroup;
    for (int k_tile = begin; k_tile < end; ++k_tile) {
      const uint32_t full_barrier = pipeline.full_barrier(state);
      pipeline.producer_acquire(state);
      ptx::mbarrier_arrive_expect_tx(full_barrier, bytes);
      // x is stored as [k-tile][row][64 fp16], and TMA takes the coordinates from the last one to
      // the first one: element 0, row, k-tile. The weight is [row][K].
      ptx::copy_tensor_multicast(x_address + state.index * Fp16x3Config::kXBytes, &x_map, 0, m,
                                 k_tile, full_barrier, BlockConfig::kBothBlocks);
      ptx::copy_tensor(weight_address + state.index * Fp16x3Config::kWeightBytes, &weight_map,
                       k_tile * Fp16x3Config::kKTileDepth, n, full_barrier);
      state.advance();
    }
  });
}

// ----- the consumer warpgroups

// The weight in a stage. A row is 128 bytes of K: eight vectors of 4 floats. TMA's swizzle puts
// vector v of row n at place v ^ (n % 8) of the row. Rows 2 and 3, for example:
//
//   place    0   1   2   3   4   5   6   7
//   row 2    v2  v3  v0  v1  v6  v7  v4  v5
//   row 3    v3  v2  v1  v0  v7  v6  v5  v4
//
// A thread loads two vectors of each of two rows, n (an even number) and n + 1. With c = lane % 4,
// they are vector c, which is in the first 16 of K, and vector c + 4, in the other 16. So the
// addresses of all four follow from that of the first. (Stages begin at multiples of 1024 bytes, so
// bits 4 to 6 of an address are the place.) With c = 1, for example:
//
//   row 2    v1 at place 3, v5 at place 7    from v1 to v5, bit 2 of the place changes
//   row 3    v1 at place 2, v5 at place 6    from row 2 to row 3, bit 0 of the place changes
__host__ __device__ constexpr int swizzled_offset(int n, int vector) {
  const int place = vector ^ (n % 8);
  return n * Fp16x3Config::kRowBytes + place * kVectorBytes;
}

static_assert(Fp16x3Config::kWgmmasPerKTile == 2, "k16 is 0 or 1");

// Returns the address of vector c + 4 * k16 of row n + row_of_two, if first_address is that of
// vector c of row n. k16 is the first (0) or second (1) 16 of K, and row_of_two is 0 or 1.
__host__ __device__ constexpr uint32_t swizzled_address(uint32_t first_address, int k16,
                                                        int row_of_two) {
  constexpr uint32_t kBit2OfPlace = 4 * kVectorBytes;
  constexpr uint32_t kBit0OfPlace = 1 * kVectorBytes;
  const uint32_t in_row_n = k16 == 0 ? first_address : first_address ^ kBit2OfPlace;
  if (row_of_two == 0) return in_row_n;
  return (in_row_n ^ kBit0OfPlace) + Fp16x3Config::kRowBytes;
}

constexpr bool finds_all_vectors() {
  for (int n = 0; n < Fp16x3Config::kBlockWeightRows; n += 2) {
    for (int c = 0; c < 4; ++c) {
      for (int k16 = 0; k16 < Fp16x3Config::kWgmmasPerKTile; ++k16) {
        for (int row_of_two = 0; row_of_two < 2; ++row_of_two) {
          const uint32_t first_address = swizzled_offset(n, c);
          const uint32_t expected = swizzled_offset(n + row_of_two, c + 4 * k16);
          if (swizzled_address(first_address, k16, row_of_two) != expected) return false;
        }
      }
    }
  }
  return true;
}
static_assert(finds_all_vectors(), "k16 changes bit 2 of the place, row_of_two changes bit 0");

// A tile's number of rows of x as a type. ptx::wgmma is overloaded for each of these types.
template <int kRows>
using TileRows = std::integral_constant<int, kRows>;

// A lane's elements of the weight in a k-tile, after the split, as operand A of wgmma instructions.
// Each of these takes 16 of K: four registers with two fp16 each.
struct WeightFragments {
  uint32_t hi[Fp16x3Config::kWgmmasPerKTile][4];
  uint32_t lo[Fp16x3Config::kWgmmasPerKTile][4];
};

// In each work tile, the second consumer warpgroup starts during the first one's first k-group
// (why: kernel.cuh). It waits until the first one lets it start.
__device__ __forceinline__ void wait_until_second_may_start() {
  ptx::barrier_sync(Fp16x3Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
}

// The first warpgroup cannot arrive again before the second has started, because it would need
// stages that the second one has not released yet.
__device__ __forceinline__ void let_second_start() {
  ptx::barrier_arrive(Fp16x3Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
}

// A consumer warpgroup, as one of its threads sees it. The accumulators and sums are fragments
// (fragment.cuh). The thread, lane 4 * g + c of its warp, has rows g and g + 8 of the warp's 16
// rows of A, which are two neighbouring rows of the weight (weight_row_order.cuh).
template <int kPromotionInterval>
struct Fp16x3Consumer {
  using State = Fp16x3Pipeline::State;
  static_assert(kPromotionInterval == 32 || kPromotionInterval == 64 || kPromotionInterval == 128,
                "the mainloop has the steps of these intervals only");

  // The further promotions of short intervals; see the top of this file.
  static constexpr bool kPromotesEachPair = kPromotionInterval <= 64;
  static constexpr bool kPromotesEachKTile = kPromotionInterval == 32;

  Fp16x3Pipeline pipeline;
  uint32_t mapped_empty_barriers;  // lane 0: pipeline.empty_barriers of block 0; lane 1: of block 1

  // Both are for stage 0.
  uint32_t weight_address;  // of vector c of the thread's first row of weight, in shared memory
  uint64_t x_descriptor;    // of x, for wgmma

  float weight_scale[2];  // 2^exponent of the thread's two rows of weight
  float accumulators[Fp16x3Config::kSums];
  float sums[Fp16x3Config::kSums];

  // `n_in_block` is the first of the thread's two rows of weight, an even number.
  __device__ Fp16x3Consumer(const Fp16x3Pipeline& pipeline, uint32_t shared_base, int lane,
                            int n_in_block)
      : pipeline(pipeline) {
    const int c = FragmentLane(lane).c;
    weight_address =
        shared_base + offsetof(Fp16x3SharedMemory, weight) + swizzled_offset(n_in_block, c);
    mapped_empty_barriers =
        ptx::map_shared(pipeline.empty_barriers, lane % BlockConfig::kClusterSize);
    x_descriptor = ptx::matrix_descriptor<Fp16x3Config::kRowBytes>(shared_base +
                                                                   offsetof(Fp16x3SharedMemory, x));
  }

  // Begins a work tile. The first product overwrites the accumulators, but wgmma's asm statement
  // names them as inputs. Without the zeros, the compiler would therefore keep the previous tile's
  // accumulators in registers throughout that tile's epilogue.
  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < Fp16x3Config::kSums; ++j) {
      sums[j] = 0;
      accumulators[j] = 0;
    }
  }

  // Waits for a stage, and converts the thread's elements of its weight to fragments. The thread
  // loads vector c of each 16 of K. In the K order of split/k_order.cuh, the four elements of this
  // vector are those that wgmma takes from the thread.
  __device__ void convert(WeightFragments& fragments, const State& state) const {
    static_assert(split::element_at_place(0) == 0 && split::element_at_place(8) == 2,
                  "a thread's elements 0 and 1 are at places 0 to 7, 2 and 3 at 8 to 15");
    pipeline.consumer_wait(state);
    const uint32_t first_address = weight_address + state.index * Fp16x3Config::kWeightBytes;
#pragma unroll
    for (int k16 = 0; k16 < Fp16x3Config::kWgmmasPerKTile; ++k16) {  // 16 of K
#pragma unroll
      for (int row_of_two = 0; row_of_two < 2; ++row_of_two) {  // the thread's rows
        const float4 v = ptx::load_shared_float4(swizzled_address(first_address, k16, row_of_two));
        const float scale = weight_scale[row_of_two];
        const float scaled[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {  // places 0 to 7, then 8 to 15
          const int i = 2 * pair;
          const int reg = 2 * pair + row_of_two;  // wgmma's order of registers
          split::split_pair(scaled[i], scaled[i + 1], &fragments.hi[k16][reg],
                            &fragments.lo[k16][reg]);
        }
      }
    }
  }

  // The wgmma descriptor of x in a stage. Adding to a descriptor moves its address.
  __device__ uint64_t descriptor(const State& state) const {
    return x_descriptor + state.index * ptx::descriptor_units(Fp16x3Config::kXBytes);
  }

  // Starts the lo products of a k-tile, without the factor 2^-11. If `accumulates`, they are added
  // to the accumulators; else they overwrite them.
  template <int kRows>
  __device__ void multiply_lo(TileRows<kRows> rows, const WeightFragments& fragments,
                              const State& state, bool accumulates) {
    const uint64_t x_hi = descriptor(state);
    const uint64_t x_lo = x_hi + ptx::descriptor_units(Fp16x3Config::kHiBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < Fp16x3Config::kWgmmasPerKTile; ++k16) {
      const uint64_t offset = k16 * ptx::kDescriptorStepK;
      ptx::wgmma(rows, accumulators, fragments.lo[k16], x_hi + offset, accumulates || k16 > 0);
      ptx::wgmma(rows, accumulators, fragments.hi[k16], x_lo + offset, true);
    }
    ptx::wgmma_commit_group();
  }

  // Starts the hi product of a k-tile. `accumulates` is as in multiply_lo.
  template <int kRows>
  __device__ void multiply_hi(TileRows<kRows> rows, const WeightFragments& fragments,
                              const State& state, bool accumulates) {
    const uint64_t x_hi = descriptor(state);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < Fp16x3Config::kWgmmasPerKTile; ++k16) {
      const uint64_t offset = k16 * ptx::kDescriptorStepK;
      ptx::wgmma(rows, accumulators, fragments.hi[k16], x_hi + offset, accumulates || k16 > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts a hi product that follows another one. If kPromotesFirst, that one is promoted first.
  template <bool kPromotesFirst, int kRows>
  __device__ void multiply_next_hi(TileRows<kRows> rows, const WeightFragments& fragments,
                                   const State& state) {
    if constexpr (kPromotesFirst) promote(rows);
    multiply_hi(rows, fragments, state, /*accumulates=*/!kPromotesFirst);
  }

  template <int kRows>
  __device__ void promote(TileRows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) sums[j] += accumulators[j];
  }

  template <int kRows>
  __device__ void scale_lo_products(TileRows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) accumulators[j] *= 1 / split::kLoScale;
  }

  // Does what consumer_release does. The kernels for intervals of 64 and 128 compute the address
  // only once; the one for 32 has no register left for it.
  __device__ void release(const State& state) const {
    if constexpr (kPromotionInterval == 32) {
      pipeline.consumer_release(state);
    } else if (threadIdx.x % 32 < BlockConfig::kClusterSize) {
      ptx::mbarrier_arrive_mapped(barrier_at(mapped_empty_barriers, state.index));
    }
  }

  // The stages of two neighbouring k-tiles of a k-group: 0 and 1, or 2 and 3.
  struct StagePair {
    State even;
    State odd;

    __device__ explicit StagePair(const State& first) : even(first), odd(first.next()) {}

    __device__ StagePair next() const { return StagePair(odd.next()); }
  };

  // The converted weight of such a pair, or of one k-tile of it and one of the pair before.
  struct WeightPair {
    WeightFragments even;
    WeightFragments odd;
  };

  __device__ void release(const StagePair& stages) const {
    release(stages.even);
    release(stages.odd);
  }

  // ----- The mainloop of a work tile
  //
  // Comments at the ends of lines name the steps and products that the top of this file shows.

  // Starts a work tile's first k-group: its hi 0 and hi 1.
  template <int kRows>
  __device__ __forceinline__ void start_first_k_group(TileRows<kRows> rows, WeightPair& weight,
                                                      const StagePair& first) {
    convert(weight.even, first.even);                                   // c 0
    multiply_hi(rows, weight.even, first.even, /*accumulates=*/false);  // hi 0
    convert(weight.odd, first.odd);                                     // c 1
    multiply_next_hi<kPromotesEachKTile>(rows, weight.odd, first.odd);  // hi 1
  }

  // Promotes, and multiplies the rest of a k-group. `first` has k-tiles 0 and 1, already converted
  // in `weight`. Releases both stages.
  template <int kRows>
  __device__ __forceinline__ void finish_k_group(TileRows<kRows> rows, WeightPair& weight,
                                                 const StagePair& first, int k_group,
                                                 bool is_first_warpgroup) {
    promote(rows);
    const StagePair second = first.next();  // k-tiles 2 and 3

    multiply_lo(rows, weight.even, first.even, /*accumulates=*/false);  // lo 0
    multiply_lo(rows, weight.odd, first.odd, /*accumulates=*/true);     // lo 1
    ptx::wgmma_wait_group<1>();                                         // lo 1 is in flight
    convert(weight.even, second.even);                                  // c 2
    multiply_lo(rows, weight.even, second.even, /*accumulates=*/true);  // lo 2
    const bool lets_second_start = k_group == 0 && is_first_warpgroup;
    if (lets_second_start) let_second_start();
    ptx::wgmma_wait_group<1>();  // lo 2 is in flight
    release(first);
    convert(weight.odd, second.odd);                                     // c 3
    multiply_lo(rows, weight.odd, second.odd, /*accumulates=*/true);     // lo 3
    scale_lo_products(rows);                                             // * 2^-11
    multiply_hi(rows, weight.even, second.even, /*accumulates=*/true);   // hi 2
    multiply_next_hi<kPromotesEachKTile>(rows, weight.odd, second.odd);  // hi 3
  }

  // Starts the next k-group while hi 3 of this one runs. `second` has this k-group's k-tiles 2 and
  // 3, whose stages it releases. `next` has the next k-group's k-tiles 0 and 1.
  template <int kRows>
  __device__ __forceinline__ void start_next_k_group(TileRows<kRows> rows, WeightPair& weight,
                                                     const StagePair& second,
                                                     const StagePair& next) {
    ptx::wgmma_wait_group<1>();                                         // hi 3 is in flight
    convert(weight.even, next.even);                                    // c 0'
    multiply_next_hi<kPromotesEachPair>(rows, weight.even, next.even);  // hi 0'
    ptx::wgmma_wait_group<1>();                                         // hi 0' is in flight
    release(second);
    convert(weight.odd, next.odd);                                     // c 1'
    multiply_next_hi<kPromotesEachKTile>(rows, weight.odd, next.odd);  // hi 1'
  }

  // Adds all products of a work tile with `k_groups` k-groups to the sums. *state is for the first
  // k-tile, and afterwards for the k-tile after the last one.
  template <int kRows>
  __device__ void run_mainloop(TileRows<kRows> rows, int k_groups, bool is_first_warpgroup,
                               State* state) {
    WeightPair weight;
    StagePair first(*state);  // k-tiles 0 and 1 of the k-group
    start_first_k_group(rows, weight, first);
    for (int k_group = 0;;) {
      finish_k_group(rows, weight, first, k_group, is_first_warpgroup);
      const StagePair second = first.next();  // k-tiles 2 and 3
      first = second.next();                  // k-tiles 0 and 1 of the next k-group
      ++k_group;
      if (k_group == k_groups) {
        promote(rows);
        release(second);
        break;
      }
      start_next_k_group(rows, weight, second, first);
    }
    *state = first.even;
  }

  // Runs the mainloop for a number of rows that is known only at run time.
  __device__ void run_mainloop(int rows, int k_groups, bool is_first_warpgroup, State* state) {
    if (rows == Fp16x3Config::kRows64) {
      run_mainloop(TileRows<Fp16x3Config::kRows64>{}, k_groups, is_first_warpgroup, state);
    } else if (rows == Fp16x3Config::kRows128) {
      run_mainloop(TileRows<Fp16x3Config::kRows128>{}, k_groups, is_first_warpgroup, state);
    } else if (kPromotionInterval == 128 && rows == Fp16x3Config::kRows160) {
      // Shorter intervals have no tiles of 160 rows (Fp16x3Config), and need no code for them.
      run_mainloop(TileRows<Fp16x3Config::kRows160>{}, k_groups, is_first_warpgroup, state);
    } else {
      run_mainloop(TileRows<Fp16x3Config::kLargestRows>{}, k_groups, is_first_warpgroup, state);
    }
  }
};

}  // namespace kernels::sm90::gemm_fp16x3
