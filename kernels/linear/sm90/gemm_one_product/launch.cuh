// The launches of gemm_one_product_kernel (kernel.cuh) for one chunk of rows of x:
//
//   launch_half       half types         HalfMode or GradientMode
//   launch_convert    float32, first     ConvertMode
//   launch_redo       float32, second    RedoMode
//
// Only ConvertMode's operands are k-tiled. launch_on_operands makes the tensor maps of the others.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/launch.cuh"
#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_one_product/kernel.cuh"
#include "linear/sm90/launch_gemm.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_one_product {

// ------------------------------------------------------------------------------ steps of all modes

inline TileOrder tiles_of(const LinearArguments& call) {
  return {divide_up_to_int(call.m, OneProductConfig::kTileRows),
          divide_up_to_int(call.n, OneProductConfig::kTileWeightRows)};
}

// Returns the kernel's arguments. redo, conversion and x_exponent, for float32 only, are null.
template <typename Mode>
OneProductArguments<Mode> make_arguments(const LinearArguments& call,
                                         const Epilogue<typename Mode::Out>& epilogue) {
  OneProductArguments<Mode> args{epilogue};
  args.k = static_cast<int>(call.k);
  args.tile_order = tiles_of(call);
  args.x_is_transposed = call.x_is_transposed;
  args.weight_is_transposed = call.weight_is_transposed;
  return args;
}

// Returns how many clusters of this mode run at once on the current GPU.
template <typename Mode>
int count_clusters() {
  return count_gemm_clusters(gemm_one_product_kernel<Mode>, sizeof(OneProductSharedMemory<Mode>));
}

struct TensorMaps {
  CUtensorMap x;
  CUtensorMap weight;
  CUtensorMap out{};  // GradientMode; the others store without TMA
};

template <typename Mode>
void launch_with_maps(const OneProductArguments<Mode>& args, int clusters, const TensorMaps& maps,
                      cudaStream_t stream) {
  launch_gemm(gemm_one_product_kernel<Mode>, sizeof(OneProductSharedMemory<Mode>), clusters, stream,
              maps.x, maps.weight, maps.out, args);
}

// Makes the map of an operand that is not k-tiled: [rows, k], or [k, rows] if it is transposed. A
// box is 64 rows and a k-tile, transposed or not.
template <typename Mode>
CUtensorMap operand_map(const void* operand, int64_t rows, int64_t k, int64_t stride,
                        bool is_transposed) {
  const auto matrix = static_cast<const typename Mode::Element*>(operand);
  if (is_transposed) return make_map(matrix, k, rows, stride, OneProductConfig::kBoxRows);
  return make_map(matrix, rows, k, stride, OneProductConfig::kBoxRows);
}

template <typename Mode>
void launch_on_operands(const OneProductArguments<Mode>& args, int clusters,
                        const LinearArguments& call, cudaStream_t stream) {
  TensorMaps maps;
  maps.x = operand_map<Mode>(call.x, call.m, call.k, call.x_stride, call.x_is_transposed);
  maps.weight =
      operand_map<Mode>(call.weight, call.n, call.k, call.weight_stride, call.weight_is_transposed);
  if constexpr (Mode::kIsGradient) {
    // out is [n, m] ("The operands of GradientMode"). A box is 16 rows of it: the 16 n of a warp.
    const auto out = static_cast<const typename Mode::Out*>(call.out);
    maps.out = make_map(out, call.n, call.m, call.m, OneProductConfig::kWarpWeightRows);
  }
  launch_with_maps(args, clusters, maps, stream);
}

// -------------------------------------------------------------------------------------- half types

template <typename Mode>
void launch_half_in_mode(const LinearArguments& call, const Epilogue<typename Mode::Out>& epilogue,
                         cudaStream_t stream) {
  const auto args = make_arguments<Mode>(call, epilogue);
  // As few clusters as possible without another wave: they take slightly less time. Example: 100
  // tiles on 66 clusters are 2 waves; 50 clusters are enough.
  const int tiles = args.tile_order.count();
  const int waves = divide_up_to_int(tiles, count_clusters<Mode>());
  const int clusters = divide_up_to_int(tiles, waves);
  launch_on_operands(args, clusters, call, stream);
}

