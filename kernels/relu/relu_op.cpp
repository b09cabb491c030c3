// ReLU for torch: the operator relu(x). Autograd keeps one bit an element, in memory order.

#include <ATen/ExpandUtils.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>

#include "torch_support/elementwise.h"
#include "torch_support/operators.h"

namespace kernels {
namespace {

// The gate: whether our kernels serve x. All else is torch's own relu.
bool serves(const Tensor& x) {
  return is_plain(x.key_set()) && kernel_dtype(x.scalar_type()).has_value() && x.numel() > 0 &&
         x.is_non_overlapping_and_dense() && !has_tangent(x) && is_aligned(x);
}

// The layout of a gradient of an output with these strides, where a kernel serves it. Dimensions
// that follow each other in both are one. For strides of size 1 torch has rules of its own.
std::optional<GradientLayout> layout_of(const Tensor& grad, at::IntArrayRef strides) {
  c10::DimVector order;
  for (int64_t d = 0; d < grad.dim(); ++d) {
    if (grad.size(d) > 1) order.push_back(d);
  }
  std::sort(order.begin(), order.end(), [=](auto a, auto b) { return strides[a] < strides[b]; });
  GradientLayout layout{1, {1}, {}};
  int last = -1;
  for (const int64_t d : order) {
    if (last >= 0 && grad.stride(d) == layout.sizes[last] * layout.strides[last]) {
      layout.sizes[last] *= grad.size(d);
      continue;
    }
    if (++last == GradientLayout::kMost) return std::nullopt;
    layout.sizes[last] = grad.size(d), layout.strides[last] = grad.stride(d);
    layout.dimensions = last + 1;
  }
  const bool is_alike = grad.strides() == strides || grad.is_contiguous() ||
                        grad.is_contiguous(at::MemoryFormat::ChannelsLast);
  if (layout.is_constant() || (layout.is_dense() && is_alike && is_aligned(grad))) return layout;
  const bool has_ones = static_cast<int64_t>(order.size()) < grad.dim();
  const bool is_served = grad.is_cuda() && grad.numel() < int64_t{1} << 31 && !has_ones;
  return is_served ? std::optional(layout) : std::nullopt;
}

// The mask is undefined where none is wanted.
Tensor compute_relu(const Tensor& x, const Tensor& mask) {
  const DeviceOf device(x);
  const Tensor out = allocate_like(x);
  const DType dtype = *kernel_dtype(x.scalar_type());
  const int64_t n = x.numel();
  void* const to = out.mutable_data_ptr();
  const void* const from = x.const_data_ptr();
  uint8_t* const bits = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  run_on_device(
      x, [=](auto stream) { return cuda::relu(dtype, from, to, bits, n, stream); },
      [&] {
        for_elements(out, [=](auto... range) { cpu::relu(dtype, from, to, bits, range...); });
      });
  return out;
}

// Writes the elements that the mask keeps of a gradient, and zeros, to out.
void select_by_mask(const Tensor& mask, const void* grad_output, const GradientLayout& layout,
                    const Tensor& out) {
  const DType dtype = *kernel_dtype(out.scalar_type());
  const int64_t n = out.numel();
  void* const to = out.mutable_data_ptr();
  const uint8_t* const bits = mask.const_data_ptr<uint8_t>();
  run_on_device(
      mask,
      [&](auto stream) {
        return cuda::relu_backward(dtype, grad_output, layout, bits, to, n, stream);
      },
      [&] {
        for_elements(out, [&](auto... range) {
          cpu::relu_backward(dtype, grad_output, layout.is_constant(), bits, to, range...);
        });
      });
}

// Autograd's record. Written out as a Node, for torch::autograd::Function takes GCC another second.
struct ReluBackward : Node {
  SavedVariable saved_mask;
  c10::DimVector sizes, strides;  // of the output

  std::string name() const override { return "ReluBackward"; }

  variable_list apply(variable_list&& grads) override {
    const Tensor& grad_output = grads[0];
    if (!grad_output.defined()) return {Tensor()};
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor mask = unpack_saved_mask(saved_mask);
    const int64_t bytes = (c10::multiply_integers(sizes) + 7) / 8;
    if (mask.numel() != bytes || mask.device() != grad_output.device()) {  // a hook's
      fail("mask must have " + std::to_string(bytes) + " elements on the gradient's device");
    }
    const DeviceOf device(mask);
    const auto allocate_grad = [&] {
      return allocate_output(mask, sizes, grad_output.scalar_type(), strides);
    };
    const bool is_differentiated = at::GradMode::is_enabled();
    if (!is_differentiated && is_plain(mask.key_set() | grad_output.key_set()) &&
        !has_tangent(grad_output)) {
      if (const auto layout = layout_of(grad_output, strides)) {
        const Tensor out =
            layout->is_dense()
                ? allocate_like(grad_output)
                : allocate_output(mask, sizes, grad_output.scalar_type(),
                                  at::IntArrayRef(at::infer_dense_strides(sizes, strides)));
        select_by_mask(mask, grad_output.const_data_ptr(), *layout, out);
        return {out};
      }
    }
    // As torch's gradient is by the output, and gives zeros to it, by numbers of the same signs.
    // Bytes of 0x3c are a positive number in every dtype.
    const Tensor signs = allocate_grad(), positive = allocate(mask, {8}, at::kByte).fill_(0x3c);
    select_by_mask(mask, positive.const_data_ptr(), GradientLayout{1, {1}, {0}}, signs);
    if (is_differentiated) torch::autograd::impl::set_gradient_edge(signs, {getptr(), 0});
    return {at::threshold_backward(grad_output, signs, 0)};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved_mask.reset_data();
  }
};

Tensor relu_composite(const Tensor& x) { return at::relu(x); }

Tensor relu_forward(const Tensor& x) {
  return serves(x) ? compute_relu(x, Tensor()) : relu_composite(x);
}

Tensor relu_autograd(const Tensor& x) {
  if (!serves(x)) return relu_composite(x);
  if (!wants_gradient(x)) return compute_relu(x, Tensor());
  const DeviceOf device(x);
  auto node = make_node<ReluBackward>(x);
  const Tensor mask = allocate_output(x, {(x.numel() + 7) / 8}, at::kByte, std::nullopt);
  const Tensor out = compute_relu(x, mask);
  node->saved_mask = SavedVariable(mask, /*is_output=*/false);
  node->sizes = out.sizes(), node->strides = out.strides();
  torch::autograd::set_history(out, std::move(node));
  return out;
}

// Graphs that torch.jit.trace records hold torch's own relu, which compilers fuse.
[[maybe_unused]] const auto relu_operator =
    Operator("relu(Tensor input) -> Tensor")
        .dense(relu_forward)
        .impl(DispatchKey::Autograd, relu_autograd)
        .impl(DispatchKey::Tracer, relu_composite)
        .impl(DispatchKey::FuncTorchBatched, relu_composite)
        .impl(DispatchKey::CompositeImplicitAutogradNestedTensor, relu_composite)
        .impl(DispatchKey::CompositeExplicitAutograd, relu_composite);

}  // namespace
}  // namespace kernels
