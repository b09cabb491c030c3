// Linear -> ReLU -> divide for torch and Python. binding/dispatch.h says what the names of the
// steps mean.
//
//   linear_relu_divide(x, weight, bias, divisor)              what users call
//   linear_relu_divide_with_mask(x, weight, bias, divisor)    the forward of that, with a mask
//                        [..., bytes] of a bit an element
//   linear_relu_divide_gradients(grad_output, mask, x, weight, output_mask, divisor)    its
//                        backward: the gradients of x, weight and bias for bits 0, 1 and 2 of
//                        output_mask, and empty ones for bits that are off. Without bit 0, weight
//                        is None; without bit 1, x is. It is an int because DTensor, which looks
//                        results' shapes up by the arguments, passes over lists of bools
//   linear_relu_divide_backward(grad_output, mask, divisor, wants_bias)    its first step: the
//                        gradients of the product and of the bias
//
// Where no kernel of ours serves, torch's own ops do, and only these places say so:
//   - is_left_to_torch and linear_autograd: as for ReLU
//   - is_regular: arguments that do not fit, empty results, and on a GPU some divisors
//   - choose_path: products on a GPU. On a CPU the product is always torch's.
//   - multiply: the products of the gradients
//   - LinearReluDivideBackward: gradients that are differentiated again
//   - modules.py and model_new.py: a `linear` that is more than an nn.Linear, and TorchScript
//   - subclasses.py: tensor subclasses, and products of DTensors that are sums over processes
//   - define_linear_operators: other devices, meta tensors (shapes only), vmap
//
// On the CPU the epilogue calls ReLU's loops, so a build of this problem alone
// needs "relu/relu_cpu.cpp"

#include "linear/binding/forward.h"
// It includes Python.h, which comes first.

#include <ATen/ops/ones_like.h>

namespace kernels {
namespace {

// -------------------------------------------------------------------------------------- calls

// The dispatcher's functions: the arguments as the structs of the steps.
template <auto step>
auto of_inputs(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
               double divisor) {
  return step({x, weight, bias, divisor});
}

template <auto step>
TwoTensors of_epilogue(const Tensor& grad_output, const Tensor& mask, double divisor,
                       bool wants_bias) {
  return step({grad_output, mask, divisor, wants_bias, std::nullopt, std::nullopt});
}

template <auto step>
ThreeTensors of_gradients(const Tensor& grad_output, const Tensor& mask,
                          const std::optional<Tensor>& x, const std::optional<Tensor>& weight,
                          int64_t output_mask, double divisor) {
  if (output_mask < 0 || output_mask > 7 || weight.has_value() != (output_mask & 1) ||
      x.has_value() != (output_mask >> 1 & 1)) {
    fail("output_mask must be 0 to 7, with weight for bit 0 and input for bit 1, got %ld",
         output_mask);
  }
  return step({grad_output, mask, divisor, (output_mask & 4) != 0, x, weight});
}

bool any(const LinearInputs& in, bool (*is)(const Tensor&)) {
  return is(in.x) || is(in.weight) || (in.bias && is(*in.bias));
}

bool any(const LinearGradients& in, bool (*is)(const Tensor&)) {
  return is(in.grad_output) || (in.x && is(*in.x)) || (in.weight && is(*in.weight));
}

// Where the dispatcher would do nothing below autograd but call our kernel; linear heeds autocast.
bool are_dense(const LinearInputs& in) {
  c10::DispatchKeySet keys = in.x.key_set() | in.weight.key_set();
  if (in.bias) keys = keys | in.bias->key_set();
  return has_only(keys, kDense);
}

Tensor call_linear(const LinearInputs& in) {
  return call_operator<decltype(of_inputs<linear_forward>)>(
      KERNELS_NAMESPACE "::linear_relu_divide", in.x, in.weight, in.bias, in.divisor);
}

TwoTensors call_linear_with_mask(const LinearInputs& in) {
  if (are_dense(in)) return linear_with_mask_forward(in);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_operator<decltype(of_inputs<linear_with_mask_forward>)>(
      KERNELS_NAMESPACE "::linear_relu_divide_with_mask", in.x, in.weight, in.bias, in.divisor);
}

TwoTensors call_epilogue_backward(const LinearGradients& in) {
  return call_operator<decltype(of_epilogue<epilogue_backward>)>(
      KERNELS_NAMESPACE "::linear_relu_divide_backward", in.grad_output, in.mask, in.divisor,
      in.wants_bias);
}

ThreeTensors call_linear_backward_operator(const LinearGradients& in) {
  const int64_t outputs = in.weight.has_value() | in.x.has_value() << 1 | in.wants_bias << 2;
  return call_operator<decltype(of_gradients<linear_backward>)>(
      KERNELS_NAMESPACE "::linear_relu_divide_gradients", in.grad_output, in.mask, in.x, in.weight,
      outputs, in.divisor);
}

// Called where autograd records nothing.
ThreeTensors call_linear_backward(const LinearGradients& in) {
  const auto is_not_dense = [](const Tensor& t) { return !is_dense(t) || has_tangent(t); };
  if (!is_dense(in.mask) || any(in, is_not_dense)) return call_linear_backward_operator(in);
  return multiply_out(in, epilogue_backward(in));
}

// ------------------------------------------------------------------------------------- autograd

// Autograd's record: the mask, and of x and weight those that the other's gradient needs.
struct LinearReluDivideBackward : Node {
  SavedVariable x, weight, mask;
  double divisor;
  bool turns_x = false, turns_weight = false;

