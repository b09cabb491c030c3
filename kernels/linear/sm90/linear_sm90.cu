// Linear -> ReLU -> divide on Hopper: the host code that launches the kernels of this folder.
//
// The kernels of each kind of call, in the order in which they run:
//
//   float16, bfloat16     gemm_one_product<HalfMode> or <GradientMode>
//
//   float32 at `high`     split_x                          splits x into hi; samples the weight
//                         gemm_one_product<ConvertMode>    one fp16 product; converts the weight
//                         transpose                        only for a transposed weight
//                         gemm_one_product<RedoMode>       tiles that need TF32's range
//
//   float32 at `highest`  split_x                          splits x into hi, lo; samples the weight
//                         gemm_fp16x3, first launch        three fp16 products; splits the weight
//                         gemm_fp16x3, second launch       tiles with overflowed rows of the weight
//                         nonfinite                        rows that hold infinity or NaN
//
// Only the GPU knows whether the kernels after the first GEMM have work, so the host launches them
// in every call. Without work, as in most calls, these kernels read a flag and end.
//
// All kernels are launched with programmatic dependent launch (PDL, common/launch.cuh). All but
// RedoMode and `nonfinite`, the last ones of a chunk, allow the next kernel to start early. The
// first GEMM sets up its barriers before it waits for the previous kernel.
//
// A float32 call is launched for chunks of rows of x (chunks.h).
//
// The files of this folder:
//
//   linear_sm90.cu                       decides which kernels run, and in which order
//   split_x.cuh, sample_weight.cuh       split_x; split/split.cuh explains hi and lo
//   gemm_one_product/, gemm_fp16x3/      the GEMM kernels; kernel.cuh lists the files of each
//   launch_gemm.cuh                      tensor maps and the launch, for both GEMM kernels
//   pipeline.cuh                         a block and its ring of stages, for both GEMM kernels
//   fragment.cuh                         which thread has which accumulators, for both epilogues
//   copy_subtile.cuh                     copies of sums to shared memory, for both epilogues
//
// In linear/, nonfinite is in split/, transpose in transpose.cu, and the order in which tiles are
// numbered in tile_order.cuh.

#include <algorithm>

#include "common/launch.cuh"
#include "common/sizes.h"
#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_fp16x3/launch.cuh"
#include "linear/sm90/gemm_one_product/launch.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"
#include "linear/split/nonfinite.cuh"

