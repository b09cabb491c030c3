// A kernel's early start, while the kernel before it in the stream ends: from sm_90 on.

#ifndef KERNELS_COMMON_PDL_CUH_
#define KERNELS_COMMON_PDL_CUH_

#include <cuda_runtime.h>

#include <cstddef>

namespace kernels {

// Waits for the end of the kernel before, and for what it wrote.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel that comes next start as soon as all blocks of this one run and there is room.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Launches a kernel that waits for the previous one itself, before it touches memory.
template <typename... Parameters>
int launch_early(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t bytes,
                 cudaStream_t stream, const Parameters&... parameters) {
  // Code for older GPUs does not wait. A newer one may run it, made from its PTX.
  cudaFuncAttributes code;
  const int status = cudaFuncGetAttributes(&code, kernel);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = code.ptxVersion >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

}  // namespace kernels

#endif  // KERNELS_COMMON_PDL_CUH_
