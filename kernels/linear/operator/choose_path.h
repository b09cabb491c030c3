// Chooses the kernel that multiplies on a GPU: a function from the sizes of a product to a Path.
//
//   out [M, N] = x [M, K] times weight [N, K] transposed
//
// run_gemm.h calls choose_path for the forward (with ReLU) and for the gradients of x and of weight
// (without ReLU). problems/benchmark/print_paths.cpp includes this file alone, so it includes
// neither torch nor CUDA.
//
// The tensor-core kernels are of two kinds:
//
//   fp16x3             float32 at `highest`: each float32 is split into two fp16 numbers, and three
//                      tensor-core products are added
//   gemm_one_product   half types, and float32 at `high`: one tensor-core product
//
// docs/DESIGN.md, "Which path a product takes", has a table of the kernels for each GPU.
//
// The origin of the limits. Our path is chosen where it is estimated to take less time than torch's
// product followed by the fused pass; `..._wins` is short for that. docs/BENCHMARKS.md, "is the
// fastest path chosen?", shows how good the estimates are, and where they err. The limits of sm80's
// kernel follow from the arithmetic rates of its GPU. All others were fitted to the times of 3,887
// products on an H200, with operands in L2 and not in L2 (docs/EXPERIMENTS.md, "Paths, and torch's
// part"). `python -m problems.benchmark path-grid` measures such times anew, and `paths` shows how
// good the limits are: it times every path for products just beside them
// (problems/benchmark/products.py). docs/CONTRIBUTING.md, "Retune the choice of a path", says how
// to move a limit, for another GPU or kernel.

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

// The smallest K whose errors and times were measured: at `highest`, and of gemm_one_product.
constexpr int64_t kLeastKAtHighest = 16;
constexpr int64_t kLeastKOfOneProduct = 256;

// The smallest M * N of a gradient in half types that gemm_one_product computes.
constexpr int64_t kLeastHalfGradient = int64_t{3} << 22;

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

// Returns whether skinny.cu wins against every other path, for a float32 forward. With few rows,
// the tiles of the tensor-core kernels would consist mostly of padding. At `high`, a single
// tensor-core product is faster from 9 rows on.
//
//   rows of x     skinny.cu wins with
//   1 to 8        any K and up to 4 tiles for each multiprocessor; or K >= 512
//   9 to 16       K >= 256 and up to 2 tiles; or K >= 512
//   17 and more   K >= 16 and up to 1 tile, or K >= 256 and up to 2 tiles; but with no more than
//                 2^28 multiplications
inline bool skinny_wins(const Product& product, const Gpu& gpu) {
  // skinny.cu divides out into tiles of 16 rows by 32 columns.
  constexpr int kTileRows = 16;
  constexpr int kTileColumns = 32;
  constexpr int kVeryFewRows = 8;
  constexpr int kMediumK = 256;
  constexpr int kLongK = 512;
  constexpr int kFewTiles = 1;  // for each multiprocessor
  constexpr int kMediumTiles = 2;
  constexpr int kManyTiles = 4;
  constexpr int kMostMultiplications = 1 << 28;

  const int64_t tiles = divide_up(product.m, kTileRows) * divide_up(product.n, kTileColumns);
  const double tiles_per_multiprocessor = static_cast<double>(tiles) / gpu.multiprocessors;
  if (product.m <= kVeryFewRows) {
    return tiles_per_multiprocessor <= kManyTiles || product.k >= kLongK;
  }
  if (product.precision != Precision::kHighest) return false;

  const bool has_medium_tiles = tiles_per_multiprocessor <= kMediumTiles && product.k >= kMediumK;
  const bool has_one_row_of_tiles = product.m <= kTileRows;
  if (has_one_row_of_tiles) return has_medium_tiles || product.k >= kLongK;

  const bool has_few_tiles = tiles_per_multiprocessor <= kFewTiles && product.k >= kLeastKAtHighest;
  // A tile with fewer than 32 columns takes as long as a full one.
  const double columns = std::max<int64_t>(product.n, kTileColumns);
  const double multiplications = product.m * columns * product.k;
  return (has_few_tiles || has_medium_tiles) && multiplications <= kMostMultiplications;
}

// Returns whether sm90's fp16x3 kernel wins against torch for a gradient at `highest`.
//
// The result, M * N elements, has to be larger than three costs, which are counted in its elements:
//
//   kRowCost * M                    of the rows of x
//   kColumnCost * N                 of the columns of out
//   kCallCost / (K - kUncountedK)   of the call. With a short K an element takes little time, so
//                                   the call costs as much as many elements.
//
// Example: for K = 1024 the call costs 2^29 / (1024 - 40), about 546,000 elements.
inline bool fp16x3_gradient_wins(const Product& product) {
  constexpr int kLeastKOfFp16x3Gradient = 64;  // elements of K
  constexpr int kLeastWeight = 1 << 17;        // elements of the weight, N * K
  constexpr int kRowCost = 150;                // elements of out for each row of x
  constexpr int kColumnCost = 100;             // elements of out for each column
  constexpr int kCallCost = 1 << 29;           // elements of out times elements of K
  constexpr int kUncountedK = 40;              // elements of K
  static_assert(kUncountedK < kLeastKOfFp16x3Gradient, "K - kUncountedK is positive");

  const double m = product.m;
  const double n = product.n;
  const double k = product.k;
  if (k < kLeastKOfFp16x3Gradient || n * k < kLeastWeight) return false;
  return m * n >= kRowCost * m + kColumnCost * n + kCallCost / (k - kUncountedK);
}

