// What follows the product in Linear -> ReLU -> divide on the CPU, and its backward, as launchers.h
// describes them: one thread's share at a time.

#include <cstdint>
#include <cstring>

#include "elements.h"
#include "launchers.h"

namespace kernels {
namespace {

template <typename E, typename T = typename E::Bits>
void relu_divide(T* out, typename E::Sum divisor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = E::narrow(E::widen(E::kOrder.relu(out[i])) / divisor);
  }
}

template <typename E, typename T = typename E::Bits>
void linear_epilogue_row(T* out, typename E::Sum divisor, uint8_t* mask, int64_t n) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    uint8_t flags[kBlock];
    for (int64_t j = 0; j < kBlock; ++j) flags[j] = E::kOrder.keeps_gradient(out[i + j]) ? 0xff : 0;
    pack_flags(flags, mask + i / 8);
    relu_divide<E>(out + i, divisor, kBlock);
  }
  for (; i < n; i += 8) {
    const int64_t count = n - i < 8 ? n - i : 8;
    uint8_t bits = 0;
    for (int64_t j = 0; j < count; ++j) {
      bits |= static_cast<uint8_t>(E::kOrder.keeps_gradient(out[i + j]) << j);
    }
    mask[i / 8] = bits;
    relu_divide<E>(out + i, divisor, count);
  }
}

// The reverse of pack_flags: byte i of the result is not zero where bit i of `bits` is set.
inline uint64_t spread_bits(uint8_t bits) {
  return bits * 0x0101010101010101u & 0x8040201008040201u;
}

// A column of gradients is summed in runs of this many, and then the runs, which keeps the error
// small where there are many rows.
constexpr int64_t kRun = 64;

template <typename E, typename T = typename E::Bits, typename Sum = typename E::Sum>
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

template <typename E, typename T = typename E::Bits, typename Sum = typename E::Sum>
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

}  // namespace

namespace cpu {

void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n) {
  for_floating(dtype, [&](auto element) {
    using E = decltype(element);
    typename E::Bits* const rows = static_cast<typename E::Bits*>(out);
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
    using T = typename E::Bits;
    using Sum = typename E::Sum;
    linear_epilogue_backward_body<E>(static_cast<const T*>(grad_output), mask,
                                     static_cast<Sum>(divisor), static_cast<T*>(grad_z),
                                     static_cast<T*>(grad_bias), static_cast<Sum*>(sums), m, n,
                                     begin, end);
  });
}

}  // namespace cpu
}  // namespace kernels
