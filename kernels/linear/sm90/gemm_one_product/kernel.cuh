// gemm_one_product: Linear -> ReLU -> divide on Hopper (sm_90a) with one tensor-core product for
// each pair of elements, in half types (float16 and bfloat16) and in float32 at `high` precision.
//
//   x [M, K], weight [N, K], bias [N], out [M, N]
//   out[m][n] = relu(bias[n] + sum over k of x[m][k] weight[n][k]) / divisor
//
// In all files of this folder, a variable m is the number of a row of x, and n that of a row of the
// weight. So m is a row of out, and n a column; in GradientMode it is the other way round.
//
// The kernel has four modes (arguments.cuh):
//
//   HalfMode       half types, with the epilogue
//   GradientMode   half types, the product alone, with out [N, M]
//   ConvertMode    float32, rounded to fp16, which has TF32's precision but a smaller range
//   RedoMode       float32, rounded to TF32: computes the tiles that do not fit into fp16
//
// ----- The pipeline
//
// A cluster of two blocks computes tiles of 256 rows of x by 256 rows of the weight. Each block
// computes 128 of these rows of the weight, in k-tiles of 128 bytes of K:
//
//   global memory              shared memory of a block              registers
//                              (a ring of 4 stages)
//
//   x -------- TMA (1) ------> x       256 rows x 128 bytes --+
//                                                             +--> wgmma: two consumer warpgroups,
//   weight --- TMA (2) ------> weight  128 rows x 128 bytes --+    each 64 rows of the weight by
//                                                                  256 rows of x
//                                                                       |
//   out <------------------------------ epilogue -----------------------+
//
//   (1) Each block loads half of the rows and multicasts them to both blocks.
//   (2) In ConvertMode, TMA loads the fp16 weight, which converter warps have made just before:
//
//       weight, float32 --- converter warps ---> weight, fp16, k-tiled --- TMA ---> shared memory
//       (global memory)                          (global memory, in L2)
//
// The warps of a block, and the registers of a thread (in parentheses: in GradientMode):
//
//   warps 0 - 3     consumer warpgroup 0: wgmma, epilogue                     208 (240)
//   warps 4 - 7     consumer warpgroup 1: wgmma, epilogue                     208 (240)
//   warps 8 - 11    workers                                                    88 (24)
//     warp 8          TMA producer
//     warps 9 - 11    converters in ConvertMode, idle in the other modes
//
// The parts are in these files (linear_sm90.cu lists those for both GEMM kernels):
//
//   launch.cuh                 the launches of the kernel, and their workspace
//   arguments.cuh              constants, modes, and the kernel's arguments
//   shared_memory.cuh          a block's shared memory
//   mainloop.cuh               the producer, and the products of the consumers
//   converter.cuh              the converters, and how the producer waits for them
//   converter_patch.cuh        how a converter converts a patch: 32 rows x 4 k-tiles of weight
//   converter_layouts.cuh      how it loads the patch, from a weight or from its transpose
//   converter_subnormals.cuh   which rows of the weight have too many subnormals for fp16
//   accumulators.cuh           how accumulators pass through shared memory
//   epilogue.cuh               how the consumers make and store the results of a tile
//   epilogue_inputs.cuh        what they need for it: bias and exponents
//   epilogue_half_types*.cuh   the fast epilogue of half types, and its mask
//   epilogue_gradient.cuh      how they store a tile of a gradient
//   kernel.cuh                 the consumers' loop over tiles, and the kernel
//
// ----- Tiles that are multiplied as TF32
//
// docs/DESIGN.md has the rule, under the same title. If a row of x does not fit into fp16,
// split_x.cuh gives it the exponent kNeedsTf32. ConvertMode's producer lists the row's tiles in a
// RedoList, and leaves them out. Its consumers list a tile if a row of weight does not fit: they
// find infinite or NaN accumulators after the mainloop. A launch with RedoMode then computes the
// listed tiles, and overwrites what ConvertMode may have stored.
//
// ----- Why the weight is wgmma's operand A
//
// With x as operand A, half types take 1.5 to 2% longer on an H200, as the GPU lowers its clock
// (docs/EXPERIMENTS.md, "Hopper's products", under "At `high` and in half types").

#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/registers.cuh"
#include "common/ptx/tma.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter.cuh"
#include "linear/sm90/gemm_one_product/epilogue.cuh"
#include "linear/sm90/gemm_one_product/epilogue_gradient.cuh"
#include "linear/sm90/gemm_one_product/epilogue_half_types.cuh"
#include "linear/sm90/gemm_one_product/epilogue_inputs.cuh"
#include "linear/sm90/gemm_one_product/mainloop.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_one_product {

