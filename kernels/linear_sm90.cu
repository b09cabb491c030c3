// Linear -> ReLU -> divide on Hopper: TMA, wgmma, and the whole epilogue on the accumulators.
//
// Both kernels are persistent, in clusters of two blocks that share what one of the operands has in
// common: a warpgroup brings the data, two multiply. float16 and bfloat16 are multiplied as they
// are. float32 is split into pairs of fp16 (split.cuh): x by a kernel before, the weight, which is
// read once, in the registers of the warps that multiply it.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "epilogue.cuh"
#include "launchers.h"
#include "ptx.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kClusterSize = 2;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536,
              "a multiprocessor has 65,536 registers");
// Rows of a tile in shared memory are as long as the widest swizzle.
constexpr int kRowBytes = 128;
// Clusters that run at once work on so many tiles of x side by side, so that L2 serves both
// operands.
constexpr int kGroup = 8;

// The tiles of the result, each a cluster's work, in the order in which they are taken.
struct Tiles {
  int x_tiles, weight_tiles;

  __host__ __device__ int count() const { return x_tiles * weight_tiles; }
  __device__ void find(int index, int* x_tile, int* weight_tile) const {
    const int group = index / (kGroup * weight_tiles);
    const int rest = index - group * (kGroup * weight_tiles);
    const int size = min(kGroup, x_tiles - group * kGroup);
    *x_tile = group * kGroup + rest % size;
    *weight_tile = rest / size;
  }
};

// Where the stages of a pipeline stand: the next stage, and the parity of its barrier's phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ int previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// Barriers of a stage: `full` when its bytes are there, `empty` when the warps that multiply, those
// of both blocks, have read it, and others of this block that read it.
template <int kStages>
struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

// Results leave the registers in turns of so many blocks of 8 columns, through memory of which each
// thread has its own part. A loop over the registers themselves has to be unrolled, whose code is
// late from memory whenever L2 has lost it, and takes ptxas a minute.
constexpr int kTurn = 4;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kStages>
__device__ void init_barriers(Barriers<kStages>& barriers, int local_readers) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&barriers.full[s], 1);
      ptx::mbarrier_init(&barriers.empty[s], 4 * kConsumers * kClusterSize + local_readers);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
}

template <int kSums>
__device__ void stage_turn(float4 (&staging)[kTurn][128], const float (&sums)[kSums], int turn,
                           int thread) {
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    if (i / kTurn == turn) {
      staging[i % kTurn][thread] =
          make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }
}

// Tells the producers of both blocks that this warp has read a stage.
template <int kStages>
__device__ void release(Barriers<kStages>& barriers, int stage) {
  const int lane = threadIdx.x % 32;
  if (lane < kClusterSize) ptx::mbarrier_arrive_cluster(&barriers.empty[stage], lane);
}

#endif

// --------------------------------------------------------------------------- float16, bfloat16

constexpr int kHalfRows = 64 * kConsumers;  // rows of x of a block's tile: operand A
constexpr int kHalfColumns = 256;           // rows of weight: operand B
constexpr int kHalfK = kRowBytes / 2;
constexpr int kHalfStages = 4;

struct HalfMemory {
  uint8_t x[kHalfStages][kHalfRows * kRowBytes];
  uint8_t weight[kHalfStages][kHalfColumns * kRowBytes];
  float4 staging[kConsumers][kTurn][128];
  float bias[kConsumers][kHalfColumns];
  Barriers<kHalfStages> barriers;
};

template <typename T>
struct HalfProblem {
  const T* bias;
  T* out;
  uint8_t* mask;
  int m, n, k;
  Divisor<float> divisor;
  Tiles tiles;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T>
__device__ float to_float(T value) {
  return static_cast<float>(value);
}

template <typename T>
__device__ uint32_t pack_as(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Lane c of each four has word b of its own; afterwards it has word c of lane b.
__device__ inline void transpose_quad(uint32_t (&v)[4], int c) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = c & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i | bit], bit);
      (upper ? v[i] : v[i | bit]) = taken;
    }
  }
}

