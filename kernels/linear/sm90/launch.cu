// Linear -> ReLU -> divide on Hopper: the host code that launches the kernels of this folder.
//
//   x [m, k], weight [n, k], bias [n], out [m, n]; mask [m, (n + 7) / 8]
//
// The kernels of each kind of call, in the order in which they run:
//
//   float16, bfloat16      gemm_single<HalfTraits> or <GradientTraits>
//
//   float32 at `high`      split_x                       splits x into hi; samples the weight
//                          gemm_single<ConvertTraits>    one fp16 product; converts the weight
//                          transpose                     only for a transposed weight
//                          gemm_single<RedoTraits>       tiles that need TF32's range
//
//   float32 at `highest`   split_x                       splits x into hi, lo; samples the weight
//                          gemm_fp16x3, first run        three fp16 products; splits the weight
//                          gemm_fp16x3, second run       tiles with overflowed rows of the weight
//                          nonfinite                     rows that hold infinity or NaN
//
// Kernels after the first GEMM do nothing in most calls. Only the GPU knows whether they have work,
// so the host always launches them, and never waits: without work they read a flag and end. All
// kernels start by programmatic dependent launch (PDL, common/launch.cuh): while the kernel before
// ends, they set up barriers, and then wait for it.
//
// A float32 call is launched for chunks of rows of x, so that the workspace has a limit (chunks.h).
//
// run_gemm.h calls the functions in kernels::cuda at the end of this file.

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

// -------------------------------------------------------------------------------------- TMA maps
//
// A kernel tells the copy engine (TMA) what to copy by a CUtensorMap, which the host makes and
// passes as a kernel argument. It describes a tensor in global memory, and the size of the box that
// one copy instruction moves. The instruction gives only the box's coordinates. Elements of a box
// outside of the tensor are loaded as 0, and are not stored.

struct TmaConfig {
  // A row of a box, in bytes: the widest that TMA swizzles. Rows in shared memory are as long, and
  // their 16-byte vectors are swizzled, so that wgmma reads them without bank conflicts.
  static constexpr int kBoxRowBytes = 128;
};
static_assert(TmaConfig::kBoxRowBytes == gemm_single::Config::kKTileBytes,
              "a row of a box is a k-tile of a row of gemm_single's operands");
static_assert(TmaConfig::kBoxRowBytes == GemmFp16x3Config::kRowBytes,
              "a row of a box is a k-tile of a row of gemm_fp16x3's operands");
static_assert(TmaConfig::kBoxRowBytes == fp16x3::kKTileHalves * sizeof(__half),
              "a row of a box is a row of a k-tile of a k-tiled matrix");

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, ptx::Tf32>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Returns the driver's function that makes maps. The runtime finds it, so that nothing links
// against the driver library, which is missing where there is no GPU.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    constexpr unsigned kCudaVersion = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kCudaVersion,
                                           cudaEnableDefault, &found));
    if (function == nullptr) check(cudaErrorSymbolNotFound);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Makes the map of a tensor with 2 or 3 dimensions, the innermost first. `sizes` are in elements.
