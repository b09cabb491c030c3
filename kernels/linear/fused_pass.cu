// The fused pass: the elementwise part of Linear -> ReLU -> divide that no GEMM kernel computes.
// forward.h and backward.h call it through launchers.h.
//
//   linear_fused_pass            Forward, where torch's GEMM, and not one of linear/sm90,
//                                linear/sm80 and skinny.cu, has written z = x weight^T + bias to
//                                out: out = relu(out) / divisor in place, and the mask for
//                                backward.
//   linear_fused_pass_backward   Backward, before the products of the other gradients: grad_z =
//                                grad_output / divisor where the mask's bit is 1, else 0. Also
//                                grad_bias, the sum of each column of grad_z.
//
// Shapes: out, grad_output and grad_z [m, n], contiguous, of any floating dtype; grad_bias [n];
// mask [m, (n + 7) / 8] bytes. Each row of the mask begins with a byte of its own, and bit j % 8 of
// byte j / 8 of a row belongs to column j. Divisor (epilogue.cuh) holds the divisor in the form
// that is fastest to divide by.
//
// Why it is fast: one pass over memory takes the place of torch's two or three elementwise kernels
// and of its column sum. Each matrix is read once or written once, in 16-byte accesses.

#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels::fused_pass {

// The type in which elements of type T are computed and summed.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// How the bits of the mask are stored: each row of n bits is padded to whole bytes.
struct MaskLayout {
  static constexpr int kColumns = 8;  // of a byte

  __host__ __device__ static constexpr int64_t row_bytes(int64_t n) {
    return divide_up(n, kColumns);
  }
};

// The neighbouring elements of a row that a thread handles: one 16-byte vector, fewer elements at
// the end of the row, or none past it. If rows are not aligned to 16 bytes, the elements are
// accessed one by one.
template <typename T>
struct RowVector {
  static constexpr int kSize = Vector<T>::kSize;
  int64_t first;   // column of the first element
  int count;       // of elements, 0 to kSize
  bool is_vector;  // whether one 16-byte access moves them

  __device__ RowVector(int64_t first, int64_t n, bool is_aligned)
      : first(first),
        count(static_cast<int>(min(max(n - first, int64_t{0}), int64_t{kSize}))),
        is_vector(is_aligned && count == kSize) {}

  // Loads the elements; `source` is the address of the first. Those past the end of the row are 0.
  __device__ Vector<T> load(const T* source) const {
    // nvcc would split a load without a policy. This policy is that of ordinary loads.
    if (is_vector) return load_vector(source, evict_normal_policy());
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.value[j] = j < count ? source[j] : T{};
    return v;
  }

  // Stores the elements that exist; `target` is the address of the first.
  __device__ void store(T* target, const Vector<T>& v) const {
    if (is_vector) {
      uint4 bits;
      memcpy(&bits, &v, sizeof(bits));
      // The asm statement keeps this store whole. nvcc would merge the first element's part of an
      // ordinary 16-byte store with the first store of the loop below, and split the rest.
      return ptx::store_global_four(target, bits);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j < count) target[j] = v.value[j];
    }
  }
};

// ----------------------------------------------------------------------------------------- forward

// The constants of forward_kernel.
struct ForwardConfig {
  static constexpr int kThreads = 256;  // of a block

  // Vectors of a row. A row is padded to whole bytes of the mask, so that all threads that share a
  // byte are in one warp. A padding vector has no elements.
  template <typename T>
  static int64_t row_vectors(int64_t n) {
    constexpr int kVectorsPerByte = MaskLayout::kColumns / Vector<T>::kSize;
    return MaskLayout::row_bytes(n) * kVectorsPerByte;
  }
};

// Returns the row that vector number `vector` belongs to, in a matrix of all_vectors vectors, of
// which each row has row_vectors. Where the numbers fit, the division has 32 bits, which is several
// times as fast as one of 64 bits.
__device__ inline int64_t row_of(int64_t vector, int64_t row_vectors, int64_t all_vectors) {
  if (row_vectors == all_vectors) return 0;
  if (all_vectors <= UINT32_MAX) {
    return static_cast<uint32_t>(vector) / static_cast<uint32_t>(row_vectors);
  }
  return vector / row_vectors;
}

