// How the accumulators of a tile pass through shared memory in the epilogues of epilogue.cuh.
// sm90/fragment.cuh says which thread has which. Warp w of the warpgroup has the columns 16 w to
// 16 w + 15 of the warpgroup's 64.

#pragma once

#include <cstdint>

#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// A subtile of a warpgroup's accumulators: [row block][warp][lane], each lane with its four
// accumulators of the row block.
using StagedAccumulators =
    float4[OneProductConfig::kSubtileRowBlocks][4][OneProductConfig::kStagedLanes];

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

  __host__ __device__ constexpr int in_floats() const {
    return 4 * (warp * OneProductConfig::kStagedLanes + lane) + component;
  }
};

// Returns where a staged row block has the accumulator of a column (of the warpgroup's 64) and a
// row (of the row block's 8). Example, with the words of fragment.cuh: column 20 is number 4 of
// warp 1's sixteen, so g = 4, in the first column block. Row 2 is the first row of c = 1. The
// accumulator is component 0 of lane 4 * g + c = 17 of warp 1.
__host__ __device__ constexpr StagedPlace staged_place(int column, int row) {
  const int warp = column / 16;
  const int lane = column % 8 * 4 + row / 2;  // 4 g + c
  const int column_block = column / 8 % 2;
  const int component = fragment_index(/*row_block=*/0, column_block, row % 2);
  return {warp, lane, component};
}
static_assert(staged_place(20, 2).in_floats() == 4 * (1 * OneProductConfig::kStagedLanes + 17) + 0,
              "the example above");

// Reads StagedAccumulators in the order of out. Thread t of the warpgroup reads row t / 16 of each
// row block, and columns 4 (t % 16) to 4 (t % 16) + 3 of it. Two measures avoid bank conflicts, as
// reads_all_banks checks:
//
//   padding   The 33rd float4 of each warp. Without it, lanes of the same number in two warps
//             would be 128 floats apart, in the same bank.
//   swap      Even threads read their columns in the order 0 1 2 3, odd threads in the order
//             1 0 3 2. Without that, an even thread and the next one would read columns that are
//             4 apart, which is 64 floats: the same bank. With it, they are 5 or 3 apart, which is
//             an odd multiple of 16 floats: different halves of the banks.
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
    const int first_offset = (swaps ? 1 : 0) * kNextColumn;
    const int second_offset = (swaps ? 0 : 1) * kNextColumn;
    first_read = source + first_offset;
    second_read = source + second_offset;
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

  // Returns whether the first reads of a warp are in 32 different banks. (Then so are the others.
  // The second reads are kNextColumn floats later in even threads and earlier in odd ones, which is
  // the same distance modulo 32 banks. All further reads are at the same distance from the first or
  // second in all threads.)
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

}  // namespace kernels::sm90::gemm_one_product
