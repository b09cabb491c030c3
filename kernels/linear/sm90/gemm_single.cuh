// gemm_single: Linear -> ReLU -> divide on Hopper (sm_90a) with one tensor-core product for each
// pair of elements. For float16, bfloat16, and float32 at `high` precision, which promises TF32's
// accuracy.
//
//   x [M, K], weight [N, K], bias [N], out [M, N]
//   out[m][n] = relu(bias[n] + sum over k of x[m][k] weight[n][k]) / divisor
//
// Row n of the weight makes column n of out, so the consumers and the epilogue call it column n.
//
// launch_single.cuh launches gemm_single_kernel in one of four modes (gemm_single_arguments.cuh),
// each with its traits:
//
//   HalfTraits       float16 and bfloat16, with the epilogue
//   GradientTraits   float16 and bfloat16, the product alone, transposed: out [N, M]
//   ConvertTraits    float32, rounded to fp16, which has TF32's precision but a smaller range
//   RedoTraits       float32, rounded to TF32: computes again the tiles that do not fit into fp16
//
// The pipeline. A cluster of two blocks computes tiles of 256 rows of x by 256 rows of the weight.
// Each block computes 128 of these rows of the weight, in k-tiles of 128 bytes of K:
//
//   global memory              shared memory of a block              registers
//                              (a ring of 4 stages)
//
//   x -------- TMA (1) ------> x       256 rows x 128 bytes --+
//                                                             +--> wgmma: two consumer warpgroups,
//   weight --- TMA (2) ------> weight  128 rows x 128 bytes --+    each 64 rows of the weight x
//                                                                  256 rows of x
//                                                                       |
//   out <------------------------------ epilogue -----------------------+
//
//   (1) Each block loads half of the rows and multicasts them to both blocks.
//   (2) In ConvertTraits, TMA loads the fp16 weight, which converter warps have made just before:
//
//       weight, float32 --- converter warps ---> weight, fp16, k-tiled --- TMA ---> shared memory
//       (global memory)                          (global memory, in L2)
//
// The warps of a block, and the registers of a thread (in parentheses: in GradientTraits):
//
//   warps 0 - 3     consumer warpgroup 0: wgmma, epilogue                     208 (240)
//   warps 4 - 7     consumer warpgroup 1: wgmma, epilogue                     208 (240)
//   warp 8          TMA producer                                               88 (24)
//   warps 9 - 11    converters in ConvertTraits, idle in the other traits      88 (24)
//
// pipeline.cuh describes the ring of stages. convert_weight.cuh describes how the converters and
// the producer synchronise.
//
// Tiles computed again in TF32. fp16 has TF32's 11 significant bits, but a smaller range. A tile is
// computed again if one of its rows does not fit into fp16:
//
//   A row of x        It has infinity or NaN, its largest element is below about 2^-112, or many of
//                     its scaled elements are subnormal. split_x.cuh finds these rows before this
//                     kernel begins, and gives them the exponent kNeedsTf32. ConvertTraits does not
//                     compute the tile at all.
//   A row of weight   It has infinity, NaN, an element that overflows fp16 (the row's scale is
//                     found from a sample of the row), or many subnormal elements. In the last
//                     case the converters put an infinity into the row. So in all cases the sums of
//                     the row are infinite or NaN, which the consumers notice after the mainloop.
//
// ConvertTraits lists these tiles in a RedoList. RedoTraits, the next kernel, computes the listed
// tiles from the float32 operands, and overwrites what ConvertTraits may have stored.
//
// Why it is fast: copies, conversion and products run at the same time, on different warps; blocks
// are persistent; the order of tiles lets both operands come from L2; and the tensor cores multiply
// fp16 at twice TF32's rate. wgmma's operand A is the weight: with x as operand A, half types take
// 1.5 to 2% longer on an H200, as the GPU lowers its clock.

#pragma once

#include <cuda_fp16.h>

