// The way out of the registers: scales, bias, ReLU, division, mask.

#ifndef KERNELS_LINEAR_SM90_STORE_CUH_
#define KERNELS_LINEAR_SM90_STORE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "epilogue.cuh"
#include "linear_sm90_common.cuh"
#include "ptx.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

// What is stored, T being float or a half type.
template <typename T>
struct Output {
  const T* bias;
  T* out;
  uint8_t* mask;
  int m, n;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  // Of float32, whose rows were scaled by 2^exponent.
  const int* x_exponent;       // [m]
  const int* weight_exponent;  // [n]
  // Whether store_direct serves: division is an exact multiplication that overflows nowhere, and
  // rows are aligned.
  bool is_direct;
};

constexpr int kTurn = 2;  // blocks of 8 columns of two rows that a quad of threads stores at once

// What the columns of a tile need on the way from sums to results, in shared memory.
template <int kColumns, typename T>
struct alignas(16) Columns {
  static_assert(kColumns % (8 * kTurn) == 0, "turns are whole");
  float bias[kColumns];
  int8_t exponent[std::is_same_v<T, float> ? kColumns : 1];  // as the weight's rows were scaled
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T>
__device__ uint32_t pack_as(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// relu, rounded.
template <typename T>
__device__ uint32_t pack_relu(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// Lane c of each four has word b of its own; afterwards it has word c of lane b.
__device__ inline void transpose_quad(uint32_t (&v)[4], int c) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = c & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i | bit], bit);
      (upper ? v[i] : v[i | bit]) = taken;
    }
  }
}

// Lane c's byte of the mask, of four blocks of 8 columns of which each of four lanes has two: the
// upper row's, then the lower row's. `columns` is how many there are in a row.
__device__ inline uint32_t mask_byte(const float (&z)[4 * kTurn], int columns, int c) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4 * kTurn; ++i) {
    const int at = i / 2 * 8 + 2 * c + i % 2;
    bits |= (at % (8 * kTurn) < columns && mask_bit(z[i])) << at;
  }
  bits |= __shfl_xor_sync(0xffffffff, bits, 1);
  bits |= __shfl_xor_sync(0xffffffff, bits, 2);
  return bits >> (8 * c) & 0xff;
}

// Eight neighbours of a row, as far as the row goes. out has the even ones, then the odd ones,
// where T is float; else pairs.
template <typename T, int kWords>
__device__ void store_eight(T* to, const uint32_t (&words)[kWords], int columns, bool aligned) {
  if constexpr (std::is_same_v<T, float>) {
    uint4* const four = reinterpret_cast<uint4*>(to);
    if (aligned) {
      four[0] = make_uint4(words[0], words[4], words[1], words[5]);
      four[1] = make_uint4(words[2], words[6], words[3], words[7]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) to[i] = __uint_as_float(words[i % 2 * 4 + i / 2]);
      }
    }
  } else {
    if (aligned) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) {
          reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        }
      }
    }
  }
}

// Finishes what a turn has in memory of rows `row` and row + 8, up to column `end`: lane c of four
// stores 8 columns and their byte of the mask. x_scale is the rows'.
template <bool kExact, typename T>
__device__ void store_turn(const Output<T>& p, int row, int column, int end,
                           const float4 (&staging)[kTurn][128], const int8_t* exponent,
                           const float* bias, const float (&x_scale)[2]) {
  static_assert(kTurn == 2, "four lanes have four blocks of two rows");
  const int c = threadIdx.x % 4;
  float z[4 * kTurn];
#pragma unroll
  for (int i = 0; i < 4 * kTurn; ++i) {
    const int r = i / 4, b = i / 2 % 2, at = 8 * b + 2 * c + i % 2;
    const float4 sum = staging[b][threadIdx.x % 128];
    float total = r == 0 ? (i % 2 == 0 ? sum.x : sum.y) : (i % 2 == 0 ? sum.z : sum.w);
    if constexpr (std::is_same_v<T, float>) {
      // The smaller first: where that overflows, so does the result.
      const float scale = split::power_of_two(-exponent[at]);
      total = total * fminf(x_scale[r], scale) * fmaxf(x_scale[r], scale);
    }
    z[i] = total + bias[at];
  }
  const int own_row = row + c / 2 * 8, first = column + c % 2 * 8;
  const bool exists = own_row < p.m && first < end;
  if (p.mask != nullptr) {
    const uint32_t byte = mask_byte(z, end - column, c);
    const int64_t at = static_cast<int64_t>(own_row) * ((p.n + 7) / 8) + first / 8;
    if (exists) p.mask[at] = static_cast<uint8_t>(byte);
  }
  float out[4 * kTurn];
#pragma unroll
  for (int i = 0; i < 4 * kTurn; ++i) {
    out[i] = p.divisor.template quotient<kExact>(z[i] < p.floor ? 0.0f : z[i]);
  }
  constexpr int kSets = sizeof(T) / 2;  // of four words that are transposed
  uint32_t words[4 * kSets];
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    uint32_t own[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if constexpr (kSets == 2) {
        own[b] = __float_as_uint(out[2 * b + set]);
      } else {
        own[b] = pack_as<T>(out[2 * b], out[2 * b + 1]);
      }
    }
    transpose_quad(own, c);
#pragma unroll
    for (int b = 0; b < 4; ++b) words[4 * set + b] = own[b];
  }
  if (exists) {
    store_eight(p.out + static_cast<int64_t>(own_row) * p.n + first, words, end - first,
                p.n % 8 == 0);
  }
}

