// Common to all bindings: torch's dispatcher, autograd and Python. An operator is made of
// these steps; NAME is relu, linear and so on:
//
//   NAME_entry      Python's arguments to tensors, the GIL, C++ errors to Python's
//   NAME_autograd   records what the gradient needs
//   NAME_forward,   checks, allocates and chooses a path; the dispatcher's kernel for CPU and CUDA
//   NAME_backward
//   launch_NAME     one kernel on the GPU's stream, or a loop on the CPU's threads
//
// NAME_meta computes shapes alone, and NAME_composite takes torch's own ops. A step calls the next
// directly for dense tensors; all others take the way through the dispatcher.

#pragma once

#include "binding/torch_declarations.h"
// Python.h comes first, as it demands.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <vector>

#include "binding/tensor.h"

namespace kernels {

using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// ----------------------------------------------------------------------------------- properties

// The keys of a dense tensor on the CPU or a GPU, with no transform and no mode at work. Whoever
// has only these needs no dispatcher below autograd.
constexpr c10::DispatchKeySet kDense({at::DispatchKey::CPU, at::DispatchKey::CUDA,
                                      at::DispatchKey::AutogradCPU, at::DispatchKey::AutogradCUDA,
                                      at::DispatchKey::ADInplaceOrView,
                                      at::DispatchKey::BackendSelect});
constexpr c10::DispatchKeySet kAutocast({at::DispatchKey::AutocastCPU,
                                         at::DispatchKey::AutocastCUDA});

inline bool has_only(c10::DispatchKeySet keys, c10::DispatchKeySet allowed) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return allowed.isSupersetOf((keys | local.included_) - local.excluded_);
}

// For the operators that autocast leaves alone.
inline bool is_dense(const Tensor& x) { return has_only(x.key_set(), kDense | kAutocast); }

inline bool wants_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

