// The kernels of launchers.h for the CPU, one thread's share at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "launchers.h"

namespace kernels {
namespace {

// How the elements of a dtype are compared: Integer by value, Float by its bits, where Infinity are
// those of +inf and larger magnitudes are NaN. Bits serve every width of float alike, and are
// deaf to torch.set_flush_denormal, under which a compare takes a subnormal for zero. Compares are
// signed, for SSE and AVX2 have no others: 45 instead of 70 ps an element of float32 in L1.
template <typename T>
struct Integer {
  using Type = T;
  static bool is_negative(T x) { return x < T{0}; }
};

template <typename Bits, Bits Infinity>
struct Float {
  using Type = Bits;
  using Signed = std::make_signed_t<Bits>;
  static constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  // Of the negative integers, -0 is the least; then come the negative numbers down to -inf, then
  // NaNs.
  static constexpr Signed kMinusInfinity = static_cast<Signed>(kSign | Infinity);
  // x < 0, false for NaN and for -0, which ReLU therefore keeps as they are: -0 - 1 is the largest.
  static bool is_negative(Bits x) {
    return static_cast<Signed>(static_cast<Bits>(x - 1)) < kMinusInfinity;
  }
  // !(x <= 0), true for NaN: torch lets the gradient through there.
  static bool keeps_gradient(Bits x) { return static_cast<Signed>(x) > kMinusInfinity && x != 0; }
};

// The floating dtypes: their bits, and the way to the type that arithmetic is done in and back.
template <typename Compute, typename Bits, Bits Infinity>
struct Native : Float<Bits, Infinity> {
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
using Float64 = Native<double, uint64_t, 0x7ff0000000000000>;
using Float32 = Native<float, uint32_t, 0x7f800000>;

struct BFloat16 : Float<uint16_t, 0x7f80> {
  using Sum = float;
  static float widen(uint16_t x) { return Float32::widen(uint32_t{x} << 16); }
  static uint16_t narrow(float x) {  // to nearest, ties to even
    const uint32_t bits = Float32::narrow(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// By integers and selections, which every x86-64 has vectors of. The conversions are those of
// Fabian Giesen's "Half to float done quick" and its reverse.
struct Float16 : Float<uint16_t, 0x7c00> {
  using Sum = float;
  static float widen(uint16_t x) {
    const uint32_t magnitude = x & 0x7fff;
    // Beside 0.5, the last place of a float is that of a subnormal.
    const uint32_t half = 126u << 23;
    const uint32_t subnormal = Float32::narrow(Float32::widen(magnitude | half) - 0.5f);
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) + (224u << 23);  // inf and NaN
    const uint32_t bits = magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : special;
    return Float32::widen(bits | uint32_t{x & 0x8000u} << 16);
  }
  static uint16_t narrow(float x) {  // to nearest, ties to even
    const uint32_t bits = Float32::narrow(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t half = 126u << 23;
    const uint32_t subnormal = Float32::narrow(Float32::widen(magnitude) + 0.5f) - half;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t rounded = magnitude < 113u << 23   ? subnormal
                             : magnitude < 143u << 23 ? normal
                                                      : special;
    return static_cast<uint16_t>(rounded | bits >> 16 & 0x8000);
  }
};

// Elements that are handled together.
constexpr int64_t kBlock = 64;

// Past the caches, where the machine has such stores. Others first read the lines that they are
// about to overwrite: 1 GiB into memory that has been touched before then takes 53 to 64 instead of
// 43 to 50 ms (EPYC 9005, 2 threads). With them, prefetches no longer gain anything.
template <typename T>
void store_past_caches(const T* block, T* out) {
#if defined(__AVX2__)
  using Vector = __m256i;
  const auto store = [](Vector* to, const Vector* from) { _mm256_stream_si256(to, *from); };
#elif defined(__SSE2__)
  using Vector = __m128i;
  const auto store = [](Vector* to, const Vector* from) { _mm_stream_si128(to, *from); };
#else
  using Vector = T;
  const auto store = [](Vector* to, const Vector* from) { *to = *from; };
#endif
  const auto from = reinterpret_cast<const Vector*>(block);
  const auto to = reinterpret_cast<Vector*>(out);
#pragma GCC unroll 8
  for (size_t i = 0; i < kBlock * sizeof(T) / sizeof(Vector); ++i) store(to + i, from + i);
}

// make(i, to) for the elements from i on, a block at a time, of n whose results no cache could
// hold. Returns how many were made: none where they take the place of their operands, which are in
// a cache then, or are not aligned.
template <typename T, typename Make>
int64_t stream_blocks(const T* from, T* out, int64_t n, const Make& make) {
  constexpr size_t kLine = 64;
  if (from == out || reinterpret_cast<uintptr_t>(out) % kLine != 0) return 0;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    alignas(kLine) T block[kBlock];
    make(i, block);
    store_past_caches(block, out + i);
  }
#ifdef __SSE2__
  _mm_sfence();  // before another thread is told that they are there
#endif
  return i;
}

template <typename E, typename T = typename E::Type>
void relu_few(const T* x, T* out, int64_t n) {
#pragma GCC ivdep  // x is out, or apart from it
  for (int64_t i = 0; i < n; ++i) out[i] = E::is_negative(x[i]) ? T{0} : x[i];
}

template <typename E, typename T = typename E::Type>
void relu_body(const T* x, T* out, int64_t n, bool streams) {
  const auto block = [&](int64_t i, T* to) { relu_few<E>(x + i, to, kBlock); };
  const int64_t i = streams ? stream_blocks(x, out, n, block) : 0;
  relu_few<E>(x + i, out + i, n - i);
}

// kBlock flags of a byte each, 0 or 0xff, to as many bits.
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

// ReLU of kBlock elements, and their mask. x may be out.
template <typename E, typename T = typename E::Type>
void relu_with_mask_block(const T* x, T* out, uint8_t* mask) {
#ifdef __AVX2__
  // Of wide elements GCC would narrow the comparisons to bytes: 1.4 to 1.7 times the time.
  if constexpr (sizeof(T) >= 4) {
    constexpr size_t kLanes = 32 / sizeof(T);
    typedef T Lanes __attribute__((vector_size(32)));
    typedef typename E::Signed Signed __attribute__((vector_size(32)));
    uint64_t bits = 0;
    static_assert(kBlock == 64, "a bit each");
#pragma GCC unroll 8
    for (size_t i = 0; i < kBlock; i += kLanes) {
      Lanes v;
      memcpy(&v, x + i, sizeof(v));
      const Signed keeps = ((Signed)v > E::kMinusInfinity) & (v != 0);  // as keeps_gradient
      uint32_t bits_of_lanes;
      if constexpr (sizeof(T) == 4) {
        bits_of_lanes = _mm256_movemask_ps((__m256)keeps);
      } else {
        bits_of_lanes = _mm256_movemask_pd((__m256d)keeps);
      }
      bits |= static_cast<uint64_t>(bits_of_lanes) << i;
      v &= (Lanes)((Signed)(v - 1) >= E::kMinusInfinity);  // as is_negative
      memcpy(out + i, &v, sizeof(v));
    }
    memcpy(mask, &bits, sizeof(bits));
    return;
  }
#endif
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) flags[i] = E::keeps_gradient(x[i]) ? 0xff : 0;
  pack_flags(flags, mask);
  relu_few<E>(x, out, kBlock);
}

template <typename E, typename T = typename E::Type>
void relu_with_mask_body(const T* x, T* out, uint8_t* mask, int64_t n, bool streams) {
  const auto block = [&](int64_t i, T* to) { relu_with_mask_block<E>(x + i, to, mask + i / 8); };
  int64_t i = streams ? stream_blocks(x, out, n, block) : 0;
  for (; i + kBlock <= n; i += kBlock) block(i, out + i);
  for (; i < n; i += 8) {
    const int64_t end = i + 8 < n ? i + 8 : n;
    uint8_t bits = 0;
    for (int64_t j = i; j < end; ++j) {
      bits |= static_cast<uint8_t>(E::keeps_gradient(x[j]) << (j - i));
    }
    mask[i / 8] = bits;
    relu_few<E>(x + i, out + i, end - i);
  }
}

// The reverse: byte i of the result is not zero where bit i of `bits` is set.
inline uint64_t spread_bits(uint8_t bits) {
  return bits * 0x0101010101010101u & 0x8040201008040201u;
}

// Where an element of the dense result is found in both operands of a layout.
struct Offsets {
  int64_t first;
  int64_t second;
};

// The elements of a layout in their order, from one on.
class Walk {
 public:
  Walk(const Layout& layout, int64_t i) : layout_(layout) {
    for (int d = 0; d < layout.ndim; ++d) {
      coordinate_[d] = i % layout.size[d];
      i /= layout.size[d];
      move(d, coordinate_[d]);
    }
  }

