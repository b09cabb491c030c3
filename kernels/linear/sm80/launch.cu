// Linear -> ReLU -> divide on the tensor cores of any GPU from sm_80 on: cp.async, ldmatrix,
// mma.sync. float32 goes through the split of split.cuh.
//
// The tensor cores truncate when they accumulate, so that three products are summed there for 32 of
// K at a time: the low ones first, then the high ones on top of them. The float32 units add these
// sums up, and what an addition rounds off is where the next sum begins.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/pdl.cuh"
#include "common/ptx/sm80.cuh"
#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/split/nonfinite.cuh"
#include "linear/split/pieces.cuh"

namespace kernels {
namespace sm80 {

// Whether these kernels are in a build at all: where choose_path takes them on one of its GPUs. In
// others they would take nvcc 1 of 9 s. Tests, which run them on every GPU, define
// KERNELS_ALL_PATHS.
constexpr bool is_built() {
#ifdef KERNELS_ALL_PATHS
  return true;
#else
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture == 800 || architecture == 1000) return true;
  }
  return false;
#endif
}

constexpr int kBlock = 256;  // threads: 2 x 4 warps along M and N
constexpr int kWarpsN = 4;
constexpr int kBlockM = 128;
constexpr int kBlockK = 32;                    // a row of a tile is 64 bytes, four chunks of 16
constexpr int kFragmentsM = kBlockM / 2 / 16;  // of a warp, 16 rows each

// Tiles by the number of products. Three need for their fragments the registers that wider tiles
// would take for the total.
template <int kProducts>
struct Tile {
  static constexpr bool kIsSplit = kProducts == 3;
  static constexpr int kBlockN = kIsSplit ? 128 : 256;
  static constexpr int kFragmentsN = kBlockN / kWarpsN / 8;  // of a warp, 8 columns each
  static constexpr int kParts = kIsSplit ? 2 : 1;            // high and low
  static constexpr int kBytesM = kBlockM * kBlockK * 2;
  static constexpr int kBytesN = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kParts * (kBytesM + kBytesN);
  // Copies on their way: three where shared memory has no room for four.
  static constexpr int kMostStages = 4, kLeastStages = kIsSplit ? 3 : 4;
  static_assert(kLeastStages * kStageBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 have no more");
  static_assert(kFragmentsM == 4, "a stage is copied, and fragments of weight loaded, in quarters");
  // The part of a warp's sums that is in shared memory at once, before it is stored. 8 floats more
  // than a row has, and half a warp stores without bank conflicts.
  static constexpr int kStagedFragments = 2;
  static constexpr int kPitch = kFragmentsN * 8 + 8;
  static constexpr int kStagedFloats = kStagedFragments * 16 * kPitch;
  static_assert(kBlock / 32 * kStagedFloats * 4 <= kLeastStages * kStageBytes, "it is of stages");
};

// A 16-bit matrix [rows, k], in pieces of 16 bytes: address and stride are multiples of them.
template <typename T>
struct Matrix {
  const T* high;
  const T* low;  // or null
  int64_t stride;
  const int* exponent;  // of each row; null for a half type
};

// Where a tile in shared memory has its chunk: eight rows' chunks of one column, as ldmatrix reads
// them, lie in different banks.
__device__ inline uint32_t chunk_offset(int row, int chunk) {
  return row * (kBlockK * 2) + (chunk ^ (row / 2 % 4)) * 16;
}

template <typename T>
__device__ T round_to(float value);
template <>
__device__ inline float round_to(float value) {
  return value;
}
template <>
__device__ inline __half round_to(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 round_to(float value) {
  return __float2bfloat16_rn(value);
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Out>
struct Epilogue {
  const Out* bias;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  Out* out;
  uint8_t* mask;
  uint32_t alignment;  // bytes, 16 at most: rows of out begin at multiples of it
};

template <typename Out>
struct alignas(2 * sizeof(Out)) Pair {
  Out value[2];
};

// A thread's neighbours in a row of the result, whose mask is a byte.
constexpr int kTogether = 8;

template <typename Out>
struct Columns {
  static constexpr bool kIsScaled = std::is_same_v<Out, float>;
  int first, n;
  float bias[kTogether];
  int exponent[kTogether];  // of the weight's rows

  __device__ Columns(const Epilogue<Out>& p, const int* weight_exponent, int first, int n)
      : first(first), n(n) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool valid = first + i < n;
      // -0 added to anything is that.
      bias[i] = valid && p.bias != nullptr ? to_float(p.bias[first + i]) : -0.0f;
      exponent[i] = kIsScaled && valid ? weight_exponent[first + i] : 0;
    }
  }

  // As many as there are, by accesses of the type given.
  template <typename Access>
  __device__ void store_as(Out* to, const Out (&value)[kTogether]) const {
    constexpr int kSize = sizeof(Access) / sizeof(Out);
#pragma unroll
    for (int i = 0; i < kTogether; i += kSize) {
      if (first + i < n) {
        *reinterpret_cast<Access*>(to + i) = *reinterpret_cast<const Access*>(value + i);
      }
    }
  }

  // One row's, whose sums were scaled by 2^x_exponent.
  __device__ void store(const Epilogue<Out>& p, const float* sums, int64_t row,
                        int x_exponent) const {
    struct alignas(16) {
      Out value[kTogether];
    } result;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float z = sums[i];
      if (kIsScaled) z = split::unscale(z, x_exponent + exponent[i]);
      z += bias[i];
      bits |= static_cast<uint32_t>(first + i < n && mask_bit(z)) << i;
      result.value[i] = round_to<Out>(p.divisor.quotient(z < p.floor ? 0.0f : z));
    }
    Out* const to = p.out + row * n + first;
    if (p.alignment >= 16 && first + kTogether <= n) {
      store_as<uint4>(to, result.value);
    } else if (p.alignment >= 2 * sizeof(Out)) {
      store_as<Pair<Out>>(to, result.value);
    } else {
      store_as<Out>(to, result.value);
    }
    if (p.mask != nullptr) {
      p.mask[row * ((n + 7) / 8) + first / 8] = static_cast<uint8_t>(bits);
    }
  }
};

