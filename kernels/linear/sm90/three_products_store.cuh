// Three products of float32: their tiles, and the epilogue: scales, bias, ReLU, division and mask.

#ifndef KERNELS_LINEAR_SM90_THREE_PRODUCTS_STORE_CUH_
#define KERNELS_LINEAR_SM90_THREE_PRODUCTS_STORE_CUH_

#include <cstdint>

#include "common/ptx/sm90.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/common.cuh"
#include "linear/sm90/schedule.cuh"
#include "linear/split/pieces.cuh"

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
  // All tiles of x have so few rows if those that x has, or the multiprocessors, are used better.
  static constexpr int kMiddle = 128, kSmall = 64;
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

  // Steps are taken in rounds. Past the end of k the copies bring zeros.
  static constexpr int kRound = 4;
  static __host__ __device__ int rounds(int k) { return (k + kRound * kK - 1) / (kRound * kK); }

  // The epilogue's data of a tile.
  struct Outward {
    int x_exponent[kXRows];
    struct alignas(8) Feature {
      int exponent;
      float bias;
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
  };
  static_assert(sizeof(Memory) <= 227 * 1024, "a block has no more shared memory");
};

// Sums are promoted every 32 of K below kShortK, every 64 below kLongK, and every 128 from there
// on: the longer K, the more float32 errs itself (SPLIT.md). 128 from 2048 on would break the
// bound.
constexpr int kShortK = 2048, kLongK = 4096;

// The number of a barrier of both warpgroups that multiply. Those before it have one each, which
// they share with the warp of load_outwards.
constexpr int kSecondStarts = 1 + kConsumers;

// The kernel runs twice. The second run makes again the tiles in which the first found sums that
// are not finite: rows of the weight whose sample missed the scale. It scales them by their
// largest.
struct SplitProblem {
  const float* bias;
  float* out;
  uint8_t* mask;
  const int* x_exponent;  // [m]
  const int* x_state;     // [m] of split::RowState
  int* weight_exponent;   // [n]
  int* weight_state;      // [n]
  const float* weight;    // [n, k], rows weight_stride elements apart
  int64_t weight_stride;
  unsigned* has_overflowed;  // whether a state is kOverflowed; 0 at first
  unsigned* has_nonfinite;   // whether a state is kNonfinite; 0 at first
  bool is_second_run;
  int m, n, k;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  bool is_direct;  // whether store_direct serves, as far as the call goes
  Tiles tiles;
  int wide;  // tiles of x that have kXRows rows
  int rows;  // that the other tiles have: kNarrow, or all kMiddle or kSmall
  Schedule schedule;
  // For tiles that clusters share: the sums of each cluster, a part for each of its threads, and
  // how often each warp has left its own, 0 at first.
  float4 (*left)[kClusterSize][Split::kSums / 4][128 * kConsumers];
  unsigned (*left_by)[kClusterSize][4 * kConsumers];

  // Rows of x that are copied at a time.
  __host__ __device__ int rows_at_once() const {
    return rows == Split::kNarrow ? Split::kXRows : rows;
  }
};

// The rows of a tile of x. Which tiles are the wide ones differs between tiles of the weight, so
// that all clusters have as many of them.
struct Rows {
  int begin, size;

