// ReLU on the CPU: forward, forward that also packs the mask for backward, backward; dense or read
// through a Layout. Each function makes one thread's elements, as launchers.h describes it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/elements.h"
#include "launchers.h"
#include "relu/order.h"

namespace kernels {
namespace {

constexpr size_t kCacheLine = 64;
// Bytes that prefetches are ahead: of loads whose results are stored non-temporally, for 0.83 of
// the time of 1 GiB of float32, and of stores into L2, for 0.7 of the time of 32 KiB (Xeon).
constexpr int64_t kLoadsAhead = 4096, kStoresAhead = 1024;
// Bytes up to which a thread's stores are prefetched: 16 MiB take 1.2 times as long (EPYC 9005).
constexpr int64_t kPrefetchedBytes = 256 << 10;

// 32 bytes of elements, and the same as signed integers.
template <typename Bits>
struct Vector {
  typedef Bits Lanes __attribute__((vector_size(32)));
  typedef typename Order<Bits>::Signed Signed __attribute__((vector_size(32)));
};

// Maps of an element and of a vector.
template <typename Bits>
struct Relu {
  using Lanes = typename Vector<Bits>::Lanes;
  using Signed = typename Vector<Bits>::Signed;
  Order<Bits> order;

  Bits operator()(Bits x) const { return order.relu(x); }
  void operator()(Lanes* v) const { *v &= (Lanes)((Signed)(*v - order.offset) >= order.limit); }
};
struct Copy {
  template <typename Bits>
  Bits operator()(Bits x) const {
    return x;
  }
  template <typename Lanes>
  void operator()(Lanes*) const {}
};

// Prefetches a block. kWrites and kLocality are those of __builtin_prefetch.
template <int kWrites, int kLocality, typename T>
void prefetch_block(const T* block) {
#pragma GCC unroll 8
  for (size_t line = 0; line < kBlock * sizeof(T); line += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(block) + line, kWrites, kLocality);
  }
}

// Non-temporal stores of a block, where the machine has them. Ordinary stores first read the lines
// that they are about to overwrite. 32 bytes at a time take 0.95 of the time of 16 (Xeon).
template <typename T>
void store_non_temporal(const T* block, T* out) {
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
// hold. Returns how many were made: none in place, where a cache has the lines that the results go
// to, or where out is not aligned.
template <typename T, typename Make>
int64_t stream_blocks(const T* from, T* out, int64_t n, const Make& make) {
  if (from == out || reinterpret_cast<uintptr_t>(out) % kCacheLine != 0) return 0;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_block<0, 2>(from + i + kLoadsAhead / static_cast<int64_t>(sizeof(T)));
    alignas(kCacheLine) T block[kBlock];
    make(i, block);
    store_non_temporal(block, out + i);
  }
#ifdef __SSE2__
  _mm_sfence();  // non-temporal stores are not ordered before what tells other threads of them
#endif
  return i;
}

template <typename T, typename Map>
void map_few(Map map, const T* x, T* out, int64_t n) {
#pragma GCC ivdep  // x is out, or apart from it
  for (int64_t i = 0; i < n; ++i) out[i] = map(x[i]);
}

template <typename Bits>
void relu_few(Order<Bits> order, const Bits* x, Bits* out, int64_t n) {
  map_few(Relu<Bits>{order}, x, out, n);
}

// Not inlined: one copy serves all uses.
template <typename Bits>
__attribute__((noinline)) void relu_dense(Order<Bits> order, const Bits* x, Bits* out, int64_t n) {
  const bool prefetches = x != out && n * static_cast<int64_t>(sizeof(Bits)) <= kPrefetchedBytes;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    // Not beyond the end, where another thread stores: 0.9 of the time for 2^16 floats.
    constexpr int64_t kAhead = kStoresAhead / static_cast<int64_t>(sizeof(Bits));
    if (prefetches) prefetch_block<1, 3>(out + std::min(i + kAhead, n - kBlock));
#pragma GCC ivdep  // x is out, or apart from it
    for (int64_t j = 0; j < kBlock; ++j) out[i + j] = order.relu(x[i + j]);
  }
  relu_few(order, x + i, out + i, n - i);
}

