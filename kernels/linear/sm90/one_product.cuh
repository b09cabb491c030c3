// The product on Hopper: a producer, two warpgroups that multiply, and for float32 warps that
// convert the weight. Tiles that fp16 does not carry are multiplied again, as TF32.

#ifndef KERNELS_LINEAR_SM90_ONE_PRODUCT_CUH_
#define KERNELS_LINEAR_SM90_ONE_PRODUCT_CUH_

#include <cuda_fp16.h>

#include <climits>
#include <cstddef>
#include <type_traits>

#include "common/pdl.cuh"
#include "common/ptx/sm90.cuh"
#include "linear/sm90/common.cuh"
#include "linear/sm90/convert.cuh"
#include "linear/sm90/one_product_store.cuh"

namespace kernels {
namespace sm90 {

// float16 and bfloat16, multiplied as they are. The mask has a kernel of its own: with its code,
// that without was 0.4% slower on an H200, that of float32 1.5%.
template <typename T, bool kHasMask>
struct Half {
  using Operand = T;
  using Out = T;
  static constexpr bool kConverts = false, kIsAgain = false, kMask = kHasMask, kIsGeneral = false;
};

// The same of operands of which either dimension is adjacent, with ReLU or, for the gradients,
// without. It is chosen at run time, once a tile: two cores compile these two kernels in 2 s, and
// one for each case in 9.
template <typename T>
struct General {
  using Operand = T;
  using Out = T;
  static constexpr bool kConverts = false, kIsAgain = false, kMask = true, kIsGeneral = true;
};

// float32, scaled and rounded to fp16.
template <bool kHasMask>
struct Rounded {
  using Operand = __half;
  using Out = float;
  static constexpr bool kConverts = true, kIsAgain = false, kMask = kHasMask, kIsGeneral = false;
};

// The tiles of it that hold a row of which fp16 carries too little, or inf or NaN, from TF32.
template <bool kHasMask>
struct Again {
  using Operand = ptx::Tf32;
  using Out = float;
  static constexpr bool kConverts = false, kIsAgain = true, kMask = kHasMask, kIsGeneral = false;
};

// A block's tile: 128 rows of the weight, operand A, and 256 of x, operand B, which the two blocks
// of a cluster have in common. The other way round half types took 1.5 to 2% longer on an H200,
// which holds its clock back to save power. Rows in shared memory are as long as the widest
// swizzle.
constexpr int kWeightRows = kFeatures * kConsumers;
static_assert(kShareRows == kWeightRows, "a block converts what it multiplies");
constexpr int kXShare = kXRows / kClusterSize;  // rows of x a block brings for both
constexpr int kRowBytes = 128;
static_assert(kRowBytes / sizeof(__half) == kStepK, "steps are the same");
constexpr int kXBytes = kXRows * kRowBytes, kWeightBytes = kWeightRows * kRowBytes;
// General copies an operand in boxes of 64 rows and a step of K, whichever of the two is adjacent.
constexpr int kBoxRows = 64, kBoxBytes = kBoxRows * kRowBytes;
static_assert(kBoxRows == kStepK && kFeatures == kBoxRows, "a warpgroup multiplies a box");
constexpr int kSums = kXRows / 2;  // a thread
constexpr int kStages = 4;
constexpr int kWorkerRegisters = 88, kProductRegisters = 208;

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

static_assert(sizeof(Memory<Half<__half, true>>) <= 227 * 1024, "a block has no more");
static_assert(sizeof(Memory<General<__half>>) <= 227 * 1024, "a block has no more");
static_assert(sizeof(Memory<Rounded<true>>) <= 227 * 1024, "a block has no more");
static_assert(sizeof(Memory<Again<true>>) <= 227 * 1024, "a block has no more");

// Tiles to be made again.
struct TileList {
  unsigned* count;  // 0 at first
  unsigned* marks;  // [tiles]: whether the tile is in the list, 0 at first
  int* tiles;

  // By one thread.
  __device__ void add(int tile) const {
    if (atomicExch(marks + tile, 1u) == 0) tiles[atomicAdd(count, 1u)] = tile;
  }
};

template <typename Kind>
struct Problem {
  static constexpr int kK = kRowBytes / sizeof(typename Kind::Operand);  // of K a step

