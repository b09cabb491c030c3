// The kernels as torch sees them: allocation, devices, autograd, and one quick way in from Python.
//
//   relu(x)              what users call. Autograd saves one bit an element.
//   relu_with_mask(x)    the forward of that: the output, and a byte for each 8 of its elements in
//                        memory order
//   relu_backward(grad_output, mask, stride)    its backward; stride is that of the output
//
// Where no kernel of ours serves, torch's own op does, and only these places say so:
//   - relu_kernel: a dtype without a kernel, for which torch raises its error
//   - relu_autograd: sparse, nested, quantized and mkldnn tensors, forward-mode AD, torch.func
//   - relu_in_place: all of these, and everything else that is not plainly dense
//   - the registrations at the end: other devices, meta tensors (shapes only), vmap

#include <Python.h>
// Python.h comes first, as it demands.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
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
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

// From torch/csrc/autograd/python_variable.h and torch/csrc/Exceptions.h, which would take 3 of the
// 10 seconds that this file compiles: they bring pybind11 in. A torch without these symbols makes
// the import fail at once.
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace kernels {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// A RuntimeError. The message is put together without streams: c10::str would use them, and they
// crash in an extension that was linked with a libstdc++ of its own, as some toolchains do.
[[noreturn]] void fail(const std::string& message) {
  TORCH_CHECK(false, message);
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

// From this size on an output is memory fresh from the system, and faulting it in by 4 KiB pages
// takes longer than computing it. glibc serves smaller blocks from memory it has already touched.
constexpr size_t kHugePageBytes = 32 << 20;

// Makes the device of a tensor the current one for as long as it lives. The kernels below begin
// with it; what they call relies on it.
class DeviceOf {
 public:
  explicit DeviceOf(const Tensor& x) {
#ifdef KERNELS_WITH_CUDA
    // Seldom needed, and a guard asks the driver more than once.
    if (x.is_cuda() && x.get_device() != c10::cuda::current_device()) guard_.emplace(x.device());
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
  std::optional<c10::cuda::CUDAGuard> guard_;
#endif
};

// Uninitialised memory without a trip through the dispatcher, which small tensors would notice.
Tensor allocate(const Tensor& like, at::IntArrayRef sizes, std::optional<at::IntArrayRef> strides,
                at::ScalarType type) {
  c10::Allocator* allocator = c10::GetAllocator(at::kCPU);
  c10::DispatchKeySet keys(at::DispatchKey::CPU);
#ifdef KERNELS_WITH_CUDA
  if (like.is_cuda()) {
    allocator = c10::cuda::CUDACachingAllocator::get();
    keys = c10::DispatchKeySet(at::DispatchKey::CUDA);
  }
#endif
  Tensor out = strides ? at::detail::empty_strided_generic(sizes, *strides, allocator, keys, type)
                       : at::detail::empty_generic(sizes, allocator, keys, type, std::nullopt);
  if (like.is_cpu() && out.nbytes() >= kHugePageBytes) {
    cpu::advise_huge_pages(out.mutable_data_ptr(), out.nbytes());
  }
  return out;
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

// The walk over up to two strided operands in the memory order of a dense result, with neighbouring
// dimensions joined where every operand allows it.
Layout layout_of(at::IntArrayRef sizes, at::IntArrayRef result, at::IntArrayRef first,
                 at::IntArrayRef second) {
  c10::SmallVector<int64_t, 8> order;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    if (sizes[d] > 1) order.push_back(d);
  }
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return result[a] < result[b]; });
  Layout layout;
  layout.ndim = 1;
  layout.size[0] = 1;
  layout.stride[0][0] = layout.stride[1][0] = 0;
  for (const int64_t d : order) {
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
template <typename Work>
void split(int64_t n, int64_t grain, const Work& work) {
  if (n <= grain) return work(0, n);
  at::parallel_for(0, n, grain, work);
}

#ifdef KERNELS_WITH_CUDA
// Launches on the current stream and checks the launch.
template <typename Launch>
void launch_on_stream(const Launch& launch) {
  const int status = launch(c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_CHECK(static_cast<cudaError_t>(status));
}
#define KERNELS_ON_CUDA(x, call)                                              \
  if ((x).is_cuda()) {                                                        \
    return launch_on_stream([&](cudaStream_t stream) { return cuda::call; }); \
  }
#else
#define KERNELS_ON_CUDA(x, call)
#endif

// x may be out, whether dense or not.
void run_relu(DType dtype, const Tensor& x, const Tensor& out) {
  const int64_t n = x.numel();
  if (n == 0) return;
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  if (out.is_non_overlapping_and_dense() && same_order(x, out.strides())) {
    KERNELS_ON_CUDA(x, relu(dtype, from, to, n, stream))
    split(n, kGrain, [&](int64_t begin, int64_t end) { cpu::relu(dtype, from, to, begin, end); });
  } else {
    const Layout layout = layout_of(x.sizes(), out.strides(), x.strides(), x.strides());
    KERNELS_ON_CUDA(x, relu_strided(dtype, from, to, n, layout, stream))
    split(n, kGrain, [&](int64_t begin, int64_t end) {
      cpu::relu_strided(dtype, from, to, begin, end, layout);
    });
  }
}

// x may be out.
void run_relu_with_mask(DType dtype, const Tensor& x, const Tensor& out, const Tensor& mask) {
  const int64_t n = x.numel();
  if (n == 0) return;
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  uint8_t* bits = mask.mutable_data_ptr<uint8_t>();
  KERNELS_ON_CUDA(x, relu_with_mask(dtype, from, to, bits, n, stream))
  split(mask.numel(), kGrain / 8, [&](int64_t begin, int64_t end) {
    cpu::relu_with_mask(dtype, from, to, bits, begin * 8, std::min(end * 8, n));
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
    split(mask.numel(), kGrain / 8, [&](int64_t begin, int64_t end) {
      cpu::relu_backward(dtype, from, bits, to, begin * 8, std::min(end * 8, n));
    });
  } else {
    const Layout layout =
        layout_of(grad_output.sizes(), grad_input.strides(), grad_output.strides(), stride);
    KERNELS_ON_CUDA(grad_output, relu_backward_strided(dtype, from, bits, to, n, layout, stream))
    split(n, kGrain, [&](int64_t begin, int64_t end) {
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
    fail(std::string(name) + " must be float32, float64, float16 or bfloat16, got " +
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
  const auto strides = grad_output.strides();
  const bool is_constant =
      std::all_of(strides.begin(), strides.end(), [](auto s) { return s == 0; });
  if ((is_constant || grad_output.is_contiguous()) && is_contiguous(sizes, stride)) {
    return allocate(grad_output, sizes, std::nullopt, type);
  }
  const auto meta = [&](at::IntArrayRef strides) {
    return Tensor(at::detail::empty_strided_meta(sizes, strides, type));
  };
  const at::TensorIterator rule = at::TensorIteratorConfig()
                                      .add_owned_output(Tensor())
                                      .add_owned_const_input(meta(stride))
                                      .add_owned_const_input(meta(strides))
                                      .build();
  return allocate(grad_output, sizes, rule.output().strides(), type);
}

Tensor relu_backward_kernel(const Tensor& grad_output, const Tensor& mask,
                            const c10::IValue& strides) {
  const std::vector<int64_t> stride = strides.toIntVector();
  const DType dtype = floating_dtype(grad_output, "grad_output");
  const int64_t bytes = (grad_output.numel() + 7) / 8;
  if (mask.scalar_type() != at::kByte || !mask.is_contiguous() || mask.numel() != bytes) {
    fail("mask must be contiguous, uint8 and of " + std::to_string(bytes) + " elements, got " +
         std::to_string(mask.numel()) + " of " + c10::toString(mask.scalar_type()));
  }
  if (mask.device() != grad_output.device()) {
    fail("mask must be on the gradient's device, " + grad_output.device().str() + ", got " +
         mask.device().str());
  }
  if (static_cast<int64_t>(stride.size()) != grad_output.dim()) {
    fail("stride must have " + std::to_string(grad_output.dim()) + " entries, got " +
         std::to_string(stride.size()));
  }
  const DeviceOf device(grad_output);
  Tensor grad_input = allocate_grad_input(grad_output, stride);
  run_relu_backward(dtype, grad_output, mask, stride, grad_input);
  return grad_input;
}

// The same out of torch's own ops, for the transforms that take an operator apart.
Tensor relu_backward_composite(const Tensor& grad_output, const Tensor& mask,
                               const c10::IValue& stride) {
  const Tensor places = at::arange(8, mask.options());
  const Tensor bits = mask.unsqueeze(1).bitwise_right_shift(places).bitwise_and(1).to(at::kBool);
  const Tensor keep = bits.flatten().as_strided(grad_output.sizes(), stride.toIntVector());
  return at::where(keep, grad_output, at::zeros_like(grad_output));
}

// ---------------------------------------------------------------------------------- dispatcher

#define KERNELS_STRING_(x) #x
#define KERNELS_STRING(x) KERNELS_STRING_(x)
#define KERNELS_NAME KERNELS_STRING(TORCH_EXTENSION_NAME)

using torch::jit::Stack;

// Where the dispatcher would do nothing below autograd but call our kernel: a dense tensor on the
// CPU or a GPU, no transform, no mode. Autocast and ADInplaceOrView leave relu alone.
bool is_dense(const Tensor& x) {
  using at::DispatchKey;
  constexpr c10::DispatchKeySet kDense({DispatchKey::CPU, DispatchKey::CUDA,
                                        DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                        DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect,
                                        DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return kDense.isSupersetOf((x.key_set() | local.included_) - local.excluded_);
}

bool wants_gradient(const Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); }

bool has_tangent(const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// Whether a transform of torch.func is at work.
bool in_functorch() {
  return c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// The operator from the top, autograd included.
Tensor call_relu_operator(const Tensor& x) {
  Stack stack{x};
  static const auto handle = find_operator(KERNELS_NAME "::relu");
  handle.callBoxed(stack);
  return stack[0].toTensor();
}

// The operators below autograd. A dense tensor's go to the kernel straight away.
Tensor call_relu(const Tensor& x) {
  if (is_dense(x)) return relu_kernel(x);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_relu_operator(x);
}

std::tuple<Tensor, Tensor> call_relu_with_mask(const Tensor& x) {
  if (is_dense(x)) return relu_with_mask_kernel(x);
  const at::AutoDispatchBelowADInplaceOrView below;
  Stack stack{x};
  static const auto handle = find_operator(KERNELS_NAME "::relu_with_mask");
  handle.callBoxed(stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

Tensor call_relu_backward(const Tensor& grad_output, const Tensor& mask,
                          const c10::IValue& stride) {
  if (is_dense(grad_output) && is_dense(mask) && !wants_gradient(grad_output) &&
      !has_tangent(grad_output)) {
    return relu_backward_kernel(grad_output, mask, stride);
  }
  Stack stack{grad_output, mask, stride};
  static const auto handle = find_operator(KERNELS_NAME "::relu_backward");
  handle.callBoxed(stack);
  return stack[0].toTensor();
}

// ------------------------------------------------------------------------------------ autograd

// Tensors that stand for a dense one while torch traces; other subclasses with dispatch of their
// own may store something else, a shard say, whose memory order is not that of the whole.
bool is_wrapper(const Tensor& x) {
  if (!x.key_set().has(at::DispatchKey::Python)) return false;
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* object = THPVariable_Wrap(x);
  const std::string_view name = Py_TYPE(object)->tp_name;
  const bool is_traced = name == "FakeTensor" || name == "FunctionalTensor";
  Py_DECREF(object);
  PyGILState_Release(gil);
  return !is_traced;
}

using torch::autograd::Node;
// A std::shared_ptr up to torch 2.12, a c10::intrusive_ptr from 2.13 on.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Pointer, typename T>
Pointer own_node(std::unique_ptr<T> node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(node.release(), [](auto* node) { deleteNode(node); });
  } else {
    return Pointer::unsafe_steal_from_new(node.release());
  }
}

// What autograd records of relu and of relu_backward: both have the same derivative. Written out
// as a Node, for torch::autograd::Function would take 3 s more to compile and more time a call.
struct SelectBackward : Node {
  torch::autograd::SavedVariable saved;  // the mask, or the output if there is no stride
  std::optional<c10::IValue> stride;

  std::string name() const override { return "SelectBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {Tensor()};
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor tensor = saved.unpack();
    return {stride ? call_relu_backward(grads[0], tensor, *stride)
                   : at::threshold_backward(grads[0], tensor, 0)};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.reset_data();
  }
};

// In two steps, for the edges of an input that is overwritten must be taken before it is.
std::unique_ptr<SelectBackward> select_from(const Tensor& input) {
  auto node = std::make_unique<SelectBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  return node;
}

torch::autograd::Edge select_to(const Tensor& output, const Tensor& saved,
                                std::optional<c10::IValue> stride,
                                std::unique_ptr<SelectBackward> node) {
  node->saved = torch::autograd::SavedVariable(saved, /*is_output=*/false);
  node->stride = std::move(stride);
  const uint32_t output_number = node->add_input_metadata(output);
  return {own_node<NodePointer>(std::move(node)), output_number};
}

void record(const Tensor& input, const Tensor& output, const Tensor& saved,
            std::optional<c10::IValue> stride) {
  torch::autograd::impl::set_gradient_edge(
      output, select_to(output, saved, std::move(stride), select_from(input)));
}

Tensor relu_autograd(const Tensor& x) {
  if (x.layout() != at::kStrided || x.is_quantized() || x.is_nested() || has_tangent(x) ||
      in_functorch()) {
    return at::relu(x);
  }
  if (!wants_gradient(x)) return call_relu(x);
  if (is_wrapper(x)) {  // keeps the output, as torch does
    const Tensor out = call_relu(x);
    record(x, out, out.detach(), std::nullopt);
    return out;
  }
  const auto [out, mask] = call_relu_with_mask(x);
  record(x, out, mask, c10::IValue(out.sym_strides()));
  return out;
}

Tensor relu_backward_autograd(const Tensor& grad_output, const Tensor& mask,
                              const c10::IValue& stride) {
  if (has_tangent(grad_output) || in_functorch()) {
    return relu_backward_composite(grad_output, mask, stride);
  }
  Tensor grad_input;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    grad_input = call_relu_backward(grad_output, mask, stride);
  }
  if (wants_gradient(grad_output)) record(grad_output, grad_input, mask, stride);
  return grad_input;
}

// relu in place, with torch's rules for leaves, views, versions and overlapping memory. No
// operator: graphs hold relu and copy_.
void relu_in_place(const Tensor& x) {
  const std::optional<DType> dtype = kernel_dtype(x.scalar_type());
  if (!dtype || !is_dense(x) || has_tangent(x)) {
    Tensor same = x;
    at::relu_(same);
    return;
  }
  const DeviceOf device(x);
  const bool records = wants_gradient(x);
  torch::autograd::check_inplace(x, records);
  at::assert_no_internal_overlap(x);
  auto node = records ? select_from(x) : nullptr;
  torch::autograd::impl::bump_version(x);
  if (!records) return run_relu(*dtype, x, x);
  if (x.is_non_overlapping_and_dense()) {
    const Tensor mask = allocate_mask(x);
    run_relu_with_mask(*dtype, x, x, mask);
    torch::autograd::impl::rebase_history(x, select_to(x, mask, x.sym_strides(), std::move(node)));
  } else {  // a mask has no gaps, so it is taken from a dense result
    const auto [out, mask] = relu_with_mask_kernel(x);
    run_relu(*dtype, x, x);
    torch::autograd::impl::rebase_history(x,
                                          select_to(x, mask, out.sym_strides(), std::move(node)));
  }
}

// -------------------------------------------------------------------------------- registration

std::tuple<Tensor, Tensor> relu_with_mask_meta(const Tensor& x) {
  const c10::SymInt bytes = (x.sym_numel() + 7) / 8;
  return {at::relu(x), at::empty_symint({bytes}, x.options().dtype(at::kByte))};
}

Tensor relu_backward_meta(const Tensor& grad_output, const Tensor&, const c10::IValue& stride) {
  const Tensor out = at::empty_strided_symint(grad_output.sym_sizes(), stride.toSymIntVector(),
                                              grad_output.options());
  return at::threshold_backward(grad_output, out, 0);
}

// The kernels as the dispatcher takes them, on a stack. One functor for all: torch's own wrappers
// would be made anew for every function, which takes seconds to compile.
struct Boxed : c10::OperatorKernel {
  explicit Boxed(void (*function)(Stack&)) : function(function) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    function(*stack);
  }
  void (*function)(Stack&);
};

torch::CppFunction boxed(void (*function)(Stack&)) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(function));
}

template <Tensor (*kernel)(const Tensor&)>
void box_relu(Stack& stack) {
  stack.back() = kernel(stack.back().toTensor());
}

template <std::tuple<Tensor, Tensor> (*kernel)(const Tensor&)>
void box_relu_with_mask(Stack& stack) {
  auto [out, mask] = kernel(stack.back().toTensor());
  stack.back() = std::move(out);
  stack.emplace_back(std::move(mask));
}

template <Tensor (*kernel)(const Tensor&, const Tensor&, const c10::IValue&)>
void box_relu_backward(Stack& stack) {
  const size_t first = stack.size() - 3;
  stack[first] = kernel(stack[first].toTensor(), stack[first + 1].toTensor(), stack[first + 2]);
  stack.resize(first + 1);
}

#define KERNELS_LIBRARY(name, m) TORCH_LIBRARY(name, m)
#define KERNELS_LIBRARY_IMPL(name, key, m) TORCH_LIBRARY_IMPL(name, key, m)

KERNELS_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("relu(Tensor input) -> Tensor");
  m.def("relu_with_mask(Tensor input) -> (Tensor, Tensor)");
  m.def("relu_backward(Tensor grad_output, Tensor mask, SymInt[] stride) -> Tensor");
}

void register_kernels(torch::Library& m) {
  m.impl("relu", boxed(box_relu<relu_kernel>));
  m.impl("relu_with_mask", boxed(box_relu_with_mask<relu_with_mask_kernel>));
  m.impl("relu_backward", boxed(box_relu_backward<relu_backward_kernel>));
}
KERNELS_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { register_kernels(m); }
KERNELS_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) { register_kernels(m); }

KERNELS_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Meta, m) {
  m.impl("relu", boxed(box_relu<at::relu>));
  m.impl("relu_with_mask", boxed(box_relu_with_mask<relu_with_mask_meta>));
  m.impl("relu_backward", boxed(box_relu_backward<relu_backward_meta>));
}

KERNELS_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Autograd, m) {
  m.impl("relu", boxed(box_relu<relu_autograd>));
  m.impl("relu_backward", boxed(box_relu_backward<relu_backward_autograd>));
}

KERNELS_LIBRARY_IMPL(TORCH_EXTENSION_NAME, FuncTorchBatched, m) {
  m.impl("relu", boxed(box_relu<at::relu>));
  m.impl("relu_backward", boxed(box_relu_backward<relu_backward_composite>));
}

KERNELS_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
  m.impl("relu", boxed(box_relu<at::relu>));
}

// -------------------------------------------------------------------------------------- Python

// What the entries call for a tensor with a Python side of its own; set once, at import.
PyObject* fallback = nullptr;
PyObject* fallback_in_place = nullptr;

// Where a torch.Tensor object holds its at::Tensor.
size_t tensor_offset = 0;

const Tensor& unwrap(PyObject* tensor) {
  return *reinterpret_cast<const Tensor*>(reinterpret_cast<char*>(tensor) + tensor_offset);
}

// Finds tensor_offset, which differs between versions of torch, by looking for a known tensor in
// its Python object.
bool find_tensor_offset() {
  const Tensor tensor = at::detail::empty_cpu({0}, at::kFloat);
  const void* const impl = tensor.unsafeGetTensorImpl();
  PyObject* object = THPVariable_Wrap(tensor);
  const size_t size = Py_TYPE(object)->tp_basicsize;
  for (size_t at = sizeof(PyObject); at + sizeof(impl) <= size; at += sizeof(impl)) {
    if (memcmp(reinterpret_cast<char*>(object) + at, &impl, sizeof(impl)) == 0) {
      tensor_offset = at;
      break;
    }
  }
  Py_DECREF(object);
  return tensor_offset != 0;
}

// Whether an argument is a torch.Tensor or a Parameter to be served here. If not, `result` is what
// the entry returns: for subclasses, proxies and modes, which expect to see an operator through
// Python, what `otherwise` makes of it, and torch's error for no tensor at all.
bool is_served(PyObject* argument, PyObject* otherwise, PyObject** result) {
  PyTypeObject* const type = Py_TYPE(argument);
  const bool is_tensor = type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
                         type == reinterpret_cast<PyTypeObject*>(ParameterClass);
  if (is_tensor && !at::impl::torch_function_mode_enabled()) return true;
  if (is_tensor || PyObject_HasAttrString(argument, "__torch_function__")) {
    *result = PyObject_CallOneArg(otherwise, argument);
  } else {
    PyErr_Format(PyExc_TypeError, "relu(): argument 'input' (position 1) must be Tensor, not %s",
                 type->tp_name);
    *result = nullptr;
  }
  return false;
}

// Runs work(x) without the GIL, unless it is so short that another thread would not get it.
template <typename Work>
void without_gil(const Tensor& x, const Work& work) {
  if (x.is_cpu() && x.numel() < kGrain) return work();
  PyThreadState* const thread = PyEval_SaveThread();
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(thread);
  if (error) std::rethrow_exception(error);
}

// relu(x): what the dispatcher would come to for a dense tensor, and the operator for all others.
PyObject* relu_entry(PyObject*, PyObject* argument) {
  PyObject* result;
  if (!is_served(argument, fallback, &result)) return result;
  try {
    const Tensor& x = unwrap(argument);
    Tensor out;
    without_gil(x, [&] { out = is_dense(x) ? relu_autograd(x) : call_relu_operator(x); });
    return THPVariable_Wrap(out);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// relu_(x): in place; returns x.
PyObject* relu_in_place_entry(PyObject*, PyObject* argument) {
  PyObject* result;
  if (!is_served(argument, fallback_in_place, &result)) return result;
  try {
    const Tensor& x = unwrap(argument);
    without_gil(x, [&] { relu_in_place(x); });
    Py_INCREF(argument);
    return argument;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* set_fallbacks(PyObject*, PyObject* arguments) {
  PyObject *callable, *in_place;
  if (!PyArg_ParseTuple(arguments, "OO", &callable, &in_place)) return nullptr;
  Py_INCREF(callable);
  Py_XSETREF(fallback, callable);
  Py_INCREF(in_place);
  Py_XSETREF(fallback_in_place, in_place);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"relu", relu_entry, METH_O, "relu(x): x where x > 0 or x is NaN, else 0. Fresh memory."},
    {"relu_", relu_in_place_entry, METH_O, "relu_(x): relu in place. Returns x."},
    {"set_fallbacks", set_fallbacks, METH_VARARGS,
     "set_fallbacks(relu, relu_): what serves subclasses, proxies and modes."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, KERNELS_NAME, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyObject* create_module() {
  if (!find_tensor_offset()) {
    PyErr_SetString(PyExc_ImportError, "torch.Tensor objects of this torch hold no at::Tensor");
    return nullptr;
  }
  return PyModule_Create(&module);
}

}  // namespace
}  // namespace kernels

#define KERNELS_INIT_(name) PyInit_##name
#define KERNELS_INIT(name) KERNELS_INIT_(name)
PyMODINIT_FUNC KERNELS_INIT(TORCH_EXTENSION_NAME)() { return kernels::create_module(); }
