if "gelu" in kernels.problems():
    load("gelu", kernels.read_sources("gelu"), _load_inline)


class GeluNew(_reference.Gelu):
    """x Phi(x) of a tensor of any shape, by a kernel of this project."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute GELU. torch's op computes it for subclasses of tensors and in graphs."""
        if type(x) is not torch.Tensor or _is_traced():
            return torch.nn.functional.gelu(x)
        return torch.ops.relu_divide_kernels.gelu(x)
