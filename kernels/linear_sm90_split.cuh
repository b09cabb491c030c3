// float32 on Hopper, by products of the fp16 that it is split into.

#ifndef KERNELS_LINEAR_SM90_SPLIT_CUH_
#define KERNELS_LINEAR_SM90_SPLIT_CUH_

#include <cuda_fp16.h>

#include <cstddef>
#include <type_traits>

#include "early_start.cuh"
#include "epilogue.cuh"
#include "linear_sm90_common.cuh"
#include "ptx.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

// With operand A in registers, its rows are those of the weight. Operand B is the split x.
struct Split {
  static constexpr int kWeightRows = 64 * kConsumers;
  // The promoted sums take as many registers as the accumulators; 176 leaves room for both, and
  // makes 1024 rows of x six tiles, which with 64 of the weight fill 132 multiprocessors to 97%.
  static constexpr int kXRows = 176;
  static constexpr int kSums = kXRows / 2;
  // Some tiles of x have fewer rows, so that none multiplies many that are not there: 1024 are 4
  // tiles of 176 and 2 of 160, which takes 2% off an H200's time. 168 take as long as 176.
  static constexpr int kNarrow = 160;
  static constexpr int kK = 32, kStages = 5, kSteps16 = kK / 16;
  static constexpr int kTurn = 2;
  static_assert(kXRows % (kTurn * 8) == 0, "turns are whole");
  static constexpr int kRowBytes = kK * 4;  // of the weight
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  // Of x, there are two tiles, high and low, whose rows are half as long.
  static constexpr int kXRowBytes = kRowBytes / 2;
  static constexpr int kPartBytes = kXRows * kXRowBytes, kXBytes = 2 * kPartBytes;

  // Whole pairs of steps. Behind the end of k the copies bring zeros.
  static __device__ int steps(int k) { return (k + 2 * kK - 1) / (2 * kK) * 2; }

  // What a tile needs on its way out.
  struct Outward {
    struct alignas(16) XRow {
      float scale, loss, inverse_mean;
    } x[kXRows];
    struct alignas(16) Feature {
      float scale, loss, inverse_mean, bias;
    } features[kWeightRows];
    int row, end;   // rows of x: the first, and that behind the last
    int column;     // the first feature
    int is_direct;  // whether store_direct serves
  };

  struct Memory {
    uint8_t x[kStages][kXBytes];
    uint8_t weight[kStages][kWeightBytes];
    float4 staging[kConsumers][kTurn][128];
    Outward outward[2];  // of this tile, and of the next
    Barriers<kStages> barriers;
    uint64_t unheeded;  // barrier
  };
  static_assert(sizeof(Memory) <= 227 * 1024, "a block has no more shared memory");
};

// The weight is read once, so its rows are scaled by what a sample of them says: eight pieces of 16
// elements, evenly spread. The largest is put below 2^8, which leaves the others a factor of 256
// before they pass fp16's range, and 14 bits below before they count as small.
constexpr int kSampledPieces = 8;
constexpr int kSampledExponent = 7;
// Where the limits of what is carried, 2^-14 and 2^16 above the scaled unit, are normal floats.
// What lies beyond them is flagged.
constexpr int kLeastExponent = -111, kMostExponent = 112;
constexpr int kSampledRows = 4;  // of a warp, whose reads are on their way together

// A warp some rows of the weight, whose reads are the more scattered; behind those, a block a row
// of x. `nonzeros` is what the counts of the weight begin with; `zeros` are set to 0.
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, int nonzeros,
                   unsigned* zeros, int64_t zeros_size) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * split::kThreads + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * split::kThreads) {
    zeros[i] = 0;
  }
  constexpr int kRows = split::kThreads / 32 * kSampledRows;
  const int64_t x_row = blockIdx.x - (weight.rows + kRows - 1) / kRows;
  if (x_row >= 0) {
    split::split_row(x, x_row, k);
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32 * kSampledRows;
  const int64_t piece = lane / (32 / kSampledPieces);
  const int64_t at = piece * k / kSampledPieces / 4 * 4 + lane % (32 / kSampledPieces) * 4;
  float4 sample[kSampledRows] = {};
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const float* const row = weight.from + (first + i) * weight.row_stride;
    if (first + i < weight.rows && at + 4 <= k) {
      sample[i] = *reinterpret_cast<const float4*>(row + at);
    }
  }
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const float4 v = sample[i];
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int bit = 16; bit > 0; bit /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
    }
    const int needed = largest > 0 ? kSampledExponent - ilogbf(largest) : 0;
    const int exponent = max(kLeastExponent, min(kMostExponent, needed));
    const float scale = split::power_of_two(exponent);
    int inexact = 0;
    float sum = 0;
    for (const float element : {v.x, v.y, v.z, v.w}) {
      inexact += __popc(__ballot_sync(0xffffffff, split::has_low(element * scale)));
      sum += fabsf(element * scale);
    }
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    if (lane == 0 && first + i < weight.rows) {
      weight.exponent[first + i] = exponent;
      weight.counts[first + i] = {0, nonzeros};
      if (weight.sample != nullptr) weight.sample[first + i] = split::sample_of(128, inexact, sum);
    }
  }
}

