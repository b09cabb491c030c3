// The operators through the dispatcher, and what autograd records of them. Part of module.cpp.

#ifndef KERNELS_BINDING_RELU_AUTOGRAD_H_
#define KERNELS_BINDING_RELU_AUTOGRAD_H_

#include "binding/relu.h"

namespace kernels {
namespace {

// ---------------------------------------------------------------------------------- dispatcher

// The operators' name in graphs and saved programs, whichever build runs them.
#define KERNELS_NAMESPACE "relu_divide_kernels"

using torch::jit::Stack;

// The keys of a dense tensor on the CPU or a GPU, with no transform and no mode at work. Whoever
// has only these needs no dispatcher below autograd.
constexpr c10::DispatchKeySet kDense({at::DispatchKey::CPU, at::DispatchKey::CUDA,
                                      at::DispatchKey::AutogradCPU, at::DispatchKey::AutogradCUDA,
                                      at::DispatchKey::ADInplaceOrView,
                                      at::DispatchKey::BackendSelect});
constexpr c10::DispatchKeySet kAutocast({at::DispatchKey::AutocastCPU,
                                         at::DispatchKey::AutocastCUDA});

bool has_only(c10::DispatchKeySet keys, c10::DispatchKeySet allowed) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return allowed.isSupersetOf((keys | local.included_) - local.excluded_);
}

// For the operators that autocast leaves alone.
bool is_dense(const Tensor& x) { return has_only(x.key_set(), kDense | kAutocast); }

bool wants_gradient(const Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); }

bool has_tangent(const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// Whether a transform of torch.func is at work.
bool in_functorch() {
  return c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// An operator from the top, autograd included. `arguments` are on a stack, as what it returns is.
Stack call_operator(const char* name, Stack arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(arguments);
  return arguments;
}

Tensor call_relu_operator(const Tensor& x) {
  return call_operator(KERNELS_NAMESPACE "::relu", {x})[0].toTensor();
}

// Whether a graph of plain tensors is being recorded, by torch.jit.trace or make_fx.
bool is_recorded() {
  using c10::impl::TorchDispatchModeKey;
  return c10::impl::tls_is_dispatch_key_included(at::DispatchKey::Tracer) ||
         c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
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
  const Stack stack = call_operator(KERNELS_NAMESPACE "::relu_with_mask", {x});
  return {stack[0].toTensor(), stack[1].toTensor()};
}

Tensor call_relu_backward(const Tensor& grad_output, const Tensor& mask,
                          const c10::IValue& stride) {
  if (is_dense(grad_output) && is_dense(mask) && !wants_gradient(grad_output) &&
      !has_tangent(grad_output)) {
    return relu_backward_kernel(grad_output, mask, stride);
  }
  return call_operator(KERNELS_NAMESPACE "::relu_backward", {grad_output, mask, stride})[0]
      .toTensor();
}

// ------------------------------------------------------------------------------------ autograd

// The name of the Python type of a tensor with dispatch of its own; empty for all others.
std::string_view python_type(const Tensor& x) {
  if (!x.key_set().has(at::DispatchKey::Python)) return {};
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* object = THPVariable_Wrap(x);
  const std::string_view name = Py_TYPE(object)->tp_name;
  Py_DECREF(object);
  PyGILState_Release(gil);
  return name;
}

// Tensors that stand for a dense one while torch traces; other subclasses with dispatch of their
// own may store something else, a shard say, whose memory order is not that of the whole.
bool is_wrapper(const Tensor& x) {
  const std::string_view name = python_type(x);
  return !name.empty() && name != "FakeTensor" && name != "FunctionalTensor";
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

using torch::autograd::Edge;

// Makes a node the one that the gradient of `output` goes to.
template <typename T>
Edge edge_to(const Tensor& output, std::unique_ptr<T> node) {
  const uint32_t output_number = node->add_input_metadata(output);
  return {own_node<NodePointer>(std::move(node)), output_number};
}

// Autograd records this of relu. Written out as a Node, for torch::autograd::Function would take 3
// s more to compile and more time a call.
struct SelectBackward : Node {
  torch::autograd::SavedVariable saved;  // the mask, or the output if there is no stride
  std::optional<c10::IValue> stride;

  std::string name() const override { return "SelectBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {Tensor()};
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor tensor = saved.unpack();
    const bool again = at::GradMode::is_enabled();  // this gradient is to be differentiated
    if (stride && !again) return {call_relu_backward(grads[0], tensor, *stride)};
    Tensor out = stride ? relu_signs(grads[0], tensor, *stride) : tensor;
    if (again) {  // by the output too, as torch's is: that gives zeros
      out = out.detach();
      torch::autograd::impl::set_gradient_edge(out, {getptr(), 0});
    }
    return {at::threshold_backward(grads[0], out, 0)};
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

Edge select_to(const Tensor& output, const Tensor& saved, std::optional<c10::IValue> stride,
               std::unique_ptr<SelectBackward> node) {
  node->saved = torch::autograd::SavedVariable(saved, /*is_output=*/false);
  node->stride = std::move(stride);
  return edge_to(output, std::move(node));
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
  if (wants_gradient(grad_output) || has_tangent(grad_output) || in_functorch()) {
    return relu_backward_composite(grad_output, mask, stride);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_relu_backward(grad_output, mask, stride);
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

}  // namespace
}  // namespace kernels

#endif  // KERNELS_BINDING_RELU_AUTOGRAD_H_