  // body(j, count, offsets) for each stretch along dimension 0 of the next n elements: the j-th and
  // those behind it.
  template <typename Body>
  void next(int64_t n, const Body& body) {
    const int64_t size = layout_.size[0];
    for (int64_t j = 0; j < n;) {
      // Whole rows, as many as dimension 1 has, or a part of one. Short rows need the loop.
      const int d = layout_.ndim > 1 && coordinate_[0] == 0 && n - j >= size;
      const int64_t count = d == 1 ? size : std::min(size - coordinate_[0], n - j);
      const int64_t left = layout_.size[d] - coordinate_[d];
      const int64_t rows = d == 1 ? std::min(left, (n - j) / size) : 1;
      const int64_t steps = d == 1 ? 1 : count;
      const Offsets step{steps * layout_.stride[0][d], steps * layout_.stride[1][d]};
      for (int64_t row = 0; row < rows; ++row) {
        body(j, count, at_);
        j += count;
        at_.first += step.first;
        at_.second += step.second;
      }
      coordinate_[d] += rows * steps;
      carry(d);
    }
  }

 private:
  void carry(int d) {
    for (; d < layout_.ndim - 1 && coordinate_[d] == layout_.size[d]; ++d) {
      coordinate_[d] = 0;
      move(d, -layout_.size[d]);
      ++coordinate_[d + 1];
      move(d + 1, 1);
    }
  }

