// The epilogue of gemm_one_product_kernel: what a consumer warpgroup does with the accumulators of
// a tile, 64 rows of the weight (columns of out) x 256 rows of x (rows of out). In float32 it
// first undoes the scaling of rows (in RedoMode by 1, as nothing is scaled). linear/epilogue.cuh
// has the rest.
//
// kernel.cuh calls one of these for each tile:
//
//   store_general     for any divisor, exponent and alignment
//   store_fast        float32: allows_fast_epilogue (linear/epilogue.cuh), and small exponents
//   store_fast        half types: allows_fast_epilogue (epilogue_half_types.cuh)
//   PackedGradient    half types without an epilogue: out is [N, M] (epilogue_gradient.cuh)
//
// A thread's neighbouring accumulators are in one column of out (sm90/fragment.cuh), but a store
// needs neighbours in a row. So they are transposed through shared memory (shared_memory.cuh): in
// this file, a subtile of two row blocks at a time. The accumulators of a gradient are already in
// the order of its out.
//
// The fast epilogues write whole cache lines of out, 16 bytes by each thread, and mark them as not
// to be kept in L2, which is for x and the weight. If each warp stores its own 16 columns instead,
// half types take 5% more time and float32 2% (docs/EXPERIMENTS.md, "Hopper's products").

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/copy_subtile.cuh"
#include "linear/sm90/fragment.cuh"
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
// the smaller one first. Then a multiplication overflows only if the result does. The smaller
// factor is 2^-126 or more (kMaxExponentWithoutLo). If the product with it is subnormal, the
// product is rounded by at most 2^-150. This counts as an error of the accumulator of at most
// 2^-150 / 2^-126 = 2^-24. Rounding x to fp16 may cost more: the largest scaled x is 2^14 or more,
// so its error can be 2^3. Times the smallest fp16 weight but 0, 2^-24, this is 2^-21.
__device__ inline float undo_scaling(float accumulator, float x_unscale, float weight_unscale) {
  return accumulator * fminf(x_unscale, weight_unscale) * fmaxf(x_unscale, weight_unscale);
}

// The general epilogue. All threads of the warpgroup call it.
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
    copy_any_subtile</*kFirst=*/0, /*kEnd=*/kSubtiles, kSubtileRowBlocks,
                     OneProductConfig::kRowBlockPitch>(staging_slot(memory.staging.accumulators),
                                                       accumulators, subtile);
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) {
      const int row_block = subtile * kSubtileRowBlocks + j;
      const int m_in_tile = row_block * FragmentConfig::kRowBlockRows + reader.row;
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
      // Lanes whose numbers differ by 1 have the two halves of a byte of the mask.
      store_four_results</*kLaneBit=*/1>(epilogue, m < epilogue.m, m,
                                         warpgroup_tile.first_n + reader.column, z);
    }
    // The next subtile overwrites what others still read.
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
  }
}

// ----- the fast epilogue of float32

// Returns the rule of the fast epilogue of float32: N must be a multiple of 4, because RowCursor
// stores vectors of 16 bytes. With a mask, N must be a multiple of 8, so that a row has whole
// bytes.
inline FastEpilogueRule fast_epilogue_rule_of_float32(const LinearArguments& call) {
  return {/*alignment=*/call.mask != nullptr ? 8 : 4};
}

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

// Makes results from four accumulators of a row. Returns their bits of the mask; 0 without kMask.
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

// The row of out that a thread stores to next: its four columns from n on, and with kMask their
// byte of the mask.
template <bool kMask>
struct RowCursor {
  int row_elements;  // N
  // Rows from this one to the end of out. 0 or less if this row or its columns do not exist.
  int rows_left;
  bool is_first_half;  // the columns are the first four of the mask's byte
  float* out;
  uint8_t* mask = nullptr;

  __device__ RowCursor(const Epilogue<float>& epilogue, int m, int n)
      : row_elements(epilogue.n),
        rows_left(n < epilogue.n ? epilogue.m - m : 0),
        is_first_half(n % 8 == 0) {
    const int64_t element = static_cast<int64_t>(m) * epilogue.n + n;
    out = epilogue.out + element;
    // With a mask, N is a multiple of 8 (fast_epilogue_rule_of_float32).
    if constexpr (kMask) mask = epilogue.mask + element / 8;
  }

  // Stores the row's results and bits of the mask. All lanes of a warp call it.
  __device__ __forceinline__ void store(const float (&results)[4], uint32_t bits) const {
    const bool exists = rows_left > 0;
    if (exists) {
      __stcs(reinterpret_cast<float4*>(out),
             make_float4(results[0], results[1], results[2], results[3]));
    }
    if constexpr (kMask) {
      // An even thread's four columns and its odd neighbour's four make a byte of the mask.
      bits |= __shfl_xor_sync(0xffffffff, bits, 1) << 4;
      const bool stores_byte = exists && is_first_half;
      if (stores_byte) *mask = static_cast<uint8_t>(bits);
    }
  }

  __device__ __forceinline__ void advance() {
    constexpr int kRows = FragmentConfig::kRowBlockRows;
    if constexpr (kMask)
      mask += kRows * static_cast<int64_t>(row_elements) / 8;  // N / 8 bytes a row
    out += kRows * static_cast<int64_t>(row_elements);
    rows_left -= kRows;
  }
};

// The fast epilogue of float32. The caller has checked that epilogue.allows_fast_epilogue, and that
// no exponent of the tile is beyond FastEpilogueConfig::kMaxExponent.
template <bool kMask>
__device__ void store_fast(const Epilogue<float>& epilogue, const WarpgroupTile& warpgroup_tile,
                           const float (&accumulators)[OneProductConfig::kAccumulators],
                           const EpilogueMemory<float>& memory) {
  constexpr int kSubtileRowBlocks = OneProductConfig::kSubtileRowBlocks;
  StagedAccumulators& staging = memory.staging.accumulators;
  const StagedAccumulatorsReader reader(staging);
  const FourColumns columns(memory.inputs, reader.column);
  RowCursor<kMask> cursor(epilogue, warpgroup_tile.first_m + reader.row,
                          warpgroup_tile.first_n + reader.column);
#pragma unroll
  for (int subtile = 0; subtile < OneProductConfig::kSubtiles; ++subtile) {
    // All threads must have read the previous subtile. (After the last one of the previous tile,
    // they have met at this barrier in PrefetchedInputs::store_and_sync.)
    if (subtile > 0) ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
    copy_subtile<kSubtileRowBlocks, OneProductConfig::kRowBlockPitch>(staging_slot(staging),
                                                                      accumulators, subtile);
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
    float v[kSubtileRowBlocks][4];
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) reader.read(v[j], j);
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) {
      const int row_block = subtile * kSubtileRowBlocks + j;
      const int m_in_tile = row_block * FragmentConfig::kRowBlockRows + reader.row;
      float results[4];
      const uint32_t bits = make_results_of_row<kMask>(
          epilogue, v[j], memory.inputs.x_unscale[m_in_tile], columns, results);
      cursor.store(results, bits);
      cursor.advance();
    }
  }
}

}  // namespace kernels::sm90::gemm_one_product
