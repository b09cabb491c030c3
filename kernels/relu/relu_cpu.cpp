// ReLU on the CPU: forward, forward that also packs the mask for backward, backward, and the mask
// as bytes. Each function makes one thread's elements, as launchers.h describes it.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/elements.h"
#include "cpu/large_outputs.h"
#include "launchers.h"

namespace kernels {
namespace {

constexpr int64_t kBlock = 64;  // elements whose bits are handled together

// Packs kBlock flags of a byte each, 0 or 0xff, into bits. By pack_byte, the mask of half types
// takes 1.8 times as long (EPYC).
inline void pack_flags(const uint8_t* flags, uint8_t* mask) {
#ifdef __SSE2__
  for (int64_t i = 0; i < kBlock; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + i));
    const uint16_t bits = static_cast<uint16_t>(_mm_movemask_epi8(bytes));
    memcpy(mask + i / 8, &bits, sizeof(bits));
  }
#else
  for (int64_t i = 0; i < kBlock; i += 8) mask[i / 8] = pack_byte(flags + i);
#endif
}

template <typename E, typename Bits = typename E::Bits>
void relu_few(const Bits* __restrict__ x, Bits* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Order<E>::relu(x[i]);
}

// The mask is that of relu's output, which is 0 or -0 where the gradient is not kept: one
// comparison instead of two. In one loop instead of two, float32 takes 1.5 times as long (GCC 12).
template <typename E, typename Bits = typename E::Bits>
void relu_with_mask_block(const Bits* x, Bits* out, uint8_t* mask) {
  relu_few<E>(x, out, kBlock);
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    flags[i] = static_cast<Bits>(out[i] + out[i]) != 0 ? 0xff : 0;
  }
  pack_flags(flags, mask);
}

// Each lane's own bit of a word: 1 << lane.
template <typename Bits, int kLanes>
struct OwnBits {
  Bits bit[kLanes] = {};
  constexpr OwnBits() {
    for (int lane = 0; lane < kLanes; ++lane) bit[lane] = static_cast<Bits>(uint64_t{1} << lane);
  }
};

// Selects by the bits, because a gradient may be NaN or infinite where the mask is 0. A word of the
// mask goes to all lanes, and each lane tests its own bit, which it loads: shifted by constants,
// GCC makes no vectors of it.
template <typename Bits>
void select_block(const Bits* __restrict__ from, const uint8_t* __restrict__ mask,
                  Bits* __restrict__ to) {
  constexpr int kLanes = sizeof(Bits) == 2 ? 16 : 8;
  static constexpr OwnBits<Bits, kLanes> kOwn;
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    uint32_t word = mask[i / 8];
    if (kLanes == 16) word |= uint32_t{mask[i / 8 + 1]} << 8;
    const Bits bits = static_cast<Bits>(word);
#ifndef __clang__
#pragma GCC unroll 1  // unrolled, it would be no loop to make vectors of
#endif
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool keeps = (bits & kOwn.bit[lane]) != 0;
      to[i + lane] = from[i + lane] & static_cast<Bits>(-static_cast<Bits>(keeps));
    }
  }
}

}  // namespace

namespace cpu {

void relu(DType dtype, const void* x, void* out, int64_t begin, int64_t end, bool streams) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    const auto from = static_cast<const Bits*>(x) + begin;
    const auto to = static_cast<Bits*>(out) + begin;
    const int64_t n = end - begin;
    const int64_t i = make_blocks<kBlock>(to, n, streams, [=](int64_t first, Bits* made) {
      relu_few<E>(from + first, made, kBlock);
    });
    relu_few<E>(from + i, to + i, n - i);
  });
}

void relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin,
                    int64_t end, bool streams) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    const auto from = static_cast<const Bits*>(x) + begin;
    const auto to = static_cast<Bits*>(out) + begin;
    uint8_t* const bits = mask + begin / 8;
    const int64_t n = end - begin;
    const int64_t i = make_blocks<kBlock>(to, n, streams, [=](int64_t first, Bits* made) {
      relu_with_mask_block<E>(from + first, made, bits + first / 8);
    });
    if (i == n) return;
    Bits rest[kBlock] = {}, made[kBlock];
    uint8_t rest_bits[kBlock / 8];
    memcpy(rest, from + i, (n - i) * sizeof(Bits));
    relu_with_mask_block<E>(rest, made, rest_bits);
    memcpy(to + i, made, (n - i) * sizeof(Bits));
    memcpy(bits + i / 8, rest_bits, (n - i + 7) / 8);
  });
}

void relu_backward(DType dtype, const void* grad_output, bool is_constant, const uint8_t* mask,
                   void* grad_input, int64_t begin, int64_t end, bool streams) {
  for_floating(dtype, [=](auto element) {
    using Bits = typename decltype(element)::Bits;
    const auto from = static_cast<const Bits*>(grad_output) + (is_constant ? 0 : begin);
    const auto to = static_cast<Bits*>(grad_input) + begin;
    const uint8_t* const bits = mask + begin / 8;
    const int64_t n = end - begin;
    Bits same[kBlock];
    if (is_constant) std::fill_n(same, kBlock, *from);
    int64_t i = make_blocks<kBlock>(to, n, streams, [&](int64_t first, Bits* made) {
      select_block(is_constant ? same : from + first, bits + first / 8, made);
    });
    for (; i < n; ++i) {
      to[i] = bits[i / 8] >> i % 8 & 1 ? from[is_constant ? 0 : i] : Bits{0};
    }
  });
}

void unpack_mask(const uint8_t* mask, bool* kept, int64_t begin, int64_t end) {
  uint8_t flags[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    for (int64_t j = 0; j < n; j += 8) unpack_byte(mask[(i + j) / 8], flags + j);
    for (int64_t j = 0; j < n; ++j) kept[i + j] = flags[j] != 0;
  }
}

}  // namespace cpu
}  // namespace kernels
