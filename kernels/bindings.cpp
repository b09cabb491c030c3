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

// operators.h holds the kernels on tensors, autograd.h what is recorded of them, and this file what
// torch and Python are told.

#include "autograd.h"

namespace kernels {
namespace {

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
