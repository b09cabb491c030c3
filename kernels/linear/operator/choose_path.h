// Chooses the kernel that multiplies on a GPU: a function from the sizes of a product to a Path.
//
//   out [M, N] = x [M, K] times weight [N, K] transposed
//
// The products are forwards (with ReLU) and the gradients of x and of weight (without ReLU).
// docs/DESIGN.md, "Which path a product takes", says which kernels each GPU has.
//
// This file, and those that it includes, must include neither torch nor CUDA, because
// problems/benchmark/paths/print_paths.cpp is compiled without them.
//
// A path *wins* if it is estimated to take less time than the path torch. Each function `..._wins`
// makes this estimate by a few limits, its constants. Most formulas are fits to measured times, and
// not models of a kernel.
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
  // skinny.cu: float32 forwards without tensor cores, for few rows of x and for small results.
  kSkinny,
  // linear_sm90.cu, for compute capability 9.0: two kernels by wgmma. gemm_fp16x3 adds three fp16
  // products for float32 at `highest`, and gemm_one_product computes all other products.
  kSm90,
  // linear_sm80.cu: fp16x3 by mma.sync. It is chosen on compute capability 8.0 alone, but never ran
  // on such a GPU. Tests run it on Hopper.
  kSm80,
  // torch's product, then, in a forward, the fused pass in place.
  kTorch,
};

constexpr Path kAllPaths[] = {Path::kSkinny, Path::kSm90, Path::kSm80, Path::kTorch};

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

struct Product {
  DType dtype;
  Precision precision;  // kOfDtype for half types, so never kHighest
  bool is_forward;      // false for a gradient
  int64_t m, n, k;      // x [m, k], weight [n, k], out [m, n]
  // x is column-major but not row-major. In float32 it is copied first.
  bool x_is_transposed;
  // The weight is row-major, and its rows can be read by 16-byte vectors. The path sm90 copies any
  // other weight first, or reads it as its transpose. The path skinny is not chosen for it.
  bool weight_has_vector_rows;

  bool is_float32() const { return dtype == DType::kFloat32; }
  bool is_highest() const { return precision == Precision::kHighest; }
};

// The least K for which each of these kernels may be chosen. With shorter K, hardly a product was
// measured: in the benchmark `path-grid`, which checks the limits of this file, the forwards at
// `highest` begin with K = 16, and those at other precisions with K = 256.
constexpr int64_t kLeastKAtHighest = 16;      // fp16x3; skinny from 17 rows of x on
constexpr int64_t kLeastKOfOneProduct = 256;  // gemm_one_product

// The smallest M * N of a gradient in half types that gemm_one_product computes.
constexpr int64_t kLeastHalfGradient = int64_t{3} << 22;

// Returns how full the result's waves of tiles are in gemm_one_product, from 0 to 1. A cluster of
// two multiprocessors computes a tile of 256 x 256, and a wave is one tile for each cluster.
//
// Example: an H200 has 132 multiprocessors, so 66 clusters. A result [1024, 4608] has 4 * 18 = 72
// tiles, which need two waves with room for 132 tiles, so the utilization is 72 / 132 = 0.55.
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
// not empty: if the product keeps to all limits of a line of the table. The tiles of the
// tensor-core kernels would consist mostly of padding if there are few rows, and would be few if
// the result is small.
//
// Example: an H200 has 132 multiprocessors. For x with 16 rows and a weight with 8192, out has 256
// tiles of 16 x 32, which are 1.94 for each multiprocessor. So skinny wins at `highest` if K is at
// least 256, by the third line.
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
  // rows, and still holds all rows.)
  constexpr int kTileRows = 16;
  constexpr int kTileColumns = 32;
  const int64_t all_tiles = divide_up(product.m, kTileRows) * divide_up(product.n, kTileColumns);
  const double tiles = static_cast<double>(all_tiles) / gpu.multiprocessors;
  // If out has fewer than 32 columns, its tiles take as long as full ones.
  const double columns = std::max<int64_t>(product.n, kTileColumns);
  const double multiplications = product.m * columns * product.k;
  return std::any_of(std::begin(kTable), std::end(kTable), [&](const SkinnyLimits& limits) {
    return product.m >= limits.least_m && product.m <= limits.most_m &&
           tiles <= limits.most_tiles && product.k >= limits.least_k &&
           multiplications <= limits.most_multiplications &&
           (limits.is_for_high || product.is_highest());
  });
}