  void move(int d, int64_t steps) {
    at_.first += steps * layout_.stride[0][d];
    at_.second += steps * layout_.stride[1][d];
  }

  const Layout& layout_;
  int64_t coordinate_[kMaxDims];
  Offsets at_{0, 0};
};

// Elements of a strided result that are gathered first and then made as those of a dense one.
constexpr int64_t kStrip = 512;

// The next n elements of `from`, one of the layout's operands, behind each other. T is an integer
// of the elements' width.
template <typename T>
void gather(const T* from, const Layout& layout, Walk& walk, T* to, int64_t n) {
  const auto rows = [&](const auto& copy) {
    walk.next(n, [&](int64_t j, int64_t count, Offsets at) { copy(from + at.first, j, count); });
  };
  // By a constant, for which there are shuffles.
  const auto strided_by = [&](auto stride) {
    rows([&](const T* row, int64_t j, int64_t count) {
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) to[j + i] = row[i * stride];
    });
  };
  switch (layout.stride[0][0]) {
    case 0:
      return rows(
          [&](const T* row, int64_t j, int64_t count) { std::fill_n(to + j, count, *row); });
    case 1: {
      // By whole vectors, which may end behind the row: what they read there lies before the last
      // element, and what they write there is written again.
      constexpr int64_t kLanes = 32 / sizeof(T);
      const T* end = from + 1;
      for (int d = 0; d < layout.ndim; ++d) end += (layout.size[d] - 1) * layout.stride[0][d];
      return rows([&](const T* row, int64_t j, int64_t count) {
        const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
        if (row + whole <= end && j + whole <= n) {
          for (int64_t i = 0; i < count; i += kLanes) memcpy(to + j + i, row + i, 32);
        } else {
          memcpy(to + j, row, count * sizeof(T));
        }
      });
    }
    case 2:
      return strided_by(std::integral_constant<int64_t, 2>{});
    case 3:
      return strided_by(std::integral_constant<int64_t, 3>{});
    case 4:
      return strided_by(std::integral_constant<int64_t, 4>{});
    default:
      return rows([&, stride = layout.stride[0][0]](const T* row, int64_t j, int64_t count) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < count; ++i) to[j + i] = row[i * stride];
      });
  }
}

// The bits first + i * stride of a mask, to the bits to + i of zeros.
inline void gather_bits(const uint8_t* mask, uint64_t first, uint64_t stride, uint8_t* bits,
                        uint64_t to, uint64_t n) {
  const uint64_t shift = first % 8;
  uint64_t i = 0;
  const auto copy = [&](auto word) {
    using Word = decltype(word);
    constexpr uint64_t kSize = sizeof(Word), kBits = 8 * kSize;
    for (; i + kBits <= n; i += kBits) {
      const uint8_t* const from = mask + (first + i) / 8;
      memcpy(&word, from, kSize);
      if (shift != 0) {
        word = static_cast<Word>(word >> shift | uint64_t{from[kSize]} << (kBits - shift));
      }
      memcpy(bits + (to + i) / 8, &word, kSize);
    }
  };
  if (stride == 1 && to % 8 == 0) {
    copy(uint64_t{});
    copy(uint8_t{});
  }
  for (; i < n; ++i) {
    const uint64_t bit = first + i * stride, place = to + i;
    bits[place / 8] |= static_cast<uint8_t>((mask[bit / 8] >> bit % 8 & 1) << place % 8);
  }
}

// Selection on the bits, for the gradient may be NaN or inf where the mask is 0. A byte of the mask
// goes to all lanes, each of which looks at its own bit. Written in vectors, which GCC and Clang
// have for every machine: loops that say the same take 2 to 13 times as long, and so do vectors of
// 64 bytes (GCC 12).
template <typename Bits>
void relu_backward_body(const Bits* grad_output, const uint8_t* mask, Bits* grad_input, int64_t n,
                        bool streams) {
  constexpr int kLanes = sizeof(Bits) == 8 ? 4 : 8;
  typedef Bits Lanes __attribute__((vector_size(kLanes * sizeof(Bits))));
  Lanes places;
  for (int lane = 0; lane < kLanes; ++lane) places[lane] = static_cast<Bits>(1 << lane);
  const auto block = [&](int64_t i, Bits* to) {
    for (uint64_t j = 0; j < kBlock; j += kLanes) {
      const Bits bits = static_cast<Bits>(mask[(i + j) / 8] >> (j % 8));
      Lanes lanes;
      memcpy(&lanes, grad_output + i + j, sizeof(lanes));
      lanes &= reinterpret_cast<Lanes>((places & bits) == places);
      memcpy(to + j, &lanes, sizeof(lanes));
    }
  };
  int64_t i = streams ? stream_blocks(grad_output, grad_input, n, block) : 0;
  for (; i + kBlock <= n; i += kBlock) block(i, grad_input + i);
  for (; i < n; ++i) grad_input[i] = mask[i / 8] >> (i % 8) & 1 ? grad_output[i] : Bits{0};
}

template <typename E, typename T = typename E::Type>
void relu_strided_body(const T* x, T* out, int64_t begin, int64_t end, const Layout& layout) {
  const int64_t stride = layout.stride[0][0];
  Walk walk(layout, begin);
  const bool in_place = x == out;
  // Rows that are made where they go. 2^15 of 20 floats take 40 us; gathered first, 66.
  if (in_place || (stride == 1 && layout.size[0] >= 16)) {
    walk.next(end - begin, [&](int64_t j, int64_t count, Offsets at) {
      const T* const from = x + at.first;
      T* const to = out + (in_place ? at.first : begin + j);
      if (stride == 1) return relu_few<E>(from, to, count);
      for (int64_t k = 0; k < count; ++k) relu_few<E>(from + k * stride, to + k * stride, 1);
    });
    return;
  }
  for (int64_t i = begin; i < end; i += kStrip) {
    const int64_t n = std::min(kStrip, end - i);
    using Bits = std::make_unsigned_t<T>;
    gather(reinterpret_cast<const Bits*>(x), layout, walk, reinterpret_cast<Bits*>(out + i), n);
    relu_few<E>(out + i, out + i, n);
  }
}

template <typename Bits>
void relu_backward_strided_body(const Bits* grad_output, const uint8_t* mask, Bits* grad_input,
                                int64_t begin, int64_t end, const Layout& layout) {
  int64_t dense = 1;  // the mask's stride in a dimension if it is in the result's order
  bool is_dense = true;
  for (int d = 0; d < layout.ndim; ++d) {
    is_dense = is_dense && layout.stride[1][d] == dense;
    dense *= layout.size[d];
  }
  Walk walk(layout, begin), walk_of_mask(layout, begin);
  for (int64_t i = begin; i < end; i += kStrip) {
    const int64_t n = std::min(kStrip, end - i);
    gather(grad_output, layout, walk, grad_input + i, n);
    uint8_t gathered[kStrip / 8] = {};
    if (!is_dense) {
      walk_of_mask.next(n, [&](int64_t j, int64_t count, Offsets at) {
        gather_bits(mask, at.second, layout.stride[1][0], gathered, j, count);
      });
    }
    const uint8_t* const bits = is_dense ? mask + i / 8 : gathered;
    relu_backward_body(grad_input + i, bits, grad_input + i, n, false);
  }
}

template <typename E, typename T = typename E::Type>
void relu_divide(T* out, typename E::Sum divisor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = E::narrow(E::widen(E::is_negative(out[i]) ? T{0} : out[i]) / divisor);
  }
}

