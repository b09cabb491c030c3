// Chooses the kernel that multiplies on a GPU: a function from the sizes of a product to a Path.
//
//   out [M, N] = x [M, K] times weight [N, K] transposed
//
// run_gemm.h calls choose_path for the forward (with ReLU) and for the gradients of x and of weight
// (without ReLU). This file, and those that it includes, must include neither torch nor
// CUDA, because problems/benchmark/paths/print_paths.cpp is compiled without them.
//
// The tensor-core kernels are of two kinds:
//
//   fp16x3             float32 at `highest`: each float32 is split into two fp16 numbers, and three
//                      tensor-core products are added
//   gemm_one_product   half types, and float32 at `high`: one tensor-core product
//
// docs/DESIGN.md, "Which path a product takes", says which kernels each GPU has.
//
// A path *wins* if it is estimated to take less time than the path torch, which is torch's product,
// followed by the fused pass in a forward. Each function `..._wins` makes this estimate by a few
// limits, its constants. Most formulas are fits to measured times, and not models of a kernel.
//
//   their origin   The limits of the path sm80 follow from the arithmetic rates of an A100. All
//                  others were fitted to the times of 3,887 products on an H200, with operands in
//                  L2 and not in L2 (docs/EXPERIMENTS.md, "Paths, and torch's part").
//   their errors   docs/BENCHMARKS.md, "is the fastest path chosen?". `python -m problems.benchmark
//                  paths` times every path for products just beside the limits.
//   to move one    docs/CONTRIBUTING.md, "Retune the choice of a path".

#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "common/sizes.h"
#include "launchers.h"

namespace kernels {

enum class Path {
  // skinny.cu: float32 without tensor cores, for few rows of x and for small results. It is chosen
  // for forwards alone.
  kSkinny,
  // linear_sm90.cu: two tensor-core kernels by wgmma, for compute capability 9.0. They are
  // gemm_fp16x3 for float32 at `highest`, and gemm_one_product for all other products.
  kSm90,
  // linear_sm80.cu: fp16x3 by mma.sync, for compute capability 8.0 and newer. It is chosen on 8.0
  // alone, but never ran on such a GPU. Tests run it on Hopper.
  kSm80,
  // torch's product, then, in a forward, the fused pass in place.
  kTorch,
};

constexpr Path kAllPaths[] = {Path::kSkinny, Path::kSm90, Path::kSm80, Path::kTorch};

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
  Precision precision;  // kOfDtype for half types, so never kHighest
  bool is_forward;      // false for a gradient
  int64_t m, n, k;  // x [m, k], weight [n, k], out [m, n]: a column of out for each row of weight
  // x is column-major: elements of a column are adjacent, and elements of a row are not. In
  // float32 it is copied first.
  bool x_is_transposed;
  // The weight is row-major, and its rows can be read by 16-byte vectors. The path sm90 copies any
  // other weight first, or reads it as its transpose. The path skinny is not chosen for it.
  bool weight_has_vector_rows;

  bool is_float32() const { return dtype == DType::kFloat32; }
  bool is_highest() const { return precision == Precision::kHighest; }
};

// The least K for which each kernel may be chosen. With shorter K, hardly a product was measured:
// in the benchmark `path-grid`, which checks the limits of this file, the forwards at `highest`
// begin with K = 16, and those at other precisions with K = 256. (The benchmark `paths` has a few
// just below these limits.)
constexpr int64_t kLeastKAtHighest = 16;      // fp16x3, and skinny.cu from 17 rows of x on
constexpr int64_t kLeastKOfOneProduct = 256;  // gemm_one_product

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
  const int64_t elements_of_full_waves = waves * clusters * kTile * kTile;
  return elements / elements_of_full_waves;
}

// A line of skinny_wins's table: limits of a product.
struct SkinnyLimits {
  int64_t least_m;  // rows of x
  double most_m;
  double most_tiles;  // of out, for each of the GPU's multiprocessors
  int64_t least_k;
  double most_multiplications;
  bool is_for_high;  // for `highest` and `high`; if false, for `highest` alone
};

