// Splits a transposed x, [k, m] in memory, with all accesses along its lines.
//
// A cluster takes kLineRows rows of x, which are 64 bytes of each line, and its blocks share K. A
// row's largest element has to be known before its pieces are, so a block keeps its lines in shared
// memory, and the blocks exchange the largest of each row. They store them into each other's memory
// and count the bytes there in mbarriers, for a barrier of the cluster would fence global memory
// too.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "linear/split/pieces.cuh"

namespace kernels::sm90 {

// With 8 rows, x [8192, 8192] took a quarter longer; with 32, x [64, 8192] a third.
constexpr int kLineRows = 16, kLineVectors = kLineRows / 4;
constexpr int kMostLineBlocks = 8;  // of a cluster
// A block has so many lines before it shares K with others: with 256, x [8192, 1024] takes 28 us
// instead of 24.
constexpr int kLeastLines = 512;
// It keeps so many, and reads the rest twice: with 1024, x [4096, 16384] takes 184 us instead of
// 162.
constexpr int kMostLines = 2048;

// The blocks of a cluster, and the lines that each of them has and keeps.
struct LineShares {
  int cluster = 1, lines = 0, kept = 0;

  LineShares() = default;
  explicit LineShares(int64_t k) {
    while (cluster < kMostLineBlocks && cluster * kLeastLines < k) cluster *= 2;
    lines = blocks_of(k, split::kStepwise * cluster) * split::kStepwise;
    kept = std::min(lines, kMostLines);
  }
};

// What a block has in shared memory.
struct LinesMemory {
  // Of the lines of each block of the cluster: this one's, and those that the others store here.
  uint32_t largest[kMostLineBlocks][kLineRows];  // bits of floats, whose order they have
  int2 losses[kMostLineBlocks][kLineRows];       // nonzeros and subnormals
  uint64_t has_largest, has_losses;              // mbarriers
  alignas(128) float4 lines[1];                  // kLineVectors each

  static constexpr size_t bytes(int kept) {
    return sizeof(LinesMemory) + sizeof(float4) * kLineVectors * kept;
  }

  // A vector of a line. Eight groups of lines have theirs in different banks.
  __device__ float4* at(int line, int vector) {
    return lines + ((line * kLineVectors + vector) ^ line / split::kGroup % 8);
  }
};

// A block of a cluster, and its part of the operand: the lines from `begin` to `end` of the rows
// from first_row on.
struct LineBlock {
  const split::Operand& operand;
  const LineShares& shares;
  LinesMemory& shared;
  int64_t first_row;
  int k, rank, begin, end;

  __device__ int count(int start) const { return min(end - start, shares.kept); }

  // Stores a row's value into another block, which waits for it.
  template <typename T>
  __device__ void send(const T (&of_row)[kLineRows], int row, uint64_t* barrier, int to) const {
    ptx::store_async(ptx::map_shared(ptx::shared_address(&of_row[row]), to), of_row[row],
                     ptx::map_shared(ptx::shared_address(barrier), to));
  }
};

// By all threads, before anything is sent.
__device__ inline void start_exchange(const LineBlock& block) {
  LinesMemory& shared = block.shared;
  if (threadIdx.x == 0) {
    const auto start = [&](uint64_t* barrier, size_t bytes) {
      const uint32_t address = ptx::shared_address(barrier);
      ptx::mbarrier_init(address, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(address, (block.shares.cluster - 1) * bytes);
    };
    start(&shared.has_largest, sizeof(shared.largest[0]));
    start(&shared.has_losses, sizeof(shared.losses[0]));
  }
  ptx::cluster_arrive_relaxed();
  if (threadIdx.x < kLineRows) {
    shared.largest[block.rank][threadIdx.x] = 0;
    shared.losses[block.rank][threadIdx.x] = make_int2(0, 0);
  }
  __syncthreads();
}

// Lines from `start` on into shared memory, and the largest of each of a thread's four rows.
__device__ inline void load_lines(const LineBlock& block, int start, uint32_t (&largest)[4]) {
  constexpr int kAtOnce = split::kThreads / kLineVectors;
  static_assert(kAtOnce % (8 * split::kGroup) == 0, "a thread's vectors have one place in lines");
  const split::Operand& operand = block.operand;
  const int64_t stride = operand.row_stride;
  const bool has_vectors =
      has_aligned_rows(operand.from, stride * sizeof(float)) && operand.rows % 4 == 0;
  const int first = threadIdx.x / kLineVectors, vector = threadIdx.x % kLineVectors;
  const int count = block.count(start);
  const int64_t row = block.first_row + vector * 4, rows = operand.rows - row;
  const float* from = operand.from + (start + first) * stride + row;
  float4* const own = block.shared.at(first, vector);
  uint32_t to = ptx::shared_address(own);
  const auto copy = [&](const auto& copy_vector) {
    for (int line = first; line < count; line += kAtOnce) {
      copy_vector(start + line < block.k);
      from += kAtOnce * stride, to += kAtOnce * kLineVectors * sizeof(float4);
    }
  };
  if (has_vectors) {
    copy([&](bool exists) { ptx::copy_async(to, from, exists && rows > 0); });
  } else {
    copy([&](bool exists) {
      for (int j = 0; j < 4; ++j) ptx::copy_async_one(to + 4 * j, from + j, exists && j < rows);
    });
  }
  ptx::commit_copies();
  ptx::wait_copies<0>();
  const float4* four = own;
#pragma unroll 4
  for (int line = first; line < count; line += kAtOnce, four += kAtOnce * kLineVectors) {
    const float v[] = {four->x, four->y, four->z, four->w};
#pragma unroll
    for (int j = 0; j < 4; ++j) largest[j] = max(largest[j], __float_as_uint(fabsf(v[j])));
  }
  __syncthreads();
}

// The largest of this block's rows to all blocks of the cluster, and theirs to this one.
__device__ inline void exchange_largest(const LineBlock& block, uint32_t (&largest)[4]) {
  auto& here = block.shared.largest[block.rank];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int lane = kLineVectors; lane < 32; lane *= 2) {
      largest[j] = max(largest[j], __shfl_xor_sync(0xffffffff, largest[j], lane));
    }
    if (threadIdx.x % 32 < kLineVectors) {
      atomicMax(&here[threadIdx.x % kLineVectors * 4 + j], largest[j]);
    }
  }
  __syncthreads();
  ptx::cluster_wait();  // for start_exchange
  if (const int to = threadIdx.x / kLineRows; to < block.shares.cluster && to != block.rank) {
    block.send(here, threadIdx.x % kLineRows, &block.shared.has_largest, to);
  }
  ptx::mbarrier_wait(ptx::shared_address(&block.shared.has_largest), 0);
}

