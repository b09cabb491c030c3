// The fp16x3 GEMM for GPUs from sm_80 on: float32 at `highest`, by cp.async, ldmatrix and mma.sync.
//
//   out [m, n] float32 = epilogue(x weight^T)
//   x [m, k], weight [n, k]: split into hi and lo (split/split.cuh), row-major, with k padded to a
//   multiple of 64
//
// launch_chunk (launch.cu) launches it.
//
// The work. A block computes a tile of 128 x 128 results, and each of its 2 x 4 warps 64 x 32 of
// them. K is divided into k-tiles of 32. A k-tile has three products, which the tensor cores add to
// accumulators:
//
//   accumulators += x_lo weight_hi + x_hi weight_lo     in lo's scale, 2^11 times too large
//   accumulators *= 2^-11
//   accumulators += x_hi weight_hi
//
// Why it is accurate. The tensor cores truncate when they accumulate. So they add up only one
// k-tile, and the small lo products come first. float32 units then add the accumulators to the sums
// of all k-tiles (promotion). These additions are rounded to nearest, and compensated as in Kahan's
// summation: the rounding error of an addition is the start value of the next k-tile's accumulator
// (docs/SPLIT.md).
//
// Why it is fast. Copies for later k-tiles, loads of fragments, promotion and products of the
// tensor cores are interleaved, so that the tensor cores seldom wait:
//
//   global memory --cp.async--> ring of 4 stages, in shared memory
//                 --ldmatrix--> fragments, in registers
//                 --mma-------> accumulators --promotion--> sums

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"
#include "common/sizes.h"
#include "linear/epilogue.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm80::gemm_fp16x3 {

struct Config {
  static constexpr int kThreads = 256;

  // The tile of a block, the part of it that a warp computes, and the depth of a k-tile. Rows and
  // columns are those of out: column n is made from row n of the weight.
  static constexpr int kTileRows = 128;
  static constexpr int kTileColumns = 128;
  static constexpr int kWarpRows = 64;
  static constexpr int kWarpColumns = 32;
  static constexpr int kKTileDepth = 32;
  static constexpr int kRowBytes = kKTileDepth * sizeof(__half);  // of a k-tile
  static constexpr int kPartBytes = kTileRows * kRowBytes;        // hi or lo of one operand

  // A vector is the part of a row that one cp.async copies, and that ldmatrix reads at once.
  static constexpr int kVectorHalves = kVectorBytes / sizeof(__half);
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

  // The epilogue stages two fragments of x at a time: a subtile of 32 rows. In shared memory a
  // row has 8 floats more than it needs, which avoids bank conflicts.
  static constexpr int kSubtileFragments = 2;
  static constexpr int kSubtileRows = kSubtileFragments * kMmaM;
  static constexpr int kSubtileColumns = kWarpColumns;
  static constexpr int kSubtilePitch = kSubtileColumns + 8;            // floats
  static constexpr int kSubtileFloats = kSubtileRows * kSubtilePitch;  // of a warp
};
static_assert(Config::kTileRows / Config::kWarpRows *
                      (Config::kTileColumns / Config::kWarpColumns) ==
                  Config::kThreads / 32,
              "the warps compute the tile");
static_assert(Config::kTileRows == Config::kTileColumns,
              "both operands have k-tiles of the same size, and are copied by the same loop");
static_assert(
    Config::kXFragments == 4,
    "for each of the four fragments of x, a quarter of a stage is copied, and a quarter of the "
    "weight's fragments loaded");
static_assert(Config::kRowVectors == 4, "vector_offset swizzles four vectors a row");
static_assert(Config::kKTileDepth == 2 * Config::kMmaK, "a k-tile has two k-steps");
static_assert(Config::kThreads / 32 * Config::kSubtileFloats * sizeof(float) <=
                  Config::kSharedBytes,
              "the epilogue's subtiles reuse the memory of the stages");

// The parts of a split number, as indices of fragments.
enum Part { kHi, kLo };

// Returns the byte offset of a 16-byte vector in a k-tile of hi or lo of one operand. ldmatrix
// reads the same vector of eight rows at once, which must be in different banks. Two rows, of 64
// bytes each, fill the 32 banks, so every two rows store the vectors in another order (a swizzle):
//
//   row       0, 1       2, 3       4, 5       6, 7
//   vectors   0 1 2 3    1 0 3 2    2 3 0 1    3 2 1 0
__device__ inline uint32_t vector_offset(int row, int vector) {
  return row * Config::kRowBytes + (vector ^ (row / 2 % 4)) * kVectorBytes;
}