#include <climits>
#include <cstddef>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/convert_weight.cuh"
#include "linear/sm90/gemm_single_arguments.cuh"
#include "linear/sm90/gemm_single_config.cuh"
#include "linear/sm90/gemm_single_epilogue.cuh"
#include "linear/sm90/gemm_single_epilogue_half.cuh"
#include "linear/sm90/gemm_single_gradient.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_single {

// Returns whether this kernel computes tiles with this tile of x. ConvertTraits leaves out those
// with a row of x that is not accurate in fp16. All lanes of a warp call it, and all warps of all
// blocks get the same answer.
template <typename Traits>
__device__ bool computes_x_tile(const Arguments<Traits>& args, int x_tile) {
  if (!Traits::kConvertsWeight) return true;
  bool fits_fp16 = true;
#pragma unroll
  for (int i = threadIdx.x % 32; i < Config::kXRows; i += 32) {
    const int row = x_tile * Config::kXRows + i;
    fits_fp16 &= row >= args.epilogue.m || __ldg(args.x_exponent + row) != fp16x3::kNeedsTf32;
  }
  return __all_sync(0xffffffff, fits_fp16);
}

// Calls body(index, tile) for each tile of this cluster. The producer and the consumers of a block
// all run this loop, each at its own pace: full and empty stages keep them together. What happens
// to a tile:
//
//   producer warp (produce)      loads its k-tiles, stage by stage
//   consumers (consume)          multiply the k-tiles as they arrive, then compute the epilogue,
//                                while the producer loads the next tile
//
// A tile that ConvertTraits leaves out (computes_x_tile) is left out by all of them.
template <typename Traits, typename Body>
__device__ __forceinline__ void for_each_tile(const Arguments<Traits>& args, const Body& body) {
  const int tile_count = args.tile_count();
  for (int index = blockIdx.x / BlockConfig::kClusterSize; index < tile_count;
       index += gridDim.x / BlockConfig::kClusterSize) {
    body(index, args.tile_at(index));
  }
}

// The panel of the weight whose 128 rows (Config::kBlockColumns) the block of this rank multiplies.
__device__ inline int weight_panel(const Tile& tile, int rank) {
  return tile.weight * BlockConfig::kClusterSize + rank;
}

// Where the TMA loads of this block write a k-tile: shared-memory addresses in one stage.
struct LoadTarget {
  uint32_t x;       // this block's half of the rows of x
  uint32_t weight;  // the panel of the weight
  uint32_t full;    // the barrier that counts the bytes
};

// Issues the TMA loads of a k-tile of operands that are not k-tiled, each of which may be
// transposed. In the stage, an operand is one box of 64 rows (Config::kBoxRows) after the other.
// TMA takes a box's coordinates with the contiguous dimension first: (k, row), or (row, k) if the
// operand is transposed. It fills what is outside of a matrix with zeros.
template <typename Traits>
__device__ __forceinline__ void load_boxes(const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                           const Arguments<Traits>& args, const LoadTarget& target,
                                           int x_row, int weight_row, int k) {
  for (int i = 0; i < Config::kXRowsPerBlock / Config::kBoxRows; ++i) {
    const int row = x_row + i * Config::kBoxRows;
    ptx::copy_tensor_multicast(target.x + i * Config::kBoxBytes, &x_map,
                               args.x_is_transposed ? row : k, args.x_is_transposed ? k : row,
                               target.full, BlockConfig::kBothBlocks);
  }
  for (int i = 0; i < Config::kBlockColumns / Config::kBoxRows; ++i) {
    const int row = weight_row + i * Config::kBoxRows;
    ptx::copy_tensor(target.weight + i * Config::kBoxBytes, &weight_map,
                     args.weight_is_transposed ? row : k, args.weight_is_transposed ? k : row,
                     target.full);
  }
}