  std::string name() const override { return "LinearReluDivideBackward"; }

  variable_list apply(variable_list&& grads) override {
    return gradients(grads[0], divisor, *this);
  }

  // Those that `task`, this node or a LinearReluBackward of it, has to compute.
  variable_list gradients(const Tensor& grad_output, double divisor, const Node& task) {
    variable_list result(3);
    if (!grad_output.defined()) return result;
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool wants_x = task.task_should_compute_output(0),
               wants_weight = task.task_should_compute_output(1),
               wants_bias = task.task_should_compute_output(2);
    const Tensor bits = unpack_mask(mask);
    std::optional<Tensor> of_x, of_weight;
    if (wants_weight) of_x = x.unpack();
    if (wants_x) of_weight = weight.unpack();
    const LinearGradients in{grad_output, bits,      divisor, wants_bias,
                             of_x,        of_weight, turns_x, turns_weight};
    auto [grad_x, grad_weight, grad_bias] =
        at::GradMode::is_enabled() ? multiply_out(in, epilogue_backward_by_signs(in, signs_of(in)))
                                   : call_linear_backward(in);
    if (wants_x) result[0] = std::move(grad_x);
    if (wants_weight) result[1] = std::move(grad_weight);
    if (wants_bias) result[2] = std::move(grad_bias);
    return result;
  }

  // linear_signs, with a gradient of their own.
  Tensor signs_of(const LinearGradients& in);

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
    mask.reset_data();
  }
};

// The same without the division: where the gradient of relu's output goes. Only a gradient that is
// differentiated again has one, of zeros: it was selected by that output. As in torch, their
// products with an x or weight that is not finite are NaN.
struct LinearReluBackward : Node {
  NodePointer origin;

  std::string name() const override { return "LinearReluBackward"; }

