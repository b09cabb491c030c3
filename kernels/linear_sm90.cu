// Linear -> ReLU -> divide on Hopper: TMA, wgmma, and the whole epilogue on the accumulators.
//
// Both kernels are persistent, in clusters of two blocks that share what one of the operands has in
// common: a warpgroup brings the data, two multiply. float16 and bfloat16 are multiplied as they
// are. float32 is split into pairs of fp16 (split.cuh): x by a kernel before, the weight, which is
// read once, in the registers of the warps that multiply it. SPLIT.md has the arithmetic.
//
// What was slower on an H200 at [1024, 8192] x [8192, 8192]: clusters of one (5%) and of four
// (25%); float32 weights straight from L2 to registers (a load's result is waited for before the
// products that should hide it); promoted sums in shared memory, which leaves too few stages;
// barriers whose release and acquire are of the cluster's scope (33%).

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "epilogue.cuh"
#include "launchers.h"
#include "ptx.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kClusterSize = 2;
// Compilers for older GPUs, for which the kernels are empty, know no clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define KERNELS_CLUSTER
#else
#define KERNELS_CLUSTER __cluster_dims__(kClusterSize, 1, 1)
#endif
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536,
              "a multiprocessor has 65,536 registers");
// Rows of a tile in shared memory are as long as the widest swizzle.
constexpr int kRowBytes = 128;
// Clusters that run at once work on so many tiles of x side by side, so that L2 serves both
// operands.
constexpr int kSideBySide = 8;

// The tiles of the result, each a cluster's work, in the order in which they are taken.
struct Tiles {
  int x_tiles, weight_tiles;

  __host__ __device__ int count() const { return x_tiles * weight_tiles; }
  __device__ void find(int index, int* x_tile, int* weight_tile) const {
    const int group = index / (kSideBySide * weight_tiles);
    const int rest = index - group * (kSideBySide * weight_tiles);
    const int size = min(kSideBySide, x_tiles - group * kSideBySide);
    *x_tile = group * kSideBySide + rest % size;
    *weight_tile = rest / size;
  }
};

// Where the stages of a pipeline stand: the next stage, and the parity of its barrier's phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ int previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// Barriers of a stage: `full` when its bytes are there, `empty` when the warps that multiply, those
// of both blocks, have read it, and others of this block that read it.
template <int kStages>
struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kStages>
__device__ void init_barriers(uint32_t full, uint32_t empty, int local_readers) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, 4 * kConsumers * kClusterSize + local_readers);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
}

// Results leave the registers in turns of kTurn blocks of 8 columns, through memory of which each
// thread has its own part: a loop over registers would have to be unrolled, and so much code is
// late from memory whenever L2 has lost it. This finds the turn among kFirst to kLast - 1.
template <int kFirst, int kLast, int kTurn, int kSums>
__device__ void stage_turn(float4 (&staging)[kTurn][128], const float (&sums)[kSums], int turn) {
  if constexpr (kLast - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kLast) / 2;
    if (turn < kMiddle) {
      stage_turn<kFirst, kMiddle>(staging, sums, turn);
    } else {
      stage_turn<kMiddle, kLast>(staging, sums, turn);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const float* const sum = sums + 4 * (kFirst * kTurn + j);
      staging[j][threadIdx.x % 128] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
}

// Tells the producers of both blocks that this warp has read what the barrier is of.
__device__ inline void release(uint32_t empty) {
  const int lane = threadIdx.x % 32;
  if (lane < kClusterSize) ptx::mbarrier_arrive_cluster(empty, lane);
}

#endif

// --------------------------------------------------------------------------- float16, bfloat16

constexpr int kHalfRows = 64 * kConsumers;  // rows of x of a block's tile: operand A
constexpr int kHalfColumns = 256;           // rows of weight: operand B
[[maybe_unused]] constexpr int kHalfK = kRowBytes / 2;
constexpr int kHalfStages = 4;
constexpr int kHalfTurn = 4;  // blocks of 8 columns that a quad of threads stores at once

struct HalfMemory {
  uint8_t x[kHalfStages][kHalfRows * kRowBytes];
  uint8_t weight[kHalfStages][kHalfColumns * kRowBytes];
  float4 staging[kConsumers][kHalfTurn][128];
  float bias[kConsumers][kHalfColumns];
  Barriers<kHalfStages> barriers;
};

template <typename T>
struct HalfProblem {
  const T* bias;
  T* out;
  uint8_t* mask;
  int m, n, k;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  Tiles tiles;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T>
__device__ uint32_t pack_as(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Lane c of each four has word b of its own; afterwards it has word c of lane b.
__device__ inline void transpose_quad(uint32_t (&v)[4], int c) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = c & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i | bit], bit);
      (upper ? v[i] : v[i | bit]) = taken;
    }
  }
}