template <typename T, typename Out, int kProducts, int kStages>
__global__ void __launch_bounds__(kBlock, 1)
    linear_kernel(const Matrix<T> x, const Matrix<T> weight, int m, int n, int k,
                  const Epilogue<Out> epilogue) {
#if __CUDA_ARCH__ >= 800
  using Tile = Tile<kProducts>;
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  // These have room for the most stages, always: less to compile.
  if constexpr (kStages != Tile::kMostStages) return;
#endif
  constexpr int kParts = Tile::kParts, kFragmentsN = Tile::kFragmentsN;
  constexpr int kStageBytes = Tile::kStageBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr uint32_t kLastStage = (kStages - 1) * kStageBytes;
  const uint32_t shared_start = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / kWarpsN * (kFragmentsM * 16);
  const int warp_n = warp % kWarpsN * (kFragmentsN * 8);

  // Tiles in groups of rows, column by column in a group, so that the blocks that run at once share
  // x and weight in L2.
  constexpr int kGroupM = 8;
  const int tiles_m = (m + kBlockM - 1) / kBlockM;
  const int tiles_n = (n + Tile::kBlockN - 1) / Tile::kBlockN;
  const int block = blockIdx.x;
  const int group = block / (kGroupM * tiles_n), place = block % (kGroupM * tiles_n);
  const int group_m = min(kGroupM, tiles_m - group * kGroupM);
  const int first_m = (group * kGroupM + place % group_m) * kBlockM;
  const int first_n = place / group_m * Tile::kBlockN;

  // A thread copies one chunk of every 64th row, zeros behind the last row and behind K.
  constexpr int kRowsApart = kBlock / 4;
  constexpr int kCopiesM = kBlockM / kRowsApart, kCopiesN = Tile::kBlockN / kRowsApart;
  const int copy_row = threadIdx.x / 4, copy_chunk = threadIdx.x % 4;
  const int rows_x = m - first_m - copy_row, rows_weight = n - first_n - copy_row;
  const T* from_x = x.high + x.stride * (first_m + copy_row) + copy_chunk * 8;
  const T* from_weight = weight.high + weight.stride * (first_n + copy_row) + copy_chunk * 8;
  const int64_t low_x = x.low - x.high, low_weight = weight.low - weight.high;
  const uint32_t copy_to = shared_start + chunk_offset(copy_row, copy_chunk);
  int copy_k = copy_chunk * 8;  // of the next copies
  uint32_t copy_stage = 0;
  // A quarter of the next stage's copies, so that they can be spread over the multiplications.
  const auto copy_part = [&](int quarter) {
    const uint32_t to = copy_to + copy_stage;
#pragma unroll
    for (int i = 0; i < kCopiesM + kCopiesN; ++i) {
      if (i * 4 / (kCopiesM + kCopiesN) != quarter) continue;
      const bool of_x = i < kCopiesM;
      const int row = (of_x ? i : i - kCopiesM) * kRowsApart;
      const T* from = of_x ? from_x + x.stride * row : from_weight + weight.stride * row;
      const bool valid = copy_k < k && row < (of_x ? rows_x : rows_weight);
      const uint32_t at = to + (of_x ? 0 : kParts * Tile::kBytesM) + row * (kBlockK * 2);
      copy_async(at, from, valid);
      if constexpr (Tile::kIsSplit) {
        copy_async(at + (of_x ? Tile::kBytesM : Tile::kBytesN), from + (of_x ? low_x : low_weight),
                   valid);
      }
    }
    if (quarter < 3) return;
    commit_copies();
    from_x += kBlockK;
    from_weight += kBlockK;
    copy_k += kBlockK;
    copy_stage = copy_stage == kLastStage ? 0 : copy_stage + kStageBytes;
  };

  // Fragments of half a step, 16 of K: of x by half and fragment, of weight by half. Those of x are
  // loaded one fragment ahead of their use, those of weight half a step. The high ones stay until
  // the low products of the whole step are made.
  uint32_t a[2][kFragmentsM][kParts][4];
  uint32_t b[2][kParts][kFragmentsN][2];
  const uint32_t a_from = shared_start + chunk_offset(warp_m + lane % 16, lane / 16);
  const uint32_t b_from = shared_start + kParts * Tile::kBytesM +
                          chunk_offset(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  // The second half is two chunks on, and the swizzle turns + 2 into ^ 2.
  const auto load_a = [&](uint32_t stage, int half, int fragment) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t (&to)[4] = a[half][fragment][part];
      load_matrices(
          to[0], to[1], to[2], to[3],
          (a_from ^ half * 32) + stage + part * Tile::kBytesM + fragment * (16 * kBlockK * 2));
    }
  };
  const auto load_b = [&](uint32_t stage, int half, int quarter) {
    constexpr int kPairs = kFragmentsN / 2, kLoads = kParts * kPairs / 4;
#pragma unroll
    for (int i = quarter * kLoads; i < (quarter + 1) * kLoads; ++i) {
      const int part = i / kPairs, j = i % kPairs * 2;
      uint32_t (&to)[kFragmentsN][2] = b[half][part];
      load_matrices(to[j][0], to[j][1], to[j + 1][0], to[j + 1][1],
                    (b_from ^ half * 32) + stage + part * Tile::kBytesN + j * (8 * kBlockK * 2));
    }
  };

  // The sums of three products are made in `sums`, 32 of K at a time, and added to `total`, which
  // is 2^11 times as large, as low products are.
  float total[kFragmentsM][kFragmentsN][4] = {};
  float sums[kFragmentsM][kFragmentsN][4] = {};
  const auto promote = [&](int fragment) {
#pragma unroll
    for (int j = 0; j < kFragmentsN * 4; ++j) {
      float &sum = sums[fragment][j / 4][j % 4], &of_all = total[fragment][j / 4][j % 4];
      const float after = fmaf(sum, split::kLowScale, of_all);
      sum = fmaf(sum, split::kLowScale, of_all - after);  // what was rounded off
      of_all = after;
    }
  };

  wait_for_previous_kernel();
  for (int i = 0; i < kStages - 1; ++i) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) copy_part(quarter);
  }
  wait_copies<1>();
  __syncthreads();
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) load_b(0, 0, quarter);
  load_a(0, 0, 0);
  uint32_t stage = 0;
  const int steps = (k + kBlockK - 1) / kBlockK;
  for (int step = 0; step < steps; ++step) {
    // A turn for the products of each half. Where there are three products, these are the low ones,
    // and two more turns make the high ones.
    constexpr int kTurns = Tile::kIsSplit ? 4 : 2;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int half = turn % 2;
      const bool is_last = turn == kTurns - 1;
      uint32_t next = stage;
      if (is_last) {
        next = stage == kLastStage ? 0 : stage + kStageBytes;
        // The next stage is there, and nobody reads the one before, which is written now.
        wait_copies<kStages - 3>();
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        if (is_last) copy_part(i);
        if (turn == 0 || is_last) load_b(next, 1 - half, i);
        if (turn < 2 && i + 1 < kFragmentsM) load_a(stage, half, i + 1);
        if ((turn == 0 || is_last) && i + 1 == kFragmentsM) load_a(next, 1 - half, 0);
        const auto multiply = [&](float (&sum)[kFragmentsN][4], int part_a, int part_b) {
#pragma unroll
          for (int j = 0; j < kFragmentsN; ++j) {
            multiply_add<T>(sum[j], a[half][i][part_a], b[half][part_b][j], sum[j]);
          }
        };
        if constexpr (!Tile::kIsSplit) {
          multiply(total[i], 0, 0);
        } else if (turn < 2) {
          if (turn == 0) promote(i);
          multiply(sums[i], 0, 1);
          multiply(sums[i], 1, 0);
        } else {
          if (turn == 2) {
#pragma unroll
            for (int j = 0; j < kFragmentsN * 4; ++j) sums[i][j / 4][j % 4] *= 1 / split::kLowScale;
          }
          multiply(sums[i], 0, 0);
        }
      }
      stage = next;
    }
  }

  if constexpr (Tile::kIsSplit) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      promote(i);
