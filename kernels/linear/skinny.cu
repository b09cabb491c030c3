// Linear -> ReLU -> divide for few rows of x in float32, on Hopper:
//
//   out [m, n] = relu(x [m, k] weight [n, k]^T + bias [n]) / divisor
//   mask [m, (n + 7) / 8]: one bit an element of out, if the caller wants it (epilogue.cuh)
//
// run_gemm.h calls it through launchers.h, for the sizes that choose_path.h names.
//
// Why it is fast: with few rows, each element of the weight takes part in few products, so the time
// is that of reading the weight once from memory. No tensor core is needed: for 16 rows, the
// float32 units need half of the time in which the weight arrives. The kernel keeps reads of the
// weight in flight all the time.
//
// Row n of the weight makes column n of out, and is called column n here. A cluster of up to 8
// blocks computes a tile of kM rows of x (16 at most) and 32 columns, and then goes on to further
// tiles of columns. Its blocks divide K: each has its own range of K, and keeps that range of x in
// shared memory for all its tiles. For a cluster of 4 blocks:
//
//                                  K
//              | block 0  | block 1  | block 2  | block 3  |
//      x       |    kM rows; each block has its range in shared memory
//      weight  |  32 columns of the tile, streamed through registers
//
// Within a block, warp w multiplies columns 4 w to 4 w + 3 of the tile with all rows. In a "step",
// the warp handles 128 elements of K, and each of its lanes 4 of them:
//
//      K of the step      0..3     4..7    ...   124..127
//      column 4 w        lane 0   lane 1   ...   lane 31
//      column 4 w + 1    lane 0   lane 1   ...   lane 31
//      column 4 w + 2    lane 0   lane 1   ...   lane 31
//      column 4 w + 3    lane 0   lane 1   ...   lane 31
//
// A "batch" is two steps, so 256 elements of K. While a warp multiplies one batch, it loads the
// weights of the next into registers. At the end of a tile, these are the weights of the next tile.
//
// When a tile has been multiplied, each lane has partial sums over its elements of K. They are then
// added up, in double:
//
//   1. add_lanes adds the sums of the lanes of a warp, by shuffles.
//   2. add_blocks adds the sums of the blocks of a cluster, which read each other's shared memory.
//   3. add_blocks also adds the products of the last k % 4 elements of K, which fill no float4, and
//      the bias.
//
// Accuracy: because add_lanes adds in double and not in float, mean errors are 30% smaller. That
// costs 6% of the time of 16 rows, and nothing up to 8 rows. A lane's partial sums are in double if
// a tile has at most 4 rows, for which there is time. For more rows they are in float. A cluster
// then has enough blocks, if possible, that such a sum covers 4 batches at most, so that few
// roundings add up.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels::skinny {

// The constants of skinny_kernel and of its launch.
struct Config {
  static constexpr int kWarps = 8;  // of a block
  static constexpr int kThreads = 32 * kWarps;
  // Columns of a warp, and of a tile. With 4 warps of 8 columns each, 16 rows of [8192, 8192] take
  // 15% longer.
  static constexpr int kWarpColumns = 4;
  static constexpr int kTileColumns = kWarps * kWarpColumns;
  // Elements of K: of a lane in a step (one float4), of a warp in a step, and of a batch, which is
  // what a warp prefetches. With one step a batch, 16 rows take 11% longer; with four, registers
  // spill.
  static constexpr int kLaneK = 4;
  static constexpr int kStepK = 32 * kLaneK;
  static constexpr int kStepsPerBatch = 2;
  static constexpr int kBatchK = kStepsPerBatch * kStepK;
  // With two blocks on a multiprocessor, one loads while the other adds up sums.
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kMaxBytes = 112 * 1024;  // of dynamic shared memory of a block
  static_assert(kBlocksPerMultiprocessor * (kMaxBytes + 1024) <= 228 * 1024,
                "two blocks, with 1 KiB each that CUDA reserves, fit into a Hopper multiprocessor");
  // The most blocks of a cluster: 8, the largest size that every GPU with clusters supports.
  static constexpr int kLogMaxClusterSize = 3;
  static constexpr int kMaxClusterSize = 1 << kLogMaxClusterSize;
  // The most batches over which a lane should sum in float, so that few roundings add up.
  static constexpr int kMaxFloatBatches = 4;
  // The time that the end of a tile takes, in batches. If it counts as 2 batches when the cluster
  // size is chosen, 32 rows take 9% longer.
  static constexpr int kTileEndBatches = 1;
};

