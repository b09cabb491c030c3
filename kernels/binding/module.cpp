// The kernels as torch sees them: allocation, devices, autograd, and one quick way in from Python.
//
//   relu(x)              what users call. Autograd saves one bit an element.
//   relu_with_mask(x)    the forward of that: the output, and a byte for each 8 of its elements in
//                        memory order
//   relu_backward(grad_output, mask, stride)    its backward; stride is that of the output
//   linear_relu_divide(x, weight, bias, divisor)              the same for Linear -> ReLU ->
//   divide, linear_relu_divide_with_mask(x, weight, bias, divisor)    with a mask [..., bytes]
//   linear_relu_divide_gradients(grad_output, mask, x, weight, output_mask, divisor)    its
//                        backward: the gradients of x, weight and bias for bits 0, 1 and 2 of
//                        output_mask, and empty ones for bits that are off. Without bit 0, weight
//                        is None; without bit 1, x is. It is an int because DTensor, which looks
//                        results' shapes up by the arguments, passes over lists of bools
//   linear_relu_divide_backward(grad_output, mask, divisor, wants_bias)    its first step: the
//                        gradients of the product and of the bias
//
// Where no kernel of ours serves, torch's own op does, and only these places say so:
//   - relu_kernel: a dtype without a kernel, for which torch raises its error
//   - relu_autograd: sparse, nested, quantized and mkldnn tensors, forward-mode AD, torch.func
//   - relu_in_place: all of these, and everything else that is not plainly dense
//   - is_left_to_torch and linear_autograd: the same for linear_relu_divide
//   - is_regular: arguments that do not fit, empty results, and on a GPU some divisors
//   - choose_path: products on a GPU. On a CPU the product is always torch's.
//   - product: the products of the gradients
//   - SelectBackward and LinearReluDivideBackward: gradients that are differentiated again
//   - relu_entry and model_new.py: ReLU in graphs, and the product in TorchScript
//   - linear.py: a module's `linear` that is more than an nn.Linear
//   - subclasses.py: tensor subclasses, and products of DTensors that are sums over processes
//   - the registrations at the end: other devices, meta tensors (shapes only), vmap

// relu.h holds the kernels on tensors, relu_autograd.h what is recorded of them, linear.h both for
// Linear -> ReLU -> divide, and this file what torch and Python are told.

#include "binding/linear.h"

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

// The kernels of each signature as the dispatcher calls them, on a stack.

void call(Tensor (*kernel)(const Tensor&), Stack& stack) {
  stack.back() = kernel(stack.back().toTensor());
}

void call(std::tuple<Tensor, Tensor> (*kernel)(const Tensor&), Stack& stack) {
  auto [out, mask] = kernel(stack.back().toTensor());
  stack.back() = std::move(out);
  stack.emplace_back(std::move(mask));
}

void call(Tensor (*kernel)(const Tensor&, const Tensor&, const c10::IValue&), Stack& stack) {
  const size_t first = stack.size() - 3;
  stack[first] = kernel(stack[first].toTensor(), stack[first + 1].toTensor(), stack[first + 2]);
  stack.resize(first + 1);
}

LinearInputs linear_inputs(const Stack& stack) {
  static const Tensor none;
  const size_t first = stack.size() - 4;
  const c10::IValue& bias = stack[first + 2];
  return {stack[first].toTensor(), stack[first + 1].toTensor(),
          bias.isNone() ? none : bias.toTensor(), stack[first + 3].toDouble()};
}

// In place of its four arguments, what an operator returns.
void return_from_four(Stack& stack, Tensor result) {
  stack.resize(stack.size() - 4);
  stack.emplace_back(std::move(result));
}

void return_from_four(Stack& stack, std::tuple<Tensor, Tensor> result) {
  return_from_four(stack, std::move(std::get<0>(result)));
  stack.emplace_back(std::move(std::get<1>(result)));
}

Tensor optional_tensor(const c10::IValue& value) {
  return value.isNone() ? Tensor() : value.toTensor();
}

void call(Tensor (*kernel)(const LinearInputs&), Stack& stack) {
  return_from_four(stack, kernel(linear_inputs(stack)));
}

void call(std::tuple<Tensor, Tensor> (*kernel)(const LinearInputs&), Stack& stack) {
  return_from_four(stack, kernel(linear_inputs(stack)));
}

void call(std::tuple<Tensor, Tensor> (*kernel)(const LinearGradients&), Stack& stack) {
  const size_t first = stack.size() - 4;
  return_from_four(stack, kernel({stack[first].toTensor(), stack[first + 1].toTensor(),
                                  stack[first + 2].toDouble(), stack[first + 3].toBool()}));
}

