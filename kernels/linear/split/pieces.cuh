// float32 as pairs of scaled fp16 (SPLIT.md), or as a single piece.
//
// A row is scaled by a power of two that puts its largest element into [2^14, 2^15). A scaled
// element v is then high + low / 2^11: fp16 rounded to nearest, and fp16 of (v - high) 2^11. The
// pair carries v to 2^-22 of itself or 2^-36 of the scaled unit, whichever is more. Rows that hold
// infinity or NaN are split as zeros; nonfinite.cuh makes their results.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"

namespace kernels::split {

// The rows of a split matrix are padded with zeros to a multiple of this.
constexpr int64_t kPadding = 64;

inline __host__ __device__ int64_t padded(int64_t k) {
  return (k + kPadding - 1) / kPadding * kPadding;
}

// A row of pairs is carried; or is split again, as an element overflowed fp16; or has inf or NaN.
enum RowState { kCarried, kOverflowed, kNonfinite };

// A float32 matrix [rows, k], rows row_stride elements apart, and its pieces.
struct Operand {
  const float* from;
  int64_t rows, row_stride;
  __half* high;   // [rows, padded(k)], or stepwise
  __half* low;    // the same, or null where high is enough
  int* exponent;  // [rows]: scaled = element * 2^exponent
  int* state;     // [rows] of RowState, where there are pairs
  // Stepwise, there is a matrix [rows, kStepwise] for each 64 of k, or for each 32 of k with high
  // and low side by side: one copy reads one place. Pieces of rows that are a whole K apart may
  // share few slices of L2. With a low, pairs of each 16 of k are in the order 0 2 4 6 1 3 5 7: a
  // thread that holds a fragment of the other operand has four neighbours of each 16 in it.
  bool is_stepwise;
  bool is_transposed;  // from is [k, rows]: k row_stride elements apart, rows adjacent
};

// Elements of a row that a thread splits at a time: 16 bytes of fp16.
constexpr int kGroup = 8;
constexpr int kStepwise = 64;  // elements in a row of a stepwise matrix

// Low pieces are scaled by this, so that those of small elements do not become subnormal.
constexpr float kLowScale = 2048;
// A lone high below this, after scaling, has lost some of the 11 bits that TF32 has.
constexpr float kSmallHigh = 0x1p-14f;
// Whether a row has too many of them: more than one in 32 of its nonzero elements.
__host__ __device__ inline bool has_many_subnormals(int64_t subnormals, int64_t nonzeros) {
  return subnormals * 32 > nonzeros;
}
// The exponent of a row of x of which a lone high carries too little.
constexpr int kUncarried = 127;

constexpr int kThreads = 256, kWarps = kThreads / 32;  // at most
// Elements of a row that a thread, and a warp, keep between the passes. They read the rest twice.
constexpr int kKept = 32, kKeptByWarp = 32 * kKept;
// The threads of a block: as many as keep a row, up to kThreads. With one group each, x [4096,
// 2048] takes 30 us instead of 18.5 (H200).
inline int threads_of_row(int64_t k) {
  int threads = kThreads;
  while (threads > 64 && threads / 2 * kKept >= k) threads /= 2;
  return threads;
}

// 2^exponent, for -126 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// sum * 2^-exponent with one rounding. exponent may be the sum of those of a row of x and of the
// weight, whose power of two is outside of float32's range. So it is applied in two halves, of
// which the first is exact. Sums are below 2^64, so that 2^-252 makes 0 of them.
__device__ inline float unscale(float sum, int exponent) {
  const int power = max(-exponent, -252);
  return sum * power_of_two(power / 2) * power_of_two(power - power / 2);
}

// Two scaled numbers as pairs: both high pieces, and both low ones.
__device__ inline void split_pair(float first, float second, uint32_t* high, uint32_t* low) {
  const __half2 h = __floats2half2_rn(first, second);
  const __half2 rest = __floats2half2_rn((first - __low2float(h)) * kLowScale,
                                         (second - __high2float(h)) * kLowScale);
  *high = *reinterpret_cast<const uint32_t*>(&h);
  *low = *reinterpret_cast<const uint32_t*>(&rest);
}

// The values of all lanes, reduced by op.
template <typename T, typename Op>
__device__ T reduce_warp(T value, const Op& op) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffff, value, lane));
  }
  return value;
}

// One group of a row, zeros past its end.
__device__ inline void load_group(float (&v)[kGroup], const float* row, int64_t i, int64_t k) {
  load_floats(v, row, i, k, has_aligned_rows(row));
}