// The type in which a lane sums its products, for tiles of kM rows of x.
template <int kM>
using Sum = std::conditional_t<(kM > 4), float, double>;

// The parameters of skinny_kernel.
struct Problem {
  const float* x;
  const float* weight;
  int64_t x_stride;
  int64_t weight_stride;
  Epilogue<float> epilogue;
  int k;
  int x_tiles;       // of kM rows
  int weight_tiles;  // of kTileColumns columns
  int batches;       // of K, in each block of a cluster

  // K without the elements after the last whole float4.
  __device__ int whole_k() const { return k / Config::kLaneK * Config::kLaneK; }
};

// The shared memory of a block: the sums of two tiles, double [2][kM][kTileColumns], and the
// block's range of x, Sum<kM> [steps][kM][kStepK].
template <int kM>
constexpr size_t shared_bytes(int batches) {
  return kM *
         (2 * Config::kTileColumns * sizeof(double) + batches * Config::kBatchK * sizeof(Sum<kM>));
}

// ---------------------------------------------------------------------------- a row of x in a step

// How 128 elements of a row of x, those of one step, are stored in shared memory. Each lane has
// four elements. As floats they are one 16-byte vector. As doubles they are two vectors: the first
// vectors of all lanes are one line, and the second vectors are the next line, so that the accesses
// of a warp have no bank conflicts:
//
//              lane 0       lane 1       lane 2      ...
//   float    x0 x1 x2 x3  x4 x5 x6 x7  x8 x9 ...          one line of kLineBytes
//
//   double      x0 x1        x4 x5        x8 x9           first line of kLineBytes
//               x2 x3        x6 x7       x10 x11          second line of kLineBytes
struct XStep {
  static constexpr int kLaneBytes = 16;
  static constexpr int kLineBytes = 32 * kLaneBytes;
};

// Stores this lane's four elements of a row, as T, float or double. The 128 elements of the row
// begin at `row`.
template <typename T>
__device__ void store_step(uint8_t* row, float4 v) {
  uint8_t* const target = row + threadIdx.x % 32 * XStep::kLaneBytes;
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float4*>(target) = v;
  } else {
    *reinterpret_cast<double2*>(target) = {v.x, v.y};
    *reinterpret_cast<double2*>(target + XStep::kLineBytes) = {v.z, v.w};
  }
}

