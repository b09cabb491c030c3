// The gate of Linear -> ReLU -> divide: which calls our kernels compute (docs/DESIGN.md, "What the
// gates let through"). Calls that are traced record our operator. All others run the reference's
// own ops, so that their results and errors are the reference's.

#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>

#include "linear/operator/operands.h"
#include "torch_support/operators.h"

namespace kernels {

// Who computes a call.
enum class GateAnswer {
  kKernels,
  // torch.compile, make_fx or a user's TorchDispatchMode gets our operator. Under the first two,
  // the tensors are fake ones or proxies.
  kTracing,
  kReference,
};

template <typename Predicate>
bool any_operand(const LinearInputs& inputs, const Predicate& predicate) {
  return predicate(inputs.x) || predicate(inputs.weight) ||
         (inputs.bias && predicate(*inputs.bias));
}

template <typename Predicate>
bool all_operands(const LinearInputs& inputs, const Predicate& predicate) {
  return predicate(inputs.x) && predicate(inputs.weight) &&
         (!inputs.bias || predicate(*inputs.bias));
}

inline c10::DispatchKeySet keys_of(const LinearInputs& inputs) {
  c10::DispatchKeySet keys = inputs.x.key_set() | inputs.weight.key_set();
  if (inputs.bias) keys = keys | inputs.bias->key_set();
  return keys;
}

// Returns true if the divisor and its reciprocal are normal floats; false for 0, infinity and NaN.
// With other divisors our results could be 0 or infinite where torch's are NaN, because our kernels
// divide, but torch multiplies by the reciprocal on a GPU. In torch, 0 / 1e-39 is NaN, not 0,
// because the reciprocal is infinite as a float. In torch 2.9, inf / 1e39 is NaN, not infinity,
// because the reciprocal is computed in float and is 0; 2.10 computes it in double.
inline bool has_normal_reciprocal(double divisor) {
  const double magnitude = std::abs(divisor);
  return magnitude >= 0x1p-126 && magnitude <= 0x1p126;
}

// Returns whether our kernels support the operands' layouts, dtypes, devices and dimensions, and
// the divisor, and whether no operand has a tangent. Sizes are not looked at, because in a trace
// they may be symbols.
inline bool is_supported_except_sizes(const LinearInputs& inputs) {
  const auto is_supported = [&](const Tensor& t) {
    const bool is_dense = t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized();
    const bool is_like_x =
        t.scalar_type() == inputs.x.scalar_type() && t.device() == inputs.x.device();
    return is_dense && is_like_x && !has_tangent(t);
  };
  if (!all_operands(inputs, is_supported)) return false;
  if (!kernel_dtype(inputs.x.scalar_type()).has_value()) return false;
  const bool has_right_dimensions =
      inputs.x.dim() > 0 && inputs.weight.dim() == 2 && (!inputs.bias || inputs.bias->dim() == 1);
  return has_right_dimensions && has_normal_reciprocal(inputs.divisor);
}

inline bool has_matching_sizes(const LinearInputs& inputs) {
  const bool matches_bias = !inputs.bias || inputs.bias->size(0) == inputs.weight.size(0);
  return inputs.x.size(-1) == inputs.weight.size(1) && matches_bias;
}

inline bool is_empty(const LinearInputs& inputs) {
  return inputs.x.numel() == 0 || inputs.weight.numel() == 0;
}

inline GateAnswer ask_gate(const LinearInputs& inputs) {
  if (!is_supported_except_sizes(inputs)) return GateAnswer::kReference;
  const c10::DispatchKeySet keys = keys_of(inputs);
  if (is_plain(keys)) {
    const bool is_supported = has_matching_sizes(inputs) && !is_empty(inputs);
    return is_supported ? GateAnswer::kKernels : GateAnswer::kReference;
  }
  const c10::DispatchKeySet modes = c10::impl::tls_local_dispatch_key_set().included_;
  // Fake and proxy tensors, and their modes, have the key Python. Within torch.func's transforms
  // the reference's ops run, because these can be batched and differentiated in every way.
  const bool is_python_tensor_or_mode = (keys | modes).has(DispatchKey::Python);
  const bool is_in_functorch_transform = modes.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
  const bool is_tracing = is_python_tensor_or_mode && !is_in_functorch_transform;
  return is_tracing ? GateAnswer::kTracing : GateAnswer::kReference;
}

}  // namespace kernels
