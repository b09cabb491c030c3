// One product on Hopper: a TMA producer, two consumer warpgroups that multiply, and for float32
// warps that convert the weight. Tiles that fp16 does not carry are multiplied again, as TF32.
//
//   x [m, k], weight [n, k], or their transposes; out [m, n]

#pragma once

#include <cuda_fp16.h>

#include <climits>
#include <cstddef>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/convert_weight.cuh"
#include "linear/sm90/gemm_single_epilogue.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90 {

enum class Mode {
  kHalf,      // operands of half types, of which either dimension is adjacent
  kGradient,  // the same; out [n, m] is the product as it is, without an epilogue
  kConvert,   // x scaled and rounded before, the weight in the same kernel
  kRedo,      // the tiles of that which fp16 does not carry
};

template <typename ElementType, typename OutType, Mode kMode>
struct ProductKind {
  using Element = ElementType;
  using Out = OutType;
  static constexpr bool kConverts = kMode == Mode::kConvert, kIsRedo = kMode == Mode::kRedo;
  static constexpr bool kIsGradient = kMode == Mode::kGradient;
  static constexpr bool kIsHalf = kMode == Mode::kHalf || kIsGradient;
};

// Half types choose layouts at run time: half the time to compile, 0.5% of an H100's time.
template <typename T>
using Half = ProductKind<T, T, Mode::kHalf>;
template <typename T>
using Gradient = ProductKind<T, T, Mode::kGradient>;
using Rounded = ProductKind<__half, float, Mode::kConvert>;
using Redo = ProductKind<ptx::Tf32, float, Mode::kRedo>;

// A block's tile: 128 rows of the weight, operand A, and 256 of x, operand B, which a cluster's
// blocks have in common. Rows in shared memory are as long as the widest swizzle.
constexpr int kWeightRows = kFeatures * kConsumers;
static_assert(kPanelRows == kWeightRows, "a block converts what it multiplies");
constexpr int kXHalf = kXRows / kClusterSize;  // rows of x that a block loads for both
constexpr int kRowBytes = 128;
static_assert(kRowBytes / sizeof(__half) == kStepK, "steps are the same");
constexpr int kXBytes = kXRows * kRowBytes, kWeightBytes = kWeightRows * kRowBytes;
// Operands as they lie in memory are copied in boxes of 64 rows and a step of K.
constexpr int kBoxRows = 64, kBoxBytes = kBoxRows * kRowBytes;
static_assert(kBoxRows == kStepK && kFeatures == kBoxRows, "a warpgroup multiplies a box");
constexpr int kSums = kXRows / 2, kStages = 4;  // sums of a thread; of the pipeline
constexpr int kWorkerRegisters = 88, kProductRegisters = 208;
// Packed results take registers from the producer.
constexpr int kGradientWorkerRegisters = 24, kGradientProductRegisters = 240;
static_assert(kGradientWorkerRegisters + kConsumers * kGradientProductRegisters <=
                  168 * (kConsumers + 1),
              "a block is launched with 168 registers a thread");

template <typename Kind>
struct Memory {
  uint8_t x[kStages][kXBytes];
  uint8_t weight[kStages][kWeightBytes];
  Staging<typename Kind::Out> staging[kConsumers];
  Scales<typename Kind::Out> scales[kConsumers];
  std::conditional_t<Kind::kConverts, ConverterMemory, int> converters;
  Barriers<kStages> barriers;
  int progress;
};

// Tiles to be made again.
struct TileList {
  unsigned* count;      // 0 at first
  unsigned* is_listed;  // [tiles], 0 at first
  int* tiles;

  __device__ void add(int tile) const {
    if (atomicExch(is_listed + tile, 1u) == 0) tiles[atomicAdd(count, 1u)] = tile;
  }
};

template <typename Kind>
struct Product {
  static constexpr int kK = kRowBytes / sizeof(typename Kind::Element);  // of K a step

  Epilogue<typename Kind::Out> epilogue;
  int k;
  TileOrder tiles;
  bool x_is_transposed, weight_is_transposed;  // Half's operand is [k, rows]
  TileList redo;                               // which Rounded writes and Redo reads
  Conversion conversion;                       // where Kind converts
  const int* x_exponent;  // [m], where Kind converts: rows were scaled by 2^exponent

  __device__ int steps() const { return (k + kK - 1) / kK; }
  __device__ int count() const {
    return Kind::kIsRedo ? static_cast<int>(*redo.count) : tiles.count();
  }
  // float32: in the order in which the weight is converted. Half types: neighbouring clusters share
  // a tile of x, 0.3% of an H200's time.
  __device__ Tile find(int index) const {
    if constexpr (std::is_same_v<typename Kind::Out, float>) {
      return tiles.find(Kind::kIsRedo ? redo.tiles[index] : index);
    }
    const Tile transposed = TileOrder{tiles.weight_tiles, tiles.x_tiles}.find(index);
    return {transposed.weight, transposed.x};
  }
};

