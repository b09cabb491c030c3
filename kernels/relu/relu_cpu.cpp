// ReLU on the CPU, as launchers.h describes it: one thread's share at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/elements.h"
#include "launchers.h"
#include "relu/order.h"

namespace kernels {
namespace {

constexpr size_t kLine = 64;  // bytes, of a cache

// Lines are prefetched so many bytes ahead. On a Xeon with 2 MiB of L2, 2 threads:
//   read, past the caches    1 GiB of float32 takes 55 instead of 66 ms; asked for 2 KiB ahead 58,
//                            8 to 64 KiB 55; into the nearest cache instead of the second, 1.1
//                            times as long. An EPYC 9005 gained nothing
//   written, in a cache      32 KiB takes 0.7 of the time, 512 KiB 0.96; 256 to 2048 bytes alike
constexpr int64_t kReadAhead = 4096, kWriteAhead = 1024;

// Asks for the lines of a block. kWrites and kLocality are those of __builtin_prefetch.
template <int kWrites, int kLocality, typename T>
void prefetch_block(const T* block) {
#pragma GCC unroll 8
  for (size_t line = 0; line < kBlock * sizeof(T); line += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(block) + line, kWrites, kLocality);
  }
}

// Past the caches, where the machine has such stores. Others first read the lines that they are
// about to overwrite: 1 GiB into memory that has been touched before then takes 53 to 64 instead of
// 43 to 50 ms (EPYC 9005, 2 threads). By 32 bytes it takes 0.95 of the time by 16 (Xeon).
template <typename T>
void store_past_caches(const T* block, T* out) {
#if defined(__AVX2__) && !defined(__clang__)
  typedef long long Vector __attribute__((vector_size(32), may_alias));
  const auto store = [](Vector* to, const Vector* from) { __builtin_ia32_movntdq256(to, *from); };
#elif defined(__SSE2__)
  using Vector = __m128i;
  const auto store = [](Vector* to, const Vector* from) { _mm_stream_si128(to, *from); };
#else
  using Vector = T;
  const auto store = [](Vector* to, const Vector* from) { *to = *from; };
#endif
  const auto from = reinterpret_cast<const Vector*>(block);
  const auto to = reinterpret_cast<Vector*>(out);
#pragma GCC unroll 16
  for (size_t i = 0; i < kBlock * sizeof(T) / sizeof(Vector); ++i) store(to + i, from + i);
}

// make(i, to) for the elements from i on, a block at a time, of n whose results no cache could
// hold. Returns how many were made: none where they take the place of their operands, which are in
// a cache then, or are not aligned.
template <typename T, typename Make>
int64_t stream_blocks(const T* from, T* out, int64_t n, const Make& make) {
  if (from == out || reinterpret_cast<uintptr_t>(out) % kLine != 0) return 0;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_block<0, 2>(from + i + kReadAhead / static_cast<int64_t>(sizeof(T)));
    alignas(kLine) T block[kBlock];
    make(i, block);
    store_past_caches(block, out + i);
  }
#ifdef __SSE2__
  _mm_sfence();  // before another thread is told that they are there
#endif
  return i;
}

template <typename Bits>
void relu_few(Order<Bits> order, const Bits* x, Bits* out, int64_t n) {
#pragma GCC ivdep  // x is out, or apart from it
  for (int64_t i = 0; i < n; ++i) out[i] = order.relu(x[i]);
}

// Not inlined, which would compile it anew for every use.
template <typename Bits>
__attribute__((noinline)) void relu_dense(Order<Bits> order, const Bits* x, Bits* out, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    // Not beyond the end, where another thread writes: 0.9 of the time for 2^16 floats.
    constexpr int64_t kAhead = kWriteAhead / static_cast<int64_t>(sizeof(Bits));
    prefetch_block<1, 3>(out + std::min(i + kAhead, n - kBlock));
#pragma GCC ivdep  // x is out, or apart from it
    for (int64_t j = 0; j < kBlock; ++j) out[i + j] = order.relu(x[i + j]);
  }
  relu_few(order, x + i, out + i, n - i);
}

template <typename Bits>
void relu_body(Order<Bits> order, const Bits* x, Bits* out, int64_t n, bool streams) {
  const auto block = [=](int64_t i, Bits* to) { relu_few(order, x + i, to, kBlock); };
  const int64_t i = streams ? stream_blocks(x, out, n, block) : 0;
  relu_dense(order, x + i, out + i, n - i);
}

