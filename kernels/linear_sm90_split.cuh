// float32 on Hopper, by three products of the fp16 that it is split into.

#ifndef KERNELS_LINEAR_SM90_SPLIT_CUH_
#define KERNELS_LINEAR_SM90_SPLIT_CUH_

#include <cuda_fp16.h>

#include <climits>
#include <cstddef>
#include <type_traits>

#include "early_start.cuh"
#include "linear_sm90_common.cuh"
#include "linear_sm90_prepare.cuh"
#include "linear_sm90_split_store.cuh"
#include "ptx.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

// Warps that look for rows of the weight that the split can't carry, beside those that multiply.
[[maybe_unused]] constexpr int kJudges = 2;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Brings the tiles, each in steps of K: one thread.
__device__ inline void produce(uint32_t base, const CUtensorMap& x_map,
                               const CUtensorMap& weight_map, const SplitProblem& p) {
  using S = Split;
  using Memory = S::Memory;
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  constexpr int kShare = S::kXRows / kClusterSize;  // rows of x a block brings for both
  const uint32_t x = base + offsetof(Memory, x) + rank * kShare * S::kXRowBytes;
  const uint32_t weight = base + offsetof(Memory, weight);
  Ring<S::kStages> ring;
  for (int turn = 0;; ++turn) {
    const Schedule::Part part = p.schedule.part(turn);
    if (!part.exists()) break;
    int x_tile, weight_tile;
    p.tiles.find(part.tile, &x_tile, &weight_tile);
    const int row = Rows(p, x_tile, weight_tile).begin + rank * kShare;
    const int weight_row = (weight_tile * kClusterSize + rank) * S::kWeightRows;
    for (int step = part.begin; step < part.end; ++step, ring.advance()) {
      const uint32_t arrived = full + 8 * ring.stage;
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(arrived, S::kXBytes + S::kWeightBytes);
      constexpr int kBoth = (1 << kClusterSize) - 1;
      ptx::copy_tensor_multicast(x + ring.stage * S::kXBytes, &x_map, 0, row, step, arrived, kBoth);
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
  for (int turn = 0;; ++turn) {
    const Schedule::Part part = p.schedule.part(turn);
    if (!part.exists()) break;
    int x_tile, weight_tile;
    p.tiles.find(part.tile, &x_tile, &weight_tile);
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
    // Steps until one is this block's.
    int until = x_tile < shares ? (x_tile + shares - part.begin % shares) % shares : INT_MAX;
    for (int step = part.begin; step < part.end; ++step, ring.advance()) {
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
      const float scaled = largest[r] * split::power_of_two(p.weight_exponent[row]);
      if (!(scaled < kTooLarge)) atomicMax(&p.weight_counts[row].smalls, kOverflow);
      atomicAdd(&p.weight_counts[row].smalls, smalls[r]);
      atomicAdd(&p.weight_counts[row].nonzeros, nonzeros[r]);
    }
  }
}

#endif

__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    split_kernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap weight_map,
                 const __grid_constant__ SplitProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Split;
  using Memory = S::Memory;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  Memory& shared = *reinterpret_cast<Memory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const int warpgroup = ptx::uniform(threadIdx.x / 128);  // 1% of an H200's time
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  // One arrival more than there are, so that its phase never ends.
  constexpr int kNever = 4 * kConsumers * kClusterSize + 1;
  if (threadIdx.x == 0) ptx::mbarrier_init(base + offsetof(Memory, unheeded), kNever);
  init_barriers<S::kStages>(full, empty, kJudges);
  wait_for_previous_kernel();

  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (threadIdx.x == kConsumers * 128) {
      produce(base, x_map, weight_map, p);
    } else if (warp >= 1 && warp <= kJudges) {
      judge(base, p, warp - 1);
    } else if (warp > kJudges) {
      gather(p, shared.outward);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int local_row = threadIdx.x / 32 * 16;  // the warp's first row of the tile of weight
    // Where this thread reads its first row, fragment_row(g, 0), which is even: its second row is
    // the next, whose chunks are swizzled by one bit more.
    const int own_row = local_row + fragment_row(g, 0);
    const uint32_t own_weight =
        base + offsetof(Memory, weight) + own_row * S::kRowBytes + (c ^ own_row % 8) * 16;
    // A lane for each block tells its producer which stage the warp has read, a step later. That
    // there was none before the first is told to a barrier that nobody heeds.
    const uint32_t empty_of_block = ptx::map_shared(empty, lane % kClusterSize);
    uint32_t read = ptx::map_shared(base + offsetof(Memory, unheeded), lane % kClusterSize);
    Ring<S::kStages> ring;
    uint32_t high[2][S::kSteps16][4], low[S::kSteps16][4];

    for (int turn = 0;; ++turn) {
      const Schedule::Part part = p.schedule.uniform_part(turn);
      if (!part.exists()) break;
      int x_tile, weight_tile;
      p.tiles.find(part.tile, &x_tile, &weight_tile);
      const int tile_row = (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows;
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = min(tile_row + local_row + fragment_row(g, r), p.n - 1);
        scale[r] = split::power_of_two(__ldg(p.weight_exponent + n));
      }
      // Asked for here, for it would be kept in a register through all else.
      const uint32_t x_tiles = ptx::shared_address(shared.x);
      // d has values so that its registers are free when the products are made.
      float d[S::kSums] = {}, sums[S::kSums] = {};

      // The fragments of a stage, when its bytes are there. Of each 16 columns a thread takes four
      // neighbours, two for each half of the fragment: x is interleaved to match.
      const auto convert = [&](uint32_t (&high)[S::kSteps16][4]) {
        ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint32_t stage = own_weight + ring.stage * S::kWeightBytes;
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {  // rows of the fragment
            const float4 v = ptx::load_shared_four((stage ^ (s * 64 | r * 16)) + r * S::kRowBytes);
            const float scaled[4] = {v.x * scale[r], v.y * scale[r], v.z * scale[r],
                                     v.w * scale[r]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // of its columns
              const float first = scaled[2 * half], second = scaled[2 * half + 1];
              const __half2 h = __floats2half2_rn(first, second);
              const __half2 rest =
                  __floats2half2_rn(first - __low2float(h), second - __high2float(h));
              high[s][2 * half + r] = *reinterpret_cast<const uint32_t*>(&h);
              low[s][2 * half + r] = *reinterpret_cast<const uint32_t*>(&rest);
            }
          }
        }
      };

      // Multiplies what is converted, and converts what comes next as soon as the registers of low,
      // which goes first, are free.
      const auto step = [&](auto rows, uint32_t (&now)[S::kSteps16][4],
                            uint32_t (&next)[S::kSteps16][4], bool accumulates, bool is_last) {
        const uint64_t x = ptx::matrix_descriptor<S::kXRowBytes>(x_tiles + ring.stage * S::kXBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          ptx::wgmma(rows, d, low[s], x + s * ptx::kDescriptorK16, accumulates || s > 0);
        }
        ptx::wgmma_commit_group();
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          const uint64_t x_high = x + s * ptx::kDescriptorK16;
          ptx::wgmma(rows, d, now[s], x_high + S::kDescriptorLow, true);
          ptx::wgmma(rows, d, now[s], x_high, true);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (lane < kClusterSize) ptx::mbarrier_arrive_mapped(read);
        read = empty_of_block + 8 * ring.stage;
        ring.advance();
        if (!is_last) convert(next);
      };

      const auto multiply = [&](auto rows, const int steps) {
        // The second warpgroup begins with half a segment, so that one multiplies while the other
        // promotes: 1% of an H200's time.
        for (int i = 0, end = min(p.segment >> warpgroup, steps); i < steps;
             end = min(end + p.segment, steps)) {
          bool accumulates = false;
          do {
            step(rows, high[0], high[1], accumulates, false);
            i += 2;
            step(rows, high[1], high[0], true, i == steps);
            accumulates = true;
          } while (i < end);
          ptx::wgmma_wait_group<0>();
#pragma unroll
          for (int j = 0; j < decltype(rows)::value / 2; ++j) sums[j] += d[j];
        }
      };
      const bool is_wide = Rows(p, x_tile, weight_tile).size == S::kXRows;
      convert(high[0]);
      if (is_wide) {
        multiply(std::integral_constant<int, S::kXRows>{}, part.end - part.begin);
      } else {
        multiply(std::integral_constant<int, S::kNarrow>{}, part.end - part.begin);
      }

      const S::Outward& outward = shared.outward[turn % 2];
      ptx::barrier_sync(1 + warpgroup, 128 + 32);
      if (!p.schedule.finishes(part)) {
        leave(p, sums);
        continue;
      }
      if (part.begin > 0) collect(p, part.tile, sums);
      if (outward.is_direct) {
        const int feature = local_row + fragment_row(g, 0);
        if (p.mask == nullptr) {
          store_direct<false>(p, outward, feature, sums);
        } else {
          store_direct<true>(p, outward, feature, sums);
        }
        continue;
      }
      const int feature = local_row + fragment_row(g & ~2, 0);
      float4(&staging)[S::kTurn][128] = shared.staging[warpgroup];
      constexpr int kTurns = S::kXRows / (S::kTurn * 8);
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        stage_turn<0, kTurns, S::kTurn, 128>(&staging[0][threadIdx.x % 128], sums, turn);
        if (p.divisor.is_exact) {
          store_turn<true>(p, outward, turn * S::kTurn * 8, feature, staging);
        } else {
          store_turn<false>(p, outward, turn * S::kTurn * 8, feature, staging);
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
