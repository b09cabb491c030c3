// float32 on Hopper, by products of the fp16 that it is split into.

#ifndef KERNELS_LINEAR_SM90_SPLIT_CUH_
#define KERNELS_LINEAR_SM90_SPLIT_CUH_

#include <cuda_fp16.h>

#include <cstddef>

#include "early_start.cuh"
#include "epilogue.cuh"
#include "linear_sm90_common.cuh"
#include "ptx.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

// With operand A in registers, its rows are those of the weight. Operand B is the split x.
struct Split {
  static constexpr int kWeightRows = 64 * kConsumers;
  // The promoted sums take as many registers as the accumulators; 176 leaves room for both, and
  // makes 1024 rows of x six tiles, which with 64 of the weight fill 132 multiprocessors to 97%.
  static constexpr int kXRows = 176;
  static constexpr int kAccumulators = kXRows / 2;
  static constexpr int kK = 32, kStages = 5, kSteps16 = kK / 16;
  static constexpr int kTurn = 2;
  static_assert(kXRows % (kTurn * 8) == 0, "turns are whole");
  static constexpr int kRowBytes = kK * 4;  // of the weight
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  // Of x, there are two tiles, high and low, whose rows are half as long.
  static constexpr int kXRowBytes = kRowBytes / 2;
  static constexpr int kPartBytes = kXRows * kXRowBytes, kXBytes = 2 * kPartBytes;

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
// Where the limits of what is carried, 2^-14 and 2^16 above the scaled unit, are normal floats.
// What lies beyond them is flagged.
constexpr int kLeastExponent = -111, kMostExponent = 112;
constexpr int kSampledRows = 4;  // of a warp, whose reads are on their way together

// A warp some rows of the weight, whose reads are the more scattered; behind those, a block a row
// of x. `nonzeros` is what the counts of the weight begin with; `zeros` are set to 0.
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, int nonzeros,
                   unsigned* zeros, int64_t zeros_size) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * split::kThreads + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * split::kThreads) {
    zeros[i] = 0;
  }
  constexpr int kRows = split::kThreads / 32 * kSampledRows;
  const int64_t x_row = blockIdx.x - (weight.rows + kRows - 1) / kRows;
  if (x_row >= 0) {
    split::split_row(x, x_row, k);
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32 * kSampledRows;
  const int64_t piece = lane / (32 / kSampledPieces);
  const int64_t at = piece * k / kSampledPieces / 4 * 4 + lane % (32 / kSampledPieces) * 4;
  float4 sample[kSampledRows] = {};
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const float* const row = weight.from + (first + i) * weight.row_stride;
    if (first + i < weight.rows && at + 4 <= k) {
      sample[i] = *reinterpret_cast<const float4*>(row + at);
    }
  }
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const float4 v = sample[i];
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int bit = 16; bit > 0; bit /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
    }
    const int needed = largest > 0 ? kSampledExponent - ilogbf(largest) : 0;
    const int exponent = max(kLeastExponent, min(kMostExponent, needed));
    const float scale = split::power_of_two(exponent);
    int inexact = 0;
    for (const float element : {v.x, v.y, v.z, v.w}) {
      inexact += __popc(__ballot_sync(0xffffffff, split::has_low(element * scale)));
    }
    if (lane == 0 && first + i < weight.rows) {
      weight.exponent[first + i] = exponent;
      weight.counts[first + i] = {0, nonzeros};
      if (weight.loss != nullptr) {
        constexpr int kSample = 128;
        weight.loss[first + i] = split::loss_of(static_cast<float>(inexact) / kSample);
      }
    }
  }
}

// Steps between two promotions, an even number. float32's own error grows with the root of K, that
// of the tensor cores with what is summed at once: with what truncation is expected to take made up
// for, sums of 256 of K, and of fewer where K is short, keep below it even where all terms have one
// sign. At K = 8192, 128 would be 1% slower.
__device__ inline int promotion_steps(int k) {
  return (k < 4096 ? 64 : k < 8192 ? 128 : 256) / Split::kK;
}

