// The epilogue of every product: bias, ReLU, a true division in float, and the mask for backward.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/ptx/math.cuh"
#include "common/vectors.cuh"
#include "launchers.h"

namespace kernels {

// Division by one number, which is a normal float, and so is its reciprocal. Where that is exact,
// of powers of two, a multiplication gives the same bits.
template <typename T>
struct Divisor {
  T divisor, reciprocal;
  bool is_exact;

  explicit Divisor(double value) : divisor(static_cast<T>(value)), reciprocal(T{1} / divisor) {
    int exponent;
    is_exact = std::abs(std::frexp(divisor, &exponent)) == T{0.5};
  }

  __device__ T quotient(T x) const { return is_exact ? x * reciprocal : x / divisor; }
};

// In float, without the branches of a general division. The quotient by the divisor's mantissa is
// corrected by its remainder, which makes it the nearest float (Markstein, IBM J. Res. Dev. 34(1),
// 1990), and is then scaled by the power of two. Only subnormal quotients are rounded twice.
template <>
struct Divisor<float> {
  float mantissa, reciprocal;  // of the mantissa
  float scale;                 // 2^-exponent, with the divisor's sign
  bool is_exact;               // then scale is all

  explicit Divisor(double value) {
    const float divisor = static_cast<float>(value);
    const int exponent = std::ilogb(divisor);
    mantissa = std::scalbn(std::abs(divisor), -exponent), reciprocal = 1 / mantissa;
    scale = std::copysign(std::scalbn(1.0f, -exponent), divisor);
    is_exact = mantissa == 1;
  }

  __device__ float quotient(float x) const {
    if (is_exact) return x * scale;
    const float q = x * reciprocal;
    return (fabsf(q) < INFINITY ? fmaf(fmaf(-q, mantissa, x), reciprocal, q) : q) * scale;
  }
};

// From z, a float, a sum with its bias, to out and mask. T is float or a half type.
template <typename T>
struct Epilogue {
  const T* bias;  // [n], or null
  T* out;         // [m, n]
  uint8_t* mask;  // [m, (n + 7) / 8], or null
  int m, n;
  float floor;  // ReLU makes 0 of anything below: 0, or -infinity where there is no ReLU
  Divisor<float> divisor;
  // Whether rows are aligned, and the division is an exact multiplication of sum and bias one by
  // one: nothing overflows, and only subnormal results come from subnormal terms.
  bool is_fast;

  // `together` elements of a row are stored at once.
  explicit Epilogue(const LinearArguments& linear, int64_t together = 1)
      : bias(static_cast<const T*>(linear.bias)),
        out(static_cast<T*>(linear.out)),
        mask(linear.mask),
        m(static_cast<int>(linear.m)),
        n(static_cast<int>(linear.n)),
        floor(linear.relu ? 0.0f : -INFINITY),
        divisor(linear.divisor),
        is_fast(linear.n % together == 0 && divisor.is_exact && divisor.scale <= 1 &&
                divisor.scale >= 0x1p-32f) {}

  __device__ float finish(float z) const { return divisor.quotient(z < floor ? 0.0f : z); }
  // Where is_fast.
  __device__ float finish_fast(float z) const { return ptx::max_nan(z, floor) * divisor.scale; }

  __device__ T* out_at(int row, int column) const {
    return out + static_cast<int64_t>(row) * n + column;
  }
  // The byte that holds the column's bit.
  __device__ uint8_t* mask_at(int row, int column) const {
    return mask + static_cast<int64_t>(row) * ((n + 7) / 8) + column / 8;
  }
};

// Four neighbours of a row, of which `count` exist; all, if the row is aligned for vectors of them.
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

// Makes results and mask bits of four neighbours. The thread whose lane differs in kLaneBit has the
// other half of the mask's byte: by all threads of a warp.
template <int kLaneBit, typename T>
__device__ void finish_four(const Epilogue<T>& p, bool row_exists, int row, int column,
                            const float (&z)[4]) {
  const bool exists = row_exists && column < p.n;
  if (p.mask != nullptr) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (column + i < p.n && mask_bit(z[i])) << i;
    bits |= __shfl_xor_sync(0xffffffff, bits, kLaneBit) << 4;
    if (exists && column % 8 == 0) *p.mask_at(row, column) = static_cast<uint8_t>(bits);
  }
  if (!exists) return;
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = p.finish(z[i]);
  store_four(p.out_at(row, column), out, p.n - column, p.n % 4 == 0);
}

}  // namespace kernels
