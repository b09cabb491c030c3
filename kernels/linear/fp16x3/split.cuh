// float32 as pairs of scaled fp16 pieces (docs/SPLIT.md), or as a hi piece alone.
//
// A row is scaled by a power of two that puts its largest element into [2^14, 2^15). A scaled
// element v is then hi + lo / 2^11: fp16 rounded to nearest, and fp16 of (v - hi) 2^11. Rows
// that hold infinity or NaN are split as zeros; nonfinite.cuh makes their results.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"

namespace kernels::fp16x3 {

// The rows of a split matrix are padded with zeros.
inline __host__ __device__ int64_t padded(int64_t k) { return (k + 63) / 64 * 64; }

// A row of pairs is carried; or is split again, as an element overflowed fp16; or has inf or NaN.
enum RowState { kExact, kOverflowed, kNonfinite };

// A float32 matrix [rows, k], rows row_stride elements apart, and its pieces.
struct SplitMatrix {
  const float* from;
  int64_t rows, row_stride;
  __half* hi;     // [rows, padded(k)], or stepwise
  __half* lo;     // the same, or null where hi is enough
  int* exponent;  // [rows]: scaled = element * 2^exponent
  int* state;     // [rows] of RowState, where there are pairs
  // Stepwise, there is a matrix [rows, kKTileWidth] for each 64 of k, or for each 32 of k with hi
  // and lo side by side: rows of any K use all of L2. With a lo, pairs of each 16 of k are in the
  // order 0 2 4 6 1 3 5 7: a thread that holds a fragment of the other operand has four neighbours.
  bool is_k_tiled;
};

constexpr int kVector = 8;       // elements that a thread splits at a time: 16 bytes of fp16
constexpr int kKTileWidth = 64;  // elements in a row of a stepwise matrix

constexpr float kLoScale = 2048;      // so that lo pieces of small elements are not subnormal
constexpr float kSmallHi = 0x1p-14f;  // a lone hi below has lost some of TF32's 11 bits
// Whether a row has too many of them: more than one in 32 of its nonzero elements.
__host__ __device__ inline bool has_many_subnormals(int64_t subnormals, int64_t nonzeros) {
  return subnormals * 32 > nonzeros;
}
constexpr int kNeedsTf32 = 127;  // the exponent of a row of x that a lone hi carries badly

constexpr int kThreads = 256, kWarps = kThreads / 32;  // of a block, at most
// Elements that a thread, and a warp, keep between the passes. They read the rest twice.
constexpr int kKept = 32, kKeptByWarp = 32 * kKept;
// As many threads as keep a row. With a group each, 1.6 times as long on an H200.
inline int threads_of_row(int64_t k) {
  int threads = kThreads;
  while (threads > 64 && threads / 2 * kKept >= k) threads /= 2;
  return threads;
}

// 2^exponent, for -126 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// sum * 2^-exponent with one rounding. The power of two, of two rows, may be no float32, so it is
// applied in two halves, the first exact. Sums are below 2^64, so that 2^-252 makes 0 of them.
__device__ inline float unscale(float sum, int exponent) {
  const int power = max(-exponent, -252);
  return sum * power_of_two(power / 2) * power_of_two(power - power / 2);
}

// Two scaled numbers as pairs: both hi pieces, and both lo ones.
__device__ inline void split_pair(float first, float second, uint32_t* hi, uint32_t* lo) {
  const __half2 h = __floats2half2_rn(first, second);
  const __half2 rest =
      __floats2half2_rn((first - __low2float(h)) * kLoScale, (second - __high2float(h)) * kLoScale);
  *hi = *reinterpret_cast<const uint32_t*>(&h);
  *lo = *reinterpret_cast<const uint32_t*>(&rest);
}

template <typename T, typename Op>
__device__ T reduce_warp(T value, const Op& op) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffff, value, lane));
  }
  return value;
}

// Groups of a row, `apart` elements apart; all loads are issued before the first is waited for.
template <int kCount>
__device__ void load_groups(float (&v)[kCount][kVector], const float* row, int64_t i, int64_t apart,
                            int64_t k) {
  const bool is_aligned = has_aligned_rows(row) && k % 4 == 0;
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
#pragma unroll
    for (int j = 0; j < kVector; j += 4) {
      const int64_t at = i + g * apart + j;
      const float4 four = ptx::load_global_four_if(is_aligned && at < k, row + at);
      v[g][j] = four.x, v[g][j + 1] = four.y, v[g][j + 2] = four.z, v[g][j + 3] = four.w;
    }
  }
  if (is_aligned) return;
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int64_t at = i + g * apart + j;
      v[g][j] = at < k ? row[at] : 0.0f;
    }
  }
}

// A group in pairs, stored where it exists. By all threads of a warp.
__device__ inline void store_group(__half* to, uint32_t (&pairs)[kVector / 2], bool is_interleaved,
                                   bool exists) {
  if (is_interleaved) {  // with the thread that has the other eight of 16
    const bool is_second = threadIdx.x % 2;
#pragma unroll
    for (int j = 0; j < kVector / 2; j += 2) {
      const uint32_t taken = __shfl_xor_sync(0xffffffff, is_second ? pairs[j] : pairs[j + 1], 1);
      (is_second ? pairs[j] : pairs[j + 1]) = taken;
    }
    const uint32_t second = pairs[1];
    pairs[1] = pairs[2], pairs[2] = second;
  }
  if (exists) *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Who splits a row, all of its threads: a warp, or a block of up to kThreads.
enum class Splitter { kBlock, kWarp };

// The values of all threads of the splitter, reduced by op.
template <typename T, typename Op>
__device__ T reduce(T value, Splitter splitter, const Op& op) {
  __shared__ T of_warp[kWarps];
  value = reduce_warp(value, op);
  if (splitter == Splitter::kWarp) return value;
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) value = op(value, of_warp[warp]);
  return value;
}

