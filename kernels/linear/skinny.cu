// Linear -> ReLU -> divide of few rows of x in float32, on Hopper: bound by reading the weight.
//
// No tensor core takes part: in float32 as it is, 16 rows need half of the time that the weight
// takes to arrive. A cluster's blocks share out K, and each keeps its share of x in shared memory
// for as long as it lives. The cluster goes through groups of 32 features: a warp multiplies 4 of
// them with all rows, its lanes side by side along K, while the weights that follow are on their
// way to registers. The blocks' sums are added up while they work on the next group.
//
// Sums of short runs, added up in double, err less than a library's. Up to 4 rows leave time for
// runs in double. The order of all sums is fixed.
//
// Slower on an H200, with 16 rows and 8192 x 8192 weights: 8 features of a thread, in half
// as many threads (15%); weights one step ahead (11%), and four, which spills; half of a warp's
// lanes side by side along K, so that a read of x serves both halves (3%). Adding up the lanes in
// double costs 6% there, and nothing up to 8 rows; mean errors fall by 30%.

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "common/ptx/sm90.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"

namespace kernels {
namespace skinny {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kFeatures = 4;                // of a thread
constexpr int kGroup = kWarps * kFeatures;  // features of a cluster
constexpr int kStep = 128;                  // of K: four of each lane
constexpr int kAhead = 2;                   // steps whose weights are on their way
constexpr int kChunk = kAhead * kStep;
constexpr int kBlocksEach = 2;                             // on a multiprocessor
constexpr int kBytes = 112 * 1024;                         // of shared memory, the most of a block
constexpr int kLogRanks = 3, kMostRanks = 1 << kLogRanks;  // blocks of a cluster
// Runs in float are of no more chunks, so that their sums stay short.
constexpr int kMostChunks = 4;
// The end of a group costs so many chunks. With 2, 32 rows took up to 9% longer on an H200.
constexpr int kEndOfGroup = 1;

struct Problem {
  const float* x;
  int64_t x_stride;
  const float* weight;
  int64_t weight_stride;
  const float* bias;
  float floor;
  Divisor<float> divisor;
  float* out;
  uint8_t* mask;
  int m, n, k;
  int x_tiles, groups;
  int chunks;  // of K, in each block
};

// The type in which kM rows of x are multiplied and summed.
template <int kM>
using Sum = std::conditional_t<(kM > 4), float, double>;

template <int kM>
constexpr size_t bytes(int chunks) {
  return kM * (2 * kGroup * sizeof(double) + chunks * kChunk * sizeof(Sum<kM>));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The part of K that is whole vectors of four. `store` adds the rest.
__device__ inline int whole_k(const Problem& p) { return p.k / 4 * 4; }

// A step of a row of x in shared memory, of which a lane has four: as 16 bytes of each lane, or,
// in double, two times that.
constexpr int kLaneBytes = 16, kWarpBytes = 32 * kLaneBytes;

__device__ inline void put(uint8_t* step, float4 v, float) {
  *reinterpret_cast<float4*>(step + threadIdx.x % 32 * kLaneBytes) = v;
}
__device__ inline void put(uint8_t* step, float4 v, double) {
  uint8_t* const to = step + threadIdx.x % 32 * kLaneBytes;
  *reinterpret_cast<double2*>(to) = {v.x, v.y};
  *reinterpret_cast<double2*>(to + kWarpBytes) = {v.z, v.w};
}

// Reads the sums that `put` has left at this lane's address.
__device__ inline void get(uint32_t address, float (&v)[4]) {
  const float4 four = ptx::load_shared_four(address);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ inline void get(uint32_t address, double (&v)[4]) {
  const double2 low = ptx::load_shared_two(address);
  const double2 high = ptx::load_shared_two(address + kWarpBytes);
  v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

// The weights that a warp multiplies next, on their way: those of a group and of a chunk of K.
class Weights {
 public:
  // first_k is this lane's.
  __device__ Weights(const Problem& p, int group, int first_k)
      : p_(p), group_(group), first_k_(first_k) {
    find();
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(step);
    advance();
  }

  // Four of K, of one feature.
  __device__ const float4& at(int step, int i) const { return v_[step][i]; }

  __device__ void load(int step) {
    const int k = chunk_ * kChunk + step * kStep;
    const bool valid = first_k_ + k < whole_k(p_) && group_ < p_.groups;
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {  // what does not exist is the last
      const float* const from = first_ + min(i, more_) * p_.weight_stride + k;
      v_[step][i] = ptx::load_global_four_if(valid, from);
    }
  }

  __device__ void advance() {
    if (++chunk_ < p_.chunks) return;
    chunk_ = 0;
    group_ += ptx::nclusterid() / p_.x_tiles;
    find();
  }

 private:
  __device__ void find() {
    const int feature =
        min(group_ * kGroup + static_cast<int>(threadIdx.x) / 32 * kFeatures, p_.n - 1);
    first_ = p_.weight + feature * p_.weight_stride + first_k_;
    more_ = p_.n - 1 - feature;
  }

  const Problem& p_;
  const float* first_;  // feature of the warp's
  int more_;            // features behind it
  int group_, chunk_ = 0;
  const int first_k_;
  float4 v_[kAhead][kFeatures];
};

// Adds the sums of all lanes, half of them in each half of the lanes: of kCount, lane l is left
// with those from l kCount / 32 on.
template <int kApart, typename T, int kCount, int kOwn>
__device__ void add_lanes(const T (&sums)[kCount], double (&own)[kOwn]) {
  constexpr int kLeft = kCount > 1 ? kCount / 2 : 1;
  const bool upper = threadIdx.x & kApart;
  double added[kLeft];
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const T low = sums[i], high = sums[kCount - kLeft + i];
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

// Instead of a sum that is infinite or NaN: on the way to it, float may have been left.
__device__ inline double wide_sum(const float* x, const float* weight, int k) {
  double sum = 0;
  for (int i = 0; i < k && !isnan(sum); ++i) sum = fma(double{x[i]}, double{weight[i]}, sum);
  return sum;
}

// This block's share of a group's results, from what all blocks have found.
template <int kM>
__device__ void store(const Problem& p, const double* sums, int first_row, int first_feature) {
  const int rank = ptx::cluster_ctarank(), ranks = ptx::cluster_nctarank();
  constexpr int kBytesEach = kGroup / 8, kCount = kM * kBytesEach;  // of the mask
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = warp * 4 * ranks + rank; first < kCount; first += kWarps * 4 * ranks) {
    const int byte = first + lane / 8 * ranks;
    const int row = byte / kBytesEach, column = byte % kBytesEach * 8 + lane % 8;
    const bool exists = byte < kCount && first_row + row < p.m && first_feature + column < p.n;
    float z = 0;
    if (exists) {
      const uint32_t address = ptx::shared_address(sums + row * kGroup + column);
      double part[kMostRanks];
#pragma unroll
      for (int i = 0; i < kMostRanks; ++i) {
        part[i] = i < ranks ? ptx::load_shared_cluster(ptx::map_shared(address, i)) : 0;
      }
#pragma unroll
      for (int half = kMostRanks / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
      }
      double sum = part[0];
      const float* const of_x = p.x + (first_row + row) * p.x_stride;
      const float* const of_weight = p.weight + (first_feature + column) * p.weight_stride;
#pragma unroll 1
      for (int k = whole_k(p); k < p.k; ++k) {
        sum = fma(double{of_x[k]}, double{of_weight[k]}, sum);
      }
      if (sizeof(Sum<kM>) == sizeof(float) && !isfinite(sum)) {
        sum = wide_sum(of_x, of_weight, p.k);
      }
      if (p.bias != nullptr) sum += __ldg(p.bias + first_feature + column);
      z = static_cast<float>(sum);
      p.out[static_cast<int64_t>(first_row + row) * p.n + first_feature + column] =
          p.divisor.quotient(z < p.floor ? 0.0f : z);
    }
    if (p.mask != nullptr) {
      const uint32_t bits = __ballot_sync(0xffffffff, exists && mask_bit(z)) >> (lane / 8 * 8);
      if (exists && lane % 8 == 0) {
        const int64_t row_bytes = (p.n + 7) / 8;
        p.mask[(first_row + row) * row_bytes + (first_feature + column) / 8] = bits;
      }
    }
  }
}

#endif

// Takes kM rows of x at a time.
template <int kM>
__global__ void __launch_bounds__(kThreads, kBlocksEach)
    skinny_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ float4 dynamic_memory[];
  double* const both_sums = reinterpret_cast<double*>(dynamic_memory);         // [2][kM][kGroup]
  uint8_t* const x = reinterpret_cast<uint8_t*>(both_sums + 2 * kM * kGroup);  // [steps][kM]
  constexpr int kStepBytes = kStep * sizeof(Sum<kM>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slice = p.chunks * kChunk, first_k = ptx::cluster_ctarank() * slice;
  const int cluster = ptx::clusterid(), first_row = cluster % p.x_tiles * kM;
  int group = cluster / p.x_tiles;
  Weights weights(p, group, first_k + lane * 4);

#pragma unroll 4
  for (int i = warp; i < slice / kStep * kM; i += kWarps) {
    const int row = first_row + i % kM, k = first_k + i / kM * kStep + lane * 4;
    const bool exists = row < p.m && k < whole_k(p);
    const float4* const from = reinterpret_cast<const float4*>(p.x + row * p.x_stride + k);
    put(x + i * kStepBytes, exists ? __ldg(from) : float4{}, Sum<kM>{});
  }
  __syncthreads();

  // While those of one group are added up, those of the next are found.
  double* sums = both_sums;
  double* other = both_sums + kM * kGroup;
  int previous = -1;
  for (; group < p.groups; group += ptx::nclusterid() / p.x_tiles) {
    if (p.bias != nullptr && threadIdx.x == 0) ptx::prefetch_l2(p.bias + group * kGroup);
    Sum<kM> sum[kM * kFeatures] = {};
    uint32_t of_x = ptx::shared_address(x + lane * kLaneBytes);
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
#pragma unroll
      for (int step = 0; step < kAhead; ++step, of_x += kM * kStepBytes) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          Sum<kM> a[4];
          get(of_x + m * kStepBytes, a);
#pragma unroll
          for (int i = 0; i < kFeatures; ++i) {
            const float4& b = weights.at(step, i);
            Sum<kM>& s = sum[m * kFeatures + i];
            // In this order ptxas finds registers for the sums of 16 rows.
            s = fma(a[3], Sum<kM>{b.w}, s);
            s = fma(a[2], Sum<kM>{b.z}, s);
            s = fma(a[1], Sum<kM>{b.y}, s);
            s = fma(a[0], Sum<kM>{b.x}, s);
          }
        }
        weights.load(step);
      }
      weights.advance();
    }
    constexpr int kCount = kM * kFeatures, kLanesEach = kCount < 32 ? 32 / kCount : 1;
    double own[kCount * kLanesEach / 32];
    add_lanes<16>(sum, own);
    if (previous >= 0) {
      ptx::cluster_wait();
      store<kM>(p, other, first_row, previous * kGroup);
    }
    if (lane % kLanesEach == 0) {
#pragma unroll
      for (int i = 0; i < kCount * kLanesEach / 32; ++i) {
        const int at = lane * kCount / 32 + i;
        sums[at / kFeatures * kGroup + warp * kFeatures + at % kFeatures] = own[i];
      }
    }
    ptx::cluster_arrive();
    previous = group;
    double* const swapped = sums;
    sums = other;
    other = swapped;
  }
  if (previous >= 0) {
    ptx::cluster_wait();
    store<kM>(p, other, first_row, previous * kGroup);
  }
  ptx::cluster_sync();  // a block that has left can't be read from
#endif
}

constexpr int blocks_of(int size, int block) { return (size + block - 1) / block; }

inline cudaLaunchConfig_t configuration(int log_ranks, int blocks, size_t bytes,
                                        cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {1u << log_ranks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// How many clusters of 1 << log_ranks blocks run at once, which hangs on where the GPU's
// multiprocessors are. It is asked for once.
template <int kM>
int count_clusters(int log_ranks, int* clusters) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kLogRanks + 1];
  int device;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kDevices && (*clusters = known[device][log_ranks]) > 0) return cudaSuccess;
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = configuration(log_ranks, 1 << log_ranks, kBytes, &attribute);
  status = cudaOccupancyMaxActiveClusters(clusters, skinny_kernel<kM>, &config);
  if (status != cudaSuccess) return status;
  if (*clusters == 0) return cudaErrorInvalidConfiguration;
  if (device < kDevices) known[device][log_ranks] = *clusters;
  return cudaSuccess;
}

template <int kM>
int launch(const Linear& linear, cudaStream_t stream) {
  const auto kernel = skinny_kernel<kM>;
  int status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  Problem problem{static_cast<const float*>(linear.x),
                  linear.x_stride,
                  static_cast<const float*>(linear.weight),
                  linear.weight_stride,
                  static_cast<const float*>(linear.bias),
                  floor_of(linear.relu),
                  Divisor<float>(linear.divisor),
                  static_cast<float*>(linear.out),
                  linear.mask,
                  static_cast<int>(linear.m),
                  static_cast<int>(linear.n),
                  static_cast<int>(linear.k),
                  blocks_of(static_cast<int>(linear.m), kM),
                  blocks_of(static_cast<int>(linear.n), kGroup),
                  0};
  // Clusters of so many blocks that all groups are done soonest.
  const int all_chunks = blocks_of(problem.k, kChunk);
  int64_t least = INT64_MAX;
  int best = 0, blocks = 0;
  for (int log_ranks = 0; log_ranks <= kLogRanks; ++log_ranks) {
    const int chunks = blocks_of(all_chunks, 1 << log_ranks);
    const bool is_long = sizeof(Sum<kM>) == sizeof(float) && chunks > kMostChunks;
    if (bytes<kM>(chunks) > kBytes || (is_long && log_ranks < kLogRanks)) continue;
    int clusters;
    status = count_clusters<kM>(log_ranks, &clusters);
    if (status != cudaSuccess) return status;
    const int rounds = blocks_of(problem.groups, std::max(clusters / problem.x_tiles, 1));
    const int64_t waves = blocks_of(problem.x_tiles, clusters);
    const int64_t time = waves * rounds * (chunks + kEndOfGroup);
    if (time >= least) continue;
    least = time, best = log_ranks;
    problem.chunks = chunks;
    // As few clusters as it takes for the same number of rounds.
    blocks = problem.x_tiles * blocks_of(problem.groups, rounds) << log_ranks;
  }
  if constexpr (kM > 1) {
    if (blocks == 0) return launch<kM / 2>(linear, stream);
  }
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = configuration(best, blocks, bytes<kM>(problem.chunks), &attribute);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, problem);
}

}  // namespace skinny

namespace cuda {

bool linear_skinny_serves(const Linear& linear) {
  const auto is_aligned = [](const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 4 == 0;
  };
  constexpr int64_t kMostK = skinny::kMostRanks * (skinny::kBytes / sizeof(skinny::Sum<1>) -
                                                   2 * skinny::kGroup - skinny::kChunk);
  return linear.dtype == DType::kFloat32 && linear.k <= kMostK &&
         linear.m * linear.n < int64_t{1} << 31 && is_aligned(linear.x, linear.x_stride) &&
         is_aligned(linear.weight, linear.weight_stride);
}

int linear_skinny(const Linear& linear, CUstream_st* stream) {
  if (linear.m > 8) return skinny::launch<16>(linear, stream);
  if (linear.m > 4) return skinny::launch<8>(linear, stream);
  if (linear.m > 2) return skinny::launch<4>(linear, stream);
  if (linear.m > 1) return skinny::launch<2>(linear, stream);
  return skinny::launch<1>(linear, stream);
}

}  // namespace cuda
}  // namespace kernels
