// The epilogue of one product, of a warpgroup's sums.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/barrier.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90 {

// A warpgroup's sums: of 64 features (rows of the weight), 16 a warp, and of kXRows rows of x.
constexpr int kFeatures = 64, kXRows = 256;
constexpr int kWarpFeatures = kFeatures / 4;
// Results are stored in slabs of kSlabBlocks blocks of 8 rows of x, four features of each a thread.
constexpr int kSlabBlocks = 2, kSlabs = kXRows / (8 * kSlabBlocks);
constexpr int kHalfSlabRows = 64;  // of a slab of half types that can be stored directly

// Rows of x are neighbours in registers, features in the result: sums are transposed here.
using StagedSums = float4[kSlabBlocks][4][33];  // of each lane; 33 avoids bank conflicts
constexpr int kPitch = 4 * 33;
// Gradients are stored by TMA, in boxes of a warp's features and kBoxColumns rows of x, a line.
constexpr int kBoxColumns = 64, kBoxes = 2;
template <typename T>
union alignas(1024) Staging {
  StagedSums sums;
  uint8_t boxes[4][kBoxes][kWarpFeatures][kBoxColumns * sizeof(T)];
  struct {
    uint8_t rows[kHalfSlabRows][kFeatures * sizeof(T)];
    uint16_t mask[kHalfSlabRows][kFeatures / 16];
  } slabs[2];
};

template <>
union alignas(16) Staging<float> {
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

__device__ inline float4* own_slot(StagedSums& sums) {
  return &sums[0][threadIdx.x % 128 / 32][threadIdx.x % 32];
}

// A thread reads four features of a row of each block of the sums that a warpgroup has in memory.
struct Reader {
  const StagedSums& sums;
  // The first of the warpgroup's, and of the block's.
  int feature = threadIdx.x % 16 * 4, row = threadIdx.x % 128 / 16;
  // The sums of lane 4 g + c are of features g and g + 8, and of rows 2 c and 2 c + 1. Neighbouring
  // threads would meet in a bank, so every second one swaps its neighbours.
  bool swaps = threadIdx.x % 2;
  const float* from =
      &sums[0][feature / 16][feature % 8 * 4 + row / 2].x + feature / 8 % 2 * 2 + row % 2;
  const float *even = from + swaps * 16, *odd = from + !swaps * 16;

  __device__ void read(float (&v)[4], int block) const {
    constexpr int kBlockFloats = 4 * kPitch;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float first = even[block * kBlockFloats + i * 16],
                  second = odd[block * kBlockFloats + i * 16];
      v[i] = swaps ? second : first, v[i + 1] = swaps ? first : second;
    }
  }
};

template <typename T, int kSums>
__device__ void store_general(const Epilogue<T>& p, int first_row, int first_feature,
                              const float (&sums)[kSums], const Scales<T>& scales,
                              StagedSums& staging, int barrier) {
  const Reader reader{staging};
#pragma unroll 1
  for (int slab = 0; slab < kSlabs; ++slab) {
    stage_slab<0, kSlabs, kSlabBlocks, kPitch>(own_slot(staging), sums, slab);
    ptx::barrier_sync(barrier, 128);
#pragma unroll
    for (int block = 0; block < kSlabBlocks; ++block) {
      const int in_tile = (slab * kSlabBlocks + block) * 8 + reader.row, row = first_row + in_tile;
      float z[4];
      reader.read(z, block);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Scales<T>::kScaled) {
          const float x_scale = scales.x_scale[in_tile];
          const float scale = fp16x3::power_of_two(-scales.weight_exponent[reader.feature + i]);
          // The smaller first: where that overflows, so does the result.
          z[i] = z[i] * fminf(x_scale, scale) * fmaxf(x_scale, scale);
        }
        z[i] += scales.bias[reader.feature + i];
      }
      finish_four<1>(p, row < p.m, row, first_feature + reader.feature, z);
    }
    ptx::barrier_sync(barrier, 128);
  }
}

