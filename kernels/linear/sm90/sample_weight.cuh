// The exponents of the rows of a float32 weight, from a sample of each row's elements, for a GEMM
// that scales the weight by them. docs/DESIGN.md ("The sample of the weight") has the reasons.

#pragma once

#include <cstdint>

#include "common/reduce_warp.cuh"
#include "common/vectors.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90 {

struct SampleConfig {
  // A sample of a row is eight spans of 16 elements, evenly spread along K. A row whose sample is
  // all zeros is read whole.
  static constexpr int kSpans = 8;
  static constexpr int kLanesOfSpan = 32 / kSpans;
  static constexpr int kLaneElements = 4;
  static constexpr int kRows = 4;  // rows of the weight that a warp samples

  // For hi and lo, the sample's largest element is scaled into [2^9, 2^10), within the limits below
  // (docs/SPLIT.md, step 1, has the reasons).
  static constexpr int kTargetWithLo = 9;
  static constexpr int kMinExponentWithLo = -111;
  static constexpr int kMaxExponentWithLo = 127;

  // For hi alone, the row's scale moves the mean of the exponents of the spans' largest elements,
  // rounded down, to kTargetWithoutLo (docs/SPLIT.md, "One product"). The largest exponent is
  // split::kMaxExponentWithoutLo.
  static constexpr int kTargetWithoutLo = 2;
};
static_assert(SampleConfig::kRows == SampleConfig::kLaneElements,
              "a lane reads 4 x 4 elements: 4 vectors along K or, if transposed, along N");

// Returns the largest magnitude in a row of k elements, which are `stride` elements apart; infinity
// if the row holds infinity or NaN. A row with stride 1 is aligned to 16 bytes. All lanes of a warp
// call it. Inlined it would make the kernel so large that fetching its code takes longer
// (docs/EXPERIMENTS.md, "Hopper's products").
__device__ __noinline__ float largest_of_row(const float* row, int64_t k, int64_t stride) {
  uint32_t largest = 0;  // the bits of a magnitude, which have the order of the floats
  const auto compare = [&](float v) { largest = max(largest, __float_as_uint(fabsf(v))); };
  const int64_t lane = threadIdx.x % 32;
  const int64_t vector_elements = stride == 1 ? k / 4 * 4 : 0;  // read four at a time
#pragma unroll 8
  for (int64_t i = lane * 4; i < vector_elements; i += 32 * 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    compare(v.x);
    compare(v.y);
    compare(v.z);
    compare(v.w);
  }
#pragma unroll 8
  for (int64_t i = vector_elements + lane; i < k; i += 32) compare(row[i * stride]);
  largest = reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  constexpr uint32_t kInfinityBits = 0x7f800000;  // bits of NaN are larger
  return __uint_as_float(min(largest, kInfinityBits));
}

// Returns where the lane's four elements of a sampled row begin, in a row of k elements. If k is
// small, they may end past k.
//
//   lane        0 .. 3             4 .. 7             ...   28 .. 31
//   elements    0 .. 15            k/8 .. k/8 + 15    ...   7k/8 .. 7k/8 + 15
//
// The beginnings of the spans are rounded down to multiples of four.
__device__ inline int64_t first_k_of_lane(int64_t k) {
  const int lane = threadIdx.x % 32;
  const int64_t span = lane / SampleConfig::kLanesOfSpan;
  const int64_t begin_of_span = span * k / SampleConfig::kSpans / 4 * 4;
  return begin_of_span + lane % SampleConfig::kLanesOfSpan * SampleConfig::kLaneElements;
}

// The kRows rows of the weight from first_n on, whose exponents one warp makes, and what the lane
// has found in its sample of them. The weight [n, k] may be stored as its transpose [k, n].
struct SampledRows {
  const split::Float32Matrix& weight;
  bool is_transposed;
  int64_t first_n;
  int64_t k;
  float largest_of_lane[SampleConfig::kRows] = {};  // the largest magnitude in each row

  // Loads the lane's four elements along K of each row. Leaves out rows past the last one, and the
  // four elements if one of them is past K.
  __device__ SampledRows(const split::Float32Matrix& weight, bool is_transposed, int64_t first_n,
                         int64_t k)
      : weight(weight), is_transposed(is_transposed), first_n(first_n), k(k) {
    const int64_t first_k = first_k_of_lane(k);
    if (first_k + SampleConfig::kLaneElements > k) return;
    // A line is a row of the stored matrix. Four neighbours of each of four lines are loaded.
    const int64_t first_line = is_transposed ? first_k : first_n;
    const int64_t first_neighbour = is_transposed ? first_n : first_k;
    const int64_t lines = is_transposed ? k : weight.rows;
    const int64_t line_size = is_transposed ? weight.rows : k;
    float v[SampleConfig::kRows][SampleConfig::kLaneElements] = {};  // [line][neighbour]
#pragma unroll
    for (int i = 0; i < SampleConfig::kRows; ++i) {
      if (first_line + i >= lines) break;
      const float* const line = weight.source_row(first_line + i);
      load_floats(v[i], line, first_neighbour, line_size, /*is_aligned=*/true);
    }
#pragma unroll
    for (int row = 0; row < SampleConfig::kRows; ++row) {
#pragma unroll
      for (int i = 0; i < SampleConfig::kLaneElements; ++i) {
        const float element = is_transposed ? v[i][row] : v[row][i];
        largest_of_lane[row] = fmaxf(largest_of_lane[row], fabsf(element));
      }
    }
  }

