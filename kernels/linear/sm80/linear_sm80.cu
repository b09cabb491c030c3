// Linear -> ReLU -> divide in float32 at `highest`, on sm_80 and newer GPUs whose blocks can have
// 128 KiB of shared memory (Sm80Config).
//
// Three kernels, for each chunk of rows of x (chunks.h):
//
//   split_rows_kernel         splits x and, for the first chunk, the weight into hi and lo
//                             (split/split_row.cuh)
//   gemm_fp16x3_sm80_kernel   multiplies, with the epilogue (gemm_fp16x3/kernel.cuh)
//   nonfinite_kernel          computes the results of rows that hold infinity or NaN
//                             (split/nonfinite.cuh)

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/sm80/gemm_fp16x3/kernel.cuh"
#include "linear/split/nonfinite.cuh"
#include "linear/split/split.cuh"
#include "linear/split/split_row.cuh"

namespace kernels::sm80 {

using gemm_fp16x3::Sm80Config;

// Returns whether this build contains the kernels below. They also run on newer GPUs, but
// choose_path chooses them on capability 8.0 alone, so builds for other GPUs omit them, which saves
// compile time. For that, the kernels and launch_chunk are templates: nvcc compiles templates only
// where they are used. nvcc lists the architectures of a build in __CUDA_ARCH_LIST__, 800 for
// capability 8.0. Tests define KERNELS_ALL_PATHS, which puts the kernels into every build.
constexpr bool is_built() {
#ifdef KERNELS_ALL_PATHS
  return true;
#else
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture == 800) return true;
  }
  return false;
#endif
}

struct SplitRowsConfig {
  static constexpr int kThreads = split::SplitConfig::kThreads;
  static constexpr int64_t kMaxBlocks = 1 << 20;  // blocks of larger matrices split several rows
};

// Splits the rows of two matrices with the same k: those of `first`, then those of `second`. A
// block splits one row at a time. Matrix is always split::ScaledMatrix.
template <typename Matrix>
__global__ void __launch_bounds__(SplitRowsConfig::kThreads)
    split_rows_kernel(const __grid_constant__ Matrix first, const __grid_constant__ Matrix second,
                      int64_t k) {
  for (int64_t index = blockIdx.x; index < first.rows + second.rows; index += gridDim.x) {
    const bool is_of_first = index < first.rows;
    const Matrix& matrix = is_of_first ? first : second;
    const int64_t row = is_of_first ? index : index - first.rows;
    split::split_row(matrix, split::Form::kWithLo, row, k, split::Splitter::kBlock);
    __syncthreads();  // all threads have read the shared memory that the next row overwrites
  }
}

// The workspace of a chunk, which split_rows_kernel writes:
//
//   slice             type   shape
//   weight.hi, .lo    half   [n, padded k] each
//   weight.exponent   int    [n]
//   weight.row_state  int    [n]
//   x.hi, .lo         half   [m, padded k] each
//   x.exponent        int    [m]
//   x.row_state       int    [m]
//
// The weight comes first, so its place does not depend on m: all chunks find the weight that the
// first chunk has split.
struct Sm80Workspace {
  split::ScaledMatrix weight;
  split::ScaledMatrix x;
  size_t bytes;

  explicit Sm80Workspace(const LinearArguments& call) {
    WorkspaceSlices slices(call.workspace);
    weight = add_matrix(&slices, call.weight, call.n, call.weight_stride, call.k);
    x = add_matrix(&slices, call.x, call.m, call.x_stride, call.k);
    bytes = slices.bytes();
  }

 private:
  static split::ScaledMatrix add_matrix(WorkspaceSlices* slices, const void* source, int64_t rows,
                                        int64_t stride, int64_t k) {
    split::ScaledMatrix matrix{};
    matrix.source = static_cast<const float*>(source);
    matrix.rows = rows;
    matrix.row_stride = stride;
    matrix.hi = slices->add<__half>(rows * split::padded(k));
    matrix.lo = slices->add<__half>(rows * split::padded(k));
    matrix.exponent = slices->add<int>(rows);
    matrix.row_state = slices->add<int>(rows);
    return matrix;
  }
};

