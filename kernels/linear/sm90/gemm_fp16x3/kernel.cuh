// The float32 GEMM on Hopper if torch's float32 matmul precision is "highest":
// out [M, N] = x [M, K] weight [N, K]^T, with the accuracy of a float32 product, by three fp16
// tensor-core products (fp16x3).
//
//   x       split by the kernel before this one (split_x.cuh): each row is multiplied by a power of
//           two, and a scaled element is then hi + lo / 2^11, where hi and lo are fp16
//   weight  float32; this kernel scales and splits it in registers. A row's power of two is a guess
//           from a sample of the row, so large elements may overflow fp16
//   out     float32, after bias, ReLU and division (epilogue.cuh)
//
// launch.cuh launches this kernel twice for each chunk of a product. The second launch computes
// again the tiles with a row of the weight that has overflowed fp16 (for_each_work_tile in
// arguments.cuh leaves out the others). Usually there is none, and it returns at once. A later
// kernel computes the results of rows with infinity or NaN. RowState (split/split.cuh) has the
// rules for both. docs/SPLIT-PROOF.md proves the error bound.
//
// In the kernel's code, a variable m is the number of a row of x, which is also a row of out. A
// variable n is the number of a row of the weight, which is also a column of out. (In host code and
// in args.epilogue, m and n are the sizes M and N.)
//
// ----- The arithmetic
//
//   x w  =  x_hi w_hi   +   (x_hi w_lo + x_lo w_hi) / 2^11       x_lo w_lo / 2^22 is left out
//           hi product       lo products
//
// A tensor core truncates the sum whenever it adds to an accumulator. Two measures keep the error
// within the bound. First, lo products come first in an accumulator: on top of a large sum, they
// would lose the very bits for which they are computed. Second, after a short interval of K (the
// promotion interval), the accumulators are promoted: added, rounded to nearest, to float32 sums in
// other registers. The next product overwrites the accumulators.
//
// ----- The pipeline
//
// A cluster of two blocks computes a tile: 256 rows of the weight, 128 in each block, by up to 176
// rows of x, which both blocks need. K goes through shared memory in k-tiles of 32, four
// of which are a k-group. There are five stages, each for one k-tile.
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
// Warpgroups 0 and 1 are the consumers. Warpgroup 2, the workers, has the producer warp, which
// starts the TMA copies (also copies for the next tile, during the epilogue), and the loader warp,
// which loads what the epilogue needs.
//
// The parts are in these files:
//
//   in this folder
//     launch.cuh             the launches of the kernel, and their workspace
//     choose_tiles.h         the host's choice of how many rows a tile has
//     plan_schedule.h        the host's plan: which tiles clusters share, and where they are cut
//     stream_k.cuh           the order of the work tiles
//     config.cuh             constants
//     tiles.cuh              the rows of x of each tile
//     arguments.cuh          the kernel's arguments, and a block's shared memory
//     weight_row_order.cuh   which rows of the weight a thread has
//     mainloop.cuh           the producer, the conversion of the weight, and the products
//     epilogue.cuh           the loader, and what the consumers do with a tile's sums
//     kernel.cuh             the consumers' loop over work tiles, and the kernel
//
//   in linear/ and linear/sm90/, for both GEMM kernels
//     tile_order.cuh         the numbers of tiles
//     split_x.cuh            the kernel before: splits x, samples the weight (sample_weight.cuh)
//     launch_gemm.cuh        tensor maps and the launch
//     pipeline.cuh           the shape of a block, and the ring of stages
//     fragment.cuh           which thread has which accumulators and sums
//     copy_subtile.cuh       copies of sums to shared memory, in the epilogue
//
// ----- Why it is fast
//
// - Conversion runs beside the products. If it did not, the kernel would take 7% longer (measured
//   with another order of products: docs/EXPERIMENTS.md, "Variants of both orders").
// - The second warpgroup starts half a k-group after the first. While one of them promotes or
//   scales, and has no product in flight, products of the other keep the tensor cores busy.

#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/registers.cuh"
#include "common/ptx/tma.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_fp16x3/arguments.cuh"
#include "linear/sm90/gemm_fp16x3/config.cuh"
#include "linear/sm90/gemm_fp16x3/epilogue.cuh"
#include "linear/sm90/gemm_fp16x3/mainloop.cuh"
#include "linear/sm90/gemm_fp16x3/weight_row_order.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/sample_weight.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// Loads the scales of the lane's two rows of the weight, among the 16 of its warp. Rows past N get
// the scale of the last one.
__device__ __forceinline__ void load_weight_scales(const Fp16x3Arguments& args, int first_n_of_warp,
                                                   int g, float (&weight_scale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n = min(first_n_of_warp + weight_row_at_operand_row(g + 8 * r), args.epilogue.n - 1);
    weight_scale[r] = split::power_of_two(__ldcg(args.weight.exponent + n));
  }
}

