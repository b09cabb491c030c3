// Linear -> ReLU -> divide on Hopper: TMA, wgmma, and the whole epilogue on the accumulators.
//
// All kernels are persistent, in clusters of two blocks that share what one of the operands has in
// common: a warp brings the data, two warpgroups multiply.
//
//   float16, bfloat16    one_product.cuh: multiplied as they are, transposed ones too
//   float32, one product the same; the weight is rounded to scaled fp16 by other warps of the same
//                        kernel, just ahead of the product (convert.cuh). Tiles that
//                        fp16 does not carry are made again by the same kernel from TF32
//   float32, three       three_products.cuh: the weight is split into pairs of fp16 in the
//                        registers of the warps that multiply it
//
// x in float32 is split by a kernel before, which samples the weight too (prepare.cuh).
// SPLIT.md has the arithmetic.
//
// Slower on an H200 at [1024, 8192] x [8192, 8192]: clusters of one (3%) and of four
// (24%); float32 weights straight from L2 to registers (a load's result is waited for before the
// products that should hide it); promoted sums in shared memory, which leaves too few stages;
// barriers whose release and acquire are of the cluster's scope (33%). For three products, both
// operands from shared memory, even with the weight's conversion left out (1%). For one, the weight
// converted in registers, once for each tile of x (9%).

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/common.cuh"
#include "linear/sm90/convert.cuh"
#include "linear/sm90/one_product.cuh"
#include "linear/sm90/prepare.cuh"
#include "linear/sm90/three_products.cuh"
#include "linear/split/nonfinite.cuh"
#include "linear/split/pieces.cuh"

