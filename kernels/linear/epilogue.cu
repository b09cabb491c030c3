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

// Some threads side by side, `lanes`, make a row of the matrix, a vector each. Where rows are not
// aligned, a warp makes it, and neighbouring threads have neighbouring elements.
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 2;  // rows that a thread loads before it stores the first
// Gradients of a column are summed in runs of this many, and then the runs: the error stays small
// where there are many rows.
constexpr int kRun = 64;
static_assert(kRun % kBatch == 0, "a run ends where a batch does");
// Blocks that a multiprocessor runs at once. The grid has about as many as an H200 runs: with twice
// as many, half types take a tenth longer.
template <typename T>
constexpr int kBlocksEach = sizeof(T) == 8 ? 3 : 4;  // by their registers
constexpr int64_t kMultiprocessors = 128;

// The elements of a row that a thread has.
template <typename T, bool kAligned>
struct Elements {
  static constexpr int kCount = kAligned || sizeof(T) == 8 ? Vector<T>::kSize : 4;
  static constexpr int kApart = kAligned ? 1 : 32;
  int64_t first;  // column
  int count;

  __device__ Elements(int64_t block, int lanes, int lane, int64_t n)
      : first(block * lanes * kCount + lane * (kAligned ? kCount : 1)),
        count(
            static_cast<int>(min(max(divide_up(n - first, kApart), int64_t{0}), int64_t{kCount}))) {
  }

  __device__ Vector<T> load(const T* row) const {
    Vector<T> v;
    if constexpr (kAligned) {
      v = load_vector(row + first, l2_policy(false));
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) v.value[j] = j < count ? row[first + j * kApart] : T{};
    }
    return v;
  }
  __device__ void store(T* row, const Vector<T>& v) const {
    if constexpr (kAligned) {
      store_vector(row + first, v);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j < count) row[first + j * kApart] = v.value[j];
      }
    }
  }
  __device__ uint32_t bits(const uint8_t* row) const {
    row += first / kMaskColumns;
    const int shift = static_cast<int>(first % kMaskColumns);
    uint32_t bits = 0;
    if constexpr (kAligned) {
      bits = *row >> shift;
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j < count) bits |= (row[j * kApart / kMaskColumns] >> shift & 1u) << j;
      }
    }
    return bits;
  }
};

// The blocks of a matrix.
struct Chunks {
  int lanes = 32;
  int64_t columns;  // blocks along a row
  int64_t rows;     // of one block
  int64_t count;    // blocks along a column

  template <typename T, bool kAligned>
  static Chunks of(int64_t m, int64_t n) {
    return {m, n, Elements<T, kAligned>::kCount, kAligned, kMultiprocessors * kBlocksEach<T>};
  }

 private:
  Chunks(int64_t m, int64_t n, int each, bool is_aligned, int64_t most) {
    // Idle threads cost time, and so do more blocks along a row: as much as 4 threads each.
    const auto cost = [&](int threads) { return divide_up(n, threads * each) * (threads + 4); };
    for (const int fewer : {16, 8, 4}) {
      if (is_aligned && cost(fewer) < cost(lanes)) lanes = fewer;
    }
    const int64_t at_once = kThreads / lanes;
    columns = divide_up(n, lanes * each);
    const int64_t wanted = std::max<int64_t>(most / columns, 1);
    rows = std::max<int64_t>(divide_up(divide_up(m, wanted), at_once) * at_once, at_once);
    count = std::max<int64_t>(divide_up(m, rows), 1);
  }
};

