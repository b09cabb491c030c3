// Linear -> ReLU -> divide on Hopper: persistent kernels, in clusters of two blocks that share a
// tile of x. A TMA producer loads, two consumer warpgroups multiply by wgmma.
//
//   x [m, k], weight [n, k], bias [n], out [m, n]; mask [m, (n + 7) / 8]
//
//   float16, bfloat16     gemm_single.cuh: transposed ones too; gradients make [n, m]
//   float32, one product  the same; other warps round the weight to scaled fp16, just ahead of the
//                         product (convert_weight.cuh). Tiles that fp16 does not carry are made
//                         again, TF32
//   float32, three        gemm_fp16x3.cuh: warps split the weight that they multiply
//
// For float32, a kernel before splits x and samples the weight (split_x.cuh; docs/SPLIT.md).

#include <cudaTypedefs.h>

#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/nonfinite.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/choose_tiles.h"
#include "linear/sm90/convert_weight.cuh"
#include "linear/sm90/gemm_fp16x3.cuh"
#include "linear/sm90/gemm_single.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"

namespace kernels::sm90 {

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, ptx::Tf32>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Describes a matrix, or many in a row, to the copy engine, in boxes of box_rows rows of 128 bytes,
// 0 outside of their matrix; stride is in elements. Nothing links against the driver.
template <typename T>
CUtensorMap make_map(const T* matrix, uint64_t rows, uint64_t columns, uint64_t stride,
                     uint32_t box_rows, uint64_t matrices = 0) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &found));
    if (function == nullptr) check(cudaErrorSymbolNotFound);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[] = {columns, rows, matrices};
  const cuuint64_t strides[] = {stride * sizeof(T), rows * stride * sizeof(T)};
  const cuuint32_t box[] = {gemm_single::Config::kKTileBytes / sizeof(T), box_rows, 1},
                   steps[] = {1, 1, 1};
  const CUresult status =
      encode(&map, tensor_map_type<T>(), matrices > 0 ? 3 : 2, const_cast<T*>(matrix), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) check(cudaErrorInvalidValue);
  return map;
}

inline CUtensorMap make_map(const fp16x3::SplitMatrix& matrix, int64_t steps, int box_rows) {
  return make_map(matrix.hi, matrix.rows, fp16x3::kKTileWidth, fp16x3::kKTileWidth, box_rows,
                  steps);
}

template <typename Kernel>
int count_clusters(Kernel* kernel, size_t bytes) {
  return kernels::count_clusters(kernel,
                                 {kClusterSize, kThreads, bytes, nullptr, /*has_pdl=*/false});
}

inline TileOrder product_tiles(const LinearArguments& linear) {
  return {blocks_of(linear.m, gemm_single::Config::kXRows),
          blocks_of(linear.n, gemm_single::Config::kWeightRows * kClusterSize)};
}

// For float32: counters, which are 0 at first, the split x, and what the weight becomes.
struct Workspace {
  fp16x3::SplitMatrix x, weight;
  size_t zeros, bytes;
  // Three products.
  unsigned *has_overflowed, *has_nonfinite;
  PartialSums partials;  // the second run's counts follow the first's
  // One product: the rounded weight, tiles to be made again, and a copy of a transposed weight.
  gemm_single::WeightConversion conversion{};
  gemm_single::RedoList redo;
  Transposition weight_copy{};