// Returns the byte offset of the stage after the one at offset `stage`.
__device__ inline uint32_t next_stage(uint32_t stage) {
  if (stage == Config::kSharedBytes - Config::kStageBytes) return 0;
  return stage + Config::kStageBytes;
}

// The copies of k-tiles from global to shared memory. For a k-tile, a thread copies one vector, hi
// and lo, of two rows of x and of two rows of the weight, 64 rows apart. Rows and k-tiles past the
// end become zeros.
struct Copies {
  static constexpr int kRowStep = Config::kThreads / Config::kRowVectors;
  static constexpr int kRowsOfThread = Config::kTileRows / kRowStep;  // of each operand

  // The thread's part of x or of the weight.
  struct Operand {
    const __half* hi;  // hi of the vector that is copied next, in the thread's first row
    int64_t hi_to_lo;  // elements from a number's hi to its lo
    int rows_left;     // rows from the thread's first row on; below 1 if that one is past the end
  };
  Operand x;
  Operand weight;
  int64_t stride;      // elements between rows of a split matrix: the padded k
  int k_left;          // elements of K from the next vector on
  uint32_t target;     // address of the thread's vector in the first stage's hi of x
  uint32_t stage = 0;  // offset of the stage that is written next

  __device__ Copies(const split::ScaledMatrix& operand_x, const split::ScaledMatrix& operand_weight,
                    int first_row, int first_column, int k, uint32_t shared) {
    stride = k;
    const int row = threadIdx.x / Config::kRowVectors;  // of the k-tile of either operand
    const int vector = threadIdx.x % Config::kRowVectors;
    x = operand_from(operand_x, first_row, row, vector);
    weight = operand_from(operand_weight, first_column, row, vector);
    target = shared + vector_offset(row, vector);
    k_left = k - vector * Config::kVectorHalves;
  }

  // Starts a quarter of a k-tile's copies, so that they can be spread among the products. Quarters
  // 0 and 1 are the thread's two rows of x, quarters 2 and 3 its two rows of the weight. The last
  // quarter moves on to the next k-tile and the next stage.
  __device__ void copy_quarter(int quarter) {
    static_assert(2 * kRowsOfThread == 4, "a quarter is one row of one operand");
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // each quarter has code of its own, in which i is a constant
      if (i != quarter) continue;
      const int row = i % kRowsOfThread * kRowStep;
      const uint32_t address = target + stage + row * Config::kRowBytes;
      if (i < kRowsOfThread) {
        copy_vector(address, x, row);
      } else {
        copy_vector(address + 2 * Config::kPartBytes, weight, row);
      }
    }
    const bool is_last_quarter = quarter == 3;
    if (!is_last_quarter) return;
    ptx::commit_copies();
    x.hi += Config::kKTileDepth;
    weight.hi += Config::kKTileDepth;
    k_left -= Config::kKTileDepth;
    stage = next_stage(stage);
  }

 private:
  // Returns the thread's part of a matrix. The tile begins at first_row, and the thread at `row`
  // and `vector` of the tile.
  __device__ Operand operand_from(const split::ScaledMatrix& matrix, int first_row, int row,
                                  int vector) const {
    Operand operand;
    operand.hi_to_lo = matrix.lo - matrix.hi;
    operand.rows_left = matrix.rows - first_row - row;
    operand.hi = matrix.hi + stride * (first_row + row) + vector * Config::kVectorHalves;
    return operand;
  }

  // Starts the copies of one vector, hi and lo, `row` rows after the thread's first one. They go to
  // `address` in shared memory.
  __device__ void copy_vector(uint32_t address, const Operand& operand, int row) const {
    const bool exists = k_left > 0 && row < operand.rows_left;
    const __half* const hi = operand.hi + stride * row;
    ptx::copy_async(address, hi, exists);
    ptx::copy_async(address + Config::kPartBytes, hi + operand.hi_to_lo, exists);
  }
};

