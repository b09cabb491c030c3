// The passes beside torch's product, over out and grad_output [m, n], mask [m, (n + 7) / 8].
// Forward: ReLU and division in place, and the mask for backward. Backward, before its own
// products: mask, division, and the column sums for the bias.

#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels::epilogue {

// The type that a dtype is computed in.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kMaskColumns = 8;  // of a byte

// The first `count` elements of a vector, the others 0.
template <typename T>
__device__ Vector<T> load_some(const T* address, int count, bool aligned) {
  if (aligned && count == Vector<T>::kSize) return load_vector(address, l2_policy(false));
  Vector<T> v;
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) v.value[j] = j < count ? address[j] : T{};
  return v;
}

template <typename T>
__device__ void store_some(T* address, const Vector<T>& v, int count, bool aligned) {
  if (aligned && count == Vector<T>::kSize) return store_vector(address, v);
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) {
    if (j < count) address[j] = v.value[j];
  }
}

constexpr int kThreads = 256;

// -------------------------------------------------------------------------------------- forward

// out [rows, n], mask [rows, row_vectors * kSize / 8]; or null, and all of out is one row. A thread
// makes one vector: two side by side would read every sector of memory twice.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const Divisor<Compute<T>> divisor, uint8_t* mask, int64_t n,
                   int64_t row_vectors, int64_t vectors, bool aligned) {
  constexpr int kSize = Vector<T>::kSize, kOfByte = kMaskColumns / kSize;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = mask == nullptr ? 0
                      : vectors <= UINT32_MAX
                          ? static_cast<uint32_t>(at) / static_cast<uint32_t>(row_vectors)
                          : at / row_vectors;
  const int64_t column = (at - row * row_vectors) * kSize;
  const int count = at < vectors ? static_cast<int>(min(n - column, int64_t{kSize})) : 0;
  T* const address = out + row * n + column;

  Vector<T> z = load_some(address, count, aligned);
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const auto element = static_cast<Compute<T>>(z.value[j]);
    bits |= static_cast<uint32_t>(mask_bit(element)) << j;  // 0 past the last column, where z is 0
    z.value[j] = static_cast<T>(relu_divide(element, divisor));
  }
  store_some(address, z, count, aligned);
  if (mask == nullptr) return;
  const int in_byte = static_cast<int>(at % kOfByte);
  bits <<= in_byte * kSize;
#pragma unroll
  for (int lane = 1; lane < kOfByte; lane *= 2) bits |= __shfl_xor_sync(0xffffffff, bits, lane);
  if (in_byte == 0 && at < vectors) mask[at / kOfByte] = static_cast<uint8_t>(bits);
}

// ------------------------------------------------------------------------------------- backward

// A block makes kRows rows at a time. Each of its kLanes lanes makes a vector of each: neighbouring
// threads have neighbouring vectors, as above.
constexpr int kLanes = 32;
constexpr int kRows = kThreads / kLanes;
constexpr int kBatch = 2;  // rows that a thread loads before it stores the first
// Gradients of a column are summed in runs of this many, and then the runs: the error stays small
// where there are many rows.
constexpr int kRun = 64;
static_assert(kRun % kBatch == 0, "a run ends where a batch does");
// As many blocks as an H200 runs at once: with twice as many, half types take a tenth longer.
constexpr int64_t kBlocks = 512;
template <typename T>
constexpr int kBlocksEach = sizeof(T) == 8 ? 3 : 4;  // on a multiprocessor, by their registers

// The blocks of a matrix of `size`-byte elements.
struct Chunks {
  int64_t columns;  // blocks along a row
  int64_t rows;     // of one block
  int64_t count;    // blocks along a column

  Chunks(int64_t m, int64_t n, int64_t size) : columns(divide_up(n * size, kLanes * 16)) {
    const int64_t wanted = std::max<int64_t>(kBlocks / columns, 1);
    rows = std::max<int64_t>(divide_up(divide_up(m, wanted), kRows) * kRows, kRows);
    count = std::max<int64_t>(divide_up(m, rows), 1);
  }
};

