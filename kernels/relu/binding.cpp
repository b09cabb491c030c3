// ReLU for torch and Python. binding/dispatch.h says what the names of the steps mean.
//
//   relu(x)              what users call. Autograd saves one bit an element.
//   relu_with_mask(x)    the forward of that: the output, and a byte for each 8 of its elements in
//                        memory order
//   relu_backward(grad_output, mask, stride)    its backward; stride is that of the output
//
// Where no kernel of ours serves, torch's own op does, and only these places say so:
//   - relu_forward: a dtype without a kernel, for which torch raises its error
//   - relu_autograd: sparse, nested, quantized and mkldnn tensors, forward-mode AD, torch.func
//   - relu_in_place: all of these, and everything else that is not plainly dense
//   - ReluBackward: gradients that are differentiated again
//   - relu_entry, subclasses.py and model_new.py: ReLU in graphs
//   - define_relu_operators: other devices, meta tensors (shapes only), vmap

#include "binding/dispatch.h"
// It includes Python.h, which comes first.

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/threshold_backward_meta_dispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace kernels {
namespace {

// ------------------------------------------------------------------------------------- launches

// x may be out, whether dense or not.
void launch_relu(DType dtype, const Tensor& x, const Tensor& out) {
  const int64_t n = x.numel();
  void* to = out.mutable_data_ptr();  // first: it may move x, where that is a lazy clone
  const void* from = x.const_data_ptr();
  if (out.is_non_overlapping_and_dense() && same_order(x, out.strides())) {
    launch_elements(
        out, from != to, [=](auto stream) { return cuda::relu(dtype, from, to, n, stream); },
        [=](auto... range) { cpu::relu(dtype, from, to, range...); });
  } else {
    const Layout layout = layout_of(x.sizes(), out.strides(), x.strides());
    launch_elements(
        out, from != to,
        [&](auto stream) { return cuda::relu_strided(dtype, from, to, n, layout, stream); },
        [=, &layout](int64_t begin, int64_t end, bool) {
          cpu::relu_strided(dtype, from, to, begin, end, layout);
        });
  }
}

// x may be out. Both are dense, in one order.
void launch_relu_with_mask(DType dtype, const Tensor& x, const Tensor& out, const Tensor& mask) {
  const int64_t n = x.numel();
  void* to = out.mutable_data_ptr();  // first, as above
  const void* from = x.const_data_ptr();
  uint8_t* bits = mask.mutable_data_ptr<uint8_t>();
  launch_elements(
      out, from != to,
      [=](auto stream) { return cuda::relu_with_mask(dtype, from, to, bits, n, stream); },
      [=](auto... range) { cpu::relu_with_mask(dtype, from, to, bits, range...); });
}

// The same where x is not dense, or in another order than out, which is the mask's too.
void launch_relu_with_mask_strided(DType dtype, const Tensor& x, const Tensor& out,
                                   const Tensor& mask) {
  const int64_t n = x.numel();
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  uint8_t* bits = mask.mutable_data_ptr<uint8_t>();
  const Layout layout = layout_of(x.sizes(), out.strides(), x.strides());
  launch_elements(
      out, /*is_fresh=*/true,
      [&](auto stream) {
        return cuda::relu_with_mask_strided(dtype, from, to, bits, n, layout, stream);
      },
      [=, &layout](int64_t begin, int64_t end, bool) {
        cpu::relu_with_mask_strided(dtype, from, to, bits, begin, end, layout);
      });
}

// grad_input is dense, in the mask's order.
void launch_relu_backward(DType dtype, const Tensor& grad_output, const Tensor& mask,
                          const Tensor& grad_input) {
  const int64_t n = grad_output.numel();
  const void* from = grad_output.const_data_ptr();
  const uint8_t* bits = mask.const_data_ptr<uint8_t>();
  void* to = grad_input.mutable_data_ptr();
  if (same_order(grad_output, grad_input.strides())) {
    launch_elements(
        grad_input, /*is_fresh=*/true,
        [=](auto stream) { return cuda::relu_backward(dtype, from, bits, to, n, stream); },
        [=](auto... range) { cpu::relu_backward(dtype, from, bits, to, range...); });
  } else {
    const Layout layout =
        layout_of(grad_output.sizes(), grad_input.strides(), grad_output.strides());
    launch_elements(
        grad_input, /*is_fresh=*/true,
        [&](auto stream) {
          return cuda::relu_backward_strided(dtype, from, bits, to, n, layout, stream);
        },
        [=, &layout](int64_t begin, int64_t end, bool) {
          cpu::relu_backward_strided(dtype, from, bits, to, begin, end, layout);
        });
  }
}

// ------------------------------------------------------------------------- forward and backward

Tensor relu_forward(const Tensor& x) {
  const std::optional<DType> dtype = kernel_dtype(x.scalar_type());
  if (!dtype) return at::relu(x);
  const DeviceOf device(x);
  Tensor out = allocate_output(x);
  launch_relu(*dtype, x, out);
  return out;
}

Tensor allocate_mask(const Tensor& x) {
  return allocate(x, {(x.numel() + 7) / 8}, std::nullopt, at::kByte);
}

TwoTensors relu_with_mask_forward(const Tensor& x) {
  const DType dtype = floating_dtype(x, "input");
  const DeviceOf device(x);
  Tensor out = allocate_output(x);
  Tensor mask = allocate_mask(x);
  const bool is_dense = same_order(x, out.strides());
  (is_dense ? launch_relu_with_mask : launch_relu_with_mask_strided)(dtype, x, out, mask);
  return {out, mask};
}

// An output with the strides of threshold_backward's: the elementwise rule over the forward's
// output, whose strides are `stride`, and then the gradient. As the forward's output is dense, the
// elements are in its order, and the gradient decides at most where dimensions have size 1.
Tensor allocate_grad_input(const Tensor& grad_output, at::IntArrayRef stride) {
  const at::IntArrayRef sizes = grad_output.sizes(), strides = grad_output.strides();
  const at::ScalarType type = grad_output.scalar_type();
  if (grad_output.is_contiguous() && same_order(grad_output, stride)) {
    return allocate(grad_output, sizes, std::nullopt, type);
  }
  const auto are_all = [](at::IntArrayRef values, const auto& is) {
    return std::all_of(values.begin(), values.end(), is);
  };
  if (are_all(sizes, [](int64_t size) { return size > 1; })) {
    return allocate(grad_output, sizes, stride, type);
  }
  if (are_all(strides, [](int64_t stride) { return stride == 0; })) {  // of a sum
    return allocate(grad_output, sizes, at::infer_dense_strides(sizes, stride), type);
  }
  const auto meta = [&](at::IntArrayRef strides) {
    return Tensor(at::detail::empty_strided_meta(sizes, strides, type));
  };
  // Not by the dispatcher, whose meta kernel is a decomposition in Python with strides of its own.
  const Tensor grad_input = at::meta::threshold_backward(meta(strides), meta(stride), 0);
  if (!same_order(grad_input, stride)) {  // a stride of 0 that no output has
    return allocate(grad_output, sizes, at::infer_dense_strides(sizes, stride), type);
  }
  return allocate(grad_output, sizes, grad_input.strides(), type);
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

Tensor relu_backward(const Tensor& grad_output, const Tensor& mask, c10::SymIntArrayRef strides) {
  const at::IntArrayRef stride = C10_AS_INTARRAYREF_SLOW(strides);
  const DType dtype = floating_dtype(grad_output, "grad_output");
  check_mask(mask, grad_output, /*rows=*/1, (grad_output.numel() + 7) / 8);
  if (static_cast<int64_t>(stride.size()) != grad_output.dim()) {
    fail("stride must have %ld entries, got %zu", grad_output.dim(), stride.size());
  }
  if (!is_non_overlapping_and_dense(grad_output.sizes(), stride)) {
    fail("stride must be that of a dense tensor of the gradient's shape, with no gaps or overlaps");
  }
  const DeviceOf device(grad_output);
  Tensor grad_input = allocate_grad_input(grad_output, stride);
  launch_relu_backward(dtype, grad_output, mask, grad_input);
  return grad_input;
}

// ------------------------------------------------------------------------- meta and composite

TwoTensors relu_with_mask_meta(const Tensor& x) {
  const c10::SymInt bytes = (x.sym_numel() + 7) / 8;
  return {at::relu(x), at::empty_symint({bytes}, x.options().dtype(at::kByte))};
}

Tensor relu_backward_meta(const Tensor& grad_output, const Tensor&, c10::SymIntArrayRef stride) {
  const Tensor out =
      at::empty_strided_symint(grad_output.sym_sizes(), stride, grad_output.options());
  return at::threshold_backward(grad_output, out, 0);
}

// A tensor with the signs of the forward's output, out of the mask.
Tensor relu_signs(const Tensor& grad_output, const Tensor& mask, c10::SymIntArrayRef stride) {
  return bits_of(mask)
      .flatten()
      .to(grad_output.scalar_type())
      .as_strided_symint(grad_output.sym_sizes(), stride);
}

// relu_backward out of torch's own ops, for the transforms that take an operator apart and for
// gradients of gradients.
Tensor relu_backward_composite(const Tensor& grad_output, const Tensor& mask,
                               c10::SymIntArrayRef stride) {
  return at::threshold_backward(grad_output, relu_signs(grad_output, mask, stride), 0);
}

// ------------------------------------------------------------------------------------ autograd

Tensor call_relu(const Tensor& x) {
  if (is_dense(x)) return relu_forward(x);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_operator<decltype(relu_forward)>(KERNELS_NAMESPACE "::relu", x);
}

TwoTensors call_relu_with_mask(const Tensor& x) {
  if (is_dense(x)) return relu_with_mask_forward(x);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_operator<decltype(relu_with_mask_forward)>(KERNELS_NAMESPACE "::relu_with_mask", x);
}

Tensor call_relu_backward(const Tensor& grad_output, const Tensor& mask,
                          c10::SymIntArrayRef stride) {
  if (is_dense(grad_output) && is_dense(mask) && !is_tracked(grad_output)) {
    return relu_backward(grad_output, mask, stride);
  }
  return call_operator<decltype(relu_backward)>(KERNELS_NAMESPACE "::relu_backward", grad_output,
                                                mask, stride);
}

// Autograd's record of relu. Written out as a Node, for torch::autograd::Function would take 3 s
// more to compile and more time a call.
struct ReluBackward : Node {
  SavedVariable saved;  // the mask, or the output if there is no stride
  std::optional<c10::SymDimVector> stride;

  void save(const Tensor& mask, c10::SymIntArrayRef output_stride) {
    saved = SavedVariable(mask, /*is_output=*/false);
    stride.emplace(output_stride.begin(), output_stride.end());
  }

  std::string name() const override { return "ReluBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {Tensor()};
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor tensor = stride ? unpack_mask(saved) : saved.unpack();
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

Tensor relu_autograd(const Tensor& x) {
  if (!is_strided(x) || !kernel_dtype(x.scalar_type()) || has_tangent(x) || in_functorch()) {
    return at::relu(x);
  }
  if (!wants_gradient(x)) return call_relu(x);
  auto node = make_node<ReluBackward>(x);
  Tensor out, mask;
  const Subclass subclass = subclass_of(x);
  if (subclass == Subclass::kDTensor || subclass == Subclass::kOther) {
    out = call_relu(x);
    node->saved = SavedVariable(out.detach(), /*is_output=*/false);  // as torch does
  } else {
    std::tie(out, mask) = call_relu_with_mask(x);
    node->save(mask, out.sym_strides());
  }
  torch::autograd::set_history(out, std::move(node));
  return out;
}

Tensor relu_backward_autograd(const Tensor& grad_output, const Tensor& mask,
                              c10::SymIntArrayRef stride) {
  if (is_tracked(grad_output) || in_functorch()) {
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
  auto node = records ? make_node<ReluBackward>(x) : nullptr;  // before x gets another history
  torch::autograd::impl::bump_version(x);
  if (!records) return launch_relu(*dtype, x, x);
  Tensor out = x, mask;
  if (x.is_non_overlapping_and_dense()) {
    mask = allocate_mask(x);
    launch_relu_with_mask(*dtype, x, x, mask);
  } else {  // a mask has no gaps, so it is taken from a dense result
    std::tie(out, mask) = relu_with_mask_forward(x);
    launch_relu(*dtype, x, x);
  }
  node->save(mask, out.sym_strides());
  torch::autograd::rebase_history(x, std::move(node));
}

// ------------------------------------------------------------------------------------- entries

// Whether a graph of plain tensors is being recorded, by torch.jit.trace or make_fx.
bool is_recorded() {
  using c10::impl::TorchDispatchModeKey;
  return c10::impl::tls_is_dispatch_key_included(at::DispatchKey::Tracer) ||
         c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

// relu(x): relu_autograd for a dense tensor, and the operator for all others, and where a profiler
// looks on. Graphs hold torch's own relu: compilers fuse it, and programs run without our kernels.
PyObject* relu_entry(PyObject*, PyObject* argument) {
  if (!is_plain(argument) || has_function_mode()) {
    return call_python("relu_of_subclass", &argument, 1);
  }
  return with_python_errors([&] {
    const Tensor x = unpack(argument);  // its own reference: another thread may swap the tensor
    Tensor out;
    without_gil(is_short(x), [&] {
      out = is_dense(x) && !at::hasCallbacks() ? relu_autograd(x)
            : is_recorded() || !is_strided(x)
                ? at::relu(x)
                : call_operator<decltype(relu_forward)>(KERNELS_NAMESPACE "::relu", x);
    });
    return THPVariable_Wrap(std::move(out));
  });
}

// relu_(x): in place; returns x.
PyObject* relu_in_place_entry(PyObject*, PyObject* argument) {
  if (!is_plain(argument) || has_function_mode()) {
    return call_python("relu_of_subclass_in_place", &argument, 1);
  }
  return with_python_errors([&] {
    const Tensor x = unpack(argument);
    without_gil(is_short(x), [&] { relu_in_place(x); });
    return Py_NewRef(argument);
  });
}

PyObject* is_recorded_entry(PyObject*, PyObject*) { return PyBool_FromLong(is_recorded()); }

void define_relu_operators() {
  Operator("relu(Tensor input) -> Tensor")
      .dense(relu_forward)
      .impl(DispatchKey::Autograd, relu_autograd)
      .impl(DispatchKey::FuncTorchBatched, at::relu)
      .impl(DispatchKey::CompositeExplicitAutograd, at::relu);
  Operator("relu_with_mask(Tensor input) -> (Tensor, Tensor)")
      .dense(relu_with_mask_forward)
      .impl(DispatchKey::Meta, relu_with_mask_meta);
  Operator("relu_backward(Tensor grad_output, Tensor mask, SymInt[] stride) -> Tensor")
      .dense(relu_backward)
      .impl(DispatchKey::Meta, relu_backward_meta)
      .impl(DispatchKey::Autograd, relu_backward_autograd)
      .impl(DispatchKey::FuncTorchBatched, relu_backward_composite);
}

PyMethodDef relu_methods[] = {
    {"relu", relu_entry, METH_O, "relu(x): x where x > 0 or x is NaN, else 0. Fresh memory."},
    {"relu_", relu_in_place_entry, METH_O, "relu_(x): relu in place. Returns x."},
    {"is_recorded", is_recorded_entry, METH_NOARGS,
     "is_recorded(): whether torch.jit.trace or make_fx records a graph."},
    {nullptr, nullptr, 0, nullptr}};

const bool is_relu_added = add_problem(relu_methods, define_relu_operators);

}  // namespace
}  // namespace kernels
