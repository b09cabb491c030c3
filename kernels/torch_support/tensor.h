// Common to all bindings: dtypes of tensors, devices, allocation, streams.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "launchers.h"

#ifdef KERNELS_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace kernels {

using at::Tensor;

// Raises a RuntimeError. c10::str, of more than a string, uses streams, which crash in an extension
// that was linked with a libstdc++ of its own, as some toolchains do.
[[noreturn, gnu::cold]] inline void fail(const std::string& message) {
  TORCH_CHECK(false, message);
  std::abort();  // not reached
}

// The kernels' name of a dtype; none where no kernel serves it.
inline std::optional<DType> kernel_dtype(at::ScalarType type) {
  if (type == at::kFloat) return DType::kFloat32;
  if (type == at::kDouble) return DType::kFloat64;
  if (type == at::kHalf) return DType::kFloat16;
  if (type == at::kBFloat16) return DType::kBFloat16;
  return std::nullopt;
}

inline bool is_aligned(const Tensor& x, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % bytes == 0;
}

// The leading dimensions of x as one.
inline int64_t rows_of(const Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

// Makes the device of a tensor the current one for as long as it lives.
class DeviceOf {
 public:
  explicit DeviceOf(const Tensor& x) {
#ifdef KERNELS_WITH_CUDA
    // Seldom needed, and a guard asks the driver more than once.
    if (x.is_cuda() && c10::cuda::device_count() > 1 &&
        x.get_device() != c10::cuda::current_device()) {
      guard_.reset_device(x.device());
    }
#else
    if (!x.is_cpu()) {
      fail("expected a tensor on the CPU, got one on " + x.device().str() +
           ": these kernels were built without CUDA, because torch.cuda.is_available() was false "
           "when model_new was imported");
    }
#endif
  }

#ifdef KERNELS_WITH_CUDA
 private:
  c10::OptionalDeviceGuard guard_;
#endif
};

// Uninitialised memory on the device of `like`, without a trip through the dispatcher, which small
// tensors would notice. cpu: who allocates on a CPU.
inline Tensor allocate([[maybe_unused]] const Tensor& like, at::IntArrayRef sizes,
                       at::ScalarType type, std::optional<at::IntArrayRef> strides = std::nullopt,
                       c10::Allocator* cpu = c10::GetAllocator(at::kCPU)) {
  c10::Allocator* allocator = cpu;
  c10::DispatchKeySet keys(at::DispatchKey::CPU);
#ifdef KERNELS_WITH_CUDA
  if (like.is_cuda()) {
    allocator = c10::cuda::CUDACachingAllocator::get();
    keys = c10::DispatchKeySet(at::DispatchKey::CUDA);
  }
#endif
  return strides ? at::detail::empty_strided_generic(sizes, *strides, allocator, keys, type)
                 : at::detail::empty_generic(sizes, allocator, keys, type, std::nullopt);
}

// Where x is on a GPU, on_gpu(stream) on the current stream of its device, which is the current
// one; it returns the launch's cudaError_t. Otherwise on_cpu(). on_gpu takes `auto stream`: as a
// template, it is not compiled in a build without CUDA kernels.
template <typename OnGpu, typename OnCpu>
void run_on_device(const Tensor& x, const OnGpu& on_gpu, const OnCpu& on_cpu) {
#ifdef KERNELS_WITH_CUDA
  if (x.is_cuda()) {
    const int status = on_gpu(c10::cuda::getCurrentCUDAStream(x.get_device()).stream());
    C10_CUDA_CHECK(static_cast<cudaError_t>(status));
    return;
  }
#endif
  (void)x, (void)on_gpu;
  on_cpu();
}

}  // namespace kernels