// Four blocks of 8 columns of one row, spread over four lanes with two columns of each block in
// every lane: finished, and stored with block c, its 8 columns and its byte of the mask, by lane c.
template <typename T>
__device__ void store_row(const HalfProblem<T>& p, int row, int column, const float2 (&sum)[4],
                          const float2 (&bias)[4], int c) {
  uint32_t words[4], bits = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float z0 = sum[b].x + bias[b].x, z1 = sum[b].y + bias[b].y;
    words[b] = pack_as<T>(relu_divide(z0, p.divisor), relu_divide(z1, p.divisor));
    const int at = column + 8 * b + 2 * c;
    const uint32_t pair = (at < p.n && mask_bit(z0)) | (at + 1 < p.n && mask_bit(z1)) << 1;
    bits |= pair << (8 * b + 2 * c);
  }
  transpose_quad(words, c);
  column += 8 * c;
  if (p.mask != nullptr) {
    bits |= __shfl_xor_sync(0xffffffff, bits, 1);
    bits |= __shfl_xor_sync(0xffffffff, bits, 2);
    if (row < p.m && column < p.n) {
      p.mask[static_cast<int64_t>(row) * ((p.n + 7) / 8) + column / 8] =
          static_cast<uint8_t>(bits >> (8 * c));
    }
  }
  if (row >= p.m) return;
  T* const to = p.out + static_cast<int64_t>(row) * p.n + column;
  if (p.n % 8 == 0) {
    if (column < p.n) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint16_t half = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      if (column + i < p.n) reinterpret_cast<uint16_t*>(to)[i] = half;
    }
  }
}

#endif