  variable_list apply(variable_list&& grads) override {
    auto& node = static_cast<LinearReluDivideBackward&>(*origin);
    return node.gradients(grads[0], /*divisor=*/1.0, *this);
  }
};

Tensor LinearReluDivideBackward::signs_of(const LinearGradients& in) {
  Tensor signs;
  if (subclass_of(in.mask) == Subclass::kDTensor) {  // the bits are taken apart where they lie
    const Tensor ones = at::ones_like(in.grad_output);
    std::tie(signs, std::ignore) = call_epilogue_backward(
        {ones, in.mask, /*divisor=*/1.0, /*wants_bias=*/false, std::nullopt, std::nullopt});
  } else {
    signs = linear_signs(in).detach();
  }
  auto node = make_node<LinearReluBackward>();
  node->set_next_edges(torch::autograd::edge_list(next_edges()));
  node->origin = getptr();
  torch::autograd::set_history(signs, std::move(node));
  return signs;
}

Tensor linear_autograd(const LinearInputs& in) {
  if (is_left_to_torch(in) || !is_regular(in) || any(in, has_tangent) || in_functorch()) {
    return linear_composite(in);
  }
  if (!any(in, wants_gradient)) {
    if (are_dense(in)) return linear_forward(in);
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_linear(in);
  }
  // Where only a copy of x is a matrix, the copy is what is kept, as at::linear does: x may change.
  // A DTensor is no matrix where its rows lie in several processes.
  const bool is_copied = in.x.dim() > 2 && !in.x.is_contiguous() && wants_gradient(in.weight) &&
                         subclass_of(in.x) != Subclass::kDTensor;
  const Tensor x = is_copied ? as_matrix(in.x) : in.x;
  const LinearInputs kept{x, in.weight, in.bias, in.divisor};
  auto [out, mask] = call_linear_with_mask(kept);
  if (is_copied) {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = with_rows_of(in.x, out);
  }
  auto node = make_node<LinearReluDivideBackward>(in.x, in.weight, in.bias);
  if (wants_gradient(in.weight)) node->x = SavedVariable(x, /*is_output=*/false);
  if (wants_gradient(in.x)) node->weight = SavedVariable(in.weight, /*is_output=*/false);
  node->mask = SavedVariable(mask, /*is_output=*/false);
  node->divisor = in.divisor;
  if (are_dense(in)) {
    const int64_t k = in.weight.size(1);
    node->turns_x = in.x.dim() == 2 && in.x.stride(0) == 1 && in.x.stride(1) == in.x.size(0);
    node->turns_weight = in.weight.stride(0) != k || in.weight.stride(1) != 1;
  }
  torch::autograd::set_history(out, std::move(node));
  return out;
}

// A backward operator: by torch's ops where derivatives of the gradients are due.
template <auto composite, auto call>
auto backward_autograd(const LinearGradients& in) {
  if (any(in, is_tracked) || in_functorch()) return composite(in);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call(in);
}

// As autocast treats nn.Linear: everything in its dtype but float64, which it leaves alone.
Tensor linear_autocast(const LinearInputs& in) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  const at::DeviceType device = in.x.device().type();
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, device); };
  const Tensor x = cast(in.x), weight = cast(in.weight);
  const std::optional<Tensor> bias = in.bias ? std::optional(cast(*in.bias)) : std::nullopt;
  return call_linear({x, weight, bias, in.divisor});
}

// ------------------------------------------------------------------------------------- entries

// Whether the argument is a number that x.div takes as a double without loss.
bool is_number(PyObject* argument, double* value) {
  if (PyFloat_Check(argument)) {
    *value = PyFloat_AS_DOUBLE(argument);
    return true;
  }
  if (!PyLong_CheckExact(argument)) return false;
  int overflow;
  const long long whole = PyLong_AsLongLongAndOverflow(argument, &overflow);
  *value = static_cast<double>(whole);
  return overflow == 0 && std::abs(*value) < 0x1p53;
}

// linear_relu_divide(x, weight, bias, divisor): linear_autograd for dense tensors, and the operator
// for all others, and where a profiler looks on. NotImplemented for divisors that are no numbers.
PyObject* linear_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) {
    PyErr_Format(PyExc_TypeError, "linear_relu_divide() takes 4 arguments, not %zd", count);
    return nullptr;
  }
  double divisor;
  if (!is_number(arguments[3], &divisor)) Py_RETURN_NOTIMPLEMENTED;
  const bool has_bias = arguments[2] != Py_None;
  if (!is_plain(arguments[0]) || !is_plain(arguments[1]) || (has_bias && !is_plain(arguments[2])) ||
      has_function_mode()) {
    return call_python("linear_of_subclasses", arguments, 4);
  }
  return with_python_errors([&] {
    const Tensor x = unpack(arguments[0]), weight = unpack(arguments[1]);
    const auto bias = has_bias ? std::optional(unpack(arguments[2])) : std::nullopt;
    const LinearInputs in{x, weight, bias, divisor};
    Tensor out;
    without_gil(is_short(x) && is_short(weight), [&] {
      const auto is_special = [](const Tensor& t) { return !is_strided(t); };
      out = are_dense(in) && !at::hasCallbacks() ? linear_autograd(in)
            : any(in, is_special)                ? linear_composite(in)
                                                 : call_linear(in);
    });
    return THPVariable_Wrap(std::move(out));
  });
}