// In place: out [rows, n] = relu(out) / divisor. mask [rows, (n + 7) / 8], or null.
//
// Each thread handles one vector. If it had two vectors side by side, each of a warp's two loads
// would read half of every 32-byte sector, so that all sectors are read twice; in float32 and with
// a mask, [1024, 8192] and [8192, 8192] then take 61% and 69% longer. For n = 11 in float32, a
// vector has 4 elements, a row is padded to 4 vectors, and the threads have these elements:
//
//   thread        0       1       2       3    |    4       5     ...
//   row           0       0       0       0    |    1       1
//   columns      0..3    4..7    8..10   none  |   0..3    4..7
//   mask byte     0       0       1       1    |    2       2
//
// The first thread of a byte of the mask stores it: threads 0, 2 and 4 in the example.
template <typename T>
__global__ void __launch_bounds__(ForwardConfig::kThreads)
    forward_kernel(T* out, const Divisor<Compute<T>> divisor, uint8_t* mask, int64_t n,
                   int64_t row_vectors, int64_t all_vectors, bool is_aligned) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * ForwardConfig::kThreads + threadIdx.x;
  const int64_t row = row_of(vector, row_vectors, all_vectors);
  const int64_t first_column = (vector - row * row_vectors) * kSize;
  // Threads after the last vector have no elements, but take part in the exchange of bits.
  const int64_t columns = vector < all_vectors ? n : 0;
  const RowVector<T> elements(first_column, columns, is_aligned);
  out += row * n + elements.first;
  Vector<T> z = elements.load(out);
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const auto element = static_cast<Compute<T>>(z.value[j]);
    bits |= static_cast<uint32_t>(mask_bit(element)) << j;  // 0 past the row, where z is 0
    z.value[j] = static_cast<T>(divisor.quotient(relu_of(element)));
  }
  elements.store(out, z);
  if (mask == nullptr) return;

  // The threads of a byte combine their bits, as in relu.cu, where store_bits has a picture.
  const int place = static_cast<int>(elements.first % MaskLayout::kColumns);
  bits <<= place;
#pragma unroll
  for (int distance = 1; distance < MaskLayout::kColumns / kSize; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  if (place != 0 || elements.count == 0) return;
  mask[row * MaskLayout::row_bytes(n) + elements.first / MaskLayout::kColumns] =
      static_cast<uint8_t>(bits);
}

// ---------------------------------------------------------------------------------------- backward

// The constants of backward_kernel.
struct BackwardConfig {
  static constexpr int kThreads = 256;  // of a block
  static constexpr int kWarps = kThreads / 32;
  // Rows that a thread loads before it stores the first. In half types, [1024, 8192] and
  // [8192, 8192] take 5% and 7% longer with one row. With four rows they take 9% and 1% longer, and
  // registers spill on other GPUs.
  static constexpr int kBatch = 2;
  // A thread sums its own rows, which are rows_at_once apart (BlockGrid), in runs of this many, and
  // then its runs. So the rounding error stays small however many rows there are. The sums of the
  // threads (store_column_sums) and then of the blocks (add_partials_kernel) are added after that.
  static constexpr int kRun = 64;
  static_assert(kRun % kBatch == 0, "a run ends where a batch does");
  // The grid has about as many blocks as this number of multiprocessors runs at once; an H200 has
  // 132. With twice as many blocks, half types take a tenth longer.
  static constexpr int64_t kMultiprocessors = 128;

  // Blocks that a multiprocessor runs at once. The compiler keeps registers few enough for that.
  __host__ __device__ static constexpr int blocks_per_multiprocessor(int element_bytes) {
    return element_bytes < 8 ? 4 : 3;
  }
};