// `strides` are in bytes, without that of the innermost dimension. A box has box_rows rows.
template <typename T>
CUtensorMap encode_map(const T* tensor, int dimensions, const cuuint64_t* sizes,
                       const cuuint64_t* strides, uint32_t box_rows) {
  const cuuint32_t box[] = {TmaConfig::kBoxRowBytes / sizeof(T), box_rows, 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(
      &map, tensor_map_type<T>(), dimensions, const_cast<T*>(tensor), sizes, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) check(cudaErrorInvalidValue);
  return map;
}

// Makes the map of a matrix [rows, columns], rows `stride` elements apart. A box is box_rows rows
// of 128 bytes.
template <typename T>
CUtensorMap make_map(const T* matrix, uint64_t rows, uint64_t columns, uint64_t stride,
                     uint32_t box_rows) {
  const cuuint64_t sizes[] = {columns, rows};
  const cuuint64_t strides[] = {stride * sizeof(T)};
  return encode_map(matrix, 2, sizes, strides, box_rows);
}

// Makes the map of a matrix in the k-tiled layout (fp16x3/split.cuh): [k_tiles][rows][64 halves]. A
// box is box_rows rows of one k-tile.
CUtensorMap make_k_tiled_map(const fp16x3::SplitMatrix& matrix, int64_t k_tiles, int box_rows) {
  constexpr cuuint64_t kHalves = fp16x3::kKTileHalves;
  const cuuint64_t rows = matrix.rows;
  const cuuint64_t sizes[] = {kHalves, rows, static_cast<cuuint64_t>(k_tiles)};
  const cuuint64_t strides[] = {kHalves * sizeof(__half), rows * kHalves * sizeof(__half)};
  return encode_map(matrix.hi, 3, sizes, strides, box_rows);
}

// ------------------------------------------------------------------------ steps that paths share

// Returns how many clusters of a GEMM kernel of this folder run at once on the current GPU.
template <typename Kernel>
int count_gemm_clusters(Kernel* kernel, size_t shared_bytes) {
  return count_active_clusters(kernel, {BlockConfig::kClusterSize, BlockConfig::kThreads,
                                        shared_bytes, nullptr, /*has_pdl=*/false});
}

// Launches a GEMM kernel: persistent clusters, each of which computes several tiles. The caller has
// called count_gemm_clusters, which allows the kernel its shared memory.
template <typename Kernel, typename... Arguments>
void launch_gemm(Kernel* kernel, size_t shared_bytes, int clusters, cudaStream_t stream,
                 const Arguments&... arguments) {
  const int blocks = clusters * BlockConfig::kClusterSize;
  launch_grid({blocks, BlockConfig::kThreads, shared_bytes, stream, /*has_pdl=*/true}, kernel,
              arguments...);
}

// Returns a float32 operand without hi, lo, exponents and states: the caller adds those that it
// needs. Their layout is k-tiled.
fp16x3::SplitMatrix unsplit_matrix(const void* source, int64_t rows, int64_t row_stride) {
  fp16x3::SplitMatrix matrix{};
  matrix.source = static_cast<const float*>(source);
  matrix.rows = rows;
  matrix.row_stride = row_stride;
  matrix.is_k_tiled = true;
  return matrix;
}

// Launches the kernel that splits x, samples the weight, and clears the first bytes_to_clear bytes
// of the workspace.
void launch_split_x(const LinearArguments& linear, const fp16x3::SplitMatrix& x,
                    const fp16x3::SplitMatrix& weight, size_t bytes_to_clear, cudaStream_t stream) {
  const int threads = fp16x3::threads_of_row(linear.k);
  const int warps = threads / 32;
  const int sampling_blocks = blocks_of(linear.n, warps * SampleConfig::kRows);
  // A warp splits a row that it can keep in its registers, a block a longer one.
  const bool is_short = linear.k <= fp16x3::SplitConfig::kKeptByWarp;
  const auto splitter = is_short ? fp16x3::Splitter::kWarp : fp16x3::Splitter::kBlock;
  const int splitting_blocks = blocks_of(linear.m, is_short ? warps : 1);
  const auto cleared = static_cast<unsigned*>(linear.workspace);
  const auto cleared_size = static_cast<int64_t>(bytes_to_clear / sizeof(unsigned));
  launch_grid({sampling_blocks + splitting_blocks, threads, 0, stream, /*has_pdl=*/true},
              split_x_kernel, x, weight, linear.weight_is_transposed, linear.k, sampling_blocks,
              splitter, cleared, cleared_size);
}

// ----------------------------------------------------- steps that the paths of gemm_single share

// The tiles of gemm_single, for all its traits. The blocks of a cluster share a tile's rows of x,
// and divide its rows of the weight.
TileOrder single_tiles(const LinearArguments& linear) {
  using Config = gemm_single::Config;
  return {blocks_of(linear.m, Config::kXRows),
          blocks_of(linear.n, Config::kBlockColumns * BlockConfig::kClusterSize)};
}

// Returns the arguments of gemm_single. The callers for float32 set those that only float32 has:
// redo, conversion and x_exponent. The fast epilogue stores vector_size elements of a row at once.
template <typename Traits>
gemm_single::Arguments<Traits> single_arguments(const LinearArguments& linear,
                                                int64_t vector_size) {
  return {Epilogue<typename Traits::Out>(linear, vector_size),
          static_cast<int>(linear.k),
          single_tiles(linear),
          linear.x_is_transposed,
          linear.weight_is_transposed,
          /*redo=*/{},
          /*conversion=*/{},
          /*x_exponent=*/nullptr};
}

template <typename Traits>
int count_single_clusters() {
  return count_gemm_clusters(gemm_single::gemm_single_kernel<Traits>,
                             sizeof(gemm_single::SharedMemory<Traits>));
}

// Launches gemm_single with these maps. Only GradientTraits uses out_map; the others store without
// TMA.
template <typename Traits>
void launch_single_with_maps(const gemm_single::Arguments<Traits>& arguments, int clusters,
                             const CUtensorMap& x_map, const CUtensorMap& weight_map,
                             const CUtensorMap& out_map, cudaStream_t stream) {
  launch_gemm(gemm_single::gemm_single_kernel<Traits>, sizeof(gemm_single::SharedMemory<Traits>),
              clusters, stream, x_map, weight_map, out_map, arguments);
}

// Makes the map of an operand that is not k-tiled: [rows, k], or [k, rows] if it is transposed. A
// box of a half type is 64 rows and 64 of K, transposed or not. A box of TF32, which is never
// transposed, is 64 rows and 32 of K.
template <typename Traits>
CUtensorMap operand_map(const void* operand, int64_t rows, int64_t k, int64_t stride,
                        bool is_transposed) {
  constexpr int kBoxRows = gemm_single::Config::kBoxRows;
  const auto matrix = static_cast<const typename Traits::Element*>(operand);
  if (is_transposed) return make_map(matrix, k, rows, stride, kBoxRows);
  return make_map(matrix, rows, k, stride, kBoxRows);
}

// Launches gemm_single on the caller's operands, which are not k-tiled.
template <typename Traits>
void launch_single_on_operands(const gemm_single::Arguments<Traits>& arguments, int clusters,
                               const LinearArguments& linear, cudaStream_t stream) {
  const CUtensorMap x_map =
      operand_map<Traits>(linear.x, linear.m, linear.k, linear.x_stride, linear.x_is_transposed);
  const CUtensorMap weight_map = operand_map<Traits>(
      linear.weight, linear.n, linear.k, linear.weight_stride, linear.weight_is_transposed);
  CUtensorMap out_map{};
  if constexpr (Traits::kIsGradient) {
    // out is [n, m] here, as transposed_problem has exchanged m and n. A box is a warp's 16 rows.
    const auto out = static_cast<const typename Traits::Out*>(linear.out);
    out_map = make_map(out, linear.n, linear.m, linear.m, gemm_single::Config::kWarpColumns);
  }
  launch_single_with_maps(arguments, clusters, x_map, weight_map, out_map, stream);
}

// ------------------------------------------------------------------------- float16 and bfloat16

// Launches the one kernel of a half type, HalfTraits or GradientTraits.
template <typename Traits>
void launch_half(const LinearArguments& linear, cudaStream_t stream) {
  // The fast epilogue stores 16-byte vectors; with a mask, all columns of a warpgroup at once.
  const int64_t vector_size = linear.mask != nullptr ? gemm_single::Config::kWarpgroupColumns
                                                     : 16 / sizeof(typename Traits::Out);
  auto arguments = single_arguments<Traits>(linear, vector_size);
  // The fast epilogue applies ReLU as it rounds to the half type. It has no form without ReLU.
  arguments.epilogue.is_fast &= linear.has_relu;
  // As few clusters as finish in the same number of waves: 0.3% less time on an H200 than with as
  // many as run at once. Example: 100 tiles on 66 clusters are 2 waves, for which 50 are enough.
  const int tiles = arguments.tiles.count();
  const int waves = blocks_of(tiles, count_single_clusters<Traits>());
  launch_single_on_operands(arguments, blocks_of(tiles, waves), linear, stream);
}

// Returns the problem out^T = weight x^T, with x and weight, and m and n, exchanged. `out` is the
// same memory: [n, m] in terms of the new m and n.
LinearArguments transposed_problem(const LinearArguments& linear) {
  LinearArguments transposed = linear;
  std::swap(transposed.x, transposed.weight);
  std::swap(transposed.x_stride, transposed.weight_stride);
  std::swap(transposed.x_is_transposed, transposed.weight_is_transposed);
  std::swap(transposed.m, transposed.n);
  return transposed;
}

// Launches a call in T, float16 or bfloat16.
//
// A call without an epilogue computes a gradient. Its x is the gradient of the output, of which
// many elements are 0 after a ReLU. In the transposed problem this x is wgmma's operand A, where
// zeros take less power, so that the GPU's clock is higher: 2% less time on an H200. TMA stores the
// results, and needs rows of whole 16-byte vectors.
template <typename T>
void launch_half_call(const LinearArguments& linear, cudaStream_t stream) {
  const bool has_epilogue = linear.has_relu || linear.bias != nullptr || linear.divisor != 1;
  const bool has_vectors = linear.n % 8 == 0;
  if (!has_epilogue && has_vectors) {
    launch_half<gemm_single::GradientTraits<T>>(transposed_problem(linear), stream);
  } else {
    launch_half<gemm_single::HalfTraits<T>>(linear, stream);
  }
}

// ------------------------------------------------------------------------------ float32 at `high`

// The workspace of float32 at `high`. k-tiles have 64 of K.
//
//   slice                   type       shape                     used by           cleared
//   conversion.next         unsigned   [1]                       Convert           yes
//   conversion.ready        unsigned   [panels, k-tiles]         Convert           yes
//   conversion.subnormals   unsigned   [n]                       Convert           yes
//   redo.count, .is_listed  unsigned   [1], [tiles]              Convert, Redo     yes
//   x.hi                    half       [k-tiles, m, 64]          split_x, Convert  no
//   x.exponent              int        [m]                       split_x, Convert  no
//   weight.exponent         int        [n]                       split_x, Convert  no
//   weight.hi               half       [k-tiles, n, 64]          Convert           no
//   redo.tiles              int        [tiles]                   Convert, Redo     no
//   weight_copy.target      float      [n, padded k]             transpose, Redo   no
//
// "Convert" and "Redo" are gemm_single with ConvertTraits and RedoTraits. A panel is a block's 128
// rows of the weight; a weight tile has two. redo.count and redo.is_listed share a slice.
// weight_copy.target exists only for a transposed weight. split_x clears the slices that must be
// zero before the GEMM; they are the first ones.
struct SingleWorkspace {
  fp16x3::SplitMatrix x;
  fp16x3::SplitMatrix weight;
  gemm_single::WeightConversion conversion{};
  gemm_single::RedoList redo{};
  Transposition weight_copy{};
  size_t bytes_to_clear;  // at the beginning of the workspace
  size_t bytes;

  explicit SingleWorkspace(const LinearArguments& linear)
      : x(unsplit_matrix(linear.x, linear.m, linear.x_stride)),
        weight(unsplit_matrix(linear.weight, linear.n, linear.weight_stride)) {
    WorkspaceSlices slices(linear.workspace);
    const int64_t padded_k = fp16x3::padded(linear.k);
    const int64_t k_tiles = padded_k / fp16x3::k_tile_depth(/*has_lo=*/false);
    const TileOrder tiles = single_tiles(linear);
    const int64_t panels = tiles.weight_tiles * BlockConfig::kClusterSize;

    conversion.k_tiles = static_cast<int>(k_tiles);
    conversion.next = slices.add<unsigned>(1);
    conversion.ready = slices.add<unsigned>(panels * k_tiles);
    conversion.subnormals = slices.add<unsigned>(linear.n);
    redo.count = slices.add<unsigned>(1 + tiles.count());
    redo.is_listed = slices.part(redo.count, 1);
    bytes_to_clear = slices.bytes();

    x.hi = slices.add<__half>(linear.m * padded_k);
    x.exponent = slices.add<int>(linear.m);
    weight.exponent = slices.add<int>(linear.n);
    weight.hi = slices.add<__half>(linear.n * padded_k);
    redo.tiles = slices.add<int>(tiles.count());
    conversion.weight = weight;

    if (linear.weight_is_transposed) {
      weight_copy.source = weight.source;
      weight_copy.source_stride = weight.row_stride;
      weight_copy.target = slices.add<float>(linear.n * padded_k);
      weight_copy.target_stride = padded_k;
      weight_copy.rows = linear.n;
      weight_copy.columns = linear.k;
    }
    bytes = slices.bytes();
  }
};

// Returns how many elements of a row float32's fast epilogue in gemm_single stores at once: a
// 16-byte vector; with a mask, those of a byte of the mask.
int64_t float_vector_size(const LinearArguments& linear) { return linear.mask != nullptr ? 8 : 4; }

// Launches the fp16 product. Its converter warps round the weight to hi shortly before it is
// multiplied. It lists the tiles for which fp16 is not accurate enough.
void launch_converting_gemm(const LinearArguments& linear, const SingleWorkspace& workspace,
                            cudaStream_t stream) {
  using Traits = gemm_single::ConvertTraits;
  auto arguments = single_arguments<Traits>(linear, float_vector_size(linear));
  const int clusters = std::min(count_single_clusters<Traits>(), arguments.tiles.count());
  arguments.redo = workspace.redo;
  arguments.x_exponent = workspace.x.exponent;
  arguments.conversion = workspace.conversion;
  // The tiles that all clusters compute at once, in the order of TileOrder. The converters use the
  // same order, so that they convert first what is multiplied first.
  const int x_tiles_at_once = std::min(arguments.tiles.x_tiles, TileOrder::kBand);
  arguments.conversion.x_tiles_at_once = x_tiles_at_once;
  arguments.conversion.weight_tiles_at_once = blocks_of(clusters, x_tiles_at_once);
  const int k_tiles = workspace.conversion.k_tiles;
  const CUtensorMap x_map =
      make_k_tiled_map(workspace.x, k_tiles, gemm_single::Config::kXRowsPerBlock);
  const CUtensorMap weight_map =
      make_k_tiled_map(workspace.weight, k_tiles, gemm_single::Config::kBlockColumns);
  launch_single_with_maps(arguments, clusters, x_map, weight_map, CUtensorMap{}, stream);
}

// Launches the TF32 product of the listed tiles. wgmma takes no transposed TF32 operands, so a
// transposed weight is copied first. Without listed tiles, neither kernel does anything.
void launch_redo(const LinearArguments& linear, const SingleWorkspace& workspace,
                 cudaStream_t stream) {
  using Traits = gemm_single::RedoTraits;
  LinearArguments row_major = linear;
  if (linear.weight_is_transposed) {
    const Transposition& copy = workspace.weight_copy;
    check(static_cast<cudaError_t>(cuda::transpose(copy, workspace.redo.count, stream)));
    row_major.weight = copy.target;
    row_major.weight_stride = copy.target_stride;
    row_major.weight_is_transposed = false;
  }
  auto arguments = single_arguments<Traits>(row_major, float_vector_size(linear));
  arguments.redo = workspace.redo;
  const int clusters = std::min(count_single_clusters<Traits>(), arguments.tiles.count());
  launch_single_on_operands(arguments, clusters, row_major, stream);
}

void launch_high(const LinearArguments& linear, cudaStream_t stream) {
  const SingleWorkspace workspace(linear);
  launch_split_x(linear, workspace.x, workspace.weight, workspace.bytes_to_clear, stream);
  launch_converting_gemm(linear, workspace, stream);
  launch_redo(linear, workspace, stream);
}

// --------------------------------------------------------------------------- float32 at `highest`

// The workspace of float32 at `highest`. k-tiles have 32 of K, hi and lo.
//
//   slice                type      shape                  used by                   cleared
//   partials.are_stored  Flags     [2, kMaxClusters]      gemm_fp16x3: each run     yes
//   has_overflowed       unsigned  [1]                    gemm_fp16x3: both runs    yes
//   has_nonfinite        unsigned  [1]                    gemm_fp16x3, nonfinite    yes
//   x.hi, x.lo           half      [k-tiles, m, 32 + 32]  split_x, gemm_fp16x3      no
//   x.exponent           int       [m]                    split_x, gemm_fp16x3      no
//   x.state              int       [m]                    all                       no
//   weight.exponent      int       [n]                    split_x, gemm_fp16x3      no
//   weight.state         int       [n]                    all                       no
//   partials.sums        Sums      [kMaxClusters]         gemm_fp16x3: each run     no
//
// has_overflowed and has_nonfinite share a slice. split_x clears the slices that must be zero
// before the GEMM; they are the first ones. The weight has no hi and lo in memory: gemm_fp16x3
// splits it in registers.
struct Fp16x3Workspace {
  fp16x3::SplitMatrix x;
  fp16x3::SplitMatrix weight;
  PartialSums partials;  // of the first run; the second run's are_stored follows
  unsigned* has_overflowed;
  unsigned* has_nonfinite;
  size_t bytes_to_clear;  // at the beginning of the workspace
  size_t bytes;

  explicit Fp16x3Workspace(const LinearArguments& linear)
      : x(unsplit_matrix(linear.x, linear.m, linear.x_stride)),
        weight(unsplit_matrix(linear.weight, linear.n, linear.weight_stride)) {
    constexpr int kMaxClusters = StreamKConfig::kMaxClusters;
    WorkspaceSlices slices(linear.workspace);
    partials.are_stored = slices.add<PartialSums::Flags>(2 * kMaxClusters);
    has_overflowed = slices.add<unsigned>(2);
    has_nonfinite = slices.part(has_overflowed, 1);
    bytes_to_clear = slices.bytes();

    x.hi = slices.add<__half>(2 * linear.m * fp16x3::padded(linear.k));
    x.lo = slices.part(x.hi, GemmFp16x3Config::kKTileDepth);  // behind the hi of a row of a k-tile
    x.exponent = slices.add<int>(linear.m);
    x.state = slices.add<int>(linear.m);
    weight.exponent = slices.add<int>(linear.n);
    weight.state = slices.add<int>(linear.n);
    partials.sums = slices.add<PartialSums::Sums>(kMaxClusters);
    bytes = slices.bytes();
  }
};

// Returns the kernel for this k: the longer K is, the longer is its promotion interval.
auto choose_fp16x3_kernel(int k) {
  using Config = GemmFp16x3Config;
  if (k >= Config::kLongK) return gemm_fp16x3_kernel<128>;
  if (k >= Config::kShortK) return gemm_fp16x3_kernel<64>;
  return gemm_fp16x3_kernel<32>;
}

// Launches both runs of the GEMM. (GemmArguments explains why there are two.)
void launch_fp16x3_gemm(const LinearArguments& linear, const Fp16x3Workspace& workspace,
                        const Epilogue<float>& epilogue, cudaStream_t stream) {
  using Config = GemmFp16x3Config;
  const int k = static_cast<int>(linear.k);
  const auto kernel = choose_fp16x3_kernel(k);
  const int max_clusters =
      std::min(count_gemm_clusters(kernel, sizeof(GemmMemory)), StreamKConfig::kMaxClusters);
  const GemmTiles tiles = choose_tiles(linear.m, linear.n, k, max_clusters);

  GemmArguments arguments{epilogue,
                          workspace.x,
                          workspace.weight,
                          k,
                          workspace.has_overflowed,
                          workspace.has_nonfinite,
                          /*is_second_run=*/false,
                          tiles,
                          /*schedule=*/{},
                          workspace.partials};
  const auto rows_of = [&](int tile) { return tiles.rows_of(tiles.find(tile)).size; };
  const int clusters = arguments.schedule.plan(tiles.count(), Config::k_groups(k), max_clusters,
                                               tiles.max_rows(), rows_of);

  // x is k-tiled, and each block of a cluster loads half of a tile's rows. The weight is float32.
  const CUtensorMap x_map =
      make_k_tiled_map(workspace.x, fp16x3::padded(linear.k) / Config::kKTileDepth,
                       tiles.max_rows() / BlockConfig::kClusterSize);
  const CUtensorMap weight_map = make_map(workspace.weight.source, linear.n, linear.k,
                                          linear.weight_stride, Config::kBlockColumns);

  launch_gemm(kernel, sizeof(GemmMemory), clusters, stream, x_map, weight_map, arguments);

  // The first run has set its flags, so the second run uses others, which are still zero.
  arguments.is_second_run = true;
  arguments.partials.are_stored = workspace.partials.are_stored + StreamKConfig::kMaxClusters;
  launch_gemm(kernel, sizeof(GemmMemory), clusters, stream, x_map, weight_map, arguments);
}

void launch_highest(const LinearArguments& linear, cudaStream_t stream) {
  const Fp16x3Workspace workspace(linear);
  launch_split_x(linear, workspace.x, workspace.weight, workspace.bytes_to_clear, stream);
  // The GEMM's fast epilogue stores two neighbouring elements of a row at once.
  const Epilogue<float> epilogue(linear, /*vector_size=*/2);
  launch_fp16x3_gemm(linear, workspace, epilogue, stream);
  // It is last because the second run finds which rows of the weight hold infinity or NaN.
  nonfinite::launch(workspace.x, workspace.weight, linear.k, epilogue, workspace.has_nonfinite,
                    stream, /*has_pdl=*/true);
}

// ------------------------------------------------------------------------- chunks of rows of x

void launch_chunk(const LinearArguments& linear, cudaStream_t stream) {
  if (linear.dtype == DType::kFloat16) {
    launch_half_call<__half>(linear, stream);
  } else if (linear.dtype == DType::kBFloat16) {
    launch_half_call<__nv_bfloat16>(linear, stream);
  } else if (linear.precision == Precision::kHighest) {
    launch_highest(linear, stream);
  } else {
    launch_high(linear, stream);
  }
}

// Returns the bytes of a workspace for `rows` rows of x. Half types need none.
size_t workspace_bytes(LinearArguments linear, int64_t rows) {
  linear.m = rows;
  linear.workspace = nullptr;  // measures only
  if (linear.dtype != DType::kFloat32) return 0;
  if (linear.precision == Precision::kHighest) return Fp16x3Workspace(linear).bytes;
  return SingleWorkspace(linear).bytes;
}

// Returns how chunks are divided into tiles. In gemm_single each cluster computes whole tiles. In
// gemm_fp16x3 the clusters share the last wave evenly (stream-K), so the number of waves does not
// matter. Its tiling has one tile in a wave, so all chunk sizes give the same number of waves.
Tiling chunk_tiling(const LinearArguments& linear) {
  if (linear.precision == Precision::kHighest) {
    return {GemmFp16x3Config::kWideRows, /*tiles_along_n=*/1, /*tiles_of_wave=*/1};
  }
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int clusters = std::max(multiprocessors / BlockConfig::kClusterSize, 1);
  return {gemm_single::Config::kXRows, single_tiles(linear).weight_tiles, clusters};
}

// Returns the rows of a chunk. Copies of operands do not count for the limit of the workspace, so
// neither does that of a transposed weight.
int64_t rows_of_chunk(const LinearArguments& linear) {
  if (linear.dtype != DType::kFloat32) return linear.m;
  LinearArguments uncopied = linear;
  uncopied.weight_is_transposed = false;
  return kernels::rows_of_chunk(linear.m, chunk_tiling(linear),
                                [&](int64_t rows) { return workspace_bytes(uncopied, rows); });
}

}  // namespace kernels::sm90

