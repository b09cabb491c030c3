// Rounds the float32 weight [n, k], or its transpose, to scaled fp16 while the product is made.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"

namespace kernels::sm90 {

// Warps convert units of 32 rows and 256 of K, in the order in which the product needs them, and
// count them for each panel, the 128 rows that a block multiplies, and each step, 64 of K.
constexpr int kStepK = fp16x3::kKTileWidth, kUnitSteps = 4, kUnitRows = 32;
constexpr int kPanelRows = 128, kUnitsOfPanel = kPanelRows / kUnitRows;
// A warp copies batches of 8 rows and 64 of K to shared memory; transposed, of 32 rows and 16 of K.
constexpr int kBatches = 4, kBatchRows = 8, kBatchDepth = 16;
constexpr int kConverters = 3;
using Batches = float4[kBatches][kBatchRows / 2][32];  // of a warp
using ConverterMemory = Batches[kConverters];
constexpr int kLead = 24;  // steps by which a conversion may lead its product, and stays in L2

struct Conversion {
  fp16x3::SplitMatrix weight;
  unsigned* next;        // unit, 0 at first
  unsigned* ready;       // [panels][steps]: units finished, 0 at first
  unsigned* subnormals;  // [rows]: see count_subnormals, 0 at first
  int steps;             // along K
  int side, width;       // tiles of x, and of the weight, that are in use at once
};

constexpr uint32_t kNoSubnormal = 0x03ff03ff;  // where no element is subnormal (round_group)

// Eight neighbours, scaled and rounded. `least` becomes the least magnitude of subnormals that are
// not zero, in each half of a pair, less 1: as integers, of which that of a zero is the largest.
__device__ inline uint4 round_group(const float (&v)[fp16x3::kVector], float scale,
                                    uint32_t* least) {
  uint32_t hi[fp16x3::kVector / 2];
#pragma unroll
  for (int j = 0; j < fp16x3::kVector / 2; ++j) {
    const __half2 pair = __floats2half2_rn(v[2 * j] * scale, v[2 * j + 1] * scale);
    hi[j] = *reinterpret_cast<const uint32_t*>(&pair);
    *least = __viaddmin_u16x2(hi[j] & 0x7fff7fff, 0xffffffff, *least);
  }
  return make_uint4(hi[0], hi[1], hi[2], hi[3]);
}

// Adds the fraction of subnormals among a row's nonzero elements in a step, in 64ths: eight lanes.
__device__ inline void count_subnormals(const Conversion& p, int64_t row, const uint4& group) {
  const uint32_t pairs[] = {group.x, group.y, group.z, group.w};
  __half2 nonzeros = __float2half2_rn(0), normals = nonzeros;
#pragma unroll
  for (const uint32_t bits : pairs) {
    const __half2 pair = *reinterpret_cast<const __half2*>(&bits);
    nonzeros = __hadd2(nonzeros, __hne2(pair, __float2half2_rn(0)));
    normals = __hadd2(normals, __hge2(__habs2(pair), __float2half2_rn(fp16x3::kSmallHi)));
  }
  __half2 sum = __hadd2(__lows2half2(nonzeros, normals), __highs2half2(nonzeros, normals));
  for (int bit = 1; bit < 8; bit *= 2) sum = __hadd2(sum, __shfl_xor_sync(0xffffffff, sum, bit));
  const unsigned all = __half2int_rz(__low2half(sum));
  const unsigned lost = all - __half2int_rz(__high2half(sum));
  if (threadIdx.x % 8 == 0 && lost != 0) atomicAdd(p.subnormals + row, lost * kStepK / all);
}

// Converts a whole unit. A lane has eight neighbours of a row, and every fourth row, or of a
// transposed weight every sixteenth. Returns whether anything was counted.
template <bool kTransposed>
__device__ bool convert_unit(const Conversion& p, int64_t first_row, int step, Batches& batches,
                             int barrier) {
  constexpr int kOfStep = kUnitRows / kBatchRows;  // batches of a step
  static_assert(kOfStep * kBatchDepth == kStepK, "a step has as many batches either way");
  constexpr int kAll = kUnitSteps * kOfStep;
  constexpr int kPasses = kBatchRows / 4;
  constexpr int kScales = kTransposed ? kPasses : kOfStep * kPasses;
  const int lane = threadIdx.x % 32, half = lane / 16;
  const int64_t stride = p.weight.row_stride, of_step = p.weight.rows * kStepK;
  const int64_t k = int64_t{step} * kStepK;
  __half* const first_of_step = p.weight.hi + step * of_step;
  __half* to =  // the place of the lane's first elements
      kTransposed ? first_of_step + (first_row + lane % 16) * kStepK + half * fp16x3::kVector
                  : first_of_step + (first_row + lane / 8) * kStepK + lane % 8 * fp16x3::kVector;
  const uint64_t policy = ptx::evict_first();
  // Sixteen lanes copy a row; or eight copy 32 rows, adjacent, of a place in K.
  const float* const start =
      kTransposed ? p.weight.from + (k + lane / 8) * stride + first_row + lane % 8 * 4
                  : p.weight.from + (first_row + half) * stride + k + lane % 16 * 4;
  const auto load = [&](int batch) {
    const float* at =
        start + (kTransposed ? batch * kBatchDepth * stride
                             : batch / kOfStep * kStepK + batch % kOfStep * kBatchRows * stride);
#pragma unroll
    for (int i = 0; i < 2 * kPasses; ++i, at += (kTransposed ? 4 : 2) * stride) {
      // The second eight of a transposed batch have their rows' halves swapped, for the banks.
      const int to = kTransposed && i >= kPasses ? lane ^ 4 : lane;
      ptx::copy_async(&batches[batch % kBatches][i][to], at, policy);
    }
  };
  float scale[kScales];
#pragma unroll
  for (int i = 0; i < kScales; ++i) {
    const int64_t row = first_row + (kTransposed ? lane % 16 + 16 * i : lane / 8 + 4 * i);
    scale[i] = fp16x3::power_of_two(__ldg(p.weight.exponent + row));
  }
#pragma unroll
  for (int batch = 0; batch < kBatches - 1; ++batch) {
    load(batch);
    ptx::commit_copies();
  }
  uint32_t with_subnormals = 0;  // batches, a bit each
#pragma unroll 1
  for (int first = 0; first < kAll; first += kOfStep, to += of_step) {
#pragma unroll
    for (int in_step = 0; in_step < kOfStep; ++in_step) {
      const int batch = first + in_step;
      ptx::wait_copies<kBatches - 2>();
      // This batch is there for all lanes, and all have read the one before.
      ptx::barrier_sync(barrier, 32);
      if (batch + kBatches - 1 < kAll) load(batch + kBatches - 1);
      ptx::commit_copies();
      const auto& loaded = batches[batch % kBatches];
      uint32_t least = kNoSubnormal;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        alignas(16) float v[fp16x3::kVector];
        if constexpr (kTransposed) {
          const float* const column = &loaded[half * kPasses][0].x + (i ^ half) * 16 + lane % 16;
#pragma unroll
          for (int j = 0; j < fp16x3::kVector; ++j) v[j] = column[j * kUnitRows];
          *reinterpret_cast<uint4*>(to + i * 16 * kStepK + in_step * kBatchDepth) =
              round_group(v, scale[i], &least);
        } else {
          const float4* const group = &loaded[2 * i + half][lane % 16 * 2];
          *reinterpret_cast<float4*>(v) = group[0], *reinterpret_cast<float4*>(v + 4) = group[1];
          *reinterpret_cast<uint4*>(to + (in_step * kBatchRows + 4 * i) * kStepK) =
              round_group(v, scale[in_step * kPasses + i], &least);
        }
      }
      // Subnormals are counted by rows: a transposed batch has elements of all.
      constexpr uint32_t kWholeStep = (1u << kOfStep) - 1;
      if (least != kNoSubnormal) with_subnormals |= kTransposed ? kWholeStep << first : 1u << batch;
    }
  }
  // At the end, as the code of count_subnormals in every batch would slow the kernel down.
  with_subnormals = __reduce_or_sync(0xffffffff, with_subnormals);
  const bool counts = with_subnormals != 0;
  if (kTransposed && counts) __syncwarp();  // other lanes have written what is read
#pragma unroll 1
  for (; with_subnormals != 0; with_subnormals &= with_subnormals - 1) {
    const int batch = __ffs(with_subnormals) - 1;
    const int64_t row = first_row + batch % kOfStep * kBatchRows + lane / 8;
    const __half* const from =
        first_of_step + batch / kOfStep * of_step + row * kStepK + lane % 8 * fp16x3::kVector;
    uint4 groups[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      groups[i] = *reinterpret_cast<const uint4*>(from + 4 * i * kStepK);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) count_subnormals(p, row + 4 * i, groups[i]);
  }
  return counts;
}