#pragma unroll
      for (int j = 0; j < kFragmentsN * 4; ++j) total[i][j / 4][j % 4] *= 1 / split::kLowScale;
    }
  }

  // The sums leave by way of shared memory, in which every warp has its place: in the registers, a
  // thread has columns 2 t and 2 t + 1 of rows g and g + 8 of a fragment, for t = lane % 4 and
  // g = lane / 4. From there it takes eight neighbours of a row.
  wait_copies<0>();
  __syncthreads();
  float* const staged = reinterpret_cast<float*>(shared) + warp * Tile::kStagedFloats;
  constexpr int kRowsApartOut = 32 / kFragmentsN;
  const int staged_row = lane / kFragmentsN, staged_column = lane % kFragmentsN * kTogether;
  const int column = first_n + warp_n + staged_column;
  const Columns<Out> columns(epilogue, weight.exponent, column, n);
#pragma unroll
  for (int turn = 0; turn < kFragmentsM; turn += Tile::kStagedFragments) {
#pragma unroll
    for (int i = 0; i < Tile::kStagedFragments * 2 * kFragmentsN; ++i) {
      const int fragment = i / (2 * kFragmentsN), half = i / kFragmentsN % 2, j = i % kFragmentsN;
      const float* const sum = &total[turn + fragment][j][half * 2];
      const int row = fragment * 16 + half * 8 + lane / 4;
      *reinterpret_cast<float2*>(staged + row * Tile::kPitch + j * 8 + lane % 4 * 2) =
          make_float2(sum[0], sum[1]);
    }
    __syncwarp();
#pragma unroll 1
    for (int row = staged_row; row < Tile::kStagedFragments * 16; row += kRowsApartOut) {
      const int64_t at = first_m + warp_m + turn * 16 + row;
      if (at >= m || column >= n) break;
      const int exponent = std::is_same_v<Out, float> ? x.exponent[at] : 0;
      columns.store(epilogue, staged + row * Tile::kPitch + staged_column, at, exponent);
    }
    __syncwarp();
  }
