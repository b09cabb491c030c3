// How a product on a GPU is computed, x being [m, k] and weight [n, k]. Free of torch and CUDA.
//
// The first line that fits chooses. The limits are where the path began to win on an H200
// (docs/EXPERIMENTS.md has what they replaced).
//
//   dtype              GPU          where                                     path
//   float32            9.0          m <= 8; t <= 4 or k >= 512                kSkinny
//   float32, highest   9.0          m <= 16, k >= 256; t <= 2 or k >= 512     kSkinny
//                                   m > 16, t <= 1, k >= 16, n >= 8;          kSkinny
//                                   m k max(n, 32) <= 2^28
//                                   m > 16, t <= 2, k >= 256, n >= 8;         kSkinny
//                                   m k n <= 2^27, or n < 32 and m k <= 2^23
//                                   m > 16, k >= 16, n > 64, n n k >= 2^24,   kSm90
//                                   (m n + 2^17) k >= 2^28;
//                                   n > 128 or k < 2^15;
//                                   k >= 64, n % 4 == 0 or n n k >= 2^27
//                      8.0, 10.0    m n >= 2^22, k >= 1024                    kSm80
//   float32, high      9.0          m > 512, m n >= 2^22, k >= 1024,          kSm90
//                                   m k (n - 768) >= 5 * 2^30, fill 0.6
//   float16, bfloat16  9.0          m n >= 2^22, k >= 1024 (256 in            kSm90
//                                   gradients), fill 0.9
//   all else                                                                  kTorch
//
//   kSkinny       the kernel of skinny.cu, without tensor cores: for products with ReLU, of
//                 weights whose rows begin at multiples of 16 bytes. t is how many of its tiles,
//                 16 rows by 32 features, a multiprocessor has
//   kSm90, kSm80  the kernels of sm90/launch.cu (wgmma) and sm80/launch.cu (mma.sync). The fill is
//                 what the result takes of sm90/launch.cu's rounds of tiles of 256 x 256, one for
//                 each pair of multiprocessors
//   kTorch        torch's product, then linear_epilogue in place. It wins where half types' result
//                 is small, and where float32's sums are short and few, or features few. GPUs
//                 between, whose tensor cores add float16 products in float32 at half their rate,
//                 would not gain from three products
//
// cuBLASLt could add the bias and apply ReLU in its product (at::_addmm_activation, with the
// division in the scale). It is no path: its ReLU makes 0 of NaN.
//
// kSm90 reads operands with adjacent rows as it reads those with adjacent columns, but at `highest`
// the weight, and an x of few rows or many elements. All others copy what has no adjacent columns.
//
// The products of the gradients are chosen by the same table, in half types where both operands can
// be read where they are. In float32 what is gained has to pay for copies: at `highest` they need
// k >= 64, n k >= 2^17 and m n >= 150 m + 100 n + 2^29 / (k - 40), at `high` 10 * 2^30. An output
// at `highest` whose weight is copied needs m > 64, m n >= 2^16, n n k >= 2^26 and (m n + 2^17) k
// >= 2^30. Gradients that are differentiated again are torch's.

#pragma once

#include <algorithm>
#include <cstdint>

#include "launchers.h"