namespace kernels {
namespace sm90 {

// cuTensorMapEncodeTiled, found at run time so that nothing links against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encoder);
}

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, ptx::Tf32>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Describes a matrix to the copy engine, or many of them, one behind the other, in boxes of
// box_rows rows of 128 bytes. A box is 0 outside of its matrix. stride is in elements.
template <typename T>
int make_map(CUtensorMap* map, const T* matrix, int64_t rows, int64_t columns, int64_t stride,
             int box_rows, int64_t matrices = 0) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * sizeof(T),
                                static_cast<cuuint64_t>(rows * stride) * sizeof(T)};
  const cuuint32_t box[] = {kRowBytes / sizeof(T), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult status =
      encode(map, tensor_map_type<T>(), matrices > 0 ? 3 : 2, const_cast<T*>(matrix), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

constexpr int blocks_of(int64_t size, int64_t block) {
  return static_cast<int>((size + block - 1) / block);
}

// How many clusters of a kernel run at once: not all multiprocessors need be where clusters of this
// size can be.
template <typename... Parameters>
int count_clusters(void (*kernel)(Parameters...), int threads, size_t bytes, int* clusters) {
  int device, multiprocessors;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(bytes));
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors / kClusterSize * kClusterSize;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  status = cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
  return status == cudaSuccess && *clusters == 0 ? cudaErrorInvalidConfiguration : status;
}

// A persistent grid. An early start lets a kernel set itself up while the one before it ends; it
// waits for that one itself.
template <typename... Parameters>
int launch(void (*kernel)(Parameters...), int clusters, int threads, size_t bytes,
           bool starts_early, cudaStream_t stream, const Parameters&... parameters) {
  cudaLaunchConfig_t config = {};
  config.gridDim = clusters * kClusterSize;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

// together: elements that are stored at once.
template <typename T>
Output<T> output_of(const Linear& linear, int64_t together) {
  const Divisor<float> divisor(linear.divisor);
  // Where sums and bias are scaled one by one, nothing may overflow; what becomes subnormal does so
  // in the result too.
  const bool is_direct = linear.n % together == 0 && divisor.is_exact && divisor.scale <= 1 &&
                         divisor.scale >= 0x1p-32f;
  return {static_cast<const T*>(linear.bias),
          static_cast<T*>(linear.out),
          linear.mask,
          static_cast<int>(linear.m),
          static_cast<int>(linear.n),
          floor_of(linear.relu),
          divisor,
          nullptr,
          nullptr,
          is_direct};
}

// The same of what an operand was split into.
inline int make_map(CUtensorMap* map, const split::Operand& stepwise, int64_t steps, int box_rows) {
  return make_map(map, stepwise.high, stepwise.rows, split::kStepwise, split::kStepwise, box_rows,
                  steps);
}

// A product of tiles of 128 x 256, by `clusters` that run at once.
template <typename Kind>
int launch_product(const Problem<Kind>& problem, int clusters, const CUtensorMap& x_map,
                   const CUtensorMap& weight_map, cudaStream_t stream) {
  constexpr bool kStartsEarly = Kind::kConverts || Kind::kIsAgain || Kind::kIsGeneral;
  return launch(product_kernel<Kind>, clusters, kThreads, sizeof(Memory<Kind>), kStartsEarly,
                stream, x_map, weight_map, problem);
}

inline Tiles product_tiles(const Linear& linear) {
  return {blocks_of(linear.m, kXRows), blocks_of(linear.n, kWeightRows * kClusterSize)};
}

template <typename Kind>
int half_linear(const Linear& linear, cudaStream_t stream) {
  using T = typename Kind::Operand;
  int clusters;
  int status = count_clusters(product_kernel<Kind>, kThreads, sizeof(Memory<Kind>), &clusters);
  if (status != cudaSuccess) return status;
  const bool has_mask = linear.mask != nullptr;
  const Problem<Kind> problem{output_of<T>(linear, has_mask ? kFeatures : 16 / sizeof(T)),
                              static_cast<int>(linear.k),
                              product_tiles(linear),
                              {},
                              {},
                              linear.x_is_transposed,
                              linear.weight_is_transposed};
  const auto make = [&](CUtensorMap* map, const void* operand, int64_t rows, int64_t stride,
                        bool is_transposed, int box_rows) {
    const T* const matrix = static_cast<const T*>(operand);
    return is_transposed ? make_map(map, matrix, linear.k, rows, stride, kStepK)
                         : make_map(map, matrix, rows, linear.k, stride, box_rows);
  };
  CUtensorMap x_map, weight_map;
  status = make(&x_map, linear.x, linear.m, linear.x_stride, linear.x_is_transposed,
                Kind::kIsGeneral ? kBoxRows : kXShare);
  if (status != cudaSuccess) return status;
  status = make(&weight_map, linear.weight, linear.n, linear.weight_stride,
                linear.weight_is_transposed, Kind::kIsGeneral ? kBoxRows : kWeightRows);
  if (status != cudaSuccess) return status;
  // As many as it takes for the same number of rounds: 0.3% less time on an H200 than all it has.
  const int tiles = problem.tiles.count(), rounds = blocks_of(tiles, clusters);
  return launch_product(problem, blocks_of(tiles, rounds), x_map, weight_map, stream);
}

// The parts of a workspace, each aligned to 256 bytes. The first `zeros` bytes are 0 at first.
struct Workspace {
  size_t next, ready, smalls, marks, left_by, found, zeros;
  size_t x_exponent, x_state, weight_exponent, weight_state;
  size_t again, x, weight, left, bytes;

  explicit Workspace(const Linear& linear) {
    size_t end = 0;
    const auto take = [&](size_t bytes) {
      const size_t begin = end;
      end += (bytes + 255) / 256 * 256;
      return begin;
    };
    const bool rounds = linear.precision == Precision::kHigh;
    const int64_t padded_k = split::padded(linear.k);
    next = take(rounds ? sizeof(unsigned) : 0);
    const int64_t shares = blocks_of(linear.n, kShareRows * kClusterSize) * kClusterSize;
    ready = take(rounds ? shares * (padded_k / kStepK) * sizeof(unsigned) : 0);
    smalls = take(rounds ? linear.n * sizeof(unsigned) : 0);
    const int64_t tiles = rounds ? product_tiles(linear).count() : 0;
    marks = take(rounds ? (1 + tiles) * sizeof(unsigned) : 0);  // behind their number
    const int64_t clusters = rounds ? 0 : Schedule::kMostClusters;
    left_by = take(2 * clusters * sizeof(*SplitProblem::left_by));  // of both runs
    found = take(rounds ? 0 : 2 * sizeof(unsigned));
    zeros = end;
    x_exponent = take(linear.m * sizeof(int));
    x_state = take(rounds ? 0 : linear.m * sizeof(int));
    weight_exponent = take(linear.n * sizeof(int));
    weight_state = take(rounds ? 0 : linear.n * sizeof(int));
    again = take(tiles * sizeof(int));
    x = take((rounds ? 1 : 2) * linear.m * padded_k * sizeof(__half));
    weight = take(rounds ? linear.n * padded_k * sizeof(__half) : 0);
    left = take(clusters * sizeof(*SplitProblem::left));
    bytes = end;
  }
};

// The operands of both kernels for float32.
struct Operands {
  split::Operand x, weight;
  unsigned *next, *ready, *smalls, *found;
  TileList again;
  decltype(SplitProblem::left) left;
  decltype(SplitProblem::left_by) left_by;
  int64_t zeros;  // from next on

  explicit Operands(const Linear& linear) {
    const Workspace at(linear);
    char* const workspace = static_cast<char*>(linear.workspace);
    const auto operand = [&](const void* from, int64_t rows, int64_t stride, size_t to,
                             size_t exponent, size_t state) {
      const bool is_pair = linear.precision == Precision::kHighest;
      __half* const high = reinterpret_cast<__half*>(workspace + to);
      return split::Operand{static_cast<const float*>(from),
                            rows,
                            stride,
                            1,
                            high,
                            is_pair ? high + split::kStepwise / 2 : nullptr,
                            reinterpret_cast<int*>(workspace + exponent),
                            reinterpret_cast<int*>(workspace + state),
                            true};
    };
    x = operand(linear.x, linear.m, linear.x_stride, at.x, at.x_exponent, at.x_state);
    weight = operand(linear.weight, linear.n, linear.weight_stride, at.weight, at.weight_exponent,
                     at.weight_state);
    next = reinterpret_cast<unsigned*>(workspace + at.next);
    ready = reinterpret_cast<unsigned*>(workspace + at.ready);
    smalls = reinterpret_cast<unsigned*>(workspace + at.smalls);
    unsigned* const marks = reinterpret_cast<unsigned*>(workspace + at.marks);
    again = {marks, marks + 1, reinterpret_cast<int*>(workspace + at.again)};
    found = reinterpret_cast<unsigned*>(workspace + at.found);
    left = reinterpret_cast<decltype(left)>(workspace + at.left);
    left_by = reinterpret_cast<decltype(left_by)>(workspace + at.left_by);
    zeros = static_cast<int64_t>(at.zeros / sizeof(unsigned));
  }

  // Splits x, and looks at the weight.
  int prepare(int64_t k, cudaStream_t stream) const {
    const int threads = split::threads_of_row(k);
    prepare_kernel<<<static_cast<int>(x.rows) + blocks_of(weight.rows, kSampledRows * threads / 32),
                     threads, 0, stream>>>(x, weight, k, next, zeros);
    return cudaGetLastError();
  }
};

inline split::Result result_of(const Output<float>& output) {
  return {output.bias, output.floor, output.divisor, output.out, output.mask};
}

template <bool kMask>
int rounded_linear(const Linear& linear, cudaStream_t stream) {
  using Kind = Rounded<kMask>;
  const Operands operands(linear);
  Output<float> output = output_of<float>(linear, kMask ? 8 : kTogether);
  const Tiles tiles = product_tiles(linear);
  const int k = static_cast<int>(linear.k);
  const Problem<Again<kMask>> again{output, k, tiles, operands.again, {}};
  int status = operands.prepare(linear.k, stream);
  if (status != cudaSuccess) return status;
  int clusters;
  status = count_clusters(product_kernel<Kind>, kThreads, sizeof(Memory<Kind>), &clusters);
  if (status != cudaSuccess) return status;
  clusters = std::min(clusters, tiles.count());
  const int side = std::min(tiles.x_tiles, kSideBySide);
  const int64_t steps = split::padded(linear.k) / kStepK;
  output.x_exponent = operands.x.exponent;
  output.weight_exponent = operands.weight.exponent;
  const Problem<Kind> problem{
      output, k, tiles, operands.again,
      Conversion{operands.weight, operands.next, operands.ready, operands.smalls,
                 static_cast<int>(steps), side, blocks_of(clusters, side)}};
  CUtensorMap x_map, weight_map;
  status = make_map(&x_map, operands.x, steps, kXShare);
  if (status != cudaSuccess) return status;
  status = make_map(&weight_map, operands.weight, steps, kWeightRows);
  if (status != cudaSuccess) return status;
  status = launch_product(problem, clusters, x_map, weight_map, stream);
  if (status != cudaSuccess) return status;

  status = make_map(&x_map, static_cast<const ptx::Tf32*>(linear.x), linear.m, linear.k,
                    linear.x_stride, kXShare);
  if (status != cudaSuccess) return status;
  status = make_map(&weight_map, static_cast<const ptx::Tf32*>(linear.weight), linear.n, linear.k,
                    linear.weight_stride, kWeightRows);
  if (status != cudaSuccess) return status;
  status = count_clusters(product_kernel<Again<kMask>>, kThreads, sizeof(Memory<Again<kMask>>),
                          &clusters);
  if (status != cudaSuccess) return status;
  return launch_product(again, std::min(clusters, tiles.count()), x_map, weight_map, stream);
}

int split_linear(const Linear& linear, cudaStream_t stream) {
  using S = Split;
  const Operands operands(linear);
  const split::Operand &x = operands.x, &weight = operands.weight;
  const Output<float> output = output_of<float>(linear, 2);
  int status = operands.prepare(linear.k, stream);
  if (status != cudaSuccess) return status;

  const int m = output.m, n = output.n, k = static_cast<int>(linear.k);
  const int64_t padded_k = split::padded(k);
  int clusters;
  const auto kernel = k < kShortK  ? split_kernel<32>
                      : k < kLongK ? split_kernel<64>
                                   : split_kernel<128>;
  status = count_clusters(kernel, kThreads, sizeof(S::Memory), &clusters);
  if (status != cudaSuccess) return status;
  clusters = std::min(clusters, Schedule::kMostClusters);
  const auto tiles_of = [&](int rows) {
    return Tiles{blocks_of(m, rows), blocks_of(n, S::kWeightRows * kClusterSize)};
  };
  Tiles tiles = tiles_of(S::kXRows);
  constexpr int kMore = S::kXRows - S::kNarrow;
  int wide =
      k < kLongK ? tiles.x_tiles : blocks_of(m, kMore) - tiles.x_tiles * (S::kNarrow / kMore);
  wide = std::clamp(wide, 0, tiles.x_tiles);
  // All tiles have fewer rows where that takes less time: a tile as long as its rows and kOverhead
  // more, one that clusters share Schedule::kWorth steps besides. On an H200 [128, 8192] x
  // [8192, 8192] took 8% longer in a tile of 176.
  const auto time = [&](const Tiles& of, int rows) {
    constexpr int kOverhead = 80;
    const double steps = S::rounds(k), share = static_cast<double>(of.count()) / clusters;
    return std::min(std::ceil(share) * steps, share * steps + Schedule::kWorth) *
           (rows + kOverhead);
  };
  int rows = S::kNarrow;
  double least = time(tiles, S::kNarrow + kMore * wide / tiles.x_tiles);
  for (const int fewer : {S::kMiddle, S::kSmall}) {
    const double needed = time(tiles_of(fewer), fewer);
    if (needed < least) least = needed, rows = fewer, tiles = tiles_of(fewer), wide = 0;
  }
  SplitProblem problem{output.bias,
                       output.out,
                       output.mask,
                       x.exponent,
                       x.state,
                       weight.exponent,
                       weight.state,
                       weight.from,
                       weight.row_stride,
                       operands.found,
                       operands.found + 1,
                       /*is_second_run=*/false,
                       m,
                       n,
                       k,
                       output.floor,
                       output.divisor,
                       output.is_direct,
                       tiles,
                       wide,
                       rows,
                       {},
                       operands.left,
                       operands.left_by};
  CUtensorMap x_map, weight_map;
  status = make_map(&x_map, x, padded_k / S::kK, problem.rows_at_once() / kClusterSize);
  if (status != cudaSuccess) return status;
  status = make_map(&weight_map, weight.from, n, k, linear.weight_stride, S::kWeightRows);
  if (status != cudaSuccess) return status;
  const auto rows_of = [&](int tile) {
    int x_tile, weight_tile;
    tiles.find(tile, &x_tile, &weight_tile);
    return Rows(problem, x_tile, weight_tile).size;
  };
  clusters =
      problem.schedule.plan(tiles.count(), S::rounds(k), clusters, problem.rows_at_once(), rows_of);
  for (const bool is_second_run : {false, true}) {
    problem.is_second_run = is_second_run;
    problem.left_by = operands.left_by + is_second_run * Schedule::kMostClusters;
    status = launch(kernel, clusters, kThreads, sizeof(S::Memory), true, stream, x_map, weight_map,
                    problem);
    if (status != cudaSuccess) return status;
  }
  return nonfinite::multiply(x, weight, k, result_of(output), problem.has_nonfinite, stream);
}

template <typename T>
int half_linear_of(const Linear& linear, cudaStream_t stream) {
  if (linear.x_is_transposed || linear.weight_is_transposed || !linear.relu) {
    return half_linear<General<T>>(linear, stream);
  }
  return linear.mask != nullptr ? half_linear<Half<T, true>>(linear, stream)
                                : half_linear<Half<T, false>>(linear, stream);
}

int linear_of(const Linear& linear, cudaStream_t stream) {
  switch (linear.dtype) {
    case DType::kFloat16:
      return half_linear_of<__half>(linear, stream);
    case DType::kBFloat16:
      return half_linear_of<__nv_bfloat16>(linear, stream);
    default:
      if (linear.precision == Precision::kHighest) return split_linear(linear, stream);
      return linear.mask != nullptr ? rounded_linear<true>(linear, stream)
                                    : rounded_linear<false>(linear, stream);
  }
}

// Rows of x that are taken at once.
int64_t rows_of_chunk(const Linear& linear) {
  if (linear.dtype != DType::kFloat32) return linear.m;
  // Clusters share the last tiles of three products; those of one product take whole tiles.
  Tiling tiling{Split::kXRows, 1, 1};
  if (linear.precision == Precision::kHigh) {
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    tiling = {kXRows, product_tiles(linear).weight_tiles,
              std::max(multiprocessors / kClusterSize, 1)};
  }
  return kernels::rows_of_chunk(
      linear.m, tiling, [&](int64_t rows) { return Workspace(with_rows(linear, rows)).bytes; });
}

inline bool is_aligned(const void* pointer, int64_t stride, int64_t size) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * size % 16 == 0;
}

}  // namespace sm90