template <typename E, typename T = typename E::Type>
void linear_epilogue_row(T* out, typename E::Sum divisor, uint8_t* mask, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    uint8_t flags[kBlock];
    for (int64_t j = 0; j < kBlock; ++j) flags[j] = E::keeps_gradient(out[i + j]) ? 0xff : 0;
    pack_flags(flags, mask + i / 8);
    relu_divide<E>(out + i, divisor, kBlock);
  }
  for (; i < n; i += 8) {
    const int64_t count = n - i < 8 ? n - i : 8;
    uint8_t bits = 0;
    for (int64_t j = 0; j < count; ++j) {
      bits |= static_cast<uint8_t>(E::keeps_gradient(out[i + j]) << j);
    }
    mask[i / 8] = bits;
    relu_divide<E>(out + i, divisor, count);
  }
}

// A column of gradients is summed in runs of this many, and then the runs, which keeps the error
// small where there are many rows.
constexpr int64_t kRun = 64;

template <typename E, typename T = typename E::Type, typename Sum = typename E::Sum>
void linear_epilogue_backward_row(const T* grad_output, const uint8_t* mask, Sum divisor, T* grad_z,
                                  Sum* sum, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = end - i < kBlock ? end - i : kBlock;
    uint8_t flags[kBlock];
    for (int64_t j = 0; j < count; j += 8) {
      const uint64_t bytes = spread_bits(mask[(i + j) / 8]);
      memcpy(flags + j, &bytes, sizeof(bytes));
    }
    for (int64_t j = 0; j < count; ++j) {
      const T quotient = E::narrow(E::widen(grad_output[i + j]) / divisor);
      grad_z[i + j] = quotient & static_cast<T>(-(flags[j] != 0));
    }
    if (sum == nullptr) continue;
    for (int64_t j = i; j < i + count; ++j) sum[j] += E::widen(grad_z[j]);
  }
}

