// The passes after the product of Linear -> ReLU -> divide on the CPU, and their backward, as
// launchers.h describes them: one thread's share at a time.

#include <algorithm>
#include <cstdint>

#include "cpu/elements.h"
#include "launchers.h"

namespace kernels {
namespace {

// Elements that stay in L1 between passes: columns of a row, or whole rows.
constexpr int64_t kStrip = 512;
// A column of gradients is summed in runs of this many rows, and then the runs: whatever the number
// of threads, and with a small error where there are many rows.
constexpr int64_t kRun = 64;

// A byte for each element of a strip. The last byte of a row of the mask has bits that stand for no
// column: the next row overwrites their flags, and those of the last row go to the spare ones.
using Flags = uint8_t[kStrip + 8];

// body(i, byte, bits) for each byte of the rows of a strip's mask: so many of its bits are used,
// for the elements from i on. The first row begins at `mask`, the next ones row_bytes apart.
template <typename Byte, typename Body>
void for_bytes(Byte* mask, int64_t rows, int64_t columns, int64_t row_bytes, const Body& body) {
  for (int64_t row = 0; row < rows; ++row, mask += row_bytes) {
    for (int64_t j = 0; j < columns; j += 8) {
      body(row * columns + j, mask + j / 8, std::min<int64_t>(columns - j, 8));
    }
  }
}

// Two loops, as compilers make no vectors of one.
template <typename E, typename Bits = typename E::Bits>
void divide_kept(const Bits* __restrict__ grad, const uint8_t* __restrict__ flags,
                 typename E::Sum divisor, Bits* __restrict__ out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = E::narrow(E::widen(grad[i]) / divisor);
  for (int64_t i = 0; i < n; ++i) {
    out[i] &= static_cast<Bits>(-static_cast<Bits>(flags[i] != 0));
  }
}

}  // namespace

namespace cpu {

void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                     int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    const int64_t row_bytes = (n + 7) / 8;
    for (int64_t byte = begin; byte < end;) {
      const int64_t row = byte / row_bytes, j = byte % row_bytes * 8;
      const int64_t whole_rows = j == 0 ? std::min(kStrip / n, (end - byte) / row_bytes) : 0;
      const int64_t rows = std::max<int64_t>(whole_rows, 1);
      const int64_t columns = std::min({n - j, kStrip, (end - byte) * 8});
      const auto z = static_cast<typename E::Bits*>(out) + row * n + j;
      const int64_t count = rows * columns;
      if (mask != nullptr) {
        Flags flags;
        for (int64_t i = 0; i < count; ++i) flags[i] = Order<E>::keeps_gradient(z[i]) ? 0xff : 0;
        for_bytes(mask + byte, rows, columns, row_bytes, [&](int64_t i, uint8_t* to, int64_t bits) {
          *to = static_cast<uint8_t>(pack_byte(flags + i) & ((1 << bits) - 1));
        });
      }
      const auto by = static_cast<typename E::Sum>(divisor);
      for (int64_t i = 0; i < count; ++i) z[i] = E::narrow(E::widen(Order<E>::relu(z[i])) / by);
      byte += rows * ((columns + 7) / 8);
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
    using Bits = typename E::Bits;
    using Sum = typename E::Sum;
    const int64_t strips = linear_epilogue_backward_strips(n), row_bytes = (n + 7) / 8;
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t run = piece / strips, j = piece % strips * kStrip;
      const int64_t columns = std::min(kStrip, n - j), last = std::min(run * kRun + kRun, m);
      Sum sum[kStrip] = {};
      for (int64_t row = run * kRun, rows; row < last; row += rows) {
        rows = columns < n ? 1 : std::min(std::max<int64_t>(kStrip / n, 1), last - row);
        const int64_t first = row * n + j;
        Flags flags;
        for_bytes(mask + row * row_bytes + j / 8, rows, columns, row_bytes,
                  [&](int64_t i, const uint8_t* from, int64_t) { unpack_byte(*from, flags + i); });
        Bits* const z = static_cast<Bits*>(grad_z) + first;
        divide_kept<E>(static_cast<const Bits*>(grad_output) + first, flags,
                       static_cast<Sum>(divisor), z, rows * columns);
        for (int64_t i = 0; sums != nullptr && i < rows; ++i) {
          for (int64_t k = 0; k < columns; ++k) sum[k] += E::widen(z[i * columns + k]);
        }
      }
      if (sums != nullptr) std::copy_n(sum, columns, static_cast<Sum*>(sums) + run * n + j);
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
