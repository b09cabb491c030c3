// Common to all bindings: dtypes of tensors, devices, allocation, layouts, threads and streams.

#pragma once

#include <Python.h>
// Python.h comes first, as it demands.

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "launchers.h"

#ifdef KERNELS_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace kernels {

using at::Tensor;

// A RuntimeError with a message as printf makes it. Not by c10::str: that uses streams, which crash
// in an extension that was linked with a libstdc++ of its own, as some toolchains do. Not by
// std::string either, of which GCC would compile a kilobyte a message.
[[noreturn, gnu::cold, gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
  char message[300];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  TORCH_CHECK(false, std::string(message));
  std::abort();  // not reached
}

// The kernels' name of a dtype; none where no kernel serves it.
inline std::optional<DType> kernel_dtype(at::ScalarType type) {
  constexpr std::pair<at::ScalarType, DType> kNames[] = {
      {at::kFloat, DType::kFloat32}, {at::kDouble, DType::kFloat64},
      {at::kHalf, DType::kFloat16},  {at::kBFloat16, DType::kBFloat16},
      {at::kChar, DType::kInt8},     {at::kShort, DType::kInt16},
      {at::kInt, DType::kInt32},     {at::kLong, DType::kInt64},
      {at::kByte, DType::kUInt8}};
  for (const auto& [torchs, ours] : kNames) {
    if (type == torchs) return ours;
  }
  return std::nullopt;
}

// The same of an operand that must be floating; `name` is what an error calls it.
inline DType floating_dtype(const Tensor& tensor, const char* name) {
  const std::optional<DType> dtype = kernel_dtype(tensor.scalar_type());
  if (!dtype || !at::isFloatingType(tensor.scalar_type())) {
    fail("%s must be float32, float64, float16 or bfloat16, got %s", name,
         c10::toString(tensor.scalar_type()));
  }
  return *dtype;
}

// The leading dimensions of x as one.
inline int64_t rows_of(const Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

// For the masks that backward operators take.
inline void check_mask(const Tensor& mask, const Tensor& grad_output, int64_t rows, int64_t bytes) {
  if (mask.scalar_type() != at::kByte || !mask.is_contiguous() || mask.dim() == 0 ||
      rows_of(mask) != rows || mask.size(-1) != bytes || mask.device() != grad_output.device()) {
    fail("mask must be contiguous, uint8, on the gradient's device, with %ld rows of %ld", rows,
         bytes);
  }
}

// From this size on a CPU's outputs go to memory, past the caches, and are put in huge pages, which
// are kept for the next. glibc maps what is larger than this anew each time, and faulting it in by
// 4 KiB pages takes longer than computing it; smaller blocks come from memory that it has touched
// before.
constexpr size_t kStreamBytes = 32 << 20;

// Makes the device of a tensor the current one for as long as it lives. The kernels below begin
// with it; what they call relies on it.
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
      fail(
          "expected a tensor on the CPU, got one on %s: these kernels were built without CUDA, "
          "because torch.cuda.is_available() was false when model_new was imported",
          x.device().str().c_str());
    }
#endif
  }

#ifdef KERNELS_WITH_CUDA
 private:
  c10::OptionalDeviceGuard guard_;
#endif
};

// The memory of large outputs on a CPU.
class LargeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // A tensor that takes this allocator along may be resized to anything.
    void* const data = bytes < kStreamBytes ? nullptr : cpu::take_memory(bytes);
    if (data == nullptr) return c10::GetAllocator(at::kCPU)->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    // Copy-on-write clones (_lazy_clone) need a context that is the data itself.
    return {data, data, release, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    cpu::give_memory(data);
  }
};

// Runs `work`, which allocates; if it fails, once more without the memory that is kept for later.
template <typename Work>
auto with_all_memory(const Work& work) {
  try {
    return work();
  } catch (const c10::Error&) {
    if (!cpu::release_memory()) throw;
  }
  return work();
}

// Uninitialised memory without a trip through the dispatcher, which small tensors would notice.
inline Tensor allocate([[maybe_unused]] const Tensor& like, at::IntArrayRef sizes,
                       std::optional<at::IntArrayRef> strides, at::ScalarType type) {
  static LargeAllocator large;
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
  c10::Allocator* allocator = bytes < kStreamBytes ? c10::GetAllocator(at::kCPU) : &large;
  c10::DispatchKeySet keys(at::DispatchKey::CPU);
#ifdef KERNELS_WITH_CUDA
  if (like.is_cuda()) {
    allocator = c10::cuda::CUDACachingAllocator::get();
    keys = c10::DispatchKeySet(at::DispatchKey::CUDA);
  }
#endif
  return with_all_memory([&] {
    return strides ? at::detail::empty_strided_generic(sizes, *strides, allocator, keys, type)
                   : at::detail::empty_generic(sizes, allocator, keys, type, std::nullopt);
  });
}