namespace cuda {

// The copy engine takes rows that begin at multiples of 16 bytes.
bool linear_sm90_serves(const Linear& linear) {
  const int64_t size = linear.dtype == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kMost = int64_t{1} << 30;
  return (linear.dtype == DType::kFloat32 || linear.dtype == DType::kFloat16 ||
          linear.dtype == DType::kBFloat16) &&
         ((linear.dtype == DType::kFloat32 && linear.precision == Precision::kHighest) ||
          sm90::is_aligned(linear.x, linear.x_stride, size)) &&
         sm90::is_aligned(linear.weight, linear.weight_stride, size) && linear.m < kMost &&
         linear.n < kMost && linear.k < (linear.dtype == DType::kFloat32 ? sm90::kMostK : kMost);
}

size_t linear_sm90_workspace(const Linear& linear) {
  if (linear.dtype != DType::kFloat32) return 0;
  return sm90::Workspace(with_rows(linear, sm90::rows_of_chunk(linear))).bytes;
}

int linear_sm90(const Linear& linear, CUstream_st* stream) {
  return for_chunks(linear, sm90::rows_of_chunk(linear),
                    [&](const Linear& chunk, bool) { return sm90::linear_of(chunk, stream); });
}

}  // namespace cuda
}  // namespace kernels
