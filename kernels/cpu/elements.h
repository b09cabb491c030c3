// Elements of the floating dtypes on a CPU, and what the kernels do to 64 of them at a time: ReLU,
// making a mask, and selecting by a mask.
//
// The functions of a block are plain loops that compilers turn into vector instructions. Elements
// are handled as the integers that hold their bits. Integer operations keep the payload of a NaN,
// and torch.set_flush_denormal does not affect them.
//
// relu/relu_cpu.cpp and linear/fused_pass/fused_pass_cpu.cpp use these.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/map_blocks.h"  // kBlock, the 64 elements of a block; also the header of __m128i
#include "launchers.h"

namespace kernels {
namespace {

// ------------------------------------------------------------------------------- the dtypes
//
// Each dtype is a struct with
//
//   Bits     the unsigned integer that holds the bits of an element
//   Compute  the type that arithmetic is done in: double for float64, float for all else
//   widen    the value of an element
//   narrow   the nearest element to a value, ties to even

// float32 and float64: the machine computes with the numbers in memory, without a conversion.
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
    // The sum carries into the upper half where the lower half has to be rounded up, and the lower
    // half is then dropped. A lower half of 0x8000 is a tie: it carries only with a last_bit of 1,
    // so the upper half becomes even.
    const uint32_t last_bit = bits >> 16 & 1;
    const uint32_t rounded = (bits + 0x7fff + last_bit) >> 16;
    return static_cast<uint16_t>(magnitude > kInfinity ? kNan : rounded);
  }
};

// float16, for CPUs of any kind: the conversions compute in integers and one floating-point sum,
// and have the results of F16C's instructions.
//
//               sign   exponent (bias)   mantissa
//     float16      1      5  ( 15)             10
//     float32      1      8  (127)             23
//
// A normal number that needs no rounding could be converted by a shift and by 112, the difference
// of the biases. Rounding and subnormal numbers are left to one floating-point operation with a
// power of two, `anchor`. From anchor on, float32 has the spacing (the distance of two neighbours)
// that float16 has at the number x. Spacing and anchor follow from e: the exponent field of x as a
// float16, less 1, or 0 if x is subnormal.
//
//     |x|                             e     spacing of float16, 2^(e - 24)     anchor, 2^(e - 1)
//     0 to 2^-13, also subnormal      0     2^-24                              2^-1
//     2^-13 to 2^-12                  1     2^-23                              2^0
//     1 to 2                         14     2^-10                              2^13
//     2^15 to 2^16                   29     2^5                                2^28
//
//     narrow   adds anchor to |x|, which rounds |x| to a multiple of the spacing
//     widen    puts the mantissa into the last bits of anchor, and subtracts anchor, which
//              normalizes |x|
//
// Example: 1.5, which is 0x3e00 in float16 (exponent 15) and 0x3fc00000 in float32 (exponent 127).
//
//     widen(0x3e00)                                narrow(1.5f)
//     exponent_at_10    15 << 10 = 0x3c00          exponent_at_23   127 << 23
//     e_at_10           14 << 10 = 0x3800          e_at_23          (127 - 113) << 23 = 14 << 23
//     anchor            the bits of 2^13           anchor           the bits of 2^13
//     mantissa          0x3e00 - 0x3800 = 0x600    sum              2^13 + 1.5
//     anchor_and_x      the bits of 2^13 + 1.5     mantissa         bits of sum - anchor = 0x600
//     value             1.5                        rounded          0x600 + 0x3800 = 0x3e00
//
// The mantissa of both, 0x600, has the leading 1 of normal numbers. It is 1536, and 1.5 is 1536
// times the spacing, 2^-10.
struct Float16 {
  using Bits = uint16_t;
  using Compute = float;

  // A number `..._at_10` or `...At23` is shifted left by that many bits: by 10, to the place of the
  // exponent in a float16, or by 23, to that in a float32.

  // Returns the bits of the float32 2^(e - 1). Its exponent is e - 1 + 127.
  static constexpr int32_t anchor_bits(int32_t e_at_23) { return e_at_23 + (126 << 23); }

  // Returns value where x > 0, else 0: the shift gives 0 for x > 0, else all ones. GCC turns ?: and
  // std::max into branches around the floating-point sum, and then makes no vectors.
  static constexpr int32_t if_positive(int32_t x, int32_t value) {
    return value & ~((x - 1) >> 31);
  }

