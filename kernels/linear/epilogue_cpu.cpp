// The passes after the product of Linear -> ReLU -> divide on the CPU, and their backward, as
// launchers.h describes them: one thread's share at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/elements.h"
#include "launchers.h"

namespace kernels {
namespace {

// A column of gradients is summed in runs of this many rows, and then the runs: whatever the number
// of threads, and with a small error where there are many rows.
constexpr int64_t kRun = 64;

// Not inlined, which would compile them anew for every use.

template <typename E, typename T = typename E::Bits>
__attribute__((noinline)) void divide(const T* x, typename E::Sum divisor, T* out, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<E, Float16>) {
    for (; i + 8 <= n; i += 8) store_halves(out + i, load_halves(x + i) / divisor);
  }
#endif
#pragma GCC ivdep  // x is out, or apart from it
  for (; i < n; ++i) out[i] = E::narrow(E::widen(x[i]) / divisor);
}

// Adds a row of n to the sums.
template <typename E, typename T = typename E::Bits>
void add_row(const T* x, typename E::Sum* sum, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<E, Float16>) {
    for (; i + 8 <= n; i += 8) {
      Floats v;
      memcpy(&v, sum + i, sizeof(v));
      v += load_halves(x + i);
      memcpy(sum + i, &v, sizeof(v));
    }
  }
#endif
  for (; i < n; ++i) sum[i] += E::widen(x[i]);
}

// Adds rows to the sums of their columns: narrow ones eight at a time, as one row, so that there
// are vectors.
template <typename E, typename T = typename E::Bits>
__attribute__((noinline)) void add(const T* x, typename E::Sum* sum, int64_t rows, int64_t n) {
  constexpr int64_t kNarrow = 16, kTogether = 8;
  if (n < kNarrow) {
    typename E::Sum sums[kTogether * kNarrow] = {};
    for (; rows >= kTogether; rows -= kTogether, x += kTogether * n) {
      add_row<E>(x, sums, kTogether * n);
    }
    for (int64_t row = 0; row < kTogether; ++row) {
      for (int64_t i = 0; i < n; ++i) sum[i] += sums[row * n + i];
    }
  }
  for (; rows > 0; --rows, x += n) add_row<E>(x, sum, n);
}

// How many rows of n columns make up a strip. Each row of a mask begins with a byte of its own; in
// a strip of several rows, the bits of one follow those of the other.
int64_t rows_of_strip(int64_t n) { return n < kBlock ? kStrip / n : 1; }
constexpr int64_t kStripBytes = kStrip / 8 + 1;

// Calls body(byte, count, place) for each byte of the rows of a mask: count of its bits are used,
// and the first of them is at this place in the strip.
template <typename Body>
void for_bytes(int64_t rows, int64_t n, const Body& body) {
  for (int64_t row = 0, byte = 0; row < rows; ++row) {
    for (int64_t j = 0; j < n; j += 8, ++byte) body(byte, std::min<int64_t>(n - j, 8), row * n + j);
  }
}

// The strip's mask of rows of a mask.
void pack_rows(const uint8_t* mask, int64_t rows, int64_t n, uint8_t (&strip)[kStripBytes]) {
  if (n == 1) {
    uint8_t flags[kStrip] = {};
    for (int64_t row = 0; row < rows; ++row) flags[row] = static_cast<uint8_t>(-(mask[row] & 1));
    for (int64_t row = 0; row < rows; row += kBlock) pack_flags(flags + row, strip + row / 8);
    return;
  }
  memset(strip, 0, sizeof(strip));
  for_bytes(rows, n, [&](int64_t byte, int64_t count, int64_t place) {
    const int bits = (mask[byte] & ((1 << count) - 1)) << place % 8;
    strip[place / 8] |= static_cast<uint8_t>(bits);
    if (bits > 0xff) strip[place / 8 + 1] |= static_cast<uint8_t>(bits >> 8);
  });
}