#endif
}

// Rows of 16-bit elements, padded with zeros to where 16-byte chunks fit: to [rows, padded(k)].
template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    pad_rows_kernel(const Bits* from, int64_t stride, Bits* to, int64_t rows, int64_t k) {
  const int64_t padded_k = split::padded(k);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < padded_k; i += kBlock) {
      to[row * padded_k + i] = i < k ? from[row * stride + i] : Bits{0};
    }
  }
}

// Splits a row a block, the rows of first before those of second.
template <typename Operand>
__global__ void __launch_bounds__(split::kThreads)
    split_rows_kernel(const __grid_constant__ Operand first, const __grid_constant__ Operand second,
                      int64_t k) {
  for (int64_t index = blockIdx.x; index < first.rows + second.rows; index += gridDim.x) {
    const bool is_first = index < first.rows;
    split::split_row(is_first ? first : second, is_first ? index : index - first.rows, k);
  }
}

// The workspace, each part at a multiple of 256 bytes; the weight's come first, so that their
// places do not depend on the rows of x.
struct Workspace {
  // Those of x and of weight: float32's high and low, or in high the padded copy of unaligned rows.
  void* high[2];
  void* low[2];
  int* exponent[2];
  int* state[2];
  size_t bytes;
};

bool is_aligned(const Linear& linear) {
  const auto start =
      reinterpret_cast<uintptr_t>(linear.x) | reinterpret_cast<uintptr_t>(linear.weight);
  return start % 16 == 0 && (linear.k | linear.x_stride | linear.weight_stride) % 8 == 0;
}

