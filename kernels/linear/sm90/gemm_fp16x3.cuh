// float32 on Hopper, by three products of fp16 pairs.
//
//   x [m, k] as pairs, weight [n, k] float32; out [m, n] float32
//
// A block multiplies 128 rows of the weight with up to 176 of x. A TMA producer loads x, split
// before, and the weight as it is. Each of two consumer warpgroups converts 64 rows of the weight
// in registers, as operand A, and multiplies them with x in shared memory.
//
// A round is 128 of K, four stages. The lo products of all four come first, 2^11 times too large.
// They are scaled, and hi products follow on top: those of the second half, then those of the
// next round's first half. Then the accumulators are added to the float32 sums; for shorter K more
// often (kShortK, kLongK). While products are made, the next stages are converted.

#pragma once

#include <cstddef>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/gemm_fp16x3_epilogue.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"

namespace kernels::sm90 {

struct GemmMemory {
  uint8_t x[GemmFp16x3Config::kStages][GemmFp16x3Config::kXBytes];
  uint8_t weight[GemmFp16x3Config::kStages][GemmFp16x3Config::kWeightBytes];
  float4 staging[kConsumers][GemmFp16x3Config::kSlabBlocks][128];
  TileEpilogue epilogues[2];  // of this tile, and of the next
  Barriers<GemmFp16x3Config::kStages> barriers;
};
static_assert(sizeof(GemmMemory) <= 227 * 1024, "a block has no more shared memory");

// The TMA producer: one warp, of which one thread copies.
__device__ inline void produce(uint32_t base, const CUtensorMap& x_map,
                               const CUtensorMap& weight_map, const GemmArguments& p) {
  using S = GemmFp16x3Config;
  const uint32_t full = base + offsetof(GemmMemory, barriers.full);
  const uint32_t empty = base + offsetof(GemmMemory, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  const int half = p.tiles.rows_at_once() / kClusterSize;  // rows of x that a block loads for both
  const uint32_t x = base + offsetof(GemmMemory, x) + rank * half * S::kRowBytes;
  const uint32_t bytes = p.tiles.rows_at_once() * S::kRowBytes + S::kWeightBytes;
  const uint32_t weight = base + offsetof(GemmMemory, weight);
  Ring<S::kStages> ring;
  for_items(p, [&](const Schedule::WorkItem& item, const Tile& tile) {
    if (threadIdx.x % 32 != 0) return;
    const int row = p.tiles.rows_of(tile).begin + rank * half;
    const int weight_row = (tile.weight * kClusterSize + rank) * S::kWeightRows;
    for (int step = item.begin * S::kRound; step < item.end * S::kRound; ++step, ring.advance()) {
      const uint32_t arrived = full + 8 * ring.stage;
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(arrived, bytes);
      ptx::copy_tensor_multicast(x + ring.stage * S::kXBytes, &x_map, 0, row, step, arrived,
                                 kBothBlocks);
      ptx::copy_tensor(weight + ring.stage * S::kWeightBytes, &weight_map, step * S::kK, weight_row,
                       arrived);
    }
  });
}

// Scales this block's overflowed rows of the weight by their largest elements, a warp a row.
__device__ inline void rescale(const GemmArguments& p) {
  for_items(p, [&](const Schedule::WorkItem&, const Tile& tile) {
    const int first =
        (tile.weight * kClusterSize + ptx::cluster_ctarank()) * GemmFp16x3Config::kWeightRows;
    for (int in_tile = threadIdx.x / 32; in_tile < GemmFp16x3Config::kWeightRows;
         in_tile += kThreads / 32) {
      const int row = first + in_tile;
      if (row >= p.epilogue.n || __ldcg(p.weight.state + row) != fp16x3::kOverflowed) continue;
      const float largest = largest_of_row(p.weight.from + row * p.weight.row_stride, p.k, 1);
      if (threadIdx.x % 32 != 0) continue;
      const bool is_finite = largest < INFINITY;
      p.weight.exponent[row] = is_finite ? min(14 - ilogbf(largest), kMaxPairExponent) : 0;
      if (is_finite) continue;
      p.weight.state[row] = fp16x3::kNonfinite;
      *p.has_nonfinite = 1;
    }
  });
  __syncthreads();
}

template <int kRows>
using Rows = std::integral_constant<int, kRows>;

// A warp's 16 rows of the weight in a stage of K as pairs, operand A.
struct Fragments {
  uint32_t hi[GemmFp16x3Config::kSteps16][4], lo[GemmFp16x3Config::kSteps16][4];
};

// A consumer warpgroup. Sums are promoted every kSegment of K.
template <int kSegment>
struct Consumer {
  using S = GemmFp16x3Config;
  using Stage = Ring<S::kStages>;

  uint32_t base;            // of the block's shared memory
  uint32_t empty_of_block;  // the barriers of the lane's block
  uint32_t weight;          // the lane's first row in the first stage
  uint64_t x_descriptor;    // of the first stage
  float scale[2];
  float d[S::kSums], sums[S::kSums];

  // A lane reads its first row of a stage and the next. It has four neighbours of each 16 columns,
  // two for each half of the fragment: x is interleaved to match.
  __device__ void convert(Fragments& f, const Stage& at) const {
    ptx::mbarrier_wait(base + offsetof(GemmMemory, barriers.full) + 8 * at.stage, at.parity);
    const uint32_t from = weight + at.stage * S::kWeightBytes;
#pragma unroll
    for (int s = 0; s < S::kSteps16; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // rows of the fragment
        const float4 v = ptx::load_shared_four((from ^ (s * 64 | r * 16)) + r * S::kRowBytes);
        const float scaled[4] = {v.x * scale[r], v.y * scale[r], v.z * scale[r], v.w * scale[r]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of its columns
          fp16x3::split_pair(scaled[2 * half], scaled[2 * half + 1], &f.hi[s][2 * half + r],
                             &f.lo[s][2 * half + r]);
        }
      }
    }
  }

  // A descriptor's low bits are an address, in units of 16 bytes.
  __device__ uint64_t descriptor(const Stage& at) const {
    return x_descriptor + at.stage * (S::kXBytes >> 4);
  }

  // x_lo w_hi + x_hi w_lo, 2^11 times too large.
  template <int kRows>
  __device__ void multiply_lo(Rows<kRows> rows, const Fragments& f, const Stage& at,
                              bool accumulates) {
    const uint64_t x_hi = descriptor(at), x_lo = x_hi + S::kDescriptorLo;
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::kSteps16; ++s) {
      ptx::wgmma(rows, d, f.lo[s], x_hi + s * ptx::kDescriptorK16, accumulates || s > 0);
      ptx::wgmma(rows, d, f.hi[s], x_lo + s * ptx::kDescriptorK16, true);
    }
    ptx::wgmma_commit_group();
  }