// The same at the weight's edges.
template <bool kTransposed>
__device__ bool convert_edge(const Conversion& p, int64_t k, int64_t row, int step) {
  bool counts = false;
#pragma unroll 1
  for (int i = 0; i < kUnitSteps * kUnitRows / 4; ++i) {
    const int64_t at = row + i % (kUnitRows / 4) * 4;
    const int own_step = step + i / (kUnitRows / 4);
    const int64_t column = int64_t{own_step} * kStepK + threadIdx.x % 8 * fp16x3::kVector;
    uint32_t least = kNoSubnormal;
    uint4 group = {};
    if (at < p.weight.rows && column < fp16x3::padded(k)) {
      float v[fp16x3::kVector];
      if constexpr (kTransposed) {
        for (int j = 0; j < fp16x3::kVector; ++j) {
          v[j] = column + j < k ? p.weight.from[(column + j) * p.weight.row_stride + at] : 0;
        }
      } else {
        load_floats(v, p.weight.from + at * p.weight.row_stride, column, k, /*is_aligned=*/true);
      }
      group = round_group(v, fp16x3::power_of_two(__ldg(p.weight.exponent + at)), &least);
      __half* const to = p.weight.hi + (own_step * p.weight.rows + at) * kStepK;
      *reinterpret_cast<uint4*>(to + column % kStepK) = group;
    }
    if (__any_sync(0xffffffff, least != kNoSubnormal)) {
      count_subnormals(p, at, group);
      counts = true;
    }
  }
  return counts;
}

