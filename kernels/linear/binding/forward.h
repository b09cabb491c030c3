// Linear -> ReLU -> divide on tensors: the forward, the backward, and both out of torch's own ops.

#pragma once

#include "linear/binding/product.h"
// It includes Python.h, which comes first.

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>

namespace kernels {

inline int64_t mask_row_bytes(int64_t n) { return (n + 7) / 8; }

// ------------------------------------------------------------------------------------- forward

// torch's product, bias included.
inline Tensor torch_linear(const LinearInputs& in) { return at::linear(in.x, in.weight, in.bias); }

inline Tensor linear_composite(const LinearInputs& in) {
  return torch_linear(in).relu().div(in.divisor);
}

// Whether no kernel of ours takes part: torch's ops then do all the work, or raise their errors.
inline bool is_left_to_torch(const LinearInputs& in) {
  const auto is_subclass_for_torch = [&] {
    if (!(in.x.key_set() | in.weight.key_set()).has(DispatchKey::Python)) return false;
    const Subclass x = subclass_of(in.x), weight = subclass_of(in.weight);
    if (x == Subclass::kDTensor || weight == Subclass::kDTensor) {
      const Tensor bias = in.bias.value_or(Tensor());
      return ask_python("is_product_of_shards", {&in.x, &in.weight, &bias}) <= 0;
    }
    return x == Subclass::kOther || weight == Subclass::kOther;
  };
  const std::optional<DType> dtype = kernel_dtype(in.x.scalar_type());
  return !dtype || !at::isFloatingType(in.x.scalar_type()) || in.x.dim() == 0 ||
         in.weight.dim() != 2 || (in.bias && in.bias->dim() != 1) || !is_strided(in.x) ||
         !is_strided(in.weight) || (in.bias && !is_strided(*in.bias)) || is_subclass_for_torch();
}

// In place, out = relu(out) / divisor, and the mask if there is one to write.
inline void launch_linear_epilogue(DType dtype, const Tensor& out, double divisor,
                                   const Tensor& mask) {
  if (out.numel() == 0) return;
  int64_t m = rows_of(out), n = out.size(-1);
  void* const data = out.mutable_data_ptr();
  uint8_t* const bits = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  if (bits == nullptr || n % 8 == 0) {  // nothing tells the rows apart
    n *= m;
    m = 1;
  }
  launch(
      out,
      [=](auto stream) { return cuda::linear_epilogue(dtype, data, divisor, bits, m, n, stream); },
      [=] {
        parallel_for(m * mask_row_bytes(n), kGrain / 8, [=](int64_t begin, int64_t end) {
          cpu::linear_epilogue(dtype, data, divisor, bits, n, begin, end);
        });
      });
}

// By our product where choose_path says so, otherwise by torch's and the epilogue. Writes the mask
// if there is one.
inline Tensor compute_linear(const LinearInputs& in, const Tensor& mask) {
  const DType dtype = floating_dtype(in.x, "input");
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor out = launch_linear(in, /*relu=*/true, mask);
  if (out.defined()) return out;
  // Below autograd, torch would multiply the matrices of a tensor with gaps one by one.
  const Tensor x = in.x.dim() > 2 ? in.x.contiguous() : in.x;
  out = with_all_memory(
      [&] { return torch_linear({x, in.weight, in.bias, in.divisor}).contiguous(); });
  launch_linear_epilogue(dtype, out, in.divisor, mask);
  return out;
}

inline Tensor linear_forward(const LinearInputs& in) {
  if (is_left_to_torch(in) || !is_regular(in)) return linear_composite(in);
  const DeviceOf device(in.x);
  return compute_linear(in, Tensor());
}

inline TwoTensors linear_with_mask_forward(const LinearInputs& in) {
  if (is_left_to_torch(in)) fail("linear_relu_divide_with_mask: expected dense floating tensors");
  const DeviceOf device(in.x);
  const Tensor mask = allocate(in.x, with_last(in.x.sizes(), mask_row_bytes(in.weight.size(0))),
                               std::nullopt, at::kByte);
  return {compute_linear(in, mask), mask};
}

inline TwoTensors linear_with_mask_meta(const LinearInputs& in) {
  const Tensor out = linear_composite(in);
  const c10::SymInt bytes = (in.weight.sym_size(0) + 7) / 8;
  const auto options = out.options().dtype(at::kByte);
  return {out, at::empty_symint(with_last(in.x.sym_sizes(), bytes), options)};
}

// ------------------------------------------------------------------------------------ backward

// The arguments of the backward operators. There is x where weight's gradient is wanted, and weight
// where x's is.
struct LinearGradients {
  const Tensor& grad_output;
  const Tensor& mask;
  double divisor;
  bool wants_bias;
  const std::optional<Tensor>& x;
  const std::optional<Tensor>& weight;
  // Whether torch makes the gradients of x and weight as their transposes, as autograd would: on a
  // CPU the other way may take ten times as long.
  bool turns_x = false, turns_weight = false;
};

// The first step is the epilogue's: grad_z, the gradient of the product, and its sum over all rows,
// which is the gradient of bias; empty where nobody wants it.
inline TwoTensors epilogue_backward(const LinearGradients& in) {
  const DType dtype = floating_dtype(in.grad_output, "grad_output");
  const Tensor& mask = in.mask;
  if (in.grad_output.dim() == 0) fail("grad_output must have at least one dimension");
  const int64_t m = rows_of(in.grad_output), n = in.grad_output.size(-1);
  check_mask(mask, in.grad_output, m, mask_row_bytes(n));
  const DeviceOf device(in.grad_output);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor grad_output = in.grad_output.contiguous();
  const at::ScalarType type = grad_output.scalar_type();
  const auto vector = [&](int64_t size, at::ScalarType type) {
    return allocate(grad_output, {in.wants_bias ? size : 0}, std::nullopt, type);
  };
  const Tensor grad_z = allocate(grad_output, grad_output.sizes(), std::nullopt, type);
  const Tensor grad_bias = vector(n, type);
  if (n == 0 || (m == 0 && !in.wants_bias)) return {grad_z, grad_bias};
  const void* const from = grad_output.const_data_ptr();
  const uint8_t* const bits = mask.const_data_ptr<uint8_t>();
  void* const to = grad_z.mutable_data_ptr();
  void* const sums = in.wants_bias ? grad_bias.mutable_data_ptr() : nullptr;
  launch(
      grad_output,
      [&](auto stream) {
        const Tensor workspace =
            vector(cuda::linear_epilogue_backward_workspace(dtype, m, n), at::kByte);
        return cuda::linear_epilogue_backward(dtype, from, bits, in.divisor, to, sums,
                                              workspace.mutable_data_ptr(), m, n, stream);
      },
      [&] {
        const int64_t runs = cpu::linear_epilogue_backward_runs(m);
        const int64_t pieces = runs * cpu::linear_epilogue_backward_strips(n);
        const Tensor workspace = vector(runs * n, type == at::kDouble ? at::kDouble : at::kFloat);
        void* const run_sums = in.wants_bias ? workspace.mutable_data_ptr() : nullptr;
        const int64_t grain = std::max<int64_t>(kGrain * pieces / std::max<int64_t>(m * n, 1), 1);
        parallel_for(pieces, grain, [&](int64_t begin, int64_t end) {
          cpu::linear_epilogue_backward(dtype, from, bits, in.divisor, to, run_sums, m, n, begin,
                                        end);
        });
        if (in.wants_bias) cpu::linear_epilogue_backward_sum(dtype, run_sums, sums, m, n);
      });
  return {grad_z, grad_bias};
}

inline TwoTensors epilogue_backward_meta(const LinearGradients& in) {
  if (in.grad_output.dim() == 0) fail("grad_output must have at least one dimension");
  const auto options = in.grad_output.options();
  const c10::SymInt n = in.wants_bias ? in.grad_output.sym_size(-1) : c10::SymInt(0);
  return {at::empty_symint(in.grad_output.sym_sizes(), options), at::empty_symint({n}, options)};
}

// A tensor with the signs of the forward's output, out of the mask.
inline Tensor linear_signs(const LinearGradients& in) {
  return bits_of(in.mask)
      .flatten(-2)
      .narrow_symint(-1, 0, in.grad_output.sym_size(-1))
      .reshape_symint(in.grad_output.sym_sizes())
      .to(in.grad_output.scalar_type());
}

// epilogue_backward out of torch's own ops, given such signs, for the transforms that take an
// operator apart and for gradients of gradients.
inline TwoTensors epilogue_backward_by_signs(const LinearGradients& in, const Tensor& signs) {
  const Tensor grad_z = at::threshold_backward(in.grad_output.div(in.divisor), signs, 0);
  if (!in.wants_bias) return {grad_z, at::empty_symint({0}, in.grad_output.options())};
  return {grad_z, as_matrix(grad_z).sum(0)};
}

inline TwoTensors epilogue_backward_composite(const LinearGradients& in) {
  return epilogue_backward_by_signs(in, linear_signs(in));
}

// Whether our kernels may make a product of gradients. Half types are read where they are, or left
// to torch.
inline bool may_be_ours(const Tensor& a, const Tensor& b) {
  const int64_t size = a.size(0) * b.size(1);
  if (a.scalar_type() == at::kFloat) {
    return float32_precision() == Precision::kHighest || !demanded_path ||
           demanded_path == Path::kSm90;
  }
  const auto is_readable = [](const Tensor& t) { return has_rows(t, 16) || has_columns(t, 16); };
  const bool is_large = demanded_path || size >= kLargeResult;
  return a.element_size() == 2 && is_large && is_readable(a) && is_readable(b);
}

// a [i, j] b [j, k]. Our kernels serve where autograd records nothing of it; torch makes the
// transpose if it `turns`.
inline Tensor multiply_matrices(const Tensor& a, const Tensor& b, bool turns) {
  if (a.is_cuda() && !at::GradMode::is_enabled() && has_only(a.key_set() | b.key_set(), kDense) &&
      !has_tangent(a) && !has_tangent(b) && may_be_ours(a, b)) {
    const DeviceOf device(a);
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor out =
        launch_linear({a, b.t(), std::nullopt, /*divisor=*/1.0}, /*relu=*/false, Tensor());
    if (out.defined()) return out;
  }
  return with_all_memory([&] { return turns ? b.t().mm(a.t()).t() : a.mm(b); });
}

// The second step: the products for the gradients of x and weight that are wanted.
inline ThreeTensors multiply_out(const LinearGradients& in, TwoTensors epilogue) {
  const auto& [grad_z, grad_bias] = epilogue;
  const Tensor z = as_matrix(grad_z);
  Tensor grad_x, grad_weight;
  if (in.weight) grad_x = with_rows_of(grad_z, multiply_matrices(z, *in.weight, in.turns_x));
  if (in.x) grad_weight = multiply_matrices(z.t(), as_matrix(*in.x), in.turns_weight);
  return {grad_x, grad_weight, grad_bias};
}

// Both steps, as operators: they return no undefined tensors, but empty ones. Whoever runs or
// traces a graph may have autocast on that was off in the forward.
template <auto epilogue>
ThreeTensors linear_backward_by(const LinearGradients& in) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  auto [grad_x, grad_weight, grad_bias] = multiply_out(in, epilogue(in));
  for (Tensor* gradient : {&grad_x, &grad_weight}) {
    if (!gradient->defined()) *gradient = at::empty_symint({0}, in.grad_output.options());
  }
  return {grad_x, grad_weight, grad_bias};
}

inline ThreeTensors linear_backward(const LinearGradients& in) {
  const at::NoGradGuard no_grad;  // as autocast, gradients may be on
  return linear_backward_by<epilogue_backward>(in);
}

}  // namespace kernels
