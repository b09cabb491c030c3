// The backward of Linear -> ReLU -> divide. z = x weight^T + bias [..., N] is the ReLU's input, and
// the mask of the forward has one bit for each element of z.
//
//   grad_z      = mask bit ? grad_output / divisor : 0     [..., N]
//   grad_x      = grad_z weight                            [..., K]
//   grad_weight = grad_z^T x                               [N, K]
//   grad_bias   = the sum of grad_z over its rows          [N]
//
// compute_gradients is for ordinary calls: the fused pass computes grad_z and grad_bias, and a GEMM
// kernel or torch then computes each of the two products. gradients_by_torch calls torch's ops
// alone: where the gradients themselves are differentiated, under vmap, for tensors without memory,
// and for empty ones.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "common/sizes.h"
#include "linear/operator/forward.h"
#include "linear/operator/run_gemm.h"
#include "torch_support/operators.h"

namespace kernels {

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// The gradients of x and weight are each a product A B of matrices. If a flag is set and torch
// multiplies, it computes (B^T A^T)^T instead. autograd.h sets the flags where the reference's own
// backward does the same. On a CPU, the wrong one of these two forms may take ten times as long.
struct Transposes {
  bool grad_x = false;
  bool grad_weight = false;
};

struct NeededGradients {
  bool x, weight, bias;
};

// The operands of the backward. The struct only refers to the tensors.
struct BackwardInputs {
  const Tensor& grad_output;            // [..., N]
  const Tensor& mask;                   // [..., (N + 7) / 8], uint8
  const std::optional<Tensor>& x;       // [..., K]; present if needed.weight
  const std::optional<Tensor>& weight;  // [N, K]; present if needed.x
  NeededGradients needed;
  double divisor;