void call(ThreeTensors (*kernel)(const AllGradients&), Stack& stack) {
  const size_t first = stack.size() - 6;
  const Tensor x = optional_tensor(stack[first + 2]), weight = optional_tensor(stack[first + 3]);
  const int64_t outputs = stack[first + 4].toInt();
  if (outputs < 0 || outputs > 7 || weight.defined() != (outputs & 1) ||
      x.defined() != (outputs >> 1 & 1)) {
    fail("output_mask must be 0 to 7, with weight for bit 0 and input for bit 1, got %ld", outputs);
  }
  auto [grad_x, grad_weight, grad_bias] =
      kernel({{stack[first].toTensor(), stack[first + 1].toTensor(), stack[first + 5].toDouble(),
               (outputs & 4) != 0},
              x,
              weight});
  stack.resize(first);
  for (Tensor* gradient : {&grad_x, &grad_weight, &grad_bias}) {
    stack.emplace_back(std::move(*gradient));
  }
}

// A kernel of any signature, beside the `call` that knows which.
struct Kernel {
  template <typename Function>
  Kernel(Function* function)
      : function(reinterpret_cast<void (*)()>(function)),
        caller([](void (*function)(), Stack& stack) {
          call(reinterpret_cast<Function*>(function), stack);
        }) {}
  void (*function)();
  void (*caller)(void (*)(), Stack&);
};

// One functor for all: torch's own wrappers would be made anew for every function, which takes
// seconds to compile.
struct Boxed : c10::OperatorKernel {
  explicit Boxed(Kernel kernel) : kernel(kernel) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    kernel.caller(kernel.function, *stack);
  }
  Kernel kernel;
};

using at::DispatchKey;

const struct {
  DispatchKey key;
  const char* name;
  Kernel kernel;
} kKernels[] = {
    {DispatchKey::CPU, "relu", relu_kernel},
    {DispatchKey::CPU, "relu_with_mask", relu_with_mask_kernel},
    {DispatchKey::CPU, "relu_backward", relu_backward_kernel},
    {DispatchKey::CPU, "linear_relu_divide", linear_kernel},
    {DispatchKey::CPU, "linear_relu_divide_with_mask", linear_with_mask_kernel},
    {DispatchKey::CPU, "linear_relu_divide_backward", linear_backward_kernel},
    {DispatchKey::CPU, "linear_relu_divide_gradients", linear_gradients_kernel},

    {DispatchKey::CUDA, "relu", relu_kernel},
    {DispatchKey::CUDA, "relu_with_mask", relu_with_mask_kernel},
    {DispatchKey::CUDA, "relu_backward", relu_backward_kernel},
    {DispatchKey::CUDA, "linear_relu_divide", linear_kernel},
    {DispatchKey::CUDA, "linear_relu_divide_with_mask", linear_with_mask_kernel},
    {DispatchKey::CUDA, "linear_relu_divide_backward", linear_backward_kernel},
    {DispatchKey::CUDA, "linear_relu_divide_gradients", linear_gradients_kernel},

    {DispatchKey::Meta, "relu", at::relu},
    {DispatchKey::Meta, "relu_with_mask", relu_with_mask_meta},
    {DispatchKey::Meta, "relu_backward", relu_backward_meta},
    {DispatchKey::Meta, "linear_relu_divide", linear_composite},
    {DispatchKey::Meta, "linear_relu_divide_with_mask", linear_with_mask_meta},
    {DispatchKey::Meta, "linear_relu_divide_backward", linear_backward_meta},
    {DispatchKey::Meta, "linear_relu_divide_gradients", linear_gradients_meta},

    {DispatchKey::Autograd, "relu", relu_autograd},
    {DispatchKey::Autograd, "relu_backward", relu_backward_autograd},
    {DispatchKey::Autograd, "linear_relu_divide", linear_autograd},
    {DispatchKey::Autograd, "linear_relu_divide_backward", linear_backward_autograd},
    {DispatchKey::Autograd, "linear_relu_divide_gradients", linear_gradients_autograd},

    {DispatchKey::AutocastCPU, "linear_relu_divide",
     linear_autocast<at::kCPU, DispatchKey::AutocastCPU>},
    {DispatchKey::AutocastCUDA, "linear_relu_divide",
     linear_autocast<at::kCUDA, DispatchKey::AutocastCUDA>},

    {DispatchKey::FuncTorchBatched, "relu", at::relu},
    {DispatchKey::FuncTorchBatched, "relu_backward", relu_backward_composite},
    {DispatchKey::FuncTorchBatched, "linear_relu_divide", linear_composite},
    {DispatchKey::FuncTorchBatched, "linear_relu_divide_backward", linear_backward_composite},
    {DispatchKey::FuncTorchBatched, "linear_relu_divide_gradients", linear_gradients_composite},

    {DispatchKey::CompositeExplicitAutograd, "relu", at::relu},
    {DispatchKey::CompositeExplicitAutograd, "linear_relu_divide", linear_composite},
};