namespace kernels {

enum class Path { kSkinny, kSm90, kSm80, kTorch };

struct Gpu {
  int capability;  // 10 times the major number, plus the minor one
  int multiprocessors;
};

// At `highest` a transposed x is split where it lies if it has so many rows and so few elements. A
// copy takes longer, but results that infinity or NaN decides are made from rows of x, as often as
// there are tiles along n.
constexpr int64_t kManyRows = 8192, kSmallOperand = int64_t{1} << 23;

// The least k at `highest` whose errors and times were measured.
constexpr int64_t kLeastK = 16;

// Elements of a result that half types and one product of float32 need to win.
constexpr int64_t kLargeResult = int64_t{1} << 22;

// The share that the result fills of the rounds of tiles that it is made in.
inline double fill(const Linear& linear, const Gpu& gpu) {
  const int64_t tiles = (linear.m + 255) / 256 * ((linear.n + 255) / 256);
  const int64_t pairs = gpu.multiprocessors / 2, rounds = (tiles + pairs - 1) / pairs;
  return static_cast<double>(linear.m) * linear.n / (rounds * pairs * 256 * 256);
}

inline bool is_skinny(const Linear& linear, const Gpu& gpu) {
  const int64_t m = linear.m, n = linear.n, k = linear.k;
  const int64_t tiles = (m + 15) / 16 * ((n + 31) / 32), sms = gpu.multiprocessors;
  if (m <= 8) return tiles <= 4 * sms || k >= 512;
  if (linear.precision != Precision::kHighest) return false;
  if (m <= 16) return k >= 256 && (tiles <= 2 * sms || k >= 512);
  if (n < 8 || tiles > 2 * sms) return false;
  const bool has_one_each = tiles <= sms;
  const int64_t most = has_one_each || n < 32 ? 1 << 28 : 1 << 27;
  return k >= (has_one_each ? kLeastK : 256) && m * std::max<int64_t>(n, 32) * k <= most;
}

// Whether three products of kSm90 take less time than torch's.
inline bool gains_by_split(const Linear& linear, bool has_vectors) {
  const double m = linear.m, n = linear.n, k = linear.k;
  if (k < kLeastK) return false;
  if (!linear.relu) {
    return k >= 64 && n * k >= 1 << 17 && m * n >= 150 * m + 100 * n + (1 << 29) / (k - 40);
  }
  if (m <= 16 || n <= 64 || (n <= 128 && k >= 1 << 15)) return false;
  const double weight = n * n * k, all = (m * n + (1 << 17)) * k;
  // Rows of the output that are not aligned take as long to store as short sums to compute.
  if (k < 64 && linear.n % 4 != 0 && weight < 1 << 27) return false;
  if (has_vectors) return weight >= 1 << 24 && all >= 1 << 28;
  return m > 64 && m * n >= 1 << 16 && weight >= 1 << 26 && all >= 1 << 30;
}

// Whether kSm90 reads a transposed x, or else a copy.
inline bool reads_transposed_x(const Linear& linear) {
  return linear.precision == Precision::kHigh ||
         (linear.m >= kManyRows && linear.m * linear.k <= kSmallOperand);
}

// The path to try for `linear`, of which dtype, precision, relu, m, n and k are set. has_vectors:
// whether the weight can be read as it is, by 16-byte vectors.
inline Path choose_path(const Linear& linear, const Gpu& gpu, bool has_vectors) {
  const int64_t size = linear.m * linear.n, k = linear.k;
  const bool is_float32 = linear.dtype == DType::kFloat32;
  const bool is_hopper = gpu.capability == 90;
  if (is_hopper && is_float32 && linear.relu && has_vectors && is_skinny(linear, gpu)) {
    return Path::kSkinny;
  }
  if (linear.dtype == DType::kFloat64) return Path::kTorch;
  if (is_float32 && linear.precision == Precision::kHighest) {
    const bool is_sm80s =
        (gpu.capability == 80 || gpu.capability == 100) && size >= kLargeResult && k >= 1024;
    if (is_hopper && gains_by_split(linear, has_vectors)) return Path::kSm90;
    return is_sm80s ? Path::kSm80 : Path::kTorch;
  }
  if (k < (is_float32 || linear.relu ? 1024 : 256)) return Path::kTorch;
  const int64_t least = int64_t{linear.relu ? 5 : 10} << 30;
  const bool pays = linear.m > 512 && (linear.n - 768) * linear.m >= least / k;
  const bool is_large = size >= kLargeResult && (!is_float32 || pays);
  const bool is_sm90s = is_hopper && is_large && fill(linear, gpu) >= (is_float32 ? 0.6 : 0.9);
  return is_sm90s ? Path::kSm90 : Path::kTorch;
}

}  // namespace kernels
