// The mainloop of gemm_fp16x3_sm80_kernel (kernel.cuh), which multiplies one k-tile after the
// other:
//
//   Copies            from global memory to the ring of stages
//   MmaFragments      from a stage to the registers that the tensor cores read
//   Results           products, accumulators and their promotion to sums
//   multiply_k_tile   one k-tile, by all of these

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"
#include "linear/sm80/gemm_fp16x3/config.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm80::gemm_fp16x3 {

// The copies of k-tiles from global to shared memory. For a k-tile, a thread copies one vector, hi
// and lo, of two rows of x and of two rows of the weight, 64 rows apart. Rows and k-tiles past the
// end become zeros.
struct Copies {
  static constexpr int kRowStep = Sm80Config::kThreads / Sm80Config::kRowVectors;
  static constexpr int kRowsOfThread = Sm80Config::kTileRows / kRowStep;  // in each operand

  // The rows of x, or of the weight, that the thread copies.
  struct Operand {
    const __half* hi;  // hi of the vector that is copied next, in the thread's first row
    int64_t hi_to_lo;  // elements from a number's hi to its lo
    int rows_left;     // rows from the thread's first row on; below 1 if that one is past the end
  };
  Operand x;
  Operand weight;
  int64_t stride;      // the padded k
  int k_left;          // elements of K from the next vector on
  uint32_t target;     // address of the thread's vector in the first stage's hi of x
  uint32_t stage = 0;  // offset of the stage that is written next

  __device__ Copies(const split::ScaledMatrix& operand_x, const split::ScaledMatrix& operand_weight,
                    int x_row, int weight_row, int padded_k, uint32_t shared) {
    stride = padded_k;
    const int row = threadIdx.x / Sm80Config::kRowVectors;  // in the k-tile, of either operand
    const int vector = threadIdx.x % Sm80Config::kRowVectors;
    x = operand_from(operand_x, x_row, row, vector);
    weight = operand_from(operand_weight, weight_row, row, vector);
    target = shared + vector_offset(row, vector);
    k_left = padded_k - vector * Sm80Config::kVectorElements;
  }

  // Starts a quarter of a k-tile's copies, so that they can be spread among the products: one of
  // the thread's two rows of x (quarters 0 and 1) or of the weight (2 and 3). Callers pass
  // constants, in unrolled loops.
  __device__ __forceinline__ void copy_quarter(int quarter) {
    static_assert(2 * kRowsOfThread == 4, "a quarter is one row of one operand");
    const int row = quarter % kRowsOfThread * kRowStep;
    const uint32_t address = target + stage + row * Sm80Config::kRowBytes;
    if (quarter < kRowsOfThread) {
      copy_vector(address, x, row);
    } else {
      copy_vector(address + 2 * Sm80Config::kPartBytes, weight, row);
    }
    const bool is_last_quarter = quarter == 3;
    if (is_last_quarter) begin_next_k_tile();
  }

 private:
  __device__ __forceinline__ void begin_next_k_tile() {
    ptx::commit_copies();
    x.hi += Sm80Config::kKTileDepth;
    weight.hi += Sm80Config::kKTileDepth;
    k_left -= Sm80Config::kKTileDepth;
    stage = next_stage(stage);
  }

  // The tile begins at first_row of the matrix, and the thread at `row` and `vector` of the tile.
  __device__ Operand operand_from(const split::ScaledMatrix& matrix, int first_row, int row,
                                  int vector) const {
    Operand operand;
    operand.hi_to_lo = matrix.lo - matrix.hi;
    operand.rows_left = matrix.rows - first_row - row;
    operand.hi = matrix.hi + stride * (first_row + row) + vector * Sm80Config::kVectorElements;
    return operand;
  }

  // Starts the copies of one vector, hi and lo, to `address` in shared memory. `row` counts from
  // the thread's first row.
  __device__ void copy_vector(uint32_t address, const Operand& operand, int row) const {
    const bool exists = k_left > 0 && row < operand.rows_left;
    const __half* const hi = operand.hi + stride * row;
    ptx::copy_async(address, hi, exists);
    ptx::copy_async(address + Sm80Config::kPartBytes, hi + operand.hi_to_lo, exists);
  }
};