  // Returns x where x > 0, else 0.
  static constexpr int32_t positive_part(int32_t x) { return if_positive(x, x); }

  static constexpr float widen(uint16_t x) {
    constexpr int32_t kMostFinite = 0x7bff;
    constexpr int32_t kBiasDifferenceAt23 = 112 << 23;
    const int32_t magnitude = x & 0x7fff;
    const int32_t exponent_at_10 = magnitude & 0x7c00;
    const int32_t e_at_10 = positive_part(exponent_at_10 - (1 << 10));
    const int32_t e_at_23 = e_at_10 << 13;
    const int32_t anchor = anchor_bits(e_at_23);
    // The exponent of a normal number is e + 1. Without e, the 1 remains above the ten bits of the
    // mantissa: its leading 1.
    const int32_t mantissa = magnitude - e_at_10;
    // The mantissa's unit is the spacing, and so is the unit of anchor's last bit.
    const int32_t anchor_and_x = anchor + mantissa;
    const float value = Float32::widen(anchor_and_x) - Float32::widen(anchor);
    // Infinity and NaN, with the exponent 31, were converted as numbers from 2^16 on, whose
    // exponent in float32 is 16 + 127 = 143. Another 112 makes it 255, that of infinity and NaN.
    const int32_t added_exponent_at_23 = if_positive(magnitude - kMostFinite, kBiasDifferenceAt23);
    const uint32_t sign = uint32_t{x & 0x8000u} << 16;
    return Float32::widen((Float32::narrow(value) + added_exponent_at_23) | sign);
  }

  static constexpr uint16_t narrow(float x) {
    constexpr int32_t kInfinity = 0x7f800000;
    constexpr int32_t kTooLarge = 143 << 23;  // 2^16, which rounds to infinity
    const uint32_t bits = Float32::narrow(x);
    const int32_t magnitude = bits & 0x7fffffff;
    const int32_t clamped = magnitude - positive_part(magnitude - kTooLarge);  // at most 2^16
    // The exponent 113 is that of 2^-14, the least normal float16, for which e is 0.
    const int32_t exponent_at_23 = clamped & 0x7f800000;
    const int32_t e_at_23 = positive_part(exponent_at_23 - (113 << 23));
    const int32_t e_at_10 = e_at_23 >> 13;
    const int32_t anchor = anchor_bits(e_at_23);
    const float sum = Float32::widen(clamped) + Float32::widen(anchor);
    // The rounded mantissa. Its unit is the spacing, as in widen.
    const int32_t mantissa = Float32::narrow(sum) - anchor;
    // The leading 1 of a normal number's mantissa and e add up to its exponent, e + 1.
    const int32_t rounded = mantissa + e_at_10;
    // For a NaN, the quiet bit and the upper bits of the payload.
    const int32_t nan = if_positive(magnitude - kInfinity, 0x200 | (magnitude >> 13 & 0x3ff));
    const int32_t sign = bits >> 16 & 0x8000;
    return static_cast<uint16_t>(rounded | nan | sign);
  }
};

// The example above.
static_assert(Float16::anchor_bits(14 << 23) == Float32::narrow(0x1p13f));
static_assert(Float32::narrow(0x1p13f) + 0x600 == Float32::narrow(0x1p13f + 1.5f));
static_assert(Float16::widen(0x3e00) == 1.5f);
static_assert(Float16::narrow(1.5f) == 0x3e00);
// The least subnormal number is 2^-24. Ties are rounded to an even mantissa.
static_assert(Float16::widen(1) == 0x1p-24f);
static_assert(Float16::narrow(0x1.8p-24f) == 2);
static_assert(Float16::narrow(0x1p-25f) == 0);

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

// ------------------------------------------------------------------- functions of a block

// All bits 1 if the condition holds, else 0. x & ones_if(condition) selects without ?:, which
// compilers turn into branches.
template <typename Bits>
constexpr Bits ones_if(bool condition) {
  return static_cast<Bits>(-static_cast<Bits>(condition));
}

