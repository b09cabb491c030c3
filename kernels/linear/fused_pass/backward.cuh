// The kernels of the fused pass's backward, which fused_pass.cu launches:
//
//   backward_kernel        grad_z = mask bit ? grad_output / divisor : 0; for each block of rows,
//                          the sums of the columns of grad_z
//
//   add_partials_kernel    grad_bias, the totals of those sums

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "linear/epilogue.cuh"
#include "linear/fused_pass/vectors.cuh"

namespace kernels::fused_pass {

// The constants of backward_kernel.
struct BackwardConfig {
  static constexpr int kThreads = 256;  // of a block
  static constexpr int kWarps = kThreads / 32;
  // Rows that a thread loads before it stores the first. docs/EXPERIMENTS.md, "The fused pass", has
  // the times of one row and of four.
  static constexpr int kRowsInFlight = 2;
  // A thread adds up the rows of each group, and then the sums of its groups, so that the rounding
  // error stays small however many rows it has.
  static constexpr int kGroupRows = 64;
  static_assert(kGroupRows % kRowsInFlight == 0, "the rows in flight are of one group");
  // The grid has about as many blocks as this number of multiprocessors runs at once; an H200 has
  // 132. With twice as many blocks, half types take longer.
  static constexpr int64_t kMultiprocessors = 128;

  // Blocks that a multiprocessor runs at once. The compiler keeps registers few enough for that.
  __host__ __device__ static constexpr int blocks_per_multiprocessor(int element_bytes) {
    return element_bytes < 8 ? 4 : 3;
  }
};

// How the threads of backward_kernel share a matrix [m, n]. The columns are divided into strips,
// which are strip_width vectors wide. A block covers rows_of_block rows of one strip. In a row of
// the strip it has one thread for each vector, so it handles 256 / strip_width rows at once. With
// 32 vectors:
//
//                 strip of 32 vectors
//              .-----------------------.
//   row 0      | t0     t1   ...  t31  |     the threads of warp 0
//   row 1      | t32    t33  ...  t63  |     the threads of warp 1
//   ...        |                       |
//   row 7      | t224   t225 ...  t255 |
//   row 8      | t0     t1   ...  t31  |     the threads of warp 0 again
//   ...
//
// The rows of a thread are 8 apart here. Narrow matrices have narrower strips, of which a warp
// handles several rows at once.
struct BlockGrid {
  int strip_width = 1;      // vectors of a strip's row: a power of two up to 32
  int64_t strips;           // strips of the matrix: gridDim.x
  int64_t blocks_of_strip;  // blocks one below the other in a strip: gridDim.y
  int64_t rows_of_block;    // a multiple of the rows that it handles at once

  BlockGrid(int64_t m, int64_t n, int element_bytes) {
    const int64_t row_vectors = divide_up(n, kVectorBytes / element_bytes);
    for (int width = 2; width <= 32; width *= 2) {
      if (time_of_row(row_vectors, width) < time_of_row(row_vectors, strip_width)) {
        strip_width = width;
      }
    }
    strips = divide_up(row_vectors, strip_width);

    // The strips divide the blocks that run at once among them, and the blocks of a strip its rows.
    const int64_t blocks_at_once =
        BackwardConfig::kMultiprocessors * BackwardConfig::blocks_per_multiprocessor(element_bytes);
    const int64_t max_blocks_of_strip = std::max<int64_t>(blocks_at_once / strips, 1);
    const int64_t min_rows_of_block = divide_up(m, max_blocks_of_strip);
    const int64_t rows_at_once = BackwardConfig::kThreads / strip_width;
    rows_of_block = divide_up(min_rows_of_block, rows_at_once) * rows_at_once;
    blocks_of_strip = divide_up(m, rows_of_block);
  }

