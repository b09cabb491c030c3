// The kernels on tensors: what to allocate, on which device, in which layout. Part of module.cpp.

#ifndef KERNELS_BINDING_RELU_H_
#define KERNELS_BINDING_RELU_H_

#include <Python.h>
// Python.h comes first, as it demands.

// c10/util/ApproximateClock.h includes all of GCC's x86 intrinsics for one of them. Without these
// headers, of which this is the guard, GCC takes 0.4 of 8.7 s less.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define _X86INTRIN_H_INCLUDED
namespace c10 {
inline unsigned long long __rdtsc() { return __builtin_ia32_rdtsc(); }
}  // namespace c10
#endif

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/threshold_backward_meta_dispatch.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "launchers.h"

#ifdef KERNELS_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

// From torch/csrc/autograd/python_variable.h and torch/csrc/Exceptions.h, which would take 3 of the
// 10 seconds that this file compiles: they bring pybind11 in. A torch without these symbols makes
// the import fail at once.
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11  // seen there, not looked for before
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);
#endif
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace kernels {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// A RuntimeError with a message as printf makes it. Not by c10::str: that uses streams, which crash
// in an extension that was linked with a libstdc++ of its own, as some toolchains do. Not by
// std::string either, of which GCC would compile a kilobyte a message.
[[noreturn, gnu::cold, gnu::format(printf, 1, 2)]] void fail(const char* format, ...) {
  char message[300];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  TORCH_CHECK(false, std::string(message));
  std::abort();  // not reached
}

// ------------------------------------------------------------------------------------ kernels

std::optional<DType> kernel_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kByte:
      return DType::kUInt8;
    default:
      return std::nullopt;
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
Tensor allocate([[maybe_unused]] const Tensor& like, at::IntArrayRef sizes,
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
Tensor allocate_output(const Tensor& x) {
  if (x.is_contiguous()) return allocate(x, x.sizes(), std::nullopt, x.scalar_type());
  if (x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return allocate(x, x.sizes(), c10::get_channels_last_strides_2d(x.sizes()), x.scalar_type());
  }
  if (x.is_non_overlapping_and_dense()) {
    return allocate(x, x.sizes(), x.strides(), x.scalar_type());
  }
  return allocate(x, x.sizes(), at::infer_dense_strides(x.sizes(), x.strides()), x.scalar_type());
}

Tensor allocate_mask(const Tensor& x) {
  return allocate(x, {(x.numel() + 7) / 8}, std::nullopt, at::kByte);
}

// Whether element i in memory order is the same element in both. `dense` has no gaps.
bool same_order(const Tensor& tensor, at::IntArrayRef dense) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != dense[d]) return false;
  }
  return true;
}

