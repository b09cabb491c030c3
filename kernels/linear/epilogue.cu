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

constexpr int kThreads = 256;

// How rows are cut into strips, one for kApart threads. A thread has kCount elements, kApart
// columns apart; 1: they are neighbours, and one vector if rows are aligned.
template <bool kIsAligned, int kColumnsApart, int kElements>
struct Layout {
  static constexpr bool kAligned = kIsAligned;
  static constexpr int kApart = kColumnsApart;
  static constexpr int kCount = kElements;
};

// Calls body with a layout for rows of n. Where they are not aligned, neighbouring threads have
// neighbouring elements, for which memory is accessed by whole sectors; but each thread costs as
// much as some elements, so that few threads have a short row.
template <typename T, typename Body>
int for_layout(bool is_aligned, int64_t n, const Body& body) {
  constexpr int kSize = Vector<T>::kSize, kFew = std::min(kSize, 4);
  if (is_aligned) return body(Layout<true, 1, kSize>{});
  if (n <= kMaskColumns) return body(Layout<false, 1, kFew>{});
  if (n <= 8 * kFew) return body(Layout<false, 8, kFew>{});
  if (n <= 16 * kSize) return body(Layout<false, 8, kSize>{});
  return body(Layout<false, 32, kSize>{});
}

// The elements of one thread.
template <typename T, typename L>
struct Elements {
  static constexpr int kApart = L::kApart, kCount = L::kCount;
  int64_t first;  // column
  int count;
  int left;  // columns of the row from the strip's first on, at most all of the strip's

  // Those of thread `lane` of the strip's `lanes`.
  __device__ Elements(int64_t strip, int lanes, int lane, int64_t n)
      : first(strip * (lanes * kCount)),
        left(static_cast<int>(min(max(n - first, int64_t{0}), int64_t{lanes * kCount}))) {
    const int offset = kApart == 1 ? lane * kCount : lane;
    first += offset;
    count = min(max((left - offset + kApart - 1) / kApart, 0), kCount);
  }

  // `at` is where the first of the elements is, or its bit. Elements past the row are 0, and are
  // not stored; for aligned rows, all must be there.
  __device__ Vector<T> load(const T* at) const {
    if constexpr (L::kAligned) return load_vector(at, l2_policy(false));
    return load_each(at);
  }
  __device__ void store(T* at, const Vector<T>& v) const {
    if constexpr (!L::kAligned) return store_each(at, v);
    uint4 bits;
    memcpy(&bits, &v, sizeof(bits));
    // nvcc would make one store of an ordinary one and of store_each's first, and split the rest.
    ptx::store_global_four(at, bits);
  }
  __device__ Vector<T> load_each(const T* at) const {
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < kCount; ++j) v.value[j] = j < count ? at[j * kApart] : T{};
    return v;
  }
  __device__ void store_each(T* at, const Vector<T>& v) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < count) at[j * kApart] = v.value[j];
    }
  }

  __device__ uint32_t load_bits(const uint8_t* at) const {
    if constexpr (kApart == 1) return *at >> shift();
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < count) bits |= (at[j * kApart / kMaskColumns] >> shift() & 1u) << j;
    }
    return bits;
  }
  // Sets the bit of element j. By all threads of a warp; `bits` begins with 0.
  __device__ void set_bit(uint32_t& bits, int j, bool bit) const {
    if constexpr (kApart == 1) {
      bits |= static_cast<uint32_t>(bit) << j;
    } else {
      const uint32_t all = __ballot_sync(0xffffffff, bit);
      if (threadIdx.x % kApart / kBytes == j) bits = all;
    }
  }
  // A thread stores one byte of set_bit's bits, or none.
  __device__ void store_bits(uint8_t* at, uint32_t bits) const {
    if constexpr (kApart == 1) {
      bits <<= shift();
#pragma unroll
      for (int other = 1; other < kMaskColumns / kCount; other *= 2) {
        bits |= __shfl_xor_sync(0xffffffff, bits, other);
      }
      if (shift() == 0 && count > 0) *at = static_cast<uint8_t>(bits);
    } else {
      const int lane = threadIdx.x % kApart;
      bits >>= threadIdx.x % 32 - lane + lane % kBytes * kMaskColumns;
      if (lane * kMaskColumns < left) at[lane - lane / kMaskColumns] = static_cast<uint8_t>(bits);
    }
  }

 private:
  // Bytes of the mask for the j-th elements of the strip's threads.
  static constexpr int kBytes = kApart / kMaskColumns;
  // The place of the first element's bit.
  __device__ int shift() const { return static_cast<int>(first % kMaskColumns); }
};

