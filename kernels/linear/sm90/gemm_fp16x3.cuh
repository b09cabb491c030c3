// The float32 GEMM on Hopper if torch's float32 matmul precision is "highest":
// out [M, N] = x [M, K] weight [N, K]^T, with the accuracy of a float32 product, by three fp16
// tensor-core products (fp16x3).
//
//   x       split by the kernel before this one (split_x.cuh): each row is multiplied by a power of
//           two, and a scaled element is then hi + lo / 2^11, where hi and lo are fp16
//   weight  float32; this kernel scales and splits it in registers, so that no separate pass has to
//           read it and write its halves to memory
//   out     float32, after bias, ReLU and division (gemm_fp16x3_epilogue.cuh)
//
// launch_fp16x3.cuh launches this kernel. docs/SPLIT.md proves the error bound.
//
// ----- The arithmetic
//
//   x w  =  x_hi w_hi   +   (x_hi w_lo + x_lo w_hi) / 2^11       x_lo w_lo / 2^22 is left out
//           hi product       lo products
//
// A tensor core truncates the sum whenever it adds to an accumulator. Two measures keep the error
// within the bound. First, lo products are added up before hi products: on top of a large sum, they
// would lose the very bits for which they are computed. Second, accumulators are promoted after a
// short interval of K, the promotion interval: they are added, rounded to nearest, to float32 sums
// in other registers, and the next product overwrites them.
//
// ----- The pipeline
//
// A cluster of two blocks computes a tile: 256 columns (rows of the weight), 128 in each block, and
// up to 176 rows of x, which both blocks need. K goes through shared memory in k-tiles of 32. There
// are five stages, each for one k-tile.
//
//   global memory               a stage (shared memory)      a consumer warpgroup
//
//   weight [128, 32] ---TMA---> weight [128, 32] ----------> loads its 64 rows, scales and splits
//     float32                     float32                    them: hi | lo, in registers
//                                                                             |
//                                                                             | operand A
//   x [176, 32]                                              operand B        v
//     hi | lo ----------TMA---> x [176, 32] hi | lo ------------------------> wgmma
//     each block loads half                                                   |
//     of it into both blocks                                                  v
//                                                            accumulators [64, 176], registers
//                                                                             | promotion
//                                                                             v
//                                                            sums [64, 176], registers
//
// Warpgroups 0 and 1 are the consumers. Warpgroup 2 has the producer warp, which starts the TMA
// copies, and the loader warp, which loads what the epilogue needs.
//
// ----- The mainloop
//
// The mainloop takes K in k-groups of four k-tiles, 128 of K. In these pictures, time runs to the
// right. 0 to 3 are the k-tiles of a k-group, 0' and 1' are k-tiles of the next k-group:
//
//   hi 0   the hi product of k-tile 0 (asynchronous, on the tensor cores)
//   lo 0   both lo products of k-tile 0
//   c 0    conversion of k-tile 0 of the weight: scale, split (by the warpgroup's threads)
//   P      promotion: sums += accumulators
//   S      accumulators *= 2^-11, which gives the lo products their true size
//
// For a promotion interval of 128:
//
//   tensor cores       hi 0 hi 1 P lo 0 lo 1 lo 2 lo 3 S hi 2 hi 3 hi 0' hi 1' P lo 0' ...
//   conversion    c 0  c 1              c 2  c 3              c 0' c 1'
//   freed stages                             0, 1                  2, 3
//
// A warpgroup converts a k-tile while the tensor cores compute products of earlier k-tiles. It has
// registers for the fragments of two k-tiles, so c 2 overwrites the fragments of k-tile 0 when lo 0
// has ended. A stage of x is freed when its last product has ended: lo 0 and lo 1 for k-tiles 0 and
// 1, hi 2 and hi 3 for k-tiles 2 and 3.
//
// The three promotion intervals differ only in the promotions:
//
//   128   hi 0   hi 1   P lo 0 lo 1 lo 2 lo 3 S hi 2   hi 3   hi 0'   hi 1' P lo 0' ...
//    64   hi 0   hi 1   P lo 0 lo 1 lo 2 lo 3 S hi 2   hi 3 P hi 0'   hi 1' P lo 0' ...
//    32   hi 0 P hi 1   P lo 0 lo 1 lo 2 lo 3 S hi 2 P hi 3 P hi 0' P hi 1' P lo 0' ...
//
// So at most 128, 64 or 32 of K of hi products are added up between promotions. The lo products of
// a whole k-group always are: they are so small that their truncation hardly matters.
//
// ----- Why it is fast
//
// - Conversion is hidden behind the products. An experiment that read both operands from shared
//   memory without converting the weight (with wrong results) saved only 1% of the time.
// - The second warpgroup starts half a k-group after the first. So while one promotes or scales,
//   and has no product in flight, the other one's products keep the tensor cores busy.
// - The producer loads the next tile during the epilogue.
// - Clusters share the tiles of the last wave along K (stream_k.cuh).

