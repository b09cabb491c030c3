// The epilogue: what happens to each sum of a product before it is stored.
//
//   z   = sum over k of x[m][k] weight[n][k], + bias[n]        float, M rows and N columns
//   out = (ReLU or no ReLU of z) / divisor                     float or a half type, rounded once
//   mask bit = !(z <= 0)                                       one bit an element, for backward
//
// The GEMM kernels and the fused pass use the definitions of this file. Each GEMM kernel has code
// of its own, which moves the sums from its accumulators to the functions below, and stores the
// results. That code has two forms, the fast epilogue for the common case, and the general epilogue
// for all calls. A call can take the fast epilogue (Epilogue::is_fast) if both of these hold:
//
//   - n is a multiple of the number of elements that the kernel stores at once. No such vector is
//     then cut off by the end of a row, and each row of out begins at a multiple of its size.
//   - The divisor is a power of two from 1 to 2^32. The division is then an exact multiplication by
//     scale = 1 / divisor, and kernels may multiply the sum and the bias one by one:
//     (sum + bias) * scale = sum * scale + bias * scale. The scaled terms never overflow, because
//     the scale is at most 1. A scaled term loses bits only if it is subnormal, and then only
//     subnormal results differ. The limit of 2^32 is there for kernels that also multiply by the
//     scales of a row of x and of a row of the weight. These are at least 2^-40 each in the fast
//     epilogue, so the product of all three scales is at least 2^-112, a normal float.
//
// ReLU makes no difference: both epilogues apply it or leave it out, as `floor` says. A tile of a
// fast call still takes the general epilogue if one of its rows of x or of the weight was scaled by
// a large power of two (kMaxFastExponent, sm90/pipeline.cuh).

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/ptx/math.cuh"
#include "common/vectors.cuh"
#include "launchers.h"

namespace kernels {

// ---------------------------------------------------------------------------------------- division

// Division by one number, which is normal and has a normal reciprocal. This general form is used
// for double. For a power of two the reciprocal is exact, and a multiplication by it gives the same
// bits as a division.
template <typename T>
struct Divisor {
  T divisor;
  T reciprocal;
  bool is_power_of_two;

  explicit Divisor(double value) : divisor(static_cast<T>(value)), reciprocal(T{1} / divisor) {
    int exponent;
    is_power_of_two = std::abs(std::frexp(divisor, &exponent)) == T{0.5};
  }

  __device__ T quotient(T x) const { return is_power_of_two ? x * reciprocal : x / divisor; }
};

// Division of floats without the branches and the slow path of the general division. The divisor is
// written as
//
//   divisor = +-mantissa * 2^exponent, 1 <= mantissa < 2        for example 6 = 1.5 * 2^2
//
// so that x / divisor = (x / mantissa) * scale, with scale = +-2^-exponent. The multiplication by
// scale is exact, unless the result is subnormal. The float nearest to x / mantissa takes three
// steps (Markstein, IBM J. Res. Dev. 34(1), 1990). The example on the right divides 8 by 1.5 in
// decimal numbers of four digits, with the reciprocal 0.6667:
//
//   1. q = x * reciprocal                        8 * 0.6667 = 5.3336, rounded to 5.334
//   2. remainder = x - q * mantissa              8 - 5.334 * 1.5 = -0.001
//   3. quotient = q + remainder * reciprocal     5.334 - 0.001 * 0.6667 = 5.3333333, to 5.333
//
// After step 1, two roundings (of the reciprocal and of the product) have left q about one unit in
// its last place off. Step 2 is one fma, and its result is exact: because q is so close, the
// leading digits of q * mantissa cancel against those of x, and the digits that are left fit into a
// float. Step 3 is one fma, too, so its sum is rounded once.
//
// Why that gives the float nearest to x / mantissa: before it is rounded, the sum of step 3 is off
// by the remainder times the error of the reciprocal, which is about 2^-24 units in the last place.
// Rounding goes the wrong way only if x / mantissa is that close to a midpoint between two floats.
// But a quotient of two floats keeps a distance from every midpoint c. The reason is that
// x - c * mantissa is a multiple of the last digit of the product c * mantissa, and is never 0.
// Markstein's theorem says that this distance suffices if the reciprocal is correctly rounded.
//
// There are three exceptions. A subnormal result is rounded twice, in step 3 and by scale. If |x|
// is below 2^-102, the remainder may be subnormal and not exact, so that a normal result may differ
// from the nearest float in its last bit; of random x near 2^-116, about 1 in 10,000 does. And x =
// -0.0 has the remainder +0.0, so that the quotient has the sign of +0.0 / divisor.
template <>
struct Divisor<float> {
  float mantissa;
  float reciprocal;      // of the mantissa
  float scale;           // 2^-exponent, with the divisor's sign
  bool is_power_of_two;  // the mantissa is 1, so that scale is the exact reciprocal of the divisor