// -------------------------------------------------------------------------------------- forward

// out [rows, n], mask [rows, (n + 7) / 8], and `strips` in each of the rows, `all` of them; or mask
// is null, and all of out is one row. A thread makes one vector: two side by side would read every
// sector of memory twice.
template <typename T, typename L>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* out, const Divisor<Compute<T>> divisor, uint8_t* mask, int64_t n,
                   int64_t strips, int64_t all) {
  const int64_t strip = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / L::kApart;
  const bool has_mask = mask != nullptr;
  const int64_t row = !has_mask     ? 0
                      : strips == 1 ? strip
                      : all <= UINT32_MAX
                          ? static_cast<uint32_t>(strip) / static_cast<uint32_t>(strips)
                          : strip / strips;
  const Elements<T, L> elements(strip - row * strips, L::kApart, threadIdx.x % L::kApart,
                                strip < all ? n : 0);
  out += row * n + elements.first;

  if (has_mask) mask += row * divide_up(n, kMaskColumns) + elements.first / kMaskColumns;
  const bool is_whole = elements.count == elements.kCount;
  const auto finish = [&](auto is_exact) {
    Vector<T> z = is_whole ? elements.load(out) : elements.load_each(out);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < elements.kCount; ++j) {
      const auto element = static_cast<Compute<T>>(z.value[j]);
      elements.set_bit(bits, j, mask_bit(element));  // 0 past the row, where z is 0
      z.value[j] = static_cast<T>(relu_divide<is_exact.value>(element, divisor));
    }
    is_whole ? elements.store(out, z) : elements.store_each(out, z);
    if (has_mask) elements.store_bits(mask, bits);
  };
  divisor.is_exact ? finish(std::true_type{}) : finish(std::false_type{});
}

// ------------------------------------------------------------------------------------- backward

constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 2;  // rows that a thread loads before it stores the first
// Gradients of a column are summed in runs of this many, and then the runs: the error stays small
// where there are many rows.
constexpr int kRun = 64;
static_assert(kRun % kBatch == 0, "a run ends where a batch does");
// Blocks that a multiprocessor runs at once. The grid has about as many as an H200 runs: with twice
// as many, half types take a tenth longer.
template <typename T, typename L>
constexpr int kBlocksEach = L::kAligned && sizeof(T) < 8 ? 4 : 3;  // by their registers
constexpr int64_t kMultiprocessors = 128;

// The blocks of a matrix.
struct Chunks {
  int lanes;
  int64_t columns;  // blocks along a row
  int64_t rows;     // of one block
  int64_t count;    // blocks along a column

  template <typename T, typename L>
  static Chunks of(int64_t m, int64_t n) {
    constexpr int kEach = Elements<T, L>::kCount;
    Chunks chunks;
    chunks.lanes = L::kApart;
    if (L::kApart == 1) {
      // Idle threads cost time, and so do more blocks along a row: as much as 4 threads each.
      const auto cost = [&](int lanes) { return divide_up(n, lanes * kEach) * (lanes + 4); };
      for (int lanes = 2; lanes <= 32; lanes *= 2) {
        if (cost(lanes) < cost(chunks.lanes)) chunks.lanes = lanes;
      }
    }
    const int64_t at_once = kThreads / chunks.lanes;
    chunks.columns = divide_up(n, chunks.lanes * kEach);
    const int64_t wanted =
        std::max<int64_t>(kMultiprocessors * kBlocksEach<T, L> / chunks.columns, 1);
    chunks.rows = std::max<int64_t>(divide_up(divide_up(m, wanted), at_once) * at_once, at_once);
    chunks.count = std::max<int64_t>(divide_up(m, chunks.rows), 1);
    return chunks;
  }
};