inline bool has_tangent(const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// Whether derivatives of what is made of x are due, backward or forward.
inline bool is_tracked(const Tensor& x) { return wants_gradient(x) || has_tangent(x); }

// Whether a transform of torch.func is at work.
inline bool in_functorch() {
  return c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// -------------------------------------------------------------------------------------- Python

// The module of this extension, once it is imported.
inline PyObject* extension = nullptr;

// Calls a function that Python has given to the module: those of the subclasses.py.
inline PyObject* call_python(const char* name, PyObject* const* arguments, size_t count) {
  PyObject* const function = PyObject_GetAttrString(extension, name);
  if (function == nullptr) return nullptr;
  PyObject* const result = PyObject_Vectorcall(function, arguments, count, nullptr);
  Py_DECREF(function);
  return result;
}

// The same with tensors, of which some may be undefined, from C++ that does not hold the GIL: the
// whole number that it returns, and -1 after an error, which is printed.
template <size_t kCount>
long ask_python(const char* name, const Tensor* const (&tensors)[kCount]) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* arguments[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    arguments[i] = tensors[i]->defined() ? THPVariable_Wrap(*tensors[i]) : Py_NewRef(Py_None);
  }
  PyObject* const answer = call_python(name, arguments, kCount);
  const long number = answer == nullptr ? -1 : PyLong_AsLong(answer);
  if (PyErr_Occurred() != nullptr) PyErr_WriteUnraisable(extension);
  for (PyObject* argument : arguments) Py_DECREF(argument);
  Py_XDECREF(answer);
  PyGILState_Release(gil);
  return number;
}

// Whether dimensions have names, which newer versions of torch no longer know.
template <typename T>
auto has_names(const T& x, int) -> decltype(x.has_names()) {
  return x.has_names();
}
template <typename T>
bool has_names(const T&, long) {
  return false;
}

// Whether a tensor is none of torch's special kinds, which its own ops serve.
inline bool is_strided(const Tensor& x) {
  return x.layout() == at::kStrided && !x.is_quantized() && !x.is_nested() && !has_names(x, 0);
}

// Tensors with a Python type of their own. Those that torch traces stand for a dense tensor; a
// DTensor is a shard, and others may store something else too, whose memory order is not that of
// the whole.
enum class Subclass : long { kNone, kTraced, kDTensor, kOther };

inline Subclass subclass_of(const Tensor& x) {
  if (!x.key_set().has(at::DispatchKey::Python)) return Subclass::kNone;
  return static_cast<Subclass>(ask_python("subclass_of", {&x}));
}

// Whether a mode may do something with a call. The one of torch.device and set_default_device, for
// which this is false, changes functions that make tensors.
inline bool has_function_mode() {
  using at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  if (PythonTorchFunctionTLS::stack_len() != 1) return true;
  PyObject* const mode = PythonTorchFunctionTLS::get_stack_at(0)->ptr(getPyInterpreter());
  PyObject* const type = PyObject_GetAttrString(extension, "device_context");
  Py_XDECREF(type);
  return reinterpret_cast<PyObject*>(Py_TYPE(mode)) != type;
}

// So little work that another thread would not get to run in the meantime.
inline bool is_short(const Tensor& x) { return x.is_cpu() && x.numel() < kGrain; }

// Returns to Python what work() returns. Its C++ errors become Python's.
template <typename Work>
PyObject* with_python_errors(const Work& work) {
  try {
    return work();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Runs the work without the GIL, unless it is short.
template <typename Work>
void without_gil(bool is_short, const Work& work) {
  if (is_short) return work();
  struct Released {
    PyThreadState* const thread = PyEval_SaveThread();
    ~Released() noexcept(false) { PyEval_RestoreThread(thread); }  // it may end the thread
  } const released;
  work();
}

// ----------------------------------------------------------------------------------- operators

// The operators' name in graphs and saved programs, whichever build runs them.
#define KERNELS_NAMESPACE "relu_divide_kernels"

using at::DispatchKey;

// An operator to define, unless another build in this process has defined it: the first build's
// then serves all others, whose schemas are the same.
class Operator {
 public:
  // Saved programs hold the schema: one that changes gets another name, or another namespace.
  explicit Operator(const std::string& text) {
    const std::string qualified = KERNELS_NAMESPACE "::" + text;
    c10::FunctionSchema schema = torch::schema(qualified.c_str());
    name_ = schema.name();
    const auto found = c10::Dispatcher::singleton().findSchema({name_, ""});
    is_new_ = !found.has_value();
    if (is_new_) {
      library().def(std::move(schema));
    } else if (found->schema() != schema) {
      fail(
          "expected the operator %s, got another library's of that name: load these kernels in a "
          "process without it",
          qualified.c_str());
    }
  }

  template <typename Function>
  Operator& impl(DispatchKey key, Function* function) {
    if (is_new_) library().impl(name_.c_str(), torch::dispatch(key, function));
    return *this;
  }

  // The step that serves dense tensors, on a CPU and a GPU.
  template <typename Function>
  Operator& dense(Function* function) {
    return impl(DispatchKey::CPU, function).impl(DispatchKey::CUDA, function);
  }

 private:
  static torch::Library& library() {
    static torch::Library library(torch::Library::FRAGMENT, KERNELS_NAMESPACE, std::nullopt,
                                  __FILE__, __LINE__);
    return library;
  }
  std::string name_;
  bool is_new_;
};

// Calls an operator from the top, autograd included. Function is the type of its kernels.
template <typename Function, typename... Arguments>
auto call_operator(const char* name, const Arguments&... arguments) {
  const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  return found.template typed<Function>().call(arguments...);
}

// A problem's functions for Python, which a null one ends, and what defines its operators.
struct Problem {
  PyMethodDef* methods;
  void (*define_operators)();
};

// The problems in this build. Each adds itself by a static variable; module.cpp imports them.
inline std::vector<Problem> problems;
inline bool add_problem(PyMethodDef* methods, void (*define_operators)()) {
  problems.push_back({methods, define_operators});
  return true;
}

// ------------------------------------------------------------------------------------ autograd

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
// A std::shared_ptr up to torch 2.12, a c10::intrusive_ptr from 2.13 on.
using NodePointer = decltype(torch::autograd::Edge::function);

// A node whose gradients go where those of the inputs do.
template <typename T, typename... Inputs>
auto make_node(const Inputs&... inputs) {
  const auto node = [] {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
      return std::shared_ptr<T>(new T, [](auto* node) { deleteNode(node); });
    } else {
      return c10::make_intrusive<T>();
    }
  }();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

// A mask that was saved. Hooks may give it back in another dtype or layout.
inline Tensor unpack_mask(const SavedVariable& saved) {
  const Tensor mask = saved.unpack();
  return mask.scalar_type() == at::kByte ? mask.contiguous() : mask.to(at::kByte).contiguous();
}

// A mask's bits as elements, [bytes] to [bytes, 8], 0 or 1.
inline Tensor bits_of(const Tensor& mask) {
  const Tensor places = at::arange(8, mask.options());
  return mask.unsqueeze(-1).bitwise_right_shift(places).bitwise_and(1);
}

}  // namespace kernels