// Issues the TMA loads of a k-tile. `x_row` is the first row of this block's half of x, and
// `weight_row` the first row of its panel. One thread calls it.
template <typename Traits>
__device__ __forceinline__ void load_k_tile(const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                            const Arguments<Traits>& args, const LoadTarget& target,
                                            int x_row, int weight_row, int k_tile) {
  ptx::mbarrier_arrive_expect_tx(target.full, Config::kXBytes + Config::kWeightBytes);
  if constexpr (Traits::kConvertsWeight) {  // both operands are k-tiled
    ptx::copy_tensor_multicast(target.x, &x_map, 0, x_row, k_tile, target.full,
                               BlockConfig::kBothBlocks);
    ptx::copy_tensor(target.weight, &weight_map, 0, weight_row, k_tile, target.full);
  } else {
    load_boxes(x_map, weight_map, args, target, x_row, weight_row, k_tile * args.kKTileDepth);
  }
}

// The TMA producer: one warp, of which lane 0 issues the loads. `base` is the address of `shared`
// in shared memory, as a number for PTX. `full`, `empty`, `x` and `weight` are such addresses, too.
template <typename Traits>
__device__ void produce(uint32_t base, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                        const Arguments<Traits>& args, SharedMemory<Traits>& shared) {
  const uint32_t full = base + offsetof(SharedMemory<Traits>, barriers.full);
  const uint32_t empty = base + offsetof(SharedMemory<Traits>, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  const uint32_t x = base + offsetof(SharedMemory<Traits>, x) +
                     rank * Config::kXRowsPerBlock * Config::kKTileBytes;
  const uint32_t weight = base + offsetof(SharedMemory<Traits>, weight);
  const bool is_loader = threadIdx.x % 32 == 0;
  const int k_tiles = args.k_tiles();
  PipelineState<Config::kStages> ring;
  int k_tiles_before = 0;  // the k-tiles of all tiles before this one, skipped tiles included
  for_each_tile(args, [&](int index, const Tile& tile) {
    const int x_row = tile.x * Config::kXRows + rank * Config::kXRowsPerBlock;
    const int panel = weight_panel(tile, rank);
    const int weight_row = panel * Config::kBlockColumns;
    if (!computes_x_tile(args, tile.x)) {
      if (is_loader && rank == 0) args.redo.add(index);
      k_tiles_before += k_tiles;
      return;
    }
    int converted = 0;  // k-tiles of the panel that are known to be converted
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ring.advance()) {
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      if constexpr (Traits::kConvertsWeight) {
        if (is_loader) atomicExch(&shared.progress, k_tiles_before + k_tile);
        if (k_tile >= converted) {
          converted = k_tile + wait_converted(args.conversion, panel, k_tile);
        }
      }
      if (!is_loader) continue;
      const LoadTarget target{x + ring.stage * Config::kXBytes,
                              weight + ring.stage * Config::kWeightBytes, full + 8 * ring.stage};
      load_k_tile(x_map, weight_map, args, target, x_row, weight_row, k_tile);
    }
    k_tiles_before += k_tiles;
  });
  // This producer has no more k-tiles to load, but other blocks may still need units that this
  // block's converters have taken. So converters must no longer wait for this producer: progress
  // becomes the largest number for which progress + kLead does not overflow.
  if (Traits::kConvertsWeight && is_loader) {
    atomicExch(&shared.progress, INT_MAX - ConvertWeightConfig::kLead);
  }
}

// The part of the warpgroup's Scales that one consumer thread fetches: the bias of a column and, in
// float32, the exponents of the column and of two rows. The thread loads them to registers before
// the mainloop, which hides the latency. After the mainloop, it stores them to shared memory for
// the epilogue.
template <typename Traits>
struct PrefetchedScales {
  using Out = typename Traits::Out;
  static constexpr bool kIsScaled = Scales<Out>::kIsScaled;
  static constexpr int kXRowsPerThread = kIsScaled ? Config::kXRows / 128 : 0;
  float bias = 0;
  int weight_exponent = 0;  // 0 where nothing was scaled, as in RedoTraits
  // The exponents of rows thread + 128 i. C++ has no empty arrays, so there is one element more
  // than rows.
  int x_exponent[kXRowsPerThread + 1] = {};
  bool is_fast;  // whether the fast epilogue supports this thread's column and rows