// Whether Kind makes a tile of x: one warp. Redo makes those with rows that fp16 does not carry.
template <typename Kind>
__device__ bool is_made(const Product<Kind>& p, int x_tile) {
  if (!Kind::kConverts) return true;
  bool is_carried = true;
#pragma unroll
  for (int i = threadIdx.x % 32; i < kXRows; i += 32) {
    const int row = x_tile * kXRows + i;
    is_carried &= row >= p.epilogue.m || __ldg(p.x_exponent + row) != fp16x3::kNeedsTf32;
  }
  return __all_sync(0xffffffff, is_carried);
}

// The TMA producer: one warp, of which one thread copies.
template <typename Kind>
__device__ void produce(uint32_t base, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                        const Product<Kind>& p, Memory<Kind>& shared) {
  const uint32_t full = base + offsetof(Memory<Kind>, barriers.full);
  const uint32_t empty = base + offsetof(Memory<Kind>, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  const uint32_t x = base + offsetof(Memory<Kind>, x) + rank * kXHalf * kRowBytes;
  const uint32_t weight = base + offsetof(Memory<Kind>, weight);
  const bool copies = threadIdx.x % 32 == 0;
  const int steps = p.steps(), count = p.count();
  Ring<kStages> ring;
  int started = 0;  // steps before this tile
  for (int i = blockIdx.x / kClusterSize; i < count; i += gridDim.x / kClusterSize) {
    const Tile tile = p.find(i);
    const int row = tile.x * kXRows + rank * kXHalf;
    const int panel = tile.weight * kClusterSize + rank, weight_row = panel * kWeightRows;
    if (!is_made(p, tile.x)) {
      if (copies && rank == 0) p.redo.add(i);
      started += steps;
      continue;
    }
    int converted = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      if constexpr (Kind::kConverts) {
        if (copies) atomicExch(&shared.progress, started + step);
        if (step >= converted) converted = step + wait_converted(p.conversion, panel, step);
      }
      if (!copies) continue;
      const uint32_t arrived = full + 8 * ring.stage;
      const uint32_t to_x = x + ring.stage * kXBytes,
                     to_weight = weight + ring.stage * kWeightBytes;
      ptx::mbarrier_arrive_expect_tx(arrived, kXBytes + kWeightBytes);
      if constexpr (Kind::kConverts) {  // both are stepwise
        ptx::copy_tensor_multicast(to_x, &x_map, 0, row, step, arrived, kBothBlocks);
        ptx::copy_tensor(to_weight, &weight_map, 0, weight_row, step, arrived);
        continue;
      }
      const int k = step * p.kK;
      for (int i = 0; i < kXHalf / kBoxRows; ++i) {
        const int at = row + i * kBoxRows;
        ptx::copy_tensor_multicast(to_x + i * kBoxBytes, &x_map, p.x_is_transposed ? at : k,
                                   p.x_is_transposed ? k : at, arrived, kBothBlocks);
      }
      for (int i = 0; i < kWeightRows / kBoxRows; ++i) {
        const int at = weight_row + i * kBoxRows;
        ptx::copy_tensor(to_weight + i * kBoxBytes, &weight_map, p.weight_is_transposed ? at : k,
                         p.weight_is_transposed ? k : at, arrived);
      }
    }
    started += steps;
  }
  if (Kind::kConverts && copies) atomicExch(&shared.progress, INT_MAX - kLead);
}

// A thread's rows and feature in the epilogue, prefetched while the products are made.
template <typename Kind>
struct ThreadScales {
  static constexpr bool kScaled = Scales<typename Kind::Out>::kScaled;
  static constexpr int kEach = kScaled ? kXRows / 128 : 0;  // rows of x
  float bias = 0;
  int weight_exponent = 0, x_exponent[kEach + 1] = {};
  bool is_fast;  // whether the tile is, as far as this thread sees

