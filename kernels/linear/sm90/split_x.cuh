// The kernel that runs before both float32 GEMMs on Hopper. It prepares both operands:
//
//   x [m, k]        is split into fp16 (fp16x3/split.cuh): hi and lo for the fp16x3 GEMM, hi alone
//                   for the GEMM with one product
//   weight [n, k]   gets an exponent for each row, from a sample of the row's elements; the GEMMs
//                   scale and split or round the weight themselves, as they multiply it
//
// Why x and the weight are treated differently. Every tile of the result along N needs the same
// split x, so x is split once, before. The weight is often much larger than x. A kernel that splits
// it would move it through memory twice more, which takes 0.12 ms for [8192, 8192] on an H200. So
// only the GEMM reads the weight. It must know the exponents before, so they come from a sample of
// 128 elements of each row. Where the sample misses a much larger element, results become infinite.
// The GEMMs find them and compute them again: the fp16x3 GEMM in its second run, the GEMM with one
// product by another GEMM, in TF32.
//
// Why one launch does both. The two jobs do not depend on each other, and the GEMM needs both. The
// sample reads few bytes and mostly waits for memory, so its blocks run beside those that split x,
// and a second launch is saved.
//
// split_x_kernel is launched by launch_split_x (launch.cu). largest_of_row is also called by the
// second run of the fp16x3 GEMM (gemm_fp16x3.cuh).

#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "linear/fp16x3/split.cuh"

namespace kernels::sm90 {

// k of float32 operands is below this. 32 times the number of a row's subnormal elements, which is
// at most k, then fits into an int (fp16x3::has_many_subnormals).
constexpr int64_t kMaxK = 1 << 24;

// Limits of the exponents of the weight's rows. At the minimum, fp16's upper limit of 2^16 belongs
// to the element 2^16 * 2^111 = 2^127, the largest power of two that is a float. The maximum, for
// hi and lo, is the largest exponent whose power of two is a float; for hi alone it is
// kMaxHiExponent.
constexpr int kMinExponent = -111;
constexpr int kMaxPairExponent = 127;

struct SampleConfig {
  // A sample of a row is eight spans of 16 elements, evenly spread along K. Four lanes read a span,
  // four elements each. A row whose sample is all zeros is read whole.
  static constexpr int kSpans = 8;
  static constexpr int kLanesOfSpan = 32 / kSpans;
  static constexpr int kOfLane = 4;  // elements: one 16-byte access
  static constexpr int kRows = 4;    // rows of the weight that a warp samples

  // For hi and lo, the sample's largest element is scaled into [2^9, 2^10). Elements 2^23 times
  // smaller still keep 22 bits, and elements that the sample missed may be 64 times as large before
  // they overflow fp16, which ends at 2^16.
  static constexpr int kPairTarget = 9;

  // For hi alone, the geometric mean of the spans' largest elements is scaled into [2^2, 2^3).
  // Elements may be 2^13 times as large before they overflow fp16, which a single one of a row must
  // not, and 2^16 times smaller before they are subnormal, which a few of a row may be.
  static constexpr int kHiTarget = 2;
};
static_assert(SampleConfig::kRows == SampleConfig::kOfLane,
              "a lane reads 4 x 4 elements, by vectors along K or, transposed, along the rows");

// Returns the largest magnitude in a row of k elements, which are `stride` elements apart; infinity
// if the row holds infinity or NaN. One warp calls it. It is rarely needed, and inlined, it would
// make the kernel so large that fetching its code takes 6 us.
__device__ __noinline__ float largest_of_row(const float* row, int64_t k, int64_t stride) {
  uint32_t largest = 0;  // the bits of floats without sign have the order of the floats
  const auto compare = [&](float v) { largest = max(largest, __float_as_uint(fabsf(v))); };
  const int64_t lane = threadIdx.x % 32;
  const int64_t in_vectors = stride == 1 ? k / 4 * 4 : 0;  // elements
#pragma unroll 8
  for (int64_t i = lane * 4; i < in_vectors; i += 32 * 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    compare(v.x);
    compare(v.y);
    compare(v.z);
    compare(v.w);
  }
#pragma unroll 8
  for (int64_t i = in_vectors + lane; i < k; i += 32) compare(row[i * stride]);
  largest = fp16x3::reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  constexpr uint32_t kInfinityBits = 0x7f800000;  // bits of NaN are larger
  return __uint_as_float(min(largest, kInfinityBits));
}

// Reads the lane's part of the sample: the same four elements along K of each of the warp's rows,
// of which the first is first_row. largest_of_lane[i], zero before, becomes the largest magnitude
// of those of row first_row + i. Elements outside of the weight are left out.
//
//   lane        0 .. 3             4 .. 7             ...   28 .. 31
//   elements    0 .. 15            k/8 .. k/8 + 15    ...   7k/8 .. 7k/8 + 15
//
// where the beginnings of the spans are rounded down to multiples of four.
__device__ inline void load_sample(const fp16x3::SplitMatrix& weight, bool is_transposed,
                                   int64_t first_row, int64_t k,
                                   float (&largest_of_lane)[SampleConfig::kRows]) {
  using Config = SampleConfig;
  const int lane = threadIdx.x % 32;
  const int64_t span = lane / Config::kLanesOfSpan;
  const int64_t begin_of_span = span * k / Config::kSpans / 4 * 4;
  const int64_t first_k = begin_of_span + lane % Config::kLanesOfSpan * 4;
  if (first_k + Config::kOfLane > k) return;

  // In memory the elements are four lines of four neighbours. A line is a row of the weight, or a
  // row of its transpose: four rows of the weight at one place in K.
  int64_t first_line = first_row;
  int64_t column = first_k;
  int64_t lines = weight.rows;
  int64_t columns = k;
  if (is_transposed) {
    first_line = first_k;
    column = first_row;
    lines = k;
    columns = weight.rows;
  }
  float v[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first_line + i >= lines) break;
    load_floats(v[i], weight.from + (first_line + i) * weight.row_stride, column, columns,
                /*is_aligned=*/true);
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float element = is_transposed ? v[i][row] : v[row][i];
      largest_of_lane[row] = fmaxf(largest_of_lane[row], fabsf(element));
    }
  }
}