// Returns whether the path skinny wins, also against the path sm90, for a float32 forward that is
// not empty: if the product keeps to all limits of a line of the table. If there are few rows, the
// tiles of the tensor-core kernels would consist mostly of padding; if the result is small, there
// would be few tiles.
//
// Example: an H200 has 132 multiprocessors. For x with 16 rows and a weight with 8192, out has 1 *
// 256 tiles of 16 x 32. These are 1.94 for each multiprocessor. So at `highest` skinny wins from
// K = 256 on, by the third line.
inline bool skinny_wins(const Product& product, const Gpu& gpu) {
  constexpr double kAny = std::numeric_limits<double>::infinity();
  // clang-format off
  static constexpr SkinnyLimits kTable[] = {
      // M from, to   tiles to   K from             multiplications to   for `high`
      {       1,    8,       4,  0,                 kAny,                true },
      {       1,    8,    kAny,  512,               kAny,                true },
      {       9,   16,       2,  256,               kAny,                false},
      {       9,   16,    kAny,  512,               kAny,                false},
      {      17, kAny,       2,  256,               1 << 28,             false},
      {      17, kAny,       1,  kLeastKAtHighest,  1 << 28,             false},
  };
  // clang-format on

  // skinny.cu divides out into tiles of 16 rows by 32 columns. (For M <= 8 a tile has 1, 2, 4 or 8
  // rows. The count below takes one tile for all rows.)
  constexpr int kTileRows = 16;
  constexpr int kTileColumns = 32;
  const int64_t all_tiles = divide_up(product.m, kTileRows) * divide_up(product.n, kTileColumns);
  const double tiles = static_cast<double>(all_tiles) / gpu.multiprocessors;
  // An only tile with fewer than 32 columns takes as long as a full one.
  const double columns = std::max<int64_t>(product.n, kTileColumns);
  const double multiplications = product.m * columns * product.k;
  return std::any_of(std::begin(kTable), std::end(kTable), [&](const SkinnyLimits& limits) {
    return product.m >= limits.least_m && product.m <= limits.most_m &&
           tiles <= limits.most_tiles && product.k >= limits.least_k &&
           multiplications <= limits.most_multiplications &&
           (limits.is_for_high || product.is_highest());
  });
}

// Returns whether the path sm90 wins by fp16x3, for a gradient at `highest`: if K >= 64,
// N K >= 2^17 and
//
//   M N >= 150 M + 100 N + 2^29 / (K - 40)
//
// This inequality is fitted to measured times, and not derived. It leaves results with few columns
// or few rows to torch, and small results with a short K. Products just beside the limit:
//
//      M      N      K         M N       150 M     100 N   2^29 / (K - 40)   path
//
//   8192    192   4096   1,572,864   1,228,800    19,200           132,365   sm90
//   8192    160   4096   1,310,720   1,228,800    16,000           132,365   torch
//   1536   2048    256   3,145,728     230,400   204,800         2,485,513   sm90
//   1280   2048    256   2,621,440     192,000   204,800         2,485,513   torch
inline bool sm90_fp16x3_gradient_wins(const Product& product) {
  constexpr int kLeastKOfFp16x3Gradient = 64;
  constexpr int kLeastWeight = 1 << 17;  // elements of the weight, N * K
  constexpr int kRowCost = 150;
  constexpr int kColumnCost = 100;
  constexpr int kCallCost = 1 << 29;
  constexpr int kUncountedK = 40;
  static_assert(kUncountedK < kLeastKOfFp16x3Gradient, "K - kUncountedK is positive");

  const double m = product.m;
  const double n = product.n;
  const double k = product.k;
  if (k < kLeastKOfFp16x3Gradient || n * k < kLeastWeight) return false;
  return m * n >= kRowCost * m + kColumnCost * n + kCallCost / (k - kUncountedK);
}

// Returns whether the path sm90 wins by fp16x3, for a forward at `highest`: if M > 16, N > 64 and
//
//   (M (N - 112) + 2^17) K >= 3 * 2^26 = 201.3 million    weight with vector rows
//    M (N - 112)         K >= 2^29     = 536.9 million    any other weight, which is copied first
//
// These inequalities are fitted to measured times, and not derived. The left sides are near M N K;
// 112 makes them fit narrow results, and 2^17 small results with a long K. Products just beside the
// limits:
//
//      M      N     K   weight        left side, in millions   path
//
//    512   1024   352   vector rows   210.5                    sm90
//    512   1024   320   vector rows   191.4                    torch
//   1024   1024   606   other         565.9                    sm90
//   1024   1024   574   other         536.1                    torch
inline bool sm90_fp16x3_forward_wins(const Product& product) {
  constexpr int kTooFewRows = 16;     // rows of x: skinny.cu or torch is faster
  constexpr int kTooFewColumns = 64;  // torch is faster, as most of a tile is padding
  constexpr int kUncountedColumns = 112;
  constexpr int kAddedElements = 1 << 17;
  constexpr int kLeastWork = 3 << 26;
  constexpr int kLeastWorkForCopy = 1 << 29;

  if (product.m <= kTooFewRows || product.n <= kTooFewColumns) return false;
  const double counted_elements = static_cast<double>(product.m) * (product.n - kUncountedColumns);
  if (!product.weight_has_vector_rows) return counted_elements * product.k >= kLeastWorkForCopy;
  return (counted_elements + kAddedElements) * product.k >= kLeastWork;
}

