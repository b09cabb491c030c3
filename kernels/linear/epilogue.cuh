// The epilogue: what happens to each sum of a product before it is stored.
//
//   z    = bias[n] + sum over k of x[m][k] weight[n][k]   float
//   out  = relu(z) / divisor, or z / divisor              float or a half type, rounded once
//   mask = !(z <= 0)                                      one bit for each element, for backward
//
// This file has what the GEMM kernels share: the division, the arguments of a call's epilogue, and
// the stores of the general epilogue. Each GEMM kernel adds code that brings the sums from its
// accumulators to these functions. The fused pass (fused_pass.cu) uses the division only.
//
// The general epilogue of a GEMM kernel can compute every call of that kernel. Those of sm90/ also
// have a fast epilogue, for calls (Epilogue::allows_fast_epilogue) with both of these properties:
//
//   - The divisor is a power of two from 1 to 2^32 (is_small_power_of_two). The fast epilogue
//     multiplies by 1 / divisor: in half types the sum and the bias, in float32 the result.
//   - The fast epilogue's rule (FastEpilogueRule) allows the call. Each fast epilogue states its
//     rule beside its stores:
//
//       sm90/gemm_fp16x3/epilogue.cuh                     fast_epilogue_rule
//       sm90/gemm_one_product/epilogue.cuh                fast_epilogue_rule_of_float32
//       sm90/gemm_one_product/epilogue_half_types.cuh     fast_epilogue_rule_of_half_types
//
// In a fast call of float32, a part of a tile (a block's part in gemm_fp16x3, a warpgroup's in
// gemm_one_product) still takes the general epilogue if the exponent of one of its rows is very
// large or very small (FastEpilogueConfig). GradientMode of gemm_one_product has no epilogue.

#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx/math.cuh"
#include "common/sizes.h"
#include "common/vectors.cuh"
#include "launchers.h"

namespace kernels {

// ---------------------------------------------------------------------------------------- division

// Division by one number, which is normal and has a normal reciprocal. The reciprocal of a power of
// two is exact, so a multiplication by it gives the same bits as a division. double uses this
// general form.
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
// so that x / divisor = (x / mantissa) * inverse_power, with inverse_power = +-2^-exponent. The
// float nearest to x / mantissa takes three steps (Markstein, IBM J. Res. Dev. 34(1), 1990):
//
//   q = x * mantissa_reciprocal                       off by less than 2 units in its last place
//   remainder = x - q * mantissa                      nearly always exact, by one fma
//   quotient = q + remainder * mantissa_reciprocal    rounded once, by one fma
//
// The multiplication by inverse_power is exact, unless the result is subnormal. So the result has
// the bits of a true division, except where |x| is below 2^-102, the result is subnormal, or x is
// -0.0 (docs/SPLIT-PROOF.md, "Division by other divisors").
template <>
struct Divisor<float> {
  float mantissa;
  float mantissa_reciprocal;  // 1 / mantissa
  float inverse_power;        // 2^-exponent, with the divisor's sign
  bool is_power_of_two;       // the mantissa is 1, so that inverse_power is 1 / divisor, exactly

  explicit Divisor(double value) {
    const float divisor = static_cast<float>(value);
    const int exponent = std::ilogb(divisor);
    mantissa = std::scalbn(std::abs(divisor), -exponent);
    mantissa_reciprocal = 1 / mantissa;
    inverse_power = std::copysign(std::scalbn(1.0f, -exponent), divisor);
    is_power_of_two = mantissa == 1;
  }

  // Returns true for the divisors 1, 2, 4 and so on up to 2^32. With these, the fast epilogue of
  // half types gets the results of the general one by fma(sum, 1 / divisor, bias / divisor), as the
  // divisions are exact and do not overflow. Tiny numbers are exceptions: a bias / divisor below
  // 2^-126 may lose bits, so that a result below 2^-100 may differ in its last bit. With
  // 2^32, a positive z below 2^-117 may become 0, and so may its mask bit. 2^32 is the limit
  // because larger divisors would do this to a larger z.
  bool is_small_power_of_two() const {
    return is_power_of_two && inverse_power <= 1 && inverse_power >= 0x1p-32f;
  }