// What a sum loses to truncation for each of K between two promotions (SPLIT.md).
[[maybe_unused]] constexpr float kLossOfK = 1.5e-6f / 512;

// Warps that look for rows of the weight that the split can't carry, beside those that multiply.
[[maybe_unused]] constexpr int kJudges = 2;
// The counts of a row are ints.
constexpr int64_t kMostK = 1 << 24;
// A row with an element that, scaled, rounds to infinity in fp16 has so many smalls that its
// nonzeros can't make up for them.
[[maybe_unused]] constexpr float kTooLarge = 65520;
[[maybe_unused]] constexpr int kOverflow = 1 << 30;

struct SplitProblem {
  const float* bias;
  float* out;
  uint8_t* mask;
  const int* x_exponent;         // [m]
  const int* weight_exponent;    // [n]
  const float* x_loss;           // [m]
  const float* weight_loss;      // [n]
  split::Counts* weight_counts;  // [n], 0 at first
  int m, n, k;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  bool is_direct;  // whether store_direct serves, as far as the call goes
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
  float scale[4], bias[4], loss[4];
};

// What a turn has in memory: two neighbouring features in rows 2c and 2c + 1 of every 8 of x. A
// swap with the thread that has the next two makes that four features of one row. scale and loss
// are those of row `lane` of the turn.
template <bool kExact, int kTurn>
__device__ void store_turn(const SplitProblem& p, int row, const Features& features,
                           const float4 (&staging)[kTurn][128], float scale, float loss) {
  const int lane = threadIdx.x % 32;
  const bool is_second = lane & 8;
#pragma unroll
  for (int j = 0; j < kTurn; ++j) {
    const float4 own = staging[j][threadIdx.x % 128];
    const float keep[2] = {is_second ? own.y : own.x, is_second ? own.w : own.z};
    const float give[2] = {is_second ? own.x : own.y, is_second ? own.z : own.w};
    float take[2];
    take[0] = __shfl_xor_sync(0xffffffff, give[0], 8);
    take[1] = __shfl_xor_sync(0xffffffff, give[1], 8);
    const int in_turn = 8 * j + 2 * (lane % 4) + is_second;
    const float x_scale = __shfl_sync(0xffffffff, scale, in_turn);
    const float x_loss = __shfl_sync(0xffffffff, loss, in_turn);
    float z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The smaller first: where that overflows, so does the result.
      const float sum = (i < 2) == is_second ? take[i % 2] : keep[i % 2];
      const float total = fmaf(sum, x_loss * features.loss[i], sum);
      z[i] = total * fminf(x_scale, features.scale[i]) * fmaxf(x_scale, features.scale[i]) +
             features.bias[i];
    }
    store_four<kExact>(p, row + in_turn, features.column, z);
  }
}

// Whether store_direct serves a warp, whose lanes have two features each: for all lanes.
__device__ inline bool is_direct(const SplitProblem& p, int row, int column) {
  const auto is_modest = [](int exponent) { return abs(exponent) <= kModestExponent; };
  bool all_modest = p.is_direct;
  if (column < p.n) {
    all_modest &= is_modest(__ldg(p.weight_exponent + column));
    all_modest &= is_modest(__ldg(p.weight_exponent + min(column + 1, p.n - 1)));
  }
  const int end = min(row + Split::kXRows, p.m);
  for (int i = row + threadIdx.x % 32; i < end; i += 32) {
    all_modest &= is_modest(__ldg(p.x_exponent + i));
  }
  return __all_sync(0xffffffff, all_modest);
}

