// The passes beside torch's product, over out and grad_output [m, n], mask [m, (n + 7) / 8].
// Forward: ReLU and division in place, and the mask for backward. Backward, before its own
// products: mask, division, and the column sums for the bias.

#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels::epilogue {

// The type that a dtype is computed in.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kMaskColumns = 8;  // of a byte
constexpr int kThreads = 256, kWarps = kThreads / 32;

// A thread's neighbouring columns of a row: one vector, or fewer at the row's end. Of rows that are
// not aligned, they are accessed one by one.
template <typename T>
struct Elements {
  static constexpr int kSize = Vector<T>::kSize;
  int64_t first;  // column
  int count;
  bool is_vector;

  __device__ Elements(int64_t first, int64_t n, bool is_aligned)
      : first(first),
        count(static_cast<int>(min(max(n - first, int64_t{0}), int64_t{kSize}))),
        is_vector(is_aligned && count == kSize) {}

  // `at` is the first element's place. Elements past the row are 0, and are not stored.
  __device__ Vector<T> load(const T* at) const {
    if (is_vector) return load_vector(at, l2_policy(false));
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.value[j] = j < count ? at[j] : T{};
    return v;
  }
  __device__ void store(T* at, const Vector<T>& v) const {
    if (is_vector) {
      uint4 bits;
      memcpy(&bits, &v, sizeof(bits));
      // nvcc would make one store of an ordinary one and of the first below, and split the rest.
      return ptx::store_global_four(at, bits);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j < count) at[j] = v.value[j];
    }
  }
};

// out [rows, n], mask [rows, (n + 7) / 8] or null. A row has `vectors`, all rows have `all`. A
// thread makes one: two side by side would read every sector of memory twice.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const Divisor<Compute<T>> divisor, uint8_t* mask, int64_t n,
                   int64_t vectors, int64_t all, bool is_aligned) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = vectors == all ? 0
                      : all <= UINT32_MAX
                          ? static_cast<uint32_t>(vector) / static_cast<uint32_t>(vectors)
                          : vector / vectors;
  const Elements<T> elements((vector - row * vectors) * kSize, vector < all ? n : 0, is_aligned);
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
  const int place = static_cast<int>(elements.first % kMaskColumns);
  bits <<= place;
#pragma unroll
  for (int other = 1; other < kMaskColumns / kSize; other *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, other);
  }
  if (place != 0 || elements.count == 0) return;
  mask[row * divide_up(n, kMaskColumns) + elements.first / kMaskColumns] =
      static_cast<uint8_t>(bits);
}

constexpr int kBatch = 2;  // rows that a thread loads before it stores the first
constexpr int kRun = 64;   // gradients of a column are summed in runs: the error stays small
static_assert(kRun % kBatch == 0, "a run ends where a batch does");
// Blocks that a multiprocessor runs at once, by their registers. The grid has about as many as an
// H200 runs: with twice as many, half types take a tenth longer.
__host__ __device__ constexpr int blocks_each(int element_bytes) {
  return element_bytes < 8 ? 4 : 3;
}
constexpr int64_t kMultiprocessors = 128;

// The grid over a matrix. A block has `lanes` neighbouring threads a row.
struct BlockGrid {
  int lanes = 1;
  int64_t columns;  // blocks along a row
  int64_t rows;     // of the matrix, in one block
  int64_t count;    // blocks along a column

  BlockGrid(int64_t m, int64_t n, int element_bytes) {
    const auto blocks = [=](int lanes) { return divide_up(n, lanes * 16 / element_bytes); };
    // Idle threads cost time, and so do more blocks along a row: as much as 4 threads each.
    const auto cost = [=](int lanes) { return blocks(lanes) * (lanes + 4); };
    for (int more = 2; more <= 32; more *= 2) {
      if (cost(more) < cost(lanes)) lanes = more;
    }
    columns = blocks(lanes);
    const int64_t at_once = kThreads / lanes;
    const int64_t wanted =
        std::max<int64_t>(kMultiprocessors * blocks_each(element_bytes) / columns, 1);
    rows = std::max<int64_t>(divide_up(divide_up(m, wanted), at_once), 1) * at_once;
    count = std::max<int64_t>(divide_up(m, rows), 1);
  }
};

