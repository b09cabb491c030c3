// Launches beyond <<<>>>: by one call of the driver; in clusters; and with programmatic dependent
// launch (PDL), which lets a kernel start while the one before it in the stream ends, from sm_90
// on. Errors of the runtime are exceptions between here and the functions of launchers.h.

#pragma once

#include <cudaTypedefs.h>
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

// --------------------------------------------------------------------------------------- errors

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

// ------------------------------------------------------------------------------------- launches

struct Grid {
  int blocks, threads;
  size_t bytes;  // of dynamic shared memory
  cudaStream_t stream;
  bool has_pdl;     // the kernel waits for the previous one itself, before it touches memory
  int cluster = 0;  // blocks; 0 where the kernel's attributes say it
};

// A grid as the runtime takes it.
struct LaunchConfig : cudaLaunchConfig_t {
  cudaLaunchAttribute attributes[2];

  explicit LaunchConfig(const Grid& grid) : cudaLaunchConfig_t{} {
    gridDim = grid.blocks;
    blockDim = grid.threads;
    dynamicSmemBytes = grid.bytes;
    stream = grid.stream;
    attrs = attributes;
    if (grid.has_pdl) {
      cudaLaunchAttribute& attribute = attributes[numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 0) {
      cudaLaunchAttribute& attribute = attributes[numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

template <typename... Parameters>
void launch_grid(const Grid& grid, void (*kernel)(Parameters...), const Parameters&... parameters) {
  const LaunchConfig config(grid);
  check(cudaLaunchKernelEx(&config, kernel, parameters...));
}

// Whether a kernel's code for this GPU waits for the previous kernel: a newer GPU may run code that
// was made from an older one's PTX, which does not.
template <typename Kernel>
bool has_pdl(Kernel* kernel) {
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, kernel));
  return code.ptxVersion >= 90;
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

// An attribute of the current device.
inline cudaError_t device_attribute(cudaDeviceAttr attribute, int* value) {
  int device;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(value, attribute, device) : status;
}

// A function of the driver that the runtime works with, found at run time so that nothing links
// against it; or null.
template <typename Function>
Function find_driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

// kernel<<<grid, block, 0, stream>>> and cudaGetLastError, by one call of the driver instead of
// four of the runtime. Small tensors are bound by the host's time: for 1,024 elements, the
// runtime's cudaLaunchKernel makes a module's call 2.4% longer than this (H200).
inline int launch_kernel(const void* kernel, cudaKernel_t function, dim3 grid, int block,
                         cudaStream_t stream, void** params) {
  static const auto driver_launch =
      find_driver_function<PFN_cuLaunchKernel_v4000>("cuLaunchKernel", 4000);
  // The driver wants the device's context to be current. The runtime makes it so: it has a thread's
  // first launch, and the one after somebody has taken the context away.
  static thread_local bool has_context = false;
  if (has_context && driver_launch != nullptr && function != nullptr) {
    // A CUkernel, which stands for a function in any device's context.
    const CUresult status = driver_launch(reinterpret_cast<CUfunction>(function), grid.x, grid.y,
                                          grid.z, block, 1, 1, 0, stream, params, nullptr);
    if (status != CUDA_ERROR_INVALID_CONTEXT) return status;  // the runtime has the same numbers
  }
  has_context = true;
  return cudaLaunchKernel(kernel, grid, block, params, 0, stream);
}

inline cudaKernel_t find_function(const void* kernel) {
  cudaKernel_t function = nullptr;
  cudaGetKernel(&function, kernel);
  return function;
}

// launch_kernel of a kernel and its arguments. All but these lines is there once: nvcc's host code
// is not optimised, and was made anew for each of 90 kernels.
template <auto kKernel, typename... Params>
int launch(dim3 grid, int block, cudaStream_t stream, Params... params) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Params...)>,
                "the arguments have the types of the kernel's parameters");
  const auto kernel = reinterpret_cast<const void*>(kKernel);
  static const cudaKernel_t function = find_function(kernel);
  void* addresses[] = {&params...};
  return launch_kernel(kernel, function, grid, block, stream, addresses);
}

}  // namespace kernels
