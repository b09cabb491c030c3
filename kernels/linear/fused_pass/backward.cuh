// The kernels of the fused pass's backward, which fused_pass.cu launches: backward_kernel computes
// grad_z and, for each block of rows, the sums of its columns; grad_bias_kernel adds up those sums.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"
#include "linear/fused_pass/vectors.cuh"

namespace kernels::fused_pass {

struct BackwardConfig {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  // Rows that a thread loads before it stores the first (docs/EXPERIMENTS.md, "The fused pass").
  static constexpr int kRowsInFlight = 2;
  // A thread adds up this many of its rows to a subtotal, and then the subtotals, so that the
  // rounding error stays small however many rows it has.
  static constexpr int kSubtotalRows = 64;
  static_assert(kSubtotalRows % kRowsInFlight == 0, "the rows in flight are of one subtotal");
  // The grid has about as many blocks as this many multiprocessors run at once, unless there are
  // more strips. An H200 has 132 multiprocessors, but with 128 each warp of grad_bias_kernel adds
  // up at most kSubtotalRows rows. With twice as many blocks, half types take longer
  // (docs/EXPERIMENTS.md, "The fused pass").
  static constexpr int64_t kMultiprocessors = 128;

  // Blocks that a multiprocessor runs at once, for which the compiler keeps registers few enough.
  __host__ __device__ static constexpr int blocks_per_multiprocessor(int element_bytes) {
    return element_bytes < 8 ? 4 : 3;
  }
};

// How the threads of backward_kernel share a matrix [m, n]. The columns are divided into strips,
// which are strip_width vectors wide. A block covers rows_of_block rows of one strip. In a row of
// the strip it has one thread for each vector, so it handles 256 / strip_width rows at once. With
// 32 vectors, the rows of a thread are 8 apart:
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
// Some matrices have narrower strips (time_of_row), of which a warp handles several rows at once.
struct BlockGrid {
  int strip_width = 1;      // vectors of a strip's row: a power of two up to 32
  int64_t strips;           // gridDim.x
  int64_t blocks_of_strip;  // blocks one below the other in a strip: gridDim.y
  int64_t rows_of_block;    // a multiple of rows_at_once()

  BlockGrid(int64_t m, int64_t n, int element_bytes) {
    const int64_t row_vectors = divide_up(n, kVectorBytes / element_bytes);
    for (int width = 2; width <= 32; width *= 2) {
      if (time_of_row(row_vectors, width) < time_of_row(row_vectors, strip_width)) {
        strip_width = width;
      }
    }
    strips = divide_up(row_vectors, strip_width);

    // The blocks that run at once are divided among the strips, and the rows of a strip are divided
    // among its blocks.
    const int64_t blocks_at_once =
        BackwardConfig::kMultiprocessors * BackwardConfig::blocks_per_multiprocessor(element_bytes);
    const int64_t max_blocks_of_strip = std::max<int64_t>(blocks_at_once / strips, 1);
    const int64_t min_rows_of_block = divide_up(m, max_blocks_of_strip);
    rows_of_block = divide_up(min_rows_of_block, rows_at_once()) * rows_at_once();
    blocks_of_strip = divide_up(m, rows_of_block);
  }

  int64_t rows_at_once() const { return BackwardConfig::kThreads / strip_width; }

 private:
  // Returns the estimated time of a row with strips of `width` vectors, in units of a thread's
  // time, including idle threads past the end of the row. Example: for a row of 40 vectors it is
  // 2 * 36 = 72 with strips of 32, 3 * 20 = 60 with strips of 16, and 5 * 12 = 60 with strips of 8.
  // The row gets strips of 8: of equal times, the narrowest wins.
  static int64_t time_of_row(int64_t row_vectors, int width) {
    constexpr int kTimeOfStrip = 4;  // what a strip adds to the time of its threads
    return divide_up(row_vectors, width) * (width + kTimeOfStrip);
  }
};

// Adds up the totals of equal columns in a warp that has several rows. In a strip of 8 vectors, for
// example, threads t, t ^ 8, t ^ 16 and t ^ 24 have the same columns.
template <typename T, int kSize>
__device__ __forceinline__ void add_rows_of_warp(T (&totals)[kSize], int strip_width) {
  for (int distance = 16; distance >= strip_width; distance /= 2) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) totals[j] += __shfl_xor_sync(0xffffffff, totals[j], distance);
  }
}