// Lists a tile to be computed again if the accumulators of this warp are not finite. x is finite
// here, and finite fp16 operands have finite sums. So an accumulator is infinite or NaN only if its
// row of the converted weight holds infinity or NaN, and then all accumulators of that row are. The
// thread tests one accumulator of each of its two rows, first.x and first.z (fragment.cuh).
template <typename Mode>
__device__ __forceinline__ void list_if_not_finite(
    const OneProductArguments<Mode>& args, int index,
    const float (&accumulators)[OneProductConfig::kAccumulators]) {
  const float4 first = row_block_of(accumulators, 0);
  const bool is_finite = fabsf(first.x) < INFINITY && fabsf(first.z) < INFINITY;
  const bool warp_is_finite = __all_sync(0xffffffff, is_finite);
  if (!warp_is_finite && threadIdx.x % 32 == 0) args.redo.add(index);
}

// A consumer warpgroup of all modes but GradientMode.
template <typename Mode>
__device__ __forceinline__ void run_consumer(const OneProductArguments<Mode>& args,
                                             const OneProductPipeline& pipeline,
                                             uint32_t shared_base,
                                             OneProductSharedMemory<Mode>& shared, int warpgroup) {
  const EpilogueMemory<typename Mode::Out> memory{
      shared.epilogue_inputs[warpgroup], shared.staging[warpgroup],
      OneProductConfig::kFirstEpilogueBarrier + warpgroup};
  OneProductConsumer<Mode> consumer(args, pipeline, shared_base, warpgroup);
  float accumulators[OneProductConfig::kAccumulators];
  for_each_tile(args, [&](int index, const TilePosition& tile) {
    if (!computes_x_tile(args, tile.x_tile)) return;
    const int k_tiles = args.k_tiles();
    const WarpgroupTile warpgroup_tile = consumer.warpgroup_tile_of(tile);
    const PrefetchedInputs<Mode> prefetched(args, warpgroup_tile);

    // The epilogue's inputs are stored while the last products run.
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile)
      consumer.multiply_next_k_tile(accumulators, k_tile);
    const bool allows_fast_epilogue = prefetched.sync_and_vote_fast(memory.barrier);
    prefetched.store_and_sync(args.epilogue, allows_fast_epilogue, memory.inputs, memory.barrier);
    consumer.complete();

    if constexpr (Mode::kConvertsWeight) list_if_not_finite(args, index, accumulators);
    // RedoMode has no fast epilogue: few tiles are computed again, and it would be more code.
    if (!allows_fast_epilogue || Mode::kIsRedo) {
      store_general(args.epilogue, warpgroup_tile, accumulators, memory);
    } else if (args.epilogue.mask == nullptr) {
      store_fast<false>(args.epilogue, warpgroup_tile, accumulators, memory);
    } else {
      store_fast<true>(args.epilogue, warpgroup_tile, accumulators, memory);
    }
  });
}

// A consumer warpgroup of GradientMode. The boxes of a tile are stored while the next tile is
// multiplied, spread evenly over its k-tiles. Example: with 16 k-tiles, 4 boxes are stored after
// the k-tiles 0, 4, 8 and 12.
template <typename Mode>
__device__ __forceinline__ void run_gradient_consumer(const OneProductArguments<Mode>& args,
                                                      const CUtensorMap& out_map,
                                                      const OneProductPipeline& pipeline,
                                                      uint32_t shared_base,
                                                      OneProductSharedMemory<Mode>& shared,
                                                      int warpgroup) {
  const int k_tiles = args.k_tiles();
  OneProductConsumer<Mode> consumer(args, pipeline, shared_base, warpgroup);
  PackedGradient<typename Mode::Out> packed;  // at first empty: all its boxes count as stored
  int packed_index = 0;                       // the index of the packed tile
  float accumulators[OneProductConfig::kAccumulators];
  const auto store_next_box = [&] {
    packed.store_next(out_map, consumer.warpgroup_tile_of(args.tile_at(packed_index)),
                      shared.staging[warpgroup]);
  };
  for_each_tile(args, [&](int index, const TilePosition&) {
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      consumer.multiply_next_k_tile(accumulators, k_tile);
      // The loop stores boxes until their share is that of the multiplied k-tiles.
      const int multiplied = k_tile + 1;
      while (packed.stored_boxes * k_tiles < packed.kBoxes * multiplied) store_next_box();
    }
    consumer.complete();
    packed.pack(accumulators);
    packed_index = index;
  });
  while (packed.stored_boxes < packed.kBoxes) store_next_box();
  // Shared memory must stay until TMA has read it.
  if (threadIdx.x % 32 == 0) ptx::wait_stores_read<0>();
}