// ReLU of kBlock elements, and their mask; or the mask alone, of an x that is relu's output. x may
// be out.
template <bool kMaskAlone = false, typename Bits>
void relu_with_mask_block(Order<Bits> order, const Bits* x, Bits* out, uint8_t* mask) {
#ifdef __AVX2__
  // GCC narrows comparisons of wide elements to bytes, which takes 1.4 to 1.7 times as long.
  if constexpr (sizeof(Bits) >= 4) {
    using Lanes = typename Vector<Bits>::Lanes;
    using Signed = typename Vector<Bits>::Signed;
    constexpr size_t kLanes = sizeof(Lanes) / sizeof(Bits);
    typedef float Floats __attribute__((vector_size(32)));
    typedef double Doubles __attribute__((vector_size(32)));
    uint64_t bits = 0;
    static_assert(kBlock == 64, "a bit each");
#pragma GCC unroll 8
    for (size_t i = 0; i < kBlock; i += kLanes) {
      Lanes v;
      memcpy(&v, x + i, sizeof(v));
      // Those that keeps_gradient; or, of relu's output, the others: the zeros of both signs.
      const Signed found = kMaskAlone ? (Signed)(v + v == 0) : ((Signed)v > order.limit) & (v != 0);
      const uint64_t signs = sizeof(Bits) == 4 ? __builtin_ia32_movmskps256((Floats)found)
                                               : __builtin_ia32_movmskpd256((Doubles)found);
      bits |= signs << i;
      if (kMaskAlone) continue;
      Relu<Bits>{order}(&v);
      memcpy(out + i, &v, sizeof(v));
    }
    if (kMaskAlone) bits = ~bits;
    memcpy(mask, &bits, sizeof(bits));
    return;
  }
#endif
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) flags[i] = order.keeps_gradient(x[i]) ? 0xff : 0;
  pack_flags(flags, mask);
  if (!kMaskAlone) relu_few(order, x, out, kBlock);
}

// A place in the operand of a layout, whose elements are taken in the result's order.
class Cursor {
 public:
  Cursor(const Layout& layout, int64_t i) : layout_(layout) {
    for (int d = 0; d < layout.ndim; ++d) {
      coordinate_[d] = i % layout.size[d];
      offset_ += coordinate_[d] * layout.stride[d];
      i /= layout.size[d];
    }
  }

  // Rows next to each other in the result, as far apart in the operand as `step` says.
  struct Rows {
    int64_t count;
    int64_t size;    // of each
    int64_t offset;  // of the first
    int64_t step;    // from a row to the next
  };

  // body(j, rows) for the rows, or parts of one, of the next n elements: the j-th and those after
  // it.
  template <typename Body>
  void next_rows(int64_t n, const Body& body) {
    for (int64_t j = 0; j < n;) {
      const Rows rows = take(n - j);
      body(j, rows);
      j += rows.count * rows.size;
    }
  }

  // body(j, count, offset) for each of these rows.
  template <typename Body>
  void next(int64_t n, const Body& body) {
    next_rows(n, [&](int64_t j, const Rows& rows) {
      for (int64_t row = 0; row < rows.count; ++row) {
        body(j + row * rows.size, rows.size, rows.offset + row * rows.step);
      }
    });
  }

 private:
  // Whole rows of the next n elements, up to the end of dimension 1, or a part of a row. Not
  // inlined: one copy serves all bodies.
  __attribute__((noinline)) Rows take(int64_t n) {
    const int64_t size = layout_.size[0];
    const int d = layout_.ndim > 1 && coordinate_[0] == 0 && n >= size;
    const int64_t row = d == 1 ? size : std::min(size - coordinate_[0], n);
    const int64_t count = d == 1 ? std::min(layout_.size[1] - coordinate_[1], n / size) : 1;
    const Rows rows{count, row, offset_, layout_.stride[d]};
    move(d, d == 1 ? count : row);
    for (int at = d; at < layout_.ndim - 1 && coordinate_[at] == layout_.size[at]; ++at) {
      move(at, -layout_.size[at]);
      move(at + 1, 1);
    }
    return rows;
  }