template <typename E, typename T = typename E::Type, typename Sum = typename E::Sum>
void linear_epilogue_backward_body(const T* grad_output, const uint8_t* mask, Sum divisor,
                                   T* grad_z, T* grad_bias, Sum* total, int64_t m, int64_t n,
                                   int64_t begin, int64_t end) {
  Sum* const run = grad_bias == nullptr ? nullptr : total + n;
  if (run != nullptr) {
    for (int64_t j = begin; j < end; ++j) total[j] = run[j] = 0;
  }
  for (int64_t i = 0; i < m; ++i) {
    linear_epilogue_backward_row<E>(grad_output + i * n, mask + i * ((n + 7) / 8), divisor,
                                    grad_z + i * n, run, begin, end);
    if (run != nullptr && (i % kRun == kRun - 1 || i == m - 1)) {
      for (int64_t j = begin; j < end; ++j) total[j] += run[j], run[j] = 0;
    }
  }
  if (run != nullptr) {
    for (int64_t j = begin; j < end; ++j) grad_bias[j] = E::narrow(total[j]);
  }
}

// Calls body with the element type of a dtype, or with the integer of a floating one's width.
template <typename Body>
void for_floating(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Float32{});
    case DType::kFloat64:
      return body(Float64{});
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return;
  }
}