// Loads this lane's four elements of a row, as store_step stored them. `address` is the address of
// the lane's first vector in shared memory.
__device__ inline void load_step(uint32_t address, float (&v)[4]) {
  const float4 four = ptx::load_shared_four(address);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
__device__ inline void load_step(uint32_t address, double (&v)[4]) {
  const double2 low = ptx::load_shared_two(address);
  const double2 high = ptx::load_shared_two(address + XStep::kLineBytes);
  v[0] = low.x;
  v[1] = low.y;
  v[2] = high.x;
  v[3] = high.y;
}

// Copies the block's range of x, k_range elements of each row from first_k on, to `x` in shared
// memory, with zeros past the last row and past whole_k.
template <int kM>
__device__ void load_x(const Problem& problem, uint8_t* x, int first_row, int first_k,
                       int k_range) {
  constexpr int kRowBytes = Config::kStepK * sizeof(Sum<kM>);  // of one row in one step
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int steps = k_range / Config::kStepK;
#pragma unroll 4
  for (int i = warp; i < steps * kM; i += Config::kWarps) {
    const int row = first_row + i % kM;
    const int k = first_k + i / kM * Config::kStepK + lane * Config::kLaneK;
    const bool exists = row < problem.epilogue.m && k < problem.whole_k();
    const float4* const source =
        reinterpret_cast<const float4*>(problem.x + row * problem.x_stride + k);
    store_step<Sum<kM>>(x + i * kRowBytes, exists ? __ldg(source) : float4{});
  }
}

// ---------------------------------------------------------------------------- weights and products

// The weights that this lane multiplies next: v[step][column] has 4 elements of K of a column of
// the warp. As soon as a step has been multiplied, its weights are replaced by those of the next
// batch. `tile` and `batch` tell which weights are loaded next.
struct PrefetchedWeights {
  const Problem& problem;
  int tile;                       // of columns
  const int first_k;              // this lane's K in the block's first step
  int batch = 0;                  // of the block's range of K
  const float* source = nullptr;  // the weight of the warp's first column, at first_k
  int columns_after = 0;          // how many columns exist after the warp's first
  float4 v[Config::kStepsPerBatch][Config::kWarpColumns]{};

  // Finds this warp's columns in the tile. Past the last column, the last one is loaded instead, so
  // that all addresses are valid; the results are not stored.
  __device__ void find_columns() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int first_column = tile * Config::kTileColumns + warp * Config::kWarpColumns;
    const int column = min(first_column, problem.epilogue.n - 1);
    source = problem.weight + column * problem.weight_stride + first_k;
    columns_after = problem.epilogue.n - 1 - column;
  }

  // Loads the weights of a step. They are 0 past the end of K and after the last tile.
  __device__ void load(int step) {
    const int k = batch * Config::kBatchK + step * Config::kStepK;
    const bool exists = first_k + k < problem.whole_k() && tile < problem.weight_tiles;
#pragma unroll
    for (int i = 0; i < Config::kWarpColumns; ++i) {
      // Past the last column this is the last one again.
      const float* const address = source + min(i, columns_after) * problem.weight_stride + k;
      v[step][i] = ptx::load_global_four_if(exists, address);
    }
  }

  // Goes on to the next batch, or to the first batch of the cluster's next tile.
  __device__ void advance() {
    if (++batch < problem.batches) return;
    batch = 0;
    tile += ptx::nclusterid() / problem.x_tiles;
    find_columns();
  }
};

// Adds the products of one step to the sums [kM][kWarpColumns] of this lane. `x_address` is where
// this lane's elements of the first row of x in the step are in shared memory.
template <int kM>
__device__ __forceinline__ void multiply_step(Sum<kM> (&sum)[kM * Config::kWarpColumns],
                                              const PrefetchedWeights& weights, int step,
                                              uint32_t x_address) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    Sum<kM> a[4];
    load_step(x_address + m * Config::kStepK * sizeof(Sum<kM>), a);
#pragma unroll
    for (int i = 0; i < Config::kWarpColumns; ++i) {
      const float4& b = weights.v[step][i];
      Sum<kM>& s = sum[m * Config::kWarpColumns + i];
      // In this order ptxas finds registers for the sums of 16 rows.
      s = fma(a[3], Sum<kM>{b.w}, s);
      s = fma(a[2], Sum<kM>{b.z}, s);
      s = fma(a[1], Sum<kM>{b.y}, s);
      s = fma(a[0], Sum<kM>{b.x}, s);
    }
  }
}

// -------------------------------------------------------------------------------------------- sums

