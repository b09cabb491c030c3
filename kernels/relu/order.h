// How ReLU compares an element with zero: by its bits, so that one kernel serves all dtypes of a
// width. For kernels on GPUs and CPUs.

#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "launchers.h"

#ifdef __CUDACC__
#define KERNELS_HOST_DEVICE __host__ __device__
#else
#define KERNELS_HOST_DEVICE
#endif

namespace kernels {

constexpr int size_of(DType dtype) {
  constexpr int kSizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1};  // in the order of DType
  return kSizes[static_cast<int>(dtype)];
}
static_assert(size_of(DType::kBFloat16) == 2 && size_of(DType::kUInt8) == 1, "as DType has them");

// The bits of floats as signed integers: -0 is the least, then come the negative numbers down to
// -inf, the negative NaNs, and from 0 on the positive numbers. Integer comparison ignores
// torch.set_flush_denormal. It is signed, because SSE and AVX2 have no other: 45 instead of 70 ps
// an element of float32 in L1.
template <typename Bits>
struct Order {
  using Signed = std::make_signed_t<Bits>;
  Bits offset;
  Signed limit;  // of floats: -inf

  // x < 0, false for NaN and for -0, which ReLU therefore keeps as they are: -0 - 1 is the largest.
  KERNELS_HOST_DEVICE bool is_negative(Bits x) const {
    return static_cast<Signed>(static_cast<Bits>(x - offset)) < limit;
  }
  KERNELS_HOST_DEVICE Bits relu(Bits x) const { return is_negative(x) ? Bits{0} : x; }
  // For floats !(x <= 0), true for NaN, as torch lets the gradient through there.
  KERNELS_HOST_DEVICE bool keeps_gradient(Bits x) const {
    return static_cast<Signed>(x) > limit && x != 0;
  }
};

template <typename Bits>
constexpr Order<Bits> order_of(DType dtype) {
  using Signed = typename Order<Bits>::Signed;
  constexpr Signed kLeast = std::numeric_limits<Signed>::min();
  const uint64_t infinity = dtype == DType::kFloat32    ? 0x7f800000
                            : dtype == DType::kFloat64  ? 0x7ff0000000000000
                            : dtype == DType::kFloat16  ? 0x7c00
                            : dtype == DType::kBFloat16 ? 0x7f80
                                                        : 0;
  if (infinity != 0) return {1, static_cast<Signed>(kLeast + static_cast<Signed>(infinity))};
  return {0, dtype == DType::kUInt8 ? kLeast : Signed{0}};  // no uint8 is negative
}

// Returns what body makes of the order of a floating dtype's bits.
template <typename Body>
auto for_floating_bits(DType dtype, const Body& body) {
  const int size = size_of(dtype);
  if (size == 2) return body(order_of<uint16_t>(dtype));
  if (size == 4) return body(order_of<uint32_t>(dtype));
  return body(order_of<uint64_t>(dtype));
}

// The same for every dtype.
template <typename Body>
auto for_bits(DType dtype, const Body& body) {
  if (size_of(dtype) == 1) return body(order_of<uint8_t>(dtype));
  return for_floating_bits(dtype, body);
}

}  // namespace kernels