// A warp's operands of the products, as fragments of the mma instruction: a of x, b of the weight.
// A k-tile has two k-steps, each as deep as one instruction. multiply_k_tile says when fragments
// are loaded. All of a k-tile's hi fragments are kept, because the hi products come after the lo
// products of both k-steps.
struct MmaFragments {
  static constexpr int kKStepBytes = Sm80Config::kMmaK * sizeof(__half);  // a row in a k-step

  // The indices of both arrays: k-step, fragment, HiOrLo, register.
  uint32_t a[2][Sm80Config::kXFragments][2][4];
  uint32_t b[2][Sm80Config::kWeightFragments][2][2];

  // The address that this lane passes to ldmatrix, in the first stage and k-step. ldmatrix loads
  // four matrices of 8 rows by one vector, and lanes 8 i to 8 i + 7 pass the rows of matrix i:
  //
  //   matrix       0               1               2               3
  //   of x         rows 0 - 7      rows 8 - 15     rows 0 - 7      rows 8 - 15
  //                vector 0        vector 0        vector 1        vector 1
  //   of weight    rows 0 - 7      rows 0 - 7      rows 8 - 15     rows 8 - 15
  //                vector 0        vector 1        vector 0        vector 1
  uint32_t a_address, b_address;

  __device__ MmaFragments(uint32_t shared, int warp_row, int warp_column) {
    const int lane = threadIdx.x % 32;
    a_address = shared + vector_offset(warp_row + lane % 16, lane / 16);
    const int b_row = warp_column + lane % 8 + lane / 16 * 8;
    const int b_vector = lane / 8 % 2;
    b_address = shared + 2 * Sm80Config::kPartBytes + vector_offset(b_row, b_vector);
  }

  // Loads hi and lo of one fragment of x. k-step 1 begins two vectors after k-step 0: vector 0 or 1
  // becomes 2 or 3. This is vector ^ 2, so the swizzled address changes by ^ kKStepBytes.
  __device__ void load_a(uint32_t stage, int k_step, int fragment) {
    const uint32_t a_in_k_step = a_address ^ (k_step * kKStepBytes);
#pragma unroll
    for (int part = kHi; part <= kLo; ++part) {
      uint32_t (&target)[4] = a[k_step][fragment][part];
      const uint32_t place = stage + part * Sm80Config::kPartBytes +
                             fragment * (Sm80Config::kMmaM * Sm80Config::kRowBytes);
      ptx::load_matrices(target[0], target[1], target[2], target[3], a_in_k_step + place);
    }
  }

  // Loads a quarter of the weight's fragments of a k-step: two fragments, hi or lo.
  //
  //   quarter      0         1         2         3
  //   fragments    0, 1 hi   2, 3 hi   0, 1 lo   2, 3 lo
  __device__ void load_b(uint32_t stage, int k_step, int quarter) {
    static_assert(Sm80Config::kWeightFragments == 4, "two quarters load hi, and two load lo");
    const uint32_t b_in_k_step = b_address ^ (k_step * kKStepBytes);
    const int part = quarter / 2;
    const int j = quarter % 2 * 2;
    uint32_t (&target)[2] = b[k_step][j][part];
    uint32_t (&next_target)[2] = b[k_step][j + 1][part];
    const uint32_t place =
        stage + part * Sm80Config::kPartBytes + j * (Sm80Config::kMmaN * Sm80Config::kRowBytes);
    ptx::load_matrices(target[0], target[1], next_target[0], next_target[1], b_in_k_step + place);
  }
};

// A warp's results. The indices of both arrays: fragment of x, fragment of the weight, register.
struct Results {
  // The promoted sums of all k-tiles, in lo's scale: 2^11 times too large.
  float sums[Sm80Config::kXFragments][Sm80Config::kWeightFragments][4] = {};
  float accumulators[Sm80Config::kXFragments][Sm80Config::kWeightFragments][4] = {};

  // Adds the accumulators of a fragment of x, times 2^11, to its sums, when a k-tile is complete.
  // The rounding error of this addition is the start value of the next k-tile's accumulators; like
  // the lo products, it is 2^11 times too large.
  __device__ void promote(int fragment) {
#pragma unroll
    for (int j = 0; j < Sm80Config::kWeightFragments * 4; ++j) {
      float& accumulator = accumulators[fragment][j / 4][j % 4];
      float& sum = sums[fragment][j / 4][j % 4];
      const float new_sum = fmaf(accumulator, split::kLoScale, sum);
      accumulator = fmaf(accumulator, split::kLoScale, sum - new_sum);  // the rounding error
      sum = new_sum;
    }
  }

