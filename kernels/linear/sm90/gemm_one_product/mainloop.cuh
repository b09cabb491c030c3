// The mainloop of gemm_one_product_kernel (kernel.cuh): a producer warp loads k-tiles to the stages
// of shared memory (pipeline.cuh), and consumer warpgroups multiply them.

#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_one_product {

// ----- the tiles of a cluster

// Returns whether the kernel computes the tiles with this tile of x. ConvertMode leaves them out
// if a row of x does not fit into fp16. All lanes of a warp call it, and all warps of all blocks
// get the same answer.
template <typename Mode>
__device__ bool computes_x_tile(const OneProductArguments<Mode>& args, int x_tile) {
  if (!Mode::kConvertsWeight) return true;
  bool fits_fp16 = true;
#pragma unroll
  for (int i = threadIdx.x % 32; i < OneProductConfig::kTileRows; i += 32) {
    const int m = x_tile * OneProductConfig::kTileRows + i;
    const bool is_past_end = m >= args.epilogue.m;
    const bool row_fits = is_past_end || __ldg(args.x_exponent + m) != split::kNeedsTf32;
    fits_fp16 &= row_fits;
  }
  return __all_sync(0xffffffff, fits_fp16);
}

// Calls body(index, tile) for each tile of this cluster. The producer and the consumers of a block
// all run this loop, each at its own pace: the producer loads the next tile while the consumers
// compute the epilogue.
template <typename Mode, typename Body>
__device__ __forceinline__ void for_each_tile(const OneProductArguments<Mode>& args,
                                              const Body& body) {
  const int tile_count = args.tile_count();
  for (int index = blockIdx.x / BlockConfig::kClusterSize; index < tile_count;
       index += gridDim.x / BlockConfig::kClusterSize) {
    body(index, args.tile_at(index));
  }
}

// ----- the producer warp

struct OperandMaps {
  const CUtensorMap& x;
  const CUtensorMap& weight;
};

// The part of the operands that this block loads to a stage.
struct LoadSource {
  int first_m;  // the first row of this block's half of the tile's rows of x
  int first_n;  // the first row of its panel of the weight: its 128 rows of the tile's 256
  int k_tile;
};

// Where the TMA loads of this block write a k-tile: shared-memory addresses in one stage.
struct LoadTarget {
  uint32_t x;       // this block's half of the rows of x
  uint32_t weight;  // the panel of the weight
  uint32_t full;    // the barrier that counts the bytes
};

// The first element of a box. TMA takes the coordinate of the contiguous dimension first.
struct BoxBegin {
  int contiguous;
  int other;

  __device__ BoxBegin(int row, int k, bool is_transposed)
      : contiguous(is_transposed ? row : k), other(is_transposed ? k : row) {}
};

// Issues the TMA loads of a k-tile of operands that are not k-tiled, each as boxes of 64 rows, one
// after the other in the stage. Elements outside of a matrix are loaded as zeros.
template <typename Mode>
__device__ __forceinline__ void load_boxes(const OperandMaps& maps,
                                           const OneProductArguments<Mode>& args,
                                           const LoadSource& source, const LoadTarget& target) {
  const int k = source.k_tile * args.kKTileDepth;
  for (int i = 0; i < OneProductConfig::kXRowsPerBlock / OneProductConfig::kBoxRows; ++i) {
    const BoxBegin begin(source.first_m + i * OneProductConfig::kBoxRows, k, args.x_is_transposed);
    ptx::copy_tensor_multicast(target.x + i * OneProductConfig::kBoxBytes, &maps.x,
                               begin.contiguous, begin.other, target.full,
                               BlockConfig::kBothBlocks);
  }
  for (int i = 0; i < OneProductConfig::kBlockWeightRows / OneProductConfig::kBoxRows; ++i) {
    const BoxBegin begin(source.first_n + i * OneProductConfig::kBoxRows, k,
                         args.weight_is_transposed);
    ptx::copy_tensor(target.weight + i * OneProductConfig::kBoxBytes, &maps.weight,
                     begin.contiguous, begin.other, target.full);
  }
}

// Issues the TMA loads of a k-tile. One thread calls it.
template <typename Mode>
__device__ __forceinline__ void load_k_tile(const OperandMaps& maps,
                                            const OneProductArguments<Mode>& args,
                                            const LoadSource& source, const LoadTarget& target) {
  ptx::mbarrier_arrive_expect_tx(target.full,
                                 OneProductConfig::kXBytes + OneProductConfig::kWeightBytes);
  if constexpr (Mode::kConvertsWeight) {  // both operands are k-tiled
    ptx::copy_tensor_multicast(target.x, &maps.x, 0, source.first_m, source.k_tile, target.full,
                               BlockConfig::kBothBlocks);
    ptx::copy_tensor(target.weight, &maps.weight, 0, source.first_n, source.k_tile, target.full);
  } else {
    load_boxes(maps, args, source, target);
  }
}