// Returns whether sm90's fp16x3 kernel wins against torch for a forward at `highest`.
//
// Its work, M N K multiplications, has to be large. Two corrections make one limit fit all sizes.
// 112 columns do not count, because much of a tile is padding if columns are few. And 2^17 elements
// of out are added, because with a long K even a small result is a lot of work.
// Example: out [512, 1024] with K = 384 has (512 * 912 + 2^17) * 384 = 230 million, which exceeds
// kLeastWork, 201 million.
inline bool fp16x3_forward_wins(const Product& product) {
  constexpr int kTooFewRows = 16;     // rows of x: skinny.cu or torch is faster
  constexpr int kTooFewColumns = 64;  // torch is faster, as most of a tile is padding
  constexpr int kUncountedColumns = 112;
  constexpr int kAddedElements = 1 << 17;
  constexpr int kLeastWork = 3 << 26;
  // A weight without vector rows is copied first, which pays only for more work.
  constexpr int kLeastWorkForCopy = 1 << 29;

  if (product.m <= kTooFewRows || product.n <= kTooFewColumns) return false;
  const double counted = static_cast<double>(product.m) * (product.n - kUncountedColumns);
  if (!product.weight_has_vector_rows) return counted * product.k >= kLeastWorkForCopy;
  return (counted + kAddedElements) * product.k >= kLeastWork;
}

// Returns whether sm90's fp16x3 kernel wins against torch, for a forward or a gradient.
inline bool fp16x3_wins(const Product& product) {
  if (product.k < kLeastKAtHighest) return false;
  return product.is_forward ? fp16x3_forward_wins(product) : fp16x3_gradient_wins(product);
}

// Returns whether sm90's gemm_one_product wins against torch for a float32 product at `high`. The
// times are compared in fp16 multiplications of tensor cores:
//
//   torch   2 M N K                   cuBLAS's product in TF32, which has half the rate of fp16
//           + 512 M N                 the fused pass, in a forward
//   ours    M N K / utilization       of the waves
//           + 576 (M + N) K           the conversion of x and of the weight to fp16
//           + 256 M K                 the copy of a transposed x
//           + 2^32                    the start of several kernels instead of one or two
inline bool one_product_wins_float32(const Product& product, const Gpu& gpu) {
  constexpr int kPassPerResult = 512;
  constexpr int kConversionPerElement = 576;
  constexpr int kCopyPerElement = 256;
  constexpr int64_t kStart = int64_t{1} << 32;

  const double m = product.m;
  const double n = product.n;
  const double k = product.k;
  double torch_time = 2 * m * n * k;
  if (product.is_forward) torch_time += kPassPerResult * m * n;
  double our_time = m * n * k / wave_utilization(product, gpu);
  our_time += kConversionPerElement * (m + n) * k + kStart;
  if (product.x_is_transposed) our_time += kCopyPerElement * m * k;
  return our_time <= torch_time;
}

// Returns whether sm90's gemm_one_product wins against torch for a product of half types.
//
// In a forward, torch's product is followed by the fused pass. The pass takes as much time as a
// product with K = 640 and the same result. Our kernel needs no pass, but may leave a part of its
// last wave empty. So it wins if K / utilization <= K + 640. Example: with K = 4096, from a
// utilization of 0.87 on.
//
// In a gradient there is no pass to save. Our kernel wins if the result is large and fills its
// waves.
inline bool one_product_wins_half(const Product& product, const Gpu& gpu) {
  constexpr int kPassAsK = 640;
  constexpr double kLeastUtilizationOfGradient = 0.9;

  const double utilization = wave_utilization(product, gpu);
  if (product.is_forward) return product.k <= utilization * (product.k + kPassAsK);
  return product.m * product.n >= kLeastHalfGradient && utilization >= kLeastUtilizationOfGradient;
}

// Returns whether sm90's gemm_one_product wins against torch.
inline bool one_product_wins(const Product& product, const Gpu& gpu) {
  if (product.k < kLeastKOfOneProduct) return false;
  const bool is_float32 = product.dtype == DType::kFloat32;
  return is_float32 ? one_product_wins_float32(product, gpu) : one_product_wins_half(product, gpu);
}

// Returns whether sm80's fp16x3 kernel wins against torch. The limits follow from the rates
// of its GPU, and were not measured.
inline bool sm80_wins(const Product& product) {
  constexpr int kLeastResult = 1 << 22;  // M * N
  constexpr int kLeastK = 1024;
  return product.m * product.n >= kLeastResult && product.k >= kLeastK;
}

// Returns the path to try. The caller still asks the kernel whether it supports the operands.
inline Path choose_path(const Product& product, const Gpu& gpu) {
  if (product.dtype == DType::kFloat64) return Path::kTorch;
  const bool is_float32 = product.dtype == DType::kFloat32;
  const bool is_highest = is_float32 && product.precision == Precision::kHighest;
  if (gpu.capability == 80) {
    return is_highest && sm80_wins(product) ? Path::kSm80 : Path::kTorch;
  }
  if (gpu.capability != 90) return Path::kTorch;

  const bool may_be_skinny = is_float32 && product.is_forward && product.weight_has_vector_rows;
  if (may_be_skinny && skinny_wins(product, gpu)) return Path::kSkinny;
  const bool sm90_wins = is_highest ? fp16x3_wins(product) : one_product_wins(product, gpu);
  return sm90_wins ? Path::kSm90 : Path::kTorch;
}

}  // namespace kernels
