// The product on Hopper: a producer, two warpgroups that multiply, and for float32 warps that
// convert the weight.

#ifndef KERNELS_LINEAR_SM90_PRODUCT_CUH_
#define KERNELS_LINEAR_SM90_PRODUCT_CUH_

#include <cuda_fp16.h>

#include <climits>
#include <cstddef>
#include <type_traits>

#include "early_start.cuh"
#include "linear_sm90_common.cuh"
#include "linear_sm90_convert.cuh"
#include "linear_sm90_store.cuh"
#include "ptx.cuh"

namespace kernels {
namespace sm90 {

// float16 and bfloat16, multiplied as they are.
template <typename T>
struct Half {
  using Operand = T;
  using Out = T;
  static constexpr bool kConverts = false;
};

// float32, scaled and rounded to fp16. The mask has a kernel of its own: with its code, that
// without was 1% slower on an H200.
template <bool kHasMask>
struct Rounded {
  using Operand = __half;
  using Out = float;
  static constexpr bool kConverts = true, kMask = kHasMask;
};

// A block's tile: 128 rows of x, operand A, and 256 of the weight, operand B, which the two blocks
// of a cluster have in common. Rows in shared memory are as long as the widest swizzle.
constexpr int kRows = 64 * kConsumers, kColumns = 256;
static_assert(kShareRows == kColumns / kClusterSize, "a block brings its share for both");
constexpr int kRowBytes = 128, kK = kRowBytes / 2;
static_assert(kK == kStepK, "steps are the same");
constexpr int kXBytes = kRows * kRowBytes, kWeightBytes = kColumns * kRowBytes;
constexpr int kSums = kColumns / 2;  // a thread
constexpr int kStages = 4;
constexpr int kWorkerRegisters = 88, kProductRegisters = 208;

template <typename Kind>
struct Memory {
  uint8_t x[kStages][kXBytes];
  uint8_t weight[kStages][kWeightBytes];
  // Half types' store_direct has more of it.
  float4 staging[Kind::kConverts ? 1 : 4][kConsumers][kTurn][128];
  Columns<kColumns, typename Kind::Out> columns[kConsumers];
  std::conditional_t<Kind::kConverts, ConverterMemory, int> converters;
  Barriers<kStages> barriers;
  int progress;
};

static_assert(sizeof(Memory<Rounded<true>>) <= 227 * 1024, "a block has no more");

template <typename Kind>
struct Problem {
  Output<typename Kind::Out> output;
  int k;
  Tiles tiles;
  Conversion conversion;  // where Kind converts
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Brings the tiles, each in steps of K: one warp, of which one thread copies.
template <typename Kind>
__device__ void produce(uint32_t base, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                        const Problem<Kind>& p, int* progress) {
  const uint32_t full = base + offsetof(Memory<Kind>, barriers.full);
  const uint32_t empty = base + offsetof(Memory<Kind>, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  const uint32_t x = base + offsetof(Memory<Kind>, x);
  const uint32_t weight = base + offsetof(Memory<Kind>, weight) + rank * kShareRows * kRowBytes;
  const bool copies = threadIdx.x % 32 == 0;
  const int steps = (p.k + kK - 1) / kK;
  Ring<kStages> ring;
  int started = 0;  // steps before this tile
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int row = (x_tile * kClusterSize + rank) * kRows;
    const int weight_row = weight_tile * kColumns + rank * kShareRows;
    int converted = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const uint32_t arrived = full + 8 * ring.stage;
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      if constexpr (Kind::kConverts) {
        if (copies) atomicExch(progress, started + step);
        if (step >= converted) {
          converted = step + wait_converted(p.conversion, weight_tile * kClusterSize + rank, step);
        }
      }
      if (copies) {
        ptx::mbarrier_arrive_expect_tx(arrived, kXBytes + kWeightBytes);
        ptx::copy_tensor(x + ring.stage * kXBytes, &x_map, step * kK, row, arrived);
        ptx::copy_tensor_multicast(weight + ring.stage * kWeightBytes, &weight_map, step * kK,
                                   weight_row, arrived, (1 << kClusterSize) - 1);
      }
    }
    started += steps;
  }
  if (Kind::kConverts && copies) atomicExch(progress, INT_MAX - kLead);
}

// Sums on their way out. `column` is the tile's first.
template <typename Kind>
__device__ void store(const Problem<Kind>& p, int row, int column, const float (&sums)[kSums],
                      const float (&x_scale)[2], Memory<Kind>& shared, int warpgroup,
                      bool is_direct) {
  const Output<typename Kind::Out>& output = p.output;
  const int lane = threadIdx.x % 32;
  const Columns<kColumns, typename Kind::Out>& columns = shared.columns[warpgroup];
  if (is_direct) {
    if constexpr (Kind::kConverts) {
      store_direct<Kind::kMask>(output, row + lane / 4, column, sums, columns, x_scale);
    } else {
      const uint32_t staging =
          ptx::shared_address(&shared.staging[0][0][0][0]) + threadIdx.x / 32 * 2 * 16 * 128;
      if (output.mask == nullptr) {
        store_direct<false>(output, row, column, sums, columns, staging);
      } else {
        store_direct<true>(output, row, column, sums, columns, staging);
      }
    }
    return;
  }
  float4(&staging)[kTurn][128] = shared.staging[0][warpgroup];
  constexpr int kTurns = (kColumns / 8 + kTurn - 1) / kTurn;
  const int end = min(output.n, column + kColumns);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    stage_turn<0, kTurns>(staging, sums, turn);
    const int in_tile = turn * kTurn * 8;
    const int8_t* const exponent = columns.exponent + in_tile;
    const float* const bias = columns.bias + in_tile;
    if (output.divisor.is_exact) {
      store_turn<true>(output, row + lane / 4, column + in_tile, end, staging, exponent, bias,
                       x_scale);
    } else {
      store_turn<false>(output, row + lane / 4, column + in_tile, end, staging, exponent, bias,
                        x_scale);
    }
  }
}

// What a thread brings of what its warpgroup's columns need: on its way from memory while the
// products are made.
struct OwnColumns {
  static constexpr int kEach = kColumns / 128;
  float bias[kEach];
  int exponent[kEach];
  float x_scale[2];  // of the thread's rows
  bool is_direct;    // whether store_direct serves, as far as this thread sees
};

template <typename Kind>
__device__ OwnColumns load_columns(const Output<typename Kind::Out>& p, int row, int column) {
  const int thread = threadIdx.x % 128;
  OwnColumns own;
  own.is_direct = p.is_direct;
#pragma unroll
  for (int i = 0; i < OwnColumns::kEach; ++i) {
    const int at = column + i * 128 + thread;
    own.bias[i] = p.bias != nullptr && at < p.n ? static_cast<float>(__ldg(p.bias + at)) : 0.0f;
    own.exponent[i] = Kind::kConverts && at < p.n ? __ldg(p.weight_exponent + at) : 0;
    own.is_direct &= abs(own.exponent[i]) <= kModestExponent;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
    own.x_scale[r] =
        split::power_of_two(Kind::kConverts && at < p.m ? -__ldg(p.x_exponent + at) : 0);
  }
  if (Kind::kConverts && thread < 64 && row + thread < p.m) {
    own.is_direct &= abs(__ldg(p.x_exponent + row + thread)) <= kModestExponent;
  }
  return own;
}

// Tells the warpgroup. Returns whether store_direct serves the tile, for which half types' bias is
// divided already.
template <typename Kind>
__device__ bool share_columns(const OwnColumns& own, const Output<typename Kind::Out>& p,
                              Columns<kColumns, typename Kind::Out>* columns, int barrier) {
  // All have read what the tile before needed.
  const bool is_direct = ptx::barrier_and(barrier, 128, own.is_direct);
  const float factor = is_direct && !Kind::kConverts ? p.divisor.scale : 1.0f;
#pragma unroll
  for (int i = 0; i < OwnColumns::kEach; ++i) {
    const int at = i * 128 + threadIdx.x % 128;
    columns->bias[at] = own.bias[i] * factor;
    if constexpr (Kind::kConverts) columns->exponent[at] = static_cast<int8_t>(own.exponent[i]);
  }
  ptx::barrier_sync(barrier, 128);
  return is_direct;
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
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
    shared.progress = 0;
  }
  init_barriers<kStages>(full, empty, 0);
  wait_for_previous_kernel();

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
    const int rank = ptx::cluster_ctarank(), steps = (p.k + kK - 1) / kK;
    const uint32_t x = base + offsetof(Memory<Kind>, x) + warpgroup * 64 * kRowBytes;
    const uint32_t weight = base + offsetof(Memory<Kind>, weight);
    Ring<kStages> ring;
    float d[kSums];
    for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
         tile += gridDim.x / kClusterSize) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      const int row = (x_tile * kClusterSize + rank) * kRows + warpgroup * 64;
      const int column = weight_tile * kColumns;
      const OwnColumns own = load_columns<Kind>(p.output, row, column);
      for (int step = 0; step < steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint64_t a = ptx::matrix_descriptor<kRowBytes>(x + ring.stage * kXBytes);
        const uint64_t b = ptx::matrix_descriptor<kRowBytes>(weight + ring.stage * kWeightBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < kK / 16; ++s) {
          ptx::wgmma(typename Kind::Operand{}, d, a + s * ptx::kDescriptorK16,
                     b + s * ptx::kDescriptorK16, step > 0 || s > 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (step > 0) release(empty + 8 * ring.previous());
      }
      const bool is_direct =
          share_columns<Kind>(own, p.output, &shared.columns[warpgroup], 1 + warpgroup);
      ptx::wgmma_wait_group<0>();
      release(empty + 8 * ring.previous());
      store(p, row + threadIdx.x % 128 / 32 * 16, column, d, own.x_scale, shared, warpgroup,
            is_direct);
    }
  }
  ptx::cluster_sync();  // a block that has left can't be copied to
#endif
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_PRODUCT_CUH_