  __host__ __device__ Rows(const SplitProblem& p, int x_tile, int weight_tile) {
    const unsigned tiles = p.tiles.x_tiles, wide = p.wide;
    const unsigned shift = weight_tile * wide % tiles;
    const auto wide_before = [&](unsigned i) { return i / tiles * wide + min(i % tiles, wide); };
    begin = x_tile * p.rows +
            (wide_before(shift + x_tile) - wide_before(shift)) * (Split::kXRows - p.rows);
    size = (shift + x_tile) % tiles < wide ? Split::kXRows : p.rows;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Stores a part's sums for the cluster that finishes the tile, which has so many rows of x.
__device__ inline void store_partial(const SplitProblem& p, int rows,
                                     const float (&sums)[Split::kSums]) {
  const int cluster = blockIdx.x / kClusterSize, rank = ptx::cluster_ctarank();
#pragma unroll
  for (int i = 0; i < Split::kSums / 4; ++i) {
    if (8 * i == rows) break;
    const float* const sum = sums + 4 * i;
    p.left[cluster][rank][i][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::add_release(&p.left_by[cluster][rank][threadIdx.x / 32], 1);
}

// Adds the partial sums that the clusters before this one have stored of a tile. They have begun
// before this one, as blocks begin in the order of their numbers, and store before they wait for
// anything.
__device__ inline void add_partials(const SplitProblem& p, int tile, int rows,
                                    float (&sums)[Split::kSums]) {
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
      if (8 * i == rows) break;
      const float4 more = __ldcg(&p.left[c - 1][rank][i][threadIdx.x]);
      float* const sum = sums + 4 * i;
      sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }
  }
}

// Whether a tile is to be made in this run, for all lanes of a warp.
__device__ inline bool is_wanted(const SplitProblem& p, int weight_tile) {
  if (!p.is_second_run) return true;
  bool found = false;
  for (int i = threadIdx.x % 32; i < kClusterSize * Split::kWeightRows; i += 32) {
    const int row = weight_tile * kClusterSize * Split::kWeightRows + i;
    found |= row < p.n && __ldcg(p.weight_state + row) != split::kCarried;
  }
  return ptx::uniform(__any_sync(0xffffffff, found)) != 0;
}

// Loads what the epilogue needs of each tile while it is multiplied: one warp.
__device__ inline void load_outwards(const SplitProblem& p, Split::Outward (&outwards)[2]) {
  using S = Split;
  const int lane = threadIdx.x % 32;
  int turn = 0;
  for (int i = 0;; ++i) {
    const Schedule::Part part = p.schedule.part(i);
    if (!part.exists()) break;
    int x_tile, weight_tile;
    p.tiles.find(part.tile, &x_tile, &weight_tile);
    if (!is_wanted(p, weight_tile)) continue;
    Split::Outward& outward = outwards[turn++ % 2];
    const Rows rows(p, x_tile, weight_tile);
    const int end = min(rows.begin + rows.size, p.m);
    const int column = (weight_tile * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows;
    bool is_direct = p.is_direct, has_nonfinite = false;
    for (int j = lane; j < S::kXRows; j += 32) {
      const int row = rows.begin + j;
      const int exponent = row < end ? __ldg(p.x_exponent + row) : 0;
      has_nonfinite |= row < end && __ldg(p.x_state + row) == split::kNonfinite;
      is_direct &= abs(exponent) <= kModestExponent;
      outward.x_exponent[j] = exponent;
    }
    for (int j = lane; j < S::kWeightRows; j += 32) {
      const int row = column + j;
      const int exponent = row < p.n ? __ldcg(p.weight_exponent + row) : 0;
      is_direct &= abs(exponent) <= kModestExponent;
      outward.features[j] = {exponent, row < p.n && p.bias != nullptr ? __ldg(p.bias + row) : 0.0f};
    }
    is_direct = __all_sync(0xffffffff, is_direct);
    if (has_nonfinite) *p.has_nonfinite = 1;
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

// Marks a row of the weight of which a scaled sum is not finite, so that the second run makes it.
__device__ inline void mark_overflow(const SplitProblem& p, int column) {
  if (p.is_second_run || column >= p.n) return;
  p.weight_state[column] = split::kOverflowed;
  *p.has_overflowed = 1;
}

// A turn has in memory two neighbouring features in rows 2c and 2c + 1 of every 8 of x. A
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
    float z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Split::Outward::Feature feature = outward.features[first_feature + i];
      const float total = (i < 2) == is_second ? take[i % 2] : keep[i % 2];
      if (!isfinite(total)) mark_overflow(p, outward.column + first_feature + i);
      z[i] = split::unscale(total, outward.x_exponent[row] + feature.exponent) + feature.bias;
    }
    store_four<kExact>(p, outward.row + row, outward.end, outward.column + first_feature, z);
  }
}

// The epilogue where the division is an exact multiplication and all exponents are modest:
// `feature` and the next, of all rows.
template <bool kMask, int kSums>
__device__ void store_direct(const SplitProblem& p, const Split::Outward& outward, int feature,
                             const float (&sums)[kSums]) {
  const int column = outward.column + feature;
  const bool exists = column < p.n;
  if (!kMask && !exists) return;
  const Split::Outward::Feature features[2] = {outward.features[feature],
                                               outward.features[feature + 1]};
  const float scale[2] = {split::power_of_two(-features[0].exponent),
                          split::power_of_two(-features[1].exponent)};
  float largest[2] = {};
  const int first = threadIdx.x % 4 * 2;
  int row = outward.row + first;
  float* to = p.out + static_cast<int64_t>(row) * p.n + column;
  uint32_t bits = 0;  // of four rows, a byte each, of eight features of four threads
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j, row += 8, to += 8 * static_cast<int64_t>(p.n)) {
    if (j % 2 == 0 && outward.row + 8 * j >= outward.end) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x_scale = split::power_of_two(-outward.x_exponent[8 * j + first + i]);
      float out[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The same bits as store_turn's: powers of two scale exactly.
        const float total = sums[4 * j + 2 * r + i];
        largest[r] = ptx::max_nan(largest[r], fabsf(total));
        const float z = fmaf(total, x_scale * scale[r], features[r].bias);
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
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!(largest[r] < INFINITY)) mark_overflow(p, column + r);
  }
}

#endif

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_THREE_PRODUCTS_STORE_CUH_