// Converts units until all are converted: one warp. *progress is the step that this block's copies
// have reached. is_needed(): whether the product reads the weight at all, for all blocks alike.
template <bool kTransposed, typename IsNeeded>
__device__ void convert(const Conversion& p, int64_t k, int weight_tiles, int clusters,
                        Batches& batches, int barrier, int* progress, const IsNeeded& is_needed) {
  const int lane = threadIdx.x % 32;
  const int units_k = (p.steps + kUnitSteps - 1) / kUnitSteps;
  const int all_rows = weight_tiles * kClusterSize * kUnitsOfPanel;  // of units
  const int wave_rows = p.width * kClusterSize * kUnitsOfPanel;
  const unsigned units = static_cast<unsigned>(all_rows) * units_k;
  const auto next_unit = [&] { return lane == 0 ? atomicAdd(p.next, 1u) : 0; };
  const unsigned first = next_unit();
  if (!is_needed()) return;  // its loads and the atomic operation are in flight at once
  unsigned index = __shfl_sync(0xffffffff, first, 0);
  while (index < units) {
    const unsigned prefetched = next_unit();
    // Units go by waves of `width` tiles, the last of which may be smaller, and in a wave by steps.
    const int wave = static_cast<int>(index) / (wave_rows * units_k);
    const int in_wave = static_cast<int>(index) - wave * wave_rows * units_k;
    const int size = min(wave_rows, all_rows - wave * wave_rows), unit_k = in_wave / size;
    const int step = unit_k * kUnitSteps;
    const int64_t row = (wave * wave_rows + in_wave - unit_k * size) * kUnitRows;
    if (lane == 0) {
      const int first_use = wave * p.width * p.side / clusters * p.steps + step;
      while (atomicAdd(progress, 0) + kLead < first_use) __nanosleep(200);
    }
    __syncwarp();
    const bool is_whole =
        row + kUnitRows <= p.weight.rows && int64_t{step + kUnitSteps} * kStepK <= k;
    const bool counts = is_whole ? convert_unit<kTransposed>(p, row, step, batches, barrier)
                                 : convert_edge<kTransposed>(p, k, row + lane / 8, step);
    if (counts) {
      // An infinity makes the results of rows with too many subnormals infinite or NaN.
      __syncwarp();  // the counts of all lanes
      const int64_t own = row + lane;
      if (own < p.weight.rows &&
          fp16x3::has_many_subnormals(ptx::load_acquire(p.subnormals + own), k)) {
        p.weight.hi[(step * p.weight.rows + own) * kStepK] = __float2half(INFINITY);
      }
    }
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (lane < kUnitSteps && step + lane < p.steps) {
      ptx::add_release(p.ready + row / kPanelRows * p.steps + step + lane, 1);
    }
    index = __shfl_sync(0xffffffff, prefetched, 0);
  }
}

// Waits until a panel is converted in a step: one warp. Returns how many steps from there on are.
__device__ inline int wait_converted(const Conversion& p, int panel, int step) {
  const int at = step + threadIdx.x % 32;
  const unsigned* const ready = p.ready + static_cast<int64_t>(panel) * p.steps + at;
  unsigned missing;
  do {
    const bool is_ready = at < p.steps && ptx::load_acquire(ready) == kUnitsOfPanel;
    missing = ~__ballot_sync(0xffffffff, is_ready);
  } while (missing & 1);
  __syncwarp();  // the flags of all lanes, for the one that copies
  ptx::fence_proxy_async_global();
  return missing == 0 ? 32 : __ffs(missing) - 1;
}

}  // namespace kernels::sm90