// A warp's operands of the products, as fragments of the mma instruction: a of x, b of the weight.
// A k-tile has two k-steps, each as deep as one instruction. Fragments of x are loaded one fragment
// ahead of their use, those of the weight one k-step ahead. All of a k-tile's hi fragments are
// kept, because the hi products come after the lo products of both k-steps.
struct Fragments {
  static constexpr int kStepBytes = Config::kMmaK * sizeof(__half);  // of a row in a k-step

  // The fragments of x have the indices k-step, fragment, Part, register.
  uint32_t a[2][Config::kXFragments][2][4];
  // The fragments of the weight have the indices k-step, Part, fragment, register.
  uint32_t b[2][2][Config::kWeightFragments][2];
  // The address that this lane passes to ldmatrix, in the first stage and k-step. ldmatrix loads
  // four matrices of 8 rows by one vector, and lanes 8 i to 8 i + 7 pass the rows of matrix i:
  //
  //   matrix       0               1               2               3
  //   of x         rows 0 - 7      rows 8 - 15     rows 0 - 7      rows 8 - 15
  //                vector 0        vector 0        vector 1        vector 1
  //   of weight    rows 0 - 7      rows 0 - 7      rows 8 - 15     rows 8 - 15
  //                vector 0        vector 1        vector 0        vector 1
  uint32_t a_address, b_address;