// The byte of the mask of block c, of four blocks of 8 columns of which each of four lanes has two.
__device__ inline uint32_t mask_byte(const float (&z)[2 * kHalfTurn], int columns, int c) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * kHalfTurn; ++i) {
    const int at = i / 2 * 8 + 2 * c + i % 2;
    bits |= (at < columns && mask_bit(z[i])) << at;
  }
  bits |= __shfl_xor_sync(0xffffffff, bits, 1);
  bits |= __shfl_xor_sync(0xffffffff, bits, 2);
  return bits >> (8 * c) & 0xff;
}

// Finishes four blocks of 8 columns of one row, of which each of four lanes has two, and stores
// block c, its 8 columns and its byte of the mask, from lane c.
template <bool kExact, typename T>
__device__ void store_row(const HalfProblem<T>& p, int row, int column,
                          const float (&z)[2 * kHalfTurn], int c) {
  const int first = column + 8 * c;
  const bool exists = row < p.m && first < p.n;
  if (p.mask != nullptr) {
    const uint32_t byte = mask_byte(z, p.n - column, c);
    const int64_t at = static_cast<int64_t>(row) * ((p.n + 7) / 8) + first / 8;
    if (exists) p.mask[at] = static_cast<uint8_t>(byte);
  }
  float out[2 * kHalfTurn];
#pragma unroll
  for (int i = 0; i < 2 * kHalfTurn; ++i) {
    out[i] = p.divisor.template quotient<kExact>(z[i] < p.floor ? 0.0f : z[i]);
  }
  uint32_t words[kHalfTurn];
#pragma unroll
  for (int b = 0; b < kHalfTurn; ++b) words[b] = pack_as<T>(out[2 * b], out[2 * b + 1]);
  transpose_quad(words, c);
  if (!exists) return;
  T* const to = p.out + static_cast<int64_t>(row) * p.n + first;
  if (p.n % 8 == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll 1
    for (int i = 0; i < min(8, p.n - first); ++i) {
      const uint32_t word = i / 4 == 0 ? words[i / 2 % 2] : words[2 + i / 2 % 2];
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(word >> (i % 2 * 16));
    }
  }
}

// Two rows, eight apart, of what a turn has in memory.
template <bool kExact, typename T>
__device__ void store_turn(const HalfProblem<T>& p, int row, int column,
                           const float4 (&staging)[kHalfTurn][128], const float* bias) {
  const int c = threadIdx.x % 4;
  float upper[2 * kHalfTurn], lower[2 * kHalfTurn];
#pragma unroll
  for (int b = 0; b < kHalfTurn; ++b) {
    const float4 sum = staging[b][threadIdx.x % 128];
    const float2 own = *reinterpret_cast<const float2*>(bias + 8 * b + 2 * c);
    upper[2 * b] = sum.x + own.x, upper[2 * b + 1] = sum.y + own.y;
    lower[2 * b] = sum.z + own.x, lower[2 * b + 1] = sum.w + own.y;
  }
  store_row<kExact>(p, row, column, upper, c);
  store_row<kExact>(p, row + 8, column, lower, c);
}

#endif