  void move(int d, int64_t steps) {
    coordinate_[d] += steps;
    offset_ += steps * layout_.stride[d];
  }

  const Layout& layout_;
  int64_t coordinate_[kMaxDims];
  int64_t offset_ = 0;
};

// to[i] = map(row[i * stride]).
template <typename T, typename Map>
void map_strided(const T* row, int64_t stride, T* to, int64_t count, const Map& map) {
  const auto map_by = [&](auto constant) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) to[i] = map(row[i * constant]);
  };
  switch (stride) {  // Shuffles serve constant strides.
    case 2:
      return map_by(std::integral_constant<int64_t, 2>{});
    case 3:
      return map_by(std::integral_constant<int64_t, 3>{});
    case 4:
      return map_by(std::integral_constant<int64_t, 4>{});
    default:
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; ++i) to[i] = map(row[i * stride]);
  }
}

// The same of `count` rows, `step` apart, if they have one of these sizes; returns whether they
// have. Unrolled, rows of 3 floats take a third of the time of a loop for each (EPYC).
template <int... kSizes, typename T, typename Map>
bool map_few_strided(std::integer_sequence<int, kSizes...>, const T* row, int64_t step,
                     int64_t stride, T* to, int64_t size, int64_t count, const Map& map) {
  const auto map_rows = [&](auto constant) {
    if (size != constant) return false;
    for (; count > 0; --count, row += step, to += constant) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < constant; ++i) to[i] = map(row[i * stride]);
    }
    return true;
  };
  return (map_rows(std::integral_constant<int, kSizes>{}) || ...);
}

// Not inlined: rows of 1,023 bytes take 0.8 of the time of a loop within gather (EPYC 9005).
template <typename T, typename Map>
__attribute__((noinline)) void map_row(Map map, const T* x, T* out, int64_t n) {
  map_few(map, x, out, n);
}

// Rows of `size` elements, `step` apart, or each of one element alone, to adjacent places by
// `vectors` vectors each. They may overrun the row: the next one overwrites that.
template <typename Count, typename T, typename Map>
void map_short_rows(Count vectors, const T* row, int64_t step, bool is_constant, T* to,
                    int64_t size, int64_t count, const Map& map) {
  using Lanes = typename Vector<T>::Lanes;
  constexpr size_t kLanes = sizeof(Lanes) / sizeof(T);
  if (is_constant) {
    for (; count > 0; --count, row += step, to += size) {
      Lanes lanes = Lanes{} + *row;
      map(&lanes);
      for (int64_t i = 0; i < vectors; ++i) memcpy(to + i * kLanes, &lanes, sizeof(lanes));
    }
    return;
  }
  const int64_t bytes = size * static_cast<int64_t>(sizeof(T)), ahead = kLoadsAhead / bytes * step;
  for (; count > 0; --count, row += step, to += size) {
    const auto next = reinterpret_cast<const char*>(row + ahead);
    __builtin_prefetch(next);
    if (vectors > 2) __builtin_prefetch(next + kCacheLine);
    if (vectors > 1) __builtin_prefetch(next + bytes - 1);
#pragma GCC unroll 4
    for (int64_t i = 0; i < vectors; ++i) {
      Lanes lanes;
      memcpy(&lanes, row + i * kLanes, sizeof(lanes));
      map(&lanes);
      memcpy(to + i * kLanes, &lanes, sizeof(lanes));
    }
  }
}

