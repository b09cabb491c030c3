// Splits the rows of a float32 matrix [rows, k] into scaled fp16 numbers for the tensor cores.
//
// The arithmetic, for one element of a row (docs/SPLIT.md proves the error bound):
//
//   scaled = element * 2^exponent           exact; one exponent for the whole row
//   hi     = fp16(scaled)                   rounded to nearest
//   lo     = fp16((scaled - hi) * 2^11)     rounded to nearest
//
// so that scaled = hi + lo / 2^11, up to 2^-23 |scaled|. The fp16x3 GEMM multiplies hi and lo of
// both operands; the GEMM with one product (float32 at `high`) multiplies the hi halves alone.
//
//   Example: a row whose largest element is pi = 3.14159274.
//   exponent = 13               scaled = 3.14159274 * 2^13 = 25735.927734375
//   hi = 25728                  fp16 numbers near 25735 are 16 apart
//   lo = fp16(7.927734375 * 2^11 = 16236) = 16240
//   hi + lo / 2^11 = 25735.9296875, which is 2^-23.6 of the element too large
//
// Why a row is scaled. fp16 ends at 65504 above, and has its full 11 significant bits only from
// 2^-14 on. The power of two moves the row's largest element into [2^14, 2^15), near the upper end,
// so that elements up to 2^28 times smaller still have 11 bits. A zero row has the exponent 0.
//
// Why lo has the factor 2^11. A float32 number has 24 significant bits, of which hi takes 11. The
// rest, scaled - hi, is at most 2^-11 |scaled|, so the factor makes lo about as large as hi: lo of
// a small element is not subnormal before its hi is.
//
// What is exact. The scaling and the rest are. The rest has at most 12 bits and a sign, of which lo
// takes 11, so hi and lo represent three of four float32 numbers exactly, and the others to
// 2^-23 |scaled|. fp16 ends at 2^-24 below, so nothing smaller than 2^-36 is represented.
//
// A row that holds infinity or NaN is split as if it were zero, and nonfinite.cuh computes its
// results after the GEMM.
//
// split_row is called by split_x_kernel (sm90/split_x.cuh) for x, and by split_rows_kernel
// (sm80/launch.cu) for x and the weight. The sm90 GEMMs split or round the weight themselves, with
// split_pair or convert_weight.cuh.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"

namespace kernels::fp16x3 {

// ------------------------------------------------------------------------------------ the format

// The factor of lo.
constexpr float kLoScale = 2048;

// Elements of one row in a k-tile of the k-tiled layout: 128 bytes, the widest row that TMA
// swizzles.
constexpr int kKTileWidth = 64;

// The k of a split matrix: rows are padded with zeros to whole k-tiles.
inline __host__ __device__ int64_t padded(int64_t k) {
  return (k + kKTileWidth - 1) / kKTileWidth * kKTileWidth;
}

// The state of a row, which tells how its results come to be right.
//
//   kExact       the GEMM's results are right
//   kOverflowed  only rows of the weight, on sm90: an element that the sample missed overflowed
//                fp16, and the GEMM's second run scales the row by its largest element
//   kNonfinite   the row holds infinity or NaN, and nonfinite.cuh computes its results
//
// split_row writes kExact or kNonfinite. On sm90, split_x_kernel writes kExact for the weight, the
// GEMM's epilogue writes kOverflowed, and its second run turns that into kNonfinite where the row
// holds infinity or NaN.
enum RowState { kExact, kOverflowed, kNonfinite };

// A float32 matrix [rows, k], and the two fp16 halves of its elements.
//
// Layouts of hi and lo:
//
//   row-major          hi[row][i] and lo[row][i], two matrices [rows, padded(k)]
//
//   k-tiled, hi alone  [k-tile][row][64 hi]            a k-tile has 64 of K
//
//   k-tiled, with lo   [k-tile][row][32 hi, 32 lo]     a k-tile has 32 of K, and lo = hi + 32
//
// In the k-tiled layout the rows that a thread block loads for one pipeline stage are consecutive
// in memory, so the loads use all of L2 for every K. (In a row-major matrix they are K elements
// apart.)
//
// With lo, the k-tiled layout also changes the order within each 16 elements of K. The eight pairs
// of neighbours are stored in the order 0 2 4 6 1 3 5 7:
//
//   element of K     0  1 | 2  3 | 4  5 | 6  7 | 8  9 |10 11 |12 13 |14 15
//   pair               0  |   1  |   2  |   3  |   4  |   5  |   6  |   7
//   stored element   0  1 | 4  5 | 8  9 |12 13 | 2  3 | 6  7 |10 11 |14 15
//   stored pair        0  |   2  |   4  |   6  |   1  |   3  |   5  |   7
//
// The reason is the other operand, the weight. Thread t of four holds, in a wgmma fragment, the
// columns 2t, 2t + 1, 2t + 8 and 2t + 9. It loads the weight's elements 4t to 4t + 3 by one 16-byte
// access, which are the pairs 2t and 2t + 1, and uses them as these columns. A sum over K does not
// depend on the order of K, as long as x has the same one.
struct SplitMatrix {
  const float* from;  // the float32 matrix; null only in a dry run that measures a workspace
  int64_t rows;
  int64_t row_stride;  // elements between the beginnings of two rows of `from`
  __half* hi;
  __half* lo;  // null where hi alone is used