template <typename T>
__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    half_kernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap weight_map, const HalfProblem<T> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  HalfMemory& shared = *reinterpret_cast<HalfMemory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t x = base + offsetof(HalfMemory, x), weight = base + offsetof(HalfMemory, weight);
  const uint32_t full = base + offsetof(HalfMemory, barriers.full);
  const uint32_t empty = base + offsetof(HalfMemory, barriers.empty);
  const int warpgroup = threadIdx.x / 128;
  const int rank = ptx::cluster_ctarank();
  const int first = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;
  const int steps = (p.k + kHalfK - 1) / kHalfK;
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<kHalfStages>(full, empty, 0);

  Ring<kHalfStages> ring;
  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int end = threadIdx.x == kConsumers * 128 ? p.tiles.count() : 0;
    for (int tile = first; tile < end; tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      constexpr int kShare = kHalfColumns / kClusterSize;  // rows of weight a block brings for both
      const int row = (x_tile * kClusterSize + rank) * kHalfRows;
      const int weight_row = weight_tile * kHalfColumns + rank * kShare;
      for (int step = 0; step < steps; ++step, ring.advance()) {
        const uint32_t arrived = full + 8 * ring.stage;
        ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(arrived, (kHalfRows + kHalfColumns) * kRowBytes);
        ptx::copy_tensor(x + ring.stage * kHalfRows * kRowBytes, &x_map, step * kHalfK, row,
                         arrived);
        ptx::copy_tensor_multicast(weight + (ring.stage * kHalfColumns + rank * kShare) * kRowBytes,
                                   &weight_map, step * kHalfK, weight_row, arrived,
                                   (1 << kClusterSize) - 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const uint32_t own_x = x + warpgroup * 64 * kRowBytes;
    float d[kHalfColumns / 2];
    for (int tile = first; tile < p.tiles.count(); tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      float own_bias[kHalfColumns / 128];  // on its way while the products are made
#pragma unroll
      for (int i = 0; i < kHalfColumns / 128; ++i) {
        const int at = weight_tile * kHalfColumns + i * 128 + thread;
        own_bias[i] = p.bias != nullptr && at < p.n ? static_cast<float>(p.bias[at]) : 0.0f;
      }
      for (int step = 0; step < steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint64_t a =
            ptx::matrix_descriptor<kRowBytes>(own_x + ring.stage * kHalfRows * kRowBytes);
        const uint64_t b =
            ptx::matrix_descriptor<kRowBytes>(weight + ring.stage * kHalfColumns * kRowBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < kHalfK / 16; ++s) {
          ptx::wgmma(T{}, d, a + s * ptx::kDescriptorK16, b + s * ptx::kDescriptorK16,
                     step > 0 || s > 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (step > 0) release(empty + 8 * ring.previous());
      }

      ptx::barrier_sync(1 + warpgroup, 128);  // all have read the bias of the tile before
#pragma unroll
      for (int i = 0; i < kHalfColumns / 128; ++i) {
        shared.bias[warpgroup][i * 128 + thread] = own_bias[i];
      }
      ptx::barrier_sync(1 + warpgroup, 128);
      ptx::wgmma_wait_group<0>();
      release(empty + 8 * ring.previous());

      const int row =
          (x_tile * kClusterSize + rank) * kHalfRows + warpgroup * 64 + thread / 32 * 16 + lane / 4;
      float4(&staging)[kHalfTurn][128] = shared.staging[warpgroup];
      constexpr int kTurns = kHalfColumns / 8 / kHalfTurn;
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        stage_turn<0, kTurns>(staging, d, turn);
        const int in_tile = turn * kHalfTurn * 8, column = weight_tile * kHalfColumns + in_tile;
        const float* const bias = &shared.bias[warpgroup][in_tile];
        if (p.divisor.is_exact) {
          store_turn<true>(p, row, column, staging, bias);
        } else {
          store_turn<false>(p, row, column, staging, bias);
        }
      }
    }
  }
  ptx::cluster_sync();  // a block that has left can't be copied to
#endif
}

// ------------------------------------------------------------------------------------- float32

// With operand A in registers, its rows are those of the weight. Operand B is the split x.
template <int kProducts>
struct Split {
  static constexpr bool kPromotes = kProducts == 3;
  static constexpr int kWeightRows = 64 * kConsumers;
  // The promoted sums take as many registers as the accumulators; 176 leaves room for both, and
  // makes 1024 rows of x six tiles, which with 64 of the weight fill 132 multiprocessors to 97%.
  static constexpr int kXRows = kPromotes ? 176 : 256;
  static constexpr int kAccumulators = kXRows / 2;
  static constexpr int kK = kPromotes ? 32 : 64;
  static constexpr int kStages = kPromotes ? 5 : 3;
  static constexpr int kSteps16 = kK / 16;
  static constexpr int kTurn = 2;
  static_assert(kXRows % (kTurn * 8) == 0, "turns are whole");
  static constexpr int kBoxes = kK * 4 / kRowBytes;  // of the weight, side by side
  static constexpr int kBoxBytes = kWeightRows * kRowBytes;
  static constexpr int kXBytes = kXRows * kRowBytes, kWeightBytes = kBoxes * kBoxBytes;

  // Of x, pairs are two tiles, high and low, and rows half as long.
  static constexpr int kParts = kPromotes ? 2 : 1;
  static constexpr int kXRowBytes = kRowBytes / kParts;
  static constexpr int kPartBytes = kXRows * kXRowBytes;

  // Whole pairs of steps. Behind the end of k the copies bring zeros.
  static __device__ int steps(int k) { return (k + 2 * kK - 1) / (2 * kK) * 2; }

  struct Memory {
    uint8_t x[kStages][kXBytes];
    uint8_t weight[kStages][kWeightBytes];
    float4 staging[kConsumers][kTurn][128];
    Barriers<kStages> barriers;
  };
  static_assert(sizeof(Memory) <= 227 * 1024, "a block has no more shared memory");
};

// The weight is read once, so its rows are scaled by what a sample of them says: eight pieces of 16
// elements, evenly spread. The largest is put below 2^8, which leaves the others a factor of 256
// before they pass fp16's range, and 14 bits below before they count as small.
constexpr int kSampledPieces = 8;
constexpr int kSampledExponent = 7;

// A warp a row of the weight, whose reads are the more scattered; behind those, a block a row of x.
template <int kProducts>
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, bool heeds_few,
                   int* any_flag) {
  constexpr int kRows = split::kThreads / 32;
  const int64_t x_row = blockIdx.x - (weight.rows + kRows - 1) / kRows;
  if (x_row >= 0) {
    const bool flagged = split::split_row(x, x_row, k, heeds_few);
    if (flagged && threadIdx.x == 0) *any_flag = 1;
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32;
  if (row >= weight.rows) return;
  const int64_t piece = lane / (32 / kSampledPieces);
  const int64_t at = piece * k / kSampledPieces / 4 * 4 + lane % (32 / kSampledPieces) * 4;
  float largest = 0;
  if (at + 4 <= k) {
    const float4 v = *reinterpret_cast<const float4*>(weight.from + row * weight.row_stride + at);
    largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  }
  for (int bit = 16; bit > 0; bit /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
  }
  if (lane == 0) {
    const int exponent = largest > 0 ? kSampledExponent - ilogbf(largest) : 0;
    weight.exponent[row] = max(-126, min(126, exponent));
    weight.counts[row] = {0, 0};
  }
}

// Steps between two promotions, an even number. float32's own error grows with the root of K, that
// of the tensor cores with what is summed at once: 128 of K, and 64 where K is short, keep below it
// even where all terms have one sign. At K = 8192, 256 would be 1.2% quicker and 64 3% slower.
__device__ inline int promotion_steps(int k) { return k < 8192 ? 2 : 4; }

// Warps that look for rows of the weight that the split can't carry, beside those that multiply.
[[maybe_unused]] constexpr int kJudges = 2;
// The counts of a row are ints.
constexpr int64_t kMostK = 1 << 24;

struct SplitProblem {
  const float* bias;
  float* out;
  uint8_t* mask;
  const int* x_exponent;         // [m]
  const int* weight_exponent;    // [n]
  split::Counts* weight_counts;  // [n], 0 at first
  int* any_flag;
  bool heeds_few;
  int m, n, k;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  Tiles tiles;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The row of its warp's 16 that is row g (r = 0) or g + 8 (r = 1) of the warp's fragments: two
// neighbours a thread, for the stores, and rows that are swizzled apart in neighbouring quads,
// which keeps their loads free of bank conflicts.
__device__ inline int fragment_row(int g, int r) {
  return (g & 4) << 1 | (g & 1) << 2 | (g & 2) | r;
}

// Four features of one row of x, finished and stored; the thread whose lane differs in bit 2 has
// the four beside them, and the byte of the mask is of both.
template <bool kExact>
__device__ void store_four(const SplitProblem& p, int row, int column, const float (&z)[4]) {
  const bool exists = row < p.m && column < p.n;
  if (p.mask != nullptr) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (column + i < p.n && mask_bit(z[i])) << i;
    bits |= __shfl_xor_sync(0xffffffff, bits, 4) << 4;
    const int64_t at = static_cast<int64_t>(row) * ((p.n + 7) / 8) + column / 8;
    if (exists && column % 8 == 0) p.mask[at] = static_cast<uint8_t>(bits);
  }
  if (!exists) return;
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = p.divisor.template quotient<kExact>(z[i] < p.floor ? 0.0f : z[i]);
  }
  float* const to = p.out + static_cast<int64_t>(row) * p.n + column;
  if (p.n % 4 == 0) {
    *reinterpret_cast<float4*>(to) = make_float4(out[0], out[1], out[2], out[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < p.n) to[i] = out[i];
    }
  }
}

// What four features need on the way from sums to results.
struct Features {
  int column;
  float scale[4], bias[4];
};

// What a turn has in memory: two neighbouring features in rows 2c and 2c + 1 of every 8 of x. A
// swap with the thread that has the next two makes that four features of one row. scale is that of
// row `lane` of the turn.
template <bool kExact, int kTurn>
__device__ void store_turn(const SplitProblem& p, int row, const Features& features,
                           const float4 (&staging)[kTurn][128], float scale) {
  const int lane = threadIdx.x % 32;
  const bool is_second = lane & 8;
#pragma unroll
  for (int j = 0; j < kTurn; ++j) {
    const float4 sum = staging[j][threadIdx.x % 128];
    const float keep[2] = {is_second ? sum.y : sum.x, is_second ? sum.w : sum.z};
    const float give[2] = {is_second ? sum.x : sum.y, is_second ? sum.z : sum.w};
    float take[2];
    take[0] = __shfl_xor_sync(0xffffffff, give[0], 8);
    take[1] = __shfl_xor_sync(0xffffffff, give[1], 8);
    const int in_turn = 8 * j + 2 * (lane % 4) + is_second;
    const float x_scale = __shfl_sync(0xffffffff, scale, in_turn);
    float z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The smaller first: where that overflows, so does the result.
      const float total = (i < 2) == is_second ? take[i % 2] : keep[i % 2];
      z[i] = total * fminf(x_scale, features.scale[i]) * fmaxf(x_scale, features.scale[i]) +
             features.bias[i];
    }
    store_four<kExact>(p, row + in_turn, features.column, z);
  }
}