// Saved programs hold these schemas: one that changes gets another name, or another namespace.
const char* const kSchemas[] = {
    "relu(Tensor input) -> Tensor",
    "relu_with_mask(Tensor input) -> (Tensor, Tensor)",
    "relu_backward(Tensor grad_output, Tensor mask, SymInt[] stride) -> Tensor",
    "linear_relu_divide(Tensor input, Tensor weight, Tensor? bias, float divisor) -> Tensor",
    "linear_relu_divide_with_mask(Tensor input, Tensor weight, Tensor? bias, float divisor)"
    " -> (Tensor, Tensor)",
    "linear_relu_divide_backward(Tensor grad_output, Tensor mask, float divisor, bool wants_bias)"
    " -> (Tensor, Tensor)",
    "linear_relu_divide_gradients(Tensor grad_output, Tensor mask, Tensor? input, Tensor? weight,"
    " int output_mask, float divisor) -> (Tensor, Tensor, Tensor)",
};

// Registers the operators that no build in this process has registered yet. Those of the first
// build then serve all others, whose schemas are the same.
void register_operators() {
  static torch::Library library(torch::Library::FRAGMENT, KERNELS_NAMESPACE, std::nullopt, __FILE__,
                                __LINE__);
  for (const char* text : kSchemas) {
    c10::FunctionSchema schema = torch::schema(text);
    const std::string name = schema.name();
    const auto found = c10::Dispatcher::singleton().findSchema({KERNELS_NAMESPACE "::" + name, ""});
    if (found) {
      schema.setNamespaceIfNotSet(KERNELS_NAMESPACE);
      if (found->schema() == schema) continue;
      fail("expected the operator " KERNELS_NAMESPACE
           "::%s, got another library's of that name: "
           "load these kernels in a process without it",
           text);
    }
    library.def(std::move(schema));
    for (const auto& [key, operator_name, kernel] : kKernels) {
      if (operator_name != name) continue;
      auto functor = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(kernel));
      library.impl(operator_name, torch::dispatch(key, std::move(functor)));
    }
  }
}

// -------------------------------------------------------------------------------------- Python

// The entries call these for a tensor with a Python side of its own; set once, at import.
PyObject* fallback = nullptr;
PyObject* fallback_in_place = nullptr;
PyObject* fallback_linear = nullptr;

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

