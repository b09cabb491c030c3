// Helpers for torch's dispatcher and for autograd.
//
// An operator NAME has several functions. The dispatcher picks one by the dispatch keys of a call:
//
//   NAME_autograd           an ordinary call: computes the forward, and records what the backward
//                           needs
//   NAME_without_autograd   a call that skips autograd, as in inference mode
//   NAME_by_torch           the reference's own torch ops. If our kernels do not support the
//                           operands of relu or linear_relu_divide, the functions above call it.
//
// Every operator that a program may contain is registered under two names:
//
//   <own namespace>::NAME       this build's operator. Eager calls and torch.compile use it, so two
//                               versions of the project in one process never mix.
//   relu_divide_kernels::NAME   the stable name, for programs that torch.export or torch.jit.trace
//                               saved, whichever build runs them. In a process with several builds
//                               it is the operator of the build that was loaded first.
//
// The compiler gets the own namespace as a macro, such as
// -DKERNELS_NAMESPACE=relu_divide_kernels_1f3a. Without the macro the two names are one.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "torch_support/tensor.h"

namespace kernels {

using at::DispatchKey;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// ------------------------------------------------------------------------------ the kind of a call

// Returns true if all operands are ordinary dense tensors and the thread is in no special mode.
// `keys` are the dispatch keys of all operands together. Subclasses and sparse, quantized, nested,
// named, conjugated and lazy tensors are not ordinary. Special modes are Python's dispatch modes,
// torch.func's transforms and traces.
inline bool is_plain(c10::DispatchKeySet keys) {
  constexpr c10::DispatchKeySet kPlain({DispatchKey::CPU, DispatchKey::CUDA,
                                        DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                        DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect,
                                        DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  return kPlain.isSupersetOf((keys | local.included_) - local.excluded_);
}

// Returns true if an operand is a batch of tensors under torch.func.vmap, or under the older vmap
// of torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True).
inline bool is_batched(c10::DispatchKeySet keys) {
  return keys.has(DispatchKey::FuncTorchBatched) || keys.has(DispatchKey::Batched);
}

inline bool needs_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

// Returns true if x has a tangent, that is, if forward-mode AD is on for x.
inline bool has_tangent(const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// ------------------------------------------------------------------------------------- namespaces

#ifndef KERNELS_NAMESPACE
#define KERNELS_NAMESPACE relu_divide_kernels
#endif
// Two macros, because # does not expand its argument: KERNELS_STRINGIFY expands it first.
#define KERNELS_STRINGIFY_EXPANDED(identifier) #identifier
#define KERNELS_STRINGIFY(identifier) KERNELS_STRINGIFY_EXPANDED(identifier)

enum class Namespace {
  kOwn,
  kStable,
};

inline std::string namespace_name(Namespace name_space) {
  if (name_space == Namespace::kOwn) return KERNELS_STRINGIFY(KERNELS_NAMESPACE);
  return "relu_divide_kernels";
}

// Defines one operator in both namespaces when the library is loaded:
//
//   const auto relu =
//       Operator("relu(Tensor input) -> Tensor").impl_dense(relu_without_autograd);
//
// A namespace that has the operator already keeps it, and nothing is registered there. Saved
// programs rely on the stable operator's schema, so a changed schema needs a new name.
class Operator {
 public:
  explicit Operator(const std::string& signature)
      : own_(define(Namespace::kOwn, signature)), stable_(define(Namespace::kStable, signature)) {}

  template <typename Function>
  Operator& impl(DispatchKey key, Function* function) {
    return impl(key, function, function);
  }

  // Registers one function in the own namespace and another in the stable namespace, for functions
  // that call further operators: each calls those of the namespace that it is registered in.
  template <typename Function>
  Operator& impl(DispatchKey key, Function* own_function, Function* stable_function) {
    register_function(Namespace::kOwn, own_, key, own_function);
    register_function(Namespace::kStable, stable_, key, stable_function);
    return *this;
  }

  template <typename Function>
  Operator& impl_own(DispatchKey key, Function* function) {
    register_function(Namespace::kOwn, own_, key, function);
    return *this;
  }

  template <typename Function>
  Operator& impl_dense(Function* function) {
    return impl(DispatchKey::CPU, function).impl(DispatchKey::CUDA, function);
  }

 private:
  struct Definition {
    std::string full_name;
    bool is_new;  // this object defined it
  };

  static Definition define(Namespace name_space, const std::string& signature) {
    const std::string full_signature = namespace_name(name_space) + "::" + signature;
    c10::FunctionSchema schema = torch::schema(full_signature.c_str());
    const c10::OperatorName name = schema.operator_name();
    const bool is_new = !c10::Dispatcher::singleton().findSchema(name).has_value();
    if (is_new) library_of(name_space).def(std::move(schema));
    return {name.name, is_new};
  }

  template <typename Function>
  static void register_function(Namespace name_space, const Definition& definition, DispatchKey key,
                                Function* function) {
    if (!definition.is_new) return;
    library_of(name_space).impl(definition.full_name.c_str(), torch::dispatch(key, function));
  }

  // Returns the object that holds a namespace's registrations until the process ends. Builds are
  // compiled with -fvisibility=hidden, so that two builds in one process do not share these static
  // variables. If exported, they would be STB_GNU_UNIQUE symbols, of which the loader keeps one for
  // the whole process.
  static torch::Library& library_of(Namespace name_space) {
    static torch::Library own = fragment(Namespace::kOwn);
    static torch::Library stable = fragment(Namespace::kStable);
    return name_space == Namespace::kOwn ? own : stable;
  }

  // Several libraries may each define a fragment of one namespace.
  static torch::Library fragment(Namespace name_space) {
    return torch::Library(torch::Library::FRAGMENT, namespace_name(name_space),
                          /*k=*/std::nullopt, __FILE__, __LINE__);
  }

  Definition own_;
  Definition stable_;
};

// Calls an operator through the dispatcher, as Python would. Function is the operator's type in
// C++, such as Tensor(const Tensor&).
template <typename Function, typename... Arguments>
auto call_operator(Namespace name_space, const std::string& name, const Arguments&... arguments) {
  const std::string full_name = namespace_name(name_space) + "::" + name;
  const c10::OperatorHandle found =
      c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), /*overload_name=*/"");
  return found.typed<Function>().call(arguments...);
}

// --------------------------------------------------------------------------------------- autograd

// Makes an autograd node of type T, which returns the inputs' gradients in their order. torch holds
// nodes by std::shared_ptr up to version 2.12, and by c10::intrusive_ptr from 2.13 on.
template <typename T, typename... Inputs>
auto make_node(const Inputs&... inputs) {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    std::shared_ptr<T> node(new T, [](T* deleted) { deleteNode(deleted); });
    node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
    return node;
  } else {
    auto node = c10::make_intrusive<T>();
    node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
    return node;
  }
}

// Returns a saved mask as contiguous bytes. Saved-tensor hooks may return it in another dtype or
// layout.
inline Tensor unpack_saved_mask(const SavedVariable& saved) {
  const Tensor mask = saved.unpack();
  if (mask.scalar_type() == at::kByte) return mask.contiguous();
  return mask.to(at::kByte).contiguous();
}

}  // namespace kernels
