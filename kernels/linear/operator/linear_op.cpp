// The operators of Linear -> ReLU -> divide: their schemas, and which function runs for which kind
// of call. torch_support/operators.h explains the kinds of calls and the functions' suffixes
// _autograd, _without_autograd and _by_torch. Schemas and messages call x `input`, as torch does.
//
//   linear_relu_divide(x, weight, bias, divisor)
//       The operator that users call: out [..., N] = relu(x weight^T + bias) / divisor.
//   linear_relu_divide_with_mask(x, weight, bias, divisor)
//       The forward of a training step, in traces: out, and the mask [..., (N + 7) / 8].
//   linear_relu_divide_gradients(grad_output, mask, x, weight, output_mask, divisor)
//       Its backward, in traces: the gradients of x, weight and bias, if bits 0, 1 and 2 of
//       output_mask are set, and empty tensors for bits that are not. x's gradient is computed
//       from weight, and weight's from x. So weight is passed if and only if bit 0 is set, and x
//       if and only if bit 1 is.
//
// Two more operators are for tests and measurements. No saved program may contain them, so they are
// registered in this build's own namespace alone:
//
//   set_linear_path(name)
//       Makes later products on a GPU take the path of this name. Some gradients still go to torch
//       (should_try_gemm). "auto" leaves the choice to choose_path again.
//   float32_precision()
//       Returns the precision that torch's settings ask for: "high" or "highest".
//
// No C++ or CUDA file of linear/ outside of this folder includes torch. The other files here are
// headers, because torch's own headers are slow to compile: one translation unit compiles them
// once. From the outside in:
//
//   autograd.h            autograd, autocast, torch.jit.trace
//   backward.h            the gradients
//   forward.h             the forward
//   gate.h                whether our kernels compute a call
//   run_gemm.h            one product on a GPU
//   choose_path.h         which kernel computes that product
//   float32_precision.h   the precision that torch's settings ask for
//   operands.h            the operands as matrices, and their layouts

#include <string>

#include "linear/operator/autograd.h"
#include "linear/operator/backward.h"
#include "linear/operator/forward.h"
#include "torch_support/operators.h"

namespace kernels {
namespace {

// ------------------------------------------------------------------------------ argument adapters

[[noreturn]] void fail_for_output_mask(const char* expected, int64_t output_mask) {
  fail("linear_relu_divide_gradients: expected " + std::string(expected) + ", got output_mask " +
       std::to_string(output_mask));
}

// torch's dispatcher passes the arguments one by one, but our functions take a struct of them. So
// pack_inputs<f> is registered for a function f: it makes the struct and calls f.
template <auto function>
auto pack_inputs(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 double divisor) {
  return function({x, weight, bias, divisor});
}

// As pack_inputs, for a function of linear_relu_divide_gradients. First checks that the operands
// fit output_mask.
template <auto function>
ThreeTensors pack_backward_inputs(const Tensor& grad_output, const Tensor& mask,
                                  const std::optional<Tensor>& x,
                                  const std::optional<Tensor>& weight, int64_t output_mask,
                                  double divisor) {
  const bool is_in_range = output_mask >= 0 && output_mask <= (kGradX | kGradWeight | kGradBias);
  if (!is_in_range) fail_for_output_mask("output_mask from 0 to 7", output_mask);
  const NeededGradients needed = needed_gradients_of(output_mask);
  if (weight.has_value() != needed.x || x.has_value() != needed.weight) {
    fail_for_output_mask("weight if and only if bit 0 is set, input if and only if bit 1 is",
                         output_mask);
  }
  return function({grad_output, mask, x, weight, needed, divisor});
}

// ---------------------------------------------------------------- for tests and measurements alone

void set_linear_path(c10::string_view name) {
  if (name == "auto") {
    forced_path = std::nullopt;
    return;
  }
  std::string names = "auto";
  for (const Path path : kAllPaths) {
    if (name == name_of(path)) {
      forced_path = path;
      return;
    }
    names += std::string(", ") + name_of(path);
  }
  fail("expected a path among " + names + ", got " + std::string(name));
}

std::string float32_precision_name() {
  return float32_precision() == Precision::kHigh ? "high" : "highest";
}

// No Operator registers these two, because it would also define a stable name for saved programs.
TORCH_LIBRARY_FRAGMENT(KERNELS_NAMESPACE, library) {
  library.def("set_linear_path(str name) -> ()", set_linear_path);
  library.def("float32_precision() -> str", float32_precision_name);
}

// ----------------------------------------------------------------------------------- registration

[[maybe_unused]] const Operator linear_operator =
    Operator(
        "linear_relu_divide(Tensor input, Tensor weight, Tensor? bias, float divisor) -> Tensor")
        .impl_dense(pack_inputs<linear_without_autograd>)
        .impl(DispatchKey::Autograd, pack_inputs<linear_autograd<Namespace::kOwn>>,
              pack_inputs<linear_autograd<Namespace::kStable>>)
        .impl(DispatchKey::AutocastCPU, pack_inputs<linear_autocast<Namespace::kOwn>>,
              pack_inputs<linear_autocast<Namespace::kStable>>)
        .impl(DispatchKey::AutocastCUDA, pack_inputs<linear_autocast<Namespace::kOwn>>,
              pack_inputs<linear_autocast<Namespace::kStable>>)
        // torch.jit.trace records calls of the stable operator without our help.
        .impl_own(DispatchKey::Tracer, pack_inputs<linear_tracer>)
        .impl(DispatchKey::FuncTorchBatched, pack_inputs<linear_by_torch>)
        .impl(DispatchKey::CompositeImplicitAutogradNestedTensor, pack_inputs<linear_by_torch>)
        // All other backends, among them Meta: tensors of a trace are on Meta, without memory.
        .impl(DispatchKey::CompositeExplicitAutograd, pack_inputs<linear_by_torch>);

[[maybe_unused]] const Operator linear_with_mask_operator =
    Operator(
        "linear_relu_divide_with_mask(Tensor input, Tensor weight, Tensor? bias, float divisor) -> "
        "(Tensor, Tensor)")
        .impl_dense(pack_inputs<linear_with_mask_without_autograd>)
        .impl(DispatchKey::Meta, pack_inputs<linear_with_mask_meta>);

[[maybe_unused]] const Operator linear_gradients_operator =
    Operator(
        "linear_relu_divide_gradients(Tensor grad_output, Tensor mask, Tensor? input, "
        "Tensor? weight, int output_mask, float divisor) -> (Tensor, Tensor, Tensor)")
        .impl_dense(pack_backward_inputs<linear_gradients_without_autograd>)
        .impl(DispatchKey::Meta, pack_backward_inputs<linear_gradients_by_torch>)
        .impl(DispatchKey::Autograd,
              pack_backward_inputs<linear_gradients_autograd<Namespace::kOwn>>,
              pack_backward_inputs<linear_gradients_autograd<Namespace::kStable>>)
        .impl(DispatchKey::FuncTorchBatched, pack_backward_inputs<linear_gradients_by_torch>);

}  // namespace
}  // namespace kernels
