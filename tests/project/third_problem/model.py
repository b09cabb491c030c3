# tests/project/test_third_problem.py appends this to a copy of model.py.


class Gelu(nn.Module):
    """GELU of a tensor of any shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)


PROBLEMS["gelu"] = Problem(
    reference=Gelu,
    rows=batch_size,
    get_inputs_at=_relu_inputs,
    get_init_inputs=get_init_inputs,
)