  explicit Workspace(const LinearArguments& linear)
      : x{static_cast<const float*>(linear.x), linear.m, linear.x_stride},
        weight{static_cast<const float*>(linear.weight), linear.n, linear.weight_stride} {
    WorkspaceSlices slices(linear.workspace);
    const bool has_lo = linear.precision == Precision::kHighest;
    const int64_t padded_k = fp16x3::padded(linear.k), steps = padded_k / fp16x3::kKTileWidth;
    const TileOrder tiles = product_tiles(linear);
    if (has_lo) {
      partials.counts = slices.add<PartialSums::Counts>(2 * StreamKConfig::kMaxClusters);
      has_overflowed = slices.add<unsigned>(2);
      has_nonfinite = has_overflowed + 1;
    } else {
      conversion.k_tiles = static_cast<int>(steps);
      conversion.next = slices.add<unsigned>(1);
      conversion.ready = slices.add<unsigned>(tiles.weight_tiles * kClusterSize * steps);
      conversion.subnormals = slices.add<unsigned>(linear.n);
      redo.count = slices.add<unsigned>(1 + tiles.count());
      redo.is_listed = redo.count + 1;
    }
    zeros = slices.bytes();
    x.is_k_tiled = weight.is_k_tiled = true;
    x.hi = slices.add<__half>((has_lo ? 2 : 1) * x.rows * padded_k);
    for (fp16x3::SplitMatrix* matrix : {&x, &weight}) {
      matrix->exponent = slices.add<int>(matrix->rows);
      if (has_lo) matrix->state = slices.add<int>(matrix->rows);
    }
    if (has_lo) {
      x.lo = x.hi + fp16x3::kKTileWidth / 2;
      partials.sums = slices.add<PartialSums::Sums>(StreamKConfig::kMaxClusters);
    } else {
      weight.hi = slices.add<__half>(weight.rows * padded_k);
      redo.tiles = slices.add<int>(tiles.count());
      conversion.weight = weight;
    }
    if (linear.weight_is_transposed) {
      float* const to = slices.add<float>(weight.rows * padded_k);
      weight_copy = {weight.from, weight.row_stride, to, padded_k, weight.rows, linear.k};
    }
    bytes = slices.bytes();
  }
};

// Splits x, samples the weight, and clears the counters.
void prepare(const LinearArguments& linear, const Workspace& workspace, cudaStream_t stream) {
  const int threads = fp16x3::threads_of_row(linear.k);
  const bool is_short = linear.k <= fp16x3::SplitConfig::kKeptByWarp;
  const int sampling = blocks_of(linear.n, threads / 32 * SampleConfig::kRows);
  const int blocks = sampling + blocks_of(linear.m, is_short ? threads / 32 : 1);
  launch_grid({blocks, threads, 0, stream, /*has_pdl=*/true}, split_x_kernel, workspace.x,
              workspace.weight, linear.weight_is_transposed, linear.k, sampling,
              is_short ? fp16x3::Splitter::kWarp : fp16x3::Splitter::kBlock,
              static_cast<unsigned*>(linear.workspace),
              static_cast<int64_t>(workspace.zeros / sizeof(unsigned)));
}

template <typename Kind>
gemm_single::Arguments<Kind> make_product(const LinearArguments& linear, int64_t together) {
  return {Epilogue<typename Kind::Out>(linear, together), static_cast<int>(linear.k),
          product_tiles(linear), linear.x_is_transposed, linear.weight_is_transposed};
}

template <typename Kind>
void launch_product(const gemm_single::Arguments<Kind>& product, int clusters, const CUtensorMap& x,
                    const CUtensorMap& weight, const CUtensorMap& out, cudaStream_t stream) {
  launch_grid({clusters * kClusterSize, kThreads, sizeof(gemm_single::SharedMemory<Kind>), stream,
               /*has_pdl=*/true},
              gemm_single::gemm_single_kernel<Kind>, x, weight, out, product);
}

// The same of operands as they lie in memory.
template <typename Kind>
void launch_product(const gemm_single::Arguments<Kind>& product, int clusters,
                    const LinearArguments& linear, cudaStream_t stream) {
  const auto make = [&](const void* operand, int64_t rows, int64_t stride, bool is_transposed) {
    const auto matrix = static_cast<const typename Kind::Element*>(operand);
    if (is_transposed) return make_map(matrix, linear.k, rows, stride, fp16x3::kKTileWidth);
    return make_map(matrix, rows, linear.k, stride, gemm_single::Config::kBoxRows);
  };
  CUtensorMap out{};
  if constexpr (Kind::kIsGradient) {
    out = make_map(static_cast<typename Kind::Out*>(linear.out), linear.n, linear.m, linear.m,
                   gemm_single::Config::kWarpFeatures);
  }
  launch_product(product, clusters,
                 make(linear.x, linear.m, linear.x_stride, linear.x_is_transposed),
                 make(linear.weight, linear.n, linear.weight_stride, linear.weight_is_transposed),
                 out, stream);
}