// Steps between two promotions, an even number. float32's own error grows with the root of K, that
// of the tensor cores with what is summed at once: with what truncation is expected to take made up
// for, sums of 256 of K, and of fewer where K is short, keep below it even where all terms have one
// sign. At K = 8192, 128 would be 1% slower.
__device__ inline int promotion_steps(int k) {
  return (k < 4096 ? 64 : k < 8192 ? 128 : 256) / Split::kK;
}

// What a sum of random signs loses to truncation for each of K between two promotions, and how much
// more, in parts of that, where all terms have one sign (SPLIT.md).
[[maybe_unused]] constexpr float kLossOfK = 1.5e-6f / 512, kLossOfSign = 2.0f / 1.5f;

// Warps that look for rows of the weight that the split can't carry, beside those that multiply.
[[maybe_unused]] constexpr int kJudges = 2;
// The counts of a row are ints.
constexpr int64_t kMostK = 1 << 24;
// A row with an element that, scaled, rounds to infinity in fp16 has so many smalls that its
// nonzeros can't make up for them.
[[maybe_unused]] constexpr float kTooLarge = 65520;
[[maybe_unused]] constexpr int kOverflow = 1 << 30;

struct SplitProblem {
  const float* bias;
  float* out;
  uint8_t* mask;
  const int* x_exponent;               // [m]
  const int* weight_exponent;          // [n]
  const split::Sample* x_sample;       // [m]
  const split::Sample* weight_sample;  // [n]
  split::Counts* weight_counts;        // [n], 0 at first
  int m, n, k;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  bool is_direct;  // whether store_direct serves, as far as the call goes
  Tiles tiles;
  int wide;  // tiles of x that have kXRows rows; the others have kNarrow
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The row of its warp's 16 that is row g (r = 0) or g + 8 (r = 1) of the warp's fragments: two
// neighbours a thread, for the stores, and rows that are swizzled apart in neighbouring quads,
// which keeps their loads free of bank conflicts.
__device__ inline int fragment_row(int g, int r) {
  return (g & 4) << 1 | (g & 1) << 2 | (g & 2) | r;
}

// Four features of a row of x that is before `end`, finished and stored; the thread whose lane
// differs in bit 2 has the four beside them, and the byte of the mask is of both.
template <bool kExact>
__device__ void store_four(const SplitProblem& p, int row, int end, int column,
                           const float (&z)[4]) {
  const bool exists = row < end && column < p.n;
  if (p.mask != nullptr) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (column + i < p.n && mask_bit(z[i])) << i;
    bits |= __shfl_xor_sync(0xffffffff, bits, 4) << 4;
    const int64_t at = static_cast<int64_t>(row) * ((p.n + 7) / 8) + column / 8;
    if (exists && column % 8 == 0) p.mask[at] = static_cast<uint8_t>(bits);
  }
  if (!exists) return;
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = p.divisor.template quotient<kExact>(z[i] < p.floor ? 0.0f : z[i]);
  }
  float* const to = p.out + static_cast<int64_t>(row) * p.n + column;
  if (p.n % 4 == 0) {
    *reinterpret_cast<float4*>(to) = make_float4(out[0], out[1], out[2], out[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < p.n) to[i] = out[i];
    }
  }
}

// The rows of a tile of x. Which tiles are the wide ones differs between tiles of the weight, so
// that all clusters have as many of them.
struct Rows {
  int begin, size;

