// The fast epilogue of half types (float16 and bfloat16) in gemm_one_product_kernel.
// sm90/fragment.cuh explains row blocks, column blocks, g, and the words of a pair.
//
// The steps of store_fast for each part of the tile, 64 rows; those in brackets are for calls with
// a mask (epilogue_half_types_mask.cuh):
//
//   for each pair of row blocks (16 rows):
//     make_results_of_pair              accumulators -> results, two to a register  [and mask bits]
//     ptx::store_matrices_transposed    results -> StagedRows, transposed by stmatrix
//     [stage_mask_of_pair               mask bits -> StagedRows]
//   barrier
//   [store_mask_rows                    mask of StagedRows -> mask]
//   StagedRowsReader::copy_part         results of StagedRows -> out

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"
#include "common/sizes.h"
#include "launchers.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/epilogue_half_types_mask.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// A row of StagedRows has 64 columns: eight vectors of 16 bytes. They are swizzled, vector v of row
// r at place v ^ (r % 8):
//
//   place    0   1   2   3   4   5   6   7
//   row 0    v0  v1  v2  v3  v4  v5  v6  v7
//   row 1    v1  v0  v3  v2  v5  v4  v7  v6
//   row 2    v2  v3  v0  v1  v6  v7  v4  v5
//   ...
//   row 7    v7  v6  v5  v4  v3  v2  v1  v0
//
// So vector v of eight successive rows, which stmatrix stores at once, is in different banks, and
// so are the eight vectors of a row, which threads read at once.
constexpr int kStagedRowBytes = 128;

// Returns the distance in bytes of a part's buffer from the first one. Parts use both in turn.
template <typename T>
__device__ constexpr int buffer_offset_of_part(int part) {
  return part % 2 * sizeof(StagedRows<T>);
}

struct PairResults {
  uint32_t words[4];  // in the order of pair_word
  PairMaskBits mask_bits;
};

// Makes the results of the pair of row blocks that begins with first_row_block. `bias` is for the
// columns g and g + 8.
template <bool kMask, typename T>
__device__ __forceinline__ void make_results_of_pair(
    const float (&accumulators)[OneProductConfig::kAccumulators], int first_row_block,
    float inverse_divisor, const float (&bias)[2], PairResults* results) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int block_of_pair = pair_word(word).row_block;
    const int column_block = pair_word(word).column_block;
    float z[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = fragment_index(first_row_block + block_of_pair, column_block, row);
      z[row] = fmaf(accumulators[i], inverse_divisor, bias[column_block]);
    }
    results->words[word] = ptx::pack<T, /*kRelu=*/true>(z[0], z[1]);
    if constexpr (kMask) results->mask_bits.add(block_of_pair, column_block, z);
  }
}

// Returns the address that a lane gives to stmatrix for the first pair of row blocks at
// `staged_rows`. stmatrix takes from lane l the address of row l % 8 of matrix l / 8. Matrix i is
// words[i] of all lanes, transposed: the eight rows of its row block, and the eight columns of its
// column block (pair_word in fragment.cuh). So lanes 0 - 15 give the pair's 16 rows of column block
// 0, and lanes 16 - 31 those of column block 1.
__device__ __forceinline__ uint32_t stmatrix_address(uint32_t staged_rows, int warp, int lane) {
  const int row = lane % 16;
  const int vector = warp * 2 + lane / 16;  // a warp's 16 columns are two vectors
  const int place = vector ^ row % 8;
  return staged_rows + row * kStagedRowBytes + place * kVectorBytes;
}

// Copies results from StagedRows to out. Thread t copies vector t % 8 (eight columns) of row t / 8,
// and of every kRowsAtATime-th row after it.
template <typename T>
struct StagedRowsReader {
  static constexpr int kRowsAtATime = BlockConfig::kWarpgroupThreads / 8;
  static_assert(kRowsAtATime % 8 == 0, "a thread's vectors have the same place in all its rows");

  uint32_t source;  // address of the thread's first vector in the first buffer
  int m;            // the row of out of this vector in part 0, the tile's first 64 rows
  int n;            // the first column of out of this vector
  T* target;        // the element of out at m and n

  __device__ StagedRowsReader(const Epilogue<T>& epilogue, const WarpgroupTile& warpgroup_tile,
                              uint32_t staging, int thread) {
    const int row = thread / 8;
    const int vector = thread % 8;
    // With `row` in place of thread / 8, nvcc makes other machine code than was measured.
    const int place = vector ^ (thread / 8 % 8);
    source = staging + row * kStagedRowBytes + place * kVectorBytes;
    m = warpgroup_tile.first_m + row;
    n = warpgroup_tile.first_n + vector * 8;
    target = epilogue.out_at(m, n);
  }

