// The persistent launch of a GEMM kernel of this folder: how many of its clusters run at once, and
// their launch. gemm_fp16x3/launch.cuh and gemm_one_product/launch.cuh use it.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/launch.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90 {

// Returns how many clusters of a GEMM kernel of this folder run at once on the current GPU.
template <typename Kernel>
int count_gemm_clusters(Kernel* kernel, size_t shared_bytes) {
  Grid one_cluster{};
  one_cluster.blocks = BlockConfig::kClusterSize;
  one_cluster.threads = BlockConfig::kThreads;
  one_cluster.shared_bytes = shared_bytes;
  return count_active_clusters(kernel, one_cluster);
}

// Launches a GEMM kernel: persistent clusters, each of which computes several tiles. The caller has
// called count_gemm_clusters, which allows the kernel its shared memory.
template <typename Kernel, typename... Arguments>
void launch_gemm(Kernel* kernel, size_t shared_bytes, int clusters, cudaStream_t stream,
                 const Arguments&... arguments) {
  Grid grid{};
  grid.blocks = clusters * BlockConfig::kClusterSize;
  grid.threads = BlockConfig::kThreads;
  grid.shared_bytes = shared_bytes;
  grid.stream = stream;
  grid.has_pdl = true;
  launch_or_throw(grid, kernel, arguments...);
}

}  // namespace kernels::sm90