size_t workspace_bytes(LinearArguments call, int64_t rows) {
  call.m = rows;
  call.workspace = nullptr;  // measures only
  return Sm80Workspace(call).bytes;
}

int64_t rows_of_chunk(const LinearArguments& call) {
  TileGrid grid{};
  grid.rows_of_tile = Sm80Config::kTileRows;
  grid.weight_tiles = divide_up(call.n, Sm80Config::kTileColumns);
  // A multiprocessor runs one block at a time. Without a device the attribute is 0.
  grid.tiles_of_wave = std::max(device_attribute(cudaDevAttrMultiProcessorCount), 1);
  return choose_rows_of_chunk(call.m, grid,
                              [&](int64_t rows) { return workspace_bytes(call, rows); });
}

template <typename Matrix>
void launch_chunk(const LinearArguments& call, bool is_first, cudaStream_t stream) {
  const Sm80Workspace workspace(call);
  const Matrix& x = workspace.x;
  const Matrix& weight = workspace.weight;
  const Epilogue<float> epilogue(call);

  Matrix weight_to_split = weight;
  if (!is_first) weight_to_split.rows = 0;  // the first chunk has split it
  const int64_t rows = x.rows + weight_to_split.rows;
  Grid split_grid{};
  split_grid.blocks = static_cast<int>(std::min(rows, SplitRowsConfig::kMaxBlocks));
  split_grid.threads = SplitRowsConfig::kThreads;
  split_grid.stream = stream;
  launch_or_throw(split_grid, split_rows_kernel<Matrix>, x, weight_to_split, call.k);

  const auto gemm = gemm_fp16x3::gemm_fp16x3_sm80_kernel<Matrix>;
  allow_shared_memory(gemm, Sm80Config::kSharedBytes);
  const TileOrder tiles{divide_up_to_int(call.m, Sm80Config::kTileRows),
                        divide_up_to_int(call.n, Sm80Config::kTileColumns)};
  const int padded_k = static_cast<int>(split::padded(call.k));
  Grid gemm_grid{};
  gemm_grid.blocks = tiles.count();
  gemm_grid.threads = Sm80Config::kThreads;
  gemm_grid.shared_bytes = Sm80Config::kSharedBytes;
  gemm_grid.stream = stream;
  launch_or_throw(gemm_grid, gemm, x, weight, padded_k, tiles, epilogue);

  // No flag tells the kernel whether there are rows with infinity or NaN.
  nonfinite::launch(x, weight, call.k, epilogue, /*has_nonfinite=*/nullptr, stream,
                    /*has_pdl=*/false);
}

}  // namespace kernels::sm80

namespace kernels::cuda {

using sm80::Sm80Config;

bool linear_sm80_supports(const LinearArguments& call) {
  // Indices are ints in the kernels. The last tile and k-tile may end past m, n and k.
  constexpr int64_t kMaxSize = INT32_MAX - 1024;
  const bool has_gpu =
      device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8 &&
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= Sm80Config::kSharedBytes;
  const bool is_highest = call.dtype == DType::kFloat32 && call.precision == Precision::kHighest;
  const bool has_sizes =
      call.m <= kMaxSize && call.n <= kMaxSize && call.k <= kMaxSize &&
      divide_up(call.m, Sm80Config::kTileRows) * divide_up(call.n, Sm80Config::kTileColumns) <=
          kMaxSize;
  return sm80::is_built() && has_gpu && is_highest && has_sizes;
}

size_t linear_sm80_workspace_bytes(const LinearArguments& call) {
  return sm80::workspace_bytes(call, sm80::rows_of_chunk(call));
}

int linear_sm80(const LinearArguments& call, CUstream_st* stream) {
  return status_of([&] {
    for_each_chunk(call, sm80::rows_of_chunk(call),
                   [&](const LinearArguments& chunk, bool is_first) {
                     if constexpr (sm80::is_built()) {
                       sm80::launch_chunk<split::ScaledMatrix>(chunk, is_first, stream);
                     }
                   });
  });
}

}  // namespace kernels::cuda
