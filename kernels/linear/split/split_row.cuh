// split_row: a warp, or a block, splits one row of a float32 matrix into hi and lo (split.cuh).
//
// The steps of split_row:
//
//   1. load_and_find_largest   the row's largest magnitude; the first octets stay in registers
//   2. RowScale                the power of two
//   3. split_and_store         hi and lo, in the layout of the ScaledMatrix
//   4. the end of split_row    the row's exponent and state

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/reduce_warp.cuh"
#include "linear/split/k_order.cuh"
#include "linear/split/split.cuh"
#include "linear/split/subnormals.cuh"

namespace kernels::split {

// -------------------------------------------------------------------------------- who splits a row

// A warp, or a whole block of up to SplitConfig::kThreads threads, splits a row. A warp splits
// short rows faster (docs/EXPERIMENTS.md, "Hopper's products").
enum class Splitter { kBlock, kWarp };

struct SplitConfig {
  // Threads of the largest and of the smallest block, and warps of the largest.
  static constexpr int kThreads = 256;
  static constexpr int kMinThreads = 64;
  static constexpr int kWarps = kThreads / 32;
  // The elements of a row that a thread, or a whole warp, keeps in registers.
  static constexpr int kKept = 32;
  static constexpr int kKeptOctets = kKept / kOctet;
  static constexpr int kKeptByWarp = 32 * kKept;
};
static_assert(SplitConfig::kKept % kOctet == 0, "a thread keeps whole octets");
static_assert(32 * kOctet % kKTileRowNumbers == 0,
              "a thread's octets are whole k-tiles apart, as OctetPlaces assumes");

// Returns how many threads a block needs to split a row: the fewest, from 64 to 256, that keep the
// whole row in registers, or 256 for longer rows. More threads would be slower.
inline int threads_of_row(int64_t k) {
  int threads = SplitConfig::kThreads;
  while (threads > SplitConfig::kMinThreads && threads / 2 * SplitConfig::kKept >= k) threads /= 2;
  return threads;
}

// Combines the values of all threads of the splitter by op; every thread gets the result. Calls
// with the same T and Op share `warp_values`, so the caller must pass __syncthreads between them if
// the splitter is a block.
template <typename T, typename Op>
__device__ T reduce(T value, Splitter splitter, const Op& op) {
  __shared__ T warp_values[SplitConfig::kWarps];
  value = reduce_warp(value, op);
  if (splitter == Splitter::kWarp) return value;
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  value = warp_values[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) value = op(value, warp_values[warp]);
  return value;
}

// -------------------------------------------------------------------------------- loads and stores

// Loads kCount octets of a row of k elements into v. Octet g begins at first_element + g * stride.
// Elements past k are 0. All loads are issued before the first one is waited for.
template <int kCount>
__device__ void load_octets(float (&v)[kCount][kOctet], const float* row, int64_t first_element,
                            int64_t stride, int64_t k) {
  const bool is_aligned = has_aligned_rows(row) && k % 4 == 0;  // of this row alone
  // An aligned row: four elements at a time, or zeros past k. The conditions are predicates of the
  // loads, not branches between them, so all loads are issued at once.
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
#pragma unroll
    for (int j = 0; j < kOctet; j += 4) {
      const int64_t i = first_element + g * stride + j;
      const float4 four = ptx::load_global_float4_if(is_aligned && i < k, row + i);
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
    for (int j = 0; j < kOctet; ++j) {
      const int64_t i = first_element + g * stride + j;
      v[g][j] = i < k ? row[i] : 0.0f;
    }
  }
}

__device__ __forceinline__ void split_octet(const float (&scaled)[kOctet],
                                            uint32_t (&hi)[kOctet / 2],
                                            uint32_t (&lo)[kOctet / 2]) {
#pragma unroll
  for (int j = 0; j < kOctet / 2; ++j) {
    split_pair(scaled[2 * j], scaled[2 * j + 1], &hi[j], &lo[j]);
  }
}

// Stores an octet of hi or lo if it exists. All threads of a warp call it.
__device__ inline void store_octet(__half* target, uint32_t (&pairs)[kOctet / 2],
                                   bool is_interleaved, bool exists) {
  if (is_interleaved) interleave_pairs(pairs);
  if (!exists) return;
  *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// ---------------------------------------------------------------------- the objects of the steps

// The power of two that a row is multiplied by. With lo, exponents reach 163, for a row whose
// largest element is 2^-149, but a float ends below 2^128. So there are two factors: the first
// takes up to 2^126, and the second the rest.
struct RowScale {
  // The largest exponent of `factor`. With hi alone no exponent is larger.
  static constexpr int kMaxFactorExponent = kMaxExponentWithoutLo;

  // False if the row holds infinity or NaN or, with hi alone, needs too large an exponent. Such a
  // row is split as zeros.
  bool can_split;
  int exponent;
  float factor;
  float second_factor;  // 1 for most rows; not 1 if the row is split as zeros

  // `largest_bits` are the bits of the row's largest magnitude, as a float.
  __device__ RowScale(uint32_t largest_bits, Form form) {
    constexpr uint32_t kInfinityBits = 0x7f800000;  // bits of NaN are larger
    const bool is_zero_row = largest_bits == 0;
    const float largest = __uint_as_float(largest_bits);
    const int needed = is_zero_row ? 0 : kTopExponent - ilogbf(largest);
    const bool fits = form == Form::kWithLo || needed <= kMaxExponentWithoutLo;
    can_split = largest_bits < kInfinityBits && fits;
    exponent = can_split ? needed : 0;
    const int factor_exponent = min(exponent, kMaxFactorExponent);
    factor = power_of_two(factor_exponent);
    second_factor = can_split ? power_of_two(exponent - factor_exponent) : 0;
  }

  // scaled = v * 2^exponent, or zeros.
  __device__ void apply(const float (&v)[kOctet], float (&scaled)[kOctet]) const {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) scaled[j] = v[j] * factor;
    if (second_factor == 1) return;
    // A row with infinity or NaN gets zeros by a selection. A product with 0 would be NaN.
#pragma unroll
    for (float& element : scaled) element = can_split ? element * second_factor : 0.0f;
  }
};

// One row, and this thread's octets of it: octet g begins at element start + g * step. All elements
// are needed twice: to find the largest, and to be split. The first kKeptOctets octets stay in
// registers in between, and the further octets of long rows are loaded twice.
struct RowOfThread {
  const ScaledMatrix& matrix;
  Form form;
  int64_t index;  // the row's number in the matrix
  int64_t k;
  int64_t padded_k;
  const float* source;  // the row's first element
  int64_t start;
  int64_t step;