// How the threads of backward_kernel share a matrix [m, n]. The columns are divided into strips. A
// block covers rows_of_block rows of one strip. In a row of the strip it has `lanes` threads side
// by side, each with one vector, so that it handles 256 / lanes rows at once. With 32 lanes:
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
// The rows of a thread are 8 apart here. Narrow matrices have fewer lanes, so that a warp has
// several rows at once.
struct BlockGrid {
  int lanes = 1;            // threads side by side in a row: a power of two up to 32
  int64_t strips;           // strips of the matrix: gridDim.x
  int64_t blocks_of_strip;  // blocks one below the other in a strip: gridDim.y
  int64_t rows_of_block;    // a multiple of the rows that it handles at once

  BlockGrid(int64_t m, int64_t n, int element_bytes) {
    const int64_t row_vectors = divide_up(n, 16 / element_bytes);
    for (int width = 2; width <= 32; width *= 2) {
      if (time_of_row(row_vectors, width) < time_of_row(row_vectors, lanes)) lanes = width;
    }
    strips = divide_up(row_vectors, lanes);

    // Divide the rows of a strip among its share of the blocks that run at once.
    const int64_t blocks_at_once =
        BackwardConfig::kMultiprocessors * BackwardConfig::blocks_per_multiprocessor(element_bytes);
    const int64_t max_blocks_of_strip = std::max<int64_t>(blocks_at_once / strips, 1);
    const int64_t min_rows_of_block = divide_up(m, max_blocks_of_strip);
    const int64_t rows_at_once = BackwardConfig::kThreads / lanes;
    const int64_t steps = std::max<int64_t>(divide_up(min_rows_of_block, rows_at_once), 1);
    rows_of_block = steps * rows_at_once;
    blocks_of_strip = std::max<int64_t>(divide_up(m, rows_of_block), 1);
  }

 private:
  // The estimated time of a row of row_vectors vectors with strips of `width` lanes, in units of a
  // thread's time. Idle threads past the end of the row count, too. Example: a row of 40 vectors
  // takes 2 * (32 + 4) = 72 with 32 lanes, 3 * (16 + 4) = 60 with 16, and 5 * (8 + 4) = 60 with 8.
  // So it gets 8 lanes: of equal times, the fewest lanes win.
  static int64_t time_of_row(int64_t row_vectors, int width) {
    constexpr int kTimeOfStrip = 4;  // that a strip adds to the time of its threads
    return divide_up(row_vectors, width) * (width + kTimeOfStrip);
  }
};

// Adds up the column sums of a block, of which each thread has those of its own rows: total[j] is
// the sum of element j of its vector. Stores them in row blockIdx.y of sums [gridDim.y, n]. The
// order of the additions is always the same, so that equal inputs give equal bits.
//
//   1. Within a warp that has several rows, shuffles add up the totals of equal columns. With 8
//      lanes, for example, threads t, t ^ 8, t ^ 16 and t ^ 24 have the same columns.
//   2. Each warp stores its sums in shared memory. Warp j then adds up element j of the vectors
//      over all warps; its thread `lane` does that for the vector of that lane:
//
//        partial     element 0   element 1   element 2   ...
//        warp 0          |           |           |
//        warp 1          |           |           |
//        ...             v           v           v
//        warp 7       added by    added by    added by
//                      warp 0      warp 1      warp 2
template <typename T>
__device__ void store_column_sums(Compute<T> (&total)[Vector<T>::kSize], Compute<T>* sums,
                                  const RowVector<T>& elements, int64_t n, int lanes) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kWarps = BackwardConfig::kWarps;
  static_assert(kSize <= kWarps, "each warp adds up one element of the vectors, or none");
  __shared__ Compute<T> partial[kWarps][kSize][32];
  const int lane = threadIdx.x % lanes;
  for (int distance = 16; distance >= lanes; distance /= 2) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) total[j] += __shfl_xor_sync(0xffffffff, total[j], distance);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) partial[threadIdx.x / 32][j][threadIdx.x % 32] = total[j];
  __syncthreads();
  const int element = threadIdx.x / 32;  // of the vectors: the one that this warp adds up
  if (threadIdx.x % 32 >= lanes || element >= elements.count) return;
  Compute<T> sum{0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][element][lane];
  sums[blockIdx.y * n + elements.first + element] = sum;
}

