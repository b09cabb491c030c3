// How ReLU compares an element with zero: by its bits, so that one kernel serves all dtypes of a
// width. For kernels on GPUs and CPUs.

#ifndef KERNELS_RELU_ORDER_H_
#define KERNELS_RELU_ORDER_H_

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
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    default:
      return 8;
  }
}

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
  const auto minus_infinity = [](uint64_t infinity) {
    return Order<Bits>{1, static_cast<Signed>(kLeast + static_cast<Signed>(infinity))};
  };
  switch (dtype) {
    case DType::kFloat32:
      return minus_infinity(0x7f800000);
    case DType::kFloat64:
      return minus_infinity(0x7ff0000000000000);
    case DType::kFloat16:
      return minus_infinity(0x7c00);
    case DType::kBFloat16:
      return minus_infinity(0x7f80);
    case DType::kUInt8:
      return {0, kLeast};  // none is negative
    default:
      return {0, 0};
  }
}

// Returns what body makes of the order of a floating dtype's bits.
template <typename Body>
auto for_floating_bits(DType dtype, const Body& body) {
  switch (size_of(dtype)) {
    case 2:
      return body(order_of<uint16_t>(dtype));
    case 4:
      return body(order_of<uint32_t>(dtype));
    default:
      return body(order_of<uint64_t>(dtype));
  }
}

// The same for every dtype.
template <typename Body>
auto for_bits(DType dtype, const Body& body) {
  if (size_of(dtype) == 1) return body(order_of<uint8_t>(dtype));
  return for_floating_bits(dtype, body);
}

}  // namespace kernels

#endif  // KERNELS_RELU_ORDER_H_
