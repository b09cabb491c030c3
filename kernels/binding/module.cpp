// The Python module: the functions and operators of the problems that this build holds.

#include "binding/dispatch.h"

namespace kernels {
namespace {

#define KERNELS_STRING_(x) #x
#define KERNELS_STRING(x) KERNELS_STRING_(x)
PyModuleDef definition{PyModuleDef_HEAD_INIT,
                       KERNELS_STRING(TORCH_EXTENSION_NAME),
                       nullptr,
                       -1,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

PyObject* create_module() {
  if (!has_known_layout()) {
    PyErr_SetString(PyExc_ImportError, "this torch's Tensor objects are not as expected");
    return nullptr;
  }
  return with_python_errors([] {
    extension = PyModule_Create(&definition);
    for (const Problem& problem : problems()) {
      problem.define_operators();
      if (extension != nullptr && PyModule_AddFunctions(extension, problem.methods) != 0) {
        Py_CLEAR(extension);
      }
    }
    return Py_XNewRef(extension);
  });
}

}  // namespace
}  // namespace kernels

#define KERNELS_INIT_(name) PyInit_##name
#define KERNELS_INIT(name) KERNELS_INIT_(name)
PyMODINIT_FUNC KERNELS_INIT(TORCH_EXTENSION_NAME)() { return kernels::create_module(); }