// grad_output and grad_z [m, n], mask [m, row_bytes], sums [gridDim.y, n] or null.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksEach<T>)
    backward_kernel(const T* grad_output, const uint8_t* mask, const Divisor<Compute<T>> divisor,
                    T* grad_z, Compute<T>* sums, int64_t m, int64_t n, int64_t row_bytes,
                    int64_t rows, bool aligned) {
  start_next_kernel();
  constexpr int kSize = Vector<T>::kSize;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kLanes + lane) * kSize;
  const int count = static_cast<int>(max(min(n - column, int64_t{kSize}), int64_t{0}));
  const int64_t begin = blockIdx.y * rows + first;
  const int64_t end = count > 0 ? min((blockIdx.y + int64_t{1}) * rows, m) : 0;
  const int64_t step = kRows * n, mask_step = kRows * row_bytes;
  grad_output += begin * n + column, grad_z += begin * n + column;
  mask += begin * row_bytes + column / kMaskColumns;

  Compute<T> total[kSize] = {}, run[kSize] = {};
  int batches = 0;
  for (int64_t row = begin; row < end; row += kBatch * kRows) {
    const int left = static_cast<int>(divide_up(end - row, kRows));
    Vector<T> grad[kBatch];
    uint32_t bits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= left) continue;
      grad[i] = load_some(grad_output + i * step, count, aligned);
      bits[i] = mask[i * mask_step] >> column % kMaskColumns;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= left) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        T& v = grad[i].value[j];
        v = static_cast<T>(divisor.quotient(static_cast<Compute<T>>(v)));
        if (!(bits[i] >> j & 1)) v = T{};
        run[j] += static_cast<Compute<T>>(v);
      }
      store_some(grad_z + i * step, grad[i], count, aligned);
    }
    grad_output += kBatch * step, grad_z += kBatch * step, mask += kBatch * mask_step;
    if (++batches % (kRun / kBatch) != 0) continue;
#pragma unroll
    for (int j = 0; j < kSize; ++j) total[j] += run[j], run[j] = 0;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) total[j] += run[j];
  if (sums == nullptr) return;

  // The sums of a column over the block, always in the same order.
  __shared__ Compute<T> partial[kRows][kSize][kLanes];
#pragma unroll
  for (int j = 0; j < kSize; ++j) partial[first][j][lane] = total[j];
  __syncthreads();
  static_assert(kSize <= kRows, "each warp adds up one column of the vectors, or none");
  if (first >= count) return;
  Compute<T> sum{0};
#pragma unroll
  for (int row = 0; row < kRows; ++row) sum += partial[row][first][lane];
  sums[blockIdx.y * n + column + first] = sum;
}

// grad_bias [n], the sums of the `count` rows of sums.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(const Compute<T>* sums, int64_t count, int64_t n, T* grad_bias) {
  start_next_kernel();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= n) return;
  Compute<T> total{0};
  for (int64_t start = 0; start < count; start += kRun) {
    Compute<T> run{0};
    for (int64_t i = start; i < min(start + kRun, count); ++i) run += sums[i * n + column];
    total += run;
  }
  grad_bias[column] = static_cast<T>(total);
}

}  // namespace kernels::epilogue

namespace kernels::cuda {

int linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n,
                    CUstream_st* stream) {
  using namespace epilogue;
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    // Without a mask, rows are as good as one, and all vectors are whole but the last.
    const int64_t rows = mask == nullptr ? 1 : m, columns = m * n / rows;
    const int64_t row_vectors =
        divide_up(columns, kMaskColumns) * (kMaskColumns / Vector<T>::kSize);
    const int64_t vectors = rows * row_vectors;
    return launch<forward_kernel<T>>(blocks_of(vectors, kThreads), kThreads, stream,
                                     static_cast<T*>(out), Divisor<Compute<T>>(divisor), mask,
                                     columns, row_vectors, vectors,
                                     has_aligned_rows(out, rows == 1 ? 0 : n * sizeof(T)));
  });
}

size_t linear_epilogue_backward_workspace(DType dtype, int64_t m, int64_t n) {
  size_t bytes = 0;
  for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    bytes = epilogue::Chunks(m, n, sizeof(T)).count * n * sizeof(epilogue::Compute<T>);
    return cudaSuccess;
  });
  return bytes;
}

int linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                             double divisor, void* grad_z, void* grad_bias, void* workspace,
                             int64_t m, int64_t n, CUstream_st* stream) {
  using namespace epilogue;
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Chunks chunks(m, n, sizeof(T));
    const int64_t row_bytes = divide_up(n, kMaskColumns);
    const dim3 grid(static_cast<unsigned>(chunks.columns), static_cast<unsigned>(chunks.count));
    T* const bias = static_cast<T*>(grad_bias);
    Compute<T>* const sums = bias == nullptr ? nullptr : static_cast<Compute<T>*>(workspace);
    const int status = launch<backward_kernel<T>>(
        grid, kThreads, stream, static_cast<const T*>(grad_output), mask,
        Divisor<Compute<T>>(divisor), static_cast<T*>(grad_z), sums, m, n, row_bytes, chunks.rows,
        has_aligned_rows(grad_output, n * sizeof(T)) && has_aligned_rows(grad_z, n * sizeof(T)));
    if (status != cudaSuccess || bias == nullptr) return status;
    return launch<add_partials_kernel<T>>(blocks_of(n, kThreads), kThreads, stream,
                                          static_cast<const Compute<T>*>(sums), chunks.count, n,
                                          bias);
  });
}

}  // namespace kernels::cuda
