// The epilogue: bias, ReLU and division on the accumulator, and the mask for backward.

#ifndef KERNELS_LINEAR_EPILOGUE_CUH_
#define KERNELS_LINEAR_EPILOGUE_CUH_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kernels {

// Division by one number. Where the reciprocal is exact (powers of two; zero and infinity, whose
// quotients are the products with infinity and zero), a multiplication gives the same bits. Where
// it overflows, torch multiplies by it too: 0 becomes NaN.
template <typename T>
struct Divisor {
  T divisor;
  T reciprocal;
  bool is_exact;

  explicit Divisor(double value)
      : divisor(static_cast<T>(value)), reciprocal(T{1} / divisor), is_exact(false) {
    int exponent;
    const T mantissa = std::frexp(divisor, &exponent);
    is_exact = std::abs(mantissa) == T{0.5} || reciprocal == T{0} || !std::isfinite(reciprocal);
  }

  __device__ T quotient(T x) const { return is_exact ? x * reciprocal : x / divisor; }
};

// In float, without the branches of a general division, of which a kernel would have one for every
// element that a thread holds: the quotient by the divisor's mantissa is corrected by its
// remainder, which makes it the nearest float (Markstein, IBM J. Res. Dev. 34(1), 1990), and then
// scaled by the power of two. Only subnormal quotients are rounded twice.
template <>
struct Divisor<float> {
  float mantissa = 1;
  float reciprocal = 1;  // of the mantissa
  float scale;
  bool is_exact = true;  // then scale is all

  explicit Divisor(double value) : scale(1 / static_cast<float>(value)) {
    if (scale == 0 || !std::isfinite(scale)) return;
    const float divisor = static_cast<float>(value);
    const int exponent = std::max(std::ilogb(divisor), -127);  // 2^-exponent is a float
    mantissa = std::scalbn(divisor, -exponent);
    is_exact = std::abs(mantissa) == 1;
    if (is_exact) return;
    reciprocal = 1 / mantissa;
    scale = std::scalbn(1.0f, -exponent);
  }

  // For a kernel that looks at is_exact once for many elements.
  template <bool kExact>
  __device__ float quotient(float x) const {
    if constexpr (kExact) return x * scale;
    const float q = x * reciprocal;
    return (fabsf(q) < INFINITY ? fmaf(fmaf(-q, mantissa, x), reciprocal, q) : q) * scale;
  }

  __device__ float quotient(float x) const {
    return is_exact ? quotient<true>(x) : quotient<false>(x);
  }
};

// z < 0 is false for NaN and for -0.
template <typename T>
__device__ T positive_part(T z) {
  return z < T{0} ? T{0} : z;
}

// relu(z) / divisor.
template <typename T>
__device__ T relu_divide(T z, const Divisor<T>& divisor) {
  return divisor.quotient(positive_part(z));
}

// ReLU, if there is one, makes 0 of anything below this.
inline float floor_of(bool relu) { return relu ? 0.0f : -INFINITY; }

// Whether the gradient passes: true for NaN, as in torch.
template <typename T>
__device__ bool mask_bit(T z) {
  return !(z <= T{0});
}

}  // namespace kernels

#endif  // KERNELS_LINEAR_EPILOGUE_CUH_