// The same of an operand's row, transposed or not.
__device__ inline void load_group(float (&v)[kGroup], const Operand& operand, int64_t row,
                                  int64_t i, int64_t k) {
  const int64_t stride = operand.row_stride;
  if (!operand.is_transposed) return load_group(v, operand.from + row * stride, i, k);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) v[j] = i + j < k ? operand.from[(i + j) * stride + row] : 0.0f;
}

// Some groups of a row, `apart` elements apart, by aligned vectors; all loads are issued before the
// first is waited for. Where the row begins between two vectors, a group is the middle of three.
// The first of these may begin before the row, but not before its allocation, which is aligned too.
template <int kCount>
__device__ void load_groups(float (&v)[kCount][kGroup], const float* row, int64_t i, int64_t apart,
                            int64_t k) {
  const int shift = reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4;
  const auto load = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    float w[kCount][4 * kVectors];
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
#pragma unroll
      for (int j = 0; j < 4 * kVectors; j += 4) {
        const int64_t at = i + g * apart + j - shift;
        const float4 four = ptx::load_global_four_if(at + 4 <= k, row + at);
        w[g][j] = four.x, w[g][j + 1] = four.y, w[g][j + 2] = four.z, w[g][j + 3] = four.w;
      }
    }
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      if constexpr (kVectors > 2) {
#pragma unroll
        for (int j = 0; j < kGroup + 2; ++j) w[g][j] = shift & 2 ? w[g][j + 2] : w[g][j];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) w[g][j] = shift & 1 ? w[g][j + 1] : w[g][j];
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[g][j] = w[g][j];
    }
  };
  if (shift == 0) {
    load(std::integral_constant<int, 2>{});
  } else {
    load(std::integral_constant<int, 3>{});
  }
  // The end of a row, which is no whole vector.
  const int64_t end = (k + shift) / 4 * 4 - shift;
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
    const int64_t at = i + g * apart;
    if (at < k && at + kGroup > end && end < k) load_group(v[g], row, at, k);
  }
}

// A group in pairs. By all threads of a warp; those that have `exists` store.
__device__ inline void store_group(__half* to, uint32_t (&pairs)[kGroup / 2], bool is_interleaved,
                                   bool exists) {
  if (is_interleaved) {  // with the thread that has the other eight of 16
    const bool is_second = threadIdx.x % 2;
#pragma unroll
    for (int j = 0; j < kGroup / 2; j += 2) {
      const uint32_t taken = __shfl_xor_sync(0xffffffff, is_second ? pairs[j] : pairs[j + 1], 1);
      (is_second ? pairs[j] : pairs[j + 1]) = taken;
    }
    const uint32_t second = pairs[1];
    pairs[1] = pairs[2], pairs[2] = second;
  }
  if (exists) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// The largest of all threads of the warp or the block.
template <bool kByWarp>
__device__ uint32_t reduce_max(uint32_t largest) {
  __shared__ uint32_t of_warp[kWarps];
  largest = reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  if constexpr (kByWarp) return largest;
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) largest = max(largest, of_warp[warp]);
  return largest;
}

// A row's nonzero elements, and those of them that are subnormal in a lone high.
struct Losses {
  int nonzeros = 0, subnormals = 0;

  // Most groups have no zeros and no subnormals, which takes one comparison an element to see.
  __device__ void add(const float (&v)[kGroup], const float (&scaled)[kGroup]) {
    float least = fabsf(scaled[0]);
#pragma unroll
    for (const float element : scaled) least = fminf(least, fabsf(element));
    nonzeros += kGroup;
    if (least >= kSmallHigh) return;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      nonzeros -= v[j] == 0.0f;
      subnormals += v[j] != 0.0f && fabsf(scaled[j]) < kSmallHigh;
    }
  }

  // The sums of all threads of the warp or the block, for its first.
  template <bool kByWarp>
  __device__ void reduce() {
    __shared__ int of_warp[2][kWarps];
    const auto add = [](int a, int b) { return a + b; };
    subnormals = reduce_warp(subnormals, add), nonzeros = reduce_warp(nonzeros, add);
    if constexpr (kByWarp) return;
    if (threadIdx.x % 32 == 0) {
      of_warp[0][threadIdx.x / 32] = subnormals, of_warp[1][threadIdx.x / 32] = nonzeros;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    subnormals = nonzeros = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) {
      subnormals += of_warp[0][warp], nonzeros += of_warp[1][warp];
    }
  }
};

// The power of two of a row. A pair's may be outside of float's range, so it has two factors; a
// lone high is not carried then. A row with infinity or NaN is never carried.
struct RowScale {
  bool is_carried;
  int exponent;
  float scale, more;  // more is 1 for most rows, and 0 where the row is not carried