// For float32 where the epilogue is direct and all exponents are modest.
template <bool kMask, int kSums>
__device__ void store_fast(const Epilogue<float>& p, int first_row, int first_feature,
                           const float (&sums)[kSums], const Scales<float>& scales,
                           Staging<float>& staging, int barrier) {
  const Reader reader{staging.sums};
  const int feature = first_feature + reader.feature;
  float scale[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bias[i] = scales.bias[reader.feature + i];
    scale[i] = fp16x3::power_of_two(-scales.weight_exponent[reader.feature + i]);
  }
  const float* const x_scale = scales.x_scale + reader.row;
  int rows = feature < p.n ? p.m - first_row - reader.row : 0;
  const int64_t first = static_cast<int64_t>(first_row + reader.row) * p.n + feature;
  float* to = p.out + first;
  uint8_t* mask = p.mask + first / 8;
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    if (slab > 0) ptx::barrier_sync(barrier, 128);
    stage_blocks<kSlabBlocks, kPitch>(own_slot(staging.sums), sums, slab);
    ptx::barrier_sync(barrier, 128);
    float v[kSlabBlocks][4];
#pragma unroll
    for (int block = 0; block < kSlabBlocks; ++block) reader.read(v[block], block);
#pragma unroll
    for (int block = 0; block < kSlabBlocks; ++block) {
      const float own_scale = x_scale[(slab * kSlabBlocks + block) * 8];
      float (&out)[4] = v[block];
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float z = fmaf(out[i], own_scale * scale[i], bias[i]);
        out[i] = p.finish_fast(z);
        if constexpr (kMask) bits |= mask_bit(z) << i;
      }
      // Non-temporal: L2 is for x and the weight. 3% of an H200's time.
      if (rows > 0) {
        __stcs(reinterpret_cast<float4*>(to), make_float4(out[0], out[1], out[2], out[3]));
      }
      if constexpr (kMask) {
        bits |= __shfl_xor_sync(0xffffffff, bits, 1) << 4;
        if (rows > 0 && feature % 8 == 0) *mask = static_cast<uint8_t>(bits);
        mask += p.n;
      }
      to += 8 * static_cast<int64_t>(p.n), rows -= 8;
    }
  }
}

// The same for half types. The bias has been divided.
template <bool kMask, typename T, int kSums>
__device__ void store_fast(const Epilogue<T>& p, int first_row, int first_feature,
                           const float (&sums)[kSums], const Scales<T>& scales, Staging<T>& staging,
                           int barrier) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, c = lane % 4;
  const float scale = p.divisor.scale;
  const float bias[2] = {scales.bias[warp * 16 + g], scales.bias[warp * 16 + g + 8]};
  // stmatrix transposes matrices of 8 features and 8 rows. Vectors of 16 bytes are swizzled.
  const uint32_t base = ptx::shared_address(&staging);
  const uint32_t matrix = base + lane % 16 * 128 + ((warp * 2 + lane / 16) ^ lane % 8) * 16;
  const uint32_t vector = base + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
  const int feature = first_feature + thread % 8 * 8;
  int row = first_row + thread / 8;
  T* to = p.out + static_cast<int64_t>(row) * p.n + feature;