// grad_output and grad_z [m, n], mask [m, (n + 7) / 8], sums [gridDim.y, n] or null.
template <typename T>
__global__ void __launch_bounds__(kThreads, blocks_each(sizeof(T)))
    backward_kernel(const T* grad_output, const uint8_t* mask, const Divisor<Compute<T>> divisor,
                    T* grad_z, Compute<T>* sums, int64_t m, int64_t n, int64_t rows, int lanes,
                    bool is_aligned) {
  start_next_kernel();
  constexpr int kSize = Vector<T>::kSize;
  const int lane = threadIdx.x % lanes, at_once = kThreads / lanes;
  const int64_t row_bytes = divide_up(n, kMaskColumns);
  const Elements<T> elements((blockIdx.x * int64_t{lanes} + lane) * kSize, n, is_aligned);
  const int64_t begin = blockIdx.y * rows + threadIdx.x / lanes;
  const int64_t end = min((blockIdx.y + int64_t{1}) * rows, m);
  // The thread's rows, at_once apart.
  const int count = elements.count > 0 ? static_cast<int>(divide_up(end - begin, at_once)) : 0;
  const int64_t step = at_once * n, mask_step = at_once * row_bytes;
  int64_t at = begin * n + elements.first;
  mask += begin * row_bytes + elements.first / kMaskColumns;

  Compute<T> total[kSize] = {}, run[kSize] = {};
  for (int done = 0; done < count; done += kBatch) {
    Vector<T> grad[kBatch];
    uint32_t bits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (done + i >= count) continue;
      grad[i] = elements.load(grad_output + at + i * step);
      bits[i] = mask[i * mask_step] >> elements.first % kMaskColumns;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (done + i >= count) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        T& v = grad[i].value[j];
        v = static_cast<T>(divisor.quotient(static_cast<Compute<T>>(v)));
        if (!(bits[i] >> j & 1)) v = T{};
        run[j] += static_cast<Compute<T>>(v);
      }
      elements.store(grad_z + at + i * step, grad[i]);
    }
    at += kBatch * step, mask += kBatch * mask_step;
    if ((done + kBatch) % kRun != 0) continue;
#pragma unroll
    for (int j = 0; j < kSize; ++j) total[j] += run[j], run[j] = 0;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) total[j] += run[j];
  if (sums == nullptr) return;

  // The sums of a column over the block, always in the same order.
  __shared__ Compute<T> partial[kWarps][kSize][32];
  for (int other = 16; other >= lanes; other /= 2) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) total[j] += __shfl_xor_sync(0xffffffff, total[j], other);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) partial[threadIdx.x / 32][j][threadIdx.x % 32] = total[j];
  __syncthreads();
  static_assert(kSize <= kWarps, "each warp adds up one element of the vectors, or none");
  const int j = threadIdx.x / 32;
  if (threadIdx.x % 32 >= lanes || j >= elements.count) return;
  Compute<T> sum{0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][j][lane];
  sums[blockIdx.y * n + elements.first + j] = sum;
}

// grad_bias [n], the sums of the `count` rows of sums, always in the same order. A warp has 32
// columns, and every kWarps-th row: a narrow matrix has many, and each takes a latency of L2.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(const Compute<T>* sums, int64_t count, int64_t n, T* grad_bias) {
  start_next_kernel();
  static_assert(kMultiprocessors * blocks_each(sizeof(T)) <= kRun * kWarps,
                "a warp's rows are a run");
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  Compute<T> total{0};
  if (column < n) {
#pragma unroll 8
    for (int64_t row = first; row < count; row += kWarps) total += sums[row * n + column];
  }
  __shared__ Compute<T> partial[kWarps][32];
  partial[first][lane] = total;
  __syncthreads();
  if (first > 0 || column >= n) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += partial[warp][lane];
  grad_bias[column] = static_cast<T>(total);
}

}  // namespace kernels::epilogue

namespace kernels::cuda {

using namespace epilogue;

int linear_fused_pass(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n,
                      CUstream_st* stream) {
  if (mask == nullptr || n % kMaskColumns == 0) n *= m, m = 1;  // nothing tells the rows apart
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    // Vectors that share a byte of the mask share a warp.
    constexpr int kSize = Vector<T>::kSize, kTogether = kMaskColumns / kSize;
    const int64_t vectors = divide_up(n, kMaskColumns) * kTogether;
    return launch<forward_kernel<T>>(blocks_of(m * vectors, kThreads), kThreads, stream,
                                     static_cast<T*>(out), Divisor<Compute<T>>(divisor), mask, n,
                                     vectors, m * vectors,
                                     has_aligned_rows(out, m == 1 ? 0 : n * sizeof(T)));
  });
}

size_t linear_fused_pass_backward_workspace(DType dtype, int64_t m, int64_t n) {
  const int bytes = dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
  return BlockGrid(m, n, bytes).count * n * std::max(bytes, 4);
}

int linear_fused_pass_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                               double divisor, void* grad_z, void* grad_bias, void* workspace,
                               int64_t m, int64_t n, CUstream_st* stream) {
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* const bias = static_cast<T*>(grad_bias);
    Compute<T>* const sums = bias == nullptr ? nullptr : static_cast<Compute<T>*>(workspace);
    const int64_t stride = n * sizeof(T);
    const BlockGrid grid(m, n, sizeof(T));
    const dim3 blocks(static_cast<unsigned>(grid.columns), static_cast<unsigned>(grid.count));
    const int status = launch<backward_kernel<T>>(
        blocks, kThreads, stream, static_cast<const T*>(grad_output), mask,
        Divisor<Compute<T>>(divisor), static_cast<T*>(grad_z), sums, m, n, grid.rows, grid.lanes,
        has_aligned_rows(grad_output, stride) && has_aligned_rows(grad_z, stride));
    if (status != cudaSuccess || bias == nullptr) return status;
    return launch<add_partials_kernel<T>>(blocks_of(n, 32), kThreads, stream,
                                          static_cast<const Compute<T>*>(sums), grid.count, n,
                                          bias);
  });
}

}  // namespace kernels::cuda