  __device__ RowOfThread(const ScaledMatrix& matrix, Form form, int64_t index, int64_t k,
                         int thread, int threads)
      : matrix(matrix),
        form(form),
        index(index),
        k(k),
        padded_k(padded(k)),
        source(matrix.source_row(index)),
        start(kOctet * thread),
        step(int64_t{kOctet} * threads) {}

  __device__ int64_t element_of(int64_t g) const { return start + g * step; }

  // Returns the index in hi or lo of the octet that begins at element i.
  __device__ int64_t place_of(int64_t i) const {
    const int depth = k_tile_depth(form);
    if (!matrix.is_k_tiled) return index * padded_k + i;
    return matrix.k_tiled_index(/*k_tile=*/i / depth, index) + i % depth;
  }
};

// Where the octets of a thread are stored: equally far apart, as they are whole k-tiles apart.
struct OctetPlaces {
  int64_t first;
  int64_t step;

  __device__ explicit OctetPlaces(const RowOfThread& row)
      : first(row.place_of(row.element_of(0))), step(row.place_of(row.element_of(1)) - first) {}

  __device__ int64_t of_octet(int64_t g) const { return first + g * step; }
};

// ------------------------------------------------------------------------------------------- steps

// Updates the bits of the largest magnitude with the elements of an octet. As unsigned integers,
// the bits of magnitudes have the order of the floats, and the bits of NaN are the largest.
__device__ __forceinline__ void update_largest(const float (&v)[kOctet], uint32_t* largest_bits) {
#pragma unroll
  for (const float element : v) *largest_bits = max(*largest_bits, __float_as_uint(fabsf(element)));
}

// Step 1 of split_row: loads the thread's octets, of which the first stay in `kept`. Returns the
// bits of the largest magnitude among these octets.
__device__ __forceinline__ uint32_t
load_and_find_largest(const RowOfThread& row, float (&kept)[SplitConfig::kKeptOctets][kOctet]) {
  constexpr int kKeptOctets = SplitConfig::kKeptOctets;
  uint32_t largest_bits = 0;
  load_octets(kept, row.source, row.start, row.step, row.k);
#pragma unroll
  for (int g = 0; g < kKeptOctets; ++g) update_largest(kept[g], &largest_bits);
  for (int64_t i = row.element_of(kKeptOctets); i < row.k; i += row.step) {
    float v[1][kOctet];
    load_octets(v, row.source, i, row.step, row.k);
    update_largest(v[0], &largest_bits);
  }
  return largest_bits;
}

// Step 3 of split_row: scales, splits and stores the thread's octets. With hi alone, also counts
// nonzeros and subnormals (subnormals.cuh).
__device__ __forceinline__ SubnormalCounter
split_and_store(const RowOfThread& row, const RowScale& scale,
                const float (&kept)[SplitConfig::kKeptOctets][kOctet]) {
  SubnormalCounter counter;
  constexpr int kKeptOctets = SplitConfig::kKeptOctets;
  const ScaledMatrix& matrix = row.matrix;
  const bool has_lo = row.form == Form::kWithLo;
  const OctetPlaces places(row);
  const auto split_and_store_octet = [&](int64_t g, const float (&v)[kOctet]) {
    float scaled[kOctet];
    scale.apply(v, scaled);
    if (!has_lo) counter.add(v, scaled);
    uint32_t hi[kOctet / 2];
    uint32_t lo[kOctet / 2];
    split_octet(scaled, hi, lo);
    const bool is_interleaved = has_lo && matrix.is_k_tiled;
    const bool exists = row.element_of(g) < row.padded_k;
    const int64_t place = places.of_octet(g);
    store_octet(matrix.hi + place, hi, is_interleaved, exists);
    if (has_lo) store_octet(matrix.lo + place, lo, is_interleaved, exists);
  };
  // The conditions of both loops are the same for all threads, as all must call store_octet.
#pragma unroll
  for (int g = 0; g < kKeptOctets; ++g) {
    if (g * row.step < row.padded_k) split_and_store_octet(g, kept[g]);
  }
  for (int64_t g = kKeptOctets; g * row.step < row.padded_k; ++g) {
    float v[1][kOctet];
    load_octets(v, row.source, row.element_of(g), row.step, row.k);
    split_and_store_octet(g, v[0]);
  }
  return counter;
}

// Splits the row of this index, which has k elements. All threads of the splitter call it. A block
// must pass __syncthreads between two rows.
__device__ inline void split_row(const ScaledMatrix& matrix, Form form, int64_t index, int64_t k,
                                 Splitter splitter) {
  const bool is_warp = splitter == Splitter::kWarp;
  const int threads = is_warp ? 32 : blockDim.x;
  const int thread = is_warp ? threadIdx.x % 32 : threadIdx.x;
  const RowOfThread row(matrix, form, index, k, thread, threads);

  float kept[SplitConfig::kKeptOctets][kOctet];
  uint32_t largest_bits = load_and_find_largest(row, kept);
  largest_bits = reduce(largest_bits, splitter, [](uint32_t a, uint32_t b) { return max(a, b); });

  const RowScale scale(largest_bits, form);

  const SubnormalCounter counter = split_and_store(row, scale, kept);

  // Step 4: decide whether the split represents the row, and store the answer: with lo as the row's
  // state, with hi alone by the exponent kNeedsTf32.
  const bool has_lo = form == Form::kWithLo;
  bool is_represented = scale.can_split;
  if (!has_lo) {
    const uint64_t counts =
        reduce(counter.packed(), splitter, [](uint64_t a, uint64_t b) { return a + b; });
    if (has_many_subnormals(counts)) is_represented = false;
  }
  if (thread != 0) return;
  const bool needs_tf32 = !has_lo && !is_represented;
  matrix.exponent[index] = needs_tf32 ? kNeedsTf32 : scale.exponent;
  if (has_lo) matrix.row_state[index] = is_represented ? kExact : kNonfinite;
}

}  // namespace kernels::split