  template <int kRows>
  __device__ void multiply_hi(Rows<kRows> rows, const Fragments& f, const Stage& at,
                              bool accumulates) {
    const uint64_t x_hi = descriptor(at);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::kSteps16; ++s) {
      ptx::wgmma(rows, d, f.hi[s], x_hi + s * ptx::kDescriptorK16, accumulates || s > 0);
    }
    ptx::wgmma_commit_group();
  }

  template <int kRows>
  __device__ void promote(Rows<kRows>) {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) sums[j] += d[j];
  }

  __device__ void release(const Stage& at) const {
    if constexpr (kSegment == 32) {  // which has no register for an address
      sm90::release(base + offsetof(GemmMemory, barriers.empty) + 8 * at.stage);
    } else if (threadIdx.x % 32 < kClusterSize) {
      ptx::mbarrier_arrive_mapped(empty_of_block + 8 * at.stage);
    }
  }

  // The sums of a work item, whose stages begin at `ring`.
  template <int kRows>
  __device__ void multiply(Rows<kRows> rows, int rounds, bool is_first, Stage* ring) {
    constexpr bool kIsShort = kSegment == 32;
    Fragments f0, f1;
    Stage a = *ring, b = a.next();
    // convert and multiply: the first half round's hi products
    convert(f0, a);
    multiply_hi(rows, f0, a, false);
    convert(f1, b);
    if (kIsShort) promote(rows);
    multiply_hi(rows, f1, b, !kIsShort);
    for (int round = 0;;) {
      // promote
      promote(rows);

      // multiply the lo products, convert the second half round
      const Stage c = b.next(), e = c.next();
      multiply_lo(rows, f0, a, false);
      multiply_lo(rows, f1, b, true);
      ptx::wgmma_wait_group<1>();
      convert(f0, c);
      multiply_lo(rows, f0, c, true);
      // The warpgroups share the tensor cores best where one begins half a round after the other.
      if (round == 0 && is_first) ptx::barrier_arrive(kSecondStarts, 256);
      ptx::wgmma_wait_group<1>();
      release(a), release(b);
      convert(f1, e);
      multiply_lo(rows, f1, e, true);
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) d[j] *= 1 / fp16x3::kLoScale;

      // multiply the second half round's hi products
      multiply_hi(rows, f0, c, true);
      if (kIsShort) promote(rows);
      multiply_hi(rows, f1, e, !kIsShort);
      a = e.next(), b = a.next();
      if (++round == rounds) {
        promote(rows);
        release(c), release(e);
        break;
      }

      // convert and multiply: the next half round's hi products
      ptx::wgmma_wait_group<1>();
      convert(f0, a);
      if (kSegment < 128) promote(rows);
      multiply_hi(rows, f0, a, kSegment == 128);
      ptx::wgmma_wait_group<1>();
      release(c), release(e);
      convert(f1, b);
      if (kIsShort) promote(rows);
      multiply_hi(rows, f1, b, !kIsShort);
    }
    *ring = a;
  }
};