  __device__ PrefetchedScales(const Arguments<Traits>& args, int first_row, int first_column)
      : is_fast(args.epilogue.is_fast) {
    const Epilogue<Out>& epilogue = args.epilogue;
    const int thread = threadIdx.x % 128;
    const int column = first_column + thread;
    if (thread < Config::kWarpgroupColumns && column < epilogue.n) {
      if (epilogue.bias != nullptr) bias = static_cast<float>(__ldg(epilogue.bias + column));
      if (Traits::kConvertsWeight) {
        weight_exponent = __ldg(args.conversion.weight.exponent + column);
      }
    }
    is_fast &= abs(weight_exponent) <= FastEpilogueConfig::kMaxExponent;
#pragma unroll
    for (int i = 0; i < kXRowsPerThread; ++i) {
      const int row = first_row + i * 128 + thread;
      if (Traits::kConvertsWeight && row < epilogue.m) x_exponent[i] = __ldg(args.x_exponent + row);
      is_fast &= abs(x_exponent[i]) <= FastEpilogueConfig::kMaxExponent;
    }
  }

  // Stores to `scales`, and returns whether the fast epilogue supports the tile. If so, the stored
  // bias of half types is already divided. All threads of the warpgroup call it.
  __device__ bool store(const Epilogue<Out>& epilogue, Scales<Out>* scales, int barrier) const {
    const int thread = threadIdx.x % 128;
    // At this barrier all threads have read the scales of the tile before.
    const bool tile_is_fast = ptx::barrier_and(barrier, 128, is_fast);
    if (thread < Config::kWarpgroupColumns) {
      const bool divides_bias = tile_is_fast && !kIsScaled;
      scales->bias[thread] = bias * (divides_bias ? epilogue.divisor.scale : 1.0f);
      if constexpr (kIsScaled) {
        scales->weight_exponent[thread] = static_cast<int8_t>(weight_exponent);
      }
    }
#pragma unroll
    for (int i = 0; i < kXRowsPerThread; ++i) {
      scales->x_scale[i * 128 + thread] = fp16x3::power_of_two(-x_exponent[i]);
    }
    ptx::barrier_sync(barrier, 128);
    return tile_is_fast;
  }
};

// The amount to add to an operand's descriptor for the next wgmma of the k-tile. A wgmma takes 32
// bytes of K. The next 32 bytes are in the same lines of a K-major operand, and in the next 16
// lines of an MN-major one, which has a line for each k (wgmma.cuh).
__host__ __device__ constexpr uint64_t descriptor_step(ptx::Major major) {
  return major == ptx::Major::kK ? ptx::kDescriptorStepK : ptx::kDescriptorStepMN;
}

// Issues the wgmmas of a k-tile, for operands of these layouts in shared memory, and commits them
// as a group. They run asynchronously: the accumulators may be read after wgmma_wait_group.
template <typename Traits, ptx::Major kX, ptx::Major kWeight>
__device__ __forceinline__ void multiply_k_tile(float (&d)[Config::kAccumulators], uint32_t x,
                                                uint32_t weight, bool accumulates) {
  const uint64_t a =
      ptx::matrix_descriptor<Config::kKTileBytes, kWeight, Config::kBoxBytes>(weight);
  const uint64_t b = ptx::matrix_descriptor<Config::kKTileBytes, kX, Config::kBoxBytes>(x);
  constexpr int kWgmmas = Config::kKTileBytes / 32;  // one multiplies 32 bytes of K
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kWgmmas; ++i) {
    ptx::wgmma<kWeight, kX>(typename Traits::Element{}, d, a + i * descriptor_step(kWeight),
                            b + i * descriptor_step(kX), accumulates || i > 0);
  }
  ptx::wgmma_commit_group();
}

