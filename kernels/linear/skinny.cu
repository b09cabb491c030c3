// Linear -> ReLU -> divide of few rows of x in float32, on Hopper: bound by reading the weight.
//
// No tensor core takes part: 16 rows of float32 need half of the time that the weight takes to
// arrive. A cluster's blocks share K, each with its range of x in shared memory, and go through
// tiles of 32 features: a warp multiplies 4 of them with all rows, its lanes side by side along K,
// while the next weights are prefetched. The blocks' sums, of short runs, are added up in double
// while they work on the next tile; up to 4 rows have time for runs in double.
//
//   x [m, k], weight [n, k], bias [n], out [m, n] float32; mask [m, (n + 7) / 8]

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

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kFeatures = 4, kClusterFeatures = kWarps * kFeatures;  // of a thread; of a cluster
constexpr int kStep = 128;                                           // of K: four of each lane
constexpr int kPrefetched = 2;  // steps whose weights are prefetched
constexpr int kStageK = kPrefetched * kStep;
constexpr int kBlocksEach = 2;                             // on a multiprocessor
constexpr int kBytes = 112 * 1024;                         // of shared memory, the most of a block
constexpr int kLogRanks = 3, kMostRanks = 1 << kLogRanks;  // blocks of a cluster
constexpr int kMostStages = 4;  // of a run in float, so that its sums stay short
constexpr int kTileEnd = 1;     // stages that the end of a tile costs

struct Problem {
  const float *x, *weight;
  int64_t x_stride, weight_stride;
  Epilogue<float> epilogue;
  int k, x_tiles, weight_tiles;
  int stages;                                           // of kStageK, in each block
  __device__ int whole_k() const { return k / 4 * 4; }  // add_blocks adds the rest
};

// The type in which kM rows of x are multiplied and summed.
template <int kM>
using Sum = std::conditional_t<(kM > 4), float, double>;

template <int kM>
constexpr size_t bytes(int stages) {
  return kM * (2 * kClusterFeatures * sizeof(double) + stages * kStageK * sizeof(Sum<kM>));
}

// A step of a row of x in shared memory: 16 bytes of each lane, or, in double, two times that.
constexpr int kLaneBytes = 16, kWarpBytes = 32 * kLaneBytes;

__device__ inline void store_step(uint8_t* step, float4 v, float) {
  *reinterpret_cast<float4*>(step + threadIdx.x % 32 * kLaneBytes) = v;
}
__device__ inline void store_step(uint8_t* step, float4 v, double) {
  uint8_t* const to = step + threadIdx.x % 32 * kLaneBytes;
  *reinterpret_cast<double2*>(to) = {v.x, v.y};
  *reinterpret_cast<double2*>(to + kWarpBytes) = {v.z, v.w};
}