// Returns whether the path sm90 wins by fp16x3, for a forward or a gradient.
inline bool sm90_fp16x3_wins(const Product& product) {
  if (product.k < kLeastKAtHighest) return false;
  return product.is_forward ? sm90_fp16x3_forward_wins(product)
                            : sm90_fp16x3_gradient_wins(product);
}

// Returns whether the path sm90 wins by gemm_one_product, for a float32 product at `high`. The
// times are compared in fp16 multiplications of tensor cores:
//
//   torch   2 M N K                   cuBLAS's product in TF32, which has half the rate of fp16
//           + 512 M N                 the fused pass, in a forward
//   ours    M N K / utilization       the product: each wave takes as long as a full one
//           + 576 (M + N) K           the conversion of x and of the weight to fp16
//           + 256 M K                 the copy of a transposed x
//           + 2^32                    the start of several kernels instead of one or two
inline bool sm90_one_product_wins_float32(const Product& product, const Gpu& gpu) {
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

// Returns whether the path sm90 wins by gemm_one_product, for a product of half types.
//
// Times of a forward. The unit: with full waves, a product takes K units, one for each element of
// K. Torch's waves are counted as full, so its product takes K units.
//
//   torch   K + 640             the product, and the fused pass, which takes 640 units
//   ours    K / utilization     no pass, but a part of the last wave may be empty
//
// Example: with K = 4096 ours is shorter from a utilization of 4096 / 4736 = 0.865 on.
//
// In a gradient there is no pass to save. Our kernel wins if the result is large and fills its
// waves.
inline bool sm90_one_product_wins_half(const Product& product, const Gpu& gpu) {
  constexpr int kPassAsK = 640;
  constexpr double kLeastUtilizationOfGradient = 0.9;

  const double utilization = wave_utilization(product, gpu);
  if (product.is_forward) {
    const double torch_time = product.k + kPassAsK;
    return product.k <= utilization * torch_time;
  }
  return product.m * product.n >= kLeastHalfGradient && utilization >= kLeastUtilizationOfGradient;
}

// Returns whether the path sm90 wins by gemm_one_product.
inline bool sm90_one_product_wins(const Product& product, const Gpu& gpu) {
  if (product.k < kLeastKOfOneProduct) return false;
  if (product.is_float32()) return sm90_one_product_wins_float32(product, gpu);
  return sm90_one_product_wins_half(product, gpu);
}

// Returns whether the path sm80 wins. The limits follow from the rates of an A100, and were not
// measured.
inline bool sm80_wins(const Product& product) {
  constexpr int kLeastResult = 1 << 22;  // M * N
  constexpr int kLeastK = 1024;
  return product.m * product.n >= kLeastResult && product.k >= kLeastK;
}

// Returns the path to try on a GPU of compute capability 9.0.
inline Path choose_path_on_hopper(const Product& product, const Gpu& gpu) {
  const bool may_be_skinny =
      product.is_float32() && product.is_forward && product.weight_has_vector_rows;
  if (may_be_skinny && skinny_wins(product, gpu)) return Path::kSkinny;
  const bool sm90_wins =
      product.is_highest() ? sm90_fp16x3_wins(product) : sm90_one_product_wins(product, gpu);
  return sm90_wins ? Path::kSm90 : Path::kTorch;
}

// Returns the path to try. The caller still asks the kernel whether it supports the operands.
inline Path choose_path(const Product& product, const Gpu& gpu) {
  if (product.dtype == DType::kFloat64) return Path::kTorch;
  if (gpu.capability == 90) return choose_path_on_hopper(product, gpu);
  if (gpu.capability == 80 && product.is_highest() && sm80_wins(product)) return Path::kSm80;
  return Path::kTorch;
}

}  // namespace kernels