  __device__ Fragments(uint32_t shared, int warp_row, int warp_column) {
    const int lane = threadIdx.x % 32;
    a_address = shared + vector_offset(warp_row + lane % 16, lane / 16);
    b_address = shared + 2 * Config::kPartBytes +
                vector_offset(warp_column + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // Loads hi and lo of one fragment of x. k-step 1 begins two vectors after k-step 0: vector 0 or 1
  // becomes 2 or 3. This is vector ^ 2, so the swizzled address changes by ^ kStepBytes.
  __device__ void load_a(uint32_t stage, int k_step, int fragment) {
#pragma unroll
    for (int part = kHi; part <= kLo; ++part) {
      uint32_t (&target)[4] = a[k_step][fragment][part];
      const uint32_t place =
          stage + part * Config::kPartBytes + fragment * (Config::kMmaM * Config::kRowBytes);
      ptx::load_matrices(target[0], target[1], target[2], target[3],
                         (a_address ^ k_step * kStepBytes) + place);
    }
  }

  // Loads a quarter of the weight's fragments of a k-step: the first two quarters load hi, the
  // others lo. One instruction loads two fragments.
  __device__ void load_b(uint32_t stage, int k_step, int quarter) {
    constexpr int kLoadsOfPart = Config::kWeightFragments / 2;
    constexpr int kLoads = 2 * kLoadsOfPart / 4;  // of a quarter
#pragma unroll
    for (int i = quarter * kLoads; i < (quarter + 1) * kLoads; ++i) {
      const int part = i / kLoadsOfPart;
      const int j = i % kLoadsOfPart * 2;
      uint32_t (&target)[Config::kWeightFragments][2] = b[k_step][part];
      const uint32_t place =
          stage + part * Config::kPartBytes + j * (Config::kMmaN * Config::kRowBytes);
      ptx::load_matrices(target[j][0], target[j][1], target[j + 1][0], target[j + 1][1],
                         (b_address ^ k_step * kStepBytes) + place);
    }
  }
};

// A warp's results. The indices of both arrays: fragment of x, fragment of the weight, register.
struct Results {
  // The promoted sums of all k-tiles. They are 2^11 times too large, as the lo products are, so
  // that the rounding error of a promotion can be added to these.
  float sums[Config::kXFragments][Config::kWeightFragments][4] = {};
  // The tensor cores add the products of one k-tile to these.
  float accumulators[Config::kXFragments][Config::kWeightFragments][4] = {};

  // Adds the accumulators of a k-tile to the sums. The rounding error of this addition is the start
  // value of the next k-tile's accumulators; like the lo products, it is 2^11 times too large.
  __device__ void promote(int fragment) {
#pragma unroll
    for (int j = 0; j < Config::kWeightFragments * 4; ++j) {
      float& accumulator = accumulators[fragment][j / 4][j % 4];
      float& sum = sums[fragment][j / 4][j % 4];
      const float new_sum = fmaf(accumulator, split::kLoScale, sum);
      accumulator = fmaf(accumulator, split::kLoScale, sum - new_sum);  // the rounding error
      sum = new_sum;
    }
  }

  // Divides the sums or accumulators of a fragment of x by lo's factor, 2^11. Dividing by a power
  // of two is exact.
  __device__ static void remove_lo_scale(float (&values)[Config::kWeightFragments][4]) {
#pragma unroll
    for (int j = 0; j < Config::kWeightFragments * 4; ++j) {
      values[j / 4][j % 4] *= 1 / split::kLoScale;
    }
  }

  // Adds the products of one part of a fragment of x and one part of all fragments of the weight.
  __device__ void multiply(const Fragments& f, int k_step, int fragment, Part part_a, Part part_b) {
#pragma unroll
    for (int j = 0; j < Config::kWeightFragments; ++j) {
      ptx::mma(accumulators[fragment][j], f.a[k_step][fragment][part_a], f.b[k_step][part_b][j]);
    }
  }
};

// Makes the products of a k-tile, in four phases, each of which takes the four fragments of x:
//
//   phase   k-step   products   loads                                 also
//   0       0        lo         x; the weight of k-step 1             promote the k-tile before
//   1       1        lo         x
//   2       0        hi                                               scale accumulators by 2^-11
//   3       1        hi         the next k-tile's weight of k-step 0  copy a stage
//
// "x": each fragment of x is loaded while the one before it is multiplied. The first fragment of
// k-step 1 is loaded at the end of phase 0, and that of the next k-tile at the end of phase 3.
__device__ __forceinline__ void multiply_k_tile(Copies& copies, Fragments& fragments,
                                                Results& results, uint32_t& stage) {
#pragma unroll
  for (int phase = 0; phase < 4; ++phase) {
    const int k_step = phase % 2;
    const bool is_lo = phase < 2;
    const bool is_last_phase = phase == 3;
    const bool loads_next_k_step = phase == 0 || is_last_phase;
    uint32_t next = stage;
    if (is_last_phase) {
      next = next_stage(stage);
      // Copies have begun for this stage and the kStages - 2 after it. This waits for all but the
      // last kStages - 3 of them, so the next stage has arrived. After the barrier, no warp still
      // reads the stage before this one, which the copies of this phase overwrite.
      ptx::wait_copies<Config::kStages - 3>();
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Config::kXFragments; ++i) {
      const bool is_last_fragment = i + 1 == Config::kXFragments;
      if (is_last_phase) copies.copy_quarter(i);
      if (loads_next_k_step) fragments.load_b(next, 1 - k_step, i);
      if (is_lo && !is_last_fragment) fragments.load_a(stage, k_step, i + 1);
      if (loads_next_k_step && is_last_fragment) fragments.load_a(next, 1 - k_step, 0);
      if (is_lo) {
        if (phase == 0) results.promote(i);
        results.multiply(fragments, k_step, i, kHi, kLo);
        results.multiply(fragments, k_step, i, kLo, kHi);
      } else {
        if (phase == 2) Results::remove_lo_scale(results.accumulators[i]);
        results.multiply(fragments, k_step, i, kHi, kHi);
      }
    }
    stage = next;
  }
}

// Writes the sums of one subtile to the warp's shared memory. Fragment i of x has two row blocks of
// 8 rows, and fragment j of the weight has 8 columns. In each block of 8 x 8 sums, lane 4 g + c
// has columns 2 c and 2 c + 1 of row g.
__device__ __forceinline__ void stage_subtile(
    const float (&sums)[Config::kXFragments][Config::kWeightFragments][4], int first_fragment,
    float* staged, int lane) {
#pragma unroll
  for (int i = 0; i < Config::kSubtileFragments; ++i) {
#pragma unroll
    for (int row_block = 0; row_block < 2; ++row_block) {
#pragma unroll
      for (int j = 0; j < Config::kWeightFragments; ++j) {
        const float* const neighbours = &sums[first_fragment + i][j][row_block * 2];
        const int staged_row = i * Config::kMmaM + row_block * 8 + lane / 4;
        const int column_of_lane = j * Config::kMmaN + lane % 4 * 2;
        *reinterpret_cast<float2*>(staged + staged_row * Config::kSubtilePitch + column_of_lane) =
            make_float2(neighbours[0], neighbours[1]);
      }
    }
  }
}

// Finishes and stores a warp's results, one subtile of 32 rows after the other. The sums pass
// through the warp's shared memory, `staged`, so that a lane gets four neighbouring columns of a
// row to store.
__device__ __forceinline__ void store_results(
    const float (&sums)[Config::kXFragments][Config::kWeightFragments][4], float* staged,
    const Epilogue<float>& epilogue, const int* x_exponent, const int* weight_exponent,
    int first_row, int first_column) {
  constexpr int kLanesOfRow = Config::kSubtileColumns / 4;
  const int lane = threadIdx.x % 32;
  const int staged_column = lane % kLanesOfRow * 4;
  const int column = first_column + staged_column;
  float bias[4];
  int exponent_of_weight[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool exists = column + i < epilogue.n;
    // Without a bias -0 is added, which changes no number; +0 would change -0.
    bias[i] = exists && epilogue.bias != nullptr ? epilogue.bias[column + i] : -0.0f;
    exponent_of_weight[i] = exists ? weight_exponent[column + i] : 0;
  }
#pragma unroll
  for (int first_fragment = 0; first_fragment < Config::kXFragments;
       first_fragment += Config::kSubtileFragments) {
    stage_subtile(sums, first_fragment, staged, lane);
    __syncwarp();
#pragma unroll 1
    for (int staged_row = lane / kLanesOfRow; staged_row < Config::kSubtileRows;
         staged_row += 32 / kLanesOfRow) {
      const int row = first_row + first_fragment * Config::kMmaM + staged_row;
      const float* const staged_sums = staged + staged_row * Config::kSubtilePitch + staged_column;
      const int exponent_of_x = row < epilogue.m ? x_exponent[row] : 0;
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int exponent = exponent_of_x + exponent_of_weight[i];
        z[i] = split::unscale(staged_sums[i], exponent) + bias[i];
      }
      finish_four</*kLaneBit=*/1>(epilogue, row < epilogue.m, row, column, z);
    }
    __syncwarp();
  }
}

// The kernel: a block for each tile. k is the padded k. Matrix is always split::ScaledMatrix. The
// kernel is a template because nvcc compiles templates only where they are used, and launch.cu uses
// this one only if is_built().
template <typename Matrix>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_fp16x3_kernel(const __grid_constant__ Matrix x, const __grid_constant__ Matrix weight,
                       int k, const TileOrder tiles,
                       const __grid_constant__ Epilogue<float> epilogue) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_start = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32;
  // The warp's first row and column in the tile.
  constexpr int kWarpsInARow = Config::kTileColumns / Config::kWarpColumns;
  const int warp_row = warp / kWarpsInARow * Config::kWarpRows;
  const int warp_column = warp % kWarpsInARow * Config::kWarpColumns;
  const Tile tile = tiles.find(blockIdx.x);
  const int first_row = tile.x * Config::kTileRows;
  const int first_column = tile.weight * Config::kTileColumns;
  Copies copies(x, weight, first_row, first_column, k, shared_start);
  Fragments fragments(shared_start, warp_row, warp_column);
  Results results;