template <typename Kind>
void launch_half(const LinearArguments& linear, cudaStream_t stream) {
  const int64_t together = linear.mask != nullptr ? gemm_single::Config::kWarpgroupFeatures
                                                  : 16 / sizeof(typename Kind::Out);
  auto product = make_product<Kind>(linear, together);
  product.epilogue.is_fast &= linear.relu;  // or else the results are staged
  // As few clusters as the waves need: 0.3% less time on an H200 than with all.
  const int clusters = count_clusters(gemm_single::gemm_single_kernel<Kind>,
                                      sizeof(gemm_single::SharedMemory<Kind>));
  const int tiles = product.tiles.count(), waves = blocks_of(tiles, clusters);
  launch_product(product, blocks_of(tiles, waves), linear, stream);
}

void launch_converted(const LinearArguments& linear, cudaStream_t stream) {
  const Workspace workspace(linear);
  prepare(linear, workspace, stream);
  const int64_t together = linear.mask != nullptr ? 8 : 4;
  auto product = make_product<gemm_single::ConvertTraits>(linear, together);
  const int tiles = product.tiles.count();
  const int most = count_clusters(gemm_single::gemm_single_kernel<gemm_single::ConvertTraits>,
                                  sizeof(gemm_single::SharedMemory<gemm_single::ConvertTraits>));
  const int clusters = std::min(most, tiles);
  product.redo = workspace.redo;
  product.conversion = workspace.conversion;
  product.conversion.x_tiles_at_once = std::min(product.tiles.x_tiles, TileOrder::kBand);
  product.conversion.weight_tiles_at_once = blocks_of(clusters, product.conversion.x_tiles_at_once);
  product.x_exponent = workspace.x.exponent;
  const int64_t steps = product.conversion.k_tiles;
  launch_product(
      product, clusters, make_map(workspace.x, steps, gemm_single::Config::kXRowsPerBlock),
      make_map(workspace.weight, steps, gemm_single::Config::kWeightRows), CUtensorMap{}, stream);

  // The tiles that fp16 does not carry. TF32 is not read transposed.
  LinearArguments again = linear;
  if (linear.weight_is_transposed) {
    const Transposition& copy = workspace.weight_copy;
    check(static_cast<cudaError_t>(cuda::transpose(copy, workspace.redo.count, stream)));
    again.weight = copy.to, again.weight_stride = copy.to_stride;
    again.weight_is_transposed = false;
  }
  auto redo = make_product<gemm_single::RedoTraits>(again, together);
  redo.redo = workspace.redo;
  const int most_again = count_clusters(gemm_single::gemm_single_kernel<gemm_single::RedoTraits>,
                                        sizeof(gemm_single::SharedMemory<gemm_single::RedoTraits>));
  launch_product(redo, std::min(most_again, tiles), again, stream);
}

void launch_fp16x3(const LinearArguments& linear, cudaStream_t stream) {
  using S = GemmFp16x3Config;
  const Workspace workspace(linear);
  const fp16x3::SplitMatrix &x = workspace.x, &weight = workspace.weight;
  const int k = static_cast<int>(linear.k);
  prepare(linear, workspace, stream);
  const auto kernel = k < S::kShortK  ? gemm_fp16x3_kernel<32>
                      : k < S::kLongK ? gemm_fp16x3_kernel<64>
                                   : gemm_fp16x3_kernel<128>;
  int clusters = std::min(count_clusters(kernel, sizeof(GemmMemory)), StreamKConfig::kMaxClusters);
  const GemmTiles tiles = choose_tiles(linear.m, linear.n, k, clusters);
  GemmArguments problem{Epilogue<float>(linear, 2), x,    weight, k, workspace.has_overflowed,
                        workspace.has_nonfinite,
                        /*is_second_run=*/false,    tiles};
  problem.partials = workspace.partials;
  const auto rows_of = [&](int tile) { return tiles.rows_of(tiles.find(tile)).size; };
  clusters =
      problem.schedule.plan(tiles.count(), S::k_groups(k), clusters, tiles.max_rows(), rows_of);
  const CUtensorMap x_map =
      make_map(x, fp16x3::padded(k) / S::kKTile, tiles.max_rows() / kClusterSize);
  const CUtensorMap weight_map =
      make_map(weight.from, linear.n, k, weight.row_stride, S::kWeightRows);
  for (const bool is_second_run : {false, true}) {
    problem.is_second_run = is_second_run;
    if (is_second_run) problem.partials.counts += StreamKConfig::kMaxClusters;
    launch_grid({clusters * kClusterSize, kThreads, sizeof(GemmMemory), stream, /*has_pdl=*/true},
                kernel, x_map, weight_map, problem);
  }
  nonfinite::launch(x, weight, k, problem.epilogue, problem.has_nonfinite, stream,
                    /*has_pdl=*/true);
}