// Each of the 32 lanes of a warp has kCount sums. Adds sum i of all lanes, for each i, and spreads
// the totals over the lanes: lane l gets kTotals of them, from i = l * kCount / 32 on, in `totals`.
//
// Pairs of lanes that are kDistance apart exchange half of their sums. The lower lane keeps the
// lower half and sends the upper half; the upper lane does the opposite. Both add what they
// receive. The recursion does the same with half as many sums, at half the distance, down to a
// distance of 1. The first call has kDistance = 16. For kCount = 4, the lanes have these sums after
// each exchange:
//
//   kDistance = 16    lanes 0..15: sums 0, 1                  lanes 16..31: sums 2, 3
//   kDistance = 8     lanes 0..7: sum 0    8..15: sum 1       16..23: sum 2    24..31: sum 3
//   4, 2 and 1     the same; both lanes of a pair keep their single sum
template <int kDistance, typename T, int kCount, int kTotals>
__device__ void add_lanes(const T (&sums)[kCount], double (&totals)[kTotals]) {
  constexpr int kHalf = kCount > 1 ? kCount / 2 : 1;
  const bool is_upper = threadIdx.x & kDistance;
  double added[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const T low = sums[i];
    const T high = sums[kCount - kHalf + i];
    const T kept = is_upper ? high : low;
    const T sent = is_upper ? low : high;
    added[i] = double{kept} + double{__shfl_xor_sync(0xffffffff, sent, kDistance)};
  }
  if constexpr (kDistance > 1) {
    add_lanes<kDistance / 2>(added, totals);
  } else {
#pragma unroll
    for (int i = 0; i < kTotals; ++i) totals[i] = added[i];
  }
}

// Returns the sum of all blocks' sums of an element. `block_sum` points to this block's, in shared
// memory, and the other blocks of the cluster have theirs at the same place. All loads are issued
// before the first one is waited for. The sums are added in pairs, so the order is always the same.
__device__ __forceinline__ double sum_of_blocks(const double* block_sum) {
  const int cluster_size = ptx::cluster_nctarank();
  const uint32_t address = ptx::shared_address(block_sum);
  double block_sums[Config::kMaxClusterSize];
#pragma unroll
  for (int i = 0; i < Config::kMaxClusterSize; ++i) {
    const bool exists = i < cluster_size;
    block_sums[i] = exists ? ptx::load_shared_cluster(ptx::map_shared(address, i)) : 0;
  }
#pragma unroll
  for (int half = Config::kMaxClusterSize / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) block_sums[i] += block_sums[i + half];
  }
  return block_sums[0];
}

// Returns an element of x weight^T + bias: the sum over the blocks of the cluster, plus the
// products of the last k % 4 elements of K, plus the bias. `block_sum` points to this block's sum
// of the element, in shared memory. The other blocks have theirs at the same place.
template <int kM>
__device__ float add_blocks(const Problem& problem, const double* block_sum, int row, int column) {
  double sum = sum_of_blocks(block_sum);
  const float* const x = problem.x + row * problem.x_stride;
  const float* const weight = problem.weight + column * problem.weight_stride;
#pragma unroll 1
  for (int k = problem.whole_k(); k < problem.k; ++k) {
    sum = fma(double{x[k]}, double{weight[k]}, sum);
  }
  // A partial sum in float may have overflowed although the whole sum is finite. Then all products
  // are summed again, in double, until a NaN decides.
  constexpr bool kMayOverflow = std::is_same_v<Sum<kM>, float>;
  if (kMayOverflow && !isfinite(sum)) {
    sum = 0;
    for (int k = 0; k < problem.k && !isnan(sum); ++k) {
      sum = fma(double{x[k]}, double{weight[k]}, sum);
    }
  }
  if (problem.epilogue.bias != nullptr) sum += __ldg(problem.epilogue.bias + column);
  return static_cast<float>(sum);
}