  __device__ __forceinline__ void copy_part(const Epilogue<T>& epilogue, int part) const {
    constexpr int kStagedRows = OneProductConfig::kStagedRows;
#pragma unroll
    for (int i = 0; i < kStagedRows / kRowsAtATime; ++i) {
      const int offset = buffer_offset_of_part<T>(part) + i * kRowsAtATime * kStagedRowBytes;
      const float4 v = ptx::load_shared_float4(source + offset);
      const int row_offset = part * kStagedRows + i * kRowsAtATime;
      const bool exists = m + row_offset < epilogue.m && n < epilogue.n;
      T* const out = target + row_offset * static_cast<int64_t>(epilogue.n);
      if (exists) __stcs(reinterpret_cast<float4*>(out), v);
    }
  }
};

// Returns the rule of the fast epilogue of half types. N must be a multiple of 8, because
// StagedRowsReader stores vectors of 16 bytes. With a mask, N must be a multiple of 64, because
// store_mask_rows stores the bits of a warpgroup's 64 columns at once. The call must have ReLU,
// because make_results_of_pair always applies it.
template <typename T>
FastEpilogueRule fast_epilogue_rule_of_half_types(const LinearArguments& call) {
  const int64_t alignment =
      call.mask != nullptr ? OneProductConfig::kWarpgroupWeightRows : kVectorBytes / sizeof(T);
  return {alignment, /*needs_relu=*/true};
}

// The fast epilogue of half types. The caller has checked epilogue.allows_fast_epilogue. For such
// calls PrefetchedInputs::store_and_sync has divided the bias, so one fma divides the product and
// adds the bias.
template <bool kMask, typename T>
__device__ void store_fast(const Epilogue<T>& epilogue, const WarpgroupTile& warpgroup_tile,
                           const float (&accumulators)[OneProductConfig::kAccumulators],
                           const EpilogueMemory<T>& memory) {
  constexpr int kStagedRows = OneProductConfig::kStagedRows;
  static_assert(kStagedRowBytes == OneProductConfig::kWarpgroupWeightRows * sizeof(T),
                "a row has eight vectors of 16 bytes");
  constexpr int kPairRows = FragmentConfig::kPairRows;
  const int thread = threadIdx.x % BlockConfig::kWarpgroupThreads;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const FragmentLane fragment_lane(lane);
  const float inverse_divisor = epilogue.divisor.inverse_power;
  const float* const bias_of_warp = memory.inputs.bias + warp * OneProductConfig::kWarpWeightRows;
  const float bias[2] = {bias_of_warp[fragment_lane.g], bias_of_warp[fragment_lane.g + 8]};
  const uint32_t staging = ptx::shared_address(&memory.staging);
  const uint32_t matrix_address = stmatrix_address(staging, warp, lane);
  const StagedRowsReader<T> reader(epilogue, warpgroup_tile, staging, thread);

#pragma unroll
  for (int part = 0; part < OneProductConfig::kTileRows / kStagedRows; ++part) {
    StagedRows<T>& staged = memory.staging.rows[part % 2];
    const int first_row = part * kStagedRows;  // of the tile
#pragma unroll
    for (int pair = 0; pair < kStagedRows / kPairRows; ++pair) {
      const int first_row_block = (first_row + pair * kPairRows) / FragmentConfig::kRowBlockRows;
      PairResults results;
      make_results_of_pair<kMask, T>(accumulators, first_row_block, inverse_divisor, bias,
                                     &results);
      const int offset = buffer_offset_of_part<T>(part) + pair * kPairRows * kStagedRowBytes;
      ptx::store_matrices_transposed(matrix_address + offset, results.words);
      if constexpr (kMask) {
        // In the exchange of mask bits, the lane keeps those of the second row block
        // (PairMaskBits).
        const bool keeps_second = fragment_lane.g / 4 == 1;
        stage_mask_of_pair(results.mask_bits, keeps_second, pair * kPairRows, warp, fragment_lane,
                           staged.mask);
      }
    }
    // All threads have now stored these 64 rows to shared memory, and have read the previous 64,
    // whose buffer the next ones overwrite. So one barrier is enough.
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
    if constexpr (kMask) {
      store_mask_rows(epilogue, warpgroup_tile.first_m + first_row, warpgroup_tile.first_n, thread,
                      staged.mask);
    }
    reader.copy_part(epilogue, part);
  }
}

}  // namespace kernels::sm90::gemm_one_product