  __device__ ThreadScales(const Product<Kind>& p, int first_row, int first_feature)
      : is_fast(p.epilogue.is_fast) {
    const Epilogue<typename Kind::Out>& epilogue = p.epilogue;
    const int thread = threadIdx.x % 128, feature = first_feature + thread;
    if (thread < kFeatures && feature < epilogue.n) {
      if (epilogue.bias != nullptr) bias = static_cast<float>(__ldg(epilogue.bias + feature));
      if (Kind::kConverts) weight_exponent = __ldg(p.conversion.weight.exponent + feature);
    }
    is_fast &= abs(weight_exponent) <= kMaxFastExponent;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = first_row + i * 128 + thread;
      if (Kind::kConverts && row < epilogue.m) x_exponent[i] = __ldg(p.x_exponent + row);
      is_fast &= abs(x_exponent[i]) <= kMaxFastExponent;
    }
  }

  // For the warpgroup. Returns whether the tile is direct: half types' bias is divided then.
  __device__ bool store(const Epilogue<typename Kind::Out>& p, Scales<typename Kind::Out>* scales,
                        int barrier) const {
    const int thread = threadIdx.x % 128;
    // All have read the scales of the tile before.
    const bool all_fast = ptx::barrier_and(barrier, 128, is_fast);
    if (thread < kFeatures) {
      scales->bias[thread] = bias * (all_fast && !kScaled ? p.divisor.scale : 1.0f);
      if constexpr (kScaled) {
        scales->weight_exponent[thread] = static_cast<int8_t>(weight_exponent);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      scales->x_scale[i * 128 + thread] = fp16x3::power_of_two(-x_exponent[i]);
    }
    ptx::barrier_sync(barrier, 128);
    return all_fast;
  }
};

template <typename Kind, ptx::Major kX, ptx::Major kWeight>
__device__ __forceinline__ void multiply_step(float (&d)[kSums], uint32_t x, uint32_t weight,
                                              bool accumulates) {
  constexpr auto step_of = [](ptx::Major major) {
    return major == ptx::Major::kK ? ptx::kDescriptorK16 : ptx::kDescriptorLines16;
  };
  const uint64_t a = ptx::matrix_descriptor<kRowBytes, kWeight, kBoxBytes>(weight);
  const uint64_t b = ptx::matrix_descriptor<kRowBytes, kX, kBoxBytes>(x);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kRowBytes / 32; ++s) {
    ptx::wgmma<kWeight, kX>(typename Kind::Element{}, d, a + s * step_of(kWeight),
                            b + s * step_of(kX), accumulates || s > 0);
  }
  ptx::wgmma_commit_group();
}

template <typename Kind>
__device__ __forceinline__ void multiply_step(const Product<Kind>& p, float (&d)[kSums], uint32_t x,
                                              uint32_t weight, bool accumulates) {
  using ptx::Major;
  if (Kind::kIsHalf && p.x_is_transposed && p.weight_is_transposed) {
    multiply_step<Kind, Major::kMN, Major::kMN>(d, x, weight, accumulates);
  } else if (Kind::kIsHalf && p.x_is_transposed) {
    multiply_step<Kind, Major::kMN, Major::kK>(d, x, weight, accumulates);
  } else if (Kind::kIsHalf && p.weight_is_transposed) {
    multiply_step<Kind, Major::kK, Major::kMN>(d, x, weight, accumulates);
  } else {
    multiply_step<Kind, Major::kK, Major::kK>(d, x, weight, accumulates);
  }
}

// A consumer warpgroup's place in the block's memory and in the result.
template <typename Kind>
struct ProductConsumer {
  const Product<Kind>& p;
  uint32_t base;
  int warpgroup, rank = ptx::cluster_ctarank();
  uint32_t full = base + offsetof(Memory<Kind>, barriers.full);
  uint32_t empty = base + offsetof(Memory<Kind>, barriers.empty);
  uint32_t x = base + offsetof(Memory<Kind>, x);
  uint32_t weight = base + offsetof(Memory<Kind>, weight) + warpgroup * kFeatures * kRowBytes;
  Ring<kStages> ring;

  __device__ int row(const Tile& tile) const { return tile.x * kXRows; }
  __device__ int feature(const Tile& tile) const {
    return (tile.weight * kClusterSize + rank) * kWeightRows + warpgroup * kFeatures;
  }

  // The products of a tile's next step. Those of the step before are complete then.
  __device__ __forceinline__ void multiply(float (&d)[kSums], int step) {
    ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
    multiply_step(p, d, x + ring.stage * kXBytes, weight + ring.stage * kWeightBytes, step > 0);
    ptx::wgmma_wait_group<1>();
    if (step > 0) release(empty + 8 * ring.previous());
    ring.advance();
  }

  __device__ void complete() const {
    ptx::wgmma_wait_group<0>();
    release(empty + 8 * ring.previous());
  }
};

