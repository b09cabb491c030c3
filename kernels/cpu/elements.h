// The elements of the floating dtypes, ReLU, and the bits of a mask, for the CPU kernels, whose
// plain loops compilers make vectors of.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/large_outputs.h"
#include "launchers.h"

namespace kernels {
namespace {

// The floating dtypes: their bits, the type that arithmetic is done in, and conversions.
template <typename Compute, typename T>
struct Native {
  using Bits = T;
  using Sum = Compute;
  static constexpr Compute widen(Bits x) { return __builtin_bit_cast(Compute, x); }
  static constexpr Bits narrow(Compute x) { return __builtin_bit_cast(Bits, x); }
};
using Float64 = Native<double, uint64_t>;
using Float32 = Native<float, uint32_t>;

struct BFloat16 {
  using Bits = uint16_t;
  using Sum = float;
  static constexpr float widen(uint16_t x) { return Float32::widen(uint32_t{x} << 16); }
  static constexpr uint16_t narrow(float x) {  // to nearest, ties to even
    const uint32_t bits = Float32::narrow(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// By integers and one sum, as F16C converts. The last place of `magic`, a power of two, is that of
// the float16. Not by ?: or std::max, for which GCC makes branches around the sum and no vectors.
struct Float16 {
  using Bits = uint16_t;
  using Sum = float;
  static constexpr int32_t if_positive(int32_t x, int32_t value) {
    return value & ~((x - 1) >> 31);
  }
  static constexpr float widen(uint16_t x) {
    const int32_t magnitude = x & 0x7fff, above = (magnitude & 0x7c00) - 0x400;
    const int32_t exponent = if_positive(above, above);  // 0 for subnormals, too
    const int32_t magic = (exponent << 13) + (126 << 23);
    const float value = Float32::widen(magic + magnitude - exponent) - Float32::widen(magic);
    const int32_t special = if_positive(magnitude - 0x7bff, 112 << 23);  // inf and NaN
    return Float32::widen((Float32::narrow(value) + special) | uint32_t{x & 0x8000u} << 16);
  }
  static constexpr uint16_t narrow(float x) {  // to nearest, ties to even
    const uint32_t bits = Float32::narrow(x);
    const int32_t magnitude = bits & 0x7fffffff, above = magnitude - (143 << 23);
    const int32_t finite = magnitude - if_positive(above, above);  // 2^16, which rounds to inf
    const int32_t normal = (finite & 0x7f800000) - (113 << 23);
    const int32_t exponent = if_positive(normal, normal), magic = exponent + (126 << 23);
    const float sum = Float32::widen(finite) + Float32::widen(magic);
    const int32_t nan = if_positive(magnitude - 0x7f800000, 0x200 | (magnitude >> 13 & 0x3ff));
    return static_cast<uint16_t>((Float32::narrow(sum) - magic + (exponent >> 13)) | nan |
                                 (bits >> 16 & 0x8000));
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

// x < 0 ? 0 : x for a block, which keeps NaN and -0 as they are. As signed integers, which SSE and
// AVX2 compare, -0 - 1 is the largest, and the negative numbers less 1 are below -inf. Integer
// comparison ignores torch.set_flush_denormal. Not by ?:, as in Float16.
template <typename E, typename Bits = typename E::Bits>
void relu_block(const Bits* __restrict__ x, Bits* __restrict__ out) {
  using Signed = std::make_signed_t<Bits>;
  constexpr auto kInfinity = std::numeric_limits<typename E::Sum>::infinity();
  for (int64_t i = 0; i < kBlock; ++i) {
    const Signed less_1 = static_cast<Signed>(static_cast<Bits>(x[i] - 1));
    const bool is_kept = less_1 >= static_cast<Signed>(E::narrow(-kInfinity));
    out[i] = x[i] & static_cast<Bits>(-Bits{is_kept});
  }
}

// 1 << lane for each lane of a word that has a bit for it.
template <typename Word>
constexpr auto kBitOf = [] {
  std::array<Word, 8 * sizeof(Word)> bits{};
  for (size_t lane = 0; lane < bits.size(); ++lane) bits[lane] = static_cast<Word>(1ull << lane);
  return bits;
}();

// The mask of a block of relu's output, which is 0 or -0 where the gradient is not kept.
template <typename Bits>
uint64_t mask_of_block(const Bits* out) {
  uint64_t mask = 0;
  const auto is_kept = [=](int64_t i) { return static_cast<Bits>(out[i] + out[i]) != 0; };
#ifdef __SSE2__
  if constexpr (sizeof(Bits) == 2) {  // by words, 1.8 times as long (EPYC)
    uint8_t flags[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) flags[i] = is_kept(i) ? 0xff : 0;
    for (int64_t i = 0; i < kBlock; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + i));
      mask |= static_cast<uint64_t>(_mm_movemask_epi8(bytes)) << i;
    }
    return mask;
  }
#endif
  constexpr int64_t kLanes = kBitOf<Bits>.size();
  Bits words[kBlock / kLanes];
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    Bits word = 0;
#ifdef __clang__
#pragma clang loop unroll(disable)
#else
#pragma GCC unroll 4  // unrolled as a whole, it would be no loop to make vectors of
#endif
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      word |= kBitOf<Bits>[lane] & static_cast<Bits>(-Bits{is_kept(i + lane)});
    }
    words[i / kLanes] = word;
  }
  memcpy(&mask, words, sizeof(mask));
  return mask;
}

// Selects by the bits, because a gradient may be NaN or infinite where the mask is 0. A word of the
// mask goes to all lanes, and each lane tests its own bit.
template <typename Bits>
void select_block(const Bits* __restrict__ from, uint64_t mask, Bits* __restrict__ to) {
  constexpr int64_t kLanes = kBitOf<Bits>.size();
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Bits word = static_cast<Bits>(mask >> i);
#ifndef __clang__
#pragma GCC unroll 4
#endif
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const bool is_kept = (word & kBitOf<Bits>[lane]) != 0;
      to[i + lane] = from[i + lane] & static_cast<Bits>(-Bits{is_kept});
    }
  }
}

}  // namespace
}  // namespace kernels
