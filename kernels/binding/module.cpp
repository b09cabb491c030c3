// The Python module: the functions and operators of the problems that this build holds.
//
// Where no kernel of ours serves, torch's own op does, and only these places say so:
//   - relu_forward: a dtype without a kernel, for which torch raises its error
//   - relu_autograd: sparse, nested, quantized and mkldnn tensors, forward-mode AD, torch.func
//   - relu_in_place: all of these, and everything else that is not plainly dense
//   - is_left_to_torch and linear_autograd: the same for linear_relu_divide
//   - is_regular: arguments that do not fit, empty results, and on a GPU some divisors
//   - choose_path: products on a GPU. On a CPU the product is always torch's.
//   - multiply: the products of the gradients
//   - ReluBackward and LinearReluDivideBackward: gradients that are differentiated again
//   - relu_entry and model_new.py: ReLU in graphs, and the product in TorchScript
//   - linear/modules.py: a module's `linear` that is more than an nn.Linear
//   - subclasses.py: tensor subclasses, and products of DTensors that are sums over processes
//   - the definitions of operators: other devices, meta tensors (shapes only), vmap

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
