// The forward of Linear -> ReLU -> divide: out [..., N] = relu(x weight^T + bias) / divisor. There
// are three ways to compute it:
//
//   - a GEMM kernel that has everything in its epilogue (run_gemm.h)
//   - torch's product, followed by the fused pass in place
//   - the reference's own ops, for calls that the gate does not let through

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>

#include <string>
#include <tuple>

#include "common/sizes.h"
#include "linear/operator/gate.h"
#include "linear/operator/run_gemm.h"

namespace kernels {

using TwoTensors = std::tuple<Tensor, Tensor>;

inline Tensor linear_by_torch(const LinearInputs& inputs) {
  return at::linear(inputs.x, inputs.weight, inputs.bias).relu().div(inputs.divisor);
}

// Writes the mask [..., (N + 7) / 8] unless it is undefined.
inline void run_fused_pass(const Tensor& out, double divisor, const Tensor& mask) {
  // Rows matter only to a mask whose rows end with unused bits. Otherwise the kernels get the
  // matrix as one long row, and need no division to find the row of an element.
  const bool is_one_row = !mask.defined() || out.size(-1) % 8 == 0;
  FusedPassArguments call{};
  call.dtype = *kernel_dtype(out.scalar_type());
  call.divisor = divisor;
  call.m = is_one_row ? 1 : rows_of(out);
  call.n = is_one_row ? out.numel() : out.size(-1);
  call.out = out.mutable_data_ptr();
  call.mask = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  const auto run_on_gpu = [&](auto stream) { return cuda::linear_fused_pass(call, stream); };
  const auto run_on_cpu = [&] {
    const int64_t mask_bytes = call.m * bytes_of_bits(call.n);
    at::parallel_for(0, mask_bytes, kGrain / 8,
                     [&](int64_t begin, int64_t end) { cpu::linear_fused_pass(call, begin, end); });
  };
  run_on_device(out, run_on_gpu, run_on_cpu);
}

// Returns the output, and writes the mask unless it is undefined. The inputs are supported and
// their sizes match (gate.h). They may be empty.
inline Tensor compute_linear(const LinearInputs& inputs, const Tensor& mask) {
  const DeviceGuard guard(inputs.x);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor x = as_matrix(inputs.x);
  if (!is_empty(inputs)) {
    const Tensor out =
        run_gemm({x, inputs.weight, inputs.bias, inputs.divisor}, /*is_forward=*/true, mask);
    if (out.defined() && inputs.x.dim() == 2) return out;
    if (out.defined()) return out.view(with_last(inputs.x.sizes(), inputs.weight.size(0)));
  }
  const Tensor out = at::linear(inputs.x, inputs.weight, inputs.bias).contiguous();
  if (out.numel() > 0) run_fused_pass(out, inputs.divisor, mask);
  return out;
}

// linear_relu_divide for a call that skips autograd.
inline Tensor linear_without_autograd(const LinearInputs& inputs) {
  if (ask_gate(inputs) != GateAnswer::kKernels) return linear_by_torch(inputs);
  return compute_linear(inputs, /*mask=*/Tensor());
}

inline TwoTensors linear_with_mask_without_autograd(const LinearInputs& inputs) {
  if (!is_supported_except_sizes(inputs) || !has_matching_sizes(inputs)) {
    fail(
        "linear_relu_divide_with_mask: expected dense floating tensors that fit together, and a "
        "divisor that is a normal float and has a normal reciprocal, got input " +
        describe(inputs.x) + ", weight " + describe(inputs.weight) + ", bias " +
        describe(inputs.bias) + ", divisor " + std::to_string(inputs.divisor));
  }
  const DeviceGuard guard(inputs.x);
  const int64_t row_bytes = bytes_of_bits(inputs.weight.size(0));
  const Tensor mask = allocate(inputs.x, with_last(inputs.x.sizes(), row_bytes), at::kByte);
  const Tensor out = compute_linear(inputs, mask);
  return {out, mask};
}

// linear_relu_divide_with_mask for tensors without memory, whose sizes may be symbols.
inline TwoTensors linear_with_mask_meta(const LinearInputs& inputs) {
  const Tensor out = linear_by_torch(inputs);
  const c10::SymInt row_bytes = bytes_of_bits(inputs.weight.sym_size(0));
  const at::TensorOptions options = out.options().dtype(at::kByte);
  const Tensor mask = at::empty_symint(with_last(inputs.x.sym_sizes(), row_bytes), options);
  return {out, mask};
}

}  // namespace kernels