// How the producer warp keeps pace with the converters of ConvertMode (converter.cuh). All lanes of
// the warp call the functions.
struct ConversionProgress {
  const WeightConversion& conversion;
  int* producer_k_tile;    // the counter of this block
  int k_tiles_before = 0;  // k-tiles of all earlier tiles, also of those that are left out
  // How many k-tiles of the current panel, from k-tile 0 on, are known to be converted.
  int converted_k_tiles = 0;

  // Tells the converters that the producer has begun this k-tile of the current tile.
  __device__ void begin_k_tile(int k_tile) const { set_latest(k_tiles_before + k_tile); }

  // Waits until the current panel is converted at this k-tile.
  __device__ void wait(int panel, int k_tile) {
    converted_k_tiles = k_tile + wait_converted(conversion, panel, k_tile);
  }

  __device__ void end_tile(int k_tiles) {
    k_tiles_before += k_tiles;
    converted_k_tiles = 0;
  }

  // Lets this block's converters go on after the producer's last k-tile, because other blocks may
  // still need the patches that these converters have taken. (Converters stay at most kLead k-tiles
  // ahead of their producer.)
  // The latest k-tile becomes the largest number to which kLead can be added without overflow.
  __device__ void finish() const { set_latest(INT_MAX - ConverterConfig::kLead); }

  __device__ void set_latest(int k_tile) const {
    if (threadIdx.x % 32 == 0) store_atomically(producer_k_tile, k_tile);
  }
};

// The TMA producer: one warp, of which lane 0 issues the loads. `shared_base` is the address of
// `shared`.
template <typename Mode>
__device__ void run_producer(const OneProductPipeline& pipeline, uint32_t shared_base,
                             const OperandMaps& maps, const OneProductArguments<Mode>& args,
                             OneProductSharedMemory<Mode>& shared) {
  const int rank = ptx::cluster_ctarank();
  // Shared-memory addresses in stage 0.
  constexpr int kXBytesPerBlock = OneProductConfig::kXRowsPerBlock * OneProductConfig::kRowBytes;
  const uint32_t x_address =
      shared_base + offsetof(OneProductSharedMemory<Mode>, x) + rank * kXBytesPerBlock;
  const uint32_t weight_address = shared_base + offsetof(OneProductSharedMemory<Mode>, weight);
  const bool is_loader = threadIdx.x % 32 == 0;
  const int k_tiles = args.k_tiles();
  OneProductPipeline::State state;
  ConversionProgress conversion{args.conversion, &shared.producer_k_tile};
  for_each_tile(args, [&](int index, const TilePosition& tile) {
    const int first_m =
        tile.x_tile * OneProductConfig::kTileRows + rank * OneProductConfig::kXRowsPerBlock;
    const int panel = weight_panel(tile, rank);
    const int first_n = panel * OneProductConfig::kBlockWeightRows;
    if (!computes_x_tile(args, tile.x_tile)) {
      if (is_loader && rank == 0) args.redo.add(index);
      conversion.end_tile(k_tiles);
      return;
    }
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      pipeline.producer_acquire(state);
      if constexpr (Mode::kConvertsWeight) {
        conversion.begin_k_tile(k_tile);
        if (k_tile >= conversion.converted_k_tiles) conversion.wait(panel, k_tile);
      }
      if (is_loader) {
        const LoadTarget target{x_address + state.index * OneProductConfig::kXBytes,
                                weight_address + state.index * OneProductConfig::kWeightBytes,
                                pipeline.full_barrier(state)};
        load_k_tile(maps, args, {first_m, first_n, k_tile}, target);
      }
      state.advance();
    }
    conversion.end_tile(k_tiles);
  });
  if constexpr (Mode::kConvertsWeight) conversion.finish();
}

// ----- the consumer warpgroups

// The step from an operand's descriptor to that for the next wgmma of the k-tile.
__host__ __device__ constexpr uint64_t descriptor_step(ptx::Major major) {
  return major == ptx::Major::kK ? ptx::kDescriptorStepK : ptx::kDescriptorStepMN;
}