// The way out where nothing but the result is asked for, the division is an exact multiplication
// and all exponents are modest: features column and column + 1 of all rows.
template <int kSums>
__device__ void store_direct(const SplitProblem& p, int row, int column, float loss_of_segment,
                             const float (&sums)[kSums]) {
  if (column >= p.n) return;
  float scale[2], lost[2], bias[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    scale[r] = p.divisor.scale * split::power_of_two(-__ldg(p.weight_exponent + column + r));
    lost[r] = loss_of_segment * __ldg(p.weight_loss + column + r);
    bias[r] = p.bias != nullptr ? p.divisor.scale * __ldg(p.bias + column + r) : 0.0f;
  }
  row += threadIdx.x % 4 * 2;
  float* to = p.out + static_cast<int64_t>(row) * p.n + column;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j, row += 8, to += 8 * static_cast<int64_t>(p.n)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + i >= p.m) continue;
      const float x_scale = split::power_of_two(-__ldg(p.x_exponent + row + i));
      const float x_loss = __ldg(p.x_loss + row + i);
      float out[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The same bits as store_turn's: powers of two scale exactly.
        const float sum = sums[4 * j + 2 * r + i];
        const float total = fmaf(sum, x_loss * lost[r], sum);
        const float z = fmaf(total, x_scale * scale[r], bias[r]);
        out[r] = ptx::max_nan(z, p.floor);
      }
      *reinterpret_cast<float2*>(to + i * static_cast<int64_t>(p.n)) = make_float2(out[0], out[1]);
    }
  }
}

// Brings the tiles, each in steps of K: one thread.
__device__ inline void produce(uint32_t base, const CUtensorMap& high_map,
                               const CUtensorMap& low_map, const CUtensorMap& weight_map,
                               const SplitProblem& p) {
  using S = Split;
  using Memory = S::Memory;
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
      constexpr int kBoth = (1 << kClusterSize) - 1;
      const uint32_t to = x + ring.stage * S::kXBytes;
      ptx::copy_tensor_multicast(to, &high_map, step * S::kK, row, arrived, kBoth);
      ptx::copy_tensor_multicast(to + S::kPartBytes, &low_map, step * S::kK, row, arrived, kBoth);
      ptx::copy_tensor(weight + ring.stage * S::kWeightBytes, &weight_map, step * S::kK, weight_row,
                       arrived);
    }
  }
}

// Counts what the split carries badly of every row of the weight. A lane has rows of its own. The
// tiles that share rows of the weight take turns at the steps, and add up what they find.
__device__ inline void judge(uint32_t base, const SplitProblem& p, int warp) {
  using S = Split;
  using Memory = S::Memory;
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const uint32_t weight = base + offsetof(Memory, weight);
  constexpr int kRows = S::kWeightRows / kJudges / 32;
  constexpr int kChunks = S::kK / 4;  // of four columns
  const int shares = min(p.tiles.x_tiles, S::steps(p.k));
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
      small[r] = unit * split::kSmallPair;
      largest[r] = 0;
      nonzeros[r] = smalls[r] = 0;
    }
    int until = x_tile;  // steps until one is this block's
    for (int step = 0; step < S::steps(p.k); ++step, ring.advance()) {
      ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
      const uint32_t stage = weight + ring.stage * S::kWeightBytes + first * S::kRowBytes;
      const int chunks = until == 0 ? kChunks : 0;
      until = (until == 0 ? shares : until) - 1;
#pragma unroll 2  // 2% of an H200's time off, against 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 four =
              ptx::load_shared_four(stage + r * 32 * S::kRowBytes + (chunk ^ first) % 8 * 16);
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
      const int row = weight_row + r * 32;
      if (row >= p.n || x_tile >= shares) continue;
      // So many that the nonzeros can't make up for them, however many tiles find one too large.
      const float scaled = largest[r] * split::power_of_two(p.weight_exponent[row]);
      if (!(scaled < kTooLarge)) smalls[r] = kOverflow / shares;
      atomicAdd(&p.weight_counts[row].smalls, smalls[r]);
      atomicAdd(&p.weight_counts[row].nonzeros, nonzeros[r]);
    }
  }
}

#endif