#pragma once

#include <cstddef>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/fp16x3/wgmma_order.cuh"
#include "linear/sm90/gemm_fp16x3_arguments.cuh"
#include "linear/sm90/gemm_fp16x3_epilogue.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"

namespace kernels::sm90 {

// A block's shared memory.
struct GemmMemory {
  uint8_t x[GemmFp16x3Config::kStages][GemmFp16x3Config::kXBytes];
  uint8_t weight[GemmFp16x3Config::kStages][GemmFp16x3Config::kWeightBytes];
  float4 staging[BlockConfig::kConsumerWarpgroups][GemmFp16x3Config::kSubtileRowBlocks][128];
  EpilogueInputs epilogue_inputs[2];  // of this work tile, and of the next
  Barriers<GemmFp16x3Config::kStages> barriers;
};
static_assert(sizeof(GemmMemory) <= 227 * 1024, "a block has no more shared memory");
static_assert(GemmFp16x3Config::kXBytes % 1024 == 0 && GemmFp16x3Config::kWeightBytes % 1024 == 0,
              "the 128-byte swizzle repeats every 1024 bytes, so k-tiles are aligned to these");

// ----- the producer warp

// Copies the k-tiles of all work tiles into the stages, one after the other, each as soon as its
// stage is empty. All lanes of the producer warp call it; lane 0 copies. `base` is the
// shared-memory address of the block's GemmMemory.
__device__ inline void run_producer(uint32_t base, const CUtensorMap& x_map,
                                    const CUtensorMap& weight_map, const GemmArguments& args) {
  using Config = GemmFp16x3Config;
  const uint32_t full = base + offsetof(GemmMemory, barriers.full);
  const uint32_t empty = base + offsetof(GemmMemory, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  // Each block loads half of the rows of x, and writes them to both blocks.
  const int rows_of_half = args.tiles.max_rows() / BlockConfig::kClusterSize;
  const uint32_t x = base + offsetof(GemmMemory, x) + rank * rows_of_half * Config::kRowBytes;
  // A stage's `full` barrier waits for both halves of x and the block's own weight.
  const uint32_t bytes = args.tiles.max_rows() * Config::kRowBytes + Config::kWeightBytes;
  const uint32_t weight = base + offsetof(GemmMemory, weight);
  PipelineState<Config::kStages> state;
  for_each_work_tile(args, [&](const WorkTile& work, const Tile& tile) {
    if (threadIdx.x % 32 != 0) return;
    const int row = args.tiles.rows_of(tile).begin + rank * rows_of_half;
    const int weight_row = first_block_column(tile, rank);
    const int begin = work.begin * Config::kKTilesPerKGroup;
    const int end = work.end * Config::kKTilesPerKGroup;
    for (int k_tile = begin; k_tile < end; ++k_tile) {
      const uint32_t full_of_stage = full + 8 * state.stage;
      ptx::mbarrier_wait(empty + 8 * state.stage, state.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full_of_stage, bytes);
      // x is stored as [k-tile][row][64 halves], and TMA takes the coordinates from the last one to
      // the first one: element 0, row, k-tile. The weight is [row][K].
      ptx::copy_tensor_multicast(x + state.stage * Config::kXBytes, &x_map, 0, row, k_tile,
                                 full_of_stage, BlockConfig::kBothBlocks);
      ptx::copy_tensor(weight + state.stage * Config::kWeightBytes, &weight_map,
                       k_tile * Config::kKTileDepth, weight_row, full_of_stage);
      state.advance();
    }
  });
}

// ----- the consumer warpgroups

// A tile's number of rows of x as a type. ptx::wgmma is overloaded for each of these types.
template <int kRows>
using Rows = std::integral_constant<int, kRows>;

// A lane's part of the warp's 16 rows of the weight in a k-tile, after the split. It is operand A
// of wgmma instructions, each of which takes 16 of K: four registers with two halves each.
struct Fragments {
  uint32_t hi[GemmFp16x3Config::kK16PerTile][4];
  uint32_t lo[GemmFp16x3Config::kK16PerTile][4];
};

// A thread of a consumer warpgroup: where its data are, and its accumulators and sums of a tile.
// The thread is lane 4 * g + c of its warp (g = 0 .. 7, c = 0 .. 3). In wgmma's layout it has rows
// g and g + 8 of the warp's 16 rows of A, which are two neighbouring rows of the weight
// (column_of_a_row, fp16x3/wgmma_order.cuh).
template <int kPromotionInterval>
struct Consumer {
  using Config = GemmFp16x3Config;
  using State = PipelineState<Config::kStages>;
  static_assert(kPromotionInterval == 32 || kPromotionInterval == 64 || kPromotionInterval == 128,
                "the mainloop has time lines for these intervals only");

  // The accumulators are promoted before hi 1, hi 3 and hi 1'.
  static constexpr bool kPromotesEachTile = kPromotionInterval == 32;
  // The accumulators are promoted before hi 0'.
  static constexpr bool kPromotesEachHalf = kPromotionInterval <= 64;

  // Addresses in shared memory, and the wgmma descriptor of x, for stage 0.
  uint32_t base;          // the block's GemmMemory
  uint32_t remote_empty;  // the `empty` barrier in block lane % 2 of the cluster
  uint32_t weight;        // floats 4 c .. 4 c + 3 of the thread's first row of weight
  uint64_t x_descriptor;
  float scale[2];  // 2^exponent of the thread's two rows of weight
  float accumulators[Config::kSums];
  float sums[Config::kSums];

  // `weight_row` is the thread's first row of weight in the block, an even number. A row of a stage
  // is 128 bytes: 8 vectors of 4 floats. TMA's swizzle puts vector v of row n at place v ^ (n % 8)
  // of the row.
  __device__ Consumer(uint32_t base, int lane, int weight_row) : base(base) {
    const int c = lane % 4;
    const int place = c ^ weight_row % 8;
    weight = base + offsetof(GemmMemory, weight) + weight_row * Config::kRowBytes + place * 16;
    remote_empty = ptx::map_shared(base + offsetof(GemmMemory, barriers.empty),
                                   lane % BlockConfig::kClusterSize);
    x_descriptor = ptx::matrix_descriptor<Config::kRowBytes>(base + offsetof(GemmMemory, x));
  }

  // Waits for a stage, and converts the thread's part of its weight to fragments.
  //
  // The thread loads 4 neighbouring floats at once, 4 c .. 4 c + 3 of each 16 of K. wgmma takes
  // places 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 along K from it. These have just those elements, in
  // the K order of fp16x3/wgmma_order.cuh.
  //
  // Addresses. The thread has rows n and n + 1 of the stage, n even. In row n + r, it loads vector
  // 4 s + c for each s (which 16 of K). TMA has put that vector at place (4 s + c) ^ ((n + r) % 8)
  // of the row. Compared with s = 0 and r = 0, s flips bit 2 of the place, as c < 4, and r flips
  // bit 0, as n is even. A place is 16 bytes, so these are bits 6 and 4 of the address.
  __device__ void convert(Fragments& f, const State& position) const {
    ptx::mbarrier_wait(base + offsetof(GemmMemory, barriers.full) + 8 * position.stage,
                       position.parity);
    const uint32_t first = weight + position.stage * Config::kWeightBytes;
#pragma unroll
    for (int s = 0; s < Config::kK16PerTile; ++s) {  // 16 of K
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // the thread's rows
        const uint32_t address = (first ^ (s * 64 | r * 16)) + r * Config::kRowBytes;
        const float4 v = ptx::load_shared_four(address);
        const float scaled[4] = {v.x * scale[r], v.y * scale[r], v.z * scale[r], v.w * scale[r]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // places below 8, and from 8 on
          // The first of the two elements, as an index of the thread's four. It does not depend on
          // c, and with c = 0 the thread's elements are 0 to 3.
          const int i = fp16x3::element_at_place(8 * half);
          const int reg = 2 * half + r;  // wgmma's order of registers
          fp16x3::split_pair(scaled[i], scaled[i + 1], &f.hi[s][reg], &f.lo[s][reg]);
        }
      }
    }
  }

  // The wgmma descriptor of x in a stage. A descriptor's low bits are an address / 16.
  __device__ uint64_t descriptor(const State& position) const {
    return x_descriptor + position.stage * (Config::kXBytes >> 4);
  }

  // Starts the lo products of a k-tile: x_hi w_lo + x_lo w_hi, without the factor 2^-11. If
  // `accumulates`, they are added to the accumulators; else they overwrite them.
  template <int kRows>
  __device__ void multiply_lo(Rows<kRows> rows, const Fragments& f, const State& position,
                              bool accumulates) {
    const uint64_t x_hi = descriptor(position);
    const uint64_t x_lo = x_hi + Config::kDescriptorLo;
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < Config::kK16PerTile; ++s) {
      const uint64_t offset = s * ptx::kDescriptorStepK;
      ptx::wgmma(rows, accumulators, f.lo[s], x_hi + offset, accumulates || s > 0);
      ptx::wgmma(rows, accumulators, f.hi[s], x_lo + offset, true);
    }
    ptx::wgmma_commit_group();
  }