// Puts map of the next n elements of `from`, the layout's first operand, to adjacent places. Rows
// of up to eight vectors go by vectors, not by a loop, most of which would be its beginning and
// end.
template <typename T, typename Map>
void gather(const T* from, const Layout& layout, Cursor& cursor, T* to, int64_t n, const Map& map) {
  const int64_t stride = layout.stride[0];
  if (stride != 0 && stride != 1) {
    return cursor.next_rows(n, [&](int64_t j, const Cursor::Rows& rows) {
      const T* const first = from + rows.offset;
      constexpr std::integer_sequence<int, 2, 3, 4, 5, 6, 7, 8> kFew;
      if (map_few_strided(kFew, first, rows.step, stride, to + j, rows.size, rows.count, map))
        return;
      for (int64_t i = 0; i < rows.count; ++i) {
        map_strided(first + i * rows.step, stride, to + j + i * rows.size, rows.size, map);
      }
    });
  }
  constexpr int64_t kLanes = sizeof(typename Vector<T>::Lanes) / sizeof(T), kLong = 8 * kLanes;
  const T* end = from + 1;  // of the operand
  for (int d = 0; d < layout.ndim; ++d) end += (layout.size[d] - 1) * layout.stride[d];
  cursor.next_rows(n, [&](int64_t j, const Cursor::Rows& rows) {
    const T* row = from + rows.offset;
    const int64_t count = rows.count, size = rows.size, step = rows.step;
    // The rows that go by vectors: those overrun neither the result nor the operand.
    const int64_t vectors = (size + kLanes - 1) / kLanes;
    const int64_t room = n - j - vectors * kLanes, rest = end - row - vectors * kLanes;
    int64_t i = size <= kLong && room >= 0 ? std::min(room / size + 1, count) : 0;
    T same[kLong];
    if (stride == 1 && step == 0) {
      if (i > 0) std::copy(row, row + size, same), row = same;
    } else if (stride == 1) {
      i = rest < 0 ? 0 : std::min(rest / step + 1, i);
    }
    const auto map_by = [&](auto number) {
      map_short_rows(number, row, step, stride == 0, to + j, size, i, map);
    };
    if (vectors == 1) map_by(std::integral_constant<int, 1>{});
    if (vectors == 2) map_by(std::integral_constant<int, 2>{});
    if (vectors == 3) map_by(std::integral_constant<int, 3>{});
    if (vectors == 4) map_by(std::integral_constant<int, 4>{});
    if (vectors > 4) map_by(vectors);
    for (; i < count; ++i) {
      const T* const at = row + i * step;
      T* const made = to + j + i * size;
      if (stride == 0) {
        std::fill_n(made, size, map(*at));
      } else {
        map_row(map, at, made, size);
      }
    }
  });
}

// Selects by the bits, because a gradient may be NaN or infinite where the mask is 0. A byte of the
// mask goes to all lanes, and each lane tests its own bit. GCC 12 takes 2 to 13 times as long for
// loops in place of vectors, and for vectors of 64 bytes. Where kConstant, the gradient is the same
// for all elements, and there are kLanes of it.
template <bool kConstant = false, typename Bits>
void relu_backward_dense(const Bits* grad_output, const uint8_t* mask, Bits* grad_input, int64_t n,
                         bool streams) {
  constexpr int kLanes = sizeof(Bits) == 8 ? 4 : 8;
  typedef Bits Lanes __attribute__((vector_size(kLanes * sizeof(Bits))));
  Lanes own_bit;
  for (int lane = 0; lane < kLanes; ++lane) own_bit[lane] = static_cast<Bits>(1 << lane);
  const auto select = [&](int64_t i, Bits* to) {
    const Bits bits = static_cast<Bits>(mask[i / 8] >> (i % 8));
    Lanes lanes;
    memcpy(&lanes, kConstant ? grad_output : grad_output + i, sizeof(lanes));
    lanes &= reinterpret_cast<Lanes>((own_bit & bits) == own_bit);
    memcpy(to, &lanes, sizeof(lanes));
  };
  const auto block = [&](int64_t i, Bits* to) {
    for (int64_t j = 0; j < kBlock; j += kLanes) select(i + j, to + j);
  };
  int64_t i = streams ? stream_blocks(grad_output, grad_input, n, block) : 0;
  for (; i + kBlock <= n; i += kBlock) block(i, grad_input + i);
  for (; i + kLanes <= n; i += kLanes) select(i, grad_input + i);
  for (; i < n; ++i) {
    grad_input[i] = mask[i / 8] >> (i % 8) & 1 ? grad_output[kConstant ? 0 : i] : Bits{0};
  }
}

}  // namespace