 private:
  // Returns the estimated time of a row of row_vectors vectors with strips of `width` vectors, in
  // units of a thread's time. Idle threads past the end of the row count, too. Example: a row of 40
  // vectors takes 2 * (32 + 4) = 72 with strips of 32, 3 * (16 + 4) = 60 with strips of 16, and
  // 5 * (8 + 4) = 60 with strips of 8. So it gets strips of 8: of equal times, the narrowest wins.
  static int64_t time_of_row(int64_t row_vectors, int width) {
    constexpr int kTimeOfStrip = 4;  // that a strip adds to the time of its threads
    return divide_up(row_vectors, width) * (width + kTimeOfStrip);
  }
};

// Adds up the column sums of a block's threads, and stores the results in row blockIdx.y of sums
// [gridDim.y, n]. totals[j] is a thread's sum of element j of its vector, over its own rows. The
// order of the additions is always the same, so that equal inputs give equal bits.
//
//   1. Within a warp that has several rows, shuffles add up the totals of equal columns. In a strip
//      of 8 vectors, for example, threads t, t ^ 8, t ^ 16 and t ^ 24 have the same columns.
//   2. Each warp stores its sums in shared memory. Warp j then adds up element j of the vectors
//      over all warps; its lane l does that for vector l of the strip:
//
//        partial     element 0   element 1   element 2   ...
//        warp 0          |           |           |
//        warp 1          |           |           |
//        ...             v           v           v
//        warp 7       added by    added by    added by
//                      warp 0      warp 1      warp 2
template <typename T>
__device__ void store_column_sums(Compute<T> (&totals)[Vector<T>::kSize], Compute<T>* sums,
                                  const RowVector<T>& elements, int64_t n, int strip_width) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kWarps = BackwardConfig::kWarps;
  static_assert(kSize <= kWarps, "each warp adds up one element of the vectors, or none");
  __shared__ Compute<T> partial[kWarps][kSize][32];
  const int vector = threadIdx.x % strip_width;  // of the strip
  for (int distance = 16; distance >= strip_width; distance /= 2) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) totals[j] += __shfl_xor_sync(0xffffffff, totals[j], distance);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) partial[threadIdx.x / 32][j][threadIdx.x % 32] = totals[j];
  __syncthreads();
  const int element = threadIdx.x / 32;  // of the vectors: the one that this warp adds up
  if (threadIdx.x % 32 >= strip_width || element >= elements.count) return;
  Compute<T> sum{0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][element][vector];
  sums[blockIdx.y * n + elements.first_column + element] = sum;
}

// Turns a vector of grad_output into grad_z = mask bit ? grad_output / divisor : 0, and adds it to
// `totals`. Bit j of `bits` belongs to element j.
template <typename T>
__device__ void make_grad_z(Vector<T>& grad, uint32_t bits, const Divisor<Compute<T>>& divisor,
                            Compute<T> (&totals)[Vector<T>::kSize]) {
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) {
    T& v = grad.value[j];
    v = static_cast<T>(divisor.quotient(static_cast<Compute<T>>(v)));
    const bool passes = bits >> j & 1;
    if (!passes) v = T{};
    totals[j] += static_cast<Compute<T>>(v);
  }
}

// Adds the totals of a group of rows to those of the groups before it, and begins the next group.
template <typename T, int kSize>
__device__ void end_group(T (&totals)[kSize], T (&group_totals)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    totals[j] += group_totals[j];
    group_totals[j] = 0;
  }
}