// out = x < 0 ? 0 : x, which keeps NaN and -0.
//
// One comparison of signed integers, which SSE and AVX2 have, finds the negative numbers: x is
// negative if its bits less 1 are less than the bits of -inf. In float32, where -inf is 0xff800000:
//
//     x                    its bits                   less 1                     so x is
//     -2^-149 .. -inf      0x80000001 .. 0xff800000   0x80000000 .. 0xff7fffff   replaced by 0
//     NaN with a sign      0xff800001 .. 0xffffffff   0xff800000 .. 0xfffffffe   kept
//     0 .. inf, NaN        0x00000000 .. 0x7fffffff   -1 .. 0x7ffffffe           kept
//     -0                   0x80000000                 0x7fffffff                 kept
template <typename E, typename Bits = typename E::Bits>
void relu_block(const Bits* __restrict__ x, Bits* __restrict__ out) {
  using Signed = std::make_signed_t<Bits>;
  constexpr auto kInfinity = std::numeric_limits<typename E::Compute>::infinity();
  constexpr Signed kMinusInfinity = static_cast<Signed>(E::narrow(-kInfinity));
  for (int64_t i = 0; i < kBlock; ++i) {
    const Signed bits_less_1 = static_cast<Signed>(static_cast<Bits>(x[i] - 1));
    out[i] = x[i] & ones_if<Bits>(bits_less_1 >= kMinusInfinity);
  }
}

// A mask is made and tested in words that are as wide as an element. Example: an element of a half
// type has 16 bits, so a word has the mask bits of 16 elements. Each of these elements is in a lane
// of a vector register, and lane i handles bit i of the word, kBitOfLane[i] = 1 << i.
template <typename Word>
constexpr auto kBitOfLane = [] {
  std::array<Word, 8 * sizeof(Word)> bits{};
  for (size_t lane = 0; lane < bits.size(); ++lane) bits[lane] = static_cast<Word>(1ull << lane);
  return bits;
}();

// Returns whether backward passes the gradient of an element through: relu's output is neither 0
// nor -0. Adding the bits to themselves shifts the sign out.
template <typename Bits>
constexpr bool gradient_passes(Bits relu_output) {
  return static_cast<Bits>(relu_output + relu_output) != 0;
}

#ifdef __SSE2__
// Returns the mask of a block, as mask_of_block below does, for elements of two bytes. It uses an
// instruction that takes one bit from each byte. The loop of mask_of_block would take 1.8 times as
// long (EPYC).
inline uint64_t mask_of_block_by_bytes(const uint16_t* out) {
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) flags[i] = gradient_passes(out[i]) ? 0xff : 0;
  constexpr int64_t kBytes = sizeof(__m128i);
  uint64_t mask = 0;
  for (int64_t i = 0; i < kBlock; i += kBytes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + i));
    mask |= static_cast<uint64_t>(_mm_movemask_epi8(bytes)) << i;
  }
  return mask;
}
#endif

// Returns the mask of a block of relu's output: bit i is 1 if the gradient of element i passes.
template <typename Bits>
uint64_t mask_of_block(const Bits* out) {
#ifdef __SSE2__
  if constexpr (sizeof(Bits) == 2) return mask_of_block_by_bytes(out);
#endif
  constexpr int64_t kLanes = kBitOfLane<Bits>.size();
  Bits words[kBlock / kLanes];
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    Bits word = 0;
    // Compilers would unroll this loop as a whole, and then not make vectors of it.
#ifdef __clang__
#pragma clang loop unroll(disable)
#else
#pragma GCC unroll 4
#endif
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      word |= kBitOfLane<Bits>[lane] & ones_if<Bits>(gradient_passes(out[i + lane]));
    }
    words[i / kLanes] = word;
  }
  uint64_t mask;
  static_assert(sizeof(words) == sizeof(mask), "a block has a bit for each element");
  memcpy(&mask, words, sizeof(mask));
  return mask;
}

// selected[i] = bit i of mask ? values[i] : 0. A selection and not a product, because a gradient
// may be NaN or infinite where its bit is 0.
//
// Each lane has a copy of the word of the mask, and tests its own bit of it.
template <typename Bits>
void select_block(const Bits* __restrict__ values, uint64_t mask, Bits* __restrict__ selected) {
  constexpr int64_t kLanes = kBitOfLane<Bits>.size();
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Bits word = static_cast<Bits>(mask >> i);
#ifndef __clang__
#pragma GCC unroll 4
#endif
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const bool has_bit = (word & kBitOfLane<Bits>[lane]) != 0;
      selected[i + lane] = values[i + lane] & ones_if<Bits>(has_bit);
    }
  }
}

}  // namespace
}  // namespace kernels
