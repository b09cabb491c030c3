// The float32 GEMM on Hopper if torch's float32 matmul precision is "highest":
// out [M, N] = x [M, K] weight [N, K]^T, with the accuracy of a float32 product, by three fp16
// tensor-core products (fp16x3):
//
//   x w  =  x_hi w_hi   +   (x_hi w_lo + x_lo w_hi) / 2^11       x_lo w_lo / 2^22 is left out
//           hi product       lo products
//
//   x       scaled and split into hi + lo / 2^11 by the kernel before this one (split_x.cuh)
//   weight  float32; this kernel scales and splits it in registers
//   out     float32, after bias, ReLU and division (epilogue.cuh)
//
// docs/SPLIT.md explains the arithmetic (step 4: why lo products come first in an accumulator, and
// why accumulators are promoted, that is, added to float32 sums), and docs/SPLIT-PROOF.md proves
// the error bound.
//
// launch.cuh launches this kernel twice for each chunk of a product. The second launch computes
// again the tiles with a row of the weight that has overflowed fp16 (RowState, split/split.cuh).
// Usually there is none, and it returns at once.
//
// In the kernel's code, a variable m is the number of a row of x, which is also a row of out. A
// variable n is the number of a row of the weight, which is also a column of out. (In host code and
// in args.epilogue, m and n are the sizes M and N.)
//
// ----- The pipeline
//
// A cluster of two blocks computes a tile: 256 rows of the weight, 128 in each block, by up to 176
// rows of x, which both blocks need. K goes through shared memory in k-tiles of 32, four of which
// are a k-group. Each of five stages has one k-tile.
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
// The parts are in these files, and in those that both GEMM kernels share (linear_sm90.cu):
//
//   launch.cuh             the launches of the kernel, and their workspace
//   choose_tiles.h         the host's choice of how many rows a tile has
//   plan_schedule.h        the host's plan: which tiles clusters share, and where they are cut
//   stream_k.cuh           the order of the work tiles
//   config.cuh             constants
//   tiles.cuh              the rows of x of each tile
//   arguments.cuh          the kernel's arguments, and a block's shared memory
//   weight_row_order.cuh   which rows of the weight a thread has
//   mainloop.cuh           the producer, the conversion of the weight, and the products
//   epilogue.cuh           the loader, and what the consumers do with a tile's sums
//   kernel.cuh             the consumers' loop over work tiles, and the kernel
//
// ----- Why it is fast
//
// - Conversion runs beside the products. If it did not, the kernel would take 7% longer (measured
//   with another order of products: docs/EXPERIMENTS.md, "Variants of both orders").
// - The second warpgroup starts half a k-group after the first. So while one of them promotes or
//   scales, and has no product in flight, products of the other keep the tensor cores busy.

#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
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

// A consumer warpgroup: mainloop and epilogue of all work tiles of the cluster.
template <int kPromotionInterval>
__device__ __forceinline__ void run_consumer(const Fp16x3Arguments& args,
                                             const Fp16x3Pipeline& pipeline, uint32_t shared_base,
                                             Fp16x3SharedMemory& shared, int warpgroup) {
  const int lane = threadIdx.x % 32;
  // The thread has rows g and g + 8 of the warp's 16 rows of operand A.
  const int g = FragmentLane(lane).g;
  // Both are counted from the block's first row of the weight.
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

    consumer.clear();
    const bool is_first_warpgroup = warpgroup == 0;
    const bool is_second_warpgroup = warpgroup == 1;
    if (is_second_warpgroup) wait_until_second_may_start();
    const int rows = args.tiles.rows_of(tile).size;
    consumer.run_mainloop(rows, work.k_groups(), is_first_warpgroup, &state);

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
// kNonfinite. All lanes of a warp call it.
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

// Rescales the kOverflowed rows that the block multiplies in the second launch. All warps of a
// block call it. Blocks of other clusters may rescale the same rows, and write the same values.
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

// x_map describes the split x, in boxes of half of the largest tile's rows and one k-tile.
// weight_map describes the weight, in boxes of kBlockWeightRows rows and one k-tile.
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
