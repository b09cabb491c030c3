// Three products of float32: their tiles, and the way out of the registers with scales,
// compensation, bias, ReLU, division and mask.

#ifndef KERNELS_LINEAR_SM90_SPLIT_STORE_CUH_
#define KERNELS_LINEAR_SM90_SPLIT_STORE_CUH_

#include <cstdint>

#include "epilogue.cuh"
#include "linear_sm90_common.cuh"
#include "linear_sm90_schedule.cuh"
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
  // A row of x has its high pieces and then the low ones: what leads from one's descriptor to the
  // other's.
  static constexpr int kXRowBytes = kRowBytes, kXBytes = kXRows * kXRowBytes;
  static constexpr uint64_t kDescriptorLow = kXRowBytes / 2 >> 4;
  static_assert(2 * kK == split::kStepwise, "x is split stepwise");

  // Whole pairs of steps. Behind the end of k the copies bring zeros.
  static __host__ __device__ int steps(int k) { return (k + 2 * kK - 1) / (2 * kK) * 2; }

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

// Steps between two promotions, an even number. float32's own error grows with the root of K, that
// of the tensor cores with what is summed at once: with what truncation is expected to take made up
// for, sums of 256 of K, and of fewer where K is short, keep below it even where all terms have one
// sign. At K = 8192, 128 would be 1% slower; they are taken where there is no whole round of tiles,
// for there torch adds up partial sums and errs less.
inline int promotion_steps(int k, int rounds) {
  return (k < 4096 ? 64 : k < 8192 || rounds == 0 ? 128 : 256) / Split::kK;
}

// What a sum of random signs loses to truncation for each of K between two promotions, and how much
// more, in parts of that, where all terms have one sign (SPLIT.md).
[[maybe_unused]] constexpr float kLossOfK = 1.5e-6f / 512, kLossOfSign = 2.0f / 1.5f;

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
  Schedule schedule;
  int segment;  // steps between two promotions
  // Of tiles that clusters share: the sums of each cluster, a part for each of its threads, and how
  // often each warp has left its own, 0 at first.
  float4 (*left)[kClusterSize][Split::kSums / 4][128 * kConsumers];
  unsigned (*left_by)[kClusterSize][4 * kConsumers];
};

// The rows of a tile of x. Which tiles are the wide ones differs between tiles of the weight, so
// that all clusters have as many of them.
struct Rows {
  int begin, size;

  __host__ __device__ Rows(const SplitProblem& p, int x_tile, int weight_tile) {
    const unsigned tiles = p.tiles.x_tiles, wide = p.wide;
    const unsigned shift = weight_tile * wide % tiles;
    const auto wide_before = [&](unsigned i) { return i / tiles * wide + min(i % tiles, wide); };
    begin = x_tile * Split::kNarrow +
            (wide_before(shift + x_tile) - wide_before(shift)) * (Split::kXRows - Split::kNarrow);
    size = (shift + x_tile) % tiles < wide ? Split::kXRows : Split::kNarrow;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Leaves a part's sums for the cluster that finishes the tile.
__device__ inline void leave(const SplitProblem& p, const float (&sums)[Split::kSums]) {
  const int cluster = blockIdx.x / kClusterSize, rank = ptx::cluster_ctarank();
#pragma unroll
  for (int i = 0; i < Split::kSums / 4; ++i) {
    const float* const sum = sums + 4 * i;
    p.left[cluster][rank][i][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::add_release(&p.left_by[cluster][rank][threadIdx.x / 32], 1);
}

// Adds what the clusters before this one have left of a tile. They have begun before this one, as
// blocks begin in the order of their numbers, and leave it before they wait for anything.
__device__ inline void collect(const SplitProblem& p, int tile, float (&sums)[Split::kSums]) {
  const int rank = ptx::cluster_ctarank();
#pragma unroll 1
  for (int c = blockIdx.x / kClusterSize; p.schedule.is_cut_by(c, tile); --c) {
    // A vote, so that the compiler sees all lanes come out of the loop together; otherwise it would
    // gather them before each product: 3% of an H200's time.
    const unsigned* const has_left = &p.left_by[c - 1][rank][threadIdx.x / 32];
    while (!__all_sync(0xffffffff, ptx::load_acquire(has_left) != 0)) {
    }
#pragma unroll
    for (int i = 0; i < Split::kSums / 4; ++i) {
      const float4 more = __ldcg(&p.left[c - 1][rank][i][threadIdx.x]);
      float* const sum = sums + 4 * i;
      sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }
  }
}

// Collects what each tile needs on its way out while it is multiplied: one warp.
__device__ inline void gather(const SplitProblem& p, Split::Outward (&outwards)[2]) {
  using S = Split;
  const int lane = threadIdx.x % 32;
  const float loss_of_segment = kLossOfK * S::kK * p.segment;
  const float sign_of_sum = kLossOfSign / static_cast<float>(p.k);
  for (int turn = 0;; ++turn) {
    const Schedule::Part part = p.schedule.part(turn);
    if (!part.exists()) break;
    Split::Outward& outward = outwards[turn % 2];
    int x_tile, weight_tile;
    p.tiles.find(part.tile, &x_tile, &weight_tile);
    const Rows rows(p, x_tile, weight_tile);
    const int end = min(rows.begin + rows.size, p.m);
    const int column = (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows;
    bool is_direct = p.is_direct;
    for (int i = lane; i < S::kXRows; i += 32) {
      const int row = rows.begin + i;
      const int exponent = row < end ? __ldg(p.x_exponent + row) : 0;
      const split::Sample sample = row < end ? p.x_sample[row] : split::Sample{};
      is_direct &= abs(exponent) <= kModestExponent;
      outward.x[i] = {split::power_of_two(-exponent), sample.loss, sample.inverse_mean};
    }
    for (int i = lane; i < S::kWeightRows; i += 32) {
      const int row = column + i;
      const int exponent = row < p.n ? __ldg(p.weight_exponent + row) : 0;
      const split::Sample sample = row < p.n ? p.weight_sample[row] : split::Sample{};
      is_direct &= abs(exponent) <= kModestExponent;
      outward.features[i] = {split::power_of_two(-exponent), loss_of_segment * sample.loss,
                             sign_of_sum * sample.inverse_mean,
                             row < p.n && p.bias != nullptr ? __ldg(p.bias + row) : 0.0f};
    }
    is_direct = __all_sync(0xffffffff, is_direct);
    if (lane == 0) {
      outward.row = rows.begin, outward.end = end;
      outward.column = column;
      outward.is_direct = is_direct;
    }
    // The one that is written next was read by both before they came here.
    for (int w = 0; w < kConsumers; ++w) ptx::barrier_sync(1 + w, 128 + 32);
  }
}

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

#endif

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_SPLIT_STORE_CUH_
