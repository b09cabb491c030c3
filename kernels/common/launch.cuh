// Launches beyond <<<>>>: clusters, and programmatic dependent launch (PDL), which lets a kernel
// start while the one before it in the stream ends, from sm_90 on.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace kernels {

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

struct Grid {
  unsigned blocks, threads;
  size_t bytes;  // of dynamic shared memory
  cudaStream_t stream;
  bool has_pdl;          // the kernel waits for the previous one itself, before it touches memory
  unsigned cluster = 0;  // blocks; 0 where the kernel's attributes say it
};

// A grid as the runtime takes it.
class LaunchConfig {
 public:
  explicit LaunchConfig(const Grid& grid) {
    config_.gridDim = grid.blocks;
    config_.blockDim = grid.threads;
    config_.dynamicSmemBytes = grid.bytes;
    config_.stream = grid.stream;
    config_.attrs = attributes_;
    if (grid.has_pdl) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 0) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {grid.cluster, 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2];
  cudaLaunchConfig_t config_ = {};
};

template <typename... Parameters>
int launch_grid(const Grid& grid, void (*kernel)(Parameters...), const Parameters&... parameters) {
  return cudaLaunchKernelEx(LaunchConfig(grid).get(), kernel, parameters...);
}

// Whether a kernel's code for this GPU waits for the previous kernel: a newer GPU may run code that
// was made from an older one's PTX, which does not.
template <typename... Parameters>
int find_pdl(void (*kernel)(Parameters...), bool* has_pdl) {
  cudaFuncAttributes code;
  const int status = cudaFuncGetAttributes(&code, kernel);
  *has_pdl = status == cudaSuccess && code.ptxVersion >= 90;
  return status;
}

template <typename... Parameters>
int allow_shared_memory(void (*kernel)(Parameters...), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// How many clusters of a grid run at once. It depends on the places of the GPU's multiprocessors.
template <typename... Parameters>
int count_clusters(void (*kernel)(Parameters...), const Grid& grid, int* clusters) {
  int status = allow_shared_memory(kernel, grid.bytes);
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveClusters(clusters, kernel, LaunchConfig(grid).get());
  return status == cudaSuccess && *clusters == 0 ? cudaErrorInvalidConfiguration : status;
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute, int* value) {
  int device;
  const int status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(value, attribute, device) : status;
}

// Whether rows `stride` bytes apart begin at multiples of 16 bytes.
__host__ __device__ inline bool has_aligned_rows(const void* first, int64_t stride) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 16 == 0;
}

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace kernels
