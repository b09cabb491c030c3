// The epilogue of gemm_one_product_kernel: a consumer warpgroup scales its accumulators (float32),
// adds the bias, applies ReLU, divides, makes the mask, and stores.
//
//   accumulators  64 rows of the weight (columns of out) x 256 rows of x (rows of out), float32, in
//                 the registers of a warpgroup of 128 threads
//   out           [M, N]
//   mask          [M, (N + 7) / 8], or null: bit n % 8 of byte n / 8 tells whether ReLU's gradient
//                 passes at column n
//
// kernel.cuh calls one of these for each tile:
//
//   in this file
//     store_general     any divisor, exponent and alignment
//     store_fast        float32: call_is_fast (linear/epilogue.cuh), and small exponents
//
//   in epilogue_half_types.cuh
//     store_fast        half types: call_is_fast, which implies ReLU
//
//   in epilogue_gradient.cuh
//     PackedGradient    half types without an epilogue: out [N, M] is the product transposed
//
// accumulators.cuh says which thread has which accumulators. A thread's neighbouring accumulators
// are in one column of out, but a store needs neighbours in a row. So they are transposed through
// shared memory: in this file, a subtile (two row blocks) at a time. (A gradient's out is [N, M],
// which needs no transposition.) shared_memory.cuh has this memory, and epilogue_inputs.cuh the
// bias and the exponents.
//
// Why it is fast: cache lines of out are written whole, 16 bytes by each thread. The fast epilogues
// also mark them as not to be kept in L2, which is for x and the weight. If each warp stores its
// own 16 columns instead of whole cache lines, half types take 5% more time and float32 2%
// (docs/EXPERIMENTS.md, "Hopper's products").

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/copy_subtile.cuh"
#include "linear/sm90/gemm_one_product/accumulators.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/epilogue_inputs.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

// ----- the general epilogue

// Multiplies an accumulator by 2^-exponent of its row of x, and of its row of the weight. The
// product of these two factors may overflow or underflow, so they are applied one after the other,
// the smaller one first:
//
//   overflow    A multiplication overflows only if the result does.
//   underflow   Factors are 2^-126 or more (kMaxExponentWithoutLo), so the first multiplication
//               rounds the accumulator to a multiple of 2^-23 at worst. That is little beside the
//               scaled row of x, whose largest element is 2^14 or more.
__device__ inline float undo_scaling(float accumulator, float x_unscale, float weight_unscale) {
  return accumulator * fminf(x_unscale, weight_unscale) * fmaxf(x_unscale, weight_unscale);
}

// The general epilogue: any divisor, exponents and alignment, one subtile at a time. All threads of
// the warpgroup call it.
template <typename T>
__device__ void store_general(const Epilogue<T>& epilogue, const WarpgroupTile& warpgroup_tile,
                              const float (&accumulators)[OneProductConfig::kAccumulators],
                              const EpilogueMemory<T>& memory) {
  constexpr int kSubtiles = OneProductConfig::kSubtiles;
  constexpr int kSubtileRowBlocks = OneProductConfig::kSubtileRowBlocks;
  const EpilogueInputs<T>& inputs = memory.inputs;
  const StagedAccumulatorsReader reader(memory.staging.accumulators);
#pragma unroll 1
  for (int subtile = 0; subtile < kSubtiles; ++subtile) {
    copy_any_subtile<0, kSubtiles, kSubtileRowBlocks, OneProductConfig::kRowBlockPitch>(
        staging_slot(memory.staging.accumulators), accumulators, subtile);
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) {
      const int m_in_tile = (subtile * kSubtileRowBlocks + j) * 8 + reader.row;
      const int m = warpgroup_tile.first_m + m_in_tile;
      float z[4];
      reader.read(z, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (EpilogueInputs<T>::kIsScaled) {
          const float x_unscale = inputs.x_unscale[m_in_tile];
          const float weight_unscale =
              split::power_of_two(-inputs.weight_exponent[reader.column + i]);
          z[i] = undo_scaling(z[i], x_unscale, weight_unscale);
        }
        z[i] += inputs.bias[reader.column + i];
      }
      store_four_results</*kLaneBit=*/1>(epilogue, m < epilogue.m, m,
                                         warpgroup_tile.first_n + reader.column, z);
    }
    // The next subtile overwrites what others still read.
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
  }
}