  __device__ Rows(const SplitProblem& p, int x_tile, int weight_tile) {
    const unsigned tiles = p.tiles.x_tiles, wide = p.wide;
    const unsigned shift = weight_tile * wide % tiles;
    const auto wide_before = [&](unsigned i) { return i / tiles * wide + min(i % tiles, wide); };
    begin = x_tile * Split::kNarrow +
            (wide_before(shift + x_tile) - wide_before(shift)) * (Split::kXRows - Split::kNarrow);
    size = (shift + x_tile) % tiles < wide ? Split::kXRows : Split::kNarrow;
  }
};

// A sum with what truncation is expected to have taken from it: more where it is as large as the
// sum of its terms' magnitudes, so that they have one sign (f in SPLIT.md).
__device__ inline float compensated(float sum, const Split::Outward::XRow& x,
                                    const Split::Outward::Feature& feature) {
  const float loss = x.loss * feature.loss;
  const float share = fabsf(sum) * (x.inverse_mean * feature.inverse_mean);
  const float sign = fmaxf(fminf(share, 2 * kLossOfSign - share), 0.0f);
  return fmaf(sum, fmaf(loss, sign, loss), sum);
}

// What a turn has in memory: two neighbouring features in rows 2c and 2c + 1 of every 8 of x. A
// swap with the thread that has the next two makes that four features of one row, from `feature`
// on.
template <bool kExact, int kTurn>
__device__ void store_turn(const SplitProblem& p, const Split::Outward& outward, int first_row,
                           int first_feature, const float4 (&staging)[kTurn][128]) {
  const int lane = threadIdx.x % 32;
  const bool is_second = lane & 8;
#pragma unroll
  for (int j = 0; j < kTurn; ++j) {
    const float4 own = staging[j][threadIdx.x % 128];
    const float keep[2] = {is_second ? own.y : own.x, is_second ? own.w : own.z};
    const float give[2] = {is_second ? own.x : own.y, is_second ? own.z : own.w};
    float take[2];
    take[0] = __shfl_xor_sync(0xffffffff, give[0], 8);
    take[1] = __shfl_xor_sync(0xffffffff, give[1], 8);
    const int row = first_row + 8 * j + 2 * (lane % 4) + is_second;
    const Split::Outward::XRow x = outward.x[row];
    float z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Split::Outward::Feature feature = outward.features[first_feature + i];
      const float total = compensated((i < 2) == is_second ? take[i % 2] : keep[i % 2], x, feature);
      // The smaller first: where that overflows, so does the result.
      z[i] = total * fminf(x.scale, feature.scale) * fmaxf(x.scale, feature.scale) + feature.bias;
    }
    store_four<kExact>(p, outward.row + row, outward.end, outward.column + first_feature, z);
  }
}

// The way out where the division is an exact multiplication and all exponents are modest: `feature`
// and the next, of all rows.
template <bool kMask, int kSums>
__device__ void store_direct(const SplitProblem& p, const Split::Outward& outward, int feature,
                             const float (&sums)[kSums]) {
  const int column = outward.column + feature;
  const bool exists = column < p.n;
  if (!kMask && !exists) return;
  const Split::Outward::Feature features[2] = {outward.features[feature],
                                               outward.features[feature + 1]};
  const int first = threadIdx.x % 4 * 2;
  int row = outward.row + first;
  float* to = p.out + static_cast<int64_t>(row) * p.n + column;
  uint32_t bits = 0;  // of four rows, a byte each, of eight features of four threads
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j, row += 8, to += 8 * static_cast<int64_t>(p.n)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Split::Outward::XRow x = outward.x[8 * j + first + i];
      float out[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The same bits as store_turn's: powers of two scale exactly.
        const float total = compensated(sums[4 * j + 2 * r + i], x, features[r]);
        const float z = fmaf(total, x.scale * features[r].scale, features[r].bias);
        if constexpr (kMask) {
          bits |= (exists && mask_bit(z)) << (j % 2 * 16 + i * 8 + feature % 8 + r);
        }
        out[r] = p.divisor.scale * ptx::max_nan(z, p.floor);
      }
      if (exists && row + i < outward.end) {
        *reinterpret_cast<float2*>(to + i * static_cast<int64_t>(p.n)) =
            make_float2(out[0], out[1]);
      }
    }
    if (kMask && j % 2 == 1) {
      bits |= __shfl_xor_sync(0xffffffff, bits, 4);
      bits |= __shfl_xor_sync(0xffffffff, bits, 8);
      const int own = threadIdx.x / 4 % 4;
      const int own_row = row - 8 + own / 2 * 8 + own % 2;
      if (own_row < outward.end && column / 8 * 8 < p.n) {
        p.mask[static_cast<int64_t>(own_row) * ((p.n + 7) / 8) + column / 8] =
            static_cast<uint8_t>(bits >> (8 * own));
      }
      bits = 0;
    }
  }
}

