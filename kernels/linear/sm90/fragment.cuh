// wgmma's accumulator fragment: which results of a product a thread has in its registers. The
// accumulators of both Hopper GEMM kernels are such a fragment, and so are the float32 sums to
// which gemm_fp16x3 promotes them.
//
// The weight is wgmma's operand A, and x is operand B. So the rows of wgmma's result are columns of
// out, and its columns are rows of out. Below, rows and columns are those of out.
//
// A warp has all rows of the tile, in row blocks of 8, and 16 columns, in two column blocks of 8. A
// thread is lane 4 g + c of its warp, where g is 0 to 7 and c is 0 to 3. It has four elements of
// each row block j:
//
//                                   row 8 j + 2 c         row 8 j + 2 c + 1
//   column g      (block 0)         fragment[4 j]         fragment[4 j + 1]
//   column g + 8  (block 1)         fragment[4 j + 2]     fragment[4 j + 3]
//
// The lanes that have a row block:
//
//                   column   0    1    2    3    4    5    6    7  | 8 ... 15: the same lanes
//   rows 8 j + 0, 8 j + 1    0    4    8   12   16   20   24   28  |
//   rows 8 j + 2, 8 j + 3    1    5    9   13   17   21   25   29  |
//   rows 8 j + 4, 8 j + 5    2    6   10   14   18   22   26   30  |
//   rows 8 j + 6, 8 j + 7    3    7   11   15   19   23   27   31  |
//
// In gemm_one_product, these are the warp's 16 columns of out from left to right. In gemm_fp16x3,
// columns g and g + 8 of the picture are neighbours in out (gemm_fp16x3/weight_row_order.cuh).

#pragma once

#include <cuda_runtime.h>

namespace kernels::sm90 {

struct FragmentConfig {
  static constexpr int kRowBlockRows = 8;
  static constexpr int kRowBlockElements = 4;          // of a thread
  static constexpr int kPairRows = 2 * kRowBlockRows;  // of a pair of row blocks
};

// The numbers g and c of a lane.
struct FragmentLane {
  int g;
  int c;

  __host__ __device__ constexpr explicit FragmentLane(int lane) : g(lane / 4), c(lane % 4) {}
};

// Returns the index of a thread's element in its fragment. `row` is 0 for row 2 c of the row block,
// and 1 for row 2 c + 1.
__host__ __device__ constexpr int fragment_index(int row_block, int column_block, int row) {
  return FragmentConfig::kRowBlockElements * row_block + 2 * column_block + row;
}

// Returns a thread's four elements of a row block: rows 2 c and 2 c + 1 of column block 0 in x and
// y, those of column block 1 in z and w.
template <int kElements>
__device__ __forceinline__ float4 row_block_of(const float (&fragment)[kElements], int row_block) {
  const float* const first = fragment + fragment_index(row_block, 0, 0);
  return make_float4(first[0], first[1], first[2], first[3]);
}

// The epilogues of half types take a pair of row blocks, 16 rows, at a time. A thread has eight
// results of such a pair, and packs two of them to a word: those of rows 2 c and 2 c + 1 in one
// column.
//
//                     row block 0 of the pair   row block 1
//   column block 0    word 0                    word 1
//   column block 1    word 2                    word 3
//
// Word i of all lanes is matrix i of stmatrix (common/ptx/mma.cuh), 8 columns by 8 rows of out.
struct PairWord {
  int row_block;
  int column_block;
};

// Returns which row block and which column block a word has.
__host__ __device__ constexpr PairWord pair_word(int word) { return {word % 2, word / 2}; }

}  // namespace kernels::sm90