// The same for layouts that are known at run time. Only half types have transposed operands here:
// of a transposed float32 weight, the converters make a k-tiled one that is not transposed.
template <typename Traits>
__device__ __forceinline__ void multiply_k_tile(const Arguments<Traits>& args,
                                                float (&d)[Config::kAccumulators], uint32_t x,
                                                uint32_t weight, bool accumulates) {
  using ptx::Major;
  if (Traits::kIsHalf && args.x_is_transposed && args.weight_is_transposed) {
    multiply_k_tile<Traits, Major::kMN, Major::kMN>(d, x, weight, accumulates);
  } else if (Traits::kIsHalf && args.x_is_transposed) {
    multiply_k_tile<Traits, Major::kMN, Major::kK>(d, x, weight, accumulates);
  } else if (Traits::kIsHalf && args.weight_is_transposed) {
    multiply_k_tile<Traits, Major::kK, Major::kMN>(d, x, weight, accumulates);
  } else {
    multiply_k_tile<Traits, Major::kK, Major::kK>(d, x, weight, accumulates);
  }
}

// The mainloop of a consumer warpgroup: where its operands are in shared memory, and which part of
// a tile it multiplies.
template <typename Traits>
struct ConsumerWarpgroup {
  const Arguments<Traits>& args;
  int warpgroup;
  int rank;  // of the block in its cluster
  // Addresses in shared memory, of the first stage: its barriers, x, and this warpgroup's weight.
  uint32_t full;
  uint32_t empty;
  uint32_t x;
  uint32_t weight;
  PipelineState<Config::kStages> ring;

  __device__ ConsumerWarpgroup(const Arguments<Traits>& args, uint32_t base, int warpgroup)
      : args(args), warpgroup(warpgroup), rank(ptx::cluster_ctarank()) {
    full = base + offsetof(SharedMemory<Traits>, barriers.full);
    empty = base + offsetof(SharedMemory<Traits>, barriers.empty);
    x = base + offsetof(SharedMemory<Traits>, x);
    // Its 64 rows of the weight are one box, transposed or not.
    const int first_weight_row = warpgroup * Config::kWarpgroupColumns;
    weight = base + offsetof(SharedMemory<Traits>, weight) + first_weight_row * Config::kKTileBytes;
  }

  // The first row of x, and the first column, that the warpgroup multiplies.
  __device__ int row(const Tile& tile) const { return tile.x * Config::kXRows; }
  __device__ int column(const Tile& tile) const {
    return weight_panel(tile, rank) * Config::kBlockColumns + warpgroup * Config::kWarpgroupColumns;
  }

  // Issues the products of a tile's next k-tile, when its stage is full. Then waits for the
  // products of the k-tile before, and releases its stage, which they have read. So the tensor
  // cores always have one k-tile to work on while the warpgroup waits.
  __device__ __forceinline__ void multiply(float (&d)[Config::kAccumulators], int k_tile) {
    ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
    multiply_k_tile(args, d, x + ring.stage * Config::kXBytes,
                    weight + ring.stage * Config::kWeightBytes, /*accumulates=*/k_tile > 0);
    ptx::wgmma_wait_group<1>();
    if (k_tile > 0) release_stage(empty + 8 * ring.previous());
    ring.advance();
  }

  // Waits for the products of a tile's last k-tile, and releases its stage.
  __device__ void complete() const {
    ptx::wgmma_wait_group<0>();
    release_stage(empty + 8 * ring.previous());
  }
};

