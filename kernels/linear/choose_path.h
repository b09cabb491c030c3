// Chooses the kernel that multiplies on a GPU: a function from the sizes of a product to a Path.
//
//   out [M, N] = x [M, K] times weight [N, K] transposed
//
// run_gemm.h calls choose_path for the forward (with ReLU) and for the gradients of x and of weight
// (without ReLU). tests/test_linear_paths.py compiles this file alone, so it includes neither torch
// nor CUDA.
//
// The tensor-core kernels are of two kinds:
//
//   fp16x3             float32 at `highest`: each float32 is split into two fp16 numbers, and three
//                      tensor-core products are added
//   gemm_one_product   half types, and float32 at `high`: one tensor-core product
//
// docs/DESIGN.md, "Which path a product takes", has a table of the kernels for each GPU.
//
// The origin of the limits. Our path is chosen where it takes less time than torch's product
// followed by the fused pass. The limits of kSm80 follow from the arithmetic rates of its GPU. All
// other limits, and the formulas of the two fp16x3 functions, were fitted by hand to times on an
// H200; no model of the kernels gives them. The sizes and times of the fits were not kept.
// docs/EXPERIMENTS.md, "Paths, and torch's part", has these results:
//
//   skinny_wins                 the product at which skinny.cu and torch take the same time
//   fp16x3_forward_wins         2,343 forwards, with these limits and with simpler ones
//   fp16x3_gradient_wins        gradients that lost with the limits of the forward
//   one_product_wins_float32    the gradient that lost with the least work of the forward
//
// `python -m problems.benchmark paths` shows how good the limits are: it times every path for
// products just beside them (problems/benchmark/products.py). docs/CONTRIBUTING.md, "Retune the
// choice of a path", says how to move a limit, for another GPU or kernel.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/sizes.h"
#include "launchers.h"

namespace kernels {

enum class Path {
  // skinny.cu: float32 without tensor cores, for few rows of x. It is chosen for forwards alone.
  kSkinny,
  // sm90/launch.cu: both kinds of tensor-core kernels, by wgmma, for compute capability 9.0.
  kSm90,
  // sm80/launch.cu: fp16x3 by mma.sync. It is chosen on compute capability 8.0 alone, but never ran
  // on such a GPU. Tests run it on Hopper.
  kSm80,
  // torch's product, then the fused pass in place.
  kTorch,
};

// Returns the name of a path, as set_linear_path takes it.
inline const char* name_of(Path path) {
  switch (path) {
    case Path::kSkinny:
      return "skinny";
    case Path::kSm90:
      return "sm90";
    case Path::kSm80:
      return "sm80";
    case Path::kTorch:
      break;
  }
  return "torch";
}

struct Gpu {
  int capability;  // 10 times the major number plus the minor number: 90 for Hopper
  int multiprocessors;
};

// One product to choose a path for.
struct Product {
  DType dtype;
  Precision precision;
  bool is_forward;  // false for a gradient
  int64_t m, n, k;  // x [m, k], weight [n, k], out [m, n]: a column of out for each row of weight
  // x is column-major: the elements of its columns are adjacent, and those of its rows are not. In
  // float32 it is copied first.
  bool x_is_transposed;
  // The weight is row-major, and its rows can be read by 16-byte vectors. Any other weight is
  // copied first, or read as its transpose.
  bool weight_has_vector_rows;
};

// The smallest K at `highest` whose errors and times were measured.
constexpr int64_t kLeastKAtHighest = 16;

// The smallest M * N for which gemm_one_product and sm80's kernel can win.
constexpr int64_t kLargeResult = int64_t{1} << 22;

// Returns how full the result's waves of tiles are, from 0 to 1.
//
// In gemm_one_product a cluster of two multiprocessors computes a tile of 256 x 256, and a wave is
// one tile for each cluster. Example: an H200 has 132 multiprocessors, so 66 clusters. A result
// [1024, 4608] has 4 * 18 = 72 tiles. These need two waves, with room for 132 tiles, so the
// utilization is 72 / 132 = 0.55.
inline double wave_utilization(const Product& product, const Gpu& gpu) {
  constexpr int64_t kTile = 256;
  const int64_t tiles = divide_up(product.m, kTile) * divide_up(product.n, kTile);
  const int64_t clusters = gpu.multiprocessors / 2;
  const int64_t waves = divide_up(tiles, clusters);
  const double elements = static_cast<double>(product.m) * product.n;
  return elements / (waves * clusters * kTile * kTile);
}

// The limits of the choice of skinny.cu, which divides out into tiles of 16 rows by 32 columns.
struct SkinnyLimits {
  static constexpr int kTileRows = 16;
  static constexpr int kTileColumns = 32;
  static constexpr int kVeryFewRows = 8;