// The kRows rows of the weight from first_row on, whose exponents one warp makes, and the lane's
// part of their sample. The weight [n, k] may be stored as its transpose [k, n].
struct SampledRows {
  const fp16x3::SplitMatrix& weight;
  bool is_transposed;
  int64_t first_row;
  int64_t k;
  float largest_of_lane[SampleConfig::kRows] = {};

  __device__ SampledRows(const fp16x3::SplitMatrix& weight, bool is_transposed, int64_t first_row,
                         int64_t k)
      : weight(weight), is_transposed(is_transposed), first_row(first_row), k(k) {
    load_sample(weight, is_transposed, first_row, k, largest_of_lane);
  }

  // Returns the largest magnitude in row first_row + i, all of which is read.
  __device__ float largest_of_whole_row(int i) const {
    const int64_t row = first_row + i;
    const int64_t stride = weight.row_stride;
    return largest_of_row(weight.from + (is_transposed ? row : row * stride), k,
                          is_transposed ? stride : 1);
  }
};

// Returns the exponent of row first_row + i where the weight is split into hi and lo.
__device__ inline int exponent_of_pairs(const SampledRows& rows, int i) {
  float largest = fp16x3::reduce_warp(rows.largest_of_lane[i], fmaxf);
  if (largest == 0) largest = rows.largest_of_whole_row(i);
  const bool has_exponent = largest > 0 && largest < INFINITY;
  const int needed = has_exponent ? SampleConfig::kPairTarget - ilogbf(largest) : 0;
  return max(kMinExponent, min(kMaxPairExponent, needed));
}

// Returns the exponent of row first_row + i where the weight is rounded to hi alone. It follows
// from the mean of the exponents of the spans' largest elements. Spans of zeros do not count.
__device__ inline int exponent_of_hi(const SampledRows& rows, int i) {
  // A float's exponent, with its bias of 127, in the high 16 bits, and a count of 1 in the low 16;
  // or 0 for a zero. One sum of such numbers adds up both.
  const auto exponent_and_count = [](float largest) {
    return largest > 0 ? __float_as_uint(largest) >> 23 << 16 | 1 : 0;
  };
  // The largest of the lane's span, in all lanes of the span.
  float largest = rows.largest_of_lane[i];
  for (int bit = 1; bit < SampleConfig::kLanesOfSpan; bit *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
  }
  // The sums over the spans.
  uint32_t sums = exponent_and_count(largest);
  for (int bit = SampleConfig::kLanesOfSpan; bit < 32; bit *= 2) {
    sums += __shfl_xor_sync(0xffffffff, sums, bit);
  }
  if (sums == 0) sums = exponent_and_count(rows.largest_of_whole_row(i));
  const int mean = sums != 0 ? static_cast<int>((sums >> 16) / (sums & 0xffff)) - 127 : 0;
  return min(fp16x3::kMaxHiExponent, SampleConfig::kHiTarget - mean);
}

// Writes the exponents and, where there is lo, the states of the kRows rows of the weight from
// first_row on. One warp calls it.
__device__ __forceinline__ void sample_weight(const fp16x3::SplitMatrix& weight, bool is_transposed,
                                              int64_t first_row, int64_t k, bool has_lo) {
  const SampledRows rows(weight, is_transposed, first_row, k);
#pragma unroll
  for (int i = 0; i < SampleConfig::kRows; ++i) {
    const int64_t row = first_row + i;
    if (row >= weight.rows) break;
    const int exponent = has_lo ? exponent_of_pairs(rows, i) : exponent_of_hi(rows, i);
    if (threadIdx.x % 32 != 0) continue;
    weight.exponent[row] = exponent;
    if (has_lo) weight.state[row] = fp16x3::kExact;
  }
}

// Splits x and samples the weight.
//
//   blocks 0 .. sampling_blocks - 1    sample the weight: a warp for each kRows rows
//   the blocks after them              split x: a warp or a block for each row
//   all blocks                         first clear the GEMM's counters, zeros[0 .. zeros_size - 1]
__global__ void __launch_bounds__(fp16x3::SplitConfig::kThreads)
    split_x_kernel(const __grid_constant__ fp16x3::SplitMatrix x,
                   const __grid_constant__ fp16x3::SplitMatrix weight, bool weight_is_transposed,
                   int64_t k, int sampling_blocks, fp16x3::Splitter splitter, unsigned* zeros,
                   int64_t zeros_size) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  start_next_kernel();
  wait_for_previous_kernel();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    zeros[i] = 0;
  }
  const bool has_lo = x.lo != nullptr;
  const int x_block = static_cast<int>(blockIdx.x) - sampling_blocks;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (x_block >= 0) {  // this block splits x
    const bool is_warp = splitter == fp16x3::Splitter::kWarp;
    const int64_t row = is_warp ? warp - sampling_blocks * (blockDim.x / 32) : x_block;
    if (row < x.rows) fp16x3::split_row(x, row, k, splitter, has_lo);
    return;
  }
  sample_weight(weight, weight_is_transposed, warp * SampleConfig::kRows, k, has_lo);
#endif
}

}  // namespace kernels::sm90
