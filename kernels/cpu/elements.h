// The elements of the floating dtypes, ReLU's comparisons, and the bits of a mask, for the CPU
// kernels, whose plain loops compilers make vectors of.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "launchers.h"

namespace kernels {
namespace {

// The floating dtypes: their bits, those of infinity, the type that arithmetic is done in, and
// conversions.
template <typename Compute, typename T, T kInfinityBits>
struct Native {
  using Bits = T;
  using Sum = Compute;
  static constexpr T kInfinity = kInfinityBits;
  static Compute widen(Bits x) {
    Compute value;
    memcpy(&value, &x, sizeof(value));
    return value;
  }
  static Bits narrow(Compute x) {
    Bits bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
  }
};
using Float64 = Native<double, uint64_t, 0x7ff0000000000000>;
using Float32 = Native<float, uint32_t, 0x7f800000>;

struct BFloat16 {
  using Bits = uint16_t;
  using Sum = float;
  static constexpr uint16_t kInfinity = 0x7f80;
  static float widen(uint16_t x) { return Float32::widen(uint32_t{x} << 16); }
  static uint16_t narrow(float x) {  // to nearest, ties to even
    const uint32_t bits = Float32::narrow(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// By integers and selections, which every x86-64 vectorises: Fabian Giesen's "Half to float done
// quick" and its reverse.
struct Float16 {
  using Bits = uint16_t;
  using Sum = float;
  static constexpr uint16_t kInfinity = 0x7c00;
  // Not by ?:, for which GCC makes a branch around the floating-point operation and no vectors.
  static uint32_t select(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = -uint32_t{condition};
    return (yes & mask) | (no & ~mask);
  }
  static float widen(uint16_t x) {
    const uint32_t magnitude = x & 0x7fff;
    // The last place of a float next to 0.5 is that of a subnormal.
    const uint32_t half = 126u << 23;
    const uint32_t subnormal = Float32::narrow(Float32::widen(magnitude | half) - 0.5f);
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) + (224u << 23);  // inf and NaN
    const uint32_t bits =
        select(magnitude < 0x400, subnormal, select(magnitude < 0x7c00, normal, special));
    return Float32::widen(bits | uint32_t{x & 0x8000u} << 16);
  }
  static uint16_t narrow(float x) {  // to nearest, ties to even
    const uint32_t bits = Float32::narrow(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t half = 126u << 23;
    const uint32_t subnormal = Float32::narrow(Float32::widen(magnitude) + 0.5f) - half;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = select(magnitude > 0x7f800000, 0x7e00, 0x7c00);
    const uint32_t rounded =
        select(magnitude < 113u << 23, subnormal, select(magnitude < 143u << 23, normal, special));
    return static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000));
  }
};

// Calls body with the element of a dtype.
template <typename Body>
void for_floating(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(Float32{});
  if (dtype == DType::kFloat64) return body(Float64{});
  if (dtype == DType::kFloat16) return body(Float16{});
  if (dtype == DType::kBFloat16) return body(BFloat16{});
}

// The bits of floats as signed integers: -0 is the least, then come the negative numbers down to
// -inf, the negative NaNs, and from 0 on the positive numbers. Integer comparison ignores
// torch.set_flush_denormal. It is signed, because SSE and AVX2 have no other.
template <typename E, typename Bits = typename E::Bits>
struct Order {
  using Signed = std::make_signed_t<Bits>;
  static constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  static constexpr Signed kMinusInfinity = static_cast<Signed>(kSign | E::kInfinity);
  // x < 0 ? 0 : x, which keeps NaN and -0 as they are: -0 - 1 is the largest. Not by ?:, as in
  // Float16.
  static Bits relu(Bits x) {
    const bool is_kept = static_cast<Signed>(static_cast<Bits>(x - 1)) >= kMinusInfinity;
    return x & static_cast<Bits>(-static_cast<Bits>(is_kept));
  }
  // !(x <= 0), true for NaN, as torch lets the gradient through there.
  static bool keeps_gradient(Bits x) {
    return (static_cast<Signed>(x) > kMinusInfinity) & (x != 0);
  }
};

// Packs eight flags of a byte each, 0 or 0xff, into bits. The product moves bit 0 of flag j to bit
// 56 + j, and no two partial products meet.
inline uint8_t pack_byte(const uint8_t* flags) {
  uint64_t bytes;
  memcpy(&bytes, flags, sizeof(bytes));
  return static_cast<uint8_t>((bytes & 0x0101010101010101u) * 0x0102040810204080u >> 56);
}

// The reverse; what is not 0 stands for 1.
inline void unpack_byte(uint8_t bits, uint8_t* flags) {
  const uint64_t bytes = bits * 0x0101010101010101u & 0x8040201008040201u;
  memcpy(flags, &bytes, sizeof(bytes));
}

}  // namespace
}  // namespace kernels
