// Arithmetic of the fused pass on a CPU: division, and the sums of the bias's gradient. E is a
// dtype's struct of cpu/dtypes.h.

#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/blocks.h"
#include "cpu/map_blocks.h"

namespace kernels::cpu {
namespace {

// ------------------------------------------------------------------------- functions of a block

// out = x / divisor
template <typename E>
void divide_block(const typename E::Bits* __restrict__ x, typename E::Compute divisor,
                  typename E::Bits* __restrict__ out) {
  for (int64_t i = 0; i < kBlock; ++i) out[i] = E::narrow(E::widen(x[i]) / divisor);
}

template <typename E>
void widen_block(const typename E::Bits* __restrict__ x, typename E::Compute* __restrict__ values) {
  for (int64_t i = 0; i < kBlock; ++i) values[i] = E::widen(x[i]);
}

#ifdef __F16C__
// divide_block and widen_block for float16, by the machine's instructions that convert eight
// numbers, which take less than a fifth of the time of the loops above. They are called as the
// compilers' built-in functions, because immintrin.h takes GCC 0.4 s to compile.
typedef float EightFloats __attribute__((vector_size(32), aligned(4), may_alias));
typedef short EightHalves __attribute__((vector_size(16), aligned(2), may_alias));

EightFloats widen_eight(const uint16_t* x) {
  return __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const EightHalves*>(x));
}

template <>
void divide_block<Float16>(const uint16_t* x, float divisor, uint16_t* out) {
  constexpr int kToNearest = 0;
  for (int64_t i = 0; i < kBlock; i += 8) {
    const EightFloats quotients = widen_eight(x + i) / divisor;
    *reinterpret_cast<EightHalves*>(out + i) = __builtin_ia32_vcvtps2ph256(quotients, kToNearest);
  }
}

template <>
void widen_block<Float16>(const uint16_t* x, float* values) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    *reinterpret_cast<EightFloats*>(values + i) = widen_eight(x + i);
  }
}
#endif

// ---------------------------------------------------------------------------------------- sums

// Adds four runs of `count` elements to their sums: sums[i] += element i of each run. The runs
// begin `stride` elements apart. (A run is explained in cpu_mask.h.)
template <typename E>
void add_four_runs(const typename E::Bits* runs, int64_t stride, double* __restrict__ sums,
                   int64_t count) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    typename E::Compute values[4][kBlock];
    for (int64_t run = 0; run < 4; ++run) {
      widen_block<E>(runs + run * stride + i, values[run]);
    }
    for (int64_t j = 0; j < kBlock; ++j) {
      const double first_two = double{values[0][j]} + double{values[1][j]};
      const double last_two = double{values[2][j]} + double{values[3][j]};
      sums[i + j] += first_two + last_two;
    }
  }
  for (; i < count; ++i) {
    const auto value = [=](int64_t run) { return double{E::widen(runs[run * stride + i])}; };
    sums[i] += (value(0) + value(1)) + (value(2) + value(3));
  }
}

template <typename E>
void add_run(const typename E::Bits* run, double* __restrict__ sums, int64_t count) {
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    typename E::Compute values[kBlock];
    widen_block<E>(run + i, values);
    for (int64_t j = 0; j < kBlock; ++j) sums[i + j] += double{values[j]};
  }
  for (; i < count; ++i) sums[i] += double{E::widen(run[i])};
}

// Sums the rows of sums [rows, columns] into its first row, pairwise: adds the second half of the
// rows to the first half, until one row is left. The error of a sum then grows with log2(rows)
// alone, which matters for float64. Five rows, for example:
//
//     0 1 2 3 4   ->   0+3 1+4 2   ->   0+3+2 1+4   ->   0+3+2+1+4
void sum_rows(double* sums, int64_t rows, int64_t columns) {
  while (rows > 1) {
    const int64_t kept_rows = (rows + 1) / 2;
    double* const second_half = sums + kept_rows * columns;
    const int64_t count = (rows - kept_rows) * columns;
    for (int64_t i = 0; i < count; ++i) sums[i] += second_half[i];
    rows = kept_rows;
  }
}

// Rounds x to a float "to odd": if x is between two floats, the result is the one whose last bit is
// 1. This is the first of the two roundings of a half type: from double to float, and from float to
// the half type.
//
// Rounding to the nearest float would be wrong here. Example: x = 1 + 2^-11 + 2^-40. The nearest
// float, 1 + 2^-11, is halfway between two float16 numbers, and would be rounded to the even one,
// 1, although 1 + 2^-10 is nearer to x. Rounded to odd, x is 1 + 2^-11 + 2^-23, and then 1 + 2^-10.
float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const bool is_exact = static_cast<double>(nearest) == x;
  const bool is_nan = x != x;
  const uint32_t bits = Float32::narrow(nearest);
  const bool is_odd = (bits & 1) != 0;
  if (is_exact || is_nan || is_odd) return nearest;
  // The other neighbour of x. The bits of floats of one sign are in the order of their magnitudes.
  const bool is_nearest_smaller = std::abs(static_cast<double>(nearest)) < std::abs(x);
  return Float32::widen(is_nearest_smaller ? bits + 1 : bits - 1);
}

template <typename E>
typename E::Bits element_nearest_to(double x) {
  constexpr bool kIsHalfPrecision = sizeof(typename E::Bits) == 2;
  if constexpr (kIsHalfPrecision) {
    return E::narrow(round_to_odd(x));
  } else {
    return E::narrow(static_cast<typename E::Compute>(x));
  }
}

}  // namespace
}  // namespace kernels::cpu