// A consumer warpgroup of all traits but GradientTraits: mainloop and epilogue, tile by tile.
template <typename Traits>
__device__ __forceinline__ void consume(const Arguments<Traits>& args, uint32_t base,
                                        SharedMemory<Traits>& shared, int warpgroup) {
  const int barrier = Config::kFirstEpilogueBarrier + warpgroup;
  Scales<typename Traits::Out>& scales = shared.scales[warpgroup];
  Staging<typename Traits::Out>& staging = shared.staging[warpgroup];
  ConsumerWarpgroup<Traits> consumer(args, base, warpgroup);
  float d[Config::kAccumulators];
  for_each_tile(args, [&](int index, const Tile& tile) {
    if (!computes_x_tile(args, tile.x)) return;
    const int k_tiles = args.k_tiles();
    const int row = consumer.row(tile);
    const int column = consumer.column(tile);
    const PrefetchedScales<Traits> own_scales(args, row, column);

    // Mainloop. The scales are stored while the last products run.
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) consumer.multiply(d, k_tile);
    const bool is_fast = own_scales.store(args.epilogue, &scales, barrier);
    consumer.complete();

    // Epilogue.
    if constexpr (Traits::kConvertsWeight) {
      // x is finite here, and finite fp16 operands have finite sums. So a sum is infinite or NaN
      // only if the row of the weight holds infinity or NaN, and then all sums of that row are. One
      // sum of each of the thread's two rows of the weight tells: d[0] and d[2].
      const bool is_finite = fabsf(d[0]) < INFINITY && fabsf(d[2]) < INFINITY;
      const bool warp_is_finite = __all_sync(0xffffffff, is_finite);
      if (!warp_is_finite && threadIdx.x % 32 == 0) args.redo.add(index);
    }
    // RedoTraits has no fast epilogue: few tiles are computed again, and it would be more code.
    if (!is_fast || Traits::kIsRedo) {
      store_general(args.epilogue, row, column, d, scales, staging.sums, barrier);
    } else if (args.epilogue.mask == nullptr) {
      store_fast<false>(args.epilogue, row, column, d, scales, staging, barrier);
    } else {
      store_fast<true>(args.epilogue, row, column, d, scales, staging, barrier);
    }
  });
}

// A consumer warpgroup of GradientTraits. The results of a tile are stored while the next tile is
// multiplied, spread evenly over its k-tiles. Example: with 4 boxes and 16 k-tiles, a box is stored
// after the k-tiles 0, 4, 8 and 12.
template <typename Traits>
__device__ __forceinline__ void consume_gradient(const Arguments<Traits>& args,
                                                 const CUtensorMap& out_map, uint32_t base,
                                                 SharedMemory<Traits>& shared, int warpgroup) {
  const int k_tiles = args.k_tiles();
  const int tile_count = args.tile_count();
  const int clusters = gridDim.x / BlockConfig::kClusterSize;
  ConsumerWarpgroup<Traits> consumer(args, base, warpgroup);
  PackedGradient<typename Traits::Out> packed;
  float d[Config::kAccumulators];
  int index = blockIdx.x / BlockConfig::kClusterSize;
  const auto store_next_box = [&] {
    const Tile packed_tile = args.tile_at(index - clusters);  // this block's tile before `index`
    packed.store_next(out_map, consumer.row(packed_tile), consumer.column(packed_tile),
                      shared.staging[warpgroup]);
  };
  // This is for_each_tile, with `index` outside, as store_next_box uses it.
  for (; index < tile_count; index += clusters) {
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      consumer.multiply(d, k_tile);
      // Stores boxes until the share of the boxes that is stored has reached the share of the
      // k-tiles that is multiplied.
      while (packed.stored * k_tiles < packed.kBoxes * (k_tile + 1)) store_next_box();
    }
    consumer.complete();
    packed.pack(d);
  }
  while (packed.stored < packed.kBoxes) store_next_box();
  // Shared memory must stay until TMA has read it.
  if (threadIdx.x % 32 == 0) ptx::wait_stores_read<0>();
}

// Returns whether any tile is computed from the fp16 weight. All lanes of a warp call it.
template <typename Traits>
__device__ __forceinline__ bool needs_converted_weight(const Arguments<Traits>& args) {
  int x_tile = 0;
  while (x_tile < args.tiles.x_tiles && !computes_x_tile(args, x_tile)) ++x_tile;
  return x_tile < args.tiles.x_tiles;
}