  // Elements of K.
  static constexpr int kMediumK = 256;
  static constexpr int kLongK = 512;

  // Tiles for each multiprocessor.
  static constexpr int kFewTiles = 1;
  static constexpr int kMediumTiles = 2;
  static constexpr int kManyTiles = 4;

  // For more than kTileRows rows: columns, and multiplications.
  static constexpr int kLeastColumns = 8;
  static constexpr int kSmallProduct = 1 << 27;
  static constexpr int kMediumProduct = 1 << 28;
};

// Returns whether skinny.cu takes less time than every other path for a product with more than 16
// rows at `highest`.
inline bool skinny_wins_beyond_16_rows(const Product& product, double tiles_per_multiprocessor) {
  using Limits = SkinnyLimits;
  if (product.n < Limits::kLeastColumns) return false;
  // A tile with fewer than 32 columns takes as long as one with 32.
  const bool has_narrow_tiles = product.n < Limits::kTileColumns;
  const int64_t columns = std::max<int64_t>(product.n, Limits::kTileColumns);
  const int64_t multiplications = product.m * columns * product.k;
  if (tiles_per_multiprocessor <= Limits::kFewTiles) {
    return product.k >= kLeastKAtHighest && multiplications <= Limits::kMediumProduct;
  }
  const int64_t most_multiplications =
      has_narrow_tiles ? Limits::kMediumProduct : Limits::kSmallProduct;
  return product.k >= Limits::kMediumK && tiles_per_multiprocessor <= Limits::kMediumTiles &&
         multiplications <= most_multiplications;
}

// Returns whether skinny.cu takes less time than every other path, for a float32 forward. With few
// rows, the tiles of the tensor-core kernels would consist mostly of padding.
//
//   rows of x     precision   skinny.cu wins with
//   1 to 8        any         up to kManyTiles, or K >= kLongK
//   9 to 16       `highest`   up to kMediumTiles and K >= kMediumK, or K >= kLongK
//   17 and more   `highest`   few multiplications (skinny_wins_beyond_16_rows)
inline bool skinny_wins(const Product& product, const Gpu& gpu) {
  using Limits = SkinnyLimits;
  const int64_t tiles =
      divide_up(product.m, Limits::kTileRows) * divide_up(product.n, Limits::kTileColumns);
  const double tiles_per_multiprocessor = static_cast<double>(tiles) / gpu.multiprocessors;

  if (product.m <= Limits::kVeryFewRows) {
    return tiles_per_multiprocessor <= Limits::kManyTiles || product.k >= Limits::kLongK;
  }
  if (product.precision != Precision::kHighest) return false;
  if (product.m <= Limits::kTileRows) {
    const int least_k =
        tiles_per_multiprocessor <= Limits::kMediumTiles ? Limits::kMediumK : Limits::kLongK;
    return product.k >= least_k;
  }
  return skinny_wins_beyond_16_rows(product, tiles_per_multiprocessor);
}

// Returns whether sm90's fp16x3 kernel computes a gradient at `highest` in less time than torch.
//
// M * N, the size of the result, has to outgrow three costs, counted in elements of the result:
// kRowCost for each row of x, kColumnCost for each column, and that of the call, which is kCallCost
// / (K - kUncountedK) and so weighs more where K is short. Example: 2^29 / (1024 - 40) is about
// 546,000 elements.
inline bool fp16x3_gradient_wins(const Product& product) {
  constexpr int kLeastKOfFp16x3Gradient = 64;  // elements of K
  constexpr int kLeastWeight = 1 << 17;        // elements of the weight, N * K
  constexpr int kRowCost = 150;                // elements of out per row of x
  constexpr int kColumnCost = 100;             // elements of out per column
  constexpr int kCallCost = 1 << 29;           // elements of out times elements of K
  constexpr int kUncountedK = 40;              // elements of K
  static_assert(kUncountedK < kLeastKOfFp16x3Gradient, "K - kUncountedK is positive");

  const double m = product.m;
  const double n = product.n;
  const double k = product.k;
  if (k < kLeastKOfFp16x3Gradient || n * k < kLeastWeight) return false;
  return m * n >= kRowCost * m + kColumnCost * n + kCallCost / (k - kUncountedK);
}

// Returns N^2 K. A lower limit for it excludes products with both few columns and a short K.
// Example: with a limit of 2^24, 128 columns need K >= 1024, and 1024 columns need K >= 16.
inline double columns_squared_k(const Product& product) {
  const double n = product.n;
  return n * n * product.k;
}

// Returns whether fp16x3 takes as long to store the results of a forward as to compute them. It
// does if K is short and the rows of out are not aligned to 16 bytes, unless there are many
// columns.
inline bool stores_dominate(const Product& product) {
  constexpr int kShortK = 64;                                // elements of K
  constexpr int kLeastColumnsSquaredKIfUnaligned = 1 << 27;  // columns^2 times elements of K
  const bool has_unaligned_output_rows = product.n % 4 != 0;
  return product.k < kShortK && has_unaligned_output_rows &&
         columns_squared_k(product) < kLeastColumnsSquaredKIfUnaligned;
}

// Returns whether sm90's fp16x3 kernel computes the forward at `highest` in less time than torch.
inline bool fp16x3_forward_wins(const Product& product) {
  const double m = product.m;
  const double n = product.n;
  const double k = product.k;

  // Up to 16 rows, skinny.cu or torch is faster. With up to 64 columns, or up to 128 and a very
  // long K, torch's product is faster, because most of a tile is padding.
  constexpr int kTooFewRows = 16;                  // rows of x
  constexpr int kTooFewColumns = 64;               // columns
  constexpr int kTooFewColumnsForVeryLongK = 128;  // columns
  constexpr int kVeryLongK = 1 << 15;              // elements of K
  const int too_few_columns = k < kVeryLongK ? kTooFewColumns : kTooFewColumnsForVeryLongK;
  if (m <= kTooFewRows || n <= too_few_columns || stores_dominate(product)) return false;

  // The multiplications, as if out had 2^17 elements more. A lower limit for this excludes small
  // products with a short K. Example: a limit of 2^28 excludes none from K = 2^11 on, because the
  // 2^17 elements alone are 2^28 multiplications then.
  constexpr int kExtraElements = 1 << 17;  // elements of out
  const double work = (m * n + kExtraElements) * k;

  if (product.weight_has_vector_rows) {
    constexpr int kLeastColumnsSquaredK = 1 << 24;  // columns^2 times elements of K
    constexpr int kLeastWork = 1 << 28;             // multiplications
    return columns_squared_k(product) >= kLeastColumnsSquaredK && work >= kLeastWork;
  }
  // Any other weight is copied first, which pays only with more of everything.
  constexpr int kTooFewRowsForCopy = 64;                 // rows of x
  constexpr int kLeastResultForCopy = 1 << 16;           // elements of out, M * N
  constexpr int kLeastColumnsSquaredKForCopy = 1 << 26;  // columns^2 times elements of K
  constexpr int kLeastWorkForCopy = 1 << 30;             // multiplications
  return m > kTooFewRowsForCopy && m * n >= kLeastResultForCopy &&
         columns_squared_k(product) >= kLeastColumnsSquaredKForCopy && work >= kLeastWorkForCopy;
}

// Returns whether sm90's fp16x3 kernel takes less time than torch, in the forward or in a gradient.
inline bool fp16x3_wins(const Product& product) {
  if (product.k < kLeastKAtHighest) return false;
  return product.is_forward ? fp16x3_forward_wins(product) : fp16x3_gradient_wins(product);
}

// Returns whether sm90's gemm_one_product computes a float32 product at `high` in less time than
// torch's TF32 product. Our kernel converts both operands to fp16, which cuBLAS does not.
inline bool one_product_wins_float32(const Product& product, const Gpu& gpu) {
  constexpr int kMostRowsOfTorch = 512;  // rows of x
  constexpr int kConversionCost = 768;   // columns whose product takes as long as the conversion
  constexpr int64_t kLeastForwardWork = int64_t{5} << 30;    // multiplications
  constexpr int64_t kLeastGradientWork = int64_t{10} << 30;  // multiplications
  constexpr int kLeastColumnsForCopy = 2048;                 // columns
  constexpr double kLeastUtilizationOfFloat32 = 0.6;         // of the waves, from 0 to 1

  const bool has_enough_rows = product.m > kMostRowsOfTorch;
  // (N - kConversionCost) M K >= least_work, divided by K so that it does not overflow.
  const int64_t least_work = product.is_forward ? kLeastForwardWork : kLeastGradientWork;
  const bool pays_for_conversion =
      (product.n - kConversionCost) * product.m >= least_work / product.k;
  // A transposed x is copied first, and few columns do not pay for the copy.
  const bool pays_for_copy = !product.x_is_transposed || product.n >= kLeastColumnsForCopy;
  const bool fills_waves = wave_utilization(product, gpu) >= kLeastUtilizationOfFloat32;
  return has_enough_rows && pays_for_conversion && pays_for_copy && fills_waves;
}

// Returns whether sm90's gemm_one_product computes a product of half types in less time than
// cuBLAS. Its tiles of 256 x 256 win only where they nearly fill their waves.
inline bool one_product_wins_half(const Product& product, const Gpu& gpu) {
  constexpr double kLeastUtilizationOfHalf = 0.9;  // of the waves, from 0 to 1
  return wave_utilization(product, gpu) >= kLeastUtilizationOfHalf;
}

// Returns the path to try. The caller still asks the kernel whether it supports the operands.
inline Path choose_path(const Product& product, const Gpu& gpu) {
  if (product.dtype == DType::kFloat64) return Path::kTorch;
  const bool is_float32 = product.dtype == DType::kFloat32;
  const bool is_hopper = gpu.capability == 90;
  const bool has_large_result = product.m * product.n >= kLargeResult;

  const bool may_be_skinny =
      is_hopper && is_float32 && product.is_forward && product.weight_has_vector_rows;
  if (may_be_skinny && skinny_wins(product, gpu)) return Path::kSkinny;

  if (is_float32 && product.precision == Precision::kHighest) {
    if (is_hopper && fp16x3_wins(product)) return Path::kSm90;
    constexpr int kLeastKOnSm80 = 1024;  // elements of K; by the GPU's rates, not measured
    const bool sm80_wins = gpu.capability == 80 && has_large_result && product.k >= kLeastKOnSm80;
    return sm80_wins ? Path::kSm80 : Path::kTorch;
  }

  // gemm_one_product. Gradients in half types win from a shorter K on.
  constexpr int kLeastKOfOneProduct = 1024;   // elements of K
  constexpr int kLeastKOfHalfGradient = 256;  // elements of K
  const bool is_half_gradient = !is_float32 && !product.is_forward;
  const int64_t least_k = is_half_gradient ? kLeastKOfHalfGradient : kLeastKOfOneProduct;
  if (!is_hopper || !has_large_result || product.k < least_k) return Path::kTorch;
  const bool one_product_wins =
      is_float32 ? one_product_wins_float32(product, gpu) : one_product_wins_half(product, gpu);
  return one_product_wins ? Path::kSm90 : Path::kTorch;
}

}  // namespace kernels