// ----- the fast epilogue of float32

// The inputs of four neighbouring columns.
struct FourColumns {
  float weight_unscale[4];
  float bias[4];

  // `column` is the first one, of the warpgroup's 64.
  __device__ FourColumns(const EpilogueInputs<float>& inputs, int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias[i] = inputs.bias[column + i];
      weight_unscale[i] = split::power_of_two(-inputs.weight_exponent[column + i]);
    }
  }
};

// Makes results from four accumulators of a row, v. Returns their bits of the mask, which are 0
// without kMask.
template <bool kMask>
__device__ __forceinline__ uint32_t make_results_of_row(const Epilogue<float>& epilogue,
                                                        const float (&v)[4], float x_unscale,
                                                        const FourColumns& columns,
                                                        float (&out)[4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float z = fmaf(v[i], x_unscale * columns.weight_unscale[i], columns.bias[i]);
    out[i] = epilogue.finish_fast(z);
    if constexpr (kMask) bits |= (mask_bit(z) ? 1u : 0u) << i;
  }
  return bits;
}

// The fast epilogue of float32. The caller has checked that epilogue.call_is_fast, and that no
// exponent of the tile is beyond FastEpilogueConfig::kMaxExponent. So x_unscale * weight_unscale is
// a normal float.
template <bool kMask>
__device__ void store_fast(const Epilogue<float>& epilogue, const WarpgroupTile& warpgroup_tile,
                           const float (&accumulators)[OneProductConfig::kAccumulators],
                           const EpilogueMemory<float>& memory) {
  constexpr int kSubtileRowBlocks = OneProductConfig::kSubtileRowBlocks;
  StagedAccumulators& staging = memory.staging.accumulators;
  const StagedAccumulatorsReader reader(staging);
  const int n = warpgroup_tile.first_n + reader.column;
  const int first_m = warpgroup_tile.first_m + reader.row;
  const FourColumns columns(memory.inputs, reader.column);
  const float* const x_unscale = memory.inputs.x_unscale + reader.row;
  // Rows of out from this thread's current row to the end; 0 if its columns do not exist.
  int rows_left = n < epilogue.n ? epilogue.m - first_m : 0;
  const int64_t first_element = static_cast<int64_t>(first_m) * epilogue.n + n;
  float* target = epilogue.out + first_element;
  uint8_t* mask = nullptr;
  // With a mask, call_is_fast implies that n is a multiple of 8 (float_vector_size, launch.cuh).
  if constexpr (kMask) mask = epilogue.mask + first_element / 8;
#pragma unroll
  for (int subtile = 0; subtile < OneProductConfig::kSubtiles; ++subtile) {
    // All must have read the subtile before.
    if (subtile > 0) ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
    copy_subtile<kSubtileRowBlocks, OneProductConfig::kRowBlockPitch>(staging_slot(staging),
                                                                      accumulators, subtile);
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
    float v[kSubtileRowBlocks][4];
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) reader.read(v[j], j);
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) {
      const float own_x_unscale = x_unscale[(subtile * kSubtileRowBlocks + j) * 8];
      const bool exists = rows_left > 0;
      float out[4];
      uint32_t bits = make_results_of_row<kMask>(epilogue, v[j], own_x_unscale, columns, out);
      // The store is non-temporal, as L2 is for x and the weight.
      if (exists) {
        __stcs(reinterpret_cast<float4*>(target), make_float4(out[0], out[1], out[2], out[3]));
      }
      if constexpr (kMask) {
        // A byte of the mask has 8 columns: this even thread's four and its odd neighbour's.
        bits |= __shfl_xor_sync(0xffffffff, bits, 1) << 4;
        const bool stores_byte = exists && n % 8 == 0;
        if (stores_byte) *mask = static_cast<uint8_t>(bits);
        mask += epilogue.n;  // eight rows of n / 8 bytes
      }
      target += 8 * static_cast<int64_t>(epilogue.n);
      rows_left -= 8;
    }
  }
}

}  // namespace kernels::sm90::gemm_one_product