// A converter warp of the block, 0 <= converter < ConvertWeightConfig::kWarps, for a weight in this
// layout (RowMajor or Transposed, convert_weight.cuh).
template <typename Layout, typename Traits>
__device__ __forceinline__ void run_converter(const Arguments<Traits>& args,
                                              SharedMemory<Traits>& shared, int converter) {
  const int barrier = Config::kFirstConverterBarrier + converter;
  convert_weight<Layout>(args.conversion, args.k, args.tiles.weight_tiles,
                         gridDim.x / BlockConfig::kClusterSize, shared.converters[converter],
                         barrier, &shared.progress, [&] { return needs_converted_weight(args); });
}

// The kernel. The grid has at most as many clusters as the GPU runs at once, and at most one a
// tile. x_map and weight_map describe the operands to TMA, and out_map the result of
// GradientTraits.
//
// It runs under programmatic dependent launch. wait_for_previous_kernel waits for the end of the
// kernel before, whose results it reads. start_next_kernel lets the next kernel start early and run
// as far as its own wait_for_previous_kernel.
template <typename Traits>
__global__ void KERNELS_CLUSTER __launch_bounds__(BlockConfig::kThreads, 1)
    gemm_single_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap out_map,
                       const __grid_constant__ Arguments<Traits> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  static_assert(sizeof(SharedMemory<Traits>) <= 227 * 1024, "a block has no more shared memory");
  SharedMemory<Traits>& shared = *reinterpret_cast<SharedMemory<Traits>*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const int warpgroup = threadIdx.x / 128;
  // The first thread of the producer warp, which follows the consumer warpgroups.
  constexpr int kProducerThread = BlockConfig::kConsumerThreads;
  if constexpr (Traits::kIsRedo) {
    wait_for_previous_kernel();          // which may list tiles until it ends
    if (args.tile_count() == 0) return;  // in both blocks of the cluster
  }
  if (threadIdx.x == kProducerThread) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
    shared.progress = 0;
  }
  init_barriers<Config::kStages>(base + offsetof(SharedMemory<Traits>, barriers.full),
                                 base + offsetof(SharedMemory<Traits>, barriers.empty));
  // The next kernel is RedoTraits. With its early start, calls take 3% less time on an H200.
  if constexpr (Traits::kConvertsWeight) start_next_kernel();
  wait_for_previous_kernel();
  if constexpr (Traits::kIsHalf) start_next_kernel();

  if (warpgroup >= BlockConfig::kConsumerWarpgroups) {
    constexpr int kRegisters =
        Traits::kIsGradient ? Config::kGradientWorkerRegisters : Config::kWorkerRegisters;
    ptx::setmaxnreg_dec<kRegisters>();
    if (threadIdx.x < kProducerThread + 32) {
      produce(base, x_map, weight_map, args, shared);
    } else if constexpr (Traits::kConvertsWeight) {
      const int converter = threadIdx.x / 32 - BlockConfig::kConsumerWarps - 1;
      if (args.weight_is_transposed) {
        run_converter<Transposed>(args, shared, converter);
      } else {
        run_converter<RowMajor>(args, shared, converter);
      }
    }
  } else {
    constexpr int kRegisters =
        Traits::kIsGradient ? Config::kGradientConsumerRegisters : Config::kConsumerRegisters;
    ptx::setmaxnreg_inc<kRegisters>();
    if constexpr (Traits::kIsGradient) {
      consume_gradient(args, out_map, base, shared, warpgroup);
    } else {
      consume(args, base, shared, warpgroup);
    }
  }
  // A block must not end while the other one still copies to its memory or arrives at its barriers.
  ptx::cluster_sync();
#endif
}

}  // namespace kernels::sm90::gemm_single