// grad_z [m, n] = mask bit ? grad_output [m, n] / divisor : 0. mask [m, (n + 7) / 8]. If sums
// [gridDim.y, n] is not null, row b of it gets the column sums of grad_z over the rows of the
// blocks with blockIdx.y = b. rows_of_block and strip_width are those of BlockGrid.
template <typename T>
__global__ void __launch_bounds__(BackwardConfig::kThreads,
                                  BackwardConfig::blocks_per_multiprocessor(sizeof(T)))
    backward_kernel(const T* grad_output, const uint8_t* mask, const Divisor<Compute<T>> divisor,
                    T* grad_z, Compute<T>* sums, int64_t m, int64_t n, int64_t rows_of_block,
                    int strip_width, bool is_aligned) {
  // If the next kernel is launched with PDL, as those of linear/sm90 are, its blocks may start
  // beside the last of these.
  start_next_kernel();
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kRowsInFlight = BackwardConfig::kRowsInFlight;
  const int vector = threadIdx.x % strip_width;  // of the strip
  const int rows_at_once = BackwardConfig::kThreads / strip_width;
  const int64_t row_bytes = bytes_of_bits(n);
  const RowVector<T> elements((blockIdx.x * int64_t{strip_width} + vector) * kSize, n, is_aligned);

  // The rows of the thread are rows_at_once apart. In the last block of a strip, some threads may
  // have none. Their first_row is then at `end` or less than rows_at_once past it, so that
  // divide_up returns 0.
  const int64_t first_row = blockIdx.y * rows_of_block + threadIdx.x / strip_width;
  const int64_t end = min((blockIdx.y + int64_t{1}) * rows_of_block, m);
  const bool has_columns = elements.count > 0;
  const int rows = has_columns ? static_cast<int>(divide_up(end - first_row, rows_at_once)) : 0;

  // The rows in flight begin at element `place` of the matrix, and at byte `mask`.
  const int64_t step = rows_at_once * n;  // elements from one of the thread's rows to the next
  const int64_t mask_step = rows_at_once * row_bytes;
  int64_t place = first_row * n + elements.first_column;
  mask += first_row * row_bytes + elements.first_column / MaskLayout::kColumns;

  Compute<T> totals[kSize] = {};        // of the groups that are complete
  Compute<T> group_totals[kSize] = {};  // of the current group
  for (int done = 0; done < rows; done += kRowsInFlight) {
    Vector<T> grad[kRowsInFlight];
    uint32_t bits[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (done + i >= rows) continue;
      grad[i] = elements.load(grad_output + place + i * step);
      bits[i] = mask[i * mask_step] >> elements.first_column % MaskLayout::kColumns;
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (done + i >= rows) continue;
      make_grad_z(grad[i], bits[i], divisor, group_totals);
      elements.store(grad_z + place + i * step, grad[i]);
    }
    place += kRowsInFlight * step;
    mask += kRowsInFlight * mask_step;
    const bool group_is_complete = (done + kRowsInFlight) % BackwardConfig::kGroupRows == 0;
    if (group_is_complete) end_group(totals, group_totals);
  }
  end_group(totals, group_totals);
  if (sums != nullptr) store_column_sums<T>(totals, sums, elements, n, strip_width);
}

// The constants of add_partials_kernel.
struct AddPartialsConfig {
  static constexpr int kThreads = 256;  // of a block
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kColumns = 32;  // of a block: one a lane
};

// grad_bias [n] = the sums of the columns of sums [rows, n], always added in the same order.
//
// A block handles 32 columns, one a lane. Its 8 warps share the rows: warp w adds up rows w, w + 8,
// w + 16 and so on, and then warp 0 adds up the sums of the warps. One warp alone would be slow: a
// narrow matrix has many rows of sums, and the warp would wait for L2 many times.
template <typename T>
__global__ void __launch_bounds__(AddPartialsConfig::kThreads)
    add_partials_kernel(const Compute<T>* sums, int64_t rows, int64_t n, T* grad_bias) {
  start_next_kernel();
  constexpr int kWarps = AddPartialsConfig::kWarps;
  constexpr int kColumns = AddPartialsConfig::kColumns;
  static_assert(
      BackwardConfig::kMultiprocessors * BackwardConfig::blocks_per_multiprocessor(sizeof(T)) <=
          BackwardConfig::kGroupRows * kWarps,
      "a warp adds up no more rows than a group has, so that its error is as small");
  const int lane = threadIdx.x % 32;
  const int own_warp = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  Compute<T> total{0};
  if (column < n) {
#pragma unroll 8
    for (int64_t row = own_warp; row < rows; row += kWarps) total += sums[row * n + column];
  }
  __shared__ Compute<T> partial[kWarps][kColumns];
  partial[own_warp][lane] = total;
  __syncthreads();
  if (own_warp > 0 || column >= n) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += partial[warp][lane];
  grad_bias[column] = static_cast<T>(total);
}

}  // namespace kernels::fused_pass