Workspace lay_out(const Linear& linear) {
  Workspace workspace{};
  const auto take = [&](size_t bytes) {
    void* taken = static_cast<uint8_t*>(linear.workspace) + workspace.bytes;
    workspace.bytes += (bytes + 255) / 256 * 256;
    return taken;
  };
  const bool split = linear.dtype == DType::kFloat32;
  const bool pads = linear.dtype != DType::kFloat32 && !is_aligned(linear);
  for (const int i : {1, 0}) {
    const size_t rows = i == 0 ? linear.m : linear.n;
    const size_t bytes = rows * split::padded(linear.k) * 2;
    if (split || pads) workspace.high[i] = take(bytes);
    if (!split) continue;
    workspace.low[i] = take(bytes);
    workspace.exponent[i] = static_cast<int*>(take(rows * sizeof(int)));
    workspace.state[i] = static_cast<int*>(take(rows * sizeof(int)));
  }
  return workspace;
}

// Rows of x that are taken at once.
int64_t rows_of_chunk(const Linear& linear) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const bool is_split = linear.dtype == DType::kFloat32 && linear.precision == Precision::kHighest;
  const int64_t columns = is_split ? Tile<3>::kBlockN : Tile<1>::kBlockN;
  const Tiling tiling{kBlockM, (linear.n + columns - 1) / columns, multiprocessors};
  return kernels::rows_of_chunk(
      linear.m, tiling, [&](int64_t rows) { return lay_out(with_rows(linear, rows)).bytes; });
}

template <typename T, typename Out, int kProducts>
int multiply(const Linear& linear, const Matrix<T>& x, const Matrix<T>& weight, int64_t k,
             cudaStream_t stream) {
  using Tile = Tile<kProducts>;
  int device, limit;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  const bool has_room = Tile::kMostStages * Tile::kStageBytes <= limit;
  const auto kernel = has_room ? linear_kernel<T, Out, kProducts, Tile::kMostStages>
                               : linear_kernel<T, Out, kProducts, Tile::kLeastStages>;
  const int bytes = (has_room ? Tile::kMostStages : Tile::kLeastStages) * Tile::kStageBytes;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const int64_t tiles =
      ((linear.m + kBlockM - 1) / kBlockM) * ((linear.n + Tile::kBlockN - 1) / Tile::kBlockN);
  const uintptr_t places = reinterpret_cast<uintptr_t>(linear.out) | linear.n * sizeof(Out) | 16;
  const uint32_t alignment = places & -places;
  const Epilogue<Out> epilogue{
      static_cast<const Out*>(linear.bias), floor_of(linear.relu), Divisor<float>(linear.divisor),
      static_cast<Out*>(linear.out),        linear.mask,           alignment};
  return launch_early(kernel, static_cast<unsigned>(tiles), kBlock, bytes, stream, x, weight,
                      static_cast<int>(linear.m), static_cast<int>(linear.n), static_cast<int>(k),
                      epilogue);
}

// A chunk of a product; the first prepares the weight for all.
template <typename T>
int linear_half(const Linear& linear, bool is_first, cudaStream_t stream) {
  if (is_aligned(linear)) {
    return multiply<T, T, 1>(
        linear, {static_cast<const T*>(linear.x), nullptr, linear.x_stride, nullptr},
        {static_cast<const T*>(linear.weight), nullptr, linear.weight_stride, nullptr}, linear.k,
        stream);
  }
  const Workspace workspace = lay_out(linear);
  const auto pad = [&](const void* from, int64_t stride, void* to, int64_t rows) {
    constexpr int64_t kMaxBlocks = 1 << 16;
    pad_rows_kernel<<<static_cast<unsigned>(rows < kMaxBlocks ? rows : kMaxBlocks), kBlock, 0,
                      stream>>>(static_cast<const uint16_t*>(from), stride,
                                static_cast<uint16_t*>(to), rows, linear.k);
    return static_cast<int>(cudaGetLastError());
  };
  int status = pad(linear.x, linear.x_stride, workspace.high[0], linear.m);
  if (status != cudaSuccess) return status;
  if (is_first) status = pad(linear.weight, linear.weight_stride, workspace.high[1], linear.n);
  if (status != cudaSuccess) return status;
  const int64_t padded_k = split::padded(linear.k);
  return multiply<T, T, 1>(
      linear, {static_cast<const T*>(workspace.high[0]), nullptr, padded_k, nullptr},
      {static_cast<const T*>(workspace.high[1]), nullptr, padded_k, nullptr}, padded_k, stream);
}