// Brings the tiles, each in steps of K: one thread.
__device__ inline void produce(uint32_t base, const CUtensorMap& high_map,
                               const CUtensorMap& low_map, const CUtensorMap& weight_map,
                               const SplitProblem& p) {
  using S = Split;
  using Memory = S::Memory;
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const int rank = ptx::cluster_ctarank();
  constexpr int kShare = S::kXRows / kClusterSize;  // rows of x a block brings for both
  const uint32_t x = base + offsetof(Memory, x) + rank * kShare * S::kXRowBytes;
  const uint32_t weight = base + offsetof(Memory, weight);
  Ring<S::kStages> ring;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int row = Rows(p, x_tile, weight_tile).begin + rank * kShare;
    const int weight_row = (weight_tile * kClusterSize + rank) * S::kWeightRows;
    for (int step = 0; step < S::steps(p.k); ++step, ring.advance()) {
      const uint32_t arrived = full + 8 * ring.stage;
      ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(arrived, S::kXBytes + S::kWeightBytes);
      constexpr int kBoth = (1 << kClusterSize) - 1;
      const uint32_t to = x + ring.stage * S::kXBytes;
      ptx::copy_tensor_multicast(to, &high_map, step * S::kK, row, arrived, kBoth);
      ptx::copy_tensor_multicast(to + S::kPartBytes, &low_map, step * S::kK, row, arrived, kBoth);
      ptx::copy_tensor(weight + ring.stage * S::kWeightBytes, &weight_map, step * S::kK, weight_row,
                       arrived);
    }
  }
}

// Collects what each tile needs on its way out while it is multiplied: one warp.
__device__ inline void gather(const SplitProblem& p, Split::Outward (&outward)[2]) {
  using S = Split;
  const int lane = threadIdx.x % 32;
  const float loss_of_segment = kLossOfK * S::kK * promotion_steps(p.k);
  const float sign_of_sum = kLossOfSign / static_cast<float>(p.k);
  int turn = 0;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize, turn ^= 1) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const Rows rows(p, x_tile, weight_tile);
    const int end = min(rows.begin + rows.size, p.m);
    const int column = (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows;
    bool is_direct = p.is_direct;
    for (int i = lane; i < S::kXRows; i += 32) {
      const int row = rows.begin + i;
      const int exponent = row < end ? __ldg(p.x_exponent + row) : 0;
      const split::Sample sample = row < end ? p.x_sample[row] : split::Sample{};
      is_direct &= abs(exponent) <= kModestExponent;
      outward[turn].x[i] = {split::power_of_two(-exponent), sample.loss, sample.inverse_mean};
    }
    for (int i = lane; i < S::kWeightRows; i += 32) {
      const int row = column + i;
      const int exponent = row < p.n ? __ldg(p.weight_exponent + row) : 0;
      const split::Sample sample = row < p.n ? p.weight_sample[row] : split::Sample{};
      is_direct &= abs(exponent) <= kModestExponent;
      outward[turn].features[i] = {split::power_of_two(-exponent), loss_of_segment * sample.loss,
                                   sign_of_sum * sample.inverse_mean,
                                   row < p.n && p.bias != nullptr ? __ldg(p.bias + row) : 0.0f};
    }
    is_direct = __all_sync(0xffffffff, is_direct);
    if (lane == 0) {
      outward[turn].row = rows.begin, outward[turn].end = end;
      outward[turn].column = column;
      outward[turn].is_direct = is_direct;
    }
    // The one that is written next was read by both before they came here.
    for (int w = 0; w < kConsumers; ++w) ptx::barrier_sync(1 + w, 128 + 32);
  }
}