template <typename T>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    half_kernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap weight_map, const HalfProblem<T> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  HalfMemory& shared = *reinterpret_cast<HalfMemory*>(dynamic_memory);
  const int warpgroup = threadIdx.x / 128;
  const int rank = ptx::cluster_ctarank();
  const int first = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;
  const int steps = (p.k + kHalfK - 1) / kHalfK;
  init_barriers(shared.barriers, 0);

  Ring<kHalfStages> ring;
  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int end = threadIdx.x == kConsumers * 128 ? p.tiles.count() : 0;
    for (int tile = first; tile < end; tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      constexpr int kShare = kHalfColumns / kClusterSize;  // rows of weight a block brings for both
      const int row = (x_tile * kClusterSize + rank) * kHalfRows;
      const int weight_row = weight_tile * kHalfColumns + rank * kShare;
      for (int step = 0; step < steps; ++step, ring.advance()) {
        uint64_t* const full = &shared.barriers.full[ring.stage];
        ptx::mbarrier_wait(&shared.barriers.empty[ring.stage], ring.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, (kHalfRows + kHalfColumns) * kRowBytes);
        ptx::copy_tensor(shared.x[ring.stage], &x_map, step * kHalfK, row, full);
        ptx::copy_tensor_multicast(&shared.weight[ring.stage][rank * kShare * kRowBytes],
                                   &weight_map, step * kHalfK, weight_row, full,
                                   (1 << kClusterSize) - 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int g = lane / 4, c = lane % 4;
    float d[kHalfColumns / 2];
    for (int tile = first; tile < p.tiles.count(); tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      for (int step = 0; step < steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(&shared.barriers.full[ring.stage], ring.parity);
        const uint64_t a =
            ptx::matrix_descriptor(&shared.x[ring.stage][warpgroup * 64 * kRowBytes]);
        const uint64_t b = ptx::matrix_descriptor(shared.weight[ring.stage]);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < kHalfK / 16; ++s) {
          ptx::wgmma(T{}, d, a + s * ptx::kDescriptorK16, b + s * ptx::kDescriptorK16,
                     step > 0 || s > 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (step > 0) release(shared.barriers, ring.previous());
      }
      ptx::wgmma_wait_group<0>();
      release(shared.barriers, ring.previous());

      // The bias of the tile, by way of memory that the warpgroup shares.
      ptx::barrier_sync(1 + warpgroup, 128);  // all have read that of the tile before
#pragma unroll
      for (int i = thread; i < kHalfColumns; i += 128) {
        const int at = weight_tile * kHalfColumns + i;
        const bool exists = p.bias != nullptr && at < p.n;
        shared.bias[warpgroup][i] = exists ? to_float(p.bias[at]) : 0.0f;
      }
      ptx::barrier_sync(1 + warpgroup, 128);

      const int row = (x_tile * kClusterSize + rank) * kHalfRows + warpgroup * 64 +
                      threadIdx.x % 128 / 32 * 16 + g;
      float4(&staging)[kTurn][128] = shared.staging[warpgroup];
#pragma unroll 1
      for (int turn = 0; turn < kHalfColumns / 8 / kTurn; ++turn) {
        stage_turn(staging, d, turn, thread);
        const int column = turn * kTurn * 8;
        float2 upper[kTurn], lower[kTurn], bias[kTurn];
#pragma unroll
        for (int b = 0; b < kTurn; ++b) {
          const float4 sum = staging[b][thread];
          upper[b] = make_float2(sum.x, sum.y);
          lower[b] = make_float2(sum.z, sum.w);
          bias[b] =
              *reinterpret_cast<const float2*>(&shared.bias[warpgroup][column + 8 * b + 2 * c]);
        }
        store_row(p, row, weight_tile * kHalfColumns + column, upper, bias, c);
        store_row(p, row + 8, weight_tile * kHalfColumns + column, lower, bias, c);
      }
    }
  }
  ptx::cluster_sync();  // a block that has left can't be copied to
#endif
}

// ------------------------------------------------------------------------------------- float32

// With operand A in registers, its rows are those of the weight. Operand B is the split x.
template <int kProducts>
struct Split {
  static constexpr bool kPromotes = kProducts == 3;
  static constexpr int kWeightRows = 64 * kConsumers;
  // The promoted sums take as many registers as the accumulators; 176 leaves room for both, and
  // makes 1024 rows of x six tiles, which with 64 of the weight fill 132 multiprocessors to 97%.
  static constexpr int kXRows = kPromotes ? 176 : 256;
  static constexpr int kAccumulators = kXRows / 2;
  static constexpr int kK = kPromotes ? 32 : 64;
  static constexpr int kStages = kPromotes ? 5 : 3;
  static constexpr int kSteps16 = kK / 16;
  static constexpr int kBoxes = kK * 4 / kRowBytes;  // of the weight, side by side

  // How a row of the split x lies in memory: of each 16 of k, 4c to 4c + 3 are columns 2c, 2c + 1,
  // 2c + 8 and 2c + 9 to the tensor core, which are those of thread c of a quad. It thus loads four
  // neighbours of the weight. Of a pair, 32 high come before their 32 low.
  struct Order {
    static constexpr int kGroup = 16;
    static __device__ constexpr int position(int i) { return i / 4 * 2 + i % 2 + i % 4 / 2 * 8; }
    static __device__ int64_t place(int64_t i) { return kPromotes ? i / 32 * 64 + i % 32 : i; }
    static __host__ __device__ int64_t pitch(int64_t padded_k) { return padded_k * kParts; }
  };
  static constexpr int kParts = kPromotes ? 2 : 1;
  static constexpr int kLow = 32;

  // Behind the end of k the copies bring zeros.
  static __device__ int steps(int k) { return (k + kK - 1) / kK; }

  struct Memory {
    uint8_t x[kStages][kXRows * kRowBytes];
    uint8_t weight[kStages][kBoxes][kWeightRows * kRowBytes];
    float4 staging[kConsumers][kTurn][128];
    Barriers<kStages> barriers;
  };
  static_assert(sizeof(Memory) <= 227 * 1024, "a block has no more shared memory");
};

// The weight is read once, so its rows are scaled by what a sample of them says: eight pieces of 16
// elements, evenly spread. The largest is put below 2^8, which leaves the others a factor of 256
// before they pass fp16's range, and 14 bits below before they count as small.
constexpr int kSampledPieces = 8;
constexpr int kSampledExponent = 7;

// A block a row of x; behind those, a warp a row of the weight.
template <int kProducts>
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, int* any_flag) {
  if (blockIdx.x < x.rows) {
    const bool flagged = split::split_row<typename Split<kProducts>::Order>(x, blockIdx.x, k);
    if (flagged && threadIdx.x == 0) *any_flag = 1;
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t row = (blockIdx.x - x.rows) * (split::kThreads / 32) + threadIdx.x / 32;
  if (row >= weight.rows) return;
  const int64_t piece = lane / (32 / kSampledPieces);
  const int64_t at = piece * k / kSampledPieces / 4 * 4 + lane % (32 / kSampledPieces) * 4;
  float largest = 0;
  if (at + 4 <= k) {
    const float4 v = *reinterpret_cast<const float4*>(weight.from + row * weight.row_stride + at);
    largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  }
  for (int bit = 16; bit > 0; bit /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
  }
  if (lane == 0) {
    const int exponent = largest > 0 ? kSampledExponent - ilogbf(largest) : 0;
    weight.exponent[row] = max(-126, min(126, exponent));
    weight.counts[row] = {0, 0};
  }
}

// Steps between two promotions: 128 of K.
constexpr int kPromoteSteps = 4;
// Warps that look for rows of the weight that the split can't carry, beside those that multiply.
constexpr int kJudges = 2;
// The counts of a row are ints.
constexpr int64_t kMostK = 1 << 24;

struct SplitProblem {
  const float* bias;
  float* out;
  uint8_t* mask;
  const int* x_exponent;         // [m]
  const int* weight_exponent;    // [n]
  split::Counts* weight_counts;  // [n], 0 at first
  int* any_flag;
  int m, n, k;
  Divisor<float> divisor;
  Tiles tiles;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The barrier at which a warpgroup waits for its turn.
__device__ inline int turn_of(int warpgroup) { return 1 + warpgroup; }

// The row of its warp's 16 that is row g (r = 0) or g + 8 (r = 1) of the warp's fragments: two
// neighbours a thread, for the stores, and rows 4 apart in neighbouring quads, which keeps 16-byte
// loads of swizzled rows free of bank conflicts.
__device__ inline int fragment_row(int g, int r) {
  return (g & 4) << 1 | (g & 1) << 2 | (g & 2) | r;
}

// One finished element of each of four rows of the weight, in one row of x.
__device__ inline void store_four(const SplitProblem& p, int row, int column, float (&z)[4],
                                  bool is_upper) {
  if (p.mask != nullptr) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (column + i < p.n && mask_bit(z[i])) << i;
    bits |= __shfl_xor_sync(0xffffffff, bits, 4) << 4;  // the next four, with the quad beside
    if (!is_upper && row < p.m && column < p.n) {
      p.mask[static_cast<int64_t>(row) * ((p.n + 7) / 8) + column / 8] = static_cast<uint8_t>(bits);
    }
  }
  if (row >= p.m) return;
#pragma unroll
  for (float& element : z) element = relu_divide(element, p.divisor);
  float* const to = p.out + static_cast<int64_t>(row) * p.n + column;
  if (p.n % 4 == 0) {
    if (column < p.n) *reinterpret_cast<float4*>(to) = make_float4(z[0], z[1], z[2], z[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < p.n) to[i] = z[i];
    }
  }
}

// Brings the tiles, each in steps of K: one thread.
template <int kProducts>
__device__ void produce(typename Split<kProducts>::Memory& shared, const CUtensorMap& x_map,
                        const CUtensorMap& weight_map, const SplitProblem& p) {
  using S = Split<kProducts>;
  constexpr int kShare = S::kXRows / kClusterSize;  // rows of x a block brings for both
  const int rank = ptx::cluster_ctarank();
  Ring<S::kStages> ring;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int row = x_tile * S::kXRows + rank * kShare;
    const int weight_row = (weight_tile * kClusterSize + rank) * S::kWeightRows;
    for (int step = 0; step < S::steps(p.k); ++step, ring.advance()) {
      uint64_t* const full = &shared.barriers.full[ring.stage];
      ptx::mbarrier_wait(&shared.barriers.empty[ring.stage], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, (S::kXRows + S::kBoxes * S::kWeightRows) * kRowBytes);
      ptx::copy_tensor_multicast(&shared.x[ring.stage][rank * kShare * kRowBytes], &x_map,
                                 step * (kRowBytes / 2), row, full, (1 << kClusterSize) - 1);
#pragma unroll
      for (int box = 0; box < S::kBoxes; ++box) {
        ptx::copy_tensor(shared.weight[ring.stage][box], &weight_map, step * S::kK + box * 32,
                         weight_row, full);
      }
    }
  }
}

// Counts what the split carries badly of every row of the weight. A lane has rows of its own. The
// tiles that share rows of the weight take turns in looking, and add up what they find.
template <int kProducts>
__device__ void judge(typename Split<kProducts>::Memory& shared, const SplitProblem& p, int warp) {
  using S = Split<kProducts>;
  constexpr int kRows = S::kWeightRows / kJudges / 32;
  const int lane = threadIdx.x % 32;
  const int steps = S::steps(p.k), shares = min(p.tiles.x_tiles, steps);
  Ring<S::kStages> ring;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int first = warp * kRows * 32 + lane;
    const int weight_row =
        (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows + first;
    float small[kRows], largest[kRows];
    int nonzeros[kRows], smalls[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(weight_row + r * 32, p.n - 1);
      const float unit = split::power_of_two(-__ldg(p.weight_exponent + row));
      small[r] = unit * (kProducts == 3 ? split::kSmallPair : split::kSmallHigh);
      largest[r] = 0;
      nonzeros[r] = smalls[r] = 0;
    }
    int turn = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ptx::mbarrier_wait(&shared.barriers.full[ring.stage], ring.parity);
      if (turn == x_tile) {
#pragma unroll 2
        for (int chunk = 0; chunk < S::kBoxes * 8; ++chunk) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const int row = first + r * 32;
            const float4 four = *reinterpret_cast<const float4*>(
                &shared.weight[ring.stage][chunk / 8][row * kRowBytes + (chunk ^ row) % 8 * 16]);
            for (const float v : {four.x, four.y, four.z, four.w}) {
              nonzeros[r] += v != 0.0f;
              smalls[r] += v != 0.0f && fabsf(v) < small[r];
              largest[r] = ptx::max_nan(largest[r], fabsf(v));
            }
          }
        }
      }
      if (++turn == shares) turn = 0;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.barriers.empty[ring.stage]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      constexpr float kTooLarge = 65520;  // rounds to infinity in fp16
      const int row = weight_row + r * 32;
      if (row >= p.n || x_tile >= shares) continue;
      // So many that the nonzeros can't make up for them, however many tiles find one too large.
      const float scaled = largest[r] * split::power_of_two(p.weight_exponent[row]);
      if (!(scaled < kTooLarge)) smalls[r] = (1 << 30) / shares;
      atomicAdd(&p.weight_counts[row].smalls, smalls[r]);
      atomicAdd(&p.weight_counts[row].nonzeros, nonzeros[r]);
      // If the row is flagged, then one share at least looks like it: by its smalls in proportion,
      // or by having no more nonzeros than its part of few.
      const split::Counts part{smalls[r], nonzeros[r] * shares};
      const bool suspect = nonzeros[r] == 0 || split::is_flagged(part, p.k, kProducts == 3) ||
                           smalls[r] * split::kTolerated > nonzeros[r];
      if (suspect) *p.any_flag = 1;
    }
  }
}