// Sums of the threads' losses, each of a row, in the cluster's first block. False where there are
// none, or none for this thread.
__device__ inline bool reduce_losses(const LineBlock& block, int row, bool is_first_of_row,
                                     split::Losses* losses) {
  LinesMemory& shared = block.shared;
  auto& here = shared.losses[block.rank];
  atomicAdd(&here[row].x, losses->nonzeros);
  atomicAdd(&here[row].y, losses->subnormals);
  __syncthreads();
  if (block.rank > 0) {
    if (threadIdx.x < kLineRows) block.send(here, threadIdx.x, &shared.has_losses, 0);
    return false;
  }
  if (!is_first_of_row) return false;
  ptx::mbarrier_wait(ptx::shared_address(&shared.has_losses), 0);
  *losses = {};
  for (int i = 0; i < block.shares.cluster; ++i) {
    losses->nonzeros += shared.losses[i][row].x, losses->subnormals += shared.losses[i][row].y;
  }
  return true;
}

// The rows of cluster number `cluster`, by blocks of split::kThreads threads.
template <bool kIsPair>
__device__ void split_lines(const split::Operand& operand, int cluster, int k,
                            const LineShares& shares, LinesMemory& shared) {
  const int64_t padded_k = split::padded(k), first_row = static_cast<int64_t>(cluster) * kLineRows;
  const int rank = ptx::cluster_ctarank(), begin = rank * shares.lines;
  const int end = min(begin + shares.lines, static_cast<int>(padded_k));
  const LineBlock block{operand, shares, shared, first_row, k, rank, begin, end};
  start_exchange(block);
  uint32_t largest[4] = {};
  int start = begin;
  for (; start < end; start += shares.kept) load_lines(block, start, largest);
  exchange_largest(block, largest);

  // A thread has a row, and of its groups as many as there are steps. The groups of eight
  // neighbours make a row of a stepwise matrix.
  constexpr int kGroups = split::kStepwise / split::kGroup;
  constexpr int kStep = split::kThreads / kLineRows * split::kGroup;
  static_assert(kStep % split::kStepwise == 0 && kStep % (8 * split::kGroup) == 0,
                "a thread's elements have one place in lines and in the pieces' matrices");
  const int row = threadIdx.x / kGroups % kLineRows;
  const int first = threadIdx.x / (kGroups * kLineRows) * split::kStepwise +
                    threadIdx.x % kGroups * split::kGroup;
  const bool exists = first_row + row < operand.rows;
  uint32_t largest_of_row = 0;
  for (int i = 0; i < shares.cluster; ++i) {
    largest_of_row = max(largest_of_row, shared.largest[i][row]);
  }
  const split::RowScale scale(largest_of_row, kIsPair);
  const float* elements[split::kGroup];
#pragma unroll
  for (int j = 0; j < split::kGroup; ++j) {
    elements[j] = reinterpret_cast<const float*>(shared.at(first + j, row / 4)) + row % 4;
  }
  const auto place_of = [&](int i) {
    return split::place_of<kIsPair>(operand, first_row + row, i, padded_k);
  };
  const int64_t apart = place_of(kStep) - place_of(0);
  split::Losses losses;
  for (start -= shares.kept; start >= begin; start -= shares.kept) {
    int64_t place = place_of(start + first);
    for (int i = first; i < block.count(start); i += kStep, place += apart) {
      float v[split::kGroup];
#pragma unroll
      for (int j = 0; j < split::kGroup; ++j) v[j] = elements[j][(i - first) * kLineRows];
      split::split_group<kIsPair>(operand, place, exists, v, scale, &losses);
    }
    if (start == begin) break;
    __syncthreads();
    load_lines(block, start - shares.kept, largest);
  }

  const bool is_first_of_row = first == 0;
  if constexpr (kIsPair) {
    if (rank > 0 || !is_first_of_row) return;
  } else {
    if (!reduce_losses(block, row, is_first_of_row, &losses)) return;
  }
  if (exists) split::store_exponent<kIsPair>(operand, first_row + row, scale, losses);
}

}  // namespace kernels::sm90
