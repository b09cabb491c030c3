# bundle: begin gelu, from kernels/gelu
_gelu = _extension.gelu


# bundle: class ModelNew(torch.nn.Module):
class GeluNew(_reference.Gelu):
    """x Phi(x) of a tensor of any shape, by a kernel of this project."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.functional.gelu`; tensors of other types, and graphs, hold torch's op."""
        if type(x) is not torch.Tensor or _is_traced():
            return torch.nn.functional.gelu(x)
        return _gelu(x)


# bundle: end
# bundle: skip
SOLUTIONS["gelu"] = GeluNew
# bundle: end