  // The same for the hi product.
  template <int kRows>
  __device__ void multiply_hi(Rows<kRows> rows, const Fragments& f, const State& position,
                              bool accumulates) {
    const uint64_t x_hi = descriptor(position);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < Config::kK16PerTile; ++s) {
      const uint64_t offset = s * ptx::kDescriptorStepK;
      ptx::wgmma(rows, accumulators, f.hi[s], x_hi + offset, accumulates || s > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts a hi product that follows another one: on top of it, or after its promotion.
  template <bool kPromotesFirst, int kRows>
  __device__ void multiply_next_hi(Rows<kRows> rows, const Fragments& f, const State& position) {
    if constexpr (kPromotesFirst) promote(rows);
    multiply_hi(rows, f, position, /*accumulates=*/!kPromotesFirst);
  }

  // Waits for all products, and adds the accumulators to the sums.
  template <int kRows>
  __device__ void promote(Rows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) sums[j] += accumulators[j];
  }

  // Waits for all products, and multiplies the lo products by 2^-11.
  template <int kRows>
  __device__ void scale_lo_products(Rows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) accumulators[j] *= 1 / fp16x3::kLoScale;
  }

  // release_stage with the address remote_empty, which was computed once. The kernel for an
  // interval of 32 has no register left to keep it, and computes it anew.
  __device__ void release(const State& position) const {
    if constexpr (kPromotionInterval == 32) {
      release_stage(base + offsetof(GemmMemory, barriers.empty) + 8 * position.stage);
    } else if (threadIdx.x % 32 < BlockConfig::kClusterSize) {
      ptx::mbarrier_arrive_mapped(remote_empty + 8 * position.stage);
    }
  }