// ReLU of kBlock elements, and their mask. x may be out.
template <typename Bits>
void relu_with_mask_block(Order<Bits> order, const Bits* x, Bits* out, uint8_t* mask) {
#ifdef __AVX2__
  // GCC would narrow the comparisons of wide elements to bytes: 1.4 to 1.7 times the time.
  if constexpr (sizeof(Bits) >= 4) {
    constexpr size_t kLanes = 32 / sizeof(Bits);
    typedef Bits Lanes __attribute__((vector_size(32)));
    typedef typename Order<Bits>::Signed Signed __attribute__((vector_size(32)));
    uint64_t bits = 0;
    static_assert(kBlock == 64, "a bit each");
#pragma GCC unroll 8
    for (size_t i = 0; i < kBlock; i += kLanes) {
      Lanes v;
      memcpy(&v, x + i, sizeof(v));
      const Signed keeps = ((Signed)v > order.limit) & (v != 0);  // as keeps_gradient
      uint32_t bits_of_lanes;
      if constexpr (sizeof(Bits) == 4) {
        typedef float Floats __attribute__((vector_size(32)));
        bits_of_lanes = __builtin_ia32_movmskps256((Floats)keeps);
      } else {
        typedef double Doubles __attribute__((vector_size(32)));
        bits_of_lanes = __builtin_ia32_movmskpd256((Doubles)keeps);
      }
      bits |= static_cast<uint64_t>(bits_of_lanes) << i;
      v &= (Lanes)((Signed)(v - order.offset) >= order.limit);  // as is_negative
      memcpy(out + i, &v, sizeof(v));
    }
    memcpy(mask, &bits, sizeof(bits));
    return;
  }
#endif
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) flags[i] = order.keeps_gradient(x[i]) ? 0xff : 0;
  pack_flags(flags, mask);
  relu_few(order, x, out, kBlock);
}

template <typename Bits>
void relu_with_mask_body(Order<Bits> order, const Bits* x, Bits* out, uint8_t* mask, int64_t n,
                         bool streams) {
  const auto block = [=](int64_t i, Bits* to) {
    relu_with_mask_block(order, x + i, to, mask + i / 8);
  };
  int64_t i = streams ? stream_blocks(x, out, n, block) : 0;
  for (; i + kBlock <= n; i += kBlock) block(i, out + i);
  uint64_t bits = 0;
  for (int64_t j = i; j < n; ++j) bits |= uint64_t{order.keeps_gradient(x[j])} << (j - i);
  memcpy(mask + i / 8, &bits, (n - i + 7) / 8);
  relu_dense(order, x + i, out + i, n - i);
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
    for (int64_t j = 0; j < n;) {
      Rows rows = take(n - j);
      for (; rows.number > 0; --rows.number) {
        body(j, rows.size, rows.at);
        j += rows.size;
        rows.at.first += rows.step.first;
        rows.at.second += rows.step.second;
      }
    }
  }

 private:
  struct Rows {
    int64_t number;
    int64_t size;
    Offsets at;    // of the first one
    Offsets step;  // from one to the next
  };

  // Whole rows of the next n elements, as many as dimension 1 has, or a part of one. Not inlined,
  // which would compile it anew for every body.
  __attribute__((noinline)) Rows take(int64_t n) {
    const int64_t size = layout_.size[0];
    const int d = layout_.ndim > 1 && coordinate_[0] == 0 && n >= size;
    const int64_t count = d == 1 ? size : std::min(size - coordinate_[0], n);
    const int64_t number = d == 1 ? std::min(layout_.size[1] - coordinate_[1], n / size) : 1;
    const Rows rows{number, count, at_, {layout_.stride[0][d], layout_.stride[1][d]}};
    const int64_t steps = d == 1 ? number : count;
    coordinate_[d] += steps;
    move(d, steps);
    carry(d);
    return rows;
  }

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

// count elements that are `stride` apart, behind each other.
template <typename T>
void copy_strided(const T* row, int64_t stride, T* to, int64_t count) {
  const auto copy_by = [=](auto constant) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) to[i] = row[i * constant];
  };
  switch (stride) {
    case 0:
      std::fill_n(to, count, *row);
      break;
    // By a constant, for which there are shuffles.
    case 2:
      return copy_by(std::integral_constant<int64_t, 2>{});
    case 3:
      return copy_by(std::integral_constant<int64_t, 3>{});
    case 4:
      return copy_by(std::integral_constant<int64_t, 4>{});
    default:
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; ++i) to[i] = row[i * stride];
  }
}