// Brings the tiles, each in steps of K: one thread.
template <int kProducts>
__device__ void produce(uint32_t base, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                        const SplitProblem& p) {
  using S = Split<kProducts>;
  using Memory = typename S::Memory;
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  constexpr int kShare = S::kXRows / kClusterSize;  // rows of x a block brings for both
  const uint32_t x = base + offsetof(Memory, x) + rank * kShare * S::kXRowBytes;
  const uint32_t weight = base + offsetof(Memory, weight);
  Ring<S::kStages> ring;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int row = x_tile * S::kXRows + rank * kShare;
    const int weight_row = (weight_tile * kClusterSize + rank) * S::kWeightRows;
    for (int step = 0; step < S::steps(p.k); ++step, ring.advance()) {
      const uint32_t arrived = full + 8 * ring.stage;
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(arrived, S::kXBytes + S::kWeightBytes);
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) {  // the rows of low are behind those of high
        ptx::copy_tensor_multicast(x + ring.stage * S::kXBytes + part * S::kPartBytes, &x_map,
                                   step * S::kK, row + part * p.m, arrived,
                                   (1 << kClusterSize) - 1);
      }
#pragma unroll
      for (int box = 0; box < S::kBoxes; ++box) {
        ptx::copy_tensor(weight + ring.stage * S::kWeightBytes + box * S::kBoxBytes, &weight_map,
                         step * S::kK + box * 32, weight_row, arrived);
      }
    }
  }
}

