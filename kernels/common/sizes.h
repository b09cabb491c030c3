// Sizes and their arithmetic, for code on the host and on a GPU.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KERNELS_HOST_DEVICE __host__ __device__
#else
#define KERNELS_HOST_DEVICE
#endif

namespace kernels {

// The bytes that a thread of a GPU kernel loads or stores at a time, if it can: a vector.
constexpr int kVectorBytes = 16;

// a / b, rounded up to a whole number, for a >= 0 and b > 0. It is also 0 for -b < a < 0.
KERNELS_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static_assert(divide_up(-7, 8) == 0, "a is negative, but above -b");

// Returns the bytes of `bits` bits of a mask. Size is any type of integer, or torch's SymInt.
template <typename Size>
KERNELS_HOST_DEVICE constexpr Size bytes_of_bits(Size bits) {
  return (bits + 7) / 8;
}

}  // namespace kernels