__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    split_kernel(const __grid_constant__ CUtensorMap high_map,
                 const __grid_constant__ CUtensorMap low_map,
                 const __grid_constant__ CUtensorMap weight_map, const SplitProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Split;
  using Memory = S::Memory;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&high_map);
    ptx::prefetch_tensormap(&low_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<S::kStages>(full, empty, kJudges);
  wait_for_previous_kernel();

  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (threadIdx.x == kConsumers * 128) {
      produce(base, high_map, low_map, weight_map, p);
    } else if (warp >= 1 && warp <= kJudges) {
      judge(base, p, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int local_row = threadIdx.x / 32 * 16;  // the warp's first row of the tile of weight
    // Where this thread reads its first row, fragment_row(g, 0), which is even: its second row is
    // the next, whose chunks are swizzled by one bit more.
    const int own_row = local_row + fragment_row(g, 0);
    const uint32_t own_weight = base + offsetof(Memory, weight) + own_row * S::kRowBytes +
                                (c / 2 ^ own_row % 8) * 16 + c % 2 * 8;
    const int steps = S::steps(p.k);
    const int segment = promotion_steps(p.k);
    Ring<S::kStages> ring;
    float d[S::kAccumulators], sums[S::kAccumulators];
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
#pragma unroll
      for (float& sum : sums) sum = 0;

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
            const float2 v = ptx::load_shared(chunk + r * S::kRowBytes);
            const float t0 = v.x * scale[r], t1 = v.y * scale[r];
            const __half2 h = __floats2half2_rn(t0, t1);
            high[s][part] = *reinterpret_cast<const uint32_t*>(&h);
            const __half2 rest = __floats2half2_rn(t0 - __low2float(h), t1 - __high2float(h));
            low[s][part] = *reinterpret_cast<const uint32_t*>(&rest);
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
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          ptx::wgmma(d, low[s], x + s * ptx::kDescriptorK16, accumulates || s > 0);
        }
        ptx::wgmma_commit_group();
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          const uint64_t x_high = x + s * ptx::kDescriptorK16;
          ptx::wgmma(d, now[s], x_high + (S::kPartBytes >> 4), true);
          ptx::wgmma(d, now[s], x_high, true);
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
#pragma unroll
        for (int j = 0; j < S::kAccumulators; ++j) sums[j] += d[j];
      }

      const int column = weight_row + fragment_row(g, 0);
      if (is_direct(p, x_tile * S::kXRows, column)) {
        store_direct(p, x_tile * S::kXRows, column, kLossOfK * S::kK * segment, sums);
        continue;
      }

      Features features;
      features.column = weight_row + fragment_row(g & ~2, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = features.column + i;
        features.scale[i] = split::power_of_two(n < p.n ? -__ldg(p.weight_exponent + n) : 0);
        features.bias[i] = n < p.n && p.bias != nullptr ? __ldg(p.bias + n) : 0.0f;
        features.loss[i] = n < p.n ? kLossOfK * S::kK * segment * __ldg(p.weight_loss + n) : 0.0f;
      }
      Memory& shared = *reinterpret_cast<Memory*>(dynamic_memory);
      float4(&staging)[S::kTurn][128] = shared.staging[warpgroup];
      constexpr int kTurnRows = S::kTurn * 8, kTurns = S::kXRows / kTurnRows;
      const auto exponent_of = [&](int row) {  // of x
        return row < p.m && lane < kTurnRows ? __ldg(p.x_exponent + row) : 0;
      };
      int row = x_tile * S::kXRows;
      const auto loss_of = [&](int row) {
        return row < p.m && lane < kTurnRows ? __ldg(p.x_loss + row) : 0;
      };
      int next_exponent = exponent_of(row + lane);
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn, row += kTurnRows) {
        stage_turn<0, kTurns>(staging, sums, turn);
        const float x_scale = split::power_of_two(-next_exponent);
        const float x_loss = loss_of(row + lane);
        next_exponent = exponent_of(row + kTurnRows + lane);
        if (p.divisor.is_exact) {
          store_turn<true>(p, row, features, staging, x_scale, x_loss);
        } else {
          store_turn<false>(p, row, features, staging, x_scale, x_loss);
        }
      }
    }
  }
  ptx::cluster_sync();
#endif
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_SPLIT_CUH_