#pragma unroll
  for (int slab = 0; slab < kXRows / kHalfSlabRows; ++slab) {
    const int buffer = slab % 2 * sizeof(staging.slabs[0]);
#pragma unroll
    for (int pair = 0; pair < kHalfSlabRows / 16; ++pair) {  // of blocks
      uint32_t words[4];      // of the first feature, then of the other: of each block
      uint32_t mask[2] = {};  // of each block: of rows 2 c and 2 c + 1, 16 features each
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = i % 2, f = i / 2;
        const float* const sum = sums + 4 * (slab * kHalfSlabRows / 8 + pair * 2 + block) + 2 * f;
        const float z[2] = {fmaf(sum[0], scale, bias[f]), fmaf(sum[1], scale, bias[f])};
        words[i] = ptx::pack<T, /*kRelu=*/true>(z[0], z[1]);
        if constexpr (kMask) mask[block] |= (mask_bit(z[0]) | mask_bit(z[1]) << 16) << (f * 8);
      }
      ptx::store_matrices_transposed(matrix + buffer + pair * 16 * 128, words);
      if constexpr (kMask) {
        // A word holds the bits of eight lanes. Lanes with g < 4 collect the first block's.
        const bool second = g / 4;
        uint32_t own = (second ? mask[1] : mask[0]) << g;
        own |= __shfl_xor_sync(0xffffffff, (second ? mask[0] : mask[1]) << g, 16);
        own |= __shfl_xor_sync(0xffffffff, own, 8);
        own |= __shfl_xor_sync(0xffffffff, own, 4);
        const int odd = g / 2 % 2;
        if (g % 2 == 0) {
          staging.slabs[slab % 2].mask[pair * 16 + second * 8 + 2 * c + odd][warp] =
              static_cast<uint16_t>(own >> (odd * 16));
        }
      }
    }
    // All have read the buffer's rows of two slabs ago.
    ptx::barrier_sync(barrier, 128);
    if constexpr (kMask) {
      const int mask_row = first_row + slab * kHalfSlabRows + thread;
      if (thread < kHalfSlabRows && mask_row < p.m && first_feature < p.n) {
        const int64_t at = (static_cast<int64_t>(mask_row) * p.n + first_feature) / 8;
        *reinterpret_cast<uint2*>(p.mask + at) =
            *reinterpret_cast<const uint2*>(staging.slabs[slab % 2].mask[thread]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHalfSlabRows / 16; ++i, row += 16, to += 16 * static_cast<int64_t>(p.n)) {
      const float4 v = ptx::load_shared_four(vector + buffer + i * 16 * 128);
      if (row < p.m && feature < p.n) __stcs(reinterpret_cast<float4*>(to), v);
    }
  }
}

// A thread's results in a tile of a gradient, out [n, m]: packed when the sums are complete, and
// stored, a box at a time, while the next tile is multiplied: 5% of an H200's time where K is 1024.
template <typename T>
struct PackedResults {
  static constexpr int kEach = kXRows / kBoxColumns, kPairs = kBoxColumns / 16;  // of blocks
  uint32_t words[kEach][kPairs][4];  // of the first feature, then of the other: of each block
  int stored = kEach;                // boxes

  template <int kSums>
  __device__ void pack(const float (&sums)[kSums]) {
    stored = 0;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const float* const two = sums + i / 4 * 8 + i % 2 * 4 + i / 2 % 2 * 2;
      words[i / 16][i / 4 % 4][i % 4] = ptx::pack<T>(two[0], two[1]);
    }
  }

  // Registers have no addresses: the code is there once for each box.
  __device__ void store_next(const CUtensorMap& map, int row, int feature, Staging<T>& staging) {
    const int box = stored++;
    if (box == 0) return store<0>(map, row, feature, staging);
    if (box == 1) return store<1>(map, row, feature, staging);
    if (box == 2) return store<2>(map, row, feature, staging);
    if (box == 3) return store<3>(map, row, feature, staging);
  }

  template <int kBox>
  __device__ void store(const CUtensorMap& map, int row, int feature, Staging<T>& staging) const {
    static_assert(kBox < kEach);
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t box = ptx::shared_address(staging.boxes[warp][kBox % kBoxes]);
    const int line = lane / 16 * 8 + lane % 8;
    if (lane == 0) ptx::wait_stores_read<kBoxes - 1>();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int vector = (pair * 2 + lane / 8 % 2) ^ lane % 8;
      ptx::store_matrices(box + line * 128 + vector * 16, words[kBox][pair]);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      ptx::store_tensor(&map, row + kBox * kBoxColumns, feature + warp * kWarpFeatures, box);
      ptx::commit_stores();
    }
  }
};

}  // namespace kernels::sm90