// Adds up the column sums of a block's threads, and stores the results in row blockIdx.y of sums
// [gridDim.y, n]. totals[j] is a thread's sum of element j of its vector, over its own rows. The
// order of the additions is always the same, so that equal inputs give equal bits.
//
// Each warp adds up its rows, and stores its sums in shared memory. Warp j then adds up element j
// of the vectors over all warps; its lane l does that for vector l of the strip:
//
//   partial     element 0   element 1   element 2   ...
//   warp 0          |           |           |
//   warp 1          |           |           |
//   ...             v           v           v
//   warp 7       added by    added by    added by
//                 warp 0      warp 1      warp 2
template <typename T>
__device__ void store_column_sums(Compute<T> (&totals)[Vector<T>::kSize], Compute<T>* sums,
                                  const RowVector<T>& elements, int64_t n, int strip_width) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kWarps = BackwardConfig::kWarps;
  static_assert(kSize <= kWarps, "each warp adds up one element of the vectors, or none");
  __shared__ Compute<T> partial[kWarps][kSize][32];
  const int vector = threadIdx.x % strip_width;  // its number in the strip
  add_rows_of_warp(totals, strip_width);
  const unsigned own_warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kSize; ++j) partial[own_warp][j][lane] = totals[j];
  __syncthreads();
  const int element = own_warp;  // of the vectors
  const bool has_no_sum = lane >= strip_width || element >= elements.count;
  if (has_no_sum) return;
  // Here `vector` is the number of the lane.
  Compute<T> sum{0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][element][vector];
  sums[blockIdx.y * n + elements.first_column + element] = sum;
}

template <typename T>
struct BackwardArguments {
  const T* grad_output;  // [m, n]
  const uint8_t* mask;   // [m, (n + 7) / 8]
  Divisor<Compute<T>> divisor;
  T* grad_z;         // [m, n]
  Compute<T>* sums;  // [gridDim.y, n], or null if no sums are needed
  int64_t m;
  int64_t n;
  int64_t rows_of_block;
  int strip_width;
  int64_t row_step;   // elements from a row of a thread to its next row
  int64_t mask_step;  // bytes of the mask from a row of a thread to its next row
  bool is_aligned;    // rows of grad_output and grad_z are aligned to 16 bytes

  BackwardArguments(const FusedPassBackwardArguments& call, const BlockGrid& grid)
      : grad_output(static_cast<const T*>(call.grad_output)),
        mask(call.mask),
        divisor(call.divisor),
        grad_z(static_cast<T*>(call.grad_z)),
        sums(call.grad_bias != nullptr ? static_cast<Compute<T>*>(call.workspace) : nullptr),
        m(call.m),
        n(call.n),
        rows_of_block(grid.rows_of_block),
        strip_width(grid.strip_width),
        row_step(grid.rows_at_once() * n),
        mask_step(grid.rows_at_once() * bytes_of_bits(n)),
        is_aligned(has_aligned_rows(grad_output, n * sizeof(T)) &&
                   has_aligned_rows(grad_z, n * sizeof(T))) {}
};

// The work of one thread of backward_kernel: a vector in each of its rows, which are rows_at_once
// apart.
template <typename T>
struct RowsOfThread {
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr int kRowsInFlight = BackwardConfig::kRowsInFlight;
  using Totals = Compute<T>[kSize];  // the sum of each element of the vectors

  const BackwardArguments<T>& arguments;
  const RowVector<T> elements;  // the same in each row
  int rows_left = 0;            // rows that are not computed yet
  int64_t next_element;         // index of the vector's first element, in the next row
  const uint8_t* next_byte;     // the mask's byte with the bit of next_element

  __device__ RowsOfThread(const BackwardArguments<T>& arguments, int64_t first_column)
      : arguments(arguments), elements(first_column, arguments.n, arguments.is_aligned) {
    const int rows_at_once = BackwardConfig::kThreads / arguments.strip_width;
    const int64_t first_row =
        blockIdx.y * arguments.rows_of_block + threadIdx.x / arguments.strip_width;
    // In the last block of a strip, some threads may have no row. As a block has a row, their
    // rows_to_end is at least 2 - rows_at_once, for which divide_up returns 0.
    const int64_t end = min((blockIdx.y + int64_t{1}) * arguments.rows_of_block, arguments.m);
    const int64_t rows_to_end = end - first_row;  // negative or 0 if the thread has no row
    const bool has_columns = elements.count > 0;
    if (has_columns) rows_left = static_cast<int>(divide_up(rows_to_end, rows_at_once));

    const int64_t row_bytes = bytes_of_bits(arguments.n);
    next_element = first_row * arguments.n + first_column;
    next_byte = arguments.mask + first_row * row_bytes + first_column / MaskLayout::kColumns;
  }