// An output with the strides that torch's elementwise ops (TensorIterator) give theirs. The first
// two rules matter where a dimension of size 1 has a stride that no other would give it.
inline Tensor allocate_output(const Tensor& x) {
  if (x.is_contiguous()) return allocate(x, x.sizes(), std::nullopt, x.scalar_type());
  if (x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return allocate(x, x.sizes(), c10::get_channels_last_strides_2d(x.sizes()), x.scalar_type());
  }
  if (x.is_non_overlapping_and_dense()) {
    return allocate(x, x.sizes(), x.strides(), x.scalar_type());
  }
  return allocate(x, x.sizes(), at::infer_dense_strides(x.sizes(), x.strides()), x.scalar_type());
}

// Whether element i in memory order is the same element in both. `dense` has no gaps.
inline bool same_order(const Tensor& tensor, at::IntArrayRef dense) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != dense[d]) return false;
  }
  return true;
}

// The walk over a strided operand in the memory order of a dense result, with neighbouring
// dimensions joined where the operand allows it.
inline Layout layout_of(at::IntArrayRef sizes, at::IntArrayRef result, at::IntArrayRef stride) {
  int order[kMaxDims];
  int ndim = 0;
  for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
    if (sizes[d] == 1) continue;
    int to = ndim++;
    for (; to > 0 && result[order[to - 1]] > result[d]; --to) order[to] = order[to - 1];
    order[to] = d;
  }
  Layout layout;
  for (int i = 0; i < ndim; ++i) {
    const int d = order[i], last = layout.ndim - 1;
    if (last >= 0 && layout.stride[last] * layout.size[last] == stride[d]) {
      layout.size[last] *= sizes[d];
    } else {
      layout.size[layout.ndim] = sizes[d];
      layout.stride[layout.ndim++] = stride[d];
    }
  }
  if (layout.ndim == 0) layout = {1, {1}, {}};
  return layout;
}

// Fewer elements than this are not worth a second thread (at::internal::GRAIN_SIZE).
constexpr int64_t kGrain = 32768;

// work(begin, end) over 0 <= i < n, on torch's threads if that is more than a grain.
// Not a template, as torch's own is: it would be compiled anew for every kernel.
inline void parallel_for(int64_t n, int64_t grain, c10::function_ref<void(int64_t, int64_t)> work) {
  if (n <= grain) return work(0, n);
  at::parallel_for(0, n, grain, work);
}

// The same over the elements that work(begin, end, streams) writes to `out`; begin is a multiple of
// 64, and `streams` is that of the CPU kernels. Lambdas take their captures by value: each
// reference is a line that another thread fetches from this one's cache (2^16 elements on two
// cores: 6.3 instead of 6.8 us, torch.relu 6.6).
//
// Fresh huge pages are touched at their ends first. Linux clears a huge page so that it comes last
// to where it was touched; touched at the end, it is cleared at ascending addresses, which takes 24
// instead of 49 ms for 1 GiB, and ReLU into it 52 instead of 74 (AMD EPYC, 2 threads, Linux 6.18).
inline void parallel_for_elements(const Tensor& out, bool is_fresh,
                                  c10::function_ref<void(int64_t, int64_t, bool)> work) {
  const int64_t n = out.numel();
  if (n <= kGrain) return work(0, n, false);
  const int64_t size = out.element_size();
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  const bool streams = static_cast<size_t>(n * size) >= kStreamBytes;
  constexpr int64_t kStep = 64;
  parallel_for((n + kStep - 1) / kStep, kGrain / kStep, [=](int64_t begin, int64_t end) {
    begin *= kStep, end = std::min(end * kStep, n);
    if (!streams || !is_fresh) return work(begin, end, streams);
    while (begin < end) {
      const uintptr_t page = reinterpret_cast<uintptr_t>(data + begin * size) / cpu::kHugePage + 1;
      char* const next_page = reinterpret_cast<char*>(page * cpu::kHugePage);
      const int64_t next = std::min<int64_t>((next_page - data) / size, end);
      *static_cast<volatile char*>(data + next * size - 1) = 0;
      work(begin, next, streams);
      begin = next;
    }
  });
}

// Where x is on a GPU, launch(stream) on the current stream of its device, which is the current
// one; it returns the launch's cudaError_t. Otherwise work(). launch takes `auto stream`: as a
// template, it is not compiled in a build without CUDA kernels.
template <typename Launch, typename Work>
void launch(const Tensor& x, const Launch& launch, const Work& work) {
#ifdef KERNELS_WITH_CUDA
  if (x.is_cuda()) {
    const int status = launch(c10::cuda::getCurrentCUDAStream(x.get_device()).stream());
    C10_CUDA_CHECK(static_cast<cudaError_t>(status));
    return;
  }
#endif
  (void)x, (void)launch;
  work();
}

// The same for a kernel that writes the elements of `out`, work being parallel_for_elements's.
template <typename Launch, typename Work>
void launch_elements(const Tensor& out, bool is_fresh, const Launch& on_gpu, const Work& work) {
  if (out.numel() == 0) return;
  launch(out, on_gpu, [&] { parallel_for_elements(out, is_fresh, work); });
}

}  // namespace kernels
