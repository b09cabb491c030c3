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

inline bool wants_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

// Whether forward-mode AD is due.
inline bool has_tangent(const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// The operators' name in graphs and saved programs, whichever build runs them.
#define KERNELS_NAMESPACE "relu_divide_kernels"

// An operator to define, unless another build in this process has defined it: the first build's
// then serves all others. Saved programs hold the schema: one that changes gets another name.
class Operator {
 public:
  explicit Operator(const std::string& text) {
    c10::FunctionSchema schema = torch::schema((KERNELS_NAMESPACE "::" + text).c_str());
    name_ = schema.name();
    is_new_ = !c10::Dispatcher::singleton().findSchema({name_, ""}).has_value();
    if (is_new_) library().def(std::move(schema));
  }

  template <typename Function>
  Operator& impl(DispatchKey key, Function* function) {
    if (is_new_) library().impl(name_.c_str(), torch::dispatch(key, function));
    return *this;
  }

  // The kernel for a CPU and a GPU.
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