  // [rows]: scaled = element * 2^exponent. The epilogues read it to undo the scaling, and the sm90
  // GEMMs read the weight's to scale it. In a split of hi alone it may be kNeedsTf32.
  int* exponent;
  int* state;  // [rows] of RowState; only where there is lo
  bool is_k_tiled;
};

// Of x, split into hi alone: the exponent of a row that must be multiplied as TF32. Such a row
// holds infinity or NaN, is so small that its power of two is no float, or loses too many bits
// (has_many_subnormals). The GEMM with one product leaves its tiles to a second GEMM. Other
// exponents of a split of hi alone are at most kMaxHiExponent.
constexpr int kNeedsTf32 = 127;
constexpr int kMaxHiExponent = 126;

// A hi below this is subnormal and has lost some of the 11 bits that TF32 would keep.
constexpr float kSmallHi = 0x1p-14f;

// Returns whether hi alone represents a row badly: more than one in 32 of its nonzero elements are
// subnormal.
__host__ __device__ inline bool has_many_subnormals(int64_t subnormals, int64_t nonzeros) {
  return subnormals * 32 > nonzeros;
}

// Returns 2^exponent, for -126 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Returns sum * 2^-exponent, rounded once. `exponent` is the sum of two rows' exponents, so the
// power of two may be no float32. It is applied in two factors, of which the first is exact. Sums
// are below 2^64, so a factor of 2^-252 makes zero of them, as any smaller one would.
__device__ inline float unscale(float sum, int exponent) {
  const int power = max(-exponent, -252);
  return sum * power_of_two(power / 2) * power_of_two(power - power / 2);
}

// Splits two scaled numbers. *hi and *lo each get two fp16 numbers, `first` in the low 16 bits.
__device__ inline void split_pair(float first, float second, uint32_t* hi, uint32_t* lo) {
  const __half2 h = __floats2half2_rn(first, second);
  const __half2 rest =
      __floats2half2_rn((first - __low2float(h)) * kLoScale, (second - __high2float(h)) * kLoScale);
  *hi = *reinterpret_cast<const uint32_t*>(&h);
  *lo = *reinterpret_cast<const uint32_t*>(&rest);
}

// ------------------------------------------------------------------------------ splitting one row

// A group is the elements that a thread loads, splits and stores at a time: 16 bytes of fp16.
constexpr int kVector = 8;

// Who splits a row: one warp, or a whole block of up to kThreads threads. A block for each row of
// x [65536, 256] takes 86 us on an H100 and a warp for each 47 us.
enum class Splitter { kBlock, kWarp };

struct SplitConfig {
  static constexpr int kThreads = 256;          // of a block, at most
  static constexpr int kMinThreads = 64;        // of a block, at least
  static constexpr int kWarps = kThreads / 32;  // of a block, at most
  static constexpr int kKept = 32;              // elements that a thread keeps in registers
  static constexpr int kKeptGroups = kKept / kVector;
  static constexpr int kKeptByWarp = 32 * kKept;  // the longest row that a warp keeps
};
static_assert(SplitConfig::kKept % kVector == 0, "a thread keeps whole groups");
static_assert(32 * kVector % kKTileWidth == 0,
              "the threads of a splitter step over whole k-tiles, so steps are equally far apart");

// Returns how many threads a block that splits rows has: the fewest that keep a whole row in
// registers, from 64 to 256. With as many threads as a row has groups, splitting takes 1.6 times as
// long on an H200.
inline int threads_of_row(int64_t k) {
  int threads = SplitConfig::kThreads;
  while (threads > SplitConfig::kMinThreads && threads / 2 * SplitConfig::kKept >= k) threads /= 2;
  return threads;
}

// Combines the values of a warp's lanes by op; every lane gets the result.
template <typename T, typename Op>
__device__ T reduce_warp(T value, const Op& op) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffff, value, lane));
  }
  return value;
}

