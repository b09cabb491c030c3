// The parts of Linear -> ReLU -> divide that the dispatcher runs before the kernels: autograd,
// autocast, and the recording of traces. In a trace they call the operators by name, so that
// torch.compile and torch.export see one operator for the forward and one for all gradients.
//
// An operator calls other operators in the namespace in which it was called itself
// (torch_support/operators.h). This namespace is a template argument of most functions.

#pragma once

#include <ATen/ops/_unsafe_view.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <functional>
#include <memory>
#include <mutex>

#include "linear/operator/backward.h"
#include "linear/operator/forward.h"
#include "linear/operator/gate.h"
#include "torch_support/operators.h"

// Declared here because ATen/autocast_mode.h includes all of ATen, which takes 2 s to compile.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace kernels {

// ----------------------------------------------------------------------------- calls of operators

using LinearFunction = Tensor(const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, double divisor);
using LinearWithMaskFunction = TwoTensors(const Tensor& x, const Tensor& weight,
                                          const std::optional<Tensor>& bias, double divisor);
using GradientsFunction = ThreeTensors(const Tensor& grad_output, const Tensor& mask,
                                       const std::optional<Tensor>& x,
                                       const std::optional<Tensor>& weight, int64_t output_mask,
                                       double divisor);

// The bits of output_mask, which names the gradients that linear_relu_divide_gradients computes.
constexpr int64_t kGradX = 1;
constexpr int64_t kGradWeight = 2;
constexpr int64_t kGradBias = 4;

inline int64_t output_mask_of(const NeededGradients& needed) {
  int64_t output_mask = 0;
  if (needed.x) output_mask |= kGradX;
  if (needed.weight) output_mask |= kGradWeight;
  if (needed.bias) output_mask |= kGradBias;
  return output_mask;
}

inline NeededGradients needed_gradients_of(int64_t output_mask) {
  NeededGradients needed{};
  needed.x = (output_mask & kGradX) != 0;
  needed.weight = (output_mask & kGradWeight) != 0;
  needed.bias = (output_mask & kGradBias) != 0;
  return needed;
}

template <Namespace name_space>
Tensor call_linear(const LinearInputs& inputs) {
  return call_operator<LinearFunction>(name_space, "linear_relu_divide", inputs.x, inputs.weight,
                                       inputs.bias, inputs.divisor);
}

template <Namespace name_space>
TwoTensors call_linear_with_mask(const LinearInputs& inputs) {
  return call_operator<LinearWithMaskFunction>(name_space, "linear_relu_divide_with_mask", inputs.x,
                                               inputs.weight, inputs.bias, inputs.divisor);
}

template <Namespace name_space>
ThreeTensors call_gradients(const BackwardInputs& inputs) {
  return call_operator<GradientsFunction>(name_space, "linear_relu_divide_gradients",
                                          inputs.grad_output, inputs.mask, inputs.x, inputs.weight,
                                          output_mask_of(inputs.needed), inputs.divisor);
}

// --------------------------------------------------------------------------------------- autograd

// Autograd's record of a forward: the mask, x if weight's gradient is needed, and weight if x's is.
template <Namespace name_space>
struct LinearReluDivideBackward : Node {
  SavedVariable x, weight, mask;
  double divisor;
  Transposes transposes;

  std::string name() const override { return "LinearReluDivideBackward"; }

  // Undefined tensors stand for gradients that are not needed.
  variable_list apply(variable_list&& grads) override {
    const Tensor& grad_output = grads[0];
    if (!grad_output.defined()) return variable_list(3);
    const std::lock_guard<std::mutex> lock(mutex_);
    NeededGradients needed{};
    needed.x = task_should_compute_output(0);
    needed.weight = task_should_compute_output(1);
    needed.bias = task_should_compute_output(2);
    const Tensor saved_mask = unpack_saved_mask(mask);
    std::optional<Tensor> saved_x;
    std::optional<Tensor> saved_weight;
    if (needed.weight) saved_x = x.unpack();
    if (needed.x) saved_weight = weight.unpack();
    BackwardInputs inputs{grad_output, saved_mask, saved_x, saved_weight, needed, divisor};
    inputs.transposes = transposes;
    const Gradients gradients = compute(inputs);
    // The operator returns empty tensors for gradients that are not needed.
    return {needed.x ? gradients.x : Tensor(), needed.weight ? gradients.weight : Tensor(),
            needed.bias ? gradients.bias : Tensor()};
  }

  // Computes the gradients. The first line that fits decides how:
  //
  //   they may be differentiated again       by torch's ops, which autograd records
  //   plain tensors without a tangent        by our kernels
  //   vmap, after a forward outside vmap     by torch's ops, for the whole batch at once
  //   traces, subclasses and tangents        by the operator linear_relu_divide_gradients
  Gradients compute(const BackwardInputs& inputs) {
    if (at::GradMode::is_enabled()) return differentiable_gradients(inputs);
    const c10::DispatchKeySet keys = keys_of(inputs);
    if (is_plain(keys) && !has_tangent(inputs.grad_output)) return compute_gradients(inputs);
    if (is_batched(keys)) return gradients_by_torch(inputs, unpack_mask(inputs));
    const auto [grad_x, grad_weight, grad_bias] = call_gradients<name_space>(inputs);
    return {grad_x, grad_weight, grad_bias};
  }

  // In the reference, threshold_backward has an edge to the ReLU whose output it takes, so that a
  // path leads from grad_x to bias, and the derivative of grad_x by bias is zeros, not None. Here
  // the unpacked mask takes the place of that output, and gets an edge to this node.
  Gradients differentiable_gradients(const BackwardInputs& inputs) {
    const Tensor unpacked_mask = unpack_mask(inputs).detach();
    torch::autograd::impl::set_gradient_edge(unpacked_mask, {getptr(), 0});
    return gradients_by_torch(inputs, unpacked_mask);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
    mask.reset_data();
  }
};

