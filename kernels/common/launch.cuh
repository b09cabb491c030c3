// Launches of kernels: plain ones, ones in clusters of blocks, and ones with programmatic dependent
// launch (PDL).
//
// PDL (compute capability 9.0 and newer) overlaps a kernel with the end of the one before it in the
// stream. Normally a kernel starts when all blocks of the previous kernel have ended and their
// writes are visible. With PDL the next kernel starts earlier, and waits for that end itself:
//
//   previous kernel  ---- start_next_kernel() ------------------- end
//                                  |                               |
//   next kernel                    starts ---- set-up ---- wait_for_previous_kernel() ---- work
//
//   - The previous kernel calls start_next_kernel(). When each of its blocks has done so or has
//     ended, blocks of the next kernel start as soon as a multiprocessor has room for them.
//   - The next kernel calls wait_for_previous_kernel(). Before that call, the previous kernel may
//     still run, so the next kernel reads nothing that the previous kernel writes, and writes
//     nothing that the previous kernel reads or writes.
//
// The next kernel has to be launched with Grid::has_pdl. Otherwise it starts at the end of the
// previous kernel as usual, and neither function has an effect.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/sizes.h"

namespace kernels {

// ----------------------------------------------------------------------------- sizes and addresses

constexpr int divide_up_to_int(int64_t a, int64_t b) { return static_cast<int>(divide_up(a, b)); }

// Returns whether each row of a matrix begins at a multiple of 16 bytes. `first` is the address of
// the first row, and `stride` the bytes from one row to the next, or 0 for one row or a flat array.
__host__ __device__ inline bool has_aligned_rows(const void* first, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 16 == 0;
}

// --------------------------------------------------- programmatic dependent launch, in device code

// Waits until the previous kernel of the stream has ended and all its writes are visible. Every
// thread that needs this wait calls the function itself.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel of the stream to start.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ------------------------------------------------------------------------------------------ errors

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw status;
}

// Runs body(), in which check() throws errors, and returns the cudaError_t that it throws, or
// cudaSuccess.
template <typename Body>
int status_of(const Body& body) {
  try {
    body();
  } catch (cudaError_t status) {
    return status;
  }
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------- launches

// Launches kKernel<<<blocks, threads, 0, stream>>>(parameters...) and returns its cudaError_t.
// Kernels that need dynamic shared memory, clusters or PDL are launched by launch_or_throw, below.
template <auto kKernel, typename... Parameters>
int launch(dim3 blocks, int threads, cudaStream_t stream, Parameters... parameters) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Parameters...)>,
                "the arguments have the types of the kernel's parameters");
  void* addresses[] = {&parameters...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), blocks, threads, addresses,
                          /*shared_bytes=*/0, stream);
}

struct Grid {
  int blocks = 0;
  int threads = 0;          // in a block
  size_t shared_bytes = 0;  // dynamic shared memory of a block
  cudaStream_t stream = nullptr;
  bool has_pdl = false;  // the kernel calls wait_for_previous_kernel
  int cluster_size = 0;  // blocks of a cluster; 0: none, or as the kernel's __cluster_dims__ says
};

// A Grid in the form that CUDA's runtime takes. `config` points to `attributes` of the same object,
// so the object is not copied.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};

  explicit LaunchConfig(const Grid& grid) {
    config.gridDim = dim3(grid.blocks);
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = grid.stream;
    config.attrs = attributes;
    if (grid.has_pdl) {
      cudaLaunchAttribute& pdl = attributes[config.numAttrs++];
      pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      pdl.val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster_size > 0) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster_size), 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

template <typename... Parameters>
void launch_or_throw(const Grid& grid, void (*kernel)(Parameters...),
                     const Parameters&... parameters) {
  const LaunchConfig launch_config(grid);
  check(cudaLaunchKernelEx(&launch_config.config, kernel, parameters...));
}

// Allows blocks of the kernel `bytes` of dynamic shared memory; without it CUDA allows 48 KiB.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)));
}

// Returns the number of clusters of a grid that run at once on the current device. They may be
// fewer than the multiprocessors suggest: a cluster's blocks run within one group of
// multiprocessors (a GPC), and groups differ in size from GPU to GPU. Throws if not even one
// cluster fits. Before it counts, it allows the kernel to use the grid's shared memory, which also
// holds for later launches.
template <typename Kernel>
int count_active_clusters(Kernel* kernel, const Grid& grid) {
  allow_shared_memory(kernel, grid.shared_bytes);
  const LaunchConfig launch_config(grid);
  int clusters;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch_config.config));
  if (clusters == 0) check(cudaErrorInvalidConfiguration);
  return clusters;
}

// An attribute of the current device, or 0 if there is no device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device;
  int value = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

}  // namespace kernels
