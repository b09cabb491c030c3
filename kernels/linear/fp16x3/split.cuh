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
// Why a row is scaled. The largest fp16 number is 65504, and below 2^-14 fp16 numbers have fewer
// than 11 significant bits. The power of two moves the row's largest element into [2^14, 2^15), so
// elements up to 2^28 times smaller still have 11 bits. The exponent of a zero row is 0.
//
// Why lo has the factor 2^11. scaled - hi is at most 2^-11 |scaled|, so without the factor lo of
// every scaled element below 2^-3 would be subnormal. With it, lo is at most about as large as hi.
//
// docs/SPLIT.md, steps 1 and 2, has examples, which elements are exact, and the larger relative
// error of very small elements.
//
// A row that holds infinity or NaN is split as if it were zero. A later kernel computes its
// results: after the fp16x3 GEMM that of nonfinite.cuh, after the GEMM with one product a GEMM in
// TF32 (see kNeedsTf32).
//
// split_x_kernel (sm90/split_x.cuh) splits x with split_row; split_rows_kernel (sm80/launch.cu)
// splits x and the weight. The sm90 GEMMs treat the weight themselves: the fp16x3 GEMM splits it
// with split_pair, and the GEMM with one product rounds it to hi (sm90/convert_weight.cuh).

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"
#include "linear/fp16x3/wgmma_order.cuh"

namespace kernels::fp16x3 {

// ------------------------------------------------------------------------------------ the format

// The factor of lo.
constexpr float kLoScale = 2048;

// The fp16 numbers of one row in a k-tile of the k-tiled layout (see SplitMatrix): 64 hi, or 32 hi
// and 32 lo. They are 128 bytes, the widest row that TMA swizzles.
constexpr int kKTileHalves = 64;

// Returns how many elements of K a k-tile has.
__host__ __device__ constexpr int k_tile_depth(bool has_lo) {
  return has_lo ? kKTileHalves / 2 : kKTileHalves;
}

// Returns the k of a split matrix: its rows are padded with zeros to whole k-tiles of either kind.
inline __host__ __device__ int64_t padded(int64_t k) {
  return (k + kKTileHalves - 1) / kKTileHalves * kKTileHalves;
}

// The state of a row of x or of the weight in the fp16x3 GEMMs. It tells which kernel computes the
// row's results.
//
//   kExact       the GEMM (on sm90 its first run). This is the normal state: hi and lo represent
//                the row.
//   kOverflowed  the second run of the sm90 GEMM. Only rows of the weight can have this state, as
//                their exponents come from a sample (sm90/split_x.cuh): an element that the sample
//                missed may overflow fp16.
//   kNonfinite   nonfinite.cuh: the row holds infinity or NaN.
//
// split_row writes kExact or kNonfinite. Rows of the weight on sm90, which split_row does not
// split, begin as kExact. The first run sets kOverflowed where it finds a sum that is not finite.
// The second run changes that to kNonfinite where the row holds infinity or NaN.
enum RowState { kExact, kOverflowed, kNonfinite };

// A float32 matrix [rows, k], and the two fp16 halves of its elements.
//
// Layouts of hi and lo:
//
//   row-major           hi[row][i] and lo[row][i], two matrices [rows, padded(k)]
//
//   k-tiled, hi alone   [k-tile][row][64 hi]            a k-tile is 64 of K
//
//   k-tiled, hi and lo  [k-tile][row][32 hi, 32 lo]     a k-tile is 32 of K, and lo = hi + 32
//
// Why k-tiled. For a pipeline stage, a thread block loads the same k-tile of many rows. In the
// k-tiled layout these rows are consecutive in memory, so the loads use all slices of L2 for every
// K. In a row-major matrix they are K elements apart, and for some K they use only a few slices.
//
// With lo, the k-tiled layout also changes the order within each 16 elements of K: the eight pairs
// of neighbours are stored in the order 0 2 4 6 1 3 5 7. wgmma_order.cuh says why.
struct SplitMatrix {
  const float* source;  // the float32 matrix
  int64_t rows;
  int64_t row_stride;  // elements between the beginnings of two rows of `source`
  __half* hi;          // null for the weight of sm90's fp16x3 GEMM, which splits it in registers
  __half* lo;          // null where hi is null, and where hi alone is made

