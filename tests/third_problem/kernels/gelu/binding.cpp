// GELU for torch and Python. Our kernels take contiguous float32 where no gradient is wanted; all
// else is torch's own op.

#include "binding/dispatch.h"
// It includes Python.h, which comes first.

#include <ATen/ops/gelu.h>

#include "gelu/launchers.h"

namespace kernels {
namespace {

Tensor gelu_composite(const Tensor& x) { return at::gelu(x); }

Tensor gelu_forward(const Tensor& x) {
  if (x.scalar_type() != at::kFloat || !x.is_contiguous()) return gelu_composite(x);
  const DeviceOf device(x);
  Tensor out = allocate_output(x);
  const float* const from = x.const_data_ptr<float>();
  float* const to = out.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  launch_elements(
      out, /*is_fresh=*/true, [=](auto stream) { return cuda::gelu(from, to, n, stream); },
      [=](int64_t begin, int64_t end, bool) { cpu::gelu(from, to, begin, end); });
  return out;
}

Tensor gelu_autograd(const Tensor& x) {
  if (!is_strided(x) || is_tracked(x) || in_functorch()) return gelu_composite(x);
  if (is_dense(x)) return gelu_forward(x);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_operator<decltype(gelu_forward)>(KERNELS_NAMESPACE "::gelu", x);
}

// gelu(x): gelu_autograd for a dense tensor, and the operator for all others.
PyObject* gelu_entry(PyObject*, PyObject* argument) {
  if (!is_plain(argument)) {
    PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, got %s", Py_TYPE(argument)->tp_name);
    return nullptr;
  }
  return with_python_errors([&] {
    const Tensor x = unpack(argument);
    Tensor out;
    without_gil(is_short(x), [&] {
      out = is_dense(x) ? gelu_autograd(x)
                        : call_operator<decltype(gelu_forward)>(KERNELS_NAMESPACE "::gelu", x);
    });
    return THPVariable_Wrap(std::move(out));
  });
}

void define_gelu_operators() {
  Operator("gelu(Tensor input) -> Tensor")
      .dense(gelu_forward)
      .impl(DispatchKey::Autograd, gelu_autograd)
      .impl(DispatchKey::CompositeExplicitAutograd, gelu_composite);
}

PyMethodDef gelu_methods[] = {{"gelu", gelu_entry, METH_O, "gelu(x): x Phi(x). Fresh memory."},
                              {nullptr, nullptr, 0, nullptr}};

const bool is_gelu_added = add_problem(gelu_methods, define_gelu_operators);

}  // namespace
}  // namespace kernels