// ----- The operands of GradientMode
//
// In GradientMode, the kernel's x is the call's weight, and the kernel's weight is the call's x.
// Example: the gradient of the weight of a layer with x [1024, 4096] and weight [8192, 4096].
// grad_z, the gradient of ReLU's input, is [1024, 8192].
//
//   in the call      in the kernel    size           example
//
//   x [m, k]         weight [n, k]    8192 x 1024    grad_z^T
//   weight [n, k]    x [m, k]         4096 x 1024    the layer's x, transposed
//   out [m, n]       out [n, m]       8192 x 4096    the gradient of the layer's weight
//   m                n                8192
//   n                m                4096
//
// Why: the call's x is grad_z or its transpose, in which many elements are 0 because of the ReLU.
// The kernel's weight is wgmma's operand A, where zeros take less power, so that the GPU's clock is
// higher (docs/EXPERIMENTS.md, "The gradient of the weight in half types").

// Returns the call as GradientMode's kernel gets it.
inline LinearArguments transposed_problem(const LinearArguments& call) {
  LinearArguments transposed = call;
  std::swap(transposed.x, transposed.weight);
  std::swap(transposed.x_stride, transposed.weight_stride);
  std::swap(transposed.x_is_transposed, transposed.weight_is_transposed);
  std::swap(transposed.m, transposed.n);
  return transposed;
}

// Launches a call in T, __half or __nv_bfloat16. A call without an epilogue computes a gradient.
// TMA stores GradientMode's results, and needs rows of whole 16-byte vectors.
template <typename T>
void launch_half(const LinearArguments& call, cudaStream_t stream) {
  const bool has_epilogue = call.has_relu || call.bias != nullptr || call.divisor != 1;
  const bool has_vectors = call.n % 8 == 0;
  if (!has_epilogue && has_vectors) {
    const LinearArguments transposed = transposed_problem(call);
    launch_half_in_mode<GradientMode<T>>(transposed, Epilogue<T>(transposed), stream);
  } else {
    const Epilogue<T> epilogue(call, fast_epilogue_rule_of_half_types<T>(call));
    launch_half_in_mode<HalfMode<T>>(call, epilogue, stream);
  }
}

// ------------------------------------------------------------------------------- float32 at `high`

// The workspace. k-tiles have 64 of K.
//
//   slice                         type      shape              used by                    cleared
//   conversion.next_patch         unsigned  [1]                Convert                    yes
//   conversion.converted_patches  unsigned  [panels, k-tiles]  Convert                    yes
//   conversion.row_subnormals     unsigned  [n]                Convert                    yes
//   redo.count                    unsigned  [1]                Convert, transpose, Redo   yes
//   redo.is_listed                unsigned  [tiles]            Convert                    yes
//   x.hi                          __half    [k-tiles, m, 64]   split_x, Convert           no
//   x.exponent                    int       [m]                split_x, Convert           no
//   weight.exponent               int       [n]                split_x, Convert           no
//   weight.hi                     __half    [k-tiles, n, 64]   Convert                    no
//   redo.tiles                    int       [tiles]            Convert, Redo              no
//   weight_copy.target            float     [n, padded k]      transpose, Redo            no
//
// "Convert" and "Redo" are gemm_one_product in ConvertMode and RedoMode. redo.count and
// redo.is_listed share a slice. weight_copy.target exists only for a transposed weight. split_x
// clears the slices that must be zero before the GEMM; they are the first ones.
struct OneProductWorkspace {
  split::ScaledMatrix x;
  split::ScaledMatrix weight;
  WeightConversion conversion{};
  RedoList redo{};
  Transposition weight_copy{};
  size_t bytes_to_clear;  // at the beginning of the workspace
  size_t bytes;