// A thread's two bits of a block's mask.
__device__ inline uint32_t mask_bits(const float (&z)[2]) {
  return mask_bit(z[0]) | mask_bit(z[1]) << 1;
}

// Stores the mask of 64 columns of rows `row` and row + 8. Of each row, and of 32 columns each, a
// lane has the bits of its own column pairs, as if it were the first of four.
template <typename T>
__device__ void store_mask(const Output<T>& p, int row, int column, const uint32_t (&mask)[2][2]) {
  const int c = threadIdx.x % 4;
  // Four lanes put their bits together; each stores those of 32 columns of a row.
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t bits = mask[i / 2][i % 2] << (2 * c);
    bits |= __shfl_xor_sync(0xffffffff, bits, 1);
    bits |= __shfl_xor_sync(0xffffffff, bits, 2);
    if (c == i) own = bits;
  }
  const int at_row = row + c / 2 * 8, at = column + c % 2 * 32;
  if (at_row < p.m && at < p.n) {
    *reinterpret_cast<uint32_t*>(p.mask + (static_cast<int64_t>(at_row) * p.n + at) / 8) = own;
  }
}

// The way out where the division is an exact multiplication. A warp's 16 rows of half types, where
// it has gone into the bias, go through memory of its own, 64 columns at a time.
template <bool kMask, typename T, int kColumns>
__device__ void store_direct(const Output<T>& p, int row, int column,
                             const float (&sums)[kColumns / 2], const Columns<kColumns, T>& columns,
                             uint32_t staging) {
  constexpr int kBytes = 16 * 128;
  const int lane = threadIdx.x % 32, c = lane % 4;
  const float scale = p.divisor.scale;
#pragma unroll
  for (int turn = 0; turn < kColumns / 64; ++turn) {
    const int first = column + turn * 64;
    const uint32_t buffer = staging + turn % 2 * kBytes;
    uint32_t mask[2][2] = {};  // of each row, of 32 columns each
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = pair * 2 + i;
        const float2 bias =
            *reinterpret_cast<const float2*>(columns.bias + turn * 64 + 8 * block + 2 * c);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const sum = sums + 4 * (turn * 8 + block) + 2 * r;
          const float z[2] = {fmaf(sum[0], scale, bias.x), fmaf(sum[1], scale, bias.y)};
          words[2 * i + r] = pack_relu<T>(z[0], z[1]);
          if constexpr (kMask) mask[r][block / 4] |= mask_bits(z) << (block % 4 * 8);
        }
      }
      ptx::store_matrices(buffer + lane % 16 * 128 + ((2 * pair + lane / 16) ^ lane % 8) * 16,
                          words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_rows = 4 * i + lane / 8, chunk = lane % 8;
      const float4 v = ptx::load_shared_four(buffer + in_rows * 128 + (chunk ^ in_rows % 8) * 16);
      const int at = first + chunk * 8;
      if (row + in_rows < p.m && at < p.n) {
        *reinterpret_cast<float4*>(p.out + static_cast<int64_t>(row + in_rows) * p.n + at) = v;
      }
    }
    if constexpr (kMask) store_mask(p, row + lane / 4, first, mask);
  }
}

// The same for float32: rows `row` and row + 8, whose scales are x_scale. Lanes next to each other
// have two blocks of 8 columns together: the even one stores the first, the odd one the second.
template <bool kMask, int kColumns>
__device__ void store_direct(const Output<float>& p, int row, int column,
                             const float (&sums)[kColumns / 2],
                             const Columns<kColumns, float>& columns, const float (&x_scale)[2]) {
  const int c = threadIdx.x % 4;
  const bool is_odd = c % 2;
  const int own = is_odd * 8 + c / 2 * 4;  // of 16 columns
  float* const to = p.out + static_cast<int64_t>(row) * p.n + column + own;
#pragma unroll
  for (int turn = 0; turn < kColumns / 64; ++turn) {
    uint32_t mask[2][2] = {};  // of each row, of 32 columns each
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int in_tile = turn * 64 + pair * 16;
      float2 out[2][2];  // of a block, a row
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = pair * 2 + i, at = in_tile + 8 * i + 2 * c;
        const char2 exponent = *reinterpret_cast<const char2*>(columns.exponent + at);
        const float2 bias = *reinterpret_cast<const float2*>(columns.bias + at);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const sum = sums + 4 * (turn * 8 + block) + 2 * r;
          const float z[2] = {fmaf(sum[0], x_scale[r] * split::power_of_two(-exponent.x), bias.x),
                              fmaf(sum[1], x_scale[r] * split::power_of_two(-exponent.y), bias.y)};
          out[i][r] = make_float2(ptx::max_nan(z[0], p.floor) * p.divisor.scale,
                                  ptx::max_nan(z[1], p.floor) * p.divisor.scale);
          if constexpr (kMask) mask[r][block / 4] |= mask_bits(z) << (block % 4 * 8);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 keep = is_odd ? out[1][r] : out[0][r], give = is_odd ? out[0][r] : out[1][r];
        const float2 take = make_float2(__shfl_xor_sync(0xffffffff, give.x, 1),
                                        __shfl_xor_sync(0xffffffff, give.y, 1));
        if (row + 8 * r < p.m && column + in_tile + own < p.n) {
          *reinterpret_cast<float4*>(to + 8 * r * static_cast<int64_t>(p.n) + in_tile) =
              is_odd ? make_float4(take.x, take.y, keep.x, keep.y)
                     : make_float4(keep.x, keep.y, take.x, take.y);
        }
      }
    }
    if constexpr (kMask) store_mask(p, row, column + turn * 64, mask);
  }
}

#endif

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_STORE_CUH_