  explicit Divisor(double value) {
    const float divisor = static_cast<float>(value);
    const int exponent = std::ilogb(divisor);
    mantissa = std::scalbn(std::abs(divisor), -exponent);
    reciprocal = 1 / mantissa;
    scale = std::copysign(std::scalbn(1.0f, -exponent), divisor);
    is_power_of_two = mantissa == 1;
  }

  __device__ float quotient(float x) const {
    if (is_power_of_two) return x * scale;
    float q = x * reciprocal;
    const bool is_finite = fabsf(q) < INFINITY;  // the remainder of an infinite x would be NaN
    if (is_finite) {
      const float remainder = fmaf(-q, mantissa, x);
      q = fmaf(remainder, reciprocal, q);
    }
    return q * scale;
  }
};

// ----------------------------------------------------------------------------------- from z to out

// What the epilogue of one call needs. T is the element type of bias and out: float or a half type.
template <typename T>
struct Epilogue {
  const T* bias;  // [n], or null
  T* out;         // [m, n], contiguous
  uint8_t* mask;  // [m, (n + 7) / 8], or null
  int m;
  int n;
  float floor;  // results below are replaced by 0: it is 0 for ReLU, and -infinity for no ReLU
  Divisor<float> divisor;
  bool is_fast;  // whether the call can take the fast epilogue; see the top of this file

  // `vector_size` is the number of elements of a row that the kernel's fast epilogue stores at
  // once.
  explicit Epilogue(const LinearArguments& linear, int64_t vector_size = 1)
      : bias(static_cast<const T*>(linear.bias)),
        out(static_cast<T*>(linear.out)),
        mask(linear.mask),
        m(static_cast<int>(linear.m)),
        n(static_cast<int>(linear.n)),
        floor(linear.relu ? 0.0f : -INFINITY),
        divisor(linear.divisor),
        is_fast(linear.n % vector_size == 0 && divisor.is_power_of_two && divisor.scale <= 1 &&
                divisor.scale >= 0x1p-32f) {}

  // The result for z, in the general and in the fast epilogue. Both pass NaN on.
  __device__ float finish(float z) const { return divisor.quotient(z < floor ? 0.0f : z); }
  __device__ float finish_fast(float z) const { return ptx::max_nan(z, floor) * divisor.scale; }

  __device__ T* out_at(int row, int column) const {
    return out + static_cast<int64_t>(row) * n + column;
  }
  // The mask's byte that holds the bit of this row and column.
  __device__ uint8_t* mask_at(int row, int column) const {
    return mask + static_cast<int64_t>(row) * ((n + 7) / 8) + column / 8;
  }
};

// ------------------------------------------------------------------ stores of the general epilogue

// Stores four neighbouring elements of a row. If `is_aligned`, `to` is a multiple of their size,
// all four exist, and one instruction stores them. Otherwise the first `count` exist (all four, if
// count is larger), and they are stored one by one.
template <typename T>
__device__ void store_four(T* to, const float (&v)[4], int64_t count, bool is_aligned) {
  if (is_aligned) {
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(ptx::pack<T>(v[0], v[1]), ptx::pack<T>(v[2], v[3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = static_cast<T>(v[i]);
  }
}

// The general epilogue of four neighbouring elements of a row: makes results and mask bits from
// their z, and stores them. `column` is that of the first element and a multiple of 4.
//
// A byte of the mask has the bits of 8 columns, so two threads share one. Their lanes differ in the
// bit kLaneBit, which is 1, 2, 4, 8 or 16:
//
//   column of the byte   0 1 2 3     4 5 6 7
//   lane                    l      l ^ kLaneBit
//   bits of the byte     0 1 2 3     4 5 6 7       stored by the thread of columns 0 to 3
//
// All threads of a warp must call it, because they exchange bits. A thread whose row does not exist
// has `row_exists` false, and stores nothing.
template <int kLaneBit, typename T>
__device__ void finish_four(const Epilogue<T>& p, bool row_exists, int row, int column,
                            const float (&z)[4]) {
  const bool exists = row_exists && column < p.n;
  if (p.mask != nullptr) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool passes = column + i < p.n && mask_bit(z[i]);  // 0 past the end of the row
      bits |= uint32_t{passes} << i;
    }
    bits |= __shfl_xor_sync(0xffffffff, bits, kLaneBit) << 4;
    const bool stores_byte = exists && column % 8 == 0;
    if (stores_byte) *p.mask_at(row, column) = static_cast<uint8_t>(bits);
  }
  if (!exists) return;
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = p.finish(z[i]);
  store_four(p.out_at(row, column), out, p.n - column, p.n % 4 == 0);
}

}  // namespace kernels
