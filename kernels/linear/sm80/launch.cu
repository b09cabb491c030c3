// Linear -> ReLU -> divide in float32 at `highest`, on GPUs from sm_80 on: both operands are split
// into pairs of fp16 (linear/fp16x3/split.cuh), multiplied (gemm_fp16x3.cuh), and results that
// infinity or NaN decides are made again (linear/fp16x3/nonfinite.cuh).
//
//   x [m, k], weight [n, k], bias [n], out [m, n] float32; mask [m, (n + 7) / 8]

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/nonfinite.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm80/gemm_fp16x3.cuh"

namespace kernels::sm80 {

// Whether a build has these kernels, which cost nvcc 1 of 9 s: if choose_path chooses them on one
// of its GPUs. Tests, which run them on every GPU, define KERNELS_ALL_PATHS.
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

// A row a block, first's before second's. Templates are not compiled where is_built is false.
template <typename Matrix>
__global__ void __launch_bounds__(fp16x3::SplitConfig::kThreads)
    split_rows_kernel(const __grid_constant__ Matrix first, const __grid_constant__ Matrix second,
                      int64_t k) {
  for (int64_t index = blockIdx.x; index < first.rows + second.rows; index += gridDim.x) {
    const bool is_first = index < first.rows;
    fp16x3::split_row(is_first ? first : second, is_first ? index : index - first.rows, k,
                      fp16x3::Splitter::kBlock, /*has_lo=*/true);
    __syncthreads();  // all have read what the next row overwrites in shared memory
  }
}

// The weight's slices come first: their places do not depend on the rows of x.
struct Workspace {
  fp16x3::SplitMatrix weight, x;
  size_t bytes;

  explicit Workspace(const LinearArguments& linear) {
    WorkspaceSlices slices(linear.workspace);
    const auto add = [&](const void* from, int64_t rows, int64_t stride) {
      fp16x3::SplitMatrix matrix{static_cast<const float*>(from), rows, stride};
      const int64_t size = rows * fp16x3::padded(linear.k);
      matrix.hi = slices.add<__half>(size);
      matrix.lo = slices.add<__half>(size);
      matrix.exponent = slices.add<int>(rows);
      matrix.state = slices.add<int>(rows);
      return matrix;
    };
    weight = add(linear.weight, linear.n, linear.weight_stride);
    x = add(linear.x, linear.m, linear.x_stride);
    bytes = slices.bytes();
  }
};

int64_t rows_of_chunk(const LinearArguments& linear) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const Tiling tiling{GemmFp16x3Config::kBlockM, divide_up(linear.n, GemmFp16x3Config::kBlockN), std::max(multiprocessors, 1)};
  return kernels::rows_of_chunk(
      linear.m, tiling, [&](int64_t rows) { return Workspace(with_rows(linear, rows)).bytes; });
}

// A chunk of a product; the first splits the weight for all.
template <typename Matrix>
void launch_chunk(const LinearArguments& linear, bool is_first, cudaStream_t stream) {
  const Workspace workspace(linear);
  const Matrix &x = workspace.x, &weight = workspace.weight;
  const Epilogue<float> epilogue(linear);

  // split
  Matrix unsplit = weight;
  if (!is_first) unsplit.rows = 0;
  constexpr int64_t kMaxBlocks = 1 << 20;
  const int rows = static_cast<int>(std::min(x.rows + unsplit.rows, kMaxBlocks));
  launch_grid({rows, fp16x3::SplitConfig::kThreads, 0, stream, /*has_pdl=*/false}, split_rows_kernel<Matrix>, x,
              unsplit, linear.k);

  // multiply
  const auto kernel = gemm_fp16x3_kernel<Matrix>;
  allow_shared_memory(kernel, GemmFp16x3Config::kSharedBytes);
  const TileOrder tiles{blocks_of(linear.m, GemmFp16x3Config::kBlockM), blocks_of(linear.n, GemmFp16x3Config::kBlockN)};
  const int k = static_cast<int>(fp16x3::padded(linear.k));
  launch_grid({tiles.count(), GemmFp16x3Config::kThreads, GemmFp16x3Config::kSharedBytes, stream, /*has_pdl=*/false}, kernel, x, weight, k,
              tiles, epilogue);
  nonfinite::launch(x, weight, linear.k, epilogue, /*has_nonfinite=*/nullptr, stream,
                    /*has_pdl=*/false);
}

}  // namespace kernels::sm80

namespace kernels::cuda {

bool linear_sm80_supports(const LinearArguments& linear) {
  constexpr int64_t kMaxSize = INT32_MAX - 1024;  // the last tile and step fit, too
  return sm80::is_built() && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8 &&
         device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= sm80::GemmFp16x3Config::kSharedBytes &&
         linear.dtype == DType::kFloat32 && linear.precision == Precision::kHighest &&
         linear.m <= kMaxSize && linear.n <= kMaxSize && linear.k <= kMaxSize &&
         divide_up(linear.m, sm80::GemmFp16x3Config::kBlockM) * divide_up(linear.n, sm80::GemmFp16x3Config::kBlockN) <= kMaxSize;
}

size_t linear_sm80_workspace(const LinearArguments& linear) {
  return sm80::Workspace(with_rows(linear, sm80::rows_of_chunk(linear))).bytes;
}

int linear_sm80(const LinearArguments& linear, CUstream_st* stream) {
  return status_of([&] {
    for_chunks(linear, sm80::rows_of_chunk(linear),
               [&](const LinearArguments& chunk, bool is_first) {
                 if constexpr (sm80::is_built()) {
                   sm80::launch_chunk<fp16x3::SplitMatrix>(chunk, is_first, stream);
                 }
               });
  });
}

}  // namespace kernels::cuda