template <int kSegment>
__device__ __forceinline__ void consume(const GemmArguments& p, uint32_t base, GemmMemory& shared,
                                        int warpgroup) {
  using S = GemmFp16x3Config;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const int local_row = threadIdx.x / 32 * 16;  // the warp's first row of the tile of weight
  // The first row is even: the second is the next, whose vectors are swizzled by one bit more.
  const int own_row = local_row + fragment_row(g, 0);
  Consumer<kSegment> consumer;
  consumer.base = base;
  consumer.weight =
      base + offsetof(GemmMemory, weight) + own_row * S::kRowBytes + (lane % 4 ^ own_row % 8) * 16;
  consumer.empty_of_block =
      ptx::map_shared(base + offsetof(GemmMemory, barriers.empty), lane % kClusterSize);
  consumer.x_descriptor = ptx::matrix_descriptor<S::kRowBytes>(base + offsetof(GemmMemory, x));
  Ring<S::kStages> ring;
  int tiles = 0;
  for (int i = 0;; ++i) {
    const Schedule::WorkItem item = p.schedule.uniform_item(i);
    if (!item.exists()) break;
    const Tile tile = p.tiles.find(item.tile);
    if (!is_wanted(p, tile.weight)) continue;
    const int first_row =
        (tile.weight * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows + local_row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = min(first_row + fragment_row(g, r), p.epilogue.n - 1);
      consumer.scale[r] = fp16x3::power_of_two(__ldcg(p.weight.exponent + n));
    }
    // multiply; d has values so that its registers are free when the products are made
#pragma unroll
    for (int j = 0; j < S::kSums; ++j) consumer.d[j] = consumer.sums[j] = 0;
    if (warpgroup == 1) ptx::barrier_sync(kSecondStarts, 256);
    const int rows = p.tiles.rows_of(tile).size, rounds = item.end - item.begin;
    const bool is_first = warpgroup == 0;
    if (rows == S::kSmall) {
      consumer.multiply(Rows<S::kSmall>{}, rounds, is_first, &ring);
    } else if (rows == S::kMiddle) {
      consumer.multiply(Rows<S::kMiddle>{}, rounds, is_first, &ring);
    } else if (kSegment == 128 && rows == S::kNarrow) {  // shorter K has none
      consumer.multiply(Rows<S::kNarrow>{}, rounds, is_first, &ring);
    } else {
      consumer.multiply(Rows<S::kXRows>{}, rounds, is_first, &ring);
    }

    // epilogue
    meet_loader(warpgroup);
    if (!p.schedule.finishes(item)) {
      store_partial(p, rows, consumer.sums);
    } else {
      if (item.begin > 0) add_partials(p, item.tile, rows, consumer.sums);
      finish(p, shared.epilogues[tiles % 2], shared.staging[warpgroup], consumer.sums);
    }
    ++tiles;
  }
}

template <int kSegment>
__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    gemm_fp16x3_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ GemmArguments p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  GemmMemory& shared = *reinterpret_cast<GemmMemory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const int warpgroup = ptx::uniform(threadIdx.x / 128);  // 1% of an H200's time
  start_next_kernel();
  if (p.is_second_run) {
    wait_for_previous_kernel();
    if (__ldcg(p.has_overflowed) == 0) return;  // in both blocks of the cluster
  }
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<GemmFp16x3Config::kStages>(base + offsetof(GemmMemory, barriers.full),
                                           base + offsetof(GemmMemory, barriers.empty));
  wait_for_previous_kernel();
  if (p.is_second_run) rescale(p);
  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (warp == 0) produce(base, x_map, weight_map, p);  // load
    if (warp == 1) load_epilogues(p, shared.epilogues);
  } else {  // convert, multiply, promote, epilogue
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume<kSegment>(p, base, shared, warpgroup);
  }
  ptx::cluster_sync();
#endif
}

}  // namespace kernels::sm90
