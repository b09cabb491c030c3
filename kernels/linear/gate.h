// The gate of Linear -> ReLU -> divide: which calls our kernels compute.
//
// The kernels need ordinary dense tensors of one floating dtype on one device, of non-empty sizes
// that fit together. They support backward(), but neither forward-mode AD nor torch.func. Every
// other call runs the reference's own ops, so its result or error is the reference's.

#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>

#include "linear/operands.h"
#include "torch_support/operators.h"

namespace kernels {

enum class Route {
  kKernels,    // our kernels compute the call
  kTracing,    // torch.compile or make_fx records an operator; the tensors are fake or proxies
  kReference,  // the reference's own ops compute the call
};

template <typename Predicate>
bool any_operand(const LinearInputs& in, const Predicate& predicate) {
  return predicate(in.x) || predicate(in.weight) || (in.bias && predicate(*in.bias));
}

// Returns the dispatch keys of all operands together.
inline c10::DispatchKeySet keys_of(const LinearInputs& in) {
  c10::DispatchKeySet keys = in.x.key_set() | in.weight.key_set();
  if (in.bias) keys = keys | in.bias->key_set();
  return keys;
}

// Returns true if the divisor and its reciprocal are normal floats; false for 0, infinity and NaN.
//
// Other divisors are left to the reference's ops, because our kernels divide. On a GPU torch does
// not: it multiplies by the reciprocal, a float, which torch 2.9 computes in float, and 2.10 and
// newer in double. So 0 / 1e-39 is NaN in torch, not 0, because the reciprocal is infinite. In
// torch 2.9 inf / 1e39 is NaN, not infinity, because the reciprocal is 0.
inline bool has_normal_reciprocal(double divisor) {
  const double magnitude = std::abs(divisor);
  return magnitude >= 0x1p-126 && magnitude <= 0x1p126;
}

// Returns true if our kernels support everything but the sizes. It reads no sizes because they may
// be symbols in a trace.
inline bool has_supported_kinds(const LinearInputs& in) {
  const auto is_unsupported = [&](const Tensor& t) {
    const bool is_dense = t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized();
    const bool is_like_x = t.scalar_type() == in.x.scalar_type() && t.device() == in.x.device();
    return !is_dense || !is_like_x || has_tangent(t);
  };
  if (any_operand(in, is_unsupported)) return false;
  if (!kernel_dtype(in.x.scalar_type()).has_value()) return false;
  const bool has_right_dimensions =
      in.x.dim() > 0 && in.weight.dim() == 2 && (!in.bias || in.bias->dim() == 1);
  return has_right_dimensions && has_normal_reciprocal(in.divisor);
}

// Returns true if K of x and weight, and N of weight and bias, are equal.
inline bool has_matching_sizes(const LinearInputs& in) {
  const bool matches_bias = !in.bias || in.bias->size(0) == in.weight.size(0);
  return in.x.size(-1) == in.weight.size(1) && matches_bias;
}

inline bool is_empty(const LinearInputs& in) { return in.x.numel() == 0 || in.weight.numel() == 0; }

// Decides who computes a call.
inline Route route_of(const LinearInputs& in) {
  if (!has_supported_kinds(in)) return Route::kReference;
  const c10::DispatchKeySet keys = keys_of(in);
  if (is_plain(keys)) {
    const bool is_supported = has_matching_sizes(in) && !is_empty(in);
    return is_supported ? Route::kKernels : Route::kReference;
  }
  const c10::DispatchKeySet modes = c10::impl::tls_local_dispatch_key_set().included_;
  // Fake and proxy tensors, and their modes, have the key Python. Within torch.func's transforms
  // the reference's ops run, because these can be batched and differentiated in every way.
  const bool is_python_tensor_or_mode = (keys | modes).has(DispatchKey::Python);
  const bool is_in_functorch_transform = modes.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
  const bool is_tracing = is_python_tensor_or_mode && !is_in_functorch_transform;
  return is_tracing ? Route::kTracing : Route::kReference;
}

}  // namespace kernels
