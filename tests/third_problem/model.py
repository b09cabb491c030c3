# tests/test_third_problem.py appends this to a copy of model.py.


class Gelu(nn.Module):
    """GELU of a tensor of any shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)


def get_gelu_inputs() -> list[torch.Tensor]:
    """Return x `[4096, 393216]`, float32, on the CPU, drawn as `get_inputs` does."""
    return _relu_inputs(batch_size)


PROBLEMS["gelu"] = Problem(Gelu, batch_size, get_gelu_inputs, get_init_inputs, _relu_inputs)