// grad_output and grad_z [m, n], mask [m, row_bytes], sums [gridDim.y, n] or null.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksEach<T>)
    backward_kernel(const T* grad_output, const uint8_t* mask, const Divisor<Compute<T>> divisor,
                    T* grad_z, Compute<T>* sums, int64_t m, int64_t n, int64_t row_bytes,
                    int64_t rows, int lanes) {
  start_next_kernel();
  constexpr int kCount = Elements<T, kAligned>::kCount;
  if (!kAligned) lanes = 32;
  const int lane = threadIdx.x % lanes, at_once = kThreads / lanes;
  const Elements<T, kAligned> elements(blockIdx.x, lanes, lane, n);
  const int64_t begin = blockIdx.y * rows + threadIdx.x / lanes;
  const int64_t end = elements.count > 0 ? min((blockIdx.y + int64_t{1}) * rows, m) : 0;
  const int64_t step = at_once * n, mask_step = at_once * row_bytes;
  grad_output += begin * n, grad_z += begin * n, mask += begin * row_bytes;

  Compute<T> total[kCount] = {}, run[kCount] = {};
  int batches = 0;
  for (int64_t row = begin; row < end; row += kBatch * at_once) {
    const int left = static_cast<int>(divide_up(end - row, at_once));
    Vector<T> grad[kBatch];
    uint32_t bits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= left) continue;
      grad[i] = elements.load(grad_output + i * step);
      bits[i] = elements.bits(mask + i * mask_step);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= left) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        T& v = grad[i].value[j];
        v = static_cast<T>(divisor.quotient(static_cast<Compute<T>>(v)));
        if (!(bits[i] >> j & 1)) v = T{};
        run[j] += static_cast<Compute<T>>(v);
      }
      elements.store(grad_z + i * step, grad[i]);
    }
    grad_output += kBatch * step, grad_z += kBatch * step, mask += kBatch * mask_step;
    if (++batches % (kRun / kBatch) != 0) continue;
#pragma unroll
    for (int j = 0; j < kCount; ++j) total[j] += run[j], run[j] = 0;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) total[j] += run[j];
  if (sums == nullptr) return;

  // The sums of a column over the block, always in the same order.
  __shared__ Compute<T> partial[kWarps][kCount][32];
  for (int other = 16; other >= lanes; other /= 2) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) total[j] += __shfl_xor_sync(0xffffffff, total[j], other);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) partial[threadIdx.x / 32][j][threadIdx.x % 32] = total[j];
  __syncthreads();
  static_assert(kCount <= kWarps, "each warp adds up one element of the vectors, or none");
  const int j = threadIdx.x / 32;
  if (threadIdx.x % 32 >= lanes || j >= elements.count) return;
  Compute<T> sum{0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][j][lane];
  sums[blockIdx.y * n + elements.first + j * elements.kApart] = sum;
}

// grad_bias [n], the sums of the `count` rows of sums, always in the same order. A warp has 32
// columns, and every kWarps-th row: they are many where the matrix is narrow, and each takes a
// latency of L2.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(const Compute<T>* sums, int64_t count, int64_t n, T* grad_bias) {
  start_next_kernel();
  static_assert(kMultiprocessors * kBlocksEach<T> <= kRun * kWarps, "a warp's rows are a run");
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
  using namespace epilogue;
  size_t bytes = 0;
  for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t count =
        std::max(Chunks::of<T, true>(m, n).count, Chunks::of<T, false>(m, n).count);
    bytes = count * n * sizeof(Compute<T>);
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
    T* const bias = static_cast<T*>(grad_bias);
    Compute<T>* const sums = bias == nullptr ? nullptr : static_cast<Compute<T>*>(workspace);
    const auto launch_passes = [&](auto is_aligned) {
      const Chunks chunks = Chunks::of<T, is_aligned.value>(m, n);
      const dim3 grid(static_cast<unsigned>(chunks.columns), static_cast<unsigned>(chunks.count));
      const int status = launch<backward_kernel<T, is_aligned.value>>(
          grid, kThreads, stream, static_cast<const T*>(grad_output), mask,
          Divisor<Compute<T>>(divisor), static_cast<T*>(grad_z), sums, m, n,
          divide_up(n, kMaskColumns), chunks.rows, chunks.lanes);
      if (status != cudaSuccess || bias == nullptr) return status;
      return launch<add_partials_kernel<T>>(blocks_of(n, 32), kThreads, stream,
                                            static_cast<const Compute<T>*>(sums), chunks.count, n,
                                            bias);
    };
    const int64_t stride = n * sizeof(T);
    const bool aligned = has_aligned_rows(grad_output, stride) && has_aligned_rows(grad_z, stride);
    return aligned ? launch_passes(std::true_type{}) : launch_passes(std::false_type{});
  });
}

}  // namespace kernels::cuda
