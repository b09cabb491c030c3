// The floating dtypes on a CPU: a struct for each, which converts elements, as the integers that
// hold their bits, to and from the type that arithmetic is done in. The conversions have no
// branches around floating-point operations, so that compilers turn loops of them into vector
// instructions.

#pragma once

#include <cstdint>

#include "launchers.h"

namespace kernels {
namespace {

// ------------------------------------------------------------------ selections without branches

// All bits 1 if the condition holds, else 0. x & ones_if(condition) selects without ?:, which
// compilers may turn into a branch.
template <typename Bits>
constexpr Bits ones_if(bool condition) {
  return static_cast<Bits>(-static_cast<Bits>(condition));
}

constexpr int32_t select_if(bool condition, int32_t if_true, int32_t if_false) {
  return if_false ^ ((if_true ^ if_false) & ones_if<int32_t>(condition));
}

// ------------------------------------------------------------------------------- the dtypes
//
// Each dtype is a struct with
//
//   Bits     the unsigned integer that holds the bits of an element
//   Compute  the type that arithmetic is done in: double for float64, float for all else
//   widen    the value of an element
//   narrow   the nearest element to a value, ties to even

// float32 and float64, which need no conversion.
template <typename C, typename B>
struct Native {
  using Bits = B;
  using Compute = C;
  static constexpr Compute widen(Bits x) { return __builtin_bit_cast(Compute, x); }
  static constexpr Bits narrow(Compute x) { return __builtin_bit_cast(Bits, x); }
};
using Float64 = Native<double, uint64_t>;
using Float32 = Native<float, uint32_t>;

// bfloat16 is the upper half of a float32.
struct BFloat16 {
  using Bits = uint16_t;
  using Compute = float;

  static constexpr float widen(uint16_t x) { return Float32::widen(uint32_t{x} << 16); }

  static constexpr uint16_t narrow(float x) {
    constexpr uint32_t kInfinity = 0x7f800000;
    constexpr uint16_t kNan = 0x7fc0;
    const uint32_t bits = Float32::narrow(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    // The sum carries into the upper half where the lower half, which is dropped, has to be rounded
    // up. A lower half of 0x8000 is a tie: it carries only with a last_bit of 1, so the upper half
    // becomes even.
    const uint32_t last_bit = bits >> 16 & 1;
    const uint32_t rounded = (bits + 0x7fff + last_bit) >> 16;
    return static_cast<uint16_t>(magnitude > kInfinity ? kNan : rounded);
  }
};

// float16, for CPUs of any kind. The conversions have the results of F16C's instructions, but widen
// keeps a signalling NaN, which F16C makes quiet.
//
//               sign   exponent (bias)   mantissa
//     float16      1      5  ( 15)             10
//     float32      1      8  (127)             23
//
// A normal number keeps its mantissa, and its exponent field changes by 112, the difference of the
// biases. Example: 1.5 is 0x3e00 in float16 and 0x3fc00000 in float32.
//
//     (0x3e00 << 13) + (112 << 23) = 0x07c00000 + 0x38000000 = 0x3fc00000
//
// A subnormal number is a multiple of 2^-24, which is also the distance between neighbouring floats
// from 0.5 to 1. So the last bits of 0.5 + x are the mantissa of x. Example: x = 3 * 2^-24 is
// 0x0003 in float16. In float32, 0.5 is 0x3f000000, and 0.5 + x is 0x3f000003.
//
// widen and narrow compute both cases, and then select one.
struct Float16 {
  using Bits = uint16_t;
  using Compute = float;

  static constexpr int32_t kBiasDifference = 112 << 23;  // in the exponent field of a float32
  static constexpr int32_t kOneHalf = 0x3f000000;        // 0.5f
  static constexpr int32_t kInfinity = 0x7c00;           // in float16

  static constexpr float widen(uint16_t x) {
    constexpr int32_t kLeastNormal = 0x0400;
    const int32_t magnitude = x & 0x7fff;
    const int32_t subnormal = Float32::narrow(Float32::widen(kOneHalf + magnitude) - 0.5f);
    // Infinity and NaN have the exponent field 31, which becomes 255 = 31 + 2 * 112.
    const bool is_finite = magnitude < kInfinity;
    const int32_t added = select_if(is_finite, kBiasDifference, 2 * kBiasDifference);
    const int32_t normal = (magnitude << 13) + added;
    const int32_t result = select_if(magnitude < kLeastNormal, subnormal, normal);
    const uint32_t sign = uint32_t{x & 0x8000u} << 16;
    return Float32::widen(result | sign);
  }

  static constexpr uint16_t narrow(float x) {
    constexpr int32_t kLeastNormal = 113 << 23;  // 2^-14
    constexpr int32_t kTooLarge = 143 << 23;  // 2^16; from 65520 on, rounding gives infinity's bits
    constexpr int32_t kInfinityOfFloat32 = 0x7f800000;
    const uint32_t bits = Float32::narrow(x);
    const int32_t magnitude = bits & 0x7fffffff;
    // The sum of two floats is rounded to nearest, so its last bits are the rounded mantissa.
    const int32_t subnormal = Float32::narrow(Float32::widen(magnitude) + 0.5f) - kOneHalf;
    // Rounded as in BFloat16::narrow, with 13 dropped bits.
    const int32_t last_bit = magnitude >> 13 & 1;
    const int32_t normal = (magnitude - kBiasDifference + 0xfff + last_bit) >> 13;
    const int32_t finite = select_if(magnitude < kLeastNormal, subnormal, normal);
    const int32_t finite_or_infinity = select_if(magnitude < kTooLarge, finite, kInfinity);
    // A NaN is infinity with a mantissa: the quiet bit, and the upper bits of the payload.
    const int32_t nan_mantissa = 0x200 | (magnitude >> 13 & 0x3ff);
    const bool is_nan = magnitude > kInfinityOfFloat32;
    const int32_t mantissa_if_nan = nan_mantissa & ones_if<int32_t>(is_nan);
    const int32_t sign = bits >> 16 & 0x8000;
    return static_cast<uint16_t>(finite_or_infinity | mantissa_if_nan | sign);
  }
};

// The examples above.
static_assert(Float16::widen(0x3e00) == 1.5f && Float16::narrow(1.5f) == 0x3e00);
static_assert(Float16::widen(3) == 3 * 0x1p-24f && Float16::narrow(3 * 0x1p-24f) == 3);
static_assert(Float32::narrow(0.5f) == Float16::kOneHalf &&
              Float32::narrow(0.5f + 3 * 0x1p-24f) == 0x3f000003);
// Ties are rounded to an even mantissa.
static_assert(Float16::narrow(0x1.8p-24f) == 2);
static_assert(Float16::narrow(0x1p-25f) == 0);
// The largest number, and the least float that becomes infinity.
static_assert(Float16::narrow(65504.0f) == 0x7bff && Float16::narrow(65520.0f) == 0x7c00);

// Calls body with an object of the dtype's struct. Example:
//   dispatch_dtype(dtype, [=](auto element) { using E = decltype(element); ... });
template <typename Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Float32{});
    case DType::kFloat64:
      return body(Float64{});
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBFloat16:
      return body(BFloat16{});
  }
}

}  // namespace
}  // namespace kernels
