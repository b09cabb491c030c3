// The elements of the floating dtypes and the bits of a mask, for the CPU kernels.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>  // immintrin.h takes GCC 0.4 s
#endif

#include "launchers.h"

#ifdef __clang__
// It has no `GCC ivdep`; its loops check at run time whether their operands overlap.
#pragma clang diagnostic ignored "-Wunknown-pragmas"
#endif

namespace kernels {
namespace {

// The floating dtypes: their bits, the type that arithmetic is done in, and conversions.
template <typename Compute, typename T>
struct Native {
  using Bits = T;
  using Sum = Compute;
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
using Float64 = Native<double, uint64_t>;
using Float32 = Native<float, uint32_t>;

struct BFloat16 {
  using Bits = uint16_t;
  using Sum = float;
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

#ifdef __F16C__
// Eight floats of float16, by the machine's own conversions, for which GCC 12 makes no vectors.
typedef float Floats __attribute__((vector_size(32)));
typedef short Halves __attribute__((vector_size(16)));

inline Floats load_halves(const uint16_t* from) {
  Halves halves;
  memcpy(&halves, from, sizeof(halves));
  return __builtin_ia32_vcvtph2ps256(halves);
}
inline void store_halves(uint16_t* to, Floats v) {
  const Halves halves = __builtin_ia32_vcvtps2ph256(v, 0);  // to nearest, ties to even
  memcpy(to, &halves, sizeof(halves));
}
#endif

constexpr int64_t kBlock = 64;   // elements that are handled together
constexpr int64_t kStrip = 512;  // elements that stay in L1 between two passes

// Calls body with the element of a floating dtype.
template <typename Body>
void for_floating(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(Float32{});
  if (dtype == DType::kFloat64) return body(Float64{});
  if (dtype == DType::kFloat16) return body(Float16{});
  if (dtype == DType::kBFloat16) return body(BFloat16{});
}

// Packs kBlock flags of a byte each, 0 or 0xff, into bits.
inline void pack_flags(const uint8_t* flags, uint8_t* mask) {
#ifdef __SSE2__
  for (size_t i = 0; i < kBlock; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + i));
    const uint16_t bits = static_cast<uint16_t>(_mm_movemask_epi8(bytes));
    memcpy(mask + i / 8, &bits, sizeof(bits));
  }
#else
  for (size_t i = 0; i < kBlock; i += 8) {
    uint64_t bytes;
    memcpy(&bytes, flags + i, sizeof(bytes));
    // The product moves bit 0 of flag j to bit 56 + j, and no two partial products meet.
    mask[i / 8] = static_cast<uint8_t>((bytes & 0x0101010101010101u) * 0x0102040810204080u >> 56);
  }
#endif
}

}  // namespace
}  // namespace kernels
