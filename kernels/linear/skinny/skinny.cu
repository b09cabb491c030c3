// Linear -> ReLU -> divide for few rows of x in float32, on Hopper, for the sizes that
// choose_path.h names. The parts of the kernel, which this file puts together and launches:
//
//   config.cuh     constants and arguments
//   operands.cuh   loads of x and the weight, and the products
//   sums.cuh       the end of a tile: sums of lanes and blocks, results and mask
//
// Why it is fast: for up to 16 rows, the time is that of reading the weight once from memory
// (docs/DESIGN.md, "skinny: few rows of x"), and the kernel keeps reads of the weight in flight all
// the time.
//
// A cluster of up to 8 blocks computes a tile of kTileRows rows of x (16 at most) and 32 columns,
// and then goes on to further tiles of the weight. The blocks divide K among them, and each block
// keeps its range of x in shared memory for all its tiles. For a cluster of 4 blocks:
//
//                                  K
//              | block 0  | block 1  | block 2  | block 3  |
//      x       |  kTileRows rows; each block has its range in shared memory
//      weight  |  32 columns of the tile, streamed through registers
//
// Within a block, warp w multiplies columns 4 w to 4 w + 3 of the tile with all rows. In a k-step,
// the warp handles 128 elements of K, and each of its lanes 4 of them:
//
//      K of the k-step     0..3     4..7    ...   124..127
//      each column        lane 0   lane 1   ...   lane 31
//
// A k-tile is two k-steps, so 256 of K. While a warp multiplies one k-tile, it loads the weights of
// the next, which may be the next tile's, into registers.
//
// When a tile has been multiplied, each lane has partial sums over its elements of K, which are
// then added up in double:
//
//   1. add_lanes adds the sums of the lanes of a warp, by shuffles.
//   2. sum_of_blocks adds the sums of a cluster's blocks, which read each other's shared memory.
//   3. add_rest_and_bias adds the bias, and the products of the last k % 4 elements of K, which
//      fill no float4.
//
// Accuracy: a lane's partial sums are in double if a tile has at most 4 rows, because there is time
// for it. For more rows they are in float. To keep their roundings few, such a sum covers at most 4
// k-tiles, unless K is too long for that even in a cluster of 8 blocks. docs/EXPERIMENTS.md, "Few
// rows", has what the type double costs and gains in add_lanes.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/sizes.h"
#include "launchers.h"
#include "linear/epilogue.cuh"
#include "linear/skinny/config.cuh"
#include "linear/skinny/operands.cuh"
#include "linear/skinny/sums.cuh"