  // [rows]: scaled = element * 2^exponent. The epilogues undo the scaling by it, and the sm90 GEMMs
  // scale the weight by it. Where hi alone is made, it may be kNeedsTf32.
  int* exponent;
  int* state;  // [rows] of RowState; only for the fp16x3 GEMMs
  bool is_k_tiled;
};

// The exponent that marks a row of x for which hi alone is not accurate enough. Such a row holds
// infinity or NaN, or needs an exponent above kMaxHiExponent, or has many subnormals (see
// has_many_subnormals). The GEMM with one product leaves the row's tiles to a second GEMM, in TF32.
// All other exponents of rows with hi alone are at most kMaxHiExponent.
constexpr int kNeedsTf32 = 127;
constexpr int kMaxHiExponent = 126;

// A hi of a smaller magnitude is subnormal: it has fewer than the 11 bits that TF32 would keep.
constexpr float kSmallHi = 0x1p-14f;

// Returns whether a row has too many subnormals for hi alone: more than one for 32 `nonzeros`.
//
// For a row of x, both arguments are exact counts. For a row of the weight, `nonzeros` is K, and
// `subnormals` is a count that count_subnormals (sm90/convert_weight.cuh) scales up in each k-tile.
__host__ __device__ inline bool has_many_subnormals(int64_t subnormals, int64_t nonzeros) {
  return subnormals * 32 > nonzeros;
}

// Returns 2^exponent, for -126 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Returns sum * 2^-exponent, rounded once. `exponent` is the sum of two rows' exponents, so the
// power of two may not fit into a float. It is applied as two factors, and multiplying by the first
// is exact. Sums are below 2^64, so 2^-252 makes them zero, as any smaller factor would.
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

// An octet is eight neighbours in a row. A thread loads, splits and stores an octet at a time. Its
// hi or its lo is 16 bytes.
constexpr int kOctet = 8;

// Who splits a row: a warp, or a whole block of up to SplitConfig::kThreads threads. A warp splits
// short rows faster: x [65536, 256] takes 47 us, with a block for each row 86 us.
enum class Splitter { kBlock, kWarp };

struct SplitConfig {
  static constexpr int kThreads = 256;          // of a block, at most
  static constexpr int kMinThreads = 64;        // of a block, at least
  static constexpr int kWarps = kThreads / 32;  // of a block, at most
  static constexpr int kKept = 32;              // elements that a thread keeps in registers
  static constexpr int kKeptOctets = kKept / kOctet;
  static constexpr int kKeptByWarp = 32 * kKept;  // elements of the longest row that a warp keeps
};
static_assert(SplitConfig::kKept % kOctet == 0, "a thread keeps whole octets");
static_assert(32 * kOctet % kKTileHalves == 0,
              "from one octet of a thread to its next are whole k-tiles (split_and_store)");

// Returns how many threads a block has that splits rows: the fewest, from 64 to 256, that keep a
// whole row in registers, or 256 for longer rows. With a thread for each octet of a row, splitting
// takes 1.6 times as long on an H200.
inline int threads_of_row(int64_t k) {
  int threads = SplitConfig::kThreads;
  while (threads > SplitConfig::kMinThreads && threads / 2 * SplitConfig::kKept >= k) threads /= 2;
  return threads;
}

// Combines the values of a warp's lanes by op; every lane gets the result.
template <typename T, typename Op>
__device__ T reduce_warp(T value, const Op& op) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}

// Combines the values of all threads of the splitter by op; every thread gets the result. A block
// must pass __syncthreads between two calls with the same T, which share `warp_values`.
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

// Loads kCount octets of a row of k elements into v. Octet g begins at element first + g * stride.
// Elements past k are 0. All loads are issued before the first one is waited for.
template <int kCount>
__device__ void load_octets(float (&v)[kCount][kOctet], const float* row, int64_t first,
                            int64_t stride, int64_t k) {
  const bool is_aligned = has_aligned_rows(row) && k % 4 == 0;
  // Loads of four elements, which give zeros where their condition is false. No branch separates
  // them, so all are issued at once. If the row is not aligned, all conditions are false, and the
  // loop below loads single elements.
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
#pragma unroll
    for (int j = 0; j < kOctet; j += 4) {
      const int64_t i = first + g * stride + j;
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
    for (int j = 0; j < kOctet; ++j) {
      const int64_t i = first + g * stride + j;
      v[g][j] = i < k ? row[i] : 0.0f;
    }
  }
}

// Brings the pairs of two neighbouring threads, 16 elements, into K order (wgmma_order.cuh). All
// threads of a warp call it.
//
//                     even thread    odd thread
//   before            0 1 2 3        4 5 6 7
//   after the swaps   0 4 2 6        1 5 3 7      1 for 4, and 3 for 6
//   at the end        0 2 4 6        1 3 5 7      each thread exchanges its middle pairs
__device__ inline void interleave_pairs(uint32_t (&pairs)[kOctet / 2]) {
  static_assert(pair_at_place(1) == 2 && pair_at_place(2) == 4 && pair_at_place(3) == 6 &&
                    pair_at_place(4) == 1 && pair_at_place(5) == 3 && pair_at_place(6) == 5,
                "the even thread ends with the pairs 0 2 4 6, the odd one with 1 3 5 7");
  const bool is_odd_thread = threadIdx.x % 2;
#pragma unroll
  for (int j = 0; j < kOctet / 2; j += 2) {
    const uint32_t given = is_odd_thread ? pairs[j] : pairs[j + 1];
    const uint32_t taken = __shfl_xor_sync(0xffffffff, given, 1);
    if (is_odd_thread) {
      pairs[j] = taken;
    } else {
      pairs[j + 1] = taken;
    }
  }
  const uint32_t middle = pairs[1];
  pairs[1] = pairs[2];
  pairs[2] = middle;
}