// A consumer warpgroup: mainloop and epilogue of all work tiles of the cluster, one after the
// other.
template <int kPromotionInterval>
__device__ __forceinline__ void run_consumer(const Fp16x3Arguments& args,
                                             const Fp16x3Pipeline& pipeline, uint32_t shared_base,
                                             Fp16x3SharedMemory& shared, int warpgroup) {
  const int lane = threadIdx.x % 32;
  const int g =
      FragmentLane(lane).g;  // the thread has rows g and g + 8 of the warp's 16 rows of operand A
  // The warp's first row of the weight, and the thread's, both counted from the block's first.
  const int warp_n_in_block = threadIdx.x / 32 * Fp16x3Config::kWarpWeightRows;
  const int n_in_block = warp_n_in_block + weight_row_at_operand_row(g);
  Fp16x3Consumer<kPromotionInterval> consumer(pipeline, shared_base, lane, n_in_block);
  Fp16x3Pipeline::State state;
  int work_tiles = 0;  // multiplied so far; odd and even ones use different epilogue inputs
  // Inlined, because ptxas serializes wgmma instructions around a function call.
  const auto compute = [&](const WorkTile& work,
                           const TilePosition& tile) __attribute__((always_inline)) {
    load_weight_scales(args, first_n_of_block(tile, ptx::cluster_ctarank()) + warp_n_in_block, g,
                       consumer.weight_scale);

    // Mainloop.
    consumer.clear();
    if (warpgroup == 1) {
      ptx::barrier_sync(Fp16x3Config::kSecondStartsBarrier, BlockConfig::kConsumerThreads);
    }
    const int rows = args.tiles.rows_of(tile).size;
    const bool is_first_warpgroup = warpgroup == 0;
    consumer.run_mainloop(rows, work.k_groups(), is_first_warpgroup, &state);

    // Epilogue.
    sync_with_loader(warpgroup);
    if (!args.schedule.has_last_k_group(work)) {
      store_partial_sums(args, rows, consumer.sums);
    } else {
      const bool is_shared = work.begin > 0;
      if (is_shared) add_partial_sums(args, work.tile, rows, consumer.sums);
      run_epilogue(args, shared.epilogue_inputs[work_tiles % 2], n_in_block,
                   shared.staging[warpgroup], consumer.sums);
    }
    ++work_tiles;
  };
  for_each_work_tile</*kIsUniform=*/true>(args, compute);
}

// ----- the kernel

// Chooses a new exponent for row n of the weight, by its largest element, or marks the row as
// kNonfinite. All lanes of a warp call it. The launch's choice of tiles stays the same
// (computes_weight_tile, arguments.cuh).
__device__ inline void rescale_row(const Fp16x3Arguments& args, int n) {
  const float* const elements = args.weight.source_row(n);
  const float largest = largest_of_row(elements, args.k, /*stride=*/1);
  if (threadIdx.x % 32 != 0) return;
  const bool is_finite = largest < INFINITY;
  int exponent = 0;
  if (is_finite) {
    exponent = min(split::kTopExponent - ilogbf(largest), SampleConfig::kMaxExponentWithLo);
  }
  args.weight.exponent[n] = exponent;
  if (!is_finite) {
    args.weight.row_state[n] = split::kNonfinite;
    *args.has_nonfinite = 1;
  }
}

// Rescales the kOverflowed rows that the block multiplies in the second launch (RowState). All
// warps of a block call it, and a warp takes a row at a time. Blocks of other clusters may rescale
// the same rows, and write the same values.
__device__ inline void rescale_overflowed_rows(const Fp16x3Arguments& args) {
  constexpr int kWarps = BlockConfig::kThreads / 32;
  for_each_work_tile(args, [&](const WorkTile&, const TilePosition& tile) {
    const int first_n = first_n_of_block(tile, ptx::cluster_ctarank());
    for (int i = threadIdx.x / 32; i < Fp16x3Config::kBlockWeightRows; i += kWarps) {
      const int n = first_n + i;
      const bool has_overflowed =
          n < args.epilogue.n && __ldcg(args.weight.row_state + n) == split::kOverflowed;
      if (has_overflowed) rescale_row(args, n);
    }
  });
  __syncthreads();
}

// The kernel. x_map describes the split x, in boxes of half of the largest tile's rows and one
// k-tile. weight_map describes the weight, in boxes of kBlockWeightRows rows and one k-tile.
template <int kPromotionInterval>
__global__ void KERNELS_CLUSTER __launch_bounds__(BlockConfig::kThreads, 1)
    gemm_fp16x3_sm90_kernel(const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ Fp16x3Arguments args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  Fp16x3SharedMemory& shared = *reinterpret_cast<Fp16x3SharedMemory*>(dynamic_memory);
  const uint32_t shared_base = ptx::shared_address(dynamic_memory);
  // ptx::uniform shows the compiler that all lanes have the same value, so that its code is faster.
  const int warpgroup = ptx::uniform(threadIdx.x / BlockConfig::kWarpgroupThreads);
  start_next_kernel();
  if (args.is_second_launch) {
    wait_for_previous_kernel();
    // All blocks return, so nobody waits for this one.
    if (__ldcg(args.has_overflowed) == 0) return;
  }
  const bool is_first_of_producer = threadIdx.x == BlockConfig::kConsumerThreads;
  if (is_first_of_producer) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  const Fp16x3Pipeline pipeline(shared_base + offsetof(Fp16x3SharedMemory, barriers));
  pipeline.init();
  wait_for_previous_kernel();  // has no effect in the second launch, which has waited above
  if (args.is_second_launch) rescale_overflowed_rows(args);
  const bool is_worker = warpgroup == BlockConfig::kConsumerWarpgroups;
  if (is_worker) {
    ptx::setmaxnreg_dec<Fp16x3Config::kWorkerRegisters>();
    const int worker_warp = threadIdx.x / 32 - BlockConfig::kConsumerWarps;
    if (worker_warp == 0) run_producer(pipeline, shared_base, x_map, weight_map, args);
    if (worker_warp == 1) load_epilogue_inputs(args, shared.epilogue_inputs);
    // Workers 2 and 3 have nothing to do.
  } else {
    ptx::setmaxnreg_inc<Fp16x3Config::kConsumerRegisters>();
    run_consumer<kPromotionInterval>(args, pipeline, shared_base, shared, warpgroup);
  }
  // A block must not end while the other one may still copy to its memory or arrive at its
  // barriers.
  ptx::cluster_sync();
#endif
}

}  // namespace kernels::sm90::gemm_fp16x3
