// gemm_single_kernel (gemm_single.cuh): its four modes, its shared memory, and its arguments, which
// launch_single.cuh fills in.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/convert_weight.cuh"
#include "linear/sm90/gemm_single_config.cuh"
#include "linear/sm90/gemm_single_epilogue.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_single {

// A mode says what the kernel computes, and from which operands. In all modes two warpgroups
// multiply and one warp loads. The other three warps convert the weight in kConvert, and are idle
// in other modes.
enum class Mode {
  // Computes out = relu(x weight^T + bias) / divisor in float16 or bfloat16. x may be [M, K] or
  // [K, M], the weight [N, K] or [K, N]. These layouts are chosen at run time: a kernel for each is
  // hardly faster and takes longer to compile (docs/EXPERIMENTS.md, "Hopper's products").
  kHalf,
  // Computes gradients, in the types and layouts of kHalf: out [N, M] = weight x^T, without bias,
  // ReLU or division. (launch_single.cuh swaps the caller's operands and sizes, so this is the
  // caller's [M, N].) The consumers store a tile's results by TMA while they multiply the next
  // tile.
  kGradient,
  // Computes out = relu(x weight^T + bias) / divisor in float32, from fp16 operands in k-tiled
  // layout whose rows are scaled by powers of two. split_x.cuh has made the fp16 x. The converter
  // warps make the fp16 weight, from float32 [N, K] or [K, N].
  kConvert,
  // Computes the tiles that kConvert has listed, from row-major float32 operands, which TMA rounds
  // to TF32. TF32 has float32's range, so nothing is scaled.
  kRedo,
};

// A mode with its types, and flags that tell the mode.
template <Mode kMode, typename ElementType, typename OutType>
struct ModeTraits {
  using Element = ElementType;  // of the operands in shared memory
  using Out = OutType;          // of bias and out
  static constexpr bool kIsHalf = kMode == Mode::kHalf || kMode == Mode::kGradient;
  static constexpr bool kIsGradient = kMode == Mode::kGradient;
  static constexpr bool kConvertsWeight = kMode == Mode::kConvert;
  static constexpr bool kIsRedo = kMode == Mode::kRedo;
};
template <typename T>
using HalfTraits = ModeTraits<Mode::kHalf, T, T>;
template <typename T>
using GradientTraits = ModeTraits<Mode::kGradient, T, T>;
using ConvertTraits = ModeTraits<Mode::kConvert, __half, float>;
using RedoTraits = ModeTraits<Mode::kRedo, ptx::Tf32, float>;

template <typename Traits>
struct SharedMemory {
  uint8_t x[Config::kStages][Config::kXBytes];
  uint8_t weight[Config::kStages][Config::kWeightBytes];
  Staging<typename Traits::Out> staging[BlockConfig::kConsumerWarpgroups];
  Scales<typename Traits::Out> scales[BlockConfig::kConsumerWarpgroups];
  std::conditional_t<Traits::kConvertsWeight, ConverterMemory, int> converters;
  Barriers<Config::kStages> barriers;
  int progress;  // the producer's latest k-tile; see convert_weight.cuh
};

// The tiles to compute again, by their numbers in TileOrder. ConvertTraits writes the list, and
// RedoTraits, the next kernel, reads it.
struct RedoList {
  unsigned* count;      // 0 at first
  unsigned* is_listed;  // [all tiles], 0 at first
  int* tiles;           // [count]

  // Lists a tile once, even if several warps of both blocks add it.
  __device__ void add(int tile) const {
    const bool is_new = atomicExch(is_listed + tile, 1u) == 0;
    if (is_new) tiles[atomicAdd(count, 1u)] = tile;
  }
};

template <typename Traits>
struct Arguments {
  // Elements of K in a k-tile: 64 of 16-bit types, 32 of TF32.
  static constexpr int kKTileDepth = Config::kKTileBytes / sizeof(typename Traits::Element);

  Epilogue<typename Traits::Out> epilogue;
  int k;
  TileOrder tiles;
  bool x_is_transposed;
  bool weight_is_transposed;
  RedoList redo;                // ConvertTraits and RedoTraits
  WeightConversion conversion;  // ConvertTraits
  const int* x_exponent;        // ConvertTraits: [M], rows of x were scaled by 2^x_exponent

  __device__ int k_tiles() const { return (k + kKTileDepth - 1) / kKTileDepth; }

  // How many tiles the kernel computes. With C clusters, cluster c computes the tiles with the
  // indices c, c + C, c + 2 C and so on.
  __device__ int tile_count() const {
    return Traits::kIsRedo ? static_cast<int>(*redo.count) : tiles.count();
  }

  // The tile with this index. ConvertTraits uses TileOrder (tile_order.cuh), in which neighbouring
  // clusters share a tile of the weight; the converters use the same order. Half types use the
  // order of the transposed problem, in which neighbouring clusters share a tile of x, which takes
  // 0.3% less time on an H200.
  __device__ Tile tile_at(int index) const {
    if constexpr (Traits::kIsRedo) {
      return tiles.find(redo.tiles[index]);
    } else if constexpr (Traits::kConvertsWeight) {
      return tiles.find(index);
    } else {
      const TileOrder transposed_order{tiles.weight_tiles, tiles.x_tiles};
      const Tile transposed = transposed_order.find(index);
      return {transposed.weight, transposed.x};
    }
  }
};

}  // namespace kernels::sm90::gemm_single