  // Start the copies of all stages but one, and load the first fragments.
  for (int i = 0; i < Config::kStages - 1; ++i) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) copies.copy_quarter(quarter);
  }
  ptx::wait_copies<1>();
  __syncthreads();
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    fragments.load_b(/*stage=*/0, /*k_step=*/0, quarter);
  }
  fragments.load_a(/*stage=*/0, /*k_step=*/0, /*fragment=*/0);

  // Mainloop. The first k-tile promotes accumulators of zeros.
  uint32_t stage = 0;
  const int k_tiles = (k + Config::kKTileDepth - 1) / Config::kKTileDepth;
  for (int i = 0; i < k_tiles; ++i) multiply_k_tile(copies, fragments, results, stage);

  // Promote the accumulators of the last k-tile.
#pragma unroll
  for (int i = 0; i < Config::kXFragments; ++i) {
    results.promote(i);
    Results::remove_lo_scale(results.sums[i]);
  }

  // Epilogue, after all copies into the shared memory that it reuses.
  ptx::wait_copies<0>();
  __syncthreads();
  store_results(results.sums, reinterpret_cast<float*>(shared) + warp * Config::kSubtileFloats,
                epilogue, x.exponent, weight.exponent, first_row + warp_row,
                first_column + warp_column);
#endif
}

}  // namespace kernels::sm80::gemm_fp16x3