__device__ inline void load_step(uint32_t address, float (&v)[4]) {
  const float4 four = ptx::load_shared_four(address);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ inline void load_step(uint32_t address, double (&v)[4]) {
  const double2 low = ptx::load_shared_two(address);
  const double2 high = ptx::load_shared_two(address + kWarpBytes);
  v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

// The weights that a warp multiplies next, prefetched: those of a tile and of a stage, 256 of K.
struct Weights {
  const Problem& p;
  int tile;
  const int first_k;  // this lane's
  int stage = 0;
  const float* first = nullptr;        // feature of the warp's
  int more = 0;                        // features after it
  float4 v[kPrefetched][kFeatures]{};  // four of K each

  __device__ void locate() {
    const int feature = min(
        tile * kClusterFeatures + static_cast<int>(threadIdx.x) / 32 * kFeatures, p.epilogue.n - 1);
    first = p.weight + feature * p.weight_stride + first_k;
    more = p.epilogue.n - 1 - feature;
  }

  __device__ void load(int step) {
    const int k = stage * kStageK + step * kStep;
    const bool valid = first_k + k < p.whole_k() && tile < p.weight_tiles;
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {  // past the last feature, the last again
      v[step][i] = ptx::load_global_four_if(valid, first + min(i, more) * p.weight_stride + k);
    }
  }

  __device__ void advance() {
    if (++stage < p.stages) return;
    stage = 0;
    tile += ptx::nclusterid() / p.x_tiles;
    locate();
  }
};

// Adds the sums of all lanes: of kCount, lane l gets those from l kCount / 32 on.
template <int kApart, typename T, int kCount, int kOwn>
__device__ void add_lanes(const T (&sums)[kCount], double (&own)[kOwn]) {
  constexpr int kHalf = kCount > 1 ? kCount / 2 : 1;
  const bool upper = threadIdx.x & kApart;
  double added[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const T low = sums[i], high = sums[kCount - kHalf + i];
    added[i] = double{upper ? high : low} +
               double{__shfl_xor_sync(0xffffffff, upper ? low : high, kApart)};
  }
  if constexpr (kApart > 1) {
    add_lanes<kApart / 2>(added, own);
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = added[i];
  }
}

// One result before the epilogue: the blocks' sums, the end of K, and the bias.
template <int kM>
__device__ float add_blocks(const Problem& p, const double* sums, int row, int feature) {
  const int ranks = ptx::cluster_nctarank();
  const uint32_t address = ptx::shared_address(sums);
  double of_rank[kMostRanks];
#pragma unroll
  for (int i = 0; i < kMostRanks; ++i) {
    of_rank[i] = i < ranks ? ptx::load_shared_cluster(ptx::map_shared(address, i)) : 0;
  }
#pragma unroll
  for (int half = kMostRanks / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) of_rank[i] += of_rank[i + half];
  }
  double sum = of_rank[0];
  const float* const x = p.x + row * p.x_stride;
  const float* const weight = p.weight + feature * p.weight_stride;
#pragma unroll 1
  for (int k = p.whole_k(); k < p.k; ++k) sum = fma(double{x[k]}, double{weight[k]}, sum);
  if (sizeof(Sum<kM>) == sizeof(float) && !isfinite(sum)) {  // a partial one overflowed, maybe
    sum = 0;
    for (int k = 0; k < p.k && !isnan(sum); ++k) sum = fma(double{x[k]}, double{weight[k]}, sum);
  }
  if (p.epilogue.bias != nullptr) sum += __ldg(p.epilogue.bias + feature);
  return static_cast<float>(sum);
}

template <int kM>
__device__ void store_results(const Problem& p, const double* sums, int first_row,
                              int first_feature) {
  const int rank = ptx::cluster_ctarank(), ranks = ptx::cluster_nctarank();
  constexpr int kBytesEach = kClusterFeatures / 8, kCount = kM * kBytesEach;  // of the mask
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Epilogue<float>& epilogue = p.epilogue;
  for (int first = warp * 4 * ranks + rank; first < kCount; first += kWarps * 4 * ranks) {
    const int byte = first + lane / 8 * ranks;
    const int row_of_tile = byte / kBytesEach, feature_of_tile = byte % kBytesEach * 8 + lane % 8;
    const int row = first_row + row_of_tile, feature = first_feature + feature_of_tile;
    const bool exists = byte < kCount && row < epilogue.m && feature < epilogue.n;
    float z = 0;
    if (exists) {
      z = add_blocks<kM>(p, sums + row_of_tile * kClusterFeatures + feature_of_tile, row, feature);
      *epilogue.out_at(row, feature) = epilogue.finish(z);
    }
    if (epilogue.mask != nullptr) {
      const uint32_t bits = __ballot_sync(0xffffffff, exists && mask_bit(z)) >> (lane / 8 * 8);
      if (exists && lane % 8 == 0) *epilogue.mask_at(row, feature) = static_cast<uint8_t>(bits);
    }
  }
}

template <int kM>
__device__ __forceinline__ void multiply_step(Sum<kM> (&sum)[kM * kFeatures],
                                              const Weights& weights, int step, uint32_t x) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    Sum<kM> a[4];
    load_step(x + m * kStep * sizeof(Sum<kM>), a);
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {
      const float4& b = weights.v[step][i];
      Sum<kM>& s = sum[m * kFeatures + i];
      // In this order ptxas finds registers for the sums of 16 rows.
      s = fma(a[3], Sum<kM>{b.w}, s);
      s = fma(a[2], Sum<kM>{b.z}, s);
      s = fma(a[1], Sum<kM>{b.y}, s);
      s = fma(a[0], Sum<kM>{b.x}, s);
    }
  }
}

template <int kM>
__global__ void __launch_bounds__(kThreads, kBlocksEach)
    skinny_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ float4 dynamic_memory[];
  double* sums = reinterpret_cast<double*>(dynamic_memory);  // [2][kM][kClusterFeatures]
  double* other = sums + kM * kClusterFeatures;
  uint8_t* const x = reinterpret_cast<uint8_t*>(other + kM * kClusterFeatures);  // [steps][kM]
  constexpr int kStepBytes = kStep * sizeof(Sum<kM>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int k_range = p.stages * kStageK, first_k = ptx::cluster_ctarank() * k_range;
  const int cluster = ptx::clusterid(), first_row = cluster % p.x_tiles * kM;
  int tile = cluster / p.x_tiles;

  // load
  Weights weights{p, tile, first_k + lane * 4};
  weights.locate();
#pragma unroll
  for (int step = 0; step < kPrefetched; ++step) weights.load(step);
  weights.advance();
#pragma unroll 4
  for (int i = warp; i < k_range / kStep * kM; i += kWarps) {
    const int row = first_row + i % kM, k = first_k + i / kM * kStep + lane * 4;
    const bool exists = row < p.epilogue.m && k < p.whole_k();
    const float4* const from = reinterpret_cast<const float4*>(p.x + row * p.x_stride + k);
    store_step(x + i * kStepBytes, exists ? __ldg(from) : float4{}, Sum<kM>{});
  }
  __syncthreads();

  // While the sums of one tile are added up, those of the next are made.
  int previous = -1;
  for (; tile < p.weight_tiles; tile += ptx::nclusterid() / p.x_tiles) {
    // multiply
    if (p.epilogue.bias != nullptr && threadIdx.x == 0) {
      ptx::prefetch_l2(p.epilogue.bias + tile * kClusterFeatures);
    }
    Sum<kM> sum[kM * kFeatures] = {};
    uint32_t of_x = ptx::shared_address(x + lane * kLaneBytes);
    for (int stage = 0; stage < p.stages; ++stage) {
#pragma unroll
      for (int step = 0; step < kPrefetched; ++step, of_x += kM * kStepBytes) {
        multiply_step<kM>(sum, weights, step, of_x);
        weights.load(step);
      }
      weights.advance();
    }

    // add
    constexpr int kCount = kM * kFeatures, kLanesEach = kCount < 32 ? 32 / kCount : 1;
    double own[kCount * kLanesEach / 32];
    add_lanes<16>(sum, own);
    if (previous >= 0) {  // epilogue
      ptx::cluster_wait();
      store_results<kM>(p, other, first_row, previous * kClusterFeatures);
    }
    if (lane % kLanesEach == 0) {
#pragma unroll
      for (int i = 0; i < kCount * kLanesEach / 32; ++i) {
        const int at = lane * kCount / 32 + i;
        sums[at / kFeatures * kClusterFeatures + warp * kFeatures + at % kFeatures] = own[i];
      }
    }
    ptx::cluster_arrive();
    previous = tile;
    double* const swapped = sums;
    sums = other, other = swapped;
  }
  if (previous >= 0) {
    ptx::cluster_wait();
    store_results<kM>(p, other, first_row, previous * kClusterFeatures);
  }
  ptx::cluster_sync();  // a block that has ended can't be read from
#endif
}

