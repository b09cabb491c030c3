// Launches in clusters, and with programmatic dependent launch (PDL), which lets a kernel start
// while the one before it ends, from sm_90 on. Errors of the runtime are exceptions between here
// and the functions of launchers.h.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kernels {

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int blocks_of(int64_t size, int64_t block) {
  return static_cast<int>(divide_up(size, block));
}

// Whether rows `stride` bytes apart begin at multiples of 16 bytes.
__host__ __device__ inline bool has_aligned_rows(const void* first, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 16 == 0;
}

// Waits for the end of the previous kernel, and for its writes.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks of this one run and there is room.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw status;
}

// The cudaError_t that a body throws, or cudaSuccess.
template <typename Body>
int status_of(const Body& body) {
  try {
    body();
  } catch (cudaError_t status) {
    return status;
  }
  return cudaSuccess;
}

struct Grid {
  int blocks, threads;
  size_t bytes;  // of dynamic shared memory
  cudaStream_t stream;
  bool has_pdl;     // the kernel waits for the previous one itself, before it touches memory
  int cluster = 0;  // blocks; 0 where the kernel's attributes say it
};

struct LaunchConfig : cudaLaunchConfig_t {
  cudaLaunchAttribute attributes[2] = {};

  explicit LaunchConfig(const Grid& grid)
      : cudaLaunchConfig_t{dim3(grid.blocks), dim3(grid.threads), grid.bytes, grid.stream} {
    attrs = attributes;
    if (grid.has_pdl) {
      attributes[numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 0) {
      attributes[numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

template <typename... Parameters>
void launch_grid(const Grid& grid, void (*kernel)(Parameters...), const Parameters&... parameters) {
  const LaunchConfig config(grid);
  check(cudaLaunchKernelEx(&config, kernel, parameters...));
}

template <typename Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)));
}

// How many clusters of a grid run at once. It depends on the places of the GPU's multiprocessors.
template <typename Kernel>
int count_clusters(Kernel* kernel, const Grid& grid) {
  allow_shared_memory(kernel, grid.bytes);
  const LaunchConfig config(grid);
  int clusters;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  if (clusters == 0) check(cudaErrorInvalidConfiguration);
  return clusters;
}

// An attribute of the current device, or 0 without one.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// kKernel<<<grid, block, 0, stream>>>(params...), and its cudaError_t.
template <auto kKernel, typename... Params>
int launch(dim3 grid, int block, cudaStream_t stream, Params... params) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Params...)>,
                "the arguments have the types of the kernel's parameters");
  void* addresses[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), grid, block, addresses, 0,
                          stream);
}

}  // namespace kernels