  // Turns a vector of grad_output into grad_z, and adds it to `totals`. Bit j of `bits` is the
  // mask's for element j.
  __device__ void make_grad_z(Vector<T>& grad, uint32_t bits, Totals& totals) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      T& v = grad.value[j];
      v = static_cast<T>(arguments.divisor.quotient(static_cast<Compute<T>>(v)));
      const bool passes = bits >> j & 1;
      if (!passes) v = T{};
      totals[j] += static_cast<Compute<T>>(v);
    }
  }

  // Computes the next kRowsInFlight rows, or all that are left, and adds them to `totals`.
  __device__ void compute_next(Totals& totals) {
    Vector<T> grad[kRowsInFlight];
    uint32_t bits[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (i >= rows_left) continue;
      grad[i] = elements.load(arguments.grad_output + next_element + i * arguments.row_step);
      bits[i] = next_byte[i * arguments.mask_step] >> elements.first_column % MaskLayout::kColumns;
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (i >= rows_left) continue;
      make_grad_z(grad[i], bits[i], totals);
      elements.store(arguments.grad_z + next_element + i * arguments.row_step, grad[i]);
    }
    next_element += kRowsInFlight * arguments.row_step;
    next_byte += kRowsInFlight * arguments.mask_step;
    rows_left -= kRowsInFlight;
  }

  // Computes the next kSubtotalRows rows, or all that are left, and adds their subtotal to
  // `totals`.
  __device__ void compute_subtotal(Totals& totals) {
    Totals subtotals = {};
    const int left_afterwards = max(rows_left - BackwardConfig::kSubtotalRows, 0);
    // Without this directive, a training step in a half type takes longer if rows are not aligned
    // (x [4096, 256], weight [8191, 256], on an H200).
#pragma unroll 2
    while (rows_left > left_afterwards) compute_next(subtotals);
#pragma unroll
    for (int j = 0; j < kSize; ++j) totals[j] += subtotals[j];
  }
};

// Writes grad_z. If sums is not null, row b of it gets the column sums of grad_z over the rows of
// the blocks with blockIdx.y = b.
template <typename T>
__global__ void __launch_bounds__(BackwardConfig::kThreads,
                                  BackwardConfig::blocks_per_multiprocessor(sizeof(T)))
    backward_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  // If the stream's next kernel is one with PDL, as in linear/sm90, it may start while this one
  // ends. (grad_bias_kernel is launched without PDL.)
  start_next_kernel();
  const int vector = threadIdx.x % arguments.strip_width;
  const int64_t first_vector = blockIdx.x * int64_t{arguments.strip_width};
  RowsOfThread<T> rows(arguments, (first_vector + vector) * Vector<T>::kSize);
  Compute<T> totals[Vector<T>::kSize] = {};
  while (rows.rows_left > 0) rows.compute_subtotal(totals);
  if (arguments.sums != nullptr) {
    store_column_sums<T>(totals, arguments.sums, rows.elements, arguments.n, arguments.strip_width);
  }
}

struct GradBiasConfig {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kColumns = 32;  // one for each lane
};

// grad_bias [n] = the sums of the columns of sums [rows, n], always added in the same order.
//
// A block handles 32 columns, one a lane. Warp w adds up rows w, w + 8, w + 16 and so on, and then
// warp 0 adds up the sums of the 8 warps. One warp alone would wait for L2 many times, because a
// narrow matrix has many rows of sums.
template <typename T>
__global__ void __launch_bounds__(GradBiasConfig::kThreads)
    grad_bias_kernel(const Compute<T>* sums, int64_t rows, int64_t n, T* grad_bias) {
  start_next_kernel();
  constexpr int kWarps = GradBiasConfig::kWarps;
  constexpr int kColumns = GradBiasConfig::kColumns;
  static_assert(
      BackwardConfig::kMultiprocessors * BackwardConfig::blocks_per_multiprocessor(sizeof(T)) <=
          BackwardConfig::kSubtotalRows * kWarps,
      "the array `sums` has at most as many rows as blocks run at once, so a warp adds up at most "
      "kSubtotalRows rows");
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