// Counts what the split carries badly of every row of the weight. A lane has rows of its own. The
// tiles that share rows of the weight share the columns of each step too, and add up what they
// find.
template <int kProducts>
__device__ void judge(uint32_t base, const SplitProblem& p, int warp) {
  using S = Split<kProducts>;
  using Memory = typename S::Memory;
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const uint32_t weight = base + offsetof(Memory, weight);
  constexpr int kRows = S::kWeightRows / kJudges / 32;
  constexpr int kChunks = S::kBoxes * 8;  // of four columns
  const int shares = min(p.tiles.x_tiles, kChunks);
  const int lane = threadIdx.x % 32;
  const int first = warp * kRows * 32 + lane;
  Ring<S::kStages> ring;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int weight_row =
        (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows + first;
    float small[kRows], largest[kRows];
    int nonzeros[kRows], smalls[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(weight_row + r * 32, p.n - 1);
      const float unit = split::power_of_two(-__ldg(p.weight_exponent + row));
      small[r] = unit * (kProducts == 3 ? split::kSmallPair : split::kSmallHigh);
      largest[r] = 0;
      nonzeros[r] = smalls[r] = 0;
    }
    for (int step = 0; step < S::steps(p.k); ++step, ring.advance()) {
      ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
      const uint32_t stage = weight + ring.stage * S::kWeightBytes + first * kRowBytes;
#pragma unroll 1
      for (int chunk = x_tile; chunk < kChunks; chunk += shares) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 four = ptx::load_shared_four(stage + chunk / 8 * S::kBoxBytes +
                                                    r * 32 * kRowBytes + (chunk ^ first) % 8 * 16);
          for (const float v : {four.x, four.y, four.z, four.w}) {
            nonzeros[r] += v != 0.0f;
            smalls[r] += v != 0.0f && fabsf(v) < small[r];
            largest[r] = ptx::max_nan(largest[r], fabsf(v));
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * ring.stage);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      constexpr float kTooLarge = 65520;  // rounds to infinity in fp16
      const int row = weight_row + r * 32;
      if (row >= p.n || x_tile >= shares) continue;
      // So many that the nonzeros can't make up for them, however many tiles find one too large.
      const float scaled = largest[r] * split::power_of_two(p.weight_exponent[row]);
      if (!(scaled < kTooLarge)) smalls[r] = (1 << 30) / shares;
      atomicAdd(&p.weight_counts[row].smalls, smalls[r]);
      atomicAdd(&p.weight_counts[row].nonzeros, nonzeros[r]);
      // If the row is flagged, then one share at least looks like it: by its smalls in proportion,
      // or by having no more nonzeros than its part of few.
      const split::Counts scaled_up{smalls[r], nonzeros[r] * shares};
      const bool suspect =
          smalls[r] * split::kTolerated > nonzeros[r] ||
          (p.heeds_few && (nonzeros[r] == 0 || split::is_flagged(scaled_up, p.k, true)));
      if (suspect) *p.any_flag = 1;
    }
  }
}