template <typename Piece>
int linear_float(const Linear& linear, bool is_first, cudaStream_t stream) {
  const Workspace workspace = lay_out(linear);
  const auto operand = [&](int i, const void* from, int64_t rows, int64_t stride) {
    return split::Operand{static_cast<const float*>(from),
                          rows,
                          stride,
                          /*column_stride=*/1,
                          static_cast<__half*>(workspace.high[i]),
                          static_cast<__half*>(workspace.low[i]),
                          workspace.exponent[i],
                          workspace.state[i],
                          /*is_stepwise=*/false};
  };
  const split::Operand x = operand(0, linear.x, linear.m, linear.x_stride);
  const split::Operand weight = operand(1, linear.weight, linear.n, linear.weight_stride);
  const split::Result result{static_cast<const float*>(linear.bias), floor_of(linear.relu),
                             Divisor<float>(linear.divisor), static_cast<float*>(linear.out),
                             linear.mask};
  constexpr int64_t kMaxBlocks = 1 << 20;
  split::Operand unsplit = weight;
  if (!is_first) unsplit.rows = 0;
  const int64_t rows = x.rows + unsplit.rows;
  split_rows_kernel<<<static_cast<unsigned>(rows < kMaxBlocks ? rows : kMaxBlocks), split::kThreads,
                      0, stream>>>(x, unsplit, linear.k);
  int status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  const int64_t padded_k = split::padded(linear.k);
  const Matrix<__half> pairs_x{x.high, x.low, padded_k, x.exponent};
  const Matrix<__half> pairs_weight{weight.high, weight.low, padded_k, weight.exponent};
  status = multiply<Piece, float, 3>(linear, pairs_x, pairs_weight, padded_k, stream);
  if (status != cudaSuccess) return status;
  return nonfinite::multiply(x, weight, linear.k, result, /*found=*/nullptr, stream);
}

}  // namespace sm80

namespace cuda {

bool linear_sm80_serves(const Linear& linear) {
  int device, major;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    return false;
  }
  const bool dtype = linear.dtype == DType::kFloat16 || linear.dtype == DType::kBFloat16 ||
                     (linear.dtype == DType::kFloat32 && linear.precision == Precision::kHighest);
  constexpr int64_t kMaxSize = INT32_MAX - 1024;  // leaves room behind the last tile and step
  return sm80::is_built() && major >= 8 && dtype && linear.m > 0 && linear.n > 0 && linear.k > 0 &&
         linear.m <= kMaxSize && linear.n <= kMaxSize && linear.k <= kMaxSize &&
         ((linear.m + 127) / 128) * ((linear.n + 127) / 128) <= kMaxSize;
}

size_t linear_sm80_workspace(const Linear& linear) {
  return sm80::lay_out(with_rows(linear, sm80::rows_of_chunk(linear))).bytes;
}

int linear_sm80(const Linear& linear, CUstream_st* stream) {
  const auto launch = [&](const Linear& chunk, bool is_first) -> int {
    // All that a call comes to is a template, which is not compiled where nothing calls it.
    if constexpr (sm80::is_built()) {
      switch (chunk.dtype) {
        case DType::kFloat32:
          return sm80::linear_float<__half>(chunk, is_first, stream);
        case DType::kFloat16:
          return sm80::linear_half<__half>(chunk, is_first, stream);
        case DType::kBFloat16:
          return sm80::linear_half<__nv_bfloat16>(chunk, is_first, stream);
        default:
          break;
      }
    }
    return cudaErrorInvalidValue;
  };
  return for_chunks(linear, sm80::rows_of_chunk(linear), launch);
}

}  // namespace cuda
}  // namespace kernels