namespace cpu {

void relu(DType dtype, const void* x, void* out, int64_t begin, int64_t end, bool streams) {
  for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const auto from = static_cast<const Bits*>(x) + begin;
    const auto to = static_cast<Bits*>(out) + begin;
    const auto block = [=](int64_t i, Bits* made) { relu_few(order, from + i, made, kBlock); };
    const int64_t i = streams ? stream_blocks(from, to, end - begin, block) : 0;
    relu_dense(order, from + i, to + i, end - begin - i);
  });
}

void relu_strided(DType dtype, const void* x, void* out, int64_t begin, int64_t end,
                  const Layout& layout) {
  for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const auto from = static_cast<const Bits*>(x);
    const auto to = static_cast<Bits*>(out);
    Cursor cursor(layout, begin);
    const Relu<Bits> relu{order};
    if (x != out) return gather(from, layout, cursor, to + begin, end - begin, relu);
    const int64_t stride = layout.stride[0];
    cursor.next(end - begin, [&](int64_t, int64_t count, int64_t offset) {
      Bits* const row = to + offset;
      if (stride == 1) return relu_few(order, row, row, count);
      for (int64_t k = 0; k < count; ++k) row[k * stride] = order.relu(row[k * stride]);
    });
  });
}

void relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin,
                    int64_t end, bool streams) {
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const auto from = static_cast<const Bits*>(x) + begin;
    const auto to = static_cast<Bits*>(out) + begin;
    uint8_t* const bits = mask + begin / 8;
    const int64_t n = end - begin;
    const auto block = [=](int64_t i, Bits* made) {
      relu_with_mask_block(order, from + i, made, bits + i / 8);
    };
    int64_t i = streams ? stream_blocks(from, to, n, block) : 0;
    for (; i + kBlock <= n; i += kBlock) block(i, to + i);
    uint64_t last = 0;
    for (int64_t j = i; j < n; ++j) last |= uint64_t{order.keeps_gradient(from[j])} << (j - i);
    memcpy(bits + i / 8, &last, (n - i + 7) / 8);
    relu_dense(order, from + i, to + i, n - i);
  });
}

void relu_with_mask_strided(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin,
                            int64_t end, const Layout& layout) {
  constexpr int64_t kStep = 4 * kStrip;
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const auto from = static_cast<const Bits*>(x);
    const auto made = static_cast<Bits*>(out);
    Cursor cursor(layout, begin);
    for (int64_t i = begin; i < end;) {  // the mask is read off the output, still in L1
      const int64_t next = std::min(i + kStep, end);
      gather(from, layout, cursor, made + i, next - i, Relu<Bits>{order});
      for (; i + kBlock <= next; i += kBlock) {
        relu_with_mask_block</*kMaskAlone=*/true>(order, made + i, made + i, mask + i / 8);
      }
      if (i < next) relu_with_mask(dtype, out, out, mask, i, next, /*streams=*/false);
      i = next;
    }
  });
}

void relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                   int64_t begin, int64_t end, bool streams) {
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    relu_backward_dense(static_cast<const Bits*>(grad_output) + begin, mask + begin / 8,
                        static_cast<Bits*>(grad_input) + begin, end - begin, streams);
  });
}

void relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                           void* grad_input, int64_t begin, int64_t end, const Layout& layout) {
  for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const auto from = static_cast<const Bits*>(grad_output);
    const auto to = static_cast<Bits*>(grad_input);
    if (layout.ndim == 1 && layout.stride[0] == 0) {  // of a sum
      Bits lanes[8];
      std::fill_n(lanes, 8, *from);
      return relu_backward_dense</*kConstant=*/true>(lanes, mask + begin / 8, to + begin,
                                                     end - begin, false);
    }
    Cursor cursor(layout, begin);
    for (int64_t i = begin; i < end; i += kStrip) {
      const int64_t n = std::min(kStrip, end - i);
      gather(from, layout, cursor, to + i, n, Copy{});
      relu_backward_dense(to + i, mask + i / 8, to + i, n, false);
    }
  });
}

}  // namespace cpu
}  // namespace kernels