#endif

template <int kProducts>
__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    split_kernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap weight_map, const SplitProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Split<kProducts>;
  using Memory = typename S::Memory;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<S::kStages>(full, empty, kJudges);
  ptx::griddepcontrol_wait();

  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (threadIdx.x == kConsumers * 128) {
      produce<kProducts>(base, x_map, weight_map, p);
    } else if (warp >= 1 && warp <= kJudges) {
      judge<kProducts>(base, p, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int local_row = threadIdx.x / 32 * 16;  // the warp's first row of the tile of weight
    // Where this thread reads its first row, fragment_row(g, 0), which is even: its second row is
    // the next, whose chunks are swizzled by one bit more.
    const int own_row = local_row + fragment_row(g, 0);
    const uint32_t own_weight = base + offsetof(Memory, weight) + own_row * kRowBytes +
                                (c / 2 ^ own_row % 8) * 16 + c % 2 * 8;
    const int steps = S::steps(p.k);
    const int segment = S::kPromotes ? promotion_steps(p.k) : steps;
    Ring<S::kStages> ring;
    float d[S::kAccumulators], sums[S::kPromotes ? S::kAccumulators : 1];
    uint32_t high[2][S::kSteps16][4], low[S::kSteps16][4];

    for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
         tile += gridDim.x / kClusterSize) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      const int weight_row =
          (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows + local_row;
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = min(weight_row + fragment_row(g, r), p.n - 1);
        scale[r] = split::power_of_two(__ldg(p.weight_exponent + n));
      }
      if constexpr (S::kPromotes) {
#pragma unroll
        for (float& sum : sums) sum = 0;
      }

      // The fragments of a stage, when its bytes are there.
      const auto convert = [&](uint32_t (&high)[S::kSteps16][4]) {
        ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint32_t stage = own_weight + ring.stage * S::kWeightBytes;
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
#pragma unroll
          for (int part = 0; part < 4; ++part) {  // of the fragment: two rows, eight columns apart
            const int r = part % 2;
            const uint32_t chunk = stage ^ (s % 2 * 64 | part / 2 * 32 | r * 16);
            const float2 v = ptx::load_shared(chunk + s / 2 * S::kBoxBytes + r * kRowBytes);
            const float t0 = v.x * scale[r], t1 = v.y * scale[r];
            const __half2 h = __floats2half2_rn(t0, t1);
            high[s][part] = *reinterpret_cast<const uint32_t*>(&h);
            if constexpr (kProducts == 3) {
              const __half2 rest = __floats2half2_rn(t0 - __low2float(h), t1 - __high2float(h));
              low[s][part] = *reinterpret_cast<const uint32_t*>(&rest);
            }
          }
        }
      };

      // Multiplies what is converted, and converts what comes next as soon as the registers of low,
      // which goes first, are free.
      const auto step = [&](uint32_t (&now)[S::kSteps16][4], uint32_t (&next)[S::kSteps16][4],
                            bool accumulates, bool is_last) {
        const uint64_t x = ptx::matrix_descriptor<S::kXRowBytes>(base + offsetof(Memory, x) +
                                                                 ring.stage * S::kXBytes);
        ptx::wgmma_fence();
        if constexpr (kProducts == 3) {
#pragma unroll
          for (int s = 0; s < S::kSteps16; ++s) {
            ptx::wgmma(d, low[s], x + s * ptx::kDescriptorK16, accumulates || s > 0);
          }
          ptx::wgmma_commit_group();
        }
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          const uint64_t x_high = x + s * ptx::kDescriptorK16;
          if constexpr (kProducts == 3) {
            ptx::wgmma(d, now[s], x_high + (S::kPartBytes >> 4), true);
            ptx::wgmma(d, now[s], x_high, true);
          } else {
            ptx::wgmma(d, now[s], x_high, accumulates || s > 0);
          }
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (accumulates) release(empty + 8 * ring.previous());
        ring.advance();
        if (!is_last) convert(next);
      };

      convert(high[0]);
      for (int i = 0; i < steps;) {
        const int end = min(i + segment, steps);
        bool accumulates = false;
        do {
          step(high[0], high[1], accumulates, false);
          i += 2;
          step(high[1], high[0], true, i == steps);
          accumulates = true;
        } while (i < end);
        ptx::wgmma_wait_group<0>();
        release(empty + 8 * ring.previous());
        if constexpr (S::kPromotes) {
#pragma unroll
          for (int j = 0; j < S::kAccumulators; ++j) sums[j] += d[j];
        }
      }

      Features features;
      features.column = weight_row + fragment_row(g & ~2, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = features.column + i;
        features.scale[i] = split::power_of_two(n < p.n ? -__ldg(p.weight_exponent + n) : 0);
        features.bias[i] = n < p.n && p.bias != nullptr ? __ldg(p.bias + n) : 0.0f;
      }
      Memory& shared = *reinterpret_cast<Memory*>(dynamic_memory);
      float4(&staging)[S::kTurn][128] = shared.staging[warpgroup];
      constexpr int kTurnRows = S::kTurn * 8, kTurns = S::kXRows / kTurnRows;
      const auto exponent_of = [&](int row) {  // of x
        return row < p.m && lane < kTurnRows ? __ldg(p.x_exponent + row) : 0;
      };
      int row = x_tile * S::kXRows;
      int next_exponent = exponent_of(row + lane);
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn, row += kTurnRows) {
        if constexpr (S::kPromotes) {
          stage_turn<0, kTurns>(staging, sums, turn);
        } else {
          stage_turn<0, kTurns>(staging, d, turn);
        }
        const float x_scale = split::power_of_two(-next_exponent);
        next_exponent = exponent_of(row + kTurnRows + lane);
        if (p.divisor.is_exact) {
          store_turn<true>(p, row, features, staging, x_scale);
        } else {
          store_turn<false>(p, row, features, staging, x_scale);
        }
      }
    }
  }
  ptx::cluster_sync();
