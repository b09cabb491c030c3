// The Python module: the functions and operators of the problems that this build holds.

#include "binding/dispatch.h"

namespace kernels {
namespace {

PyObject* create_module() {
  if (!has_known_layout()) {
    PyErr_SetString(PyExc_ImportError, "this torch's Tensor objects are not as expected");
    return nullptr;
  }
  static PyModuleDef definition{};
  definition.m_base = PyModuleDef_HEAD_INIT;
  definition.m_name = C10_STRINGIZE(TORCH_EXTENSION_NAME);
  definition.m_size = -1;
  return with_python_errors([] {
    extension = PyModule_Create(&definition);
    for (const Problem& problem : problems) {
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

PyMODINIT_FUNC C10_CONCATENATE(PyInit_, TORCH_EXTENSION_NAME)() { return kernels::create_module(); }