#endif

template <int kProducts>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    split_kernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap weight_map, const SplitProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Split<kProducts>;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  typename S::Memory& shared = *reinterpret_cast<typename S::Memory*>(dynamic_memory);
  const int warpgroup = threadIdx.x / 128;
  const int rank = ptx::cluster_ctarank();
  const int first = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;
  const int steps = S::steps(p.k);
  init_barriers(shared.barriers, kJudges);
  ptx::griddepcontrol_wait();

  Ring<S::kStages> ring;
  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (threadIdx.x == kConsumers * 128) {
      produce<kProducts>(shared, x_map, weight_map, p);
    } else if (warp >= 1 && warp <= kJudges) {
      judge<kProducts>(shared, p, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int g = lane / 4, c = lane % 4;
    const int local_row = threadIdx.x / 32 * 16;  // the warp's first row of the tile of weight
    const bool is_second_warpgroup = warpgroup == 1;
    if (is_second_warpgroup) ptx::barrier_arrive(turn_of(0), 2 * 128);

    float d[S::kAccumulators], sums[S::kPromotes ? S::kAccumulators : 1];
    for (int tile = first; tile < p.tiles.count(); tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      const int weight_row = (weight_tile * kClusterSize + rank) * S::kWeightRows + local_row;
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = min(weight_row + fragment_row(g, r), p.n - 1);
        scale[r] = split::power_of_two(__ldg(p.weight_exponent + n));
      }
      if constexpr (S::kPromotes) {
#pragma unroll
        for (float& sum : sums) sum = 0;
      }
      for (int step = 0; step < steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(&shared.barriers.full[ring.stage], ring.parity);
        uint32_t high[S::kSteps16][4], low[S::kSteps16][4];
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = local_row + fragment_row(g, r), chunk = s % 2 * 4 + c;
            const float4 v = *reinterpret_cast<const float4*>(
                &shared.weight[ring.stage][s / 2][row * kRowBytes + (chunk ^ row % 8) * 16]);
            const float t[4] = {v.x * scale[r], v.y * scale[r], v.z * scale[r], v.w * scale[r]};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const __half2 h = __floats2half2_rn(t[2 * i], t[2 * i + 1]);
              high[s][r + 2 * i] = *reinterpret_cast<const uint32_t*>(&h);
              if constexpr (kProducts == 3) {
                const __half2 rest =
                    __floats2half2_rn(t[2 * i] - __low2float(h), t[2 * i + 1] - __high2float(h));
                low[s][r + 2 * i] = *reinterpret_cast<const uint32_t*>(&rest);
              }
            }
          }
        }

        // The warpgroups take turns: one multiplies while the other converts. Left alone they fall
        // into step, and the tensor cores wait for both.
        const bool accumulates = S::kPromotes ? step % kPromoteSteps != 0 : step != 0;
        const uint64_t x = ptx::matrix_descriptor(shared.x[ring.stage]);
        ptx::barrier_sync(turn_of(warpgroup), 2 * 128);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          const uint64_t x_high = x + s * ptx::kDescriptorK16;
          if constexpr (kProducts == 3) {
            const uint64_t x_low = x_high + 2 * ptx::kDescriptorK16;
            ptx::wgmma(d, low[s], x_high, accumulates || s > 0);
            ptx::wgmma(d, high[s], x_low, true);
            ptx::wgmma(d, high[s], x_high, true);
          } else {
            ptx::wgmma(d, high[s], x_high, accumulates || s > 0);
          }
        }
        ptx::wgmma_commit_group();
        const bool is_last = step + 1 == steps && tile + clusters >= p.tiles.count();
        if (!(is_second_warpgroup && is_last)) ptx::barrier_arrive(turn_of(1 - warpgroup), 2 * 128);
        ptx::wgmma_wait_group<0>();
        release(shared.barriers, ring.stage);
        if constexpr (S::kPromotes) {
          if ((step + 1) % kPromoteSteps == 0 || step + 1 == steps) {
#pragma unroll
            for (int i = 0; i < S::kAccumulators; ++i) sums[i] += d[i];
          }
        }
      }

      // Thread (g, c) has two neighbouring features in rows 2c and 2c + 1 of every 8 of x. A swap
      // with the thread that has the next two makes that four features of one row.
      const int is_second = g >> 1 & 1;
      const int column = weight_row + fragment_row(g & ~2, 0);
      const int x_row = x_tile * S::kXRows;
      int weight_exponent[4];
      float bias[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = column + i < p.n;
        weight_exponent[i] = exists ? __ldg(p.weight_exponent + column + i) : 0;
        bias[i] = exists && p.bias != nullptr ? __ldg(p.bias + column + i) : 0.0f;
      }
      float4(&staging)[kTurn][128] = shared.staging[warpgroup];
      constexpr int kBlocks = S::kXRows / 8;
      int next_exponent = x_row + lane < p.m ? __ldg(p.x_exponent + x_row + lane) : 0;