template <typename Kind>
__device__ __forceinline__ void consume(const Product<Kind>& p, uint32_t base, Memory<Kind>& shared,
                                        int warpgroup) {
  const int count = p.count(), barrier = 1 + warpgroup;
  Scales<typename Kind::Out>& scales = shared.scales[warpgroup];
  Staging<typename Kind::Out>& staging = shared.staging[warpgroup];
  ProductConsumer<Kind> consumer{p, base, warpgroup};
  float d[kSums];
  for (int i = blockIdx.x / kClusterSize; i < count; i += gridDim.x / kClusterSize) {
    const Tile tile = p.find(i);
    if (!is_made(p, tile.x)) continue;
    const int steps = p.steps();
    const int row = consumer.row(tile), feature = consumer.feature(tile);
    const ThreadScales<Kind> own(p, row, feature);

    // multiply
    for (int step = 0; step < steps; ++step) consumer.multiply(d, step);
    const bool is_fast = own.store(p.epilogue, &scales, barrier);
    consumer.complete();

    // epilogue
    if constexpr (Kind::kConverts) {
      // A sum of each of the thread's two rows of the weight tells: x is finite.
      const bool is_finite = fabsf(d[0]) < INFINITY && fabsf(d[2]) < INFINITY;
      if (!__all_sync(0xffffffff, is_finite) && threadIdx.x % 32 == 0) p.redo.add(i);
    }
    if (!is_fast || Kind::kIsRedo) {  // few tiles are made again, not worth more code
      store_general(p.epilogue, row, feature, d, scales, staging.sums, barrier);
    } else if (p.epilogue.mask == nullptr) {
      store_fast<false>(p.epilogue, row, feature, d, scales, staging, barrier);
    } else {
      store_fast<true>(p.epilogue, row, feature, d, scales, staging, barrier);
    }
  }
}

// The same for gradients: the results of a tile are stored while the next one is multiplied.
template <typename Kind>
__device__ __forceinline__ void consume_gradient(const Product<Kind>& p, const CUtensorMap& out_map,
                                                 uint32_t base, Memory<Kind>& shared,
                                                 int warpgroup) {
  const int steps = p.steps(), count = p.count(), clusters = gridDim.x / kClusterSize;
  ProductConsumer<Kind> consumer{p, base, warpgroup};
  PackedResults<typename Kind::Out> packed;
  float d[kSums];
  int i = blockIdx.x / kClusterSize;
  const auto store_next = [&] {
    const Tile tile = p.find(i - clusters);
    packed.store_next(out_map, consumer.row(tile), consumer.feature(tile),
                      shared.staging[warpgroup]);
  };
  for (; i < count; i += clusters) {
    for (int step = 0; step < steps; ++step) {
      consumer.multiply(d, step);
      while (packed.stored * steps < packed.kEach * (step + 1)) store_next();
    }
    consumer.complete();
    packed.pack(d);
  }
  while (packed.stored < packed.kEach) store_next();
  if (threadIdx.x % 32 == 0) ptx::wait_stores_read<0>();
}

template <typename Kind>
__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    gemm_single_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap out_map,
                       const __grid_constant__ Product<Kind> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  static_assert(sizeof(Memory<Kind>) <= 227 * 1024, "a block has no more shared memory");
  Memory<Kind>& shared = *reinterpret_cast<Memory<Kind>*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const int warpgroup = threadIdx.x / 128;
  if constexpr (Kind::kIsRedo) {
    wait_for_previous_kernel();
    if (p.count() == 0) return;  // in both blocks of the cluster
  }
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
    shared.progress = 0;
  }
  init_barriers<kStages>(base + offsetof(Memory<Kind>, barriers.full),
                         base + offsetof(Memory<Kind>, barriers.empty));
  if constexpr (Kind::kConverts) start_next_kernel();  // Redo's: 3% of an H200's time
  wait_for_previous_kernel();
  if constexpr (Kind::kIsHalf) start_next_kernel();

  if (warpgroup >= kConsumers) {
    ptx::setmaxnreg_dec<Kind::kIsGradient ? kGradientWorkerRegisters : kWorkerRegisters>();
    if (threadIdx.x < kConsumers * 128 + 32) {  // load
      produce(base, x_map, weight_map, p, shared);
    } else if constexpr (Kind::kConverts) {  // convert
      const int converter = threadIdx.x / 32 - 4 * kConsumers - 1;
      const auto makes_any = [&] {
        int x_tile = 0;
        while (x_tile < p.tiles.x_tiles && !is_made(p, x_tile)) ++x_tile;
        return x_tile < p.tiles.x_tiles;
      };
      const auto convert_all = [&](auto is_transposed) {
        convert<is_transposed.value>(p.conversion, p.k, p.tiles.weight_tiles,
                                     gridDim.x / kClusterSize, shared.converters[converter],
                                     1 + kConsumers + converter, &shared.progress, makes_any);
      };
      p.weight_is_transposed ? convert_all(std::true_type{}) : convert_all(std::false_type{});
    }
  } else {  // multiply
    ptx::setmaxnreg_inc<Kind::kIsGradient ? kGradientProductRegisters : kProductRegisters>();
    if constexpr (Kind::kIsGradient) {
      consume_gradient(p, out_map, base, shared, warpgroup);
    } else {
      consume(p, base, shared, warpgroup);
    }
  }
  ptx::cluster_sync();  // a block that has ended can't be copied to
#endif
}

}  // namespace kernels::sm90
