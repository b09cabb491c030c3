// Common to all bindings: torch's dispatcher and autograd.
//
// An operator NAME has these kernels:
//
//   NAME_autograd   the gate, and autograd's record of what the gradient needs
//   NAME_forward    the gate, for calls below autograd, as in inference mode
//   NAME_composite  the reference's own ops, for what the gate does not pass

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>
#include <string>

#include "torch_support/tensor.h"

namespace kernels {

using at::DispatchKey;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Whether nothing but a dense tensor's own keys is at work: no subclass, mode, transform or trace,
// no sparse, quantized, nested, named, conjugated or lazy tensor. `keys` are those of all operands.
inline bool is_plain(c10::DispatchKeySet keys) {
  constexpr c10::DispatchKeySet kPlain({DispatchKey::CPU, DispatchKey::CUDA,
                                        DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                        DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect,
                                        DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return kPlain.isSupersetOf((keys | local.included_) - local.excluded_);
}

// Whether some operand is a batch under torch.func.vmap, or under the older vmap of
// torch.autograd.grad(is_grads_batched=True) and of jacobian(vectorize=True).
inline bool is_batched(c10::DispatchKeySet keys) {
  return keys.has(DispatchKey::FuncTorchBatched) || keys.has(DispatchKey::Batched);
}

inline bool wants_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

// Whether forward-mode AD is due.
inline bool has_tangent(const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// Every operator has two names:
//
//   <own namespace>::NAME       this build's operator, always. Eager calls and torch.compile use
//   it,
//                               so two versions of the project in one process never mix.
//   relu_divide_kernels::NAME   the stable name, for programs that torch.export or torch.jit.trace
//                               saved. If another build in this process has defined it already,
//                               that build's operator stays, and this build leaves the name alone.
//
// The build passes its own namespace as an identifier:
// -DKERNELS_NAMESPACE=relu_divide_kernels_1f3a. Without the macro the own namespace is the stable
// one.
#ifndef KERNELS_NAMESPACE
#define KERNELS_NAMESPACE relu_divide_kernels
#endif
#define KERNELS_STRINGIFY_EXPANDED(identifier) #identifier
#define KERNELS_STRINGIFY(identifier) KERNELS_STRINGIFY_EXPANDED(identifier)

enum class Namespace { kOwn, kStable };

inline std::string namespace_name(Namespace where) {
  if (where == Namespace::kOwn) return KERNELS_STRINGIFY(KERNELS_NAMESPACE);
  return "relu_divide_kernels";
}

// Defines one operator in both namespaces when the library is loaded:
//
//   const auto relu = Operator("relu(Tensor input) -> Tensor").dense(relu_forward);
//
// A name that is defined already is left alone: another build defined it in the stable namespace,
// or both namespaces are one. Saved programs hold the schema, so a schema that changes needs a new
// name.
class Operator {
 public:
  explicit Operator(const std::string& signature) {
    for (const Namespace where : {Namespace::kOwn, Namespace::kStable}) {
      c10::FunctionSchema schema =
          torch::schema((namespace_name(where) + "::" + signature).c_str());
      const c10::OperatorName name(schema.name(), "");
      const bool is_new = !c10::Dispatcher::singleton().findSchema(name).has_value();
      Definition& definition = definition_in(where);
      definition = {name.name, is_new};
      if (is_new) library_of(where).def(std::move(schema));
    }
  }

  // Registers the operator's kernel for a dispatch key, in both namespaces.
  template <typename Function>
  Operator& impl(DispatchKey key, Function* function) {
    return impl(Namespace::kOwn, key, function).impl(Namespace::kStable, key, function);
  }

  // Registers a kernel in one namespace. A kernel that calls another operator needs this: it must
  // call the one of the namespace in which it was called itself.
  template <typename Function>
  Operator& impl(Namespace where, DispatchKey key, Function* function) {
    const Definition& definition = definition_in(where);
    if (definition.is_new) {
      library_of(where).impl(definition.name.c_str(), torch::dispatch(key, function));
    }
    return *this;
  }

  // Registers the kernel for dense tensors on a CPU or a GPU, in both namespaces.
  template <typename Function>
  Operator& dense(Function* function) {
    return impl(DispatchKey::CPU, function).impl(DispatchKey::CUDA, function);
  }

 private:
  struct Definition {
    std::string name;  // with the namespace
    bool is_new;       // whether this build defined it
  };

  Definition& definition_in(Namespace where) { return where == Namespace::kOwn ? own_ : stable_; }

  // The registrations live as long as these objects. They are this library's own only because
  // -fvisibility=hidden keeps the loader from sharing an inline function's static variables between
  // two builds.
  static torch::Library& library_of(Namespace where) {
    static torch::Library own(torch::Library::FRAGMENT, namespace_name(Namespace::kOwn),
                              std::nullopt, __FILE__, __LINE__);
    static torch::Library stable(torch::Library::FRAGMENT, namespace_name(Namespace::kStable),
                                 std::nullopt, __FILE__, __LINE__);
    return where == Namespace::kOwn ? own : stable;
  }

  Definition own_, stable_;
};

// A node whose gradients go where those of the inputs do. Nodes are held by std::shared_ptr up to
// torch 2.12, by c10::intrusive_ptr from 2.13 on.
template <typename T, typename... Inputs>
auto make_node(const Inputs&... inputs) {
  using Pointer = decltype(torch::autograd::Edge::function);
  const auto node = [] {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
      return std::shared_ptr<T>(new T, [](auto* node) { deleteNode(node); });
    } else {
      return c10::make_intrusive<T>();
    }
  }();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

// A mask that was saved. Hooks may give it back in another dtype or layout.
inline Tensor unpack_saved_mask(const SavedVariable& saved) {
  const Tensor mask = saved.unpack();
  return mask.scalar_type() == at::kByte ? mask.contiguous() : mask.to(at::kByte).contiguous();
}

}  // namespace kernels
