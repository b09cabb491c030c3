// The split of a float32 matrix [rows, k] into scaled fp16 numbers for the tensor cores: its
// arithmetic, and its format in memory.
//
//   scaled = element * 2^exponent           exact, but for float32's subnormals and overflows
//   hi     = fp16(scaled)                   rounded to nearest
//   lo     = fp16((scaled - hi) * 2^11)     rounded to nearest
//
// All elements of a row have the same exponent. The fp16x3 GEMM (float32 at `highest`) multiplies
// hi and lo of both operands. The GEMM with one product (float32 at `high`) multiplies hi alone; lo
// is then not made. docs/SPLIT.md, steps 1 and 2, has examples, and says which elements are exact.
//
// A row is scaled because fp16 ends at 65504, and has fewer than 11 significant bits below 2^-14.
// The power of two moves the row's largest element into [2^14, 2^15) (kTopExponent), so that
// elements up to 2^28 times smaller still have 11 bits.
//
// lo has the factor 2^11 because scaled - hi is at most 2^-11 |scaled| if hi is a normal fp16
// number. Without the factor, the lo of every scaled element below 2^-3 would be subnormal.
//
// split_row (split_row.cuh) splits the rows of x and, for the GEMM of sm80/, of the weight. The
// GEMMs of sm90/ convert the weight themselves: the fp16x3 GEMM splits it with split_pair, and the
// GEMM with one product rounds it to hi (sm90/gemm_one_product/converter_patch.cuh).
//
// A later launch computes the results of rows that the split does not represent: RowState (below)
// says which rows and which launch for the fp16x3 GEMMs, and docs/DESIGN.md ("Tiles that are
// multiplied as TF32") for the GEMM with one product.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::split {

// -------------------------------------------------------------------------------- sizes and states

// The factor of lo, 2^11.
constexpr float kLoScale = 2048;

// The largest element of a row is scaled to this exponent, unless that takes a larger power of two
// than the form allows (Form, below). In sm90/, rows of the weight at first have an exponent from a
// sample instead (SampleConfig, sm90/sample_weight.cuh).
constexpr int kTopExponent = 14;

// An octet is eight neighbours in a row, which a thread loads, splits and stores at a time. Its hi
// or its lo is 16 bytes.
constexpr int kOctet = 8;

// A row of a k-tile in the k-tiled layout (see ScaledMatrix). 128 bytes are the widest row that TMA
// swizzles, so all k-tiles of sm90/ have such rows.
constexpr int kKTileRowBytes = 128;
constexpr int kKTileRowNumbers = kKTileRowBytes / sizeof(__half);  // 64 fp16 numbers

// The form of a split: hi and lo of each element, or hi alone.
//
//                           kWithoutLo                     kWithLo
//
//   for                     the GEMM with one product      the fp16x3 GEMMs
//   depth of a k-tile       64 of K                        32 of K
//   largest exponent        kMaxExponentWithoutLo          163 (RowScale); 127 for the weight of
//                                                          sm90/, whose factor is a single float
//   a row of x that the     has the exponent kNeedsTf32    has the RowState kNonfinite
//   split does not
//   represent
enum class Form { kWithoutLo, kWithLo };

// Returns the form of a split whose lo is stored at `lo`, which is null if hi alone is made. Not
// for the weight of sm90/'s fp16x3 GEMM, whose hi and lo are nowhere in memory.
__host__ __device__ constexpr Form form_of(const __half* lo) {
  return lo != nullptr ? Form::kWithLo : Form::kWithoutLo;
}

// Returns how many elements of K a k-tile of the k-tiled layout has.
__host__ __device__ constexpr int k_tile_depth(Form form) {
  return form == Form::kWithLo ? kKTileRowNumbers / 2 : kKTileRowNumbers;
}

// Returns the k of a split matrix: its rows are padded with zeros to whole k-tiles of either form.
inline __host__ __device__ int64_t padded(int64_t k) {
  return (k + kKTileRowNumbers - 1) / kKTileRowNumbers * kKTileRowNumbers;
}