// A row's nonzero elements, and those of them that are subnormal in a lone hi.
struct Losses {
  uint32_t nonzeros = 0, subnormals = 0;

  // Most groups have neither zeros nor subnormals: one comparison an element.
  __device__ void add(const float (&v)[kVector], const float (&scaled)[kVector]) {
    float least = fabsf(scaled[0]);
#pragma unroll
    for (const float element : scaled) least = fminf(least, fabsf(element));
    nonzeros += kVector;
    if (least >= kSmallHi) return;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      nonzeros -= v[j] == 0.0f;
      subnormals += v[j] != 0.0f && fabsf(scaled[j]) < kSmallHi;
    }
  }
};

// A pair's power of two may be no float, so it has two factors, of which most rows need one.
struct RowScale {
  bool is_carried;
  int exponent;
  float scale, more;  // more is 1 for most rows, and 0 where the row is not carried

  // largest: the bits of the row's largest magnitude.
  __device__ RowScale(uint32_t largest, bool has_lo) {
    const int needed = largest > 0 ? 14 - ilogbf(__uint_as_float(largest)) : 0;
    is_carried = largest < 0x7f800000 && (has_lo || needed <= 126);
    exponent = is_carried ? needed : 0;
    scale = power_of_two(min(exponent, 126));
    more = is_carried ? power_of_two(exponent - min(exponent, 126)) : 0;
  }

  // scaled = v times the power of two.
  __device__ void apply(const float (&v)[kVector], float (&scaled)[kVector]) const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) scaled[j] = v[j] * scale;
    if (more == 1) return;
#pragma unroll
    for (float& element : scaled) element = is_carried ? element * more : 0.0f;
  }
};

__device__ inline void split_row(const SplitMatrix& matrix, int64_t row, int64_t k,
                                 Splitter splitter, bool has_lo) {
  const bool is_warp = splitter == Splitter::kWarp;
  const int threads = is_warp ? 32 : blockDim.x, thread = is_warp ? threadIdx.x % 32 : threadIdx.x;
  constexpr int kGroups = kKept / kVector;
  const int64_t padded_k = padded(k), step = int64_t{kVector} * threads, start = kVector * thread;
  const float* from = matrix.from + row * matrix.row_stride;

  // load
  float kept[kGroups][kVector];
  uint32_t largest = 0;  // the bits of floats without sign are in the order of the floats
  const auto compare = [&](const float (&v)[kVector]) {
#pragma unroll
    for (const float element : v) largest = max(largest, __float_as_uint(fabsf(element)));
  };
  load_groups(kept, from, start, step, k);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) compare(kept[g]);
  for (int64_t i = start + kGroups * step; i < k; i += step) {
    float v[1][kVector];
    load_groups(v, from, i, step, k);
    compare(v[0]);
  }

  // split
  largest = reduce(largest, splitter, [](uint32_t a, uint32_t b) { return max(a, b); });
  const RowScale scale(largest, has_lo);
  const auto place_of = [&](int64_t i) {
    const int of_step = has_lo ? kKTileWidth / 2 : kKTileWidth;
    if (!matrix.is_k_tiled) return row * padded_k + i;
    return (i / of_step * matrix.rows + row) * kKTileWidth + i % of_step;
  };
  const int64_t place = place_of(start), apart = place_of(start + step) - place;
  Losses losses;
  const auto split = [&](int64_t g, const float (&v)[kVector]) {
    float scaled[kVector];
    scale.apply(v, scaled);
    if (!has_lo) losses.add(v, scaled);
    uint32_t hi[kVector / 2], lo[kVector / 2];
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      split_pair(scaled[2 * j], scaled[2 * j + 1], &hi[j], &lo[j]);
    }
    const bool is_interleaved = has_lo && matrix.is_k_tiled, exists = start + g * step < padded_k;
    store_group(matrix.hi + place + g * apart, hi, is_interleaved, exists);
    if (has_lo) store_group(matrix.lo + place + g * apart, lo, is_interleaved, exists);
  };
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g * step < padded_k) split(g, kept[g]);
  }
  for (int64_t g = kGroups; g * step < padded_k; ++g) {
    float v[1][kVector];
    load_groups(v, from, start + g * step, step, k);
    split(g, v[0]);
  }

  bool is_carried = scale.is_carried;
  if (!has_lo) {
    const uint64_t both = static_cast<uint64_t>(losses.nonzeros) << 32 | losses.subnormals;
    const uint64_t sums = reduce(both, splitter, [](uint64_t a, uint64_t b) { return a + b; });
    is_carried &= !has_many_subnormals(static_cast<uint32_t>(sums), sums >> 32);
  }
  if (thread != 0) return;
  matrix.exponent[row] = has_lo || is_carried ? scale.exponent : kNeedsTf32;
  if (has_lo) matrix.state[row] = is_carried ? kExact : kNonfinite;
}

}  // namespace kernels::fp16x3