// Stores an octet of hi or lo, four pairs, if it exists. All threads of a warp call it.
__device__ inline void store_octet(__half* target, uint32_t (&pairs)[kOctet / 2],
                                   bool is_interleaved, bool exists) {
  if (is_interleaved) interleave_pairs(pairs);
  if (!exists) return;
  *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Counts the elements of a row that are not zero, and those of them whose hi is subnormal.
struct SubnormalCounter {
  uint32_t nonzeros = 0;
  uint32_t subnormals = 0;

  // Adds an octet, v before the scaling. Most octets have neither zeros nor subnormals, and take
  // one comparison an element.
  __device__ void add(const float (&v)[kOctet], const float (&scaled)[kOctet]) {
    float smallest = fabsf(scaled[0]);
#pragma unroll
    for (const float element : scaled) smallest = fminf(smallest, fabsf(element));
    nonzeros += kOctet;
    if (smallest >= kSmallHi) return;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      nonzeros -= static_cast<uint32_t>(v[j] == 0.0f);
      const bool is_subnormal = v[j] != 0.0f && fabsf(scaled[j]) < kSmallHi;
      subnormals += static_cast<uint32_t>(is_subnormal);
    }
  }
};

// The power of two that a row is multiplied by. With lo, exponents reach 163, for a row whose
// largest element is 2^-149, but a float ends below 2^128. So there are two factors. The first is
// 2^exponent, but at most 2^126 (kMaxHiExponent). The second is the rest: 1 for most rows, and for
// all rows with hi alone.
struct RowScale {
  // True if all of the row is finite and, for hi alone, the exponent is at most kMaxHiExponent. Any
  // other row is split as zeros.
  bool can_split;
  int exponent;
  float factor;
  float second_factor;  // 1 if not needed; 0 where the row is split as zeros

  // `largest` has the bits of the row's largest magnitude, as a float.
  __device__ RowScale(uint32_t largest, bool has_lo) {
    constexpr uint32_t kInfinityBits = 0x7f800000;  // those of NaN are larger
    const int needed = largest > 0 ? 14 - ilogbf(__uint_as_float(largest)) : 0;
    can_split = largest < kInfinityBits && (has_lo || needed <= kMaxHiExponent);
    exponent = can_split ? needed : 0;
    factor = power_of_two(min(exponent, kMaxHiExponent));
    second_factor = can_split ? power_of_two(exponent - min(exponent, kMaxHiExponent)) : 0;
  }

  // scaled = v * 2^exponent, or zeros.
  __device__ void apply(const float (&v)[kOctet], float (&scaled)[kOctet]) const {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) scaled[j] = v[j] * factor;
    if (second_factor == 1) return;
    // Zeros by selection, as infinity or NaN times 0 would be NaN.
#pragma unroll
    for (float& element : scaled) element = can_split ? element * second_factor : 0.0f;
  }
};

// One row, and this thread's part of it: the octets that begin at elements start + g * step, for
// g = 0, 1, ... All elements are needed twice: to find the largest, and to be split. In between,
// the first kKeptOctets octets stay in registers. The further octets of long rows are loaded twice.
struct RowOfThread {
  int64_t row;
  int64_t k;
  int64_t padded_k;
  const float* source;  // the row's first element
  int64_t start;
  int64_t step;

  __device__ RowOfThread(const SplitMatrix& matrix, int64_t row, int64_t k, int thread, int threads)
      : row(row),
        k(k),
        padded_k(padded(k)),
        source(matrix.source + row * matrix.row_stride),
        start(kOctet * thread),
        step(int64_t{kOctet} * threads) {}

  // Returns where the octet that begins at element i is stored, as an index of hi or lo.
  __device__ int64_t place_of(const SplitMatrix& matrix, int64_t i, bool has_lo) const {
    const int depth = k_tile_depth(has_lo);
    if (!matrix.is_k_tiled) return row * padded_k + i;
    return (i / depth * matrix.rows + row) * kKTileHalves + i % depth;
  }
};

// Updates *largest, the bits of a magnitude, with the elements of an octet. As unsigned integers,
// the bits of magnitudes have the order of the floats, and those of NaN are the largest.
__device__ __forceinline__ void update_largest(const float (&v)[kOctet], uint32_t* largest) {
#pragma unroll
  for (const float element : v) *largest = max(*largest, __float_as_uint(fabsf(element)));
}