// The path sm90 wins for a gradient at `highest` if K >= 64, N K >= 2^17 and
//
//   M N >= 150 M + 100 N + 2^29 / (K - 40)
//
// This fit leaves results with few columns or few rows to torch, and small results with a short K.
// Products just beside the limit:
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

// The path sm90 wins for a forward at `highest` if M > 16, N > 64 and
//
//   (M (N - 112) + 2^17) K >= 3 * 2^26 = 201.3 million    weight with vector rows
//    M (N - 112)         K >= 2^29     = 536.9 million    any other weight, which is copied first
//
// In this fit, the left sides are near M N K; 112 makes them fit narrow results, and 2^17 small
// results with a long K. Products just beside the limits:
//
//      M      N     K   weight        left side, in millions   path
//
//    512   1024   352   vector rows   210.5                    sm90
//    512   1024   320   vector rows   191.4                    torch
//   1024   1024   606   other         565.9                    sm90
//   1024   1024   574   other         536.1                    torch
inline bool sm90_fp16x3_forward_wins(const Product& product) {
  constexpr int kTooFewRows = 16;     // skinny.cu or torch is faster
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

inline bool sm90_fp16x3_wins(const Product& product) {
  if (product.k < kLeastKAtHighest) return false;
  return product.is_forward ? sm90_fp16x3_forward_wins(product)
                            : sm90_fp16x3_gradient_wins(product);
}

// The times of a float32 product at `high`, in fp16 multiplications of tensor cores:
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

// The times of a forward in half types. The unit is the time of full waves for one element of K,
// and torch's waves are counted as full:
//
//   torch   K + 640             the product, and the fused pass, which takes 640 units
//   ours    K / utilization     no pass, but a part of the last wave may be empty
//
// Example: with K = 4096 ours is shorter from a utilization of 4096 / 4736 = 0.865 on.
//
// A gradient has no pass to save: our kernel wins if the result is large and fills its waves.
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

inline bool sm90_one_product_wins(const Product& product, const Gpu& gpu) {
  if (product.k < kLeastKOfOneProduct) return false;
  if (product.is_float32()) return sm90_one_product_wins_float32(product, gpu);
  return sm90_one_product_wins_half(product, gpu);
}

inline bool sm80_wins(const Product& product) {
  constexpr int kLeastResult = 1 << 22;  // M * N
  constexpr int kLeastK = 1024;
  return product.m * product.n >= kLeastResult && product.k >= kLeastK;
}

inline Path choose_path_on_hopper(const Product& product, const Gpu& gpu) {
  const bool may_be_skinny =
      product.is_float32() && product.is_forward && product.weight_has_vector_rows;
  if (may_be_skinny && skinny_wins(product, gpu)) return Path::kSkinny;
  const bool sm90_wins =
      product.is_highest() ? sm90_fp16x3_wins(product) : sm90_one_product_wins(product, gpu);
  return sm90_wins ? Path::kSm90 : Path::kTorch;
}

// Returns the path of a product. The caller still asks the kernel whether it supports the operands.
inline Path choose_path(const Product& product, const Gpu& gpu) {
  if (product.dtype == DType::kFloat64) return Path::kTorch;
  if (gpu.capability == 90) return choose_path_on_hopper(product, gpu);
  if (gpu.capability == 80 && product.is_highest() && sm80_wins(product)) return Path::kSm80;
  return Path::kTorch;
}

}  // namespace kernels