// Combines the values of all threads of the splitter by op; every thread gets the result. A block
// must pass __syncthreads between two calls with the same T, which share `of_warp`.
template <typename T, typename Op>
__device__ T reduce(T value, Splitter splitter, const Op& op) {
  __shared__ T of_warp[SplitConfig::kWarps];
  value = reduce_warp(value, op);
  if (splitter == Splitter::kWarp) return value;
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) value = op(value, of_warp[warp]);
  return value;
}

// Loads kCount groups of a row of k elements. Group g begins at element first + g * apart. Elements
// past k are 0. All loads are issued before the first one is waited for.
template <int kCount>
__device__ void load_groups(float (&v)[kCount][kVector], const float* row, int64_t first,
                            int64_t apart, int64_t k) {
  const bool is_aligned = has_aligned_rows(row) && k % 4 == 0;
  // Vectors of four. On a row that is not aligned the predicate is false and the loads give zeros:
  // a branch here would keep the compiler from issuing all of them at once.
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
#pragma unroll
    for (int j = 0; j < kVector; j += 4) {
      const int64_t i = first + g * apart + j;
      const float4 four = ptx::load_global_four_if(is_aligned && i < k, row + i);
      v[g][j] = four.x;
      v[g][j + 1] = four.y;
      v[g][j + 2] = four.z;
      v[g][j + 3] = four.w;
    }
  }
  if (is_aligned) return;
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int64_t i = first + g * apart + j;
      v[g][j] = i < k ? row[i] : 0.0f;
    }
  }
}

// Brings the pairs of two neighbouring threads, 16 elements, into the order 0 2 4 6 1 3 5 7. All
// threads of a warp call it.
//
//                     even thread    odd thread
//   before            0 1 2 3        4 5 6 7
//   after the swaps   0 4 2 6        1 5 3 7      1 for 4, and 3 for 6
//   after the end     0 2 4 6        1 3 5 7
__device__ inline void interleave_pairs(uint32_t (&pairs)[kVector / 2]) {
  const bool is_odd_thread = threadIdx.x % 2;
#pragma unroll
  for (int j = 0; j < kVector / 2; j += 2) {
    const uint32_t given = is_odd_thread ? pairs[j] : pairs[j + 1];
    const uint32_t taken = __shfl_xor_sync(0xffffffff, given, 1);
    if (is_odd_thread) {
      pairs[j] = taken;
    } else {
      pairs[j + 1] = taken;
    }
  }
  const uint32_t second = pairs[1];
  pairs[1] = pairs[2];
  pairs[2] = second;
}