// Returns which gradients eager would compute as (B^T A^T)^T. Tensors of a trace have no addresses,
// which is_column_major reads, so they must not be passed.
//
// torch decides by the strides of a product's operands, in mm_mat1_backward and mm_mat2_backward:
// grad_x is transposed if x is column-major, and grad_weight if weight is not contiguous. (A
// column-major x with padding between its columns counts here, but not in torch.)
inline Transposes transposes_of_eager(const LinearInputs& inputs) {
  Transposes transposes;
  transposes.grad_x = inputs.x.dim() == 2 && is_column_major(inputs.x, /*alignment=*/1);
  transposes.grad_weight = !inputs.weight.is_contiguous();
  return transposes;
}

template <Namespace name_space>
void record_backward(const LinearInputs& inputs, const Tensor& out, const Tensor& mask,
                     Transposes transposes) {
  auto node = make_node<LinearReluDivideBackward<name_space>>(inputs.x, inputs.weight, inputs.bias);
  if (needs_gradient(inputs.weight)) node->x = SavedVariable(inputs.x, /*is_output=*/false);
  if (needs_gradient(inputs.x)) node->weight = SavedVariable(inputs.weight, /*is_output=*/false);
  node->mask = SavedVariable(mask, /*is_output=*/false);
  node->divisor = inputs.divisor;
  node->transposes = transposes;
  torch::autograd::set_history(out, std::move(node));
}

// linear_relu_divide inside a trace of torch.compile or make_fx, which records the operators that
// this function calls. No Transposes are set, because transposes_of_eager takes no tensors of a
// trace.
template <Namespace name_space>
Tensor linear_autograd_in_trace(const LinearInputs& inputs) {
  if (!any_operand(inputs, needs_gradient)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_linear<name_space>(inputs);
  }
  TwoTensors out_and_mask;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    out_and_mask = call_linear_with_mask<name_space>(inputs);
  }
  const auto& [out, mask] = out_and_mask;
  record_backward<name_space>(inputs, out, mask, Transposes{});
  return out;
}

// linear_relu_divide for an ordinary call.
template <Namespace name_space>
Tensor linear_autograd(const LinearInputs& inputs) {
  const GateAnswer answer = ask_gate(inputs);
  if (answer == GateAnswer::kReference) return linear_by_torch(inputs);
  if (answer == GateAnswer::kTracing) return linear_autograd_in_trace<name_space>(inputs);

  if (inputs.x.dim() > 2 && !inputs.x.is_contiguous()) {
    // The backward saves the matrix that as_matrix returns, as eager's does. If that is a copy, x
    // can be changed in place before the backward without an error, as in eager. as_matrix and
    // _unsafe_view record their own backwards.
    const Tensor matrix = as_matrix(inputs.x);
    const Tensor out =
        linear_autograd<name_space>({matrix, inputs.weight, inputs.bias, inputs.divisor});
    return at::_unsafe_view(out, with_last(inputs.x.sizes(), inputs.weight.size(0)));
  }

  if (!any_operand(inputs, needs_gradient)) return compute_linear(inputs, /*mask=*/Tensor());
  const auto [out, mask] = linear_with_mask_without_autograd(inputs);
  record_backward<name_space>(inputs, out, mask, transposes_of_eager(inputs));
  return out;
}

// linear_relu_divide_gradients for an ordinary call: by torch's ops if its results are
// differentiated, otherwise by the kernels.
template <Namespace name_space>
ThreeTensors linear_gradients_autograd(const BackwardInputs& inputs) {
  const auto is_differentiated = [](const Tensor& t) {
    return needs_gradient(t) || has_tangent(t);
  };
  const bool results_are_differentiated = is_differentiated(inputs.grad_output) ||
                                          (inputs.x && is_differentiated(*inputs.x)) ||
                                          (inputs.weight && is_differentiated(*inputs.weight));
  if (results_are_differentiated) return linear_gradients_by_torch(inputs);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_gradients<name_space>(inputs);
}

// --------------------------------------------------------------------------- autocast and tracing

// Autocast casts all operands but those of float64 to its dtype, as it does for nn.Linear.
template <Namespace name_space>
Tensor linear_autocast(const LinearInputs& inputs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::DeviceType device = inputs.x.device().type();
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, device); };
  const Tensor x = cast(inputs.x);
  const Tensor weight = cast(inputs.weight);
  std::optional<Tensor> bias;
  if (inputs.bias) bias = cast(*inputs.bias);
  return call_linear<name_space>({x, weight, bias, inputs.divisor});
}

// linear_relu_divide of the own namespace under torch.jit.trace. The trace gets the stable name,
// because a saved program has to run with other builds too.
inline Tensor linear_tracer(const LinearInputs& inputs) {
  namespace tracer = torch::jit::tracer;
  const std::shared_ptr<tracer::TracingState> state = tracer::getTracingState();
  const std::string name = namespace_name(Namespace::kStable) + "::linear_relu_divide";
  torch::jit::Node* const node =
      state->createNode(c10::Symbol::fromQualString(name), /*num_outputs=*/0);
  tracer::recordSourceLocation(node);
  tracer::addInputs(node, "input", inputs.x);
  tracer::addInputs(node, "weight", inputs.weight);
  tracer::addInputs(node, "bias", inputs.bias);
  tracer::addInputs(node, "divisor", inputs.divisor);
  state->insertNode(node);

  const std::function<void()> resume_tracing = tracer::pauseTracing();
  const Tensor out = call_linear<Namespace::kOwn>(inputs);
  resume_tracing();
  tracer::addOutput(node, out);
  return out;
}

}  // namespace kernels