// How many clusters of 1 << log_ranks blocks run at once, asked once a device.
template <int kM>
int count_clusters(int log_ranks) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kLogRanks + 1];
  int device;
  check(cudaGetDevice(&device));
  if (device < kDevices && known[device][log_ranks] > 0) return known[device][log_ranks];
  const int ranks = 1 << log_ranks;
  const Grid cluster{ranks, kThreads, kBytes, nullptr, /*has_pdl=*/false, ranks};
  const int clusters = kernels::count_clusters(skinny_kernel<kM>, cluster);
  if (device < kDevices) known[device][log_ranks] = clusters;
  return clusters;
}

template <int kM>
void launch(const LinearArguments& linear, cudaStream_t stream) {
  Problem problem{static_cast<const float*>(linear.x),
                  static_cast<const float*>(linear.weight),
                  linear.x_stride,
                  linear.weight_stride,
                  Epilogue<float>(linear),
                  static_cast<int>(linear.k),
                  blocks_of(linear.m, kM),
                  blocks_of(linear.n, kClusterFeatures)};
  // Clusters of so many blocks that all tiles are done soonest.
  const int all_stages = blocks_of(problem.k, kStageK);
  int64_t least = INT64_MAX;
  int ranks = 0, blocks = 0;
  for (int log_ranks = 0; log_ranks <= kLogRanks; ++log_ranks) {
    const int stages = blocks_of(all_stages, 1 << log_ranks);
    const bool is_long = sizeof(Sum<kM>) == sizeof(float) && stages > kMostStages;
    if (bytes<kM>(stages) > kBytes || (is_long && log_ranks < kLogRanks)) continue;
    const int clusters = count_clusters<kM>(log_ranks);
    const int tiles_each = blocks_of(problem.weight_tiles, std::max(clusters / problem.x_tiles, 1));
    const int64_t waves = blocks_of(problem.x_tiles, clusters);
    const int64_t time = waves * tiles_each * (stages + kTileEnd);
    if (time >= least) continue;
    least = time, ranks = 1 << log_ranks;
    problem.stages = stages;
    // As few clusters as it takes for as many tiles each.
    blocks = problem.x_tiles * blocks_of(problem.weight_tiles, tiles_each) * ranks;
  }
  if constexpr (kM > 1) {
    if (blocks == 0) return launch<kM / 2>(linear, stream);
  }
  launch_grid({blocks, kThreads, bytes<kM>(problem.stages), stream, /*has_pdl=*/false, ranks},
              skinny_kernel<kM>, problem);
}

}  // namespace kernels::skinny

namespace kernels::cuda {

bool linear_skinny_supports(const LinearArguments& linear) {
  constexpr int64_t kMostK = skinny::kMostRanks * (skinny::kBytes / sizeof(skinny::Sum<1>) -
                                                   2 * skinny::kClusterFeatures - skinny::kStageK);
  return linear.dtype == DType::kFloat32 && linear.k <= kMostK &&
         linear.m * linear.n < int64_t{1} << 31 &&
         has_aligned_rows(linear.x, 4 * linear.x_stride) &&
         has_aligned_rows(linear.weight, 4 * linear.weight_stride);
}

int linear_skinny(const LinearArguments& linear, CUstream_st* stream) {
  const auto launch = linear.m > 8   ? skinny::launch<16>
                      : linear.m > 4 ? skinny::launch<8>
                      : linear.m > 2 ? skinny::launch<4>
                      : linear.m > 1 ? skinny::launch<2>
                                     : skinny::launch<1>;
  return status_of([&] { launch(linear, stream); });
}

}  // namespace kernels::cuda