#pragma unroll 1
      for (int turn = 0; turn * kTurn < kBlocks; ++turn) {
        if constexpr (S::kPromotes) {
          stage_turn(staging, sums, turn, thread);
        } else {
          stage_turn(staging, d, turn, thread);
        }
        const int turn_row = x_row + turn * kTurn * 8;
        const int x_exponent = next_exponent;  // of row `lane` of the turn
        const int next_row = turn_row + kTurn * 8 + lane;
        next_exponent = next_row < p.m ? __ldg(p.x_exponent + next_row) : 0;
        const int blocks = min(kTurn, kBlocks - turn * kTurn);
#pragma unroll 1
        for (int j = 0; j < blocks; ++j) {
          const float4 sum = staging[j][thread];
          const float keep[2] = {is_second ? sum.y : sum.x, is_second ? sum.w : sum.z};
          const float give[2] = {is_second ? sum.x : sum.y, is_second ? sum.z : sum.w};
          float take[2];
          take[0] = __shfl_xor_sync(0xffffffff, give[0], 8);
          take[1] = __shfl_xor_sync(0xffffffff, give[1], 8);
          const int in_turn = 8 * j + 2 * c + is_second;
          const int exponent = __shfl_sync(0xffffffff, x_exponent, in_turn);
          float z[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float total = i / 2 == is_second ? keep[i % 2] : take[i % 2];
            z[i] = split::unscale(total, exponent + weight_exponent[i]) + bias[i];
          }
          store_four(p, turn_row + in_turn, column, z, g & 1);
        }
      }
    }
  }
  ptx::cluster_sync();