bool is_contiguous(at::IntArrayRef sizes, at::IntArrayRef stride) {
  int64_t expected = 1;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; --d) {
    if (sizes[d] > 1 && stride[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

// Whether a tensor of these sizes and strides has a place of its own for each element, and no gaps.
bool is_non_overlapping_and_dense(at::IntArrayRef sizes, at::IntArrayRef stride) {
  if (std::any_of(stride.begin(), stride.end(), [](auto s) { return s < 0; })) return false;
  const int64_t n = c10::multiply_integers(sizes);
  size_t d;
  for (int64_t expected = 1; expected < n; expected *= sizes[d]) {
    d = 0;
    while (d < sizes.size() && !(sizes[d] > 1 && stride[d] == expected)) ++d;
    if (d == sizes.size()) return false;
  }
  return true;
}

// The walk over up to two strided operands in the memory order of a dense result, with neighbouring
// dimensions joined where every operand allows it.
Layout layout_of(at::IntArrayRef sizes, at::IntArrayRef result, at::IntArrayRef first,
                 at::IntArrayRef second) {
  int order[kMaxDims];
  int ndim = 0;
  for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
    if (sizes[d] == 1) continue;
    int to = ndim++;
    for (; to > 0 && result[order[to - 1]] > result[d]; --to) order[to] = order[to - 1];
    order[to] = d;
  }
  Layout layout;
  layout.ndim = 1;
  layout.size[0] = 1;
  layout.stride[0][0] = layout.stride[1][0] = 0;
  for (int i = 0; i < ndim; ++i) {
    const int d = order[i];
    const int last = layout.ndim - 1;
    const int64_t size = layout.size[last];
    const bool joins =
        layout.stride[0][last] * size == first[d] && layout.stride[1][last] * size == second[d];
    const bool is_first = size == 1;
    const int to = is_first || joins ? last : layout.ndim++;
    if (!is_first && joins) {
      layout.size[to] *= sizes[d];
    } else {
      layout.size[to] = sizes[d];
      layout.stride[0][to] = first[d];
      layout.stride[1][to] = second[d];
    }
  }
  return layout;
}

// Fewer elements than this are not worth a second thread (at::internal::GRAIN_SIZE).
constexpr int64_t kGrain = 32768;

// work(begin, end) over 0 <= i < n, on torch's threads if that is more than a grain.
// Not a template, as torch's parallel_for is: it would be compiled anew for every kernel.
void split(int64_t n, int64_t grain, c10::function_ref<void(int64_t, int64_t)> work) {
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
void split_elements(const Tensor& out, bool is_fresh,
                    c10::function_ref<void(int64_t, int64_t, bool)> work) {
  const int64_t n = out.numel();
  if (n <= kGrain) return work(0, n, false);
  const int64_t size = out.element_size();
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  const bool streams = static_cast<size_t>(n * size) >= kStreamBytes;
  constexpr int64_t kBlock = 64;
  split((n + kBlock - 1) / kBlock, kGrain / kBlock, [=](int64_t begin, int64_t end) {
    begin *= kBlock, end = std::min(end * kBlock, n);
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

#ifdef KERNELS_WITH_CUDA
// Launches on the current stream of the tensor's device, which is the current one, and checks the
// launch.
template <typename Launch>
void launch_on_stream(const Tensor& x, const Launch& launch) {
  const int status = launch(c10::cuda::getCurrentCUDAStream(x.get_device()).stream());
  C10_CUDA_CHECK(static_cast<cudaError_t>(status));
}
#define KERNELS_ON_CUDA(x, call)                                                   \
  if ((x).is_cuda()) {                                                             \
    return launch_on_stream((x), [&](cudaStream_t stream) { return cuda::call; }); \
  }
#else
#define KERNELS_ON_CUDA(x, call)
#endif

// x may be out, whether dense or not.
void run_relu(DType dtype, const Tensor& x, const Tensor& out) {
  const int64_t n = x.numel();
  if (n == 0) return;
  void* to = out.mutable_data_ptr();  // first: it may move x, where that is a lazy clone
  const void* from = x.const_data_ptr();
  if (out.is_non_overlapping_and_dense() && same_order(x, out.strides())) {
    KERNELS_ON_CUDA(x, relu(dtype, from, to, n, stream))
    split_elements(out, from != to, [=](int64_t begin, int64_t end, bool streams) {
      cpu::relu(dtype, from, to, begin, end, streams);
    });
  } else {
    const Layout layout = layout_of(x.sizes(), out.strides(), x.strides(), x.strides());
    KERNELS_ON_CUDA(x, relu_strided(dtype, from, to, n, layout, stream))
    split_elements(out, from != to, [=, &layout](int64_t begin, int64_t end, bool) {
      cpu::relu_strided(dtype, from, to, begin, end, layout);
    });
  }
}

// x may be out.
void run_relu_with_mask(DType dtype, const Tensor& x, const Tensor& out, const Tensor& mask) {
  const int64_t n = x.numel();
  if (n == 0) return;
  void* to = out.mutable_data_ptr();  // first: it may move x, where that is a lazy clone
  const void* from = x.const_data_ptr();
  uint8_t* bits = mask.mutable_data_ptr<uint8_t>();
  KERNELS_ON_CUDA(x, relu_with_mask(dtype, from, to, bits, n, stream))
  split_elements(out, from != to, [=](int64_t begin, int64_t end, bool streams) {
    cpu::relu_with_mask(dtype, from, to, bits, begin, end, streams);
  });
}

void run_relu_backward(DType dtype, const Tensor& grad_output, const Tensor& mask,
                       at::IntArrayRef stride, const Tensor& grad_input) {
  const int64_t n = grad_output.numel();
  if (n == 0) return;
  const void* from = grad_output.const_data_ptr();
  const uint8_t* bits = mask.const_data_ptr<uint8_t>();
  void* to = grad_input.mutable_data_ptr();
  if (same_order(grad_output, stride) && same_order(grad_input, stride)) {
    KERNELS_ON_CUDA(grad_output, relu_backward(dtype, from, bits, to, n, stream))
    split_elements(grad_input, from != to, [=](int64_t begin, int64_t end, bool streams) {
      cpu::relu_backward(dtype, from, bits, to, begin, end, streams);
    });
  } else {
    const Layout layout =
        layout_of(grad_output.sizes(), grad_input.strides(), grad_output.strides(), stride);
    KERNELS_ON_CUDA(grad_output, relu_backward_strided(dtype, from, bits, to, n, layout, stream))
    split_elements(grad_input, from != to, [=, &layout](int64_t begin, int64_t end, bool) {
      cpu::relu_backward_strided(dtype, from, bits, to, begin, end, layout);
    });
  }
}

// ------------------------------------------------------------------------------------ operators

Tensor relu_kernel(const Tensor& x) {
  const std::optional<DType> dtype = kernel_dtype(x.scalar_type());
  if (!dtype) return at::relu(x);
  const DeviceOf device(x);
  Tensor out = allocate_output(x);
  run_relu(*dtype, x, out);
  return out;
}

DType floating_dtype(const Tensor& tensor, const char* name) {
  const std::optional<DType> dtype = kernel_dtype(tensor.scalar_type());
  if (!dtype || !at::isFloatingType(tensor.scalar_type())) {
    fail("%s must be float32, float64, float16 or bfloat16, got %s", name,
         c10::toString(tensor.scalar_type()));
  }
  return *dtype;
}

std::tuple<Tensor, Tensor> relu_with_mask_kernel(const Tensor& x) {
  const DType dtype = floating_dtype(x, "input");
  const DeviceOf device(x);
  Tensor out = allocate_output(x);
  Tensor mask = allocate_mask(x);
  if (same_order(x, out.strides())) {
    run_relu_with_mask(dtype, x, out, mask);
  } else {
    // The mask is in the output's order, so it is read off the output: relu(x) > 0 where x > 0.
    run_relu(dtype, x, out);
    run_relu_with_mask(dtype, out, out, mask);
  }
  return {out, mask};
}

// An output with the strides of threshold_backward's: the elementwise rule over the forward's
// output, whose strides are `stride`, and the gradient.
Tensor allocate_grad_input(const Tensor& grad_output, at::IntArrayRef stride) {
  const at::IntArrayRef sizes = grad_output.sizes();
  const at::ScalarType type = grad_output.scalar_type();
  if (grad_output.is_contiguous() && is_contiguous(sizes, stride)) {
    return allocate(grad_output, sizes, std::nullopt, type);
  }
  const at::IntArrayRef strides = grad_output.strides();
  if (std::all_of(strides.begin(), strides.end(), [](auto s) { return s == 0; })) {  // of a sum
    return allocate(grad_output, sizes, at::infer_dense_strides(sizes, stride), type);
  }
  const auto meta = [&](at::IntArrayRef strides) {
    return Tensor(at::detail::empty_strided_meta(sizes, strides, type));
  };
  // Not by the dispatcher, whose meta kernel is a decomposition in Python with strides of its own.
  const Tensor grad_input = at::meta::threshold_backward(meta(strides), meta(stride), 0);
  return allocate(grad_output, sizes, grad_input.strides(), type);
}

Tensor relu_backward_kernel(const Tensor& grad_output, const Tensor& mask,
                            const c10::IValue& strides) {
  const std::vector<int64_t> stride = strides.toIntVector();
  const DType dtype = floating_dtype(grad_output, "grad_output");
  const int64_t bytes = (grad_output.numel() + 7) / 8;
  if (mask.scalar_type() != at::kByte || !mask.is_contiguous() || mask.numel() != bytes) {
    fail("mask must be contiguous, uint8 and of %ld elements, got %ld of %s", bytes, mask.numel(),
         c10::toString(mask.scalar_type()));
  }
  if (mask.device() != grad_output.device()) {
    fail("mask must be on the gradient's device, %s, got %s", grad_output.device().str().c_str(),
         mask.device().str().c_str());
  }
  if (static_cast<int64_t>(stride.size()) != grad_output.dim()) {
    fail("stride must have %ld entries, got %zu", grad_output.dim(), stride.size());
  }
  if (!is_non_overlapping_and_dense(grad_output.sizes(), stride)) {
    fail("stride must be that of a dense tensor of the gradient's shape, with no gaps or overlaps");
  }
  const DeviceOf device(grad_output);
  Tensor grad_input = allocate_grad_input(grad_output, stride);
  run_relu_backward(dtype, grad_output, mask, stride, grad_input);
  return grad_input;
}

// A tensor with the signs of the forward's output, out of the mask.
Tensor relu_signs(const Tensor& grad_output, const Tensor& mask, const c10::IValue& stride) {
  const Tensor places = at::arange(8, mask.options());
  const Tensor bits = mask.unsqueeze(1).bitwise_right_shift(places).bitwise_and(1);
  return bits.flatten()
      .to(grad_output.scalar_type())
      .as_strided_symint(grad_output.sym_sizes(), stride.toSymIntVector());
}

// The same out of torch's own ops, for the transforms that take an operator apart and for gradients
// of gradients.
Tensor relu_backward_composite(const Tensor& grad_output, const Tensor& mask,
                               const c10::IValue& stride) {
  return at::threshold_backward(grad_output, relu_signs(grad_output, mask, stride), 0);
}

}  // namespace
}  // namespace kernels

#endif  // KERNELS_BINDING_RELU_H_