  explicit OneProductWorkspace(const LinearArguments& call)
      : x(describe_operand(call.x, call.m, call.x_stride)),
        weight(describe_operand(call.weight, call.n, call.weight_stride)) {
    WorkspaceSlices slices(call.workspace);
    const int64_t padded_k = split::padded(call.k);
    const int64_t k_tiles = padded_k / split::k_tile_depth(split::Form::kWithoutLo);
    const TileOrder tiles = tiles_of(call);
    const int64_t panels = tiles.weight_tiles * BlockConfig::kClusterSize;

    conversion.k_tiles = static_cast<int>(k_tiles);
    conversion.next_patch = slices.add<unsigned>(1);
    conversion.converted_patches = slices.add<unsigned>(panels * k_tiles);
    conversion.row_subnormals = slices.add<unsigned>(call.n);
    redo.count = slices.add<unsigned>(1 + tiles.count());
    redo.is_listed = slices.pointer_into(redo.count, 1);
    bytes_to_clear = slices.bytes();

    x.hi = slices.add<__half>(call.m * padded_k);
    x.exponent = slices.add<int>(call.m);
    weight.exponent = slices.add<int>(call.n);
    weight.hi = slices.add<__half>(call.n * padded_k);
    redo.tiles = slices.add<int>(tiles.count());
    conversion.weight = weight;

    if (call.weight_is_transposed) {
      weight_copy.source = weight.source;
      weight_copy.source_stride = weight.row_stride;
      weight_copy.target = slices.add<float>(call.n * padded_k);
      weight_copy.target_stride = padded_k;
      weight_copy.rows = call.n;
      weight_copy.columns = call.k;
    }
    bytes = slices.bytes();
  }
};

// Launches the fp16 product in ConvertMode.
inline void launch_convert(const LinearArguments& call, const OneProductWorkspace& workspace,
                           cudaStream_t stream) {
  using Mode = ConvertMode;
  const Epilogue<float> epilogue(call, fast_epilogue_rule_of_float32(call));
  auto args = make_arguments<Mode>(call, epilogue);
  const int clusters = std::min(count_clusters<Mode>(), args.tile_order.count());
  args.redo = workspace.redo;
  args.x_exponent = workspace.x.exponent;
  args.conversion = workspace.conversion;
  // The converters use the order of TileOrder, too, and convert first what is multiplied first.
  const int x_tiles_at_once = std::min(args.tile_order.x_tiles, TileOrder::kBand);
  args.conversion.x_tiles_at_once = x_tiles_at_once;
  args.conversion.weight_tiles_at_once = divide_up_to_int(clusters, x_tiles_at_once);
  const int k_tiles = workspace.conversion.k_tiles;
  TensorMaps maps;
  maps.x = make_k_tiled_map(workspace.x, k_tiles, OneProductConfig::kXRowsPerBlock);
  maps.weight = make_k_tiled_map(workspace.weight, k_tiles, OneProductConfig::kBlockWeightRows);
  launch_with_maps(args, clusters, maps, stream);
}

// Launches the TF32 product of the listed tiles, in RedoMode. wgmma takes no transposed TF32
// operands, so a transposed weight is copied first. (x is never transposed in float32.) If no tile
// is listed, the copy and the product end at once.
inline void launch_redo(const LinearArguments& call, const OneProductWorkspace& workspace,
                        cudaStream_t stream) {
  using Mode = RedoMode;
  LinearArguments row_major = call;
  if (call.weight_is_transposed) {
    const Transposition& copy = workspace.weight_copy;
    check(static_cast<cudaError_t>(cuda::transpose(copy, workspace.redo.count, stream)));
    row_major.weight = copy.target;
    row_major.weight_stride = copy.target_stride;
    row_major.weight_is_transposed = false;
  }
  auto args = make_arguments<Mode>(row_major, Epilogue<float>(row_major));
  args.redo = workspace.redo;
  const int clusters = std::min(count_clusters<Mode>(), args.tile_order.count());
  launch_on_operands(args, clusters, row_major, stream);
}

}  // namespace kernels::sm90::gemm_one_product