  // Divides the sums or accumulators of a fragment of x by lo's factor, 2^11, which is exact.
  __device__ static void remove_lo_scale(float (&values)[Sm80Config::kWeightFragments][4]) {
#pragma unroll
    for (int j = 0; j < Sm80Config::kWeightFragments * 4; ++j) {
      values[j / 4][j % 4] *= 1 / split::kLoScale;
    }
  }

  // The next functions add the products of a fragment of x and all fragments of the weight.
  __device__ void add_lo_products(const MmaFragments& operands, int k_step, int fragment) {
    multiply(operands, k_step, fragment, kHi, kLo);
    multiply(operands, k_step, fragment, kLo, kHi);
  }

  __device__ void add_hi_products(const MmaFragments& operands, int k_step, int fragment) {
    multiply(operands, k_step, fragment, kHi, kHi);
  }

 private:
  __device__ void multiply(const MmaFragments& operands, int k_step, int fragment, HiOrLo part_a,
                           HiOrLo part_b) {
#pragma unroll
    for (int j = 0; j < Sm80Config::kWeightFragments; ++j) {
      ptx::mma(accumulators[fragment][j], operands.a[k_step][fragment][part_a],
               operands.b[k_step][j][part_b]);
    }
  }
};

// Makes the products of a k-tile, in four phases, each of which takes the four fragments of x:
//
//   phase   products           loads                                  also
//   0       lo of k-step 0     x; the weight of k-step 1              promote the previous k-tile
//   1       lo of k-step 1     x
//   2       hi of k-step 0                                            scale accumulators by 2^-11
//   3       hi of k-step 1     the next k-tile's weight of k-step 0   copy a stage
//
// "x": each fragment of x is loaded while the one before it is multiplied. The first fragment of
// k-step 1 is loaded at the end of phase 0, and that of the next k-tile at the end of phase 3.
__device__ __forceinline__ void multiply_k_tile(Copies& copies, MmaFragments& fragments,
                                                Results& results, uint32_t& stage) {
  static_assert(Sm80Config::kXFragments == 4,
                "each turn of phases 0 and 3 handles a quarter of the copies of a stage, or of the "
                "loads of the weight's fragments");
  constexpr int kLast = Sm80Config::kXFragments - 1;

  // Phase 0: lo of k-step 0.
#pragma unroll
  for (int i = 0; i <= kLast; ++i) {
    const int quarter = i;  // kXFragments == 4
    fragments.load_b(stage, /*k_step=*/1, quarter);
    if (i < kLast) {
      fragments.load_a(stage, /*k_step=*/0, i + 1);
    } else {
      fragments.load_a(stage, /*k_step=*/1, /*fragment=*/0);
    }
    results.promote(i);
    results.add_lo_products(fragments, /*k_step=*/0, i);
  }

  // Phase 1: lo of k-step 1.
#pragma unroll
  for (int i = 0; i <= kLast; ++i) {
    if (i < kLast) fragments.load_a(stage, /*k_step=*/1, i + 1);
    results.add_lo_products(fragments, /*k_step=*/1, i);
  }

  // Phase 2: hi of k-step 0.
#pragma unroll
  for (int i = 0; i <= kLast; ++i) {
    Results::remove_lo_scale(results.accumulators[i]);
    results.add_hi_products(fragments, /*k_step=*/0, i);
  }

  // Copies have begun for three of the 4 stages: this one and the two after it. This wait leaves
  // only the newest of them under way (kStages - 3 = 1), so the next stage has arrived. After the
  // barrier, no warp still reads the stage before this one, which the copies of phase 3 overwrite.
  ptx::wait_copies<Sm80Config::kStages - 3>();
  __syncthreads();
  stage = next_stage(stage);

  // Phase 3: hi of k-step 1. `stage` is the next k-tile's.
#pragma unroll
  for (int i = 0; i <= kLast; ++i) {
    const int quarter = i;  // kXFragments == 4
    copies.copy_quarter(quarter);
    fragments.load_b(stage, /*k_step=*/0, quarter);
    if (i == kLast) fragments.load_a(stage, /*k_step=*/0, /*fragment=*/0);
    results.add_hi_products(fragments, /*k_step=*/1, i);
  }
}

}  // namespace kernels::sm80::gemm_fp16x3