  Output<typename Kind::Out> output;
  int k;
  Tiles tiles;
  TileList again;         // which Rounded writes and Again reads
  Conversion conversion;  // where Kind converts
  // Whether General has [k, rows], with adjacent rows, for [rows, k].
  bool x_is_transposed, weight_is_transposed;

  __device__ int steps() const { return (k + kK - 1) / kK; }
  __device__ int count() const {
    return Kind::kIsAgain ? static_cast<int>(*again.count) : tiles.count();
  }
  // The tile of an index. That of float32 is in the order in which the weight is converted.
  // Clusters next to each other have a tile of x in common for half types: 0.3% of an H200's time.
  __device__ void find(int index, int* x_tile, int* weight_tile) const {
    if constexpr (std::is_same_v<typename Kind::Out, float>) {
      tiles.find(Kind::kIsAgain ? again.tiles[index] : index, x_tile, weight_tile);
    } else {
      Tiles{tiles.weight_tiles, tiles.x_tiles}.find(index, weight_tile, x_tile);
    }
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Brings the tiles, each in steps of K: one warp, of which one thread copies.
template <typename Kind>
__device__ void produce(uint32_t base, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                        const Problem<Kind>& p, int* progress) {
  const uint32_t full = base + offsetof(Memory<Kind>, barriers.full);
  const uint32_t empty = base + offsetof(Memory<Kind>, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  const uint32_t x = base + offsetof(Memory<Kind>, x) + rank * kXShare * kRowBytes;
  const uint32_t weight = base + offsetof(Memory<Kind>, weight);
  const bool copies = threadIdx.x % 32 == 0;
  const int steps = p.steps(), count = p.count();
  Ring<kStages> ring;
  int started = 0;  // steps before this tile
  for (int tile = blockIdx.x / kClusterSize; tile < count; tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.find(tile, &x_tile, &weight_tile);
    const int row = x_tile * kXRows + rank * kXShare;
    const int share = weight_tile * kClusterSize + rank;
    int converted = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const uint32_t arrived = full + 8 * ring.stage;
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      if constexpr (Kind::kConverts) {
        if (copies) atomicExch(progress, started + step);
        if (step >= converted) {
          converted = step + wait_converted(p.conversion, share, step);
        }
      }
      if (copies) {
        ptx::mbarrier_arrive_expect_tx(arrived, kXBytes + kWeightBytes);
        constexpr int kBoth = (1 << kClusterSize) - 1;
        const uint32_t to_x = x + ring.stage * kXBytes;
        const uint32_t to_weight = weight + ring.stage * kWeightBytes;
        if constexpr (Kind::kIsGeneral) {
          const int k = step * p.kK;
          for (int i = 0; i < kXShare / kBoxRows; ++i) {
            const int at = row + i * kBoxRows;
            ptx::copy_tensor_multicast(to_x + i * kBoxBytes, &x_map, p.x_is_transposed ? at : k,
                                       p.x_is_transposed ? k : at, arrived, kBoth);
          }
          for (int i = 0; i < kWeightRows / kBoxRows; ++i) {
            const int at = share * kWeightRows + i * kBoxRows;
            ptx::copy_tensor(to_weight + i * kBoxBytes, &weight_map,
                             p.weight_is_transposed ? at : k, p.weight_is_transposed ? k : at,
                             arrived);
          }
        } else if constexpr (Kind::kConverts) {  // both are stepwise
          ptx::copy_tensor_multicast(to_x, &x_map, 0, row, step, arrived, kBoth);
          ptx::copy_tensor(to_weight, &weight_map, 0, share * kWeightRows, step, arrived);
        } else {
          ptx::copy_tensor_multicast(to_x, &x_map, step * p.kK, row, arrived, kBoth);
          ptx::copy_tensor(to_weight, &weight_map, step * p.kK, share * kWeightRows, arrived);
        }
      }
    }
    started += steps;
  }
  if (Kind::kConverts && copies) atomicExch(progress, INT_MAX - kLead);
}

// A thread's share of the epilogue's data, on its way from memory while the products are made.
template <typename Kind>
struct OwnScales {
  static constexpr bool kScaled = Scales<typename Kind::Out>::kScaled;
  static constexpr int kEach = kScaled ? kXRows / 128 : 0;  // rows of x
  float bias = 0;
  int weight_exponent = 0, x_exponent[kEach + 1] = {};
  bool is_direct;             // whether the tile is, as far as this thread sees
  bool is_uncarried = false;  // whether a row of x is

  __device__ OwnScales(const Output<typename Kind::Out>& p, int first_row, int first_feature)
      : is_direct(p.is_direct) {
    const int thread = threadIdx.x % 128, feature = first_feature + thread;
    if (thread < kFeatures && feature < p.n) {
      if (p.bias != nullptr) bias = static_cast<float>(__ldg(p.bias + feature));
      if (Kind::kConverts) weight_exponent = __ldg(p.weight_exponent + feature);
    }
    is_direct &= abs(weight_exponent) <= kModestExponent;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = first_row + i * 128 + thread;
      if (Kind::kConverts && row < p.m) x_exponent[i] = __ldg(p.x_exponent + row);
      is_direct &= abs(x_exponent[i]) <= kModestExponent;
      is_uncarried |= x_exponent[i] == split::kUncarried;
    }
  }

  // Tells the warpgroup. Returns whether the tile is direct: half types' bias is divided then.
  __device__ bool share(const Output<typename Kind::Out>& p, Scales<typename Kind::Out>* scales,
                        int barrier) const {
    const int thread = threadIdx.x % 128;
    // All have read what the tile before needed.
    const bool all_direct = ptx::barrier_and(barrier, 128, is_direct);
    if (thread < kFeatures) {
      scales->bias[thread] = bias * (all_direct && !kScaled ? p.divisor.scale : 1.0f);
      if constexpr (kScaled) {
        scales->weight_exponent[thread] = static_cast<int8_t>(weight_exponent);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      scales->x_scale[i * 128 + thread] = split::power_of_two(-x_exponent[i]);
    }
    ptx::barrier_sync(barrier, 128);
    return all_direct;
  }
};

// A warpgroup's sums over a tile's steps, from the stages that begin at x and weight.
template <typename Kind, ptx::Major kX, ptx::Major kWeight>
__device__ __forceinline__ void multiply(float (&d)[kSums], Ring<kStages>& ring, int steps,
                                         uint32_t x, uint32_t weight, uint32_t full,
                                         uint32_t empty) {
  using ptx::Major;
  constexpr auto step_of = [](Major major) {
    return major == Major::kK ? ptx::kDescriptorK16 : ptx::kDescriptorLines16;
  };
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
    const uint64_t a =
        ptx::matrix_descriptor<kRowBytes, kWeight, kBoxBytes>(weight + ring.stage * kWeightBytes);
    const uint64_t b = ptx::matrix_descriptor<kRowBytes, kX, kBoxBytes>(x + ring.stage * kXBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kRowBytes / 32; ++s) {
      ptx::wgmma<kWeight, kX>(typename Kind::Operand{}, d, a + s * step_of(kWeight),
                              b + s * step_of(kX), step > 0 || s > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    if (step > 0) release(empty + 8 * ring.previous());
  }
}

// A warpgroup's sums on their way out.
template <typename Kind>
__device__ void store(const Output<typename Kind::Out>& p, int row, int feature,
                      const float (&sums)[kSums], Memory<Kind>& shared, int warpgroup,
                      bool is_direct) {
  const Scales<typename Kind::Out>& scales = shared.scales[warpgroup];
  Staging<typename Kind::Out>& staging = shared.staging[warpgroup];
  const int barrier = 1 + warpgroup;
  if (is_direct) {
    if constexpr (Kind::kIsGeneral) {
      if (p.floor < 0) {
        return store_direct<false, false>(p, row, feature, sums, scales, staging, barrier);
      }
      if (p.mask == nullptr) {
        return store_direct<false>(p, row, feature, sums, scales, staging, barrier);
      }
    }
    store_direct<Kind::kMask>(p, row, feature, sums, scales, staging, barrier);
  } else if (p.divisor.is_exact) {
    store_staged<true>(p, row, feature, sums, scales, staging.sums, barrier);
  } else {
    store_staged<false>(p, row, feature, sums, scales, staging.sums, barrier);
  }
}

#endif

template <typename Kind>
__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ Problem<Kind> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  Memory<Kind>& shared = *reinterpret_cast<Memory<Kind>*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t full = base + offsetof(Memory<Kind>, barriers.full);
  const uint32_t empty = base + offsetof(Memory<Kind>, barriers.empty);
  const int warpgroup = threadIdx.x / 128;
  if constexpr (Kind::kIsAgain) {
    wait_for_previous_kernel();
    if (p.count() == 0) return;  // in both blocks of the cluster
  }
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
    shared.progress = 0;
  }
  init_barriers<kStages>(full, empty, 0);
  if constexpr (Kind::kConverts) start_next_kernel();  // Again's launch: 3% of an H200's time
  wait_for_previous_kernel();
  if constexpr (Kind::kIsGeneral) start_next_kernel();

  if (warpgroup >= kConsumers) {
    ptx::setmaxnreg_dec<kWorkerRegisters>();
    if (threadIdx.x < kConsumers * 128 + 32) {
      produce(base, x_map, weight_map, p, &shared.progress);
    } else if constexpr (Kind::kConverts) {
      const int converter = threadIdx.x / 32 - 4 * kConsumers - 1;
      convert(p.conversion, p.k, p.tiles.weight_tiles, gridDim.x / kClusterSize,
              shared.converters.pieces[converter], 1 + kConsumers + converter, &shared.progress);
    }
  } else {
    ptx::setmaxnreg_inc<kProductRegisters>();
    const int rank = ptx::cluster_ctarank(), steps = p.steps(), count = p.count();
    const uint32_t x = base + offsetof(Memory<Kind>, x);
    const uint32_t weight =
        base + offsetof(Memory<Kind>, weight) + warpgroup * kFeatures * kRowBytes;
    Ring<kStages> ring;
    float d[kSums];
    for (int tile = blockIdx.x / kClusterSize; tile < count; tile += gridDim.x / kClusterSize) {
      int x_tile, weight_tile;
      p.find(tile, &x_tile, &weight_tile);
      const int row = x_tile * kXRows;
      const int feature = (weight_tile * kClusterSize + rank) * kWeightRows + warpgroup * kFeatures;
      const OwnScales<Kind> own(p.output, row, feature);
      using ptx::Major;
      if constexpr (Kind::kIsGeneral) {
        if (p.x_is_transposed && p.weight_is_transposed) {
          multiply<Kind, Major::kMN, Major::kMN>(d, ring, steps, x, weight, full, empty);
        } else if (p.x_is_transposed) {
          multiply<Kind, Major::kMN, Major::kK>(d, ring, steps, x, weight, full, empty);
        } else if (p.weight_is_transposed) {
          multiply<Kind, Major::kK, Major::kMN>(d, ring, steps, x, weight, full, empty);
        } else {
          multiply<Kind, Major::kK, Major::kK>(d, ring, steps, x, weight, full, empty);
        }
      } else {
        multiply<Kind, Major::kK, Major::kK>(d, ring, steps, x, weight, full, empty);
      }
      const bool is_direct = own.share(p.output, &shared.scales[warpgroup], 1 + warpgroup);
      ptx::wgmma_wait_group<0>();
      release(empty + 8 * ring.previous());
      if constexpr (Kind::kConverts) {
        // An infinity or NaN in a row of the weight makes all its sums infinite or NaN, as x is
        // finite: one of each of the thread's two rows tells.
        const bool is_finite = fabsf(d[0]) < INFINITY && fabsf(d[2]) < INFINITY;
        const bool any = __any_sync(0xffffffff, own.is_uncarried || !is_finite);
        if (any && threadIdx.x % 32 == 0) p.again.add(tile);
      }
      store(p.output, row, feature, d, shared, warpgroup, is_direct);
    }
  }
  ptx::cluster_sync();  // a block that has left can't be copied to
#endif
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_ONE_PRODUCT_CUH_