// Stores a group of hi or lo, four pairs, where it exists. All threads of a warp call it.
__device__ inline void store_group(__half* to, uint32_t (&pairs)[kVector / 2], bool is_interleaved,
                                   bool exists) {
  if (is_interleaved) interleave_pairs(pairs);
  if (exists) *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Counts the elements of a row that are not zero, and those of them whose hi is subnormal.
struct SubnormalCounter {
  uint32_t nonzeros = 0;
  uint32_t subnormals = 0;

  // Adds a group: its elements and the same scaled. Most groups have neither zeros nor subnormals,
  // and cost one comparison an element.
  __device__ void add(const float (&v)[kVector], const float (&scaled)[kVector]) {
    float smallest = fabsf(scaled[0]);
#pragma unroll
    for (const float element : scaled) smallest = fminf(smallest, fabsf(element));
    nonzeros += kVector;
    if (smallest >= kSmallHi) return;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      nonzeros -= static_cast<uint32_t>(v[j] == 0.0f);
      const bool is_subnormal = v[j] != 0.0f && fabsf(scaled[j]) < kSmallHi;
      subnormals += static_cast<uint32_t>(is_subnormal);
    }
  }
};

// The scale of a row. Exponents reach 163, for a row whose largest element is 2^-149, and a float
// ends at 2^127. So the power of two has two factors, of which the second is 1 for most rows.
struct RowScale {
  // Whether the row can be split: all of it is finite and, for hi alone, the exponent is at most
  // kMaxHiExponent. Any other row is split as zeros.
  bool can_split;
  int exponent;
  float scale;
  float more;  // the second factor; 0 where the row is split as zeros

  // largest: the bits of the row's largest magnitude, a float without its sign.
  __device__ RowScale(uint32_t largest, bool has_lo) {
    constexpr uint32_t kInfinityBits = 0x7f800000;  // bits of NaN are larger still
    const int needed = largest > 0 ? 14 - ilogbf(__uint_as_float(largest)) : 0;
    can_split = largest < kInfinityBits && (has_lo || needed <= kMaxHiExponent);
    exponent = can_split ? needed : 0;
    scale = power_of_two(min(exponent, 126));
    more = can_split ? power_of_two(exponent - min(exponent, 126)) : 0;
  }

  // scaled = v * 2^exponent, or zeros.
  __device__ void apply(const float (&v)[kVector], float (&scaled)[kVector]) const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) scaled[j] = v[j] * scale;
    if (more == 1) return;
    // A selection, as NaN times 0 would be NaN.
#pragma unroll
    for (float& element : scaled) element = can_split ? element * more : 0.0f;
  }
};

// One row, and this thread's part of it: the groups that begin at elements start + g * step, for
// g = 0, 1, ... The first kKeptGroups of them stay in registers between the two times that the
// row is read. The others, of rows longer than kKept elements a thread, are loaded twice.
struct RowOfThread {
  int64_t row;
  int64_t k;
  int64_t padded_k;
  const float* from;  // the row's first element
  int64_t start;
  int64_t step;

  __device__ RowOfThread(const SplitMatrix& matrix, int64_t row, int64_t k, int thread, int threads)
      : row(row),
        k(k),
        padded_k(padded(k)),
        from(matrix.from + row * matrix.row_stride),
        start(kVector * thread),
        step(int64_t{kVector} * threads) {}

  // Returns where element i, a multiple of 8, is among the elements of hi.
  __device__ int64_t place_of(const SplitMatrix& matrix, int64_t i, bool has_lo) const {
    const int k_of_tile = has_lo ? kKTileWidth / 2 : kKTileWidth;
    if (!matrix.is_k_tiled) return row * padded_k + i;
    return (i / k_of_tile * matrix.rows + row) * kKTileWidth + i % k_of_tile;
  }
};

// Keeps the larger of *largest and the magnitudes in a group, as bits: as unsigned integers, the
// bits of floats without sign have the order of the floats, and those of NaN are the largest.
__device__ __forceinline__ void update_largest(const float (&v)[kVector], uint32_t* largest) {
#pragma unroll
  for (const float element : v) *largest = max(*largest, __float_as_uint(fabsf(element)));
}