// Stores this block's share of the results and mask of a tile, whose sums are in the shared memory
// of the cluster's blocks.
//
// A byte of the mask, with its 8 results, is handled by 8 lanes, one for each result, so a warp
// handles 4 bytes at once. A tile [kM][32] has 4 bytes a row: byte b is in row b / 4, and its
// columns begin at b % 4 * 8. The blocks of the cluster take bytes in turn. For a cluster of 2
// blocks:
//
//   byte    0     1     2     3     4     5     6     7     8     9    ...
//   block   0     1     0     1     0     1     0     1     0     1
//   warp    0     0     0     0     0     0     0     0     1     1
//   lanes  0-7   0-7   8-15  8-15  16-23 16-23 24-31 24-31  0-7   0-7
template <int kM>
__device__ void store_results(const Problem& problem, const double* sums, int first_row,
                              int first_column) {
  const int rank = ptx::cluster_ctarank();
  const int cluster_size = ptx::cluster_nctarank();
  constexpr int kBytesPerRow = Config::kTileColumns / 8;
  constexpr int kBytes = kM * kBytesPerRow;
  constexpr int kBytesPerWarp = 32 / 8;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Epilogue<float>& epilogue = problem.epilogue;
  const int bytes_at_once = Config::kWarps * kBytesPerWarp * cluster_size;
  // first_byte is the byte of lanes 0 to 7.
  for (int first_byte = warp * kBytesPerWarp * cluster_size + rank; first_byte < kBytes;
       first_byte += bytes_at_once) {
    const int byte = first_byte + lane / 8 * cluster_size;
    const int row_of_tile = byte / kBytesPerRow;
    const int column_of_tile = byte % kBytesPerRow * 8 + lane % 8;
    const int row = first_row + row_of_tile;
    const int column = first_column + column_of_tile;
    const bool exists = byte < kBytes && row < epilogue.m && column < epilogue.n;
    float z = 0;
    if (exists) {
      const double* const sum = sums + row_of_tile * Config::kTileColumns + column_of_tile;
      z = add_blocks<kM>(problem, sum, row, column);
      *epilogue.out_at(row, column) = epilogue.finish(z);
    }
    if (epilogue.mask != nullptr) {
      const uint32_t bits = __ballot_sync(0xffffffff, exists && mask_bit(z)) >> (lane / 8 * 8);
      const bool stores_byte = exists && lane % 8 == 0;
      if (stores_byte) *epilogue.mask_at(row, column) = static_cast<uint8_t>(bits);
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel

// Computes tiles of kM rows of x. Cluster c has tile c % x_tiles of x. Its first tile of columns is
// c / x_tiles, and from one to the next it goes on by clusters / x_tiles. Example: 6 clusters and 2
// tiles of x. Cluster 3 has tile 1 of x, and the tiles 1, 4, 7 ... of columns.
//
// The sums of a tile are added up over the cluster while the next tile is multiplied, so that
// blocks hardly ever wait for each other. That takes two buffers for sums:
//
//   tile t        multiply ......................  sums to buffer A, arrive
//   tile t + 1    multiply, wait, results of t from A,  sums to buffer B, arrive
//   tile t + 2    multiply, wait, results of t + 1 from B,  sums to buffer A, arrive
//
// `arrive` tells the cluster that a block's sums are there, and that it has read the other buffer.
// `wait` waits until all blocks of the cluster have arrived.
template <int kM>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerMultiprocessor)
    skinny_kernel(const __grid_constant__ Problem problem) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ float4 dynamic_memory[];
  double* sums = reinterpret_cast<double*>(dynamic_memory);  // [kM][kTileColumns]
  double* previous_sums = sums + kM * Config::kTileColumns;  // of the previous tile
  uint8_t* const x = reinterpret_cast<uint8_t*>(previous_sums + kM * Config::kTileColumns);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int k_range = problem.batches * Config::kBatchK;
  const int first_k = ptx::cluster_ctarank() * k_range;
  const int cluster = ptx::clusterid();
  const int first_row = cluster % problem.x_tiles * kM;
  int tile = cluster / problem.x_tiles;

  PrefetchedWeights weights{problem, tile, first_k + lane * Config::kLaneK};
  weights.find_columns();
#pragma unroll
  for (int step = 0; step < Config::kStepsPerBatch; ++step) weights.load(step);
  weights.advance();
  load_x<kM>(problem, x, first_row, first_k, k_range);
  __syncthreads();

  // A lane has kCount sums, [kM][kWarpColumns], and after add_lanes kTotals totals. If there are
  // fewer than 32 sums, kLanesPerTotal lanes have the same total. Example: kM = 2 has 8 sums, so
  // four lanes have the same one.
  constexpr int kCount = kM * Config::kWarpColumns;
  constexpr int kLanesPerTotal = kCount < 32 ? 32 / kCount : 1;
  constexpr int kTotals = kCount * kLanesPerTotal / 32;
  int previous = -1;  // the tile whose sums are in previous_sums, if there is one
  for (; tile < problem.weight_tiles; tile += ptx::nclusterid() / problem.x_tiles) {
    if (problem.epilogue.bias != nullptr && threadIdx.x == 0) {
      ptx::prefetch_l2(problem.epilogue.bias + tile * Config::kTileColumns);
    }
    Sum<kM> sum[kCount] = {};
    uint32_t x_address = ptx::shared_address(x + lane * XStep::kLaneBytes);
    for (int batch = 0; batch < problem.batches; ++batch) {
#pragma unroll
      for (int step = 0; step < Config::kStepsPerBatch; ++step) {
        multiply_step<kM>(sum, weights, step, x_address);
        weights.load(step);
        x_address += kM * Config::kStepK * sizeof(Sum<kM>);
      }
      weights.advance();
    }
    double totals[kTotals];
    add_lanes<16>(sum, totals);

    // The tile before, whose sums have arrived in the meantime.
    if (previous >= 0) {
      ptx::cluster_wait();
      store_results<kM>(problem, previous_sums, first_row, previous * Config::kTileColumns);
    }
    // This tile's sums. Of lanes with the same total, the first stores it.
    if (lane % kLanesPerTotal == 0) {
#pragma unroll
      for (int i = 0; i < kTotals; ++i) {
        const int index = lane * kCount / 32 + i;  // in sum [kM][kWarpColumns]
        const int row = index / Config::kWarpColumns;
        const int column = warp * Config::kWarpColumns + index % Config::kWarpColumns;
        sums[row * Config::kTileColumns + column] = totals[i];
      }
    }
    ptx::cluster_arrive();
    previous = tile;
    double* const swapped = sums;
    sums = previous_sums;
    previous_sums = swapped;
  }
  if (previous >= 0) {
    ptx::cluster_wait();
    store_results<kM>(problem, previous_sums, first_row, previous * Config::kTileColumns);
  }
  ptx::cluster_sync();  // a block must not end while another one still reads its shared memory
#endif
}

// ------------------------------------------------------------------------------------------ launch

// Returns how many clusters of 1 << log_size blocks run at once on the current device. CUDA's
// runtime is asked once for each device and size.
template <int kM>
int known_active_clusters(int log_size) {
  constexpr int kDevices = 64;  // For further devices the runtime is asked each time.
  static std::atomic<int> known[kDevices][Config::kLogMaxClusterSize + 1];
  int device;
  check(cudaGetDevice(&device));
  if (device < kDevices && known[device][log_size] > 0) return known[device][log_size];
  const int size = 1 << log_size;
  const cudaStream_t no_stream = nullptr;
  const Grid one_cluster{size,      Config::kThreads,  Config::kMaxBytes,
                         no_stream, /*has_pdl=*/false, /*cluster=*/size};
  const int clusters = count_active_clusters(skinny_kernel<kM>, one_cluster);
  if (device < kDevices) known[device][log_size] = clusters;
  return clusters;
}

// How a problem is divided among clusters.
struct Division {
  int cluster_size = 0;  // blocks; 0 if the problem fits no cluster size
  int blocks = 0;        // of all clusters
  int batches = 0;       // of each block
};

// Finds the cluster size with the least time. In a larger cluster each block has less of K, but
// fewer clusters run at once. The time is counted in batches:
//
//   time = waves * tiles of columns of a cluster * (batches of a block + kTileEndBatches)
//
// There is more than one wave only if not all tiles of x have a cluster at once.
// (docs/EXPERIMENTS.md, "Few rows", has the measurement behind kTileEndBatches.)
template <int kM>
Division divide(int k, int x_tiles, int weight_tiles) {
  constexpr bool kSumsInFloat = std::is_same_v<Sum<kM>, float>;
  const int all_batches = blocks_of(k, Config::kBatchK);
  Division best;
  int64_t least_time = INT64_MAX;
  for (int log_size = 0; log_size <= Config::kLogMaxClusterSize; ++log_size) {
    const int batches = blocks_of(all_batches, 1 << log_size);
    if (shared_bytes<kM>(batches) > Config::kMaxBytes) continue;
    // Sums in float that are too long are accepted only in the largest cluster.
    const bool is_too_long = kSumsInFloat && batches > Config::kMaxFloatBatches;
    if (is_too_long && log_size < Config::kLogMaxClusterSize) continue;
    const int clusters = known_active_clusters<kM>(log_size);
    const int tiles_each = blocks_of(weight_tiles, std::max(clusters / x_tiles, 1));
    const int64_t waves = blocks_of(x_tiles, clusters);
    const int64_t time = waves * tiles_each * (batches + Config::kTileEndBatches);
    if (time >= least_time) continue;
    least_time = time;
    best.cluster_size = 1 << log_size;
    best.batches = batches;
    // As few clusters as are needed if each computes tiles_each tiles of columns.
    best.blocks = x_tiles * blocks_of(weight_tiles, tiles_each) * best.cluster_size;
  }
  return best;
}

// Launches the kernel with kM rows a tile, or with fewer if a block's range of kM rows of x does
// not fit into shared memory.
template <int kM>
void launch_tiles(const LinearArguments& linear, cudaStream_t stream) {
  Problem problem{static_cast<const float*>(linear.x),
                  static_cast<const float*>(linear.weight),
                  linear.x_stride,
                  linear.weight_stride,
                  Epilogue<float>(linear),
                  static_cast<int>(linear.k),
                  blocks_of(linear.m, kM),
                  blocks_of(linear.n, Config::kTileColumns)};
  const Division division = divide<kM>(problem.k, problem.x_tiles, problem.weight_tiles);
  if constexpr (kM > 1) {
    if (division.blocks == 0) return launch_tiles<kM / 2>(linear, stream);
  }
  problem.batches = division.batches;
  const size_t bytes = shared_bytes<kM>(division.batches);
  const Grid grid{division.blocks, Config::kThreads,  bytes,
                  stream,          /*has_pdl=*/false, division.cluster_size};
  launch_grid(grid, skinny_kernel<kM>, problem);
}

// Launches the kernel with the smallest tile that holds all m rows, or else with tiles of 16 rows.
inline void launch_for_rows(const LinearArguments& linear, cudaStream_t stream) {
  if (linear.m > 8) return launch_tiles<16>(linear, stream);
  if (linear.m > 4) return launch_tiles<8>(linear, stream);
  if (linear.m > 2) return launch_tiles<4>(linear, stream);
  if (linear.m > 1) return launch_tiles<2>(linear, stream);
  launch_tiles<1>(linear, stream);
}

}  // namespace kernels::skinny

namespace kernels::cuda {

bool linear_skinny_supports(const LinearArguments& linear) {
  using skinny::Config;
  // The largest K for which one row of x fits into the shared memory of the largest cluster, beside
  // the two buffers for sums. The row's elements are double, as the sums are. A batch is
  // subtracted because K of a block is rounded up to whole batches.
  constexpr int64_t kElementsPerBlock = Config::kMaxBytes / sizeof(skinny::Sum<1>);
  constexpr int64_t kMaxK =
      Config::kMaxClusterSize * (kElementsPerBlock - 2 * Config::kTileColumns - Config::kBatchK);
  return linear.dtype == DType::kFloat32 && linear.k <= kMaxK &&
         linear.m * linear.n < int64_t{1} << 31 &&
         has_aligned_rows(linear.x, sizeof(float) * linear.x_stride) &&
         has_aligned_rows(linear.weight, sizeof(float) * linear.weight_stride);
}

int linear_skinny(const LinearArguments& linear, CUstream_st* stream) {
  return status_of([&] { skinny::launch_for_rows(linear, stream); });
}

}  // namespace kernels::cuda