// Issues the wgmmas of a k-tile, for operands of these layouts in shared memory, and commits them
// as a group.
template <typename Mode, ptx::Major kX, ptx::Major kWeight>
__device__ __forceinline__ void multiply_k_tile(
    float (&accumulators)[OneProductConfig::kAccumulators], uint32_t x_address,
    uint32_t weight_address, bool accumulates) {
  const uint64_t a =
      ptx::matrix_descriptor<OneProductConfig::kRowBytes, kWeight, OneProductConfig::kBoxBytes>(
          weight_address);
  const uint64_t b =
      ptx::matrix_descriptor<OneProductConfig::kRowBytes, kX, OneProductConfig::kBoxBytes>(
          x_address);
  constexpr int kWgmmas = OneProductConfig::kRowBytes / 32;  // one multiplies 32 bytes of K
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kWgmmas; ++i) {
    ptx::wgmma<kWeight, kX>(typename Mode::Element{}, accumulators,
                            a + i * descriptor_step(kWeight), b + i * descriptor_step(kX),
                            accumulates || i > 0);
  }
  ptx::wgmma_commit_group();
}

// Multiplies a k-tile in layouts that are known at run time. Operand A is the weight, and B is x.
// Only half types have transposed operands here.
template <typename Mode>
__device__ __forceinline__ void multiply_k_tile(
    const OneProductArguments<Mode>& args, float (&accumulators)[OneProductConfig::kAccumulators],
    uint32_t x_address, uint32_t weight_address, bool accumulates) {
  using ptx::Major;
  if (Mode::kIsHalfType && args.x_is_transposed && args.weight_is_transposed) {
    multiply_k_tile<Mode, Major::kMN, Major::kMN>(accumulators, x_address, weight_address,
                                                  accumulates);
  } else if (Mode::kIsHalfType && args.x_is_transposed) {
    multiply_k_tile<Mode, Major::kMN, Major::kK>(accumulators, x_address, weight_address,
                                                 accumulates);
  } else if (Mode::kIsHalfType && args.weight_is_transposed) {
    multiply_k_tile<Mode, Major::kK, Major::kMN>(accumulators, x_address, weight_address,
                                                 accumulates);
  } else {
    multiply_k_tile<Mode, Major::kK, Major::kK>(accumulators, x_address, weight_address,
                                                accumulates);
  }
}

// The mainloop of a consumer warpgroup.
template <typename Mode>
struct OneProductConsumer {
  const OneProductArguments<Mode>& args;
  int warpgroup;
  int rank;  // the block's rank in its cluster
  OneProductPipeline pipeline;
  // Shared-memory addresses in stage 0.
  uint32_t x_address;
  uint32_t weight_address;  // of this warpgroup's rows
  OneProductPipeline::State state;

  __device__ OneProductConsumer(const OneProductArguments<Mode>& args,
                                const OneProductPipeline& pipeline, uint32_t shared_base,
                                int warpgroup)
      : args(args), warpgroup(warpgroup), rank(ptx::cluster_ctarank()), pipeline(pipeline) {
    x_address = shared_base + offsetof(OneProductSharedMemory<Mode>, x);
    // The warpgroup's 64 rows of the weight are one box, transposed or not.
    const int n_in_block = warpgroup * OneProductConfig::kWarpgroupWeightRows;
    weight_address = shared_base + offsetof(OneProductSharedMemory<Mode>, weight) +
                     n_in_block * OneProductConfig::kRowBytes;
  }

  __device__ WarpgroupTile warpgroup_tile_of(const TilePosition& tile) const {
    return {tile.x_tile * OneProductConfig::kTileRows,
            weight_panel(tile, rank) * OneProductConfig::kBlockWeightRows +
                warpgroup * OneProductConfig::kWarpgroupWeightRows};
  }

  // Issues the products of a tile's next k-tile when its stage is full. Then waits for the
  // products of the previous k-tile, and releases its stage. So the tensor cores always have one
  // k-tile to work on while the warpgroup waits.
  __device__ __forceinline__ void multiply_next_k_tile(
      float (&accumulators)[OneProductConfig::kAccumulators], int k_tile) {
    pipeline.consumer_wait(state);
    multiply_k_tile(args, accumulators, x_address + state.index * OneProductConfig::kXBytes,
                    weight_address + state.index * OneProductConfig::kWeightBytes,
                    /*accumulates=*/k_tile > 0);
    ptx::wgmma_wait_group<1>();
    if (k_tile > 0) pipeline.consumer_release(state.previous());
    state.advance();
  }

  // Waits for the products of a tile's last k-tile, and releases its stage.
  __device__ void complete() const {
    ptx::wgmma_wait_group<0>();
    pipeline.consumer_release(state.previous());
  }
};

}  // namespace kernels::sm90::gemm_one_product