// Whether this is exactly a torch.Tensor or a Parameter.
bool is_plain(PyObject* argument) {
  PyTypeObject* const type = Py_TYPE(argument);
  return type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         type == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

// Whether an argument is a torch.Tensor or a Parameter to be served here. If not, `result` is what
// the entry returns: for subclasses, proxies and modes, which expect to see an operator through
// Python, what `otherwise` makes of it, and torch's error for no tensor at all.
bool is_served(PyObject* argument, PyObject* otherwise, PyObject** result) {
  const bool is_tensor = is_plain(argument);
  if (is_tensor && !at::impl::torch_function_mode_enabled()) return true;
  if (is_tensor || PyObject_HasAttrString(argument, "__torch_function__")) {
    *result = PyObject_CallOneArg(otherwise, argument);
  } else {
    PyErr_Format(PyExc_TypeError, "relu(): argument 'input' (position 1) must be Tensor, not %s",
                 Py_TYPE(argument)->tp_name);
    *result = nullptr;
  }
  return false;
}

// So little work that another thread would not get to run in the meantime.
bool is_short(const Tensor& x) { return x.is_cpu() && x.numel() < kGrain; }

// Runs the work without the GIL, unless it is short.
template <typename Work>
void without_gil(bool is_short, const Work& work) {
  if (is_short) return work();
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
// Graphs hold torch's own relu: compilers fuse it, and programs run without these kernels.
PyObject* relu_entry(PyObject*, PyObject* argument) {
  PyObject* result;
  if (!is_served(argument, fallback, &result)) return result;
  try {
    const Tensor x = unwrap(argument);  // its own reference: another thread may swap the tensor
    Tensor out;
    without_gil(is_short(x), [&] {
      out = is_dense(x) ? relu_autograd(x) : is_recorded() ? at::relu(x) : call_relu_operator(x);
    });
    return THPVariable_Wrap(std::move(out));
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
    const Tensor x = unwrap(argument);
    without_gil(is_short(x), [&] { relu_in_place(x); });
    Py_INCREF(argument);
    return argument;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Whether the argument is a number that x.div takes as a double without loss.
bool is_number(PyObject* argument, double* value) {
  if (PyFloat_Check(argument)) {
    *value = PyFloat_AS_DOUBLE(argument);
    return true;
  }
  constexpr long long kExact = 1ll << 53;
  if (!PyLong_CheckExact(argument)) return false;
  int overflow;
  const long long integer = PyLong_AsLongLongAndOverflow(argument, &overflow);
  *value = static_cast<double>(integer);
  return overflow == 0 && -kExact <= integer && integer <= kExact;
}

// linear_relu_divide(x, weight, bias, divisor). Says NotImplemented to what linear.py leaves to the
// module's own `linear`: subclasses, proxies, no tensors at all, and divisors that are no numbers;
// and to DTensors that no process could multiply alone.
PyObject* linear_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) {
    PyErr_Format(PyExc_TypeError, "linear_relu_divide() takes 4 arguments, not %zd", count);
    return nullptr;
  }
  double divisor = 0;
  bool is_served = is_number(arguments[3], &divisor);
  bool wants_operator = at::impl::torch_function_mode_enabled();
  for (int i = 0; i < 3; ++i) {
    if (is_plain(arguments[i]) || (i == 2 && arguments[i] == Py_None)) continue;
    // The former stands for a plain tensor while torch traces; of the latter, `fallback_linear`
    // decides.
    const char* const name = Py_TYPE(arguments[i])->tp_name;
    const bool is_known = strcmp(name, "FakeTensor") == 0 || strcmp(name, "DTensor") == 0;
    is_served &= is_known;
    wants_operator |= is_known;
  }
  if (!is_served) Py_RETURN_NOTIMPLEMENTED;
  if (wants_operator) return PyObject_Vectorcall(fallback_linear, arguments, 4, nullptr);
  try {
    const Tensor x = unwrap(arguments[0]), weight = unwrap(arguments[1]);
    const Tensor bias = arguments[2] == Py_None ? Tensor() : unwrap(arguments[2]);
    const LinearInputs in{x, weight, bias, divisor};
    Tensor out;
    without_gil(is_short(in.x) && is_short(in.weight),
                [&] { out = is_dense(in) ? linear_autograd(in) : call_linear_operator(in); });
    return THPVariable_Wrap(std::move(out));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* set_linear_path(PyObject*, PyObject* argument) {
  for (const auto& [name, path] : kPaths) {
    if (PyUnicode_Check(argument) && PyUnicode_CompareWithASCIIString(argument, name) == 0) {
      chosen_path = path;
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

PyObject* set_fallbacks(PyObject*, PyObject* arguments) {
  PyObject *callable, *in_place, *linear, *shards;
  if (!PyArg_ParseTuple(arguments, "OOOO", &callable, &in_place, &linear, &shards)) return nullptr;
  Py_INCREF(callable);
  Py_XSETREF(fallback, callable);
  Py_INCREF(in_place);
  Py_XSETREF(fallback_in_place, in_place);
  Py_INCREF(linear);
  Py_XSETREF(fallback_linear, linear);
  Py_INCREF(shards);
  Py_XSETREF(is_product_of_shards, shards);
  Py_RETURN_NONE;
}

PyObject* is_recorded_entry(PyObject*, PyObject*) { return PyBool_FromLong(is_recorded()); }

PyMethodDef methods[] = {
    {"relu", relu_entry, METH_O, "relu(x): x where x > 0 or x is NaN, else 0. Fresh memory."},
    {"relu_", relu_in_place_entry, METH_O, "relu_(x): relu in place. Returns x."},
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
    {"set_fallbacks", set_fallbacks, METH_VARARGS,
     "set_fallbacks(relu, relu_, linear_relu_divide, is_product_of_shards): what serves "
     "subclasses, proxies and modes."},
    {"is_recorded", is_recorded_entry, METH_NOARGS,
     "is_recorded(): whether torch.jit.trace or make_fx records a graph."},
    {nullptr, nullptr, 0, nullptr}};

#define KERNELS_STRING_(x) #x
#define KERNELS_STRING(x) KERNELS_STRING_(x)
#define KERNELS_NAME KERNELS_STRING(TORCH_EXTENSION_NAME)

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, KERNELS_NAME, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyObject* create_module() {
  if (!find_tensor_offset()) {
    PyErr_SetString(PyExc_ImportError, "torch.Tensor objects of this torch hold no at::Tensor");
    return nullptr;
  }
  try {
    register_operators();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyModule_Create(&module);
}

}  // namespace
}  // namespace kernels

#define KERNELS_INIT_(name) PyInit_##name
#define KERNELS_INIT(name) KERNELS_INIT_(name)
PyMODINIT_FUNC KERNELS_INIT(TORCH_EXTENSION_NAME)() { return kernels::create_module(); }