// grad_output and grad_z [m, n], mask [m, row_bytes], sums [gridDim.y, n] or null.
template <typename T, typename L>
__global__ void __launch_bounds__(kThreads, kBlocksEach<T, L>)
    backward_kernel(const T* grad_output, const uint8_t* mask, const Divisor<Compute<T>> divisor,
                    T* grad_z, Compute<T>* sums, int64_t m, int64_t n, int64_t row_bytes,
                    int64_t rows, int lanes) {
  start_next_kernel();
  constexpr int kCount = Elements<T, L>::kCount;
  if (L::kApart > 1) lanes = L::kApart;
  const int lane = threadIdx.x % lanes, at_once = kThreads / lanes;
  const Elements<T, L> elements(blockIdx.x, lanes, lane, n);
  const int64_t begin = blockIdx.y * rows + threadIdx.x / lanes;
  const int64_t end = elements.count > 0 ? min((blockIdx.y + int64_t{1}) * rows, m) : 0;
  const int64_t step = at_once * n, mask_step = at_once * row_bytes;
  grad_output += begin * n + elements.first, grad_z += begin * n + elements.first;
  mask += begin * row_bytes + elements.first / kMaskColumns;

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
      bits[i] = elements.load_bits(mask + i * mask_step);
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
  sums[blockIdx.y * n + elements.first + j * L::kApart] = sum;
}

// grad_bias [n], the sums of the `count` rows of sums, always in the same order. A warp has 32
// columns, and every kWarps-th row: they are many where the matrix is narrow, and each takes a
// latency of L2.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(const Compute<T>* sums, int64_t count, int64_t n, T* grad_bias) {
  start_next_kernel();
  static_assert(kMultiprocessors * kBlocksEach<T, Layout<true, 1, 1>> <= kRun * kWarps,
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

int linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n,
                    CUstream_st* stream) {
  using namespace epilogue;
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    // Without a mask, rows are as good as one.
    const int64_t rows = mask == nullptr ? 1 : m, columns = m * n / rows;
    const bool is_aligned = has_aligned_rows(out, rows == 1 ? 0 : n * sizeof(T));
    return for_layout<T>(is_aligned, columns, [&](auto layout) {
      using L = decltype(layout);
      constexpr int kStrip = L::kApart * Elements<T, L>::kCount;
      // Strips that share a byte of the mask share a warp.
      constexpr int kWhole = kStrip < kMaskColumns ? kMaskColumns / kStrip : 1;
      const int64_t strips = divide_up(columns, kWhole * kStrip) * kWhole;
      return launch<forward_kernel<T, L>>(
          blocks_of(rows * strips * L::kApart, kThreads), kThreads, stream, static_cast<T*>(out),
          Divisor<Compute<T>>(divisor), mask, columns, strips, rows * strips);
    });
  });
}

size_t linear_epilogue_backward_workspace(DType dtype, int64_t m, int64_t n) {
  using namespace epilogue;
  size_t bytes = 0;
  for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (const bool is_aligned : {false, true}) {
      for_layout<T>(is_aligned, n, [&](auto layout) {
        const int64_t count = Chunks::of<T, decltype(layout)>(m, n).count;
        bytes = std::max<size_t>(bytes, count * n * sizeof(Compute<T>));
        return 0;
      });
    }
    return 0;
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
    const int64_t stride = n * sizeof(T);
    const bool is_aligned =
        has_aligned_rows(grad_output, stride) && has_aligned_rows(grad_z, stride);
    return for_layout<T>(is_aligned, n, [&](auto layout) {
      using L = decltype(layout);
      const Chunks chunks = Chunks::of<T, L>(m, n);
      const dim3 grid(static_cast<unsigned>(chunks.columns), static_cast<unsigned>(chunks.count));
      const int status = launch<backward_kernel<T, L>>(
          grid, kThreads, stream, static_cast<const T*>(grad_output), mask,
          Divisor<Compute<T>>(divisor), static_cast<T*>(grad_z), sums, m, n,
          divide_up(n, kMaskColumns), chunks.rows, chunks.lanes);
      if (status != cudaSuccess || bias == nullptr) return status;
      return launch<add_partials_kernel<T>>(blocks_of(n, 32), kThreads, stream,
                                            static_cast<const Compute<T>*>(sums), chunks.count, n,
                                            bias);
    });
  });
}

}  // namespace kernels::cuda