  Transposes transposes = {};
};

// Undefined tensors stand for gradients that are not needed, here and in GradZAndBias.
struct Gradients {
  Tensor x, weight, bias;
};

struct GradZAndBias {
  Tensor z, bias;
};

inline c10::DispatchKeySet keys_of(const BackwardInputs& inputs) {
  c10::DispatchKeySet keys = inputs.grad_output.key_set() | inputs.mask.key_set();
  if (inputs.x) keys = keys | inputs.x->key_set();
  if (inputs.weight) keys = keys | inputs.weight->key_set();
  return keys;
}

inline void run_fused_pass_backward_on_cpu(const FusedPassBackwardArguments& call) {
  const int64_t units = cpu::linear_fused_pass_backward_units(call);
  // One thread computes up to this many units, which have about kGrain elements together.
  const int64_t least_units = std::max<int64_t>(kGrain * units / (call.m * call.n), 1);
  at::parallel_for(0, units, least_units, [&](int64_t begin, int64_t end) {
    cpu::linear_fused_pass_backward(call, begin, end);
  });
  if (call.grad_bias != nullptr) cpu::linear_fused_pass_backward_sum(call);
}

inline GradZAndBias run_fused_pass_backward(const BackwardInputs& inputs) {
  const Tensor grad_output = inputs.grad_output.contiguous();
  const at::ScalarType type = grad_output.scalar_type();
  GradZAndBias grad;
  grad.z = allocate(grad_output, grad_output.sizes(), type);
  if (inputs.needed.bias) grad.bias = allocate(grad_output, {grad_output.size(-1)}, type);

  FusedPassBackwardArguments call{};
  call.dtype = *kernel_dtype(type);
  call.divisor = inputs.divisor;
  call.m = rows_of(grad_output);
  call.n = grad_output.size(-1);
  call.grad_output = grad_output.const_data_ptr();
  call.mask = inputs.mask.const_data_ptr<uint8_t>();
  call.grad_z = grad.z.mutable_data_ptr();
  call.grad_bias = inputs.needed.bias ? grad.bias.mutable_data_ptr() : nullptr;

  const auto run_on_gpu = [&](auto stream) {
    const int64_t bytes = cuda::linear_fused_pass_backward_workspace_bytes(call);
    const Tensor workspace = allocate(grad_output, {bytes}, at::kByte);
    call.workspace = workspace.mutable_data_ptr();
    return cuda::linear_fused_pass_backward(call, stream);
  };
  const auto run_on_cpu = [&] {
    const int64_t bytes = cpu::linear_fused_pass_backward_workspace_bytes(call);
    const Tensor workspace = allocate(grad_output, {bytes}, at::kByte);
    call.workspace = workspace.mutable_data_ptr();
    run_fused_pass_backward_on_cpu(call);
  };
  run_on_device(grad_output, run_on_gpu, run_on_cpu);
  return grad;
}

// Returns whether to call run_gemm. At `high`, no path of ours but sm90 computes gradients: if
// another one is forced, torch computes them.
inline bool should_try_gemm_in_float32() {
  const bool is_highest = float32_precision() == Precision::kHighest;
  const bool may_choose_sm90 = !forced_path || forced_path == Path::kSm90;
  return is_highest || may_choose_sm90;
}

inline bool should_try_gemm_in_half_type(const Tensor& a, const Tensor& b) {
  // choose_path would leave small products to torch, too. To ask here takes less time.
  const bool is_large_enough =
      forced_path.has_value() || a.size(0) * b.size(1) >= kLeastHalfGradient;
  // In half types, torch multiplies operands that no kernel reads in place, because run_gemm would
  // copy them.
  const auto is_readable = [](const Tensor& t) {
    return is_row_major(t, kVectorBytes) || is_column_major(t, kVectorBytes);
  };
  return is_large_enough && is_readable(a) && is_readable(b);
}

inline bool should_try_gemm(const Tensor& a, const Tensor& b) {
  if (!a.is_cuda()) return false;
  if (a.scalar_type() == at::kFloat) return should_try_gemm_in_float32();
  const bool is_half_type = a.element_size() == 2;
  return is_half_type && should_try_gemm_in_half_type(a, b);
}

inline Tensor multiply_by_torch(const Tensor& a, const Tensor& b, bool transposes) {
  if (transposes) return b.t().mm(a.t()).t();
  return a.mm(b);
}

// Returns a [M, K] times b [K, N]: by a GEMM kernel of ours where one takes less time, otherwise by
// torch's product.
inline Tensor multiply_matrices(const Tensor& a, const Tensor& b, bool transposes) {
  if (should_try_gemm(a, b)) {
    // run_gemm multiplies by the transpose of its second operand.
    const Tensor transposed_b = b.t();
    const std::optional<Tensor> no_bias;
    const Tensor no_mask;
    const Tensor out =
        run_gemm({a, transposed_b, no_bias, /*divisor=*/1.0}, /*is_forward=*/false, no_mask);
    if (out.defined()) return out;
  }
  return multiply_by_torch(a, b, transposes);
}

// Computes the gradients that are needed. `multiply` is multiply_matrices or multiply_by_torch.
// Weight's gradient comes first: it reads grad_z down the columns, while the L2 cache still has it.
template <typename Multiply>
Gradients gradients_from_grad_z(const BackwardInputs& inputs, const GradZAndBias& grad,
                                const Multiply& multiply) {
  const Tensor grad_z = as_matrix(grad.z);
  Gradients gradients;
  gradients.bias = grad.bias;
  if (inputs.needed.weight) {
    gradients.weight = multiply(grad_z.t(), as_matrix(*inputs.x), inputs.transposes.grad_weight);
  }
  if (inputs.needed.x) {
    gradients.x = multiply(grad_z, *inputs.weight, inputs.transposes.grad_x);
    if (grad.z.dim() != 2) {
      const c10::SymInt k = gradients.x.sym_size(-1);
      gradients.x = gradients.x.view_symint(with_last(grad.z.sym_sizes(), k));
    }
  }
  return gradients;
}

// Returns a tensor like the forward's output that is 1 where the mask has a 1, and 0 elsewhere. It
// takes the output's place in torch's own gradient of ReLU, which asks where the output is above 0.
inline Tensor unpack_mask(const BackwardInputs& inputs) {
  const Tensor bits_of_bytes = inputs.mask.unsqueeze(-1)
                                   .bitwise_right_shift(at::arange(8, inputs.mask.options()))
                                   .bitwise_and(1);
  // The reshape is only for masks with other leading sizes, which saved-tensor hooks may return.
  return bits_of_bytes.flatten(-2)
      .narrow_symint(-1, 0, inputs.grad_output.sym_size(-1))
      .reshape_symint(inputs.grad_output.sym_sizes())
      .to(inputs.grad_output.scalar_type());
}

inline Gradients gradients_by_torch(const BackwardInputs& inputs, const Tensor& unpacked_mask) {
  GradZAndBias grad;
  grad.z = at::threshold_backward(inputs.grad_output.div(inputs.divisor), unpacked_mask,
                                  /*threshold=*/0);
  if (inputs.needed.bias) grad.bias = as_matrix(grad.z).sum(0);
  return gradients_from_grad_z(inputs, grad, multiply_by_torch);
}

inline bool operands_fit(const BackwardInputs& inputs) {
  const Tensor& grad = inputs.grad_output;
  const auto is_like_grad = [&](const Tensor& t) {
    return t.scalar_type() == grad.scalar_type() && t.device() == grad.device();
  };
  if (!kernel_dtype(grad.scalar_type()).has_value() || grad.dim() == 0) return false;
  if (inputs.x) {
    const Tensor& x = *inputs.x;
    if (!is_like_grad(x) || x.dim() == 0 || rows_of(x) != rows_of(grad)) return false;
  }
  if (inputs.weight) {
    const Tensor& weight = *inputs.weight;
    if (!is_like_grad(weight) || weight.dim() != 2 || weight.size(0) != grad.size(-1)) return false;
  }
  return true;
}

inline bool mask_fits(const Tensor& mask, const Tensor& grad_output) {
  const bool is_readable = mask.scalar_type() == at::kByte && mask.is_contiguous() &&
                           mask.dim() > 0 && mask.device() == grad_output.device();
  return is_readable && rows_of(mask) == rows_of(grad_output) &&
         mask.size(-1) == bytes_of_bits(grad_output.size(-1));
}

// Raises an error unless the operands fit together. Any traced graph may call the operator, and a
// hook for saved tensors may have returned any tensor.
inline void check_backward_inputs(const BackwardInputs& inputs) {
  const Tensor& grad = inputs.grad_output;
  const Tensor& mask = inputs.mask;
  if (!operands_fit(inputs)) {
    fail(
        "linear_relu_divide_gradients: expected floating tensors that fit together, got "
        "grad_output " +
        describe(grad) + ", input " + describe(inputs.x) + ", weight " + describe(inputs.weight));
  }
  if (!mask_fits(mask, grad)) {
    const std::string rows = std::to_string(rows_of(grad));
    const std::string row_bytes = std::to_string(bytes_of_bits(grad.size(-1)));
    const std::string layout = mask.is_contiguous() ? "" : "non-contiguous ";
    fail("linear_relu_divide_gradients: expected the saved mask, contiguous uint8 with " + rows +
         " rows of " + row_bytes + " bytes on " + grad.device().str() + ", got " + layout +
         describe(mask) + ": a hook for saved tensors must keep its shape and device");
  }
}

inline Gradients compute_gradients(const BackwardInputs& inputs) {
  check_backward_inputs(inputs);
  if (inputs.grad_output.numel() == 0) return gradients_by_torch(inputs, unpack_mask(inputs));
  const DeviceGuard guard(inputs.grad_output);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return gradients_from_grad_z(inputs, run_fused_pass_backward(inputs), multiply_matrices);
}

// Operators cannot return undefined tensors, so empty ones take their places.
inline ThreeTensors as_results(const Gradients& gradients, const Tensor& like) {
  const auto defined_or_empty = [&](const Tensor& t) {
    return t.defined() ? t : at::empty_symint({0}, like.options());
  };
  return {defined_or_empty(gradients.x), defined_or_empty(gradients.weight),
          defined_or_empty(gradients.bias)};
}

// The operator linear_relu_divide_gradients on a CPU or a GPU. Autocast and gradients are switched
// off, because they may be on when a traced graph runs, though they were off when it was traced.
inline ThreeTensors linear_gradients_without_autograd(const BackwardInputs& inputs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::NoGradGuard no_grad;
  return as_results(compute_gradients(inputs), inputs.grad_output);
}

inline ThreeTensors linear_gradients_by_torch(const BackwardInputs& inputs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return as_results(gradients_by_torch(inputs, unpack_mask(inputs)), inputs.grad_output);
}

}  // namespace kernels
