// What follows the product: bias, ReLU and division on the accumulator, and the mask for backward.

#ifndef KERNELS_EPILOGUE_CUH_
#define KERNELS_EPILOGUE_CUH_

#include <cmath>
#include <cstdint>

namespace kernels {

// Division by one number. Where the reciprocal is exact (powers of two; zero and infinity, whose
// quotients are the products with infinity and zero), a multiplication gives the same bits.
template <typename T>
struct Divisor {
  T divisor;
  T reciprocal;
  bool is_exact;

  explicit Divisor(double value)
      : divisor(static_cast<T>(value)), reciprocal(T{1} / divisor), is_exact(false) {
    int exponent;
    const T mantissa = std::frexp(divisor, &exponent);
    is_exact = (std::abs(mantissa) == T{0.5} && std::isfinite(reciprocal)) || divisor == T{0} ||
               std::isinf(divisor);
  }

  __device__ T quotient(T x) const { return is_exact ? x * reciprocal : x / divisor; }
};

// relu(z) / divisor; z < 0 is false for NaN and for -0.
template <typename T>
__device__ T relu_divide(T z, const Divisor<T>& divisor) {
  return divisor.quotient(z < T{0} ? T{0} : z);
}

// Whether the gradient passes: true for NaN, as in torch.
template <typename T>
__device__ bool mask_bit(T z) {
  return !(z <= T{0});
}

}  // namespace kernels

#endif  // KERNELS_EPILOGUE_CUH_
