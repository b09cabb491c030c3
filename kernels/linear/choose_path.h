// How a product on a GPU is computed, x being [m, k] and weight [n, k]. Free of torch and CUDA.
//
//   kSkinny  skinny.cu, without tensor cores: few rows of float32, products with ReLU
//   kSm90    sm90/launch.cu (wgmma)
//   kSm80    sm80/launch.cu (mma.sync), for capability 8.0 alone. Never run on such a GPU: its
//            limits follow from the GPU's arithmetic rates, and tests run its kernels on others
//   kTorch   torch's product, then linear_epilogue in place
//
// The limits are where a path began to win on an H200 (docs/EXPERIMENTS.md has what they replaced).
// Gradients are products without ReLU.

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

// The least k at `highest` whose errors and times were measured.
constexpr int64_t kLeastK = 16;

// Elements of a result that half types and one product of float32 need to win.
constexpr int64_t kLargeResult = int64_t{1} << 22;

// The share that the result fills of the waves of tiles that it is made in.
inline double fill(const LinearArguments& linear, const Gpu& gpu) {
  const int64_t tiles = (linear.m + 255) / 256 * ((linear.n + 255) / 256);
  const int64_t pairs = gpu.multiprocessors / 2, waves = (tiles + pairs - 1) / pairs;
  return static_cast<double>(linear.m) * linear.n / (waves * pairs * 256 * 256);
}

inline bool is_skinny(const LinearArguments& linear, const Gpu& gpu) {
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
inline bool fp16x3_gains(const LinearArguments& linear, bool has_vectors) {
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

// Whether one product of float32 takes less time than torch's TF32. A transposed x is copied first,
// which few features do not pay for.
inline bool single_gains(const LinearArguments& linear) {
  const int64_t least = int64_t{linear.relu ? 5 : 10} << 30;
  return linear.m > 512 && (linear.n - 768) * linear.m >= least / linear.k &&
         (!linear.x_is_transposed || linear.n >= 2048);
}

// The path to try for `linear`, of which dtype, precision, relu, m, n, k and x_is_transposed are
// set. has_vectors: whether the weight can be read as it is, by 16-byte vectors.
inline Path choose_path(const LinearArguments& linear, const Gpu& gpu, bool has_vectors) {
  const int64_t k = linear.k;
  const bool is_float32 = linear.dtype == DType::kFloat32, is_hopper = gpu.capability == 90;
  const bool is_large = linear.m * linear.n >= kLargeResult;
  if (linear.dtype == DType::kFloat64) return Path::kTorch;
  if (is_hopper && is_float32 && linear.relu && has_vectors && is_skinny(linear, gpu)) {
    return Path::kSkinny;
  }
  if (is_float32 && linear.precision == Precision::kHighest) {
    if (is_hopper && fp16x3_gains(linear, has_vectors)) return Path::kSm90;
    return gpu.capability == 80 && is_large && k >= 1024 ? Path::kSm80 : Path::kTorch;
  }
  if (!is_hopper || !is_large || k < (is_float32 || linear.relu ? 1024 : 256)) return Path::kTorch;
  const bool gains =
      is_float32 ? single_gains(linear) && fill(linear, gpu) >= 0.6 : fill(linear, gpu) >= 0.9;
  return gains ? Path::kSm90 : Path::kTorch;
}

}  // namespace kernels