// First phase: loads the thread's groups, of which the first stay in `kept`. Returns the bits of
// the largest magnitude in the thread's part of the row.
__device__ __forceinline__ uint32_t
load_and_find_largest(const RowOfThread& part, float (&kept)[SplitConfig::kKeptGroups][kVector]) {
  constexpr int kGroups = SplitConfig::kKeptGroups;
  uint32_t largest = 0;
  load_groups(kept, part.from, part.start, part.step, part.k);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) update_largest(kept[g], &largest);
  for (int64_t i = part.start + kGroups * part.step; i < part.k; i += part.step) {
    float v[1][kVector];
    load_groups(v, part.from, i, part.step, part.k);
    update_largest(v[0], &largest);
  }
  return largest;
}

// Third phase: scales, splits and stores the thread's groups. Counts subnormals where there is no
// lo.
__device__ __forceinline__ SubnormalCounter
split_and_store(const SplitMatrix& matrix, const RowOfThread& part, const RowScale& scale,
                bool has_lo, const float (&kept)[SplitConfig::kKeptGroups][kVector]) {
  SubnormalCounter counter;
  constexpr int kGroups = SplitConfig::kKeptGroups;
  // A step is a multiple of the k-tile's width, so the groups' places are equally far apart.
  const int64_t place = part.place_of(matrix, part.start, has_lo);
  const int64_t apart = part.place_of(matrix, part.start + part.step, has_lo) - place;
  const auto split_group = [&](int64_t g, const float (&v)[kVector]) {
    float scaled[kVector];
    scale.apply(v, scaled);
    if (!has_lo) counter.add(v, scaled);
    uint32_t hi[kVector / 2];
    uint32_t lo[kVector / 2];
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      split_pair(scaled[2 * j], scaled[2 * j + 1], &hi[j], &lo[j]);
    }
    const bool is_interleaved = has_lo && matrix.is_k_tiled;
    const bool exists = part.start + g * part.step < part.padded_k;
    store_group(matrix.hi + place + g * apart, hi, is_interleaved, exists);
    if (has_lo) store_group(matrix.lo + place + g * apart, lo, is_interleaved, exists);
  };
  // The conditions of both loops are the same for all threads, as store_group demands.
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g * part.step < part.padded_k) split_group(g, kept[g]);
  }
  for (int64_t g = kGroups; g * part.step < part.padded_k; ++g) {
    float v[1][kVector];
    load_groups(v, part.from, part.start + g * part.step, part.step, part.k);
    split_group(g, v[0]);
  }
  return counter;
}

// Splits one row, and writes its exponent and, where there is lo, its state. All threads of the
// splitter call it. A block must pass __syncthreads before it splits another row.
__device__ inline void split_row(const SplitMatrix& matrix, int64_t row, int64_t k,
                                 Splitter splitter, bool has_lo) {
  const bool is_warp = splitter == Splitter::kWarp;
  const int threads = is_warp ? 32 : blockDim.x;
  const int thread = is_warp ? threadIdx.x % 32 : threadIdx.x;
  const RowOfThread part(matrix, row, k, thread, threads);

  // 1. Find the largest magnitude.
  float kept[SplitConfig::kKeptGroups][kVector];
  uint32_t largest = load_and_find_largest(part, kept);
  largest = reduce(largest, splitter, [](uint32_t a, uint32_t b) { return max(a, b); });

  // 2. Choose the power of two.
  const RowScale scale(largest, has_lo);

  // 3. Scale, split and store.
  const SubnormalCounter counter = split_and_store(matrix, part, scale, has_lo, kept);

  bool is_represented = scale.can_split;
  if (!has_lo) {
    // Sum the counts of all threads, both in one 64-bit number.
    const uint64_t both = static_cast<uint64_t>(counter.nonzeros) << 32 | counter.subnormals;
    const uint64_t sums = reduce(both, splitter, [](uint64_t a, uint64_t b) { return a + b; });
    is_represented &= !has_many_subnormals(static_cast<uint32_t>(sums), sums >> 32);
  }
  if (thread != 0) return;
  matrix.exponent[row] = has_lo || is_represented ? scale.exponent : kNeedsTf32;
  if (has_lo) matrix.state[row] = is_represented ? kExact : kNonfinite;
}

}  // namespace kernels::fp16x3