#endif
}

// -------------------------------------------------------------------------------------- launch

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
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Describes a matrix to the copy engine, in boxes of box_rows rows of kRowBytes. What a box has
// outside of the matrix is 0. stride is in elements.
template <typename T>
int make_map(CUtensorMap* map, const T* matrix, int64_t rows, int64_t columns, int64_t stride,
             int box_rows) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * sizeof(T)};
  const cuuint32_t box[] = {kRowBytes / sizeof(T), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult status =
      encode(map, tensor_map_type<T>(), 2, const_cast<T*>(matrix), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

constexpr int blocks_of(int64_t size, int64_t block) {
  return static_cast<int>((size + block - 1) / block);
}

// A persistent grid: as many clusters as there is room for, or tiles. An early start lets a kernel
// set itself up while the one before it ends; it waits for that one itself.
template <typename Memory, typename... Parameters>
int launch(void (*kernel)(Parameters...), int tiles, bool starts_early, cudaStream_t stream,
           const Parameters&... parameters) {
  int device, multiprocessors;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(sizeof(Memory)));
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  const int clusters = multiprocessors / kClusterSize;
  config.gridDim = (tiles < clusters ? tiles : clusters) * kClusterSize;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(Memory);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

template <typename T>
int half_linear(const Linear& linear, cudaStream_t stream) {
  const int m = static_cast<int>(linear.m), n = static_cast<int>(linear.n),
            k = static_cast<int>(linear.k);
  CUtensorMap x_map, weight_map;
  int status = make_map(&x_map, static_cast<const T*>(linear.x), m, k, linear.x_stride, kHalfRows);
  if (status != cudaSuccess) return status;
  status = make_map(&weight_map, static_cast<const T*>(linear.weight), n, k, linear.weight_stride,
                    kHalfColumns / kClusterSize);
  if (status != cudaSuccess) return status;
  const Tiles tiles{blocks_of(m, kHalfRows * kClusterSize), blocks_of(n, kHalfColumns)};
  const HalfProblem<T> problem{static_cast<const T*>(linear.bias),
                               static_cast<T*>(linear.out),
                               linear.mask,
                               m,
                               n,
                               k,
                               Divisor<float>(linear.divisor),
                               tiles};
  return launch<HalfMemory>(half_kernel<T>, tiles.count(), false, stream, x_map, weight_map,
                            problem);
}

// The parts of a workspace, each aligned to 256 bytes.
struct Workspace {
  size_t any_flag, x_exponent, x_counts, weight_exponent, weight_counts, x, bytes;

  explicit Workspace(const Linear& linear) {
    size_t end = 0;
    const auto take = [&](size_t bytes) {
      const size_t begin = end;
      end += (bytes + 255) / 256 * 256;
      return begin;
    };
    any_flag = take(sizeof(int));
    x_exponent = take(linear.m * sizeof(int));
    x_counts = take(linear.m * sizeof(split::Counts));
    weight_exponent = take(linear.n * sizeof(int));
    weight_counts = take(linear.n * sizeof(split::Counts));
    const int64_t parts = linear.products == 3 ? 2 : 1;
    x = take(linear.m * split::padded(linear.k) * parts * sizeof(__half));
    bytes = end;
  }
};

template <int kProducts>
int split_linear(const Linear& linear, cudaStream_t stream) {
  using S = Split<kProducts>;
  const Workspace at(linear);
  char* const workspace = static_cast<char*>(linear.workspace);
  const auto ints = [&](size_t offset) { return reinterpret_cast<int*>(workspace + offset); };
  const auto counts = [&](size_t offset) {
    return reinterpret_cast<split::Counts*>(workspace + offset);
  };
  __half* const high = reinterpret_cast<__half*>(workspace + at.x);
  const split::Operand x{static_cast<const float*>(linear.x),
                         linear.m,
                         linear.x_stride,
                         1,
                         high,
                         kProducts == 3 ? high + S::kLow : nullptr,
                         ints(at.x_exponent),
                         counts(at.x_counts)};
  const split::Operand weight{static_cast<const float*>(linear.weight),
                              linear.n,
                              linear.weight_stride,
                              1,
                              nullptr,
                              nullptr,
                              ints(at.weight_exponent),
                              counts(at.weight_counts)};
  int* const any_flag = ints(at.any_flag);
  int status = cudaMemsetAsync(any_flag, 0, sizeof(int), stream);
  if (status != cudaSuccess) return status;
  constexpr int kSampledRows = split::kThreads / 32;
  prepare_kernel<kProducts><<<static_cast<int>(linear.m) + blocks_of(linear.n, kSampledRows),
                              split::kThreads, 0, stream>>>(x, weight, linear.k, any_flag);
  status = cudaGetLastError();
  if (status != cudaSuccess) return status;

  const int m = static_cast<int>(linear.m), n = static_cast<int>(linear.n),
            k = static_cast<int>(linear.k);
  const int64_t pitch = S::Order::pitch(split::padded(linear.k));
  CUtensorMap x_map, weight_map;
  status = make_map(&x_map, high, m, pitch, pitch, S::kXRows / kClusterSize);
  if (status != cudaSuccess) return status;
  status = make_map(&weight_map, weight.from, n, k, linear.weight_stride, S::kWeightRows);
  if (status != cudaSuccess) return status;
  const Divisor<float> divisor(linear.divisor);
  const float* const bias = static_cast<const float*>(linear.bias);
  float* const out = static_cast<float*>(linear.out);
  const Tiles tiles{blocks_of(m, S::kXRows), blocks_of(n, S::kWeightRows * kClusterSize)};
  const SplitProblem problem{bias,     out, linear.mask, x.exponent, weight.exponent, weight.counts,
                             any_flag, m,   n,           k,          divisor,         tiles};
  status = launch<typename S::Memory>(split_kernel<kProducts>, tiles.count(), true, stream, x_map,
                                      weight_map, problem);
  if (status != cudaSuccess) return status;
  return split::exact(x, weight, linear.k, kProducts == 3, {bias, divisor, out, linear.mask},
                      any_flag, stream);
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
         (linear.dtype == DType::kFloat32 || sm90::is_aligned(linear.x, linear.x_stride, size)) &&
         sm90::is_aligned(linear.weight, linear.weight_stride, size) && linear.m < kMost &&
         linear.n < kMost && linear.k < (linear.dtype == DType::kFloat32 ? sm90::kMostK : kMost);
}

size_t linear_sm90_workspace(const Linear& linear) {
  return linear.dtype == DType::kFloat32 ? sm90::Workspace(linear).bytes : 0;
}

int linear_sm90(const Linear& linear, CUstream_st* stream) {
  switch (linear.dtype) {
    case DType::kFloat16:
      return sm90::half_linear<__half>(linear, stream);
    case DType::kBFloat16:
      return sm90::half_linear<__nv_bfloat16>(linear, stream);
    default:
      return linear.products == 3 ? sm90::split_linear<3>(linear, stream)
                                  : sm90::split_linear<1>(linear, stream);
  }
}

}  // namespace cuda
}  // namespace kernels
