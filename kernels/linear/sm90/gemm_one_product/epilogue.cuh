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
// epilogue_inputs.cuh has the bias and the exponents (EpilogueInputs), and shared_memory.cuh the
// shared memory through which results are stored (EpilogueMemory).
//
// ----- Which thread has which results
//
// Eight rows are a row block (they are eight columns of wgmma's accumulators); a tile has row
// blocks j = 0 - 31. A warp has 16 columns, two column blocks of 8. Thread 32 w + 4 g + c of the
// warpgroup (warp w = 0 - 3, g = 0 - 7, c = 0 - 3) has four results of each row block:
//
//                           row 8 j + 2 c            row 8 j + 2 c + 1
//   column 16 w + g         accumulators[4 j]        accumulators[4 j + 1]
//   column 16 w + g + 8     accumulators[4 j + 2]    accumulators[4 j + 3]
//
// The lanes of a warp that have row block j:
//
//              column 16 w +   0    1    2    3    4    5    6    7  | 8 ... 15: the same lanes
//   rows 8 j + 0, 8 j + 1      0    4    8   12   16   20   24   28  |
//   rows 8 j + 2, 8 j + 3      1    5    9   13   17   21   25   29  |
//   rows 8 j + 4, 8 j + 5      2    6   10   14   18   22   26   30  |
//   rows 8 j + 6, 8 j + 7      3    7   11   15   19   23   27   31  |
//
// So a thread's neighbouring results are in one column of out, but stores need neighbours in a row:
// the results are transposed through shared memory. (PackedGradient's out is [N, M], which needs no
// transposition.)
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
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/epilogue_inputs.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

// The index of a thread's accumulator for row 2 c of a row block. The one for row 2 c + 1 follows.
// `column_block` is 0 for column g and 1 for column g + 8 of the warp.
__host__ __device__ constexpr int accumulator_index(int row_block, int column_block) {
  return 4 * row_block + 2 * column_block;
}

// ----- accumulators in shared memory, for both epilogues of this file

// Returns where this thread writes its four accumulators of the subtile's first row block.
__device__ inline float4* staging_slot(StagedAccumulators& accumulators) {
  const int warp = threadIdx.x % BlockConfig::kWarpgroupThreads / 32;
  const int lane = threadIdx.x % 32;
  return &accumulators[0][warp][lane];
}

// A place in a staged row block, [warp][lane] of float4.
struct StagedPlace {
  int warp;
  int lane;
  int component;  // 0 to 3, of the float4

  // The distance from the beginning of the row block, in floats.
  __host__ __device__ constexpr int in_floats() const {
    return 4 * (warp * OneProductConfig::kStagedLanes + lane) + component;
  }
};

// Returns where a staged row block has the accumulator of a column (of the warpgroup's 64) and a
// row (of the row block's 8).
//
// Example: column 20 is number 4 of warp 1's sixteen, so g = 4, in the first column block. Row 2 is
// the first row of c = 1. The accumulator is component 0 of lane 4 g + c = 17 of warp 1.
__host__ __device__ constexpr StagedPlace staged_place(int column, int row) {
  const int warp = column / 16;
  const int lane = column % 8 * 4 + row / 2;  // 4 g + c
  const int column_block = column / 8 % 2;
  const int component = accumulator_index(/*row_block=*/0, column_block) + row % 2;
  return {warp, lane, component};
}
static_assert(staged_place(20, 2).in_floats() == 4 * (1 * OneProductConfig::kStagedLanes + 17) + 0,
              "the example above");

// Reads StagedAccumulators in the order of out. Thread t of the warpgroup reads row t / 16 of each
// row block, and columns 4 (t % 16) to 4 (t % 16) + 3 of it. Sixteen threads read a row of 64
// columns, so a warp reads two rows at a time.
//
// Two measures avoid bank conflicts; reads_all_banks checks that they do.
//
//   padding   The 33rd float4 of each warp. Without it, equal lanes of all warps would be 128
//             floats apart, in the same bank.
//   swap      Even threads read their columns in the order 0 1 2 3, odd threads in the order
//             1 0 3 2. Without that, two neighbouring threads would read columns that are 4 apart,
//             which is 64 floats: the same bank. With it, they are 5 or 3 apart, which is an odd
//             multiple of 16 floats: different halves of the banks.
struct StagedAccumulatorsReader {
  int column;                // the first of this thread's four, in the warpgroup's 64
  int row;                   // in each row block
  bool swaps;                // whether this thread reads column 1 before 0, and 3 before 2
  const float* first_read;   // points to column 0, or to column 1 if the thread swaps
  const float* second_read;  // points to the other one
  // From a column to the next, in floats: four lanes of four floats.
  static constexpr int kNextColumn = 16;

  __device__ explicit StagedAccumulatorsReader(const StagedAccumulators& accumulators) {
    column = threadIdx.x % 16 * 4;
    row = threadIdx.x % BlockConfig::kWarpgroupThreads / 16;
    swaps = threadIdx.x % 2 != 0;
    const StagedPlace place = staged_place(column, row);
    const float* const source = &accumulators[0][place.warp][place.lane].x + place.component;
    first_read = source + (swaps ? 1 : 0) * kNextColumn;
    second_read = source + (swaps ? 0 : 1) * kNextColumn;
  }

  // Reads the thread's four columns of its row in a row block of the subtile.
  __device__ void read(float (&v)[4], int row_block) const {
    constexpr int kPitch = 4 * OneProductConfig::kRowBlockPitch;  // in floats
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float first = first_read[row_block * kPitch + i * kNextColumn];
      const float second = second_read[row_block * kPitch + i * kNextColumn];
      v[i] = swaps ? second : first;
      v[i + 1] = swaps ? first : second;
    }
  }

  // Returns whether the first reads of the 32 threads of a warp are in 32 different banks. (The
  // further reads are the same distance away in all threads, or swapped between them.)
  static constexpr bool reads_all_banks(int warp) {
    uint32_t banks = 0;
    for (int thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
      const bool swaps = thread % 2 != 0;
      const int first_column = thread % 16 * 4 + (swaps ? 1 : 0);
      const int row = thread / 16;
      banks |= 1u << staged_place(first_column, row).in_floats() % 32;
    }
    return banks == 0xffffffff;
  }
};
static_assert(StagedAccumulatorsReader::reads_all_banks(0) &&
                  StagedAccumulatorsReader::reads_all_banks(1) &&
                  StagedAccumulatorsReader::reads_all_banks(2) &&
                  StagedAccumulatorsReader::reads_all_banks(3),
              "reads have no bank conflicts");

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