#endif
}

// -------------------------------------------------------------------------------------- launch

// cuTensorMapEncodeTiled, found at run time so that nothing links against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encoder);
}

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Describes a matrix to the copy engine, in boxes of box_rows rows of kBytes. What a box has
// outside of the matrix is 0. stride is in elements.
template <int kBytes, typename T>
int make_map(CUtensorMap* map, const T* matrix, int64_t rows, int64_t columns, int64_t stride,
             int box_rows) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * sizeof(T)};
  const cuuint32_t box[] = {kBytes / sizeof(T), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult status =
      encode(map, tensor_map_type<T>(), 2, const_cast<T*>(matrix), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             kBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

constexpr int blocks_of(int64_t size, int64_t block) {
  return static_cast<int>((size + block - 1) / block);
}

// A persistent grid: as many clusters as there is room for, or tiles. An early start lets a kernel
// set itself up while the one before it ends; it waits for that one itself.
template <typename Memory, typename... Parameters>
int launch(void (*kernel)(Parameters...), int tiles, bool starts_early, cudaStream_t stream,
           const Parameters&... parameters) {
  int device, multiprocessors;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(sizeof(Memory)));
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors / kClusterSize * kClusterSize;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(Memory);
  config.stream = stream;
  // Not all multiprocessors need be where clusters of this size can be.
  int clusters;
  status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (status != cudaSuccess) return status;
  config.gridDim = (tiles < clusters ? tiles : clusters) * kClusterSize;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

template <typename T>
int half_linear(const Linear& linear, cudaStream_t stream) {
  const int m = static_cast<int>(linear.m), n = static_cast<int>(linear.n),
            k = static_cast<int>(linear.k);
  CUtensorMap x_map, weight_map;
  int status = make_map<kRowBytes>(&x_map, static_cast<const T*>(linear.x), m, k, linear.x_stride,
                                   kHalfRows);
  if (status != cudaSuccess) return status;
  status = make_map<kRowBytes>(&weight_map, static_cast<const T*>(linear.weight), n, k,
                               linear.weight_stride, kHalfColumns / kClusterSize);
  if (status != cudaSuccess) return status;
  const Tiles tiles{blocks_of(m, kHalfRows * kClusterSize), blocks_of(n, kHalfColumns)};
  const HalfProblem<T> problem{static_cast<const T*>(linear.bias),
                               static_cast<T*>(linear.out),
                               linear.mask,
                               m,
                               n,
                               k,
                               floor_of(linear.relu),
                               Divisor<float>(linear.divisor),
                               tiles};
  return launch<HalfMemory>(half_kernel<T>, tiles.count(), false, stream, x_map, weight_map,
                            problem);
}

// The parts of a workspace, each aligned to 256 bytes.
struct Workspace {
  size_t any_flag, x_exponent, x_counts, weight_exponent, weight_counts, x, bytes;

  explicit Workspace(const Linear& linear) {
    size_t end = 0;
    const auto take = [&](size_t bytes) {
      const size_t begin = end;
      end += (bytes + 255) / 256 * 256;
      return begin;
    };
    any_flag = take(sizeof(int));
    x_exponent = take(linear.m * sizeof(int));
    x_counts = take(linear.m * sizeof(split::Counts));
    weight_exponent = take(linear.n * sizeof(int));
    weight_counts = take(linear.n * sizeof(split::Counts));
    const int64_t parts = linear.products == 3 ? 2 : 1;
    x = take(parts * linear.m * split::padded(linear.k) * sizeof(__half));
    bytes = end;
  }
};

template <int kProducts>
int split_linear(const Linear& linear, cudaStream_t stream) {
  using S = Split<kProducts>;
  const Workspace at(linear);
  char* const workspace = static_cast<char*>(linear.workspace);
  const auto ints = [&](size_t offset) { return reinterpret_cast<int*>(workspace + offset); };
  const auto counts = [&](size_t offset) {
    return reinterpret_cast<split::Counts*>(workspace + offset);
  };
  __half* const high = reinterpret_cast<__half*>(workspace + at.x);
  const int64_t padded_k = split::padded(linear.k);
  const split::Operand x{static_cast<const float*>(linear.x),
                         linear.m,
                         linear.x_stride,
                         1,
                         high,
                         kProducts == 3 ? high + linear.m * padded_k : nullptr,
                         ints(at.x_exponent),
                         counts(at.x_counts)};
  const split::Operand weight{static_cast<const float*>(linear.weight),
                              linear.n,
                              linear.weight_stride,
                              1,
                              nullptr,
                              nullptr,
                              ints(at.weight_exponent),
                              counts(at.weight_counts)};
  const Divisor<float> divisor(linear.divisor);
  const float* const bias = static_cast<const float*>(linear.bias);
  float* const out = static_cast<float*>(linear.out);
  const split::Result result{bias, floor_of(linear.relu), divisor, out, linear.mask};
  const bool heeds_few = split::heeds_few(linear);
  if (kProducts == 3 && linear.k < split::kTerms) {  // all rows would be flagged
    return split::exact(x, weight, linear.k, heeds_few, result, nullptr, stream);
  }
  int* const any_flag = ints(at.any_flag);
  int status = cudaMemsetAsync(any_flag, 0, sizeof(int), stream);
  if (status != cudaSuccess) return status;
  constexpr int kSampledRows = split::kThreads / 32;
  prepare_kernel<kProducts>
      <<<static_cast<int>(linear.m) + blocks_of(linear.n, kSampledRows), split::kThreads, 0,
         stream>>>(x, weight, linear.k, heeds_few, any_flag);
  status = cudaGetLastError();
  if (status != cudaSuccess) return status;

  const int m = static_cast<int>(linear.m), n = static_cast<int>(linear.n),
            k = static_cast<int>(linear.k);
  CUtensorMap x_map, weight_map;
  status = make_map<S::kXRowBytes>(&x_map, high, S::kParts * m, padded_k, padded_k,
                                   S::kXRows / kClusterSize);
  if (status != cudaSuccess) return status;
  status =
      make_map<kRowBytes>(&weight_map, weight.from, n, k, linear.weight_stride, S::kWeightRows);
  if (status != cudaSuccess) return status;
  const Tiles tiles{blocks_of(m, S::kXRows), blocks_of(n, S::kWeightRows * kClusterSize)};
  const SplitProblem problem{
      bias,      out, linear.mask, x.exponent, weight.exponent,       weight.counts, any_flag,
      heeds_few, m,   n,           k,          floor_of(linear.relu), divisor,       tiles};
  status = launch<typename S::Memory>(split_kernel<kProducts>, tiles.count(), true, stream, x_map,
                                      weight_map, problem);
  if (status != cudaSuccess) return status;
  return split::exact(x, weight, linear.k, heeds_few, result, any_flag, stream);
}

inline bool is_aligned(const void* pointer, int64_t stride, int64_t size) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * size % 16 == 0;
}

}  // namespace sm90

