// Functions of a block of 64 elements on a CPU: ReLU, making a mask, and selecting by a mask.
//
// The functions are plain loops that compilers turn into vector instructions. They handle elements
// as the integers that hold their bits, because integer operations keep the payload of a NaN, and
// torch.set_flush_denormal does not affect them.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/dtypes.h"
#include "cpu/map_blocks.h"  // kBlock, the 64 elements of a block; also the header of __m128i

namespace kernels {
namespace {

// out = x < 0 ? 0 : x, which keeps NaN and -0.
//
// One comparison of signed integers, which SSE4.2 and AVX2 have, finds the negative numbers: x is
// negative if its bits minus 1 are below the bits of -inf. In float32, where -inf is 0xff800000:
//
//     x                    its bits                   minus 1                    so x is
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
    const Signed bits_minus_1 = static_cast<Signed>(static_cast<Bits>(x[i] - 1));
    out[i] = x[i] & ones_if<Bits>(bits_minus_1 >= kMinusInfinity);
  }
}

// A mask is made and tested in words as wide as an element, because vector instructions work on
// lanes of one width. A word has the mask bits of as many elements as it has bits, 16 for a half
// type. In the functions below, lane i is element i of these elements, and has bit i of the word.
// (If a register has fewer lanes, the compiler takes several registers.)
template <typename Word>
constexpr auto kBitOfLane = [] {
  std::array<Word, 8 * sizeof(Word)> bits{};
  for (size_t lane = 0; lane < bits.size(); ++lane) bits[lane] = static_cast<Word>(1ull << lane);
  return bits;
}();

// The mask bit of an element: true unless relu's output is 0 or -0. Adding the bits to themselves
// shifts the sign out.
template <typename Bits>
constexpr bool mask_bit(Bits relu_output) {
  return static_cast<Bits>(relu_output + relu_output) != 0;
}

#ifdef __SSE2__
// mask_of_block, below, for elements of two bytes, by an instruction that takes one bit from each
// byte. The loop of mask_of_block would take 1.8 times as long (EPYC).
inline uint64_t mask_of_block_by_bytes(const uint16_t* out) {
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) flags[i] = mask_bit(out[i]) ? 0xff : 0;
  constexpr int64_t kBytes = sizeof(__m128i);
  uint64_t mask = 0;
  for (int64_t i = 0; i < kBlock; i += kBytes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + i));
    mask |= static_cast<uint64_t>(_mm_movemask_epi8(bytes)) << i;
  }
  return mask;
}
#endif

// Returns the mask of a block of relu's output: bit i is element i's.
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
      word |= kBitOfLane<Bits>[lane] & ones_if<Bits>(mask_bit(out[i + lane]));
    }
    words[i / kLanes] = word;
  }
  uint64_t mask;
  static_assert(sizeof(words) == sizeof(mask), "a block has a bit for each element");
  memcpy(&mask, words, sizeof(mask));
  return mask;
}

// selected[i] = bit i of mask ? values[i] : 0. A selection and not a product, because a gradient
// may be NaN or infinite where its bit is 0. Each lane has a copy of the word of the mask, and
// tests its own bit of it.
template <typename Bits>
void select_block(const Bits* __restrict__ values, uint64_t mask, Bits* __restrict__ selected) {
  constexpr int64_t kLanes = kBitOfLane<Bits>.size();
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Bits word = static_cast<Bits>(mask >> i);
#ifndef __clang__  // clang makes vectors of this loop without a pragma
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
