// Helpers for torch's tensors: dtypes, devices, allocation, streams. They do not call torch's
// dispatcher, because that would show in the time of calls on small tensors.

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

#include "common/sizes.h"
#include "launchers.h"

#ifdef KERNELS_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace kernels {

using at::Tensor;

// An output of at most this many elements is computed by one CPU thread. torch's own operators have
// the same limit, at::internal::GRAIN_SIZE.
constexpr int64_t kGrain = 32768;

// Raises a RuntimeError in Python. The message is one string because TORCH_CHECK joins several
// arguments with a C++ stream, and streams crash in an extension whose toolchain links it with
// another libstdc++ than torch's.
[[noreturn, gnu::cold]] inline void fail(const std::string& message) {
  TORCH_CHECK(false, message);
  std::abort();  // Not reached: TORCH_CHECK throws, but it is not declared [[noreturn]].
}

// Describes a tensor for a message. Example: "Float [2, 3] on cpu".
inline std::string describe(const Tensor& x) {
  std::string sizes;
  for (const int64_t size : x.sizes()) {
    if (!sizes.empty()) sizes += ", ";
    sizes += std::to_string(size);
  }
  const std::string dtype = c10::toString(x.scalar_type());
  return dtype + " [" + sizes + "] on " + x.device().str();
}
inline std::string describe(const std::optional<Tensor>& x) { return x ? describe(*x) : "None"; }

// Returns the kernels' name of a dtype, or nothing for a dtype that no kernel supports.
inline std::optional<DType> kernel_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

inline bool is_aligned(const Tensor& x, int64_t bytes = kVectorBytes) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % bytes == 0;
}

// Returns the number of rows of x [..., N]: the product of all sizes but the last.
inline int64_t rows_of(const Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

// Makes a tensor's device the current one while this object exists. A build without CUDA raises an
// error for a tensor on a GPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& x) {
#ifdef KERNELS_WITH_CUDA
    // torch's guard asks the driver several times, so it is used only where the device changes.
    if (x.is_cuda() && c10::cuda::device_count() > 1 &&
        x.get_device() != c10::cuda::current_device()) {
      guard_.reset_device(x.device());
    }
#else
    if (!x.is_cpu()) {
      fail("expected a tensor on the CPU, got one on " + x.device().str() +
           ": these kernels were built without CUDA, because torch.cuda.is_available() was false "
           "when model_new was imported. Start Python again where torch finds the GPU");
    }
#endif
  }

#ifdef KERNELS_WITH_CUDA
 private:
  c10::OptionalDeviceGuard guard_;
#endif
};

inline c10::Allocator* torch_cpu_allocator() { return c10::GetAllocator(at::kCPU); }

// Returns an uninitialised tensor on the device of `like`, which must be current if it is a GPU.
// The tensor is contiguous unless strides are passed. Its memory is from `cpu_allocator` or, on a
// GPU, from torch's caching allocator.
inline Tensor allocate([[maybe_unused]] const Tensor& like, at::IntArrayRef sizes,
                       at::ScalarType type, std::optional<at::IntArrayRef> strides = std::nullopt,
                       c10::Allocator* cpu_allocator = torch_cpu_allocator()) {
  c10::Allocator* allocator = cpu_allocator;
  c10::DispatchKeySet keys(at::DispatchKey::CPU);
#ifdef KERNELS_WITH_CUDA
  if (like.is_cuda()) {
    allocator = c10::cuda::CUDACachingAllocator::get();
    keys = c10::DispatchKeySet(at::DispatchKey::CUDA);
  }
#endif
  if (strides) return at::detail::empty_strided_generic(sizes, *strides, allocator, keys, type);
  return at::detail::empty_generic(sizes, allocator, keys, type, std::nullopt);
}

#ifdef KERNELS_WITH_CUDA
// Calls launch(stream) for x on a GPU. `stream` is the current stream of x's device, which has to
// be the current device. `launch` returns the cudaError_t of its launches as an int; an error is
// raised in Python.
template <typename Launch>
void run_on_gpu_only(const Tensor& x, const Launch& launch) {
  const int status = launch(c10::cuda::getCurrentCUDAStream(x.get_device()).stream());
  C10_CUDA_CHECK(static_cast<cudaError_t>(status));
}
#endif

// Calls on_gpu(stream) if x is on a GPU, as run_on_gpu_only does, and on_cpu() otherwise. on_gpu
// has to be a generic lambda, [](auto stream) { ... }, which a build without CUDA never
// instantiates, so that the build links although it has no functions of kernels::cuda.
template <typename OnGpu, typename OnCpu>
void run_on_device([[maybe_unused]] const Tensor& x, [[maybe_unused]] const OnGpu& on_gpu,
                   const OnCpu& on_cpu) {
#ifdef KERNELS_WITH_CUDA
  if (x.is_cuda()) {
    run_on_gpu_only(x, on_gpu);
    return;
  }
#endif
  on_cpu();
}

}  // namespace kernels
