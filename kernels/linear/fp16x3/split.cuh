// Splits the rows of a float32 matrix [rows, k] into scaled fp16 numbers for the tensor cores.
//
// The arithmetic, for one element of a row (docs/SPLIT.md proves the error bound):
//
//   scaled = element * 2^exponent           exact; the row's exponent
//   hi     = fp16(scaled)                   rounded to nearest
//   lo     = fp16((scaled - hi) * 2^11)     rounded to nearest
//
// so that scaled = hi + lo / 2^11, with an error of at most 2^-23 |scaled|. The fp16x3 GEMM
// (float32 at `highest`) multiplies hi and lo of both operands. The GEMM with one product (float32
// at `high`) multiplies the hi halves alone; lo is then not made.
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
// What is exact. The scaling and the subtraction are exact. The rest has at most 12 bits and a
// sign, of which lo takes 11. So hi and lo represent three of four float32 numbers exactly, and the
// others to 2^-23 |scaled|. Very small elements are the exception: fp16 ends at 2^-24 below, so lo
// / 2^11 has no bits below 2^-35, and the error of a scaled element can be 2^-36.
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

// The state of a row of x or of the weight in the fp16x3 GEMMs. It tells which kernel computes the
// row's results.
//
//   kExact       the GEMM (its first run, on sm90)
//   kOverflowed  the GEMM's second run, on sm90: with the exponent that a sample of this row of the
//                weight gave (sm90/split_x.cuh), an element overflowed fp16
//   kNonfinite   nonfinite.cuh: the row holds infinity or NaN
//
// split_row writes kExact or kNonfinite. The weight on sm90 is not split by split_row: its rows are
// kExact at first, become kOverflowed where the first run finds a sum that is not finite, and then
// kNonfinite where the second run finds infinity or NaN in the row.
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
  const float* from;  // the float32 matrix
  int64_t rows;
  int64_t row_stride;  // elements between the beginnings of two rows of `from`
  __half* hi;          // null for the weight of sm90's fp16x3 GEMM, which splits it in registers
  __half* lo;          // null there, too, and where hi alone is used

  // [rows]: scaled = element * 2^exponent. The epilogues read it to undo the scaling, and the sm90
  // GEMMs read the weight's to scale it. In a split of hi alone it may be kNeedsTf32.
  int* exponent;
  int* state;  // [rows] of RowState; only where there is lo
  bool is_k_tiled;
};

// The exponent that marks a row of x which hi alone represents badly: the row holds infinity or
// NaN, or is so small that its power of two is no float, or has_many_subnormals. The GEMM with one
// product leaves the tiles of such a row to a second GEMM, in TF32. The other exponents in a split
// of hi alone are at most kMaxHiExponent.
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

// Who splits a row: one warp, or a whole block of up to SplitConfig::kThreads threads. Short rows
// are split by a warp: x [65536, 256] takes 47 us, with a block for each row 86 us.
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
  // Loads of four elements, which give zeros where their condition is false. No branch separates
  // them, so all are issued at once. On a row that is not aligned all conditions are false.
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

  // Adds a group: `scaled` is `v` scaled. Most groups have neither zeros nor subnormals, and cost
  // one comparison an element.
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

// The power of two that a row is multiplied by. With lo, exponents reach 163, for a row whose
// largest element is 2^-149, while floats end at 2^127. So the power has two factors:
// 2^min(exponent, 126), and the rest, which is 1 for most rows.
struct RowScale {
  // Whether the row can be split: all of it is finite and, for hi alone, the exponent is at most
  // kMaxHiExponent. Any other row is split as zeros.
  bool can_split;
  int exponent;
  float factor;
  float second_factor;  // 0 where the row is split as zeros

  // largest: the bits of the row's largest magnitude, a float without its sign.
  __device__ RowScale(uint32_t largest, bool has_lo) {
    constexpr uint32_t kInfinityBits = 0x7f800000;  // those of NaN are larger
    const int needed = largest > 0 ? 14 - ilogbf(__uint_as_float(largest)) : 0;
    can_split = largest < kInfinityBits && (has_lo || needed <= kMaxHiExponent);
    exponent = can_split ? needed : 0;
    factor = power_of_two(min(exponent, 126));
    second_factor = can_split ? power_of_two(exponent - min(exponent, 126)) : 0;
  }

  // scaled = v * 2^exponent, or zeros.
  __device__ void apply(const float (&v)[kVector], float (&scaled)[kVector]) const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) scaled[j] = v[j] * factor;
    if (second_factor == 1) return;
    // A selection, as NaN times 0 would be NaN.
#pragma unroll
    for (float& element : scaled) element = can_split ? element * second_factor : 0.0f;
  }
};

// One row, and this thread's part of it: the groups that begin at elements start + g * step, for
// g = 0, 1, ... All elements are needed twice, for the largest and for the split. The first
// kKeptGroups groups stay in registers in between. The others, of rows that are longer, are loaded
// twice.
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

  // Returns where the group that begins at element i is stored, as an index of hi or lo.
  __device__ int64_t place_of(const SplitMatrix& matrix, int64_t i, bool has_lo) const {
    const int k_of_tile = has_lo ? kKTileWidth / 2 : kKTileWidth;
    if (!matrix.is_k_tiled) return row * padded_k + i;
    return (i / k_of_tile * matrix.rows + row) * kKTileWidth + i % k_of_tile;
  }
};

// Updates *largest with the magnitudes in a group. All are bits of floats without sign: as unsigned
// integers these have the order of the floats, and those of NaN are the largest.
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