  // largest: the bits of the row's largest magnitude.
  __device__ RowScale(uint32_t largest, bool is_pair) {
    const int needed = largest > 0 ? 14 - ilogbf(__uint_as_float(largest)) : 0;
    is_carried = largest < 0x7f800000 && (is_pair || needed <= 126);
    exponent = is_carried ? needed : 0;
    scale = power_of_two(min(exponent, 126));
    more = is_carried ? power_of_two(exponent - min(exponent, 126)) : 0;
  }

  // scaled = v times the power of two.
  __device__ void apply(const float (&v)[kGroup], float (&scaled)[kGroup]) const {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) scaled[j] = v[j] * scale;
    if (more == 1) return;
#pragma unroll
    for (float& element : scaled) element = is_carried ? element * more : 0.0f;
  }
};

// The place of element i of a row among the operand's pieces.
template <bool kIsPair>
__device__ int64_t place_of(const Operand& operand, int64_t row, int64_t i, int64_t padded_k) {
  constexpr int kOfStep = kIsPair ? kStepwise / 2 : kStepwise;
  if (!operand.is_stepwise) return row * padded_k + i;
  return (i / kOfStep * operand.rows + row) * kStepwise + i % kOfStep;
}

// Splits one group of a row and stores its pieces at this place, if it exists.
template <bool kIsPair>
__device__ void split_group(const Operand& operand, int64_t place, bool exists,
                            const float (&v)[kGroup], const RowScale& scale, Losses* losses) {
  float scaled[kGroup];
  scale.apply(v, scaled);
  if constexpr (!kIsPair) losses->add(v, scaled);
  uint32_t high[kGroup / 2], low[kGroup / 2];
#pragma unroll
  for (int j = 0; j < kGroup / 2; ++j) {
    split_pair(scaled[2 * j], scaled[2 * j + 1], &high[j], &low[j]);
  }
  const bool is_interleaved = kIsPair && operand.is_stepwise;
  store_group(operand.high + place, high, is_interleaved, exists);
  if constexpr (kIsPair) store_group(operand.low + place, low, is_interleaved, exists);
}

// How a row was split, for the product. The losses are of a row of which high is all.
template <bool kIsPair>
__device__ void store_exponent(const Operand& operand, int64_t row, const RowScale& scale,
                               const Losses& losses) {
  if constexpr (kIsPair) {
    operand.exponent[row] = scale.exponent;
    operand.state[row] = scale.is_carried ? kCarried : kNonfinite;
  } else {
    const bool is_carried =
        scale.is_carried && !has_many_subnormals(losses.subnormals, losses.nonzeros);
    operand.exponent[row] = is_carried ? scale.exponent : kUncarried;
  }
}

// A row, by a warp or by all threads of the block, which are kThreads at most.
template <bool kIsPair, bool kByWarp = false>
__device__ void split_row(const Operand& operand, int64_t row, int64_t k) {
  const int threads = kByWarp ? 32 : blockDim.x;
  const int thread = kByWarp ? threadIdx.x % 32 : threadIdx.x;
  constexpr int kGroups = kKept / kGroup;
  const int64_t padded_k = padded(k), step = int64_t{kGroup} * threads, start = kGroup * thread;
  const float* from = operand.from + row * operand.row_stride;

  // load
  float kept[kGroups][kGroup];
  uint32_t largest = 0;  // the bits of floats without sign are in the order of the floats
  const auto compare = [&](const float (&v)[kGroup]) {
#pragma unroll
    for (const float element : v) largest = max(largest, __float_as_uint(fabsf(element)));
  };
  load_groups(kept, from, start, step, k);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) compare(kept[g]);
  for (int64_t i = start + kGroups * step; i < k; i += step) {
    float v[1][kGroup];
    load_groups(v, from, i, step, k);
    compare(v[0]);
  }

  // split
  const RowScale scale(reduce_max<kByWarp>(largest), kIsPair);
  const int64_t place = place_of<kIsPair>(operand, row, start, padded_k);
  const int64_t apart = place_of<kIsPair>(operand, row, start + step, padded_k) - place;
  Losses losses;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g * step >= padded_k) continue;
    split_group<kIsPair>(operand, place + g * apart, start + g * step < padded_k, kept[g], scale,
                         &losses);
  }
  for (int64_t g = kGroups; g * step < padded_k; ++g) {
    float v[1][kGroup];
    load_groups(v, from, start + g * step, step, k);
    split_group<kIsPair>(operand, place + g * apart, start + g * step < padded_k, v[0], scale,
                         &losses);
  }

  if constexpr (!kIsPair) losses.reduce<kByWarp>();
  if (thread == 0) store_exponent<kIsPair>(operand, row, scale, losses);
}

}  // namespace kernels::split
