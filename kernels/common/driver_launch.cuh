// Launches: one call of the driver for a kernel, and the choice of a kernel by dtype.

#ifndef KERNELS_COMMON_DRIVER_LAUNCH_CUH_
#define KERNELS_COMMON_DRIVER_LAUNCH_CUH_

#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "launchers.h"

namespace kernels {

// cuLaunchKernel of the driver that the runtime works with, or null.
inline PFN_cuLaunchKernel_v4000 find_driver_launch() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuLaunchKernel", &function, 4000,
                                                              cudaEnableDefault, &found);
  const bool is_found = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<PFN_cuLaunchKernel_v4000>(function) : nullptr;
}

// A kernel for the driver, in all devices' contexts: a CUkernel.
inline CUfunction find_function(const void* kernel) {
  cudaKernel_t function = nullptr;
  cudaGetKernel(&function, kernel);
  return reinterpret_cast<CUfunction>(function);
}

// kernel<<<grid, block, 0, stream>>> and cudaGetLastError, by one call of the driver instead of
// four of the runtime. The host's time bounds small tensors: for 1,024 elements cudaLaunchKernel
// makes a module's call 2.4% longer (H200).
inline int launch_kernel(const void* kernel, CUfunction function, dim3 grid, int block,
                         cudaStream_t stream, void** params) {
  static const PFN_cuLaunchKernel_v4000 driver_launch = find_driver_launch();
  // The driver needs the device's context to be current, and the runtime makes it so. The runtime
  // therefore has a thread's first launch, and the one after somebody has removed the context.
  static thread_local bool has_context = false;
  if (has_context && driver_launch != nullptr && function != nullptr) {
    const CUresult status =
        driver_launch(function, grid.x, grid.y, grid.z, block, 1, 1, 0, stream, params, nullptr);
    if (status != CUDA_ERROR_INVALID_CONTEXT) return status;  // the runtime has the same numbers
  }
  has_context = true;
  return cudaLaunchKernel(kernel, grid, block, params, 0, stream);
}

// launch_kernel of a kernel and its arguments. nvcc compiles these lines for every kernel, without
// optimisation, and the rest once.
template <auto kKernel, typename... Params>
int launch(dim3 grid, int block, cudaStream_t stream, Params... params) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Params...)>,
                "the arguments have the types of the kernel's parameters");
  const auto kernel = reinterpret_cast<const void*>(kKernel);
  static const CUfunction function = find_function(kernel);
  void* addresses[] = {&params...};
  return launch_kernel(kernel, function, grid, block, stream, addresses);
}

// Returns what body makes of a null pointer of the dtype's element type.
template <typename Body>
int for_floating(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return body(static_cast<double*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<__half*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kernels

#endif  // KERNELS_COMMON_DRIVER_LAUNCH_CUH_
