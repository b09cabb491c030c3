// The two launches of gemm_fp16x3_sm90_kernel (kernel.cuh) for one chunk of rows of x, and the
// workspace of float32 at `highest`.

#pragma once

#include <algorithm>
#include <cstdint>

#include "launchers.h"
#include "linear/chunks.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_fp16x3/choose_tiles.h"
#include "linear/sm90/gemm_fp16x3/kernel.cuh"
#include "linear/sm90/gemm_fp16x3/plan_schedule.h"
#include "linear/sm90/launch_gemm.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/split_x.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// The workspace. k-tiles have 32 of K, hi and lo.
//
//   slice                type      shape                  used by                   cleared
//   partials.are_stored  Flags     [2, kMaxClusters]      gemm_fp16x3               yes
//   has_overflowed       unsigned  [1]                    gemm_fp16x3               yes
//   has_nonfinite        unsigned  [1]                    gemm_fp16x3, nonfinite    yes
//   x.hi, x.lo           half      [k-tiles, m, 32 + 32]  split_x, gemm_fp16x3      no
//   x.exponent           int       [m]                    split_x, gemm_fp16x3      no
//   x.row_state          int       [m]                    all three kernels         no
//   weight.exponent      int       [n]                    split_x, gemm_fp16x3      no
//   weight.row_state     int       [n]                    all three kernels         no
//   partials.sums        Sums      [kMaxClusters]         gemm_fp16x3               no
//
// Each launch of gemm_fp16x3 has its own part of are_stored. has_overflowed and has_nonfinite share
// a slice. split_x clears the slices that must be zero before the GEMM; they are the first ones.
struct Fp16x3Workspace {
  split::ScaledMatrix x;
  split::ScaledMatrix weight;
  PartialSums partials;  // of the first launch; the second launch's are_stored follows
  unsigned* has_overflowed;
  unsigned* has_nonfinite;
  size_t bytes_to_clear;  // at the beginning of the workspace
  size_t bytes;

  explicit Fp16x3Workspace(const LinearArguments& call)
      : x(describe_operand(call.x, call.m, call.x_stride)),
        weight(describe_operand(call.weight, call.n, call.weight_stride)) {
    constexpr int kMaxClusters = StreamKConfig::kMaxClusters;
    constexpr int kLaunches = 2;  // of gemm_fp16x3
    WorkspaceSlices slices(call.workspace);
    partials.are_stored = slices.add<PartialSums::Flags>(kLaunches * kMaxClusters);
    has_overflowed = slices.add<unsigned>(2);
    has_nonfinite = slices.pointer_into(has_overflowed, 1);
    bytes_to_clear = slices.bytes();

    x.hi = slices.add<__half>(2 * call.m * split::padded(call.k));
    x.lo = slices.pointer_into(x.hi, Fp16x3Config::kKTileDepth);
    x.exponent = slices.add<int>(call.m);
    x.row_state = slices.add<int>(call.m);
    weight.exponent = slices.add<int>(call.n);
    weight.row_state = slices.add<int>(call.n);
    partials.sums = slices.add<PartialSums::Sums>(kMaxClusters);
    bytes = slices.bytes();
  }
};

inline auto choose_kernel(int k) {
  if (k >= Fp16x3Config::kInterval128FromK) return gemm_fp16x3_sm90_kernel<128>;
  if (k >= Fp16x3Config::kInterval64FromK) return gemm_fp16x3_sm90_kernel<64>;
  return gemm_fp16x3_sm90_kernel<32>;
}

// Launches the GEMM twice (RowState says why).
inline void launch_twice(const LinearArguments& call, const Fp16x3Workspace& workspace,
                         const Epilogue<float>& epilogue, cudaStream_t stream) {
  const int k = static_cast<int>(call.k);
  const auto kernel = choose_kernel(k);
  const int max_clusters = std::min(count_gemm_clusters(kernel, sizeof(Fp16x3SharedMemory)),
                                    StreamKConfig::kMaxClusters);
  const TilePartition tiles = choose_tiles(call.m, call.n, k, max_clusters);
  const Plan plan = plan_schedule(tiles, Fp16x3Config::k_groups(k), max_clusters);

  Fp16x3Arguments args{epilogue};
  args.x = workspace.x;
  args.weight = workspace.weight;
  args.k = k;
  args.has_overflowed = workspace.has_overflowed;
  args.has_nonfinite = workspace.has_nonfinite;
  args.is_second_launch = false;
  args.tiles = tiles;
  args.schedule = plan.schedule;
  args.partials = workspace.partials;

  const CUtensorMap x_map =
      make_k_tiled_map(workspace.x, split::padded(call.k) / Fp16x3Config::kKTileDepth,
                       tiles.max_rows() / BlockConfig::kClusterSize);
  const CUtensorMap weight_map = make_map(workspace.weight.source, call.n, call.k,
                                          call.weight_stride, Fp16x3Config::kBlockWeightRows);

  const auto launch = [&] {
    launch_gemm(kernel, sizeof(Fp16x3SharedMemory), plan.clusters, stream, x_map, weight_map, args);
  };
  launch();
  // The flags of the first launch are no longer zero.
  args.is_second_launch = true;
  args.partials.are_stored = workspace.partials.are_stored + StreamKConfig::kMaxClusters;
  launch();
}

}  // namespace kernels::sm90::gemm_fp16x3