namespace cuda {

// The copy engine takes rows that begin at multiples of 16 bytes.
bool linear_sm90_serves(const Linear& linear) {
  const int64_t size = linear.dtype == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kMost = int64_t{1} << 30;
  return (linear.dtype == DType::kFloat32 || linear.dtype == DType::kFloat16 ||
          linear.dtype == DType::kBFloat16) &&
         (linear.dtype == DType::kFloat32 || sm90::is_aligned(linear.x, linear.x_stride, size)) &&
         sm90::is_aligned(linear.weight, linear.weight_stride, size) && linear.m < kMost &&
         linear.n < kMost && linear.k < (linear.dtype == DType::kFloat32 ? sm90::kMostK : kMost);
}

size_t linear_sm90_workspace(const Linear& linear) {
  return linear.dtype == DType::kFloat32 ? sm90::Workspace(linear).bytes : 0;
}

int linear_sm90(const Linear& linear, CUstream_st* stream) {
  switch (linear.dtype) {
    case DType::kFloat16:
      return sm90::half_linear<__half>(linear, stream);
    case DType::kBFloat16:
      return sm90::half_linear<__nv_bfloat16>(linear, stream);
    default:
      return linear.products == 3 ? sm90::split_linear<3>(linear, stream)
                                  : sm90::split_linear<1>(linear, stream);
  }
}

}  // namespace cuda
}  // namespace kernels