  // The mainloop of a work tile with `k_groups` k-groups: adds all products to the sums. *state is
  // the position of the first k-tile, and afterwards that of the k-tile after the last one.
  // `starts_second` is true for the first warpgroup, which lets the second one start in the middle
  // of the first k-group. The pictures at the top of this file show the order of the steps.
  template <int kRows>
  __device__ void multiply(Rows<kRows> rows, int k_groups, bool starts_second, State* state) {
    Fragments even;  // of k-tiles 0 and 2
    Fragments odd;   // of k-tiles 1 and 3
    State k_tile0 = *state;
    State k_tile1 = k_tile0.next();

    // hi 0 and hi 1 of the first k-group
    convert(even, k_tile0);
    multiply_hi(rows, even, k_tile0, /*accumulates=*/false);
    convert(odd, k_tile1);
    multiply_next_hi<kPromotesEachTile>(rows, odd, k_tile1);

    for (int k_group = 0;;) {
      promote(rows);

      // lo 0 to lo 3
      const State k_tile2 = k_tile1.next();
      const State k_tile3 = k_tile2.next();
      multiply_lo(rows, even, k_tile0, /*accumulates=*/false);
      multiply_lo(rows, odd, k_tile1, /*accumulates=*/true);
      ptx::wgmma_wait_group<1>();  // lo 0 has ended, so `even` may change
      convert(even, k_tile2);
      multiply_lo(rows, even, k_tile2, /*accumulates=*/true);
      if (k_group == 0 && starts_second) {
        ptx::barrier_arrive(Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
      }
      ptx::wgmma_wait_group<1>();  // lo 1 has ended
      release(k_tile0);
      release(k_tile1);
      convert(odd, k_tile3);
      multiply_lo(rows, odd, k_tile3, /*accumulates=*/true);
      scale_lo_products(rows);

      // hi 2 and hi 3, on top of the lo products
      multiply_hi(rows, even, k_tile2, /*accumulates=*/true);
      multiply_next_hi<kPromotesEachTile>(rows, odd, k_tile3);
      k_tile0 = k_tile3.next();
      k_tile1 = k_tile0.next();
      ++k_group;
      if (k_group == k_groups) {
        promote(rows);
        release(k_tile2);
        release(k_tile3);
        break;
      }

      // hi 0' and hi 1', of the next k-group
      ptx::wgmma_wait_group<1>();  // hi 2 has ended, so `even` may change
      convert(even, k_tile0);
      multiply_next_hi<kPromotesEachHalf>(rows, even, k_tile0);
      ptx::wgmma_wait_group<1>();  // hi 3 has ended
      release(k_tile2);
      release(k_tile3);
      convert(odd, k_tile1);
      multiply_next_hi<kPromotesEachTile>(rows, odd, k_tile1);
    }
    *state = k_tile0;
  }

  // The same for a number of rows that is known only at run time.
  __device__ void multiply(int rows, int k_groups, bool starts_second, State* state) {
    if (rows == Config::kSmallRows) {
      multiply(Rows<Config::kSmallRows>{}, k_groups, starts_second, state);
    } else if (rows == Config::kMediumRows) {
      multiply(Rows<Config::kMediumRows>{}, k_groups, starts_second, state);
    } else if (kPromotionInterval == 128 && rows == Config::kNarrowRows) {
      // Only products with K >= kLongK have narrow tiles.
      multiply(Rows<Config::kNarrowRows>{}, k_groups, starts_second, state);
    } else {
      multiply(Rows<Config::kWideRows>{}, k_groups, starts_second, state);
    }
  }
};

// A consumer warpgroup: mainloop and epilogue of all work tiles of the cluster, one after the
// other.
template <int kPromotionInterval>
__device__ __forceinline__ void run_consumer(const GemmArguments& args, uint32_t base,
                                             GemmMemory& shared, int warpgroup) {
  using Config = GemmFp16x3Config;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int warp_column = threadIdx.x / 32 * Config::kWarpColumns;
  const int weight_row = warp_column + fp16x3::column_of_a_row(g, 0);
  Consumer<kPromotionInterval> consumer(base, lane, weight_row);
  PipelineState<Config::kStages> state;
  int work_tiles = 0;
  // This is for_each_work_tile, but the compiler sees that the work tiles are uniform.
  for (int i = 0;; ++i) {
    const WorkTile work = args.schedule.uniform_work_tile(i);
    if (!work.exists()) break;
    const Tile tile = args.tiles.find(work.tile);
    if (!is_computed(args, tile.weight)) continue;

    // The scales of the lane's two columns. Columns past N have that of the last one.
    const int first_column = first_block_column(tile, ptx::cluster_ctarank()) + warp_column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int column = min(first_column + fp16x3::column_of_a_row(g, r), args.epilogue.n - 1);
      consumer.scale[r] = fp16x3::power_of_two(__ldcg(args.weight.exponent + column));
    }

    // Mainloop. The first product overwrites the accumulators, so their zeros are for the compiler
    // only: the asm statement of wgmma reads them. Without the zeros, the compiler would have to
    // keep the accumulators of the last tile in registers throughout its epilogue.
#pragma unroll
    for (int j = 0; j < Config::kSums; ++j) {
      consumer.sums[j] = 0;
      consumer.accumulators[j] = 0;
    }
    if (warpgroup == 1) {
      ptx::barrier_sync(Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
    }
    const int rows = args.tiles.rows_of(tile).size;
    const bool starts_second = warpgroup == 0;
    consumer.multiply(rows, work.end - work.begin, starts_second, &state);

    // Epilogue.
    sync_with_loader(warpgroup);
    if (!args.schedule.finishes(work)) {
      store_partial_sums(args, rows, consumer.sums);
    } else {
      const bool is_shared = work.begin > 0;
      if (is_shared) add_partial_sums(args, work.tile, rows, consumer.sums);
      store_results(args, shared.epilogue_inputs[work_tiles % 2], shared.staging[warpgroup],
                    consumer.sums);
    }
    ++work_tiles;
  }
}

// ----- the kernel

// Prepares the second run: chooses new exponents for the rows of weight that overflowed fp16, by
// their largest elements. All warps of a block call it, and a warp takes a row at a time. Each
// block does all rows that it multiplies. Blocks of other clusters may do the same rows, and write
// the same values.
__device__ inline void rescale_overflowed_rows(const GemmArguments& args) {
  using Config = GemmFp16x3Config;
  constexpr int kWarps = BlockConfig::kThreads / 32;
  for_each_work_tile(args, [&](const WorkTile&, const Tile& tile) {
    const int first_column = first_block_column(tile, ptx::cluster_ctarank());
    for (int i = threadIdx.x / 32; i < Config::kBlockColumns; i += kWarps) {
      const int column = first_column + i;
      if (column >= args.epilogue.n) continue;
      if (__ldcg(args.weight.state + column) != fp16x3::kOverflowed) continue;
      const float* const row = args.weight.source + column * args.weight.row_stride;
      const float largest = largest_of_row(row, args.k, /*stride=*/1);
      if (threadIdx.x % 32 != 0) continue;
      const bool is_finite = largest < INFINITY;
      // As for x, the largest element comes into [2^14, 2^15).
      args.weight.exponent[column] =
          is_finite ? min(14 - ilogbf(largest), SampleConfig::kMaxHiLoExponent) : 0;
      if (is_finite) continue;
      // nonfinite.cuh's kernel, after this one, computes such columns.
      args.weight.state[column] = fp16x3::kNonfinite;
      *args.has_nonfinite = 1;
    }
  });
  __syncthreads();
}

// The kernel. x_map describes the split x, in boxes of half of a tile's rows and one k-tile.
// weight_map describes the weight, in boxes of kBlockColumns rows and one k-tile.
template <int kPromotionInterval>
__global__ void KERNELS_CLUSTER __launch_bounds__(BlockConfig::kThreads, 1)
    gemm_fp16x3_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ GemmArguments args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Config = GemmFp16x3Config;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  GemmMemory& shared = *reinterpret_cast<GemmMemory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  // ptx::uniform shows the compiler that all lanes have the same value. Calls then take 1% less
  // time on an H200.
  const int warpgroup = ptx::uniform(threadIdx.x / 128);
  start_next_kernel();
  if (args.is_second_run) {
    wait_for_previous_kernel();
    // All blocks return, so nobody waits for this one.
    if (__ldcg(args.has_overflowed) == 0) return;
  }
  const bool is_first_of_producer = threadIdx.x == BlockConfig::kConsumerThreads;
  if (is_first_of_producer) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<Config::kStages>(base + offsetof(GemmMemory, barriers.full),
                                 base + offsetof(GemmMemory, barriers.empty));
  wait_for_previous_kernel();
  if (args.is_second_run) rescale_overflowed_rows(args);
  const bool is_producer = warpgroup == BlockConfig::kConsumerWarpgroups;
  if (is_producer) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int warp = threadIdx.x / 32 - BlockConfig::kConsumerWarps;
    if (warp == 0) run_producer(base, x_map, weight_map, args);
    if (warp == 1) load_epilogue_inputs(args, shared.epilogue_inputs);
    // Warps 2 and 3 have nothing to do.
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    run_consumer<kPromotionInterval>(args, base, shared, warpgroup);
  }
  // A block must not end while the other one may still copy to its memory or arrive at its
  // barriers.
  ptx::cluster_sync();
#endif
}

}  // namespace kernels::sm90
