// The passes after the product of Linear -> ReLU -> divide on the CPU, and their backward, as
// launchers.h describes them: one thread's share at a time.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/elements.h"
#include "cpu/large_outputs.h"
#include "launchers.h"

namespace kernels::cpu {
namespace {

// Elements that stay in L1 between passes: columns of a row, or whole rows.
constexpr int64_t kStrip = 512;
// A column of gradients is summed in runs of this many rows, and then the runs: whatever the number
// of threads, and with a small error where there are many rows.
constexpr int64_t kRun = 64;

template <typename E>
void divide_block(const typename E::Bits* __restrict__ x, typename E::Sum divisor,
                  typename E::Bits* __restrict__ out) {
  for (int64_t i = 0; i < kBlock; ++i) out[i] = E::narrow(E::widen(x[i]) / divisor);
}

template <typename E>
void add(const typename E::Bits* __restrict__ x, typename E::Sum* __restrict__ sums, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sums[i] += E::widen(x[i]);
}

#ifdef __F16C__
// By the machine's conversions, of which GCC 12 makes no vectors, in a fifth of the time (EPYC).
typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef short Halves __attribute__((vector_size(16), aligned(2), may_alias));

Floats widen(const uint16_t* x) {
  return __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const Halves*>(x));
}

template <>
void divide_block<Float16>(const uint16_t* x, float divisor, uint16_t* out) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    *reinterpret_cast<Halves*>(out + i) = __builtin_ia32_vcvtps2ph256(widen(x + i) / divisor, 0);
  }
}

template <>
void add<Float16>(const uint16_t* x, float* sums, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) *reinterpret_cast<Floats*>(sums + i) += widen(x + i);
  for (; i < n; ++i) sums[i] += Float16::widen(x[i]);
}
#endif

// body(i, byte, bits) for each byte of the mask of rows of n: so many are used, from element i on.
template <typename Byte, typename Body>
void for_bytes(Byte* mask, int64_t rows, int64_t n, const Body& body) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < n; j += 8) body(row * n + j, mask++, std::min<int64_t>(n - j, 8));
  }
}

}  // namespace

void linear_fused_pass(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                       int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    const int64_t row_bytes = (n + 7) / 8;
    for (int64_t byte = begin, bytes; byte < end; byte += bytes) {
      const int64_t row = byte / row_bytes, j = byte % row_bytes * 8;
      const int64_t whole_rows = j == 0 ? std::min(kStrip / n, (end - byte) / row_bytes) : 0;
      const int64_t rows = std::max<int64_t>(whole_rows, 1);
      const int64_t columns = std::min({n - j, kStrip, (end - byte) * 8});
      bytes = rows * ((columns + 7) / 8);
      Bits* const z = static_cast<Bits*>(out) + row * n + j;
      uint8_t strip[kStrip / 8 + 1];  // the bits of all rows, without gaps
      map_blocks(z, z, rows * columns, /*streams=*/false,
                 [&](int64_t i, const Bits* from, Bits* made, auto) {
                   Bits kept[kBlock];
                   relu_block<E>(from, kept);
                   const uint64_t bits = mask == nullptr ? 0 : mask_of_block(kept);
                   memcpy(strip + i / 8, &bits, sizeof(bits));
                   divide_block<E>(kept, static_cast<typename E::Sum>(divisor), made);
                 });
      if (mask == nullptr) continue;
      if (rows == 1) {
        std::copy_n(strip, bytes, mask + byte);
      } else if (n == 1) {
        for (int64_t i = 0; i < rows; ++i) mask[byte + i] = strip[i / 8] >> i % 8 & 1;
      } else {
        for_bytes(mask + byte, rows, n, [&](int64_t i, uint8_t* to, int64_t bits) {
          const int both = strip[i / 8] | strip[i / 8 + 1] << 8;
          *to = static_cast<uint8_t>(both >> i % 8 & ((1 << bits) - 1));
        });
      }
    }
  });
}

int64_t linear_fused_pass_backward_runs(int64_t m) { return (m + kRun - 1) / kRun; }
int64_t linear_fused_pass_backward_strips(int64_t n) { return (n + kStrip - 1) / kStrip; }

void linear_fused_pass_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                                double divisor, void* grad_z, void* sums, int64_t m, int64_t n,
                                int64_t begin, int64_t end) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    using Bits = typename E::Bits;
    using Sum = typename E::Sum;
    const int64_t strips = linear_fused_pass_backward_strips(n), row_bytes = (n + 7) / 8;
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t run = piece / strips, j = piece % strips * kStrip;
      const int64_t columns = std::min(kStrip, n - j), last = std::min(run * kRun + kRun, m);
      const int64_t most_rows = columns < n ? 1 : std::min(kStrip / n, last - run * kRun);
      Sum sum[kStrip];  // of the elements at each place of a strip
      std::fill_n(sum, most_rows * columns, 0);
      for (int64_t row = run * kRun, rows; row < last; row += rows) {
        rows = std::min(most_rows, last - row);
        const uint8_t* const bits = mask + row * row_bytes + j / 8;
        const bool has_gaps = rows > 1 && n % 8 != 0;
        uint8_t flags[kStrip + kBlock];
        if (n == 1) {
          std::copy_n(bits, rows, flags);
        } else if (has_gaps) {
          for_bytes(bits, rows, n, [&](int64_t i, const uint8_t* from, int64_t) {
            const uint64_t bytes = *from * 0x0101010101010101u & 0x8040201008040201u;
            memcpy(flags + i, &bytes, sizeof(bytes));
          });
        }
        Bits* const z = static_cast<Bits*>(grad_z) + row * n + j;
        map_blocks(static_cast<const Bits*>(grad_output) + row * n + j, z, rows * columns,
                   /*streams=*/false, [&](int64_t i, const Bits* from, Bits* made, auto bytes) {
                     Bits divided[kBlock];
                     divide_block<E>(from, static_cast<Sum>(divisor), divided);
                     uint64_t kept = 0;
                     memcpy(&kept, bits + i / 8, bytes);
                     if (!has_gaps) return select_block(divided, kept, made);
                     for (int64_t k = 0; k < kBlock; ++k) {
                       made[k] = divided[k] & static_cast<Bits>(-Bits{flags[i + k] != 0});
                     }
                   });
        if (sums != nullptr) add<E>(z, sum, rows * columns);
      }
      if (sums == nullptr) continue;
      for (int64_t rows = most_rows, half; rows > 1; rows = half) {
        half = (rows + 1) / 2;
        for (int64_t i = 0; i < (rows - half) * columns; ++i) sum[i] += sum[half * columns + i];
      }
      std::copy_n(sum, columns, static_cast<Sum*>(sums) + run * n + j);
    }
  });
}

void linear_fused_pass_backward_sum(DType dtype, void* sums, void* grad_bias, int64_t m,
                                    int64_t n) {
  for_floating(dtype, [=](auto element) {
    using E = decltype(element);
    auto* const total = static_cast<typename E::Sum*>(sums);
    for (int64_t run = 1; run < linear_fused_pass_backward_runs(m); ++run) {
      for (int64_t j = 0; j < n; ++j) total[j] += total[run * n + j];
    }
    for (int64_t j = 0; j < n; ++j) {
      static_cast<typename E::Bits*>(grad_bias)[j] = E::narrow(m == 0 ? 0 : total[j]);
    }
  });
}

}  // namespace kernels::cpu