// grad_z [m, n] = mask bit ? grad_output [m, n] / divisor : 0. mask [m, (n + 7) / 8]. If sums
// [gridDim.y, n] is not null, row b of it gets the column sums of grad_z over the rows of the
// blocks with blockIdx.y = b. rows_of_block and lanes are those of BlockGrid.
template <typename T>
__global__ void __launch_bounds__(BackwardConfig::kThreads,
                                  BackwardConfig::blocks_per_multiprocessor(sizeof(T)))
    backward_kernel(const T* grad_output, const uint8_t* mask, const Divisor<Compute<T>> divisor,
                    T* grad_z, Compute<T>* sums, int64_t m, int64_t n, int64_t rows_of_block,
                    int lanes, bool is_aligned) {
  // If the next kernel is launched with PDL, as those of linear/sm90 are, its blocks may start
  // beside the last of these.
  start_next_kernel();
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kBatch = BackwardConfig::kBatch;
  const int lane = threadIdx.x % lanes;
  const int rows_at_once = BackwardConfig::kThreads / lanes;
  const int64_t row_bytes = MaskLayout::row_bytes(n);
  const RowVector<T> elements((blockIdx.x * int64_t{lanes} + lane) * kSize, n, is_aligned);

  // The thread's rows: `count` of them, from `begin` on, rows_at_once apart. `begin` may be past
  // the end, but by less than rows_at_once, so that the count is then 0.
  const int64_t begin = blockIdx.y * rows_of_block + threadIdx.x / lanes;
  const int64_t end = min((blockIdx.y + int64_t{1}) * rows_of_block, m);
  const bool has_columns = elements.count > 0;
  const int count = has_columns ? static_cast<int>(divide_up(end - begin, rows_at_once)) : 0;
  const int64_t step = rows_at_once * n;  // elements from one of the thread's rows to the next
  const int64_t mask_step = rows_at_once * row_bytes;
  int64_t first = begin * n + elements.first;  // the first element of the batch
  mask += begin * row_bytes + elements.first / MaskLayout::kColumns;

  Compute<T> total[kSize] = {};  // of the runs that are complete
  Compute<T> run[kSize] = {};    // of the current run
  for (int done = 0; done < count; done += kBatch) {
    Vector<T> grad[kBatch];
    uint32_t bits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (done + i >= count) continue;
      grad[i] = elements.load(grad_output + first + i * step);
      bits[i] = mask[i * mask_step] >> elements.first % MaskLayout::kColumns;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (done + i >= count) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        T& v = grad[i].value[j];
        v = static_cast<T>(divisor.quotient(static_cast<Compute<T>>(v)));
        const bool passes = bits[i] >> j & 1;
        if (!passes) v = T{};
        run[j] += static_cast<Compute<T>>(v);
      }
      elements.store(grad_z + first + i * step, grad[i]);
    }
    first += kBatch * step;
    mask += kBatch * mask_step;
    const bool run_is_complete = (done + kBatch) % BackwardConfig::kRun == 0;
    if (!run_is_complete) continue;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      total[j] += run[j];
      run[j] = 0;
    }
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) total[j] += run[j];
  if (sums != nullptr) store_column_sums<T>(total, sums, elements, n, lanes);
}

// The constants of add_partials_kernel.
struct AddPartialsConfig {
  static constexpr int kThreads = 256;  // of a block
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kColumns = 32;  // of a block: one a lane
};