// Counts what the split carries badly of every row of the weight. A lane has rows of its own. The
// tiles that share rows of the weight take turns at the steps, and add up what they find.
__device__ inline void judge(uint32_t base, const SplitProblem& p, int warp) {
  using S = Split;
  using Memory = S::Memory;
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  const uint32_t weight = base + offsetof(Memory, weight);
  constexpr int kRows = S::kWeightRows / kJudges / 32;
  constexpr int kChunks = S::kK / 4;  // of four columns
  const int shares = min(p.tiles.x_tiles, S::steps(p.k));
  const int lane = threadIdx.x % 32;
  const int first = warp * kRows * 32 + lane;
  Ring<S::kStages> ring;
  for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
       tile += gridDim.x / kClusterSize) {
    int x_tile, weight_tile;
    p.tiles.find(tile, &x_tile, &weight_tile);
    const int weight_row =
        (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows + first;
    float small[kRows], largest[kRows];
    int nonzeros[kRows], smalls[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(weight_row + r * 32, p.n - 1);
      const float unit = split::power_of_two(-__ldg(p.weight_exponent + row));
      small[r] = unit * split::kSmallPair;
      largest[r] = 0;
      nonzeros[r] = smalls[r] = 0;
    }
    int until = x_tile;  // steps until one is this block's
    for (int step = 0; step < S::steps(p.k); ++step, ring.advance()) {
      ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
      const uint32_t stage = weight + ring.stage * S::kWeightBytes + first * S::kRowBytes;
      const int chunks = until == 0 ? kChunks : 0;
      until = (until == 0 ? shares : until) - 1;
#pragma unroll 2  // 2% of an H200's time off, against 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 four =
              ptx::load_shared_four(stage + r * 32 * S::kRowBytes + (chunk ^ first) % 8 * 16);
          for (const float v : {four.x, four.y, four.z, four.w}) {
            nonzeros[r] += v != 0.0f;
            smalls[r] += v != 0.0f && fabsf(v) < small[r];
            largest[r] = ptx::max_nan(largest[r], fabsf(v));
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * ring.stage);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = weight_row + r * 32;
      if (row >= p.n || x_tile >= shares) continue;
      // So many that the nonzeros can't make up for them, however many tiles find one too large.
      const float scaled = largest[r] * split::power_of_two(p.weight_exponent[row]);
      if (!(scaled < kTooLarge)) smalls[r] = kOverflow / shares;
      atomicAdd(&p.weight_counts[row].smalls, smalls[r]);
      atomicAdd(&p.weight_counts[row].nonzeros, nonzeros[r]);
    }
  }
}

#endif