// ----------------------------------------------------------------- the functions of launchers.h

namespace kernels::cuda {

// Returns whether the kernels of this file support a call.
//
// Operands that TMA reads need rows that begin at multiples of 16 bytes. TMA reads all of them but
// x at `highest`, which split_x reads without TMA. (At `high`, RedoTraits loads x by TMA.)
bool linear_sm90_supports(const LinearArguments& linear) {
  if (linear.dtype == DType::kFloat64) return false;
  const bool is_float32 = linear.dtype == DType::kFloat32;
  const bool is_highest = is_float32 && linear.precision == Precision::kHighest;
  if (is_float32 && linear.x_is_transposed) return false;
  if (is_highest && linear.weight_is_transposed) return false;

  const int64_t element_size = is_float32 ? 4 : 2;
  const bool has_aligned_x =
      is_highest || has_aligned_rows(linear.x, element_size * linear.x_stride);
  const bool has_aligned_weight =
      has_aligned_rows(linear.weight, element_size * linear.weight_stride);

  // Indices of rows, columns and K are ints in the kernels. The lower limit for float32 is caution:
  // no count or index is known to need it (has_many_subnormals multiplies a count of up to K by 32,
  // with 64 bits). But at K = 2^24 the error bound, (64 + K / 64) u, is 2^-6 already.
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  constexpr int64_t kMaxKOfFloat32 = int64_t{1} << 24;
  const int64_t max_k = is_float32 ? kMaxKOfFloat32 : kMaxSize;
  const bool has_sizes = linear.m < kMaxSize && linear.n < kMaxSize && linear.k < max_k;
  return has_aligned_x && has_aligned_weight && has_sizes;
}

size_t linear_sm90_workspace(const LinearArguments& linear) {
  return sm90::workspace_bytes(linear, sm90::rows_of_chunk(linear));
}

int linear_sm90(const LinearArguments& linear, CUstream_st* stream) {
  return status_of([&] {
    for_each_chunk(linear, sm90::rows_of_chunk(linear),
                   [&](const LinearArguments& chunk, bool) { sm90::launch_chunk(chunk, stream); });
  });
}

}  // namespace kernels::cuda