// Returns whether any tile is computed from the fp16 weight. All lanes of a warp call it.
template <typename Mode>
__device__ __forceinline__ bool needs_converted_weight(const OneProductArguments<Mode>& args) {
  int x_tile = 0;  // becomes the first one that is computed
  while (x_tile < args.tile_order.x_tiles && !computes_x_tile(args, x_tile)) ++x_tile;
  return x_tile < args.tile_order.x_tiles;
}

// A converter warp of the block, 0 <= converter < ConverterConfig::kWarps, for a weight in this
// layout (RowMajor or Transposed, converter_layouts.cuh).
template <typename Layout, typename Mode>
__device__ __forceinline__ void run_converter(const OneProductArguments<Mode>& args,
                                              OneProductSharedMemory<Mode>& shared, int converter) {
  const int64_t k = args.k;
  const int clusters = gridDim.x / BlockConfig::kClusterSize;
  const PatchOrder order(args.conversion, args.tile_order.weight_tiles, clusters);
  const ConverterWarp warp{shared.converters[converter],
                           OneProductConfig::kFirstConverterBarrier + converter,
                           &shared.producer_k_tile};
  convert_weight<Layout>(order, k, warp, [&] { return needs_converted_weight(args); });
}

// Waits for the previous kernel, and lets the next one start (PDL, common/launch.cuh).
template <typename Mode>
__device__ __forceinline__ void wait_and_let_next_start() {
  // The kernels after ConvertMode's have no work in most calls. The next one starts early, so that
  // it adds less to the time of the call.
  if constexpr (Mode::kConvertsWeight) start_next_kernel();
  wait_for_previous_kernel();
  // In half types the next kernel belongs to another call. Starting it before the wait would not
  // shorten this call.
  if constexpr (Mode::kIsHalfType) start_next_kernel();
}

// The grid has at most as many clusters as the GPU runs at once, and no more than out has tiles.
// x_map and weight_map describe the operands to TMA, and out_map the result of GradientMode.
template <typename Mode>
__global__ void KERNELS_CLUSTER __launch_bounds__(BlockConfig::kThreads, 1)
    gemm_one_product_kernel(const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap out_map,
                            const __grid_constant__ OneProductArguments<Mode> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  static_assert(sizeof(OneProductSharedMemory<Mode>) <= 227 * 1024,
                "a block has no more shared memory");
  OneProductSharedMemory<Mode>& shared =
      *reinterpret_cast<OneProductSharedMemory<Mode>*>(dynamic_memory);
  const uint32_t shared_base = ptx::shared_address(dynamic_memory);
  const int warpgroup = threadIdx.x / BlockConfig::kWarpgroupThreads;
  constexpr int kProducerThread = BlockConfig::kConsumerThreads;  // its first thread
  constexpr int kFirstConverterWarp = BlockConfig::kConsumerWarps + 1;
  if constexpr (Mode::kIsRedo) {
    // ConvertMode's kernel lists tiles until it ends. (The wait below then returns at once.)
    wait_for_previous_kernel();
    if (args.tile_count() == 0) return;  // both blocks of a cluster do so
  }
  if (threadIdx.x == kProducerThread) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
    shared.producer_k_tile = 0;
  }
  const OneProductPipeline pipeline(shared_base + offsetof(OneProductSharedMemory<Mode>, barriers));
  pipeline.init();
  wait_and_let_next_start<Mode>();
  if (warpgroup >= BlockConfig::kConsumerWarpgroups) {
    constexpr int kRegisters = Mode::kIsGradient ? OneProductConfig::kGradientWorkerRegisters
                                                 : OneProductConfig::kWorkerRegisters;
    ptx::setmaxnreg_dec<kRegisters>();
    const bool is_producer_warp = threadIdx.x < kProducerThread + 32;
    if (is_producer_warp) {
      run_producer(pipeline, shared_base, {x_map, weight_map}, args, shared);
    } else if constexpr (Mode::kConvertsWeight) {
      const int converter = threadIdx.x / 32 - kFirstConverterWarp;
      if (args.weight_is_transposed) {
        run_converter<Transposed>(args, shared, converter);
      } else {
        run_converter<RowMajor>(args, shared, converter);
      }
    }
  } else {
    constexpr int kRegisters = Mode::kIsGradient ? OneProductConfig::kGradientConsumerRegisters
                                                 : OneProductConfig::kConsumerRegisters;
    ptx::setmaxnreg_inc<kRegisters>();
    if constexpr (Mode::kIsGradient) {
      run_gradient_consumer(args, out_map, pipeline, shared_base, shared, warpgroup);
    } else {
      run_consumer(args, pipeline, shared_base, shared, warpgroup);
    }
  }
  // A block must not end while the other one still copies to its memory or arrives at its barriers.
  ptx::cluster_sync();
#endif
}

}  // namespace kernels::sm90::gemm_one_product