__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    split_kernel(const __grid_constant__ CUtensorMap high_map,
                 const __grid_constant__ CUtensorMap low_map,
                 const __grid_constant__ CUtensorMap weight_map, const SplitProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Split;
  using Memory = S::Memory;
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  Memory& shared = *reinterpret_cast<Memory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t full = base + offsetof(Memory, barriers.full);
  const uint32_t empty = base + offsetof(Memory, barriers.empty);
  // The same for all of a warp, as the compiler sees it then: 1% of an H200's time.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&high_map);
    ptx::prefetch_tensormap(&low_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  if (threadIdx.x == 0) ptx::mbarrier_init(base + offsetof(Memory, unheeded), 1);
  init_barriers<S::kStages>(full, empty, kJudges);
  wait_for_previous_kernel();

  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 - 4 * kConsumers;
    if (threadIdx.x == kConsumers * 128) {
      produce(base, high_map, low_map, weight_map, p);
    } else if (warp >= 1 && warp <= kJudges) {
      judge(base, p, warp - 1);
    } else if (warp > kJudges) {
      gather(p, shared.outward);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int local_row = threadIdx.x / 32 * 16;  // the warp's first row of the tile of weight
    // Where this thread reads its first row, fragment_row(g, 0), which is even: its second row is
    // the next, whose chunks are swizzled by one bit more.
    const int own_row = local_row + fragment_row(g, 0);
    const uint32_t own_weight =
        base + offsetof(Memory, weight) + own_row * S::kRowBytes + (c ^ own_row % 8) * 16;
    const int steps = S::steps(p.k);
    const int segment = min(promotion_steps(p.k), steps);
    // A lane for each block tells its producer which stage the warp has read, a step later. That
    // there was none before the first is told to a barrier that nobody heeds.
    const uint32_t empty_of_block = ptx::map_shared(empty, lane % kClusterSize);
    uint32_t read = ptx::map_shared(base + offsetof(Memory, unheeded), lane % kClusterSize);
    Ring<S::kStages> ring;
    uint32_t high[2][S::kSteps16][4], low[S::kSteps16][4];
    int turn = 0;

    for (int tile = blockIdx.x / kClusterSize; tile < p.tiles.count();
         tile += gridDim.x / kClusterSize) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      const int tile_row = (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows;
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = min(tile_row + local_row + fragment_row(g, r), p.n - 1);
        scale[r] = split::power_of_two(__ldg(p.weight_exponent + n));
      }
      // d has values so that its registers are free when the products are made.
      float d[S::kSums] = {}, sums[S::kSums] = {};

      // The fragments of a stage, when its bytes are there. Of each 16 columns a thread takes four
      // neighbours, two for each half of the fragment: x is interleaved to match.
      const auto convert = [&](uint32_t (&high)[S::kSteps16][4]) {
        ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint32_t stage = own_weight + ring.stage * S::kWeightBytes;
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {  // rows of the fragment
            const float4 v = ptx::load_shared_four((stage ^ (s * 64 | r * 16)) + r * S::kRowBytes);
            const float scaled[4] = {v.x * scale[r], v.y * scale[r], v.z * scale[r],
                                     v.w * scale[r]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // of its columns
              const float first = scaled[2 * half], second = scaled[2 * half + 1];
              const __half2 h = __floats2half2_rn(first, second);
              const __half2 rest =
                  __floats2half2_rn(first - __low2float(h), second - __high2float(h));
              high[s][2 * half + r] = *reinterpret_cast<const uint32_t*>(&h);
              low[s][2 * half + r] = *reinterpret_cast<const uint32_t*>(&rest);
            }
          }
        }
      };

      // Multiplies what is converted, and converts what comes next as soon as the registers of low,
      // which goes first, are free.
      const auto step = [&](auto rows, uint32_t (&now)[S::kSteps16][4],
                            uint32_t (&next)[S::kSteps16][4], bool accumulates, bool is_last) {
        const uint64_t x = ptx::matrix_descriptor<S::kXRowBytes>(base + offsetof(Memory, x) +
                                                                 ring.stage * S::kXBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          ptx::wgmma(rows, d, low[s], x + s * ptx::kDescriptorK16, accumulates || s > 0);
        }
        ptx::wgmma_commit_group();
#pragma unroll
        for (int s = 0; s < S::kSteps16; ++s) {
          const uint64_t x_high = x + s * ptx::kDescriptorK16;
          ptx::wgmma(rows, d, now[s], x_high + (S::kPartBytes >> 4), true);
          ptx::wgmma(rows, d, now[s], x_high, true);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (lane < kClusterSize) ptx::mbarrier_arrive_mapped(read);
        read = empty_of_block + 8 * ring.stage;
        ring.advance();
        if (!is_last) convert(next);
      };

      const auto multiply = [&](auto rows) {
        // The second warpgroup begins with half a segment, so that one multiplies while the other
        // promotes: 1% of an H200's time.
        for (int i = 0, end = segment >> warpgroup; i < steps; end = min(end + segment, steps)) {
          bool accumulates = false;
          do {
            step(rows, high[0], high[1], accumulates, false);
            i += 2;
            step(rows, high[1], high[0], true, i == steps);
            accumulates = true;
          } while (i < end);
          ptx::wgmma_wait_group<0>();
#pragma unroll
          for (int j = 0; j < decltype(rows)::value / 2; ++j) sums[j] += d[j];
        }
      };
      const bool is_wide = Rows(p, x_tile, weight_tile).size == S::kXRows;
      convert(high[0]);
      if (is_wide) {
        multiply(std::integral_constant<int, S::kXRows>{});
      } else {
        multiply(std::integral_constant<int, S::kNarrow>{});
      }

      const S::Outward& outward = shared.outward[turn];
      turn ^= 1;
      ptx::barrier_sync(1 + warpgroup, 128 + 32);
      if (outward.is_direct) {
        const int feature = local_row + fragment_row(g, 0);
        if (p.mask == nullptr) {
          store_direct<false>(p, outward, feature, sums);
        } else {
          store_direct<true>(p, outward, feature, sums);
        }
        continue;
      }
      const int feature = local_row + fragment_row(g & ~2, 0);
      float4(&staging)[S::kTurn][128] = shared.staging[warpgroup];
      constexpr int kTurns = S::kXRows / (S::kTurn * 8);
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        stage_turn<0, kTurns>(staging, sums, turn);
        if (p.divisor.is_exact) {
          store_turn<true>(p, outward, turn * S::kTurn * 8, feature, staging);
        } else {
          store_turn<false>(p, outward, turn * S::kTurn * 8, feature, staging);
        }
      }
    }
  }
  ptx::cluster_sync();
#endif
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_SPLIT_CUH_