template <typename Body>
void for_bits(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(uint32_t{});
    case DType::kFloat64:
      return body(uint64_t{});
    default:
      return body(uint16_t{});
  }
}

template <typename Body>
void for_any(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kInt8:
      return body(Integer<int8_t>{});
    case DType::kInt16:
      return body(Integer<int16_t>{});
    case DType::kInt32:
      return body(Integer<int32_t>{});
    case DType::kInt64:
      return body(Integer<int64_t>{});
    case DType::kUInt8:
      return body(Integer<uint8_t>{});
    default:
      return for_floating(dtype, body);
  }
}

}  // namespace

namespace cpu {

void relu(DType dtype, const void* x, void* out, int64_t begin, int64_t end, bool streams) {
  for_any(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    relu_body<decltype(element)>(static_cast<const T*>(x) + begin, static_cast<T*>(out) + begin,
                                 end - begin, streams);
  });
}

void relu_strided(DType dtype, const void* x, void* out, int64_t begin, int64_t end,
                  const Layout& layout) {
  for_any(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    relu_strided_body<decltype(element)>(static_cast<const T*>(x), static_cast<T*>(out), begin, end,
                                         layout);
  });
}

void relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin,
                    int64_t end, bool streams) {
  for_floating(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    relu_with_mask_body<decltype(element)>(static_cast<const T*>(x) + begin,
                                           static_cast<T*>(out) + begin, mask + begin / 8,
                                           end - begin, streams);
  });
}

void relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                   int64_t begin, int64_t end, bool streams) {
  for_bits(dtype, [&](auto bits) {
    using Bits = decltype(bits);
    relu_backward_body(static_cast<const Bits*>(grad_output) + begin, mask + begin / 8,
                       static_cast<Bits*>(grad_input) + begin, end - begin, streams);
  });
}

void relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                           void* grad_input, int64_t begin, int64_t end, const Layout& layout) {
  for_bits(dtype, [&](auto bits) {
    using Bits = decltype(bits);
    relu_backward_strided_body(static_cast<const Bits*>(grad_output), mask,
                               static_cast<Bits*>(grad_input), begin, end, layout);
  });
}

void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n) {
  for_floating(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Type* const rows = static_cast<typename E::Type*>(out);
    const typename E::Sum by = static_cast<typename E::Sum>(divisor);
    if (mask == nullptr) return relu_divide<E>(rows, by, m * n);
    for (int64_t i = 0; i < m; ++i) {
      linear_epilogue_row<E>(rows + i * n, by, mask + i * ((n + 7) / 8), n);
    }
  });
}

void linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                              double divisor, void* grad_z, void* grad_bias, void* sums, int64_t m,
                              int64_t n, int64_t begin, int64_t end) {
  for_floating(dtype, [&](auto element) {
    using E = decltype(element);
    using T = typename E::Type;
    using Sum = typename E::Sum;
    linear_epilogue_backward_body<E>(static_cast<const T*>(grad_output), mask,
                                     static_cast<Sum>(divisor), static_cast<T*>(grad_z),
                                     static_cast<T*>(grad_bias), static_cast<Sum*>(sums), m, n,
                                     begin, end);
  });
}

}  // namespace cpu
}  // namespace kernels
