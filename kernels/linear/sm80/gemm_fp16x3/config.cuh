// The constants of gemm_fp16x3_sm80_kernel (kernel.cuh), and where a k-tile is in shared memory.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/sizes.h"

namespace kernels::sm80::gemm_fp16x3 {

struct Sm80Config {
  static constexpr int kThreads = 256;

  // The tile of a block, a warp's part of it, and the depth of a k-tile.
  static constexpr int kTileRows = 128;
  static constexpr int kTileColumns = 128;
  static constexpr int kWarpRows = 64;
  static constexpr int kWarpColumns = 32;
  static constexpr int kKTileDepth = 32;
  static constexpr int kRowBytes = kKTileDepth * sizeof(__half);  // a row of a k-tile: hi or lo
  // The hi numbers of a k-tile of one operand, or its lo numbers.
  static constexpr int kPartBytes = kTileRows * kRowBytes;

  // A vector is the part of a row that one cp.async copies, and that ldmatrix reads at once.
  static constexpr int kVectorElements = kVectorBytes / sizeof(__half);
  static constexpr int kRowVectors = kRowBytes / kVectorBytes;

  // A stage of the ring holds a k-tile: x hi, x lo, weight hi, weight lo. The ring takes 128 KiB,
  // more than a block can have on sm_86, sm_89 and sm_120.
  static constexpr int kStageBytes = 4 * kPartBytes;
  static constexpr int kStages = 4;
  static constexpr int kSharedBytes = kStages * kStageBytes;

  // The instruction mma.m16n8k16 multiplies a fragment [16, 16] of x by a fragment [8, 16] of the
  // weight, so it makes 16 rows x 8 columns. A warp's part of the tile has kXFragments x
  // kWeightFragments such products.
  static constexpr int kMmaM = 16;
  static constexpr int kMmaN = 8;
  static constexpr int kMmaK = 16;
  static constexpr int kXFragments = kWarpRows / kMmaM;
  static constexpr int kWeightFragments = kWarpColumns / kMmaN;

  // The epilogue stages the sums of two fragments of x at a time: a subtile of 32 rows. In shared
  // memory a row has 8 floats more than it needs, which avoids bank conflicts.
  static constexpr int kSubtileFragments = 2;
  static constexpr int kSubtileRows = kSubtileFragments * kMmaM;
  static constexpr int kSubtileColumns = kWarpColumns;
  static constexpr int kSubtilePitch = kSubtileColumns + 8;            // floats
  static constexpr int kSubtileFloats = kSubtileRows * kSubtilePitch;  // a warp's
};
static_assert(Sm80Config::kTileRows / Sm80Config::kWarpRows *
                      (Sm80Config::kTileColumns / Sm80Config::kWarpColumns) ==
                  Sm80Config::kThreads / 32,
              "the warps compute the tile");
static_assert(Sm80Config::kTileRows == Sm80Config::kTileColumns,
              "both operands have k-tiles of the same size, and are copied by the same loop");
static_assert(Sm80Config::kRowVectors == 4, "vector_offset swizzles four vectors a row");
static_assert(Sm80Config::kKTileDepth == 2 * Sm80Config::kMmaK, "a k-tile has two k-steps");
static_assert(Sm80Config::kThreads / 32 * Sm80Config::kSubtileFloats * sizeof(float) <=
                  Sm80Config::kSharedBytes,
              "the epilogue's subtiles reuse the memory of the stages");

// The two parts of a split number, as indices of fragments.
enum HiOrLo { kHi, kLo };

// Returns the byte offset of a 16-byte vector in a k-tile of hi or lo of one operand. ldmatrix
// reads the same vector of eight rows at once, which must be in different banks. Two rows, of 64
// bytes each, fill the 32 banks, so every two rows store the vectors in another order (a swizzle):
//
//   row       0, 1       2, 3       4, 5       6, 7
//   vectors   0 1 2 3    1 0 3 2    2 3 0 1    3 2 1 0
//
// The order repeats every 8 rows, so the same vector 8 rows further is at 8 * kRowBytes more.
__host__ __device__ constexpr uint32_t vector_offset(int row, int vector) {
  return row * Sm80Config::kRowBytes + (vector ^ (row / 2 % 4)) * kVectorBytes;
}
static_assert(vector_offset(/*row=*/3, /*vector=*/0) == 3 * 64 + 16,
              "row 3 has vector 0 in its second place");

// Returns the byte offset of the stage after the one at offset `stage`.
__device__ inline uint32_t next_stage(uint32_t stage) {
  if (stage == Sm80Config::kSharedBytes - Sm80Config::kStageBytes) return 0;
  return stage + Sm80Config::kStageBytes;
}

}  // namespace kernels::sm80::gemm_fp16x3
