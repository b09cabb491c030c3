// GELU for torch: the operator gelu(x). Our kernels compute contiguous float32 tensors without
// gradients, and torch's own op computes everything else.

#include <ATen/ops/gelu.h>

#include "gelu/launchers.h"
#include "torch_support/elementwise.h"
#include "torch_support/operators.h"

namespace kernels {
namespace {

Tensor gelu_composite(const Tensor& x) { return at::gelu(x); }

Tensor gelu_forward(const Tensor& x) {
  if (!is_plain(x.key_set()) || x.scalar_type() != at::kFloat || x.numel() == 0 ||
      !x.is_contiguous() || has_tangent(x)) {
    return gelu_composite(x);
  }
  const DeviceGuard guard(x);
  const Tensor out = allocate_like(x);
  const float* const from = x.const_data_ptr<float>();
  float* const to = out.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  run_on_device(
      x, [=](auto stream) { return cuda::gelu(from, to, n, stream); },
      [&] {
        for_each_range(out,
                       [=](int64_t begin, int64_t end, bool) { cpu::gelu(from, to, begin, end); });
      });
  return out;
}

Tensor gelu_autograd(const Tensor& x) {
  return needs_gradient(x) ? gelu_composite(x) : gelu_forward(x);
}

[[maybe_unused]] const auto gelu_operator =
    Operator("gelu(Tensor input) -> Tensor")
        .impl_dense(gelu_forward)
        .impl(DispatchKey::Autograd, gelu_autograd)
        .impl(DispatchKey::CompositeExplicitAutograd, gelu_composite);

}  // namespace
}  // namespace kernels