namespace kernels::sm90 {

// -------------------------------------------------------------------------- one chunk of rows of x

void launch_high(const LinearArguments& call, cudaStream_t stream) {
  const gemm_one_product::OneProductWorkspace workspace(call);
  launch_split_x(call, workspace.x, workspace.weight, workspace.bytes_to_clear, stream);
  gemm_one_product::launch_convert(call, workspace, stream);
  gemm_one_product::launch_redo(call, workspace, stream);  // copies a transposed weight first
}

void launch_highest(const LinearArguments& call, cudaStream_t stream) {
  const gemm_fp16x3::Fp16x3Workspace workspace(call);
  launch_split_x(call, workspace.x, workspace.weight, workspace.bytes_to_clear, stream);
  const Epilogue<float> epilogue(call, gemm_fp16x3::fast_epilogue_rule());
  gemm_fp16x3::launch_twice(call, workspace, epilogue, stream);
  // This kernel is last because the GEMM's second launch finds kNonfinite rows of the weight.
  nonfinite::launch(workspace.x, workspace.weight, call.k, epilogue, workspace.has_nonfinite,
                    stream, /*has_pdl=*/true);
}

// A call of a half type is one chunk, because it needs no workspace.
void launch_chunk(const LinearArguments& call, cudaStream_t stream) {
  if (call.dtype == DType::kFloat16) {
    gemm_one_product::launch_half<__half>(call, stream);
  } else if (call.dtype == DType::kBFloat16) {
    gemm_one_product::launch_half<__nv_bfloat16>(call, stream);
  } else if (call.precision == Precision::kHighest) {
    launch_highest(call, stream);
  } else {
    launch_high(call, stream);
  }
}

// ------------------------------------------------------------------------------------------ chunks

// Returns the bytes of a workspace for `rows` rows of x. Half types need none.
size_t workspace_bytes(LinearArguments call, int64_t rows) {
  call.m = rows;
  call.workspace = nullptr;  // so that its slices are only measured (WorkspaceSlices)
  if (call.dtype != DType::kFloat32) return 0;
  if (call.precision == Precision::kHighest) return gemm_fp16x3::Fp16x3Workspace(call).bytes;
  return gemm_one_product::OneProductWorkspace(call).bytes;
}

// Returns how the GEMM of a float32 call divides its result into tiles and waves.
TileGrid tile_grid_of(const LinearArguments& call) {
  TileGrid grid{};
  if (call.precision == Precision::kHighest) {
    grid.rows_of_tile = gemm_fp16x3::Fp16x3Config::kLargestRows;
    grid.weight_tiles = divide_up(call.n, gemm_fp16x3::Fp16x3Config::kTileWeightRows);
    grid.tiles_of_wave = TileGrid::kAllTiles;  // stream-K
  } else {
    // Each cluster computes whole tiles.
    const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
    grid.rows_of_tile = gemm_one_product::OneProductConfig::kTileRows;
    grid.weight_tiles = gemm_one_product::tiles_of(call).weight_tiles;
    grid.tiles_of_wave = std::max(multiprocessors / BlockConfig::kClusterSize, 1);
  }
  return grid;
}

// Like the copies of operands that run_gemm.h makes, the copy of a transposed weight does not count
// toward the limit of the workspace.
int64_t rows_of_chunk(const LinearArguments& call) {
  if (call.dtype != DType::kFloat32) return call.m;
  LinearArguments uncopied = call;
  uncopied.weight_is_transposed = false;
  return choose_rows_of_chunk(call.m, tile_grid_of(call),
                              [&](int64_t rows) { return workspace_bytes(uncopied, rows); });
}

}  // namespace kernels::sm90

// -------------------------------------------------------------------- the functions of launchers.h

namespace kernels::cuda {

// Rows must begin at multiples of 16 bytes, for TMA and for vector loads. Only rows of x at
// `highest` may begin anywhere, because split_x reads them, and TMA loads only the split x. (At
// `high`, RedoMode loads x itself by TMA.)
bool linear_sm90_supports(const LinearArguments& call) {
  if (call.dtype == DType::kFloat64) return false;
  const bool is_float32 = call.dtype == DType::kFloat32;
  const bool is_highest = call.precision == Precision::kHighest;  // never for half types
  if (is_float32 && call.x_is_transposed) return false;
  if (is_highest && call.weight_is_transposed) return false;

  const int64_t element_size = bytes_of_element(call.dtype);
  const bool has_aligned_x = is_highest || has_aligned_rows(call.x, element_size * call.x_stride);
  const bool has_aligned_weight = has_aligned_rows(call.weight, element_size * call.weight_stride);

  // Indices of rows, columns and K are ints in the kernels, hence kMaxSize. The proof of the error
  // bound of `highest` needs a smaller limit of K (docs/SPLIT-PROOF.md, "The limit of K"). `high`
  // has the same one, so that both settings compute the same sizes.
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  constexpr int64_t kMaxKOfFloat32 = int64_t{1} << 23;
  const int64_t max_k = is_float32 ? kMaxKOfFloat32 : kMaxSize;
  const bool has_sizes = call.m < kMaxSize && call.n < kMaxSize && call.k < max_k;
  return has_aligned_x && has_aligned_weight && has_sizes;
}

size_t linear_sm90_workspace_bytes(const LinearArguments& call) {
  return sm90::workspace_bytes(call, sm90::rows_of_chunk(call));
}

int linear_sm90(const LinearArguments& call, CUstream_st* stream) {
  return status_of([&] {
    for_each_chunk(call, sm90::rows_of_chunk(call),
                   [&](const LinearArguments& chunk, bool /*is_first*/) {
                     sm90::launch_chunk(chunk, stream);
                   });
  });
}

}  // namespace kernels::cuda