  // Returns the largest magnitude in row first_n + i, all of which is read.
  __device__ float largest_of_whole_row(int i) const {
    const int64_t n = first_n + i;
    const int64_t stride = weight.row_stride;
    return largest_of_row(weight.source + (is_transposed ? n : n * stride), k,
                          is_transposed ? stride : 1);
  }
};

// Returns the exponent of row first_n + i if the GEMM splits the weight into hi and lo.
__device__ inline int exponent_for_hi_lo(const SampledRows& rows, int i) {
  float largest = reduce_warp(rows.largest_of_lane[i], fmaxf);
  if (largest == 0) largest = rows.largest_of_whole_row(i);
  const bool has_exponent = largest > 0 && largest < INFINITY;
  const int exponent = has_exponent ? SampleConfig::kTargetWithLo - ilogbf(largest) : 0;
  return max(SampleConfig::kMinExponentWithLo, min(SampleConfig::kMaxExponentWithLo, exponent));
}

// The sum of some floats' biased exponents, and the count of the floats, in one word that can be
// added: exponents * 2^16 + count. A subnormal has the biased exponent 0, which counts as -127.
// Zeros do not count.
struct ExponentSum {
  static constexpr int kBias = 127;
  static constexpr int kMantissaBits = 23;

  uint32_t word;

  __device__ static ExponentSum of(float magnitude) {
    const uint32_t biased_exponent = __float_as_uint(magnitude) >> kMantissaBits;
    return {magnitude > 0 ? biased_exponent << 16 | 1 : 0};
  }

  __host__ __device__ constexpr bool is_empty() const { return word == 0; }

  __host__ __device__ constexpr int mean() const {
    const uint32_t exponents = word >> 16;
    const uint32_t count = word & 0xffff;
    return static_cast<int>(exponents / count) - kBias;
  }
};
static_assert(ExponentSum{(127 - 4 + 127 - 1) << 16 | 2}.mean() == -3,
              "the mean of the exponents -4 and -1 is -2.5, rounded down");

// Returns the largest magnitude in the lane's span.
__device__ inline float largest_of_span(float largest_of_lane) {
  float largest = largest_of_lane;
  for (int bit = 1; bit < SampleConfig::kLanesOfSpan; bit *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
  }
  return largest;
}

// Adds up the words of the eight spans. All lanes of a span have the same word.
__device__ inline uint32_t add_spans(uint32_t word) {
  for (int bit = SampleConfig::kLanesOfSpan; bit < 32; bit *= 2) {
    word += __shfl_xor_sync(0xffffffff, word, bit);
  }
  return word;
}

// Returns the exponent of row first_n + i if the GEMM rounds the weight to hi alone.
__device__ inline int exponent_for_hi_alone(const SampledRows& rows, int i) {
  const float largest = largest_of_span(rows.largest_of_lane[i]);
  ExponentSum sum{add_spans(ExponentSum::of(largest).word)};
  if (sum.is_empty()) sum = ExponentSum::of(rows.largest_of_whole_row(i));
  const int mean = sum.is_empty() ? 0 : sum.mean();
  return min(split::kMaxExponentWithoutLo, SampleConfig::kTargetWithoutLo - mean);
}

// Writes the exponents and, for hi and lo, the states of the kRows rows of the weight from
// first_n on. All lanes of a warp call it.
__device__ __forceinline__ void sample_weight(const split::ScaledMatrix& weight, split::Form form,
                                              bool is_transposed, int64_t first_n, int64_t k) {
  const bool has_lo = form == split::Form::kWithLo;
  const SampledRows rows(weight, is_transposed, first_n, k);
#pragma unroll
  for (int i = 0; i < SampleConfig::kRows; ++i) {
    const int64_t n = first_n + i;
    if (n >= weight.rows) break;
    const int exponent = has_lo ? exponent_for_hi_lo(rows, i) : exponent_for_hi_alone(rows, i);
    if (threadIdx.x % 32 != 0) continue;
    weight.exponent[n] = exponent;
    if (has_lo) weight.row_state[n] = split::kExact;
  }
}

}  // namespace kernels::sm90