// The state of a row of x or of the weight in the fp16x3 GEMMs. The final state tells which kernel
// computes the row's results:
//
//   kExact        the GEMM (in sm90/ its first launch), as hi and lo represent the row
//   kOverflowed   the second launch of the GEMM of sm90/
//   kNonfinite    nonfinite_kernel (nonfinite.cuh), as the row holds infinity or NaN
//
// Rows of x, and of the weight of sm80/, have only the first and the last state. split_row, which
// reads the whole row, sets the state, and splits a kNonfinite row as zeros.
//
// Rows of the weight of sm90/: three launches set the state in turn. Example: three rows, each with
// 1 as the largest element of its sample. The sample's target is 2^9, so their exponent is 9, and
// elements from about 128 on overflow fp16.
//
//   the row's largest element    100       200                      NaN
//
//   split_x_kernel               kExact    kExact                   kExact
//   first launch of the GEMM     kExact    kOverflowed              kOverflowed
//   second launch                kExact    kOverflowed, with the    kNonfinite
//                                          exponent 7 for 200
//
// The first launch marks a row of the weight if one of its sums is infinite or NaN. This happens
// exactly if hi of an element is infinite or NaN: rows of x are finite or zeros, and no sum of
// finite fp16 products overflows float32.
//
// The second launch ends at once if no row is kOverflowed. Otherwise it gives these rows their
// final state, and computes every tile again that has a row of the weight that is not kExact.
enum RowState { kExact, kOverflowed, kNonfinite };

// ------------------------------------------------------------------------------------------ format

// A float32 operand in memory: `source` is [rows, k]. The GEMM with one product also takes a
// transposed weight: `source` is then [k, rows], and its row i has element i of each row of the
// weight.
struct Float32Matrix {
  const float* source;
  int64_t rows;        // M or N, also if the weight is transposed
  int64_t row_stride;  // elements between the beginnings of two rows of `source`

  __host__ __device__ const float* source_row(int64_t i) const { return source + i * row_stride; }
};

// A float32 operand, the exponents of its rows, and hi and lo of its scaled elements where a kernel
// stores them. The layouts of hi and lo:
//
//   row-major           hi[row][i] and lo[row][i], two matrices [rows, padded(k)]
//   k-tiled, hi alone   [k-tile][row][64 hi]            a k-tile is 64 of K
//   k-tiled, hi and lo  [k-tile][row][32 hi, 32 lo]     a k-tile is 32 of K, and lo = hi + 32
//
// The k-tiled layout is for the stages of a pipeline, for which a thread block loads the same
// k-tile of many rows. These rows are consecutive in memory, so that the loads use all slices of L2
// for every K. Rows of a row-major matrix are padded(k) elements apart, so that for some K the
// loads use only a few slices.
// With lo, the k-tiled layout also changes the order within each 16 elements of K (k_order.cuh).
struct ScaledMatrix : Float32Matrix {
  // Null for the weight of sm90/'s fp16x3 GEMM, which splits it in registers. (The GEMM with one
  // product stores the weight's hi here.)
  __half* hi;
  __half* lo;  // null where hi is null, and where hi alone is made

  // [rows]: scaled = element * 2^exponent
  int* exponent;
  int* row_state;  // [rows] of RowState; only for the fp16x3 GEMMs
  bool is_k_tiled;

  // Returns the index in hi at which a row of a k-tile begins in the k-tiled layout.
  __host__ __device__ int64_t k_tiled_index(int64_t k_tile, int64_t row) const {
    return (k_tile * rows + row) * kKTileRowNumbers;
  }
};

// The exponent that marks a row of x for which hi alone is not accurate enough. The GEMM with one
// product leaves the row's tiles to a second GEMM, in TF32 (docs/DESIGN.md has the rule).
constexpr int kNeedsTf32 = 127;
constexpr int kMaxExponentWithoutLo = 126;

// -------------------------------------------------------------------------------------- arithmetic

// Returns 2^exponent, for -126 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) {
  constexpr int kBias = 127;
  constexpr int kMantissaBits = 23;
  return __int_as_float((exponent + kBias) << kMantissaBits);
}

// Returns sum * 2^-exponent, rounded once. `exponent` is the sum of two rows' exponents, so the
// power of two may not fit into a float, and is applied as two factors. A sum that is not zero is
// from about 2^-59 to 2^64. So if the first multiplication is not exact, the result is zero or
// infinity anyway. A factor is at least 2^-126, so 2^-252 replaces all smaller powers, for which
// the result is zero, too.
__device__ inline float unscale(float sum, int exponent) {
  constexpr int kLeastPower = 2 * -126;
  const int power = max(-exponent, kLeastPower);
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

}  // namespace kernels::split