// Step 1 of split_row: loads the thread's octets, of which the first stay in `kept`. Returns the
// bits of the largest magnitude in the thread's part of the row.
__device__ __forceinline__ uint32_t
load_and_find_largest(const RowOfThread& part, float (&kept)[SplitConfig::kKeptOctets][kOctet]) {
  constexpr int kKeptOctets = SplitConfig::kKeptOctets;
  uint32_t largest = 0;
  load_octets(kept, part.source, part.start, part.step, part.k);
#pragma unroll
  for (int g = 0; g < kKeptOctets; ++g) update_largest(kept[g], &largest);
  for (int64_t i = part.start + kKeptOctets * part.step; i < part.k; i += part.step) {
    float v[1][kOctet];
    load_octets(v, part.source, i, part.step, part.k);
    update_largest(v[0], &largest);
  }
  return largest;
}

// Step 3 of split_row: scales, splits and stores the thread's octets. Counts subnormals if there is
// no lo; what split_pair computes for lo is then not used.
__device__ __forceinline__ SubnormalCounter
split_and_store(const SplitMatrix& matrix, const RowOfThread& part, const RowScale& scale,
                bool has_lo, const float (&kept)[SplitConfig::kKeptOctets][kOctet]) {
  SubnormalCounter counter;
  constexpr int kKeptOctets = SplitConfig::kKeptOctets;
  // From one octet to the next are whole k-tiles, so their places are equally far apart.
  const int64_t place = part.place_of(matrix, part.start, has_lo);
  const int64_t place_step = part.place_of(matrix, part.start + part.step, has_lo) - place;
  const auto split_octet = [&](int64_t g, const float (&v)[kOctet]) {
    float scaled[kOctet];
    scale.apply(v, scaled);
    if (!has_lo) counter.add(v, scaled);
    uint32_t hi[kOctet / 2];
    uint32_t lo[kOctet / 2];
#pragma unroll
    for (int j = 0; j < kOctet / 2; ++j) {
      split_pair(scaled[2 * j], scaled[2 * j + 1], &hi[j], &lo[j]);
    }
    const bool is_interleaved = has_lo && matrix.is_k_tiled;
    const bool exists = part.start + g * part.step < part.padded_k;
    store_octet(matrix.hi + place + g * place_step, hi, is_interleaved, exists);
    if (has_lo) store_octet(matrix.lo + place + g * place_step, lo, is_interleaved, exists);
  };
  // The conditions of both loops are the same for all threads, as all must call store_octet.
#pragma unroll
  for (int g = 0; g < kKeptOctets; ++g) {
    if (g * part.step < part.padded_k) split_octet(g, kept[g]);
  }
  for (int64_t g = kKeptOctets; g * part.step < part.padded_k; ++g) {
    float v[1][kOctet];
    load_octets(v, part.source, part.start + g * part.step, part.step, part.k);
    split_octet(g, v[0]);
  }
  return counter;
}

// Splits one row into hi and, if has_lo, lo. Writes the row's exponent and, if has_lo, its state.
// All threads of the splitter call it. A block must pass __syncthreads between two rows.
__device__ inline void split_row(const SplitMatrix& matrix, int64_t row, int64_t k,
                                 Splitter splitter, bool has_lo) {
  const bool is_warp = splitter == Splitter::kWarp;
  const int threads = is_warp ? 32 : blockDim.x;
  const int thread = is_warp ? threadIdx.x % 32 : threadIdx.x;
  const RowOfThread part(matrix, row, k, thread, threads);

  // 1. Find the largest magnitude.
  float kept[SplitConfig::kKeptOctets][kOctet];
  uint32_t largest = load_and_find_largest(part, kept);
  largest = reduce(largest, splitter, [](uint32_t a, uint32_t b) { return max(a, b); });

  // 2. Choose the power of two.
  const RowScale scale(largest, has_lo);

  // 3. Scale, split and store.
  const SubnormalCounter counter = split_and_store(matrix, part, scale, has_lo, kept);

  // 4. Decide whether hi, or hi and lo, represent the row, and store the answer.
  bool is_represented = scale.can_split;
  if (!has_lo) {
    // Sum both counts of all threads at once, in the halves of a 64-bit number.
    const uint64_t both = static_cast<uint64_t>(counter.nonzeros) << 32 | counter.subnormals;
    const uint64_t sums = reduce(both, splitter, [](uint64_t a, uint64_t b) { return a + b; });
    is_represented &= !has_many_subnormals(static_cast<uint32_t>(sums), sums >> 32);
  }
  if (thread != 0) return;
  matrix.exponent[row] = has_lo || is_represented ? scale.exponent : kNeedsTf32;
  if (has_lo) matrix.state[row] = is_represented ? kExact : kNonfinite;
}

}  // namespace kernels::fp16x3
