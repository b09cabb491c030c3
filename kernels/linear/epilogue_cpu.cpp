// The passes after the product of Linear -> ReLU -> divide on the CPU, and their backward, as
// launchers.h describes them: one thread's share at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/elements.h"
#include "launchers.h"

namespace kernels {
namespace {

// A column of gradients is summed in runs of this many, and then the runs, which keeps the error
// small where there are many rows.
constexpr int64_t kRun = 64;

// Not inlined, which would compile them anew for every use.

template <typename E, typename T = typename E::Bits>
__attribute__((noinline)) void divide(const T* x, typename E::Sum divisor, T* out, int64_t n) {
#pragma GCC ivdep  // x is out, or apart from it
  for (int64_t i = 0; i < n; ++i) out[i] = E::narrow(E::widen(x[i]) / divisor);
}

template <typename E, typename T = typename E::Bits>
__attribute__((noinline)) void add(const T* x, typename E::Sum* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += E::widen(x[i]);
}

template <typename Sum>
__attribute__((noinline)) void end_run(Sum* run, Sum* total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += run[i], run[i] = 0;
}

}  // namespace

namespace cpu {

void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                     int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    const int64_t row_bytes = (n + 7) / 8;
    int64_t row = begin / row_bytes, j = begin % row_bytes * 8, strip_end;
    for (int64_t byte = begin; byte < end; byte += (strip_end - j + 7) / 8, j = strip_end) {
      if (j == n) ++row, j = 0;
      strip_end = std::min({n, j + kStrip, j + (end - byte) * 8});
      const auto to = static_cast<typename E::Bits*>(out) + row * n;
      if (mask == nullptr) {
        relu(dtype, to, to, j, strip_end, false);
      } else {
        relu_with_mask(dtype, to, to, mask + row * row_bytes, j, strip_end, false);
      }
      divide<E>(to + j, static_cast<typename E::Sum>(divisor), to + j, strip_end - j);
    }
  });
}

void linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                              double divisor, void* grad_z, void* grad_bias, void* sums, int64_t m,
                              int64_t n, int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using T = typename E::Bits;
    using Sum = typename E::Sum;
    Sum* const total = static_cast<Sum*>(sums);
    Sum* const run = total + n;
    if (grad_bias != nullptr) {
      for (Sum* sum : {total, run}) memset(sum + begin, 0, (end - begin) * sizeof(Sum));
    }
    for (int64_t row = 0; row < m; ++row) {
      const auto from = static_cast<const T*>(grad_output) + row * n;
      const auto to = static_cast<T*>(grad_z) + row * n;
      for (int64_t j = begin; j < end; j += kStrip) {
        const int64_t strip_end = std::min(j + kStrip, end);
        divide<E>(from + j, static_cast<Sum>(divisor), to + j, strip_end - j);
        relu_backward(dtype, to, mask + row * ((n + 7) / 8), to, j, strip_end, false);
        if (grad_bias != nullptr) add<E>(to + j, run + j, strip_end - j);
      }
      if (grad_bias != nullptr && (row % kRun == kRun - 1 || row == m - 1)) {
        end_run(run + begin, total + begin, end - begin);
      }
    }
    if (grad_bias != nullptr) {
      for (int64_t j = begin; j < end; ++j) static_cast<T*>(grad_bias)[j] = E::narrow(total[j]);
    }
  });
}

}  // namespace cpu
}  // namespace kernels
