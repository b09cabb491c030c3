// Declarations copied from torch's public headers torch/csrc/autograd/python_variable.h,
// torch/csrc/Exceptions.h and ATen/autocast_mode.h, as far as the binding uses them.
//
// The first two include pybind11, the last all of ATen: GCC would take 4 s and 2 s more than the 9
// of all the rest. This is the only copy of torch's declarations. A torch without one of these
// symbols, or with an object of another size, makes the import fail at once.

#pragma once

#include <Python.h>
// Python.h comes first, as it demands.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/PyObjectSlot.h>
#include <c10/util/MaybeOwned.h>
#include <torch/version.h>

#include <exception>
#include <type_traits>
#include <utility>

extern PyObject* THPVariableClass;  // torch.Tensor
extern PyObject* ParameterClass;    // torch.nn.Parameter
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11  // seen there, not looked for before
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);
#endif
namespace at::autocast {
ScalarType get_autocast_dtype(DeviceType device_type);
Tensor cached_cast(ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace kernels {

// The content of a torch.Tensor. In torch 2.9 either of the tensor and its Python object may own
// the other; later versions have removed this, and PyObjectSlot's note of who owns whom.
template <typename Slot, typename = void>
struct TensorPayload {
  using Type = at::Tensor;
  static const at::Tensor& get(const Type& tensor) { return tensor; }
};
template <typename Slot>
struct TensorPayload<Slot, std::void_t<decltype(std::declval<Slot&>().owns_pyobj())>> {
  using Type = c10::MaybeOwned<at::Tensor>;
  static const at::Tensor& get(const Type& tensor) { return *tensor; }
};
using Payload = TensorPayload<c10::impl::PyObjectSlot>;

struct TensorObject {  // torch's THPVariable
  PyObject_HEAD;
  Payload::Type tensor;
  PyObject* backward_hooks;
  PyObject* post_accumulate_grad_hooks;
};

// torch's THPVariable_Unpack: the tensor of a torch.Tensor, or of a subclass.
inline const at::Tensor& unpack(PyObject* object) {
  return Payload::get(reinterpret_cast<TensorObject*>(object)->tensor);
}

// Whether torch.Tensor objects are as declared here.
inline bool has_known_layout() {
  const PyTypeObject* const base = reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base;
  return base->tp_basicsize == sizeof(TensorObject);
}

// torch's THPVariable_CheckExact: whether this is a torch.Tensor or a Parameter, and no subclass.
inline bool is_plain(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  return type == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         type == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

}  // namespace kernels