  __device__ float quotient(float x) const {
    if (is_power_of_two) return x * inverse_power;
    float q = x * mantissa_reciprocal;
    const bool is_finite = fabsf(q) < INFINITY;  // the remainder of an infinite x would be NaN
    if (is_finite) {
      const float remainder = fmaf(-q, mantissa, x);
      q = fmaf(remainder, mantissa_reciprocal, q);
    }
    return q * inverse_power;
  }
};

// ----------------------------------------------------------------------------------- from z to out

// The conditions of a fast epilogue for a call, besides the one for the divisor.
struct FastEpilogueRule {
  // n is a multiple of `alignment` elements. So all vectors that the fast epilogue stores are
  // aligned, and none crosses the end of a row.
  int64_t alignment;
  bool needs_relu = false;  // true if the fast epilogue always applies ReLU
};

// A part of a float32 tile takes the fast epilogue on this condition.
struct FastEpilogueConfig {
  // The exponents of all rows of x and weight in the part are from -40 to 40. The fast epilogue
  // multiplies a sum by one factor, 2^-(exponent of its row of x + exponent of its row of weight),
  // which is then from 2^-80 to 2^80, a normal float32, and so exact.
  static constexpr int kMaxExponent = 40;
};

// The arguments of one call's epilogue. T is the type of bias and out: float or a half type.
template <typename T>
struct Epilogue {
  const T* bias;  // [n], or null
  T* out;         // [m, n], contiguous
  uint8_t* mask;  // [m, (n + 7) / 8], or null
  int m;
  int n;
  float lower_limit;  // of z: 0 with ReLU, -infinity without; a z below it becomes 0
  Divisor<float> divisor;
  bool allows_fast_epilogue;  // whether the call does: the exponents of a tile may still forbid it

  explicit Epilogue(const LinearArguments& call)
      : bias(static_cast<const T*>(call.bias)),
        out(static_cast<T*>(call.out)),
        mask(call.mask),
        m(static_cast<int>(call.m)),
        n(static_cast<int>(call.n)),
        lower_limit(call.has_relu ? 0.0f : -INFINITY),
        divisor(call.divisor),
        allows_fast_epilogue(false) {}

  Epilogue(const LinearArguments& call, const FastEpilogueRule& rule) : Epilogue(call) {
    const bool is_aligned = call.n % rule.alignment == 0;
    const bool has_needed_relu = call.has_relu || !rule.needs_relu;
    allows_fast_epilogue = is_aligned && has_needed_relu && divisor.is_small_power_of_two();
  }

  // The result for z, in the general epilogue and in the fast one of float32. Both results keep
  // NaN. They may differ in the sign of a zero, which is not promised (README, "Promises"): with
  // ReLU, a z of -0.0 becomes +0.0 in the fast epilogue. The general one keeps -0.0 if the divisor
  // is a power of two.
  __device__ float finish(float z) const { return divisor.quotient(z < lower_limit ? 0.0f : z); }
  __device__ float finish_fast(float z) const {
    return ptx::max_nan(z, lower_limit) * divisor.inverse_power;
  }

  __device__ T* out_at(int row, int column) const {
    return out + static_cast<int64_t>(row) * n + column;
  }
  // The mask's byte that holds the bit of this row and column.
  __device__ uint8_t* mask_at(int row, int column) const {
    return mask + static_cast<int64_t>(row) * bytes_of_bits(n) + column / 8;
  }
};

// ---------------------------------------------------------------------------- the general epilogue

// The general epilogue of four neighbouring elements of a row: makes results and mask bits from
// their z, and stores them. `column` is the first element's, a multiple of 4. All threads of a warp
// call it. A thread whose row does not exist has `row_exists` false, and stores nothing.
//
// A byte of the mask has the bits of 8 columns, so two threads exchange bits. The numbers of their
// lanes differ only in the bit kLaneBit, which is 1, 2, 4, 8 or 16. The thread of the lower four
// columns stores the byte. Example with kLaneBit = 1:
//
//   bit = column % 8    0 1 2 3    4 5 6 7
//   lane                   6          7       lane 6 stores the byte
template <int kLaneBit, typename T>
__device__ void store_four_results(const Epilogue<T>& epilogue, bool row_exists, int row,
                                   int column, const float (&z)[4]) {
  const bool exists = row_exists && column < epilogue.n;
  if (epilogue.mask != nullptr) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool passes = column + i < epilogue.n && mask_bit(z[i]);  // 0 past the end of the row
      bits |= (passes ? 1u : 0u) << i;
    }
    bits |= __shfl_xor_sync(0xffffffff, bits, kLaneBit) << 4;
    const bool stores_byte = exists && column % 8 == 0;
    if (stores_byte) *epilogue.mask_at(row, column) = static_cast<uint8_t>(bits);
  }
  if (!exists) return;
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = epilogue.finish(z[i]);
  store_four(epilogue.out_at(row, column), out, epilogue.n - column, epilogue.n % 4 == 0);
}

}  // namespace kernels