// The next n elements of `from`, one of the layout's operands, behind each other.
template <typename T>
void gather(const T* from, const Layout& layout, Walk& walk, T* to, int64_t n) {
  const int64_t stride = layout.stride[0][0];
  if (stride != 1) {
    return walk.next(n, [&](int64_t j, int64_t count, Offsets at) {
      copy_strided(from + at.first, stride, to + j, count);
    });
  }
  // By whole vectors, which may end behind the row: what they read there lies before the last
  // element, and what they write there is written again.
  constexpr int64_t kLanes = 32 / sizeof(T);
  const T* end = from + 1;
  for (int d = 0; d < layout.ndim; ++d) end += (layout.size[d] - 1) * layout.stride[0][d];
  walk.next(n, [&](int64_t j, int64_t count, Offsets at) {
    const T* const row = from + at.first;
    const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
    if (row + whole <= end && j + whole <= n) {
      for (int64_t i = 0; i < count; i += kLanes) memcpy(to + j + i, row + i, 32);
    } else {
      memcpy(to + j, row, count * sizeof(T));
    }
  });
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

// The bits of the next n elements of the layout's mask, to those of zeros.
inline void gather_mask(const uint8_t* mask, const Layout& layout, Walk& walk, uint8_t* bits,
                        int64_t n) {
  const int64_t stride = layout.stride[1][0];
  walk.next(n, [=](int64_t j, int64_t count, Offsets at) {
    gather_bits(mask, at.second, stride, bits, j, count);
  });
}

// Whether the layout's mask is in the order of the result.
inline bool has_dense_mask(const Layout& layout) {
  int64_t dense = 1;
  for (int d = 0; d < layout.ndim; ++d) {
    if (layout.stride[1][d] != dense) return false;
    dense *= layout.size[d];
  }
  return true;
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

template <typename Bits>
void relu_strided_body(Order<Bits> order, const Bits* x, Bits* out, int64_t begin, int64_t end,
                       const Layout& layout) {
  const int64_t stride = layout.stride[0][0];
  Walk walk(layout, begin);
  const bool in_place = x == out;
  // Rows that are made where they go. 2^15 of 20 floats take 40 us; gathered first, 66.
  if (in_place || (stride == 1 && layout.size[0] >= 16)) {
    walk.next(end - begin, [&](int64_t j, int64_t count, Offsets at) {
      const Bits* const from = x + at.first;
      Bits* const to = out + (in_place ? at.first : begin + j);
      if (stride == 1) return relu_few(order, from, to, count);
      for (int64_t k = 0; k < count; ++k) to[k * stride] = order.relu(from[k * stride]);
    });
    return;
  }
  for (int64_t i = begin; i < end; i += kStrip) {
    const int64_t n = std::min(kStrip, end - i);
    gather(x, layout, walk, out + i, n);
    relu_dense(order, out + i, out + i, n);
  }
}

template <typename Bits>
void relu_backward_strided_body(const Bits* grad_output, const uint8_t* mask, Bits* grad_input,
                                int64_t begin, int64_t end, const Layout& layout) {
  const bool is_dense = has_dense_mask(layout);
  Walk walk(layout, begin), walk_of_mask(layout, begin);
  for (int64_t i = begin; i < end; i += kStrip) {
    const int64_t n = std::min(kStrip, end - i);
    gather(grad_output, layout, walk, grad_input + i, n);
    uint8_t gathered[kStrip / 8] = {};
    if (!is_dense) gather_mask(mask, layout, walk_of_mask, gathered, n);
    const uint8_t* const bits = is_dense ? mask + i / 8 : gathered;
    relu_backward_body(grad_input + i, bits, grad_input + i, n, false);
  }
}

}  // namespace

namespace cpu {

void relu(DType dtype, const void* x, void* out, int64_t begin, int64_t end, bool streams) {
  for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    relu_body(order, static_cast<const Bits*>(x) + begin, static_cast<Bits*>(out) + begin,
              end - begin, streams);
  });
}

void relu_strided(DType dtype, const void* x, void* out, int64_t begin, int64_t end,
                  const Layout& layout) {
  for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    relu_strided_body(order, static_cast<const Bits*>(x), static_cast<Bits*>(out), begin, end,
                      layout);
  });
}

void relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin,
                    int64_t end, bool streams) {
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    relu_with_mask_body(order, static_cast<const Bits*>(x) + begin, static_cast<Bits*>(out) + begin,
                        mask + begin / 8, end - begin, streams);
  });
}

void relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                   int64_t begin, int64_t end, bool streams) {
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    relu_backward_body(static_cast<const Bits*>(grad_output) + begin, mask + begin / 8,
                       static_cast<Bits*>(grad_input) + begin, end - begin, streams);
  });
}

void relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                           void* grad_input, int64_t begin, int64_t end, const Layout& layout) {
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    relu_backward_strided_body(static_cast<const Bits*>(grad_output), mask,
                               static_cast<Bits*>(grad_input), begin, end, layout);
  });
}

}  // namespace cpu
}  // namespace kernels