// The rows of a mask out of the strip's.
void unpack_rows(const uint8_t (&strip)[kStripBytes], int64_t rows, int64_t n, uint8_t* mask) {
  if (n == 1) {
    uint8_t flags[kStrip];
    for (int64_t byte = 0; byte < kStrip / 8; ++byte) {
      for (int bit = 0; bit < 8; ++bit) flags[byte * 8 + bit] = strip[byte] >> bit & 1;
    }
    memcpy(mask, flags, rows);
    return;
  }
  for_bytes(rows, n, [&](int64_t byte, int64_t count, int64_t place) {
    const int bits = strip[place / 8] | strip[place / 8 + 1] << 8;
    mask[byte] = static_cast<uint8_t>(bits >> place % 8 & ((1 << count) - 1));
  });
}

}  // namespace

namespace cpu {

void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                     int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    const int64_t row_bytes = (n + 7) / 8;
    const auto sum_divisor = static_cast<typename E::Sum>(divisor);
    int64_t row = begin / row_bytes, j = begin % row_bytes * 8;
    for (int64_t byte = begin; byte < end;) {
      const auto to = static_cast<typename E::Bits*>(out) + row * n;
      const int64_t rows = j == 0 ? std::min(rows_of_strip(n), (end - byte) / row_bytes) : 0;
      if (rows > 1) {
        uint8_t strip[kStripBytes] = {};
        relu_with_mask(dtype, to, to, strip, 0, rows * n, false);
        divide<E>(to, sum_divisor, to, rows * n);
        unpack_rows(strip, rows, n, mask + row * row_bytes);
        row += rows, byte += rows * row_bytes;
        continue;
      }
      const int64_t strip_end = std::min({n, j + kStrip, j + (end - byte) * 8});
      if (mask == nullptr) {
        relu(dtype, to, to, j, strip_end, false);
      } else {
        relu_with_mask(dtype, to, to, mask + row * row_bytes, j, strip_end, false);
      }
      divide<E>(to + j, sum_divisor, to + j, strip_end - j);
      byte += (strip_end - j + 7) / 8;
      j = strip_end;
      if (j == n) ++row, j = 0;
    }
  });
}

int64_t linear_epilogue_backward_runs(int64_t m) { return (m + kRun - 1) / kRun; }
int64_t linear_epilogue_backward_strips(int64_t n) { return (n + kStrip - 1) / kStrip; }

void linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                              double divisor, void* grad_z, void* sums, int64_t m, int64_t n,
                              int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using T = typename E::Bits;
    using Sum = typename E::Sum;
    const int64_t strips = linear_epilogue_backward_strips(n), row_bytes = (n + 7) / 8;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t run = i / strips, j = i % strips * kStrip, columns = std::min(kStrip, n - j);
      const int64_t last = std::min(run * kRun + kRun, m);
      Sum* const sum = sums == nullptr ? nullptr : static_cast<Sum*>(sums) + run * n + j;
      if (sum != nullptr) std::fill_n(sum, columns, Sum{0});
      for (int64_t row = run * kRun, rows; row < last; row += rows) {
        rows = std::min(rows_of_strip(n), last - row);
        const T* const from = static_cast<const T*>(grad_output) + row * n + j;
        T* const to = static_cast<T*>(grad_z) + row * n + j;
        const uint8_t* bits = mask + row * row_bytes + j / 8;
        uint8_t strip[kStripBytes];
        if (rows > 1 && n % 8 != 0) {
          pack_rows(bits, rows, n, strip);
          bits = strip;
        }
        divide<E>(from, static_cast<Sum>(divisor), to, rows * columns);
        relu_backward(dtype, to, bits, to, 0, rows * columns, false);
        if (sum != nullptr) add<E>(to, sum, rows, columns);
      }
    }
  });
}

void linear_epilogue_backward_sum(DType dtype, void* sums, void* grad_bias, int64_t m, int64_t n) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    auto* const total = static_cast<typename E::Sum*>(sums);
    for (int64_t run = 1; run < linear_epilogue_backward_runs(m); ++run) {
      for (int64_t j = 0; j < n; ++j) total[j] += total[run * n + j];
    }
    for (int64_t j = 0; j < n; ++j) {
      static_cast<typename E::Bits*>(grad_bias)[j] = E::narrow(m == 0 ? 0 : total[j]);
    }
  });
}

}  // namespace cpu
}  // namespace kernels