constexpr std::pair<const char*, std::optional<Path>> kPaths[] = {{"auto", std::nullopt},
                                                                  {"skinny", Path::kSkinny},
                                                                  {"sm90", Path::kSm90},
                                                                  {"sm80", Path::kSm80},
                                                                  {"torch", Path::kTorch}};

PyObject* set_linear_path(PyObject*, PyObject* argument) {
  for (const auto& [name, path] : kPaths) {
    if (PyUnicode_Check(argument) && PyUnicode_CompareWithASCIIString(argument, name) == 0) {
      demanded_path = path;
      Py_RETURN_NONE;
    }
  }
  PyErr_Format(PyExc_ValueError, "expected a path among auto, skinny, sm90, sm80, torch, got %R",
               argument);
  return nullptr;
}

PyObject* get_float32_precision(PyObject*, PyObject*) {
  return PyUnicode_FromString(float32_precision() == Precision::kHigh ? "high" : "highest");
}

// ----------------------------------------------------------------------------------- operators

void define_linear_operators() {
  Operator("linear_relu_divide(Tensor input, Tensor weight, Tensor? bias, float divisor) -> Tensor")
      .dense(of_inputs<linear_forward>)
      .impl(DispatchKey::Autograd, of_inputs<linear_autograd>)
      .impl(DispatchKey::AutocastCPU, of_inputs<linear_autocast>)
      .impl(DispatchKey::AutocastCUDA, of_inputs<linear_autocast>)
      .impl(DispatchKey::FuncTorchBatched, of_inputs<linear_composite>)
      .impl(DispatchKey::CompositeExplicitAutograd, of_inputs<linear_composite>);
  Operator(
      "linear_relu_divide_with_mask(Tensor input, Tensor weight, Tensor? bias, float divisor)"
      " -> (Tensor, Tensor)")
      .dense(of_inputs<linear_with_mask_forward>)
      .impl(DispatchKey::Meta, of_inputs<linear_with_mask_meta>);
  Operator(
      "linear_relu_divide_backward(Tensor grad_output, Tensor mask, float divisor, bool wants_bias)"
      " -> (Tensor, Tensor)")
      .dense(of_epilogue<epilogue_backward>)
      .impl(DispatchKey::Meta, of_epilogue<epilogue_backward_meta>)
      .impl(DispatchKey::Autograd,
            of_epilogue<backward_autograd<epilogue_backward_composite, call_epilogue_backward>>)
      .impl(DispatchKey::FuncTorchBatched, of_epilogue<epilogue_backward_composite>);
  Operator(
      "linear_relu_divide_gradients(Tensor grad_output, Tensor mask, Tensor? input, Tensor? weight,"
      " int output_mask, float divisor) -> (Tensor, Tensor, Tensor)")
      .dense(of_gradients<linear_backward>)
      .impl(DispatchKey::Meta, of_gradients<linear_backward_by<epilogue_backward_meta>>)
      .impl(DispatchKey::Autograd,
            of_gradients<backward_autograd<linear_backward_by<epilogue_backward_composite>,
                                           call_linear_backward_operator>>)
      .impl(DispatchKey::FuncTorchBatched,
            of_gradients<linear_backward_by<epilogue_backward_composite>>);
}

PyMethodDef linear_methods[] = {
    {"linear_relu_divide", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(linear_entry)),
     METH_FASTCALL,
     "linear_relu_divide(x, weight, bias, divisor): relu(x weight^T + bias) / divisor, or "
     "NotImplemented where an argument is neither a plain tensor nor a plain number."},
    {"set_linear_path", set_linear_path, METH_O,
     "set_linear_path(name): for tests, how products on a GPU are computed: auto, skinny, sm90, "
     "sm80 or torch. A product that the path cannot serve, or that this build has no kernel for, "
     "raises RuntimeError."},
    {"float32_precision", get_float32_precision, METH_NOARGS,
     "float32_precision(): for tests, the accuracy of float32 products on a GPU, high or highest."},
    {nullptr, nullptr, 0, nullptr}};

const bool is_linear_added = add_problem(linear_methods, define_linear_operators);

}  // namespace
}  // namespace kernels