// grad_bias [n] = the sums of the columns of sums [count, n], always added in the same order.
//
// A block handles 32 columns, one a lane. Its 8 warps share the rows: warp w adds up rows w, w + 8,
// w + 16 and so on, and then warp 0 adds up the sums of the warps. One warp alone would be slow: a
// narrow matrix has many rows of sums, and the warp would wait for L2 many times.
template <typename T>
__global__ void __launch_bounds__(AddPartialsConfig::kThreads)
    add_partials_kernel(const Compute<T>* sums, int64_t count, int64_t n, T* grad_bias) {
  start_next_kernel();
  constexpr int kWarps = AddPartialsConfig::kWarps;
  constexpr int kColumns = AddPartialsConfig::kColumns;
  static_assert(
      BackwardConfig::kMultiprocessors * BackwardConfig::blocks_per_multiprocessor(sizeof(T)) <=
          BackwardConfig::kRun * kWarps,
      "a warp adds up no more rows than a run has, so that its error is as small");
  const int lane = threadIdx.x % 32;
  const int own_warp = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  Compute<T> total{0};
  if (column < n) {
#pragma unroll 8
    for (int64_t row = own_warp; row < count; row += kWarps) total += sums[row * n + column];
  }
  __shared__ Compute<T> partial[kWarps][kColumns];
  partial[own_warp][lane] = total;
  __syncthreads();
  if (own_warp > 0 || column >= n) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += partial[warp][lane];
  grad_bias[column] = static_cast<T>(total);
}

// ---------------------------------------------------------------------------------------- launches

// The bytes of an element.
inline int bytes_of(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  if (dtype == DType::kFloat32) return 4;
  return 2;
}

}  // namespace kernels::fused_pass

namespace kernels::cuda {

int linear_fused_pass(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n,
                      CUstream_st* stream) {
  using namespace fused_pass;
  // If rows of the mask are not padded, or there is no mask, the matrix is handled as one long row.
  const bool is_one_row = mask == nullptr || n % MaskLayout::kColumns == 0;
  if (is_one_row) {
    n *= m;
    m = 1;
  }
  return dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t row_vectors = ForwardConfig::row_vectors<T>(n);
    const int64_t all_vectors = m * row_vectors;
    const int64_t out_row_bytes = m == 1 ? 0 : n * sizeof(T);
    return launch<forward_kernel<T>>(blocks_of(all_vectors, ForwardConfig::kThreads),
                                     ForwardConfig::kThreads, stream, static_cast<T*>(out),
                                     Divisor<Compute<T>>(divisor), mask, n, row_vectors,
                                     all_vectors, has_aligned_rows(out, out_row_bytes));
  });
}

// The bytes of sums [gridDim.y, n], in float, or in double for float64.
size_t linear_fused_pass_backward_workspace(DType dtype, int64_t m, int64_t n) {
  const int element_bytes = fused_pass::bytes_of(dtype);
  const int sum_bytes = std::max(element_bytes, 4);
  return fused_pass::BlockGrid(m, n, element_bytes).blocks_of_strip * n * sum_bytes;
}

int linear_fused_pass_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                               double divisor, void* grad_z, void* grad_bias, void* workspace,
                               int64_t m, int64_t n, CUstream_st* stream) {
  using namespace fused_pass;
  return dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Sum = Compute<T>;
    const bool has_bias = grad_bias != nullptr;
    Sum* const sums = has_bias ? static_cast<Sum*>(workspace) : nullptr;
    const int64_t grad_row_bytes = n * sizeof(T);
    const bool is_aligned =
        has_aligned_rows(grad_output, grad_row_bytes) && has_aligned_rows(grad_z, grad_row_bytes);
    const BlockGrid grid(m, n, sizeof(T));
    const dim3 blocks(static_cast<unsigned>(grid.strips),
                      static_cast<unsigned>(grid.blocks_of_strip));
    const int status = launch<backward_kernel<T>>(
        blocks, BackwardConfig::kThreads, stream, static_cast<const T*>(grad_output), mask,
        Divisor<Sum>(divisor), static_cast<T*>(grad_z), sums, m, n, grid.rows_of_block, grid.lanes,
        is_aligned);
    if (status != cudaSuccess || !has_bias) return status;
    return launch<add_partials_kernel<T>>(
        blocks_of(n, AddPartialsConfig::kColumns), AddPartialsConfig::kThreads, stream,
        static_cast<const Sum*>(sums), grid.blocks_of_strip, n, static_cast<T*>(grad_bias));
  });
}

}  // namespace kernels::cuda