template <typename T>
void launch_half_of(const LinearArguments& linear, cudaStream_t stream) {
  // A gradient's rows are operand A, for they have zeros: 2% of an H200's time, through power.
  const bool has_epilogue = linear.relu || linear.bias != nullptr || linear.divisor != 1;
  if (!has_epilogue && linear.n % 8 == 0) {
    LinearArguments transposed = linear;  // weight x^T
    std::swap(transposed.x, transposed.weight);
    std::swap(transposed.x_stride, transposed.weight_stride);
    std::swap(transposed.x_is_transposed, transposed.weight_is_transposed);
    std::swap(transposed.m, transposed.n);
    return launch_half<gemm_single::GradientTraits<T>>(transposed, stream);
  }
  launch_half<gemm_single::HalfTraits<T>>(linear, stream);
}

void launch_chunk(const LinearArguments& linear, cudaStream_t stream) {
  if (linear.dtype == DType::kFloat16) return launch_half_of<__half>(linear, stream);
  if (linear.dtype == DType::kBFloat16) return launch_half_of<__nv_bfloat16>(linear, stream);
  if (linear.precision == Precision::kHighest) return launch_fp16x3(linear, stream);
  launch_converted(linear, stream);
}

int64_t rows_of_chunk(const LinearArguments& linear) {
  if (linear.dtype != DType::kFloat32) return linear.m;
  // Clusters share the last tiles of three products; those of one product make whole tiles.
  Tiling tiling{GemmFp16x3Config::kWideRows, 1, 1};
  if (linear.precision == Precision::kHigh) {
    const int clusters = device_attribute(cudaDevAttrMultiProcessorCount) / kClusterSize;
    tiling = {gemm_single::Config::kXRows, product_tiles(linear).weight_tiles,
              std::max(clusters, 1)};
  }
  // The copy of a transposed weight is in the workspace and not in its limit, as other copies are.
  return kernels::rows_of_chunk(linear.m, tiling, [&](int64_t rows) {
    LinearArguments chunk = with_rows(linear, rows);
    chunk.weight_is_transposed = false;
    return Workspace(chunk).bytes;
  });
}

}  // namespace kernels::sm90

namespace kernels::cuda {

// The copy engine reads rows that begin at multiples of 16 bytes. Three products split x first.
bool linear_sm90_supports(const LinearArguments& linear) {
  if (linear.dtype == DType::kFloat64) return false;
  const bool is_float32 = linear.dtype == DType::kFloat32;
  const bool is_fp16x3 = is_float32 && linear.precision == Precision::kHighest;
  if (is_float32 && linear.x_is_transposed) return false;
  if (is_fp16x3 && linear.weight_is_transposed) return false;
  const int64_t size = is_float32 ? 4 : 2;
  constexpr int64_t kMost = int64_t{1} << 30;
  return (is_fp16x3 || has_aligned_rows(linear.x, size * linear.x_stride)) &&
         has_aligned_rows(linear.weight, size * linear.weight_stride) && linear.m < kMost &&
         linear.n < kMost && linear.k < (is_float32 ? sm90::kMaxK : kMost);
}

size_t linear_sm90_workspace(const LinearArguments& linear) {
  if (linear.dtype != DType::kFloat32) return 0;
  return sm90::Workspace(with_rows(linear, sm90::rows_of_chunk(linear))).bytes;
}

int linear_sm90(const LinearArguments& linear, CUstream_st* stream) {
  return status_of([&] {
    for_chunks(linear, sm90::rows_of_chunk(linear),
               [&](const LinearArguments& chunk, bool) { sm90::launch_chunk(chunk, stream); });
  });
}

}  // namespace kernels::cuda