namespace kernels::skinny {

// ------------------------------------------------------------------------------------------ kernel

// Computes tiles of kTileRows rows of x. Cluster c has tile c % x_tiles of x. Its first tile of the
// weight is c / x_tiles, and its tiles of the weight are tile_step() = clusters / x_tiles apart.
// Example: with 6 clusters and 2 tiles of x, cluster 3 has tile 1 of x, and the tiles 1, 4, 7 ...
// of the weight.
//
// The sums of a tile are added up over the cluster while the next tile is multiplied, so that
// blocks hardly ever wait for each other. This takes two buffers for sums:
//
//   tile t        multiply                                  sums to buffer A, arrive
//   tile t + 1    multiply, wait, results of t from A       sums to buffer B, arrive
//   tile t + 2    multiply, wait, results of t + 1 from B   sums to buffer A, arrive
//
// `arrive` tells the cluster that a block's sums are there, and that it has read the other buffer.
// `wait` waits until all blocks of the cluster have arrived.
template <int kTileRows>
__global__ void __launch_bounds__(SkinnyConfig::kThreads, SkinnyConfig::kBlocksPerMultiprocessor)
    skinny_kernel(const __grid_constant__ SkinnyArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ float4 dynamic_memory[];
  constexpr int kBufferSums = kTileRows * SkinnyConfig::kTileColumns;
  double* const all_sums = reinterpret_cast<double*>(dynamic_memory);
  SumBuffers buffers{all_sums, all_sums + kBufferSums};
  uint8_t* const x = reinterpret_cast<uint8_t*>(all_sums + 2 * kBufferSums);
  const int k_range = arguments.k_tiles * SkinnyConfig::kKTileDepth;
  const int block_first_k = ptx::cluster_ctarank() * k_range;
  const int cluster = ptx::clusterid();
  const int first_row = cluster % arguments.x_tiles * kTileRows;
  int tile = cluster / arguments.x_tiles;

  PrefetchedWeights weights(arguments, tile, block_first_k);
  load_x<kTileRows>(arguments, x, first_row, block_first_k, k_range);
  __syncthreads();

  int previous_tile = -1;  // none yet
  const auto finish_previous_tile = [&] {
    ptx::cluster_wait();
    const FinishedTile finished{buffers.previous, first_row,
                                previous_tile * SkinnyConfig::kTileColumns};
    store_share_of_tile<kTileRows>(arguments, finished);
  };
  for (; tile < arguments.weight_tiles; tile += arguments.tile_step()) {
    if (arguments.epilogue.bias != nullptr && threadIdx.x == 0) {
      ptx::prefetch_l2(arguments.epilogue.bias + tile * SkinnyConfig::kTileColumns);
    }
    LaneSums<kTileRows> lane_sums = {};
    multiply_tile<kTileRows>(arguments, x, weights, lane_sums);
    double totals[WarpTotals<kTileRows>::kTotalsPerLane];
    add_lanes(lane_sums, totals);
    if (previous_tile >= 0) finish_previous_tile();
    share_totals<kTileRows>(totals, buffers.current);
    ptx::cluster_arrive();
    buffers.swap();
    previous_tile = tile;
  }
  if (previous_tile >= 0) finish_previous_tile();
  ptx::cluster_sync();  // a block must not end while another one still reads its shared memory
#endif
}

// ------------------------------------------------------------------------------------------ launch

// Returns how many clusters of `cluster_size` blocks run at once on the current device. CUDA's
// runtime is asked once for each device and size.
template <int kTileRows>
int known_active_clusters(int cluster_size) {
  constexpr int kDevices = 64;  // For further devices the runtime is asked each time.
  static std::atomic<int> known[kDevices][SkinnyConfig::kMaxClusterSize + 1];
  int device;
  check(cudaGetDevice(&device));
  if (device < kDevices && known[device][cluster_size] > 0) return known[device][cluster_size];
  Grid one_cluster{};
  one_cluster.blocks = cluster_size;
  one_cluster.threads = SkinnyConfig::kThreads;
  one_cluster.shared_bytes = SkinnyConfig::kMaxBytes;  // the most that a launch uses
  one_cluster.cluster_size = cluster_size;
  const int clusters = count_active_clusters(skinny_kernel<kTileRows>, one_cluster);
  if (device < kDevices) known[device][cluster_size] = clusters;
  return clusters;
}

struct Clusters {
  int cluster_size = 0;      // in blocks
  int blocks = 0;            // in all clusters; 0 if x fits into no cluster
  int k_tiles = 0;           // k-tiles that each block multiplies
  int64_t time = INT64_MAX;  // an estimate, in k-tiles
};

// Returns whether each block may multiply `k_tiles` k-tiles: its range of x fits into shared
// memory, and sums in float are not too long. In the largest cluster, sums may have any length.
template <int kTileRows>
bool allows_k_tiles(int k_tiles, int cluster_size) {
  const bool x_fits = shared_bytes<kTileRows>(k_tiles) <= SkinnyConfig::kMaxBytes;
  const bool is_float = std::is_same_v<Sum<kTileRows>, float>;
  const bool is_too_long = is_float && k_tiles > SkinnyConfig::kMaxFloatKTiles;
  const bool is_largest = cluster_size == SkinnyConfig::kMaxClusterSize;
  return x_fits && (!is_too_long || is_largest);
}

// Divides the work among clusters of `cluster_size` blocks, and estimates the time:
//
//   time = waves * (tiles of the weight for each cluster) * (k-tiles for each block + kTileEndTime)
//
// A wave is all tiles of the clusters that run at the same time. There is more than one wave only
// if x has more tiles than clusters run at once, because each tile of x needs a cluster. Otherwise
// no more clusters are launched than run at once.
template <int kTileRows>
Clusters divide_work(const SkinnyArguments& arguments, int cluster_size, int k_tiles) {
  const int x_tiles = arguments.x_tiles;
  const int active_clusters = known_active_clusters<kTileRows>(cluster_size);  // 1 or more
  const int clusters_of_x_tile = std::max(active_clusters / x_tiles, 1);
  const int64_t tiles_each = divide_up(arguments.weight_tiles, clusters_of_x_tile);
  // As few clusters as are needed if each computes tiles_each tiles of the weight.
  const int clusters = static_cast<int>(x_tiles * divide_up(arguments.weight_tiles, tiles_each));
  const int64_t waves = divide_up(x_tiles, active_clusters);

  Clusters result;
  result.cluster_size = cluster_size;
  result.blocks = clusters * cluster_size;
  result.k_tiles = k_tiles;
  result.time = waves * tiles_each * (k_tiles + SkinnyConfig::kTileEndTime);
  return result;
}

// Finds the cluster size, a power of two, with the least time. In a larger cluster each block has
// less of K, but fewer clusters run at once.
template <int kTileRows>
Clusters choose_clusters(const SkinnyArguments& arguments) {
  Clusters best;
  for (int size = 1; size <= SkinnyConfig::kMaxClusterSize; size *= 2) {
    const int k_tiles = static_cast<int>(divide_up(arguments.k, SkinnyConfig::kKTileDepth * size));
    if (!allows_k_tiles<kTileRows>(k_tiles, size)) continue;
    const Clusters clusters = divide_work<kTileRows>(arguments, size, k_tiles);
    if (clusters.time < best.time) best = clusters;
  }
  return best;
}

// Launches the kernel with kTileRows rows in a tile, or with fewer if a block's range of kTileRows
// rows of x does not fit into shared memory.
template <int kTileRows>
void launch_tiles(const LinearArguments& call, cudaStream_t stream) {
  SkinnyArguments arguments(call, /*tile_rows=*/kTileRows);
  const Clusters clusters = choose_clusters<kTileRows>(arguments);
  if constexpr (kTileRows > 1) {
    if (clusters.blocks == 0) return launch_tiles<kTileRows / 2>(call, stream);
  }
  arguments.k_tiles = clusters.k_tiles;
  Grid grid{};
  grid.blocks = clusters.blocks;
  grid.threads = SkinnyConfig::kThreads;
  grid.shared_bytes = shared_bytes<kTileRows>(clusters.k_tiles);
  grid.stream = stream;
  grid.cluster_size = clusters.cluster_size;
  launch_or_throw(grid, skinny_kernel<kTileRows>, arguments);
}

// Launches the kernel with the smallest tile that holds all m rows, or else with tiles of 16 rows.
// launch_tiles takes smaller tiles if K is long: for m = 8, for example, tiles of 2 rows if K is
// 26,625 or more. (Tiles of 4 rows are skipped there, because their doubles take as many bytes as 8
// rows of floats.)
inline void launch_for_rows(const LinearArguments& call, cudaStream_t stream) {
  if (call.m > 8) return launch_tiles<16>(call, stream);
  if (call.m > 4) return launch_tiles<8>(call, stream);
  if (call.m > 2) return launch_tiles<4>(call, stream);
  if (call.m > 1) return launch_tiles<2>(call, stream);
  launch_tiles<1>(call, stream);
}

}  // namespace kernels::skinny

namespace kernels::cuda {

bool linear_skinny_supports(const LinearArguments& call) {
  using skinny::SkinnyConfig;
  // Up to this K, one row of x, in double as the sums are, fits into the shared memory of the
  // largest cluster, beside the two buffers for sums. A k-tile is subtracted, as K of a block is
  // rounded up to whole k-tiles.
  constexpr int64_t kElementsPerBlock = SkinnyConfig::kMaxBytes / sizeof(skinny::Sum<1>);
  constexpr int64_t kMaxK =
      SkinnyConfig::kMaxClusterSize *
      (kElementsPerBlock - 2 * SkinnyConfig::kTileColumns - SkinnyConfig::kKTileDepth);
  return call.dtype == DType::kFloat32 && call.k <= kMaxK && call.m * call.n < int64_t{1} << 31 &&
         has_aligned_rows(call.x, sizeof(float) * call.x_stride) &&
         has_aligned_rows(call.weight, sizeof(float) * call.weight_stride);
}

int linear_skinny(const LinearArguments& call, CUstream_st* stream) {
  return status_of([&] { skinny::launch_for_rows(call, stream); });
}

}  // namespace kernels::cuda
