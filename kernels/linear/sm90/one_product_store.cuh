// One product: the way out of the registers, with scales, bias, ReLU, division and mask.

#ifndef KERNELS_LINEAR_SM90_ONE_PRODUCT_STORE_CUH_
#define KERNELS_LINEAR_SM90_ONE_PRODUCT_STORE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/ptx/sm90.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/common.cuh"
#include "linear/split/pieces.cuh"

namespace kernels {
namespace sm90 {

// The results and all that they need. T is float or a half type.
template <typename T>
struct Output {
  const T* bias;
  T* out;
  uint8_t* mask;
  int m, n;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  // For float32, whose rows were scaled by 2^exponent.
  const int* x_exponent;       // [m]
  const int* weight_exponent;  // [n]
  // Whether division is an exact multiplication that overflows nowhere, and rows are aligned.
  bool is_direct;
};

// A warpgroup's sums are of 64 features, 16 a warp, and kXRows rows of x.
constexpr int kFeatures = 64, kXRows = 256;
// They leave in turns of kTurn blocks of 8 rows, of which a thread has kTogether features at once.
constexpr int kTurn = 2, kTurns = kXRows / (8 * kTurn), kTogether = 4;
// Half types leave by so many rows, if they can be stored directly.
constexpr int kRowsOfTurn = 64;

// Memory in which a warpgroup's sums are turned: in the registers rows of x are next to each other,
// in the result features. Whole lines are stored: with those of one warp's features alone, half
// types took 5% and float32 2% longer on an H200.
using StagedSums = float4[kTurn][4][33];  // of each lane; what is left over avoids bank conflicts
constexpr int kPitch = 4 * 33;
template <typename T>
union Staging {
  StagedSums sums;
  struct {
    uint8_t rows[kRowsOfTurn][kFeatures * sizeof(T)];
    uint16_t mask[kRowsOfTurn][kFeatures / 16];
  } turns[2];
};

template <>
union Staging<float> {
  StagedSums sums;
};

// The factors of a warpgroup's results, in shared memory.
template <typename T>
struct alignas(16) Scales {
  static constexpr bool kScaled = std::is_same_v<T, float>;
  float bias[kFeatures];
  float x_scale[kScaled ? kXRows : 1];
  int8_t weight_exponent[kScaled ? kFeatures : 1];  // as the rows were scaled
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a thread puts its sums.
__device__ inline float4* own_slot(StagedSums& sums) {
  return &sums[0][threadIdx.x % 128 / 32][threadIdx.x % 32];
}

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

// The same of relu.
template <typename T>
__device__ uint32_t pack_relu_as(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// Neighbours of a row, the first `count` of them; all, if they are so many that they are aligned.
template <typename T>
__device__ void store_together(T* to, const float (&v)[kTogether], int count, bool is_aligned) {
  if (is_aligned && count >= kTogether) {
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack_as<T>(v[0], v[1]), pack_as<T>(v[2], v[3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (i < count) to[i] = static_cast<T>(v[i]);
  }
}

// A thread reads four features of a row of each block of the sums that a warpgroup has in memory.
struct Reader {
  int feature, row;  // the first of the warpgroup's, and of the block's
  // The sums of lane 4 g + c are of features g and g + 8, and of rows 2 c and 2 c + 1. Threads next
  // to each other would meet in a bank, so that they read neighbours in turn.
  bool swaps;
  const float* even;
  const float* odd;

  __device__ explicit Reader(const StagedSums& sums)
      : feature(threadIdx.x % 16 * kTogether), row(threadIdx.x % 128 / 16), swaps(threadIdx.x % 2) {
    const float4& four = sums[0][feature / 16][feature % 8 * 4 + row / 2];
    const float* const from = &four.x + feature / 8 % 2 * 2 + row % 2;
    even = from + swaps * 16, odd = from + !swaps * 16;
  }

  __device__ void read(float (&v)[kTogether], int block) const {
    constexpr int kBlock = 4 * kPitch;
#pragma unroll
    for (int i = 0; i < kTogether; i += 2) {
      const float first = even[block * kBlock + i * 16], second = odd[block * kBlock + i * 16];
      v[i] = swaps ? second : first, v[i + 1] = swaps ? first : second;
    }
  }
};

// A warpgroup's sums, whose first row of x and first feature are given.
template <bool kExact, typename T, int kSums>
__device__ void store_staged(const Output<T>& p, int first_row, int first_feature,
                             const float (&sums)[kSums], const Scales<T>& scales,
                             StagedSums& staging, int barrier) {
  const Reader reader(staging);
  const int feature = first_feature + reader.feature;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    stage_turn<0, kTurns, kTurn, kPitch>(own_slot(staging), sums, turn);
    ptx::barrier_sync(barrier, 128);
#pragma unroll
    for (int block = 0; block < kTurn; ++block) {
      const int in_tile = (turn * kTurn + block) * 8 + reader.row, row = first_row + in_tile;
      float v[kTogether], out[kTogether];
      reader.read(v, block);
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if constexpr (Scales<T>::kScaled) {
          const float x_scale = scales.x_scale[in_tile];
          const float scale = split::power_of_two(-scales.weight_exponent[reader.feature + i]);
          // The smaller first: where that overflows, so does the result.
          v[i] = v[i] * fminf(x_scale, scale) * fmaxf(x_scale, scale);
        }
        const float z = v[i] + scales.bias[reader.feature + i];
        out[i] = p.divisor.template quotient<kExact>(z < p.floor ? 0.0f : z);
        bits |= (feature + i < p.n && mask_bit(z)) << i;
      }
      bits |= __shfl_xor_sync(0xffffffff, bits, 1) << kTogether;
      if (row >= p.m || feature >= p.n) continue;
      if (p.mask != nullptr && feature % 8 == 0) {
        p.mask[static_cast<int64_t>(row) * ((p.n + 7) / 8) + feature / 8] =
            static_cast<uint8_t>(bits);
      }
      store_together(p.out + static_cast<int64_t>(row) * p.n + feature, out, p.n - feature,
                     p.n % kTogether == 0);
    }
    ptx::barrier_sync(barrier, 128);
  }
}

// The same for float32 where the division is an exact multiplication, all exponents are modest, and
// rows are aligned.
template <bool kMask, int kSums>
__device__ void store_direct(const Output<float>& p, int first_row, int first_feature,
                             const float (&sums)[kSums], const Scales<float>& scales,
                             Staging<float>& staging, int barrier) {
  const Reader reader(staging.sums);
  const int feature = first_feature + reader.feature;
  float scale[kTogether], bias[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    bias[i] = scales.bias[reader.feature + i];
    scale[i] = split::power_of_two(-scales.weight_exponent[reader.feature + i]);
  }
  const float* const x_scale = scales.x_scale + reader.row;
  int rows =
      feature < p.n ? p.m - first_row - reader.row : 0;  // from the thread's first to the end
  const int64_t first = static_cast<int64_t>(first_row + reader.row) * p.n + feature;
  float* to = p.out + first;
  uint8_t* mask = p.mask + first / 8;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (turn > 0) ptx::barrier_sync(barrier, 128);
    stage_blocks<kTurn, kPitch>(own_slot(staging.sums), sums, turn);
    ptx::barrier_sync(barrier, 128);
    float v[kTurn][kTogether];
#pragma unroll
    for (int block = 0; block < kTurn; ++block) reader.read(v[block], block);
#pragma unroll
    for (int block = 0; block < kTurn; ++block) {
      const float own_scale = x_scale[(turn * kTurn + block) * 8];
      float (&out)[kTogether] = v[block];
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float z = fmaf(out[i], own_scale * scale[i], bias[i]);
        out[i] = ptx::max_nan(z, p.floor) * p.divisor.scale;
        if constexpr (kMask) bits |= mask_bit(z) << i;
      }
      // Soon out of L2, where x and the weight are needed: 3% of an H200's time.
      if (rows > 0) {
        __stcs(reinterpret_cast<float4*>(to), make_float4(out[0], out[1], out[2], out[3]));
      }
      if constexpr (kMask) {
        bits |= __shfl_xor_sync(0xffffffff, bits, 1) << kTogether;
        if (rows > 0 && feature % 8 == 0) *mask = static_cast<uint8_t>(bits);
        mask += p.n;
      }
      to += 8 * static_cast<int64_t>(p.n), rows -= 8;
    }
  }
}

// The same for half types, with ReLU or without, where the division is an exact multiplication,
// which has gone into the bias.
template <bool kMask, bool kRelu = true, typename T, int kSums>
__device__ void store_direct(const Output<T>& p, int first_row, int first_feature,
                             const float (&sums)[kSums], const Scales<T>& scales,
                             Staging<T>& staging, int barrier) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, c = lane % 4;
  const float scale = p.divisor.scale;
  const float bias[2] = {scales.bias[warp * 16 + g], scales.bias[warp * 16 + g + 8]};
  // Matrices of 8 features and 8 rows are turned on their way. Chunks of 16 bytes are swizzled.
  const uint32_t base = ptx::shared_address(&staging);
  const uint32_t matrix = base + lane % 16 * 128 + ((warp * 2 + lane / 16) ^ lane % 8) * 16;
  const uint32_t chunk = base + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
  const int feature = first_feature + thread % 8 * 8;
  int row = first_row + thread / 8;
  T* to = p.out + static_cast<int64_t>(row) * p.n + feature;
#pragma unroll
  for (int turn = 0; turn < kXRows / kRowsOfTurn; ++turn) {
    const int buffer = turn % 2 * sizeof(staging.turns[0]);
#pragma unroll
    for (int pair = 0; pair < kRowsOfTurn / 16; ++pair) {  // of blocks
      uint32_t words[4];      // of the first feature, then of the other: of each block
      uint32_t mask[2] = {};  // of each block: of rows 2 c and 2 c + 1, 16 features each
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = i % 2, f = i / 2;
        const float* const sum = sums + 4 * (turn * kRowsOfTurn / 8 + pair * 2 + block) + 2 * f;
        const float z[2] = {fmaf(sum[0], scale, bias[f]), fmaf(sum[1], scale, bias[f])};
        words[i] = kRelu ? pack_relu_as<T>(z[0], z[1]) : pack_as<T>(z[0], z[1]);
        if constexpr (kMask) mask[block] |= (mask_bit(z[0]) | mask_bit(z[1]) << 16) << (f * 8);
      }
      ptx::store_matrices_turned(matrix + buffer + pair * 16 * 128, words);
      if constexpr (kMask) {
        // The bits of eight lanes belong together. Those with g < 4 take the first block's.
        const bool second = g / 4;
        uint32_t own = (second ? mask[1] : mask[0]) << g;
        own |= __shfl_xor_sync(0xffffffff, (second ? mask[0] : mask[1]) << g, 16);
        own |= __shfl_xor_sync(0xffffffff, own, 8);
        own |= __shfl_xor_sync(0xffffffff, own, 4);
        const int odd = g / 2 % 2;
        if (g % 2 == 0) {
          staging.turns[turn % 2].mask[pair * 16 + second * 8 + 2 * c + odd][warp] =
              static_cast<uint16_t>(own >> (odd * 16));
        }
      }
    }
    // All have read what was here two turns ago, for they have met since.
    ptx::barrier_sync(barrier, 128);
    if constexpr (kMask) {
      const int mask_row = first_row + turn * kRowsOfTurn + thread;
      if (thread < kRowsOfTurn && mask_row < p.m && first_feature < p.n) {
        const int64_t at = (static_cast<int64_t>(mask_row) * p.n + first_feature) / 8;
        *reinterpret_cast<uint2*>(p.mask + at) =
            *reinterpret_cast<const uint2*>(staging.turns[turn % 2].mask[thread]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfTurn / 16; ++i, row += 16, to += 16 * static_cast<int64_t>(p.n)) {
      const float4 v = ptx::load_shared_four(chunk + buffer + i * 16 * 128);
      // As float32's: 0.6% of an H200's time.
      if (row < p.m && feature < p.n) __stcs(reinterpret_cast<float4*>(to), v);
    }
  }
}

#endif

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_ONE_PRODUCT_STORE_CUH_
