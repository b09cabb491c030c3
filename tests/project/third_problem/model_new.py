# tests/project/test_third_problem.py appends this to a copy of model_new.py.
gelu_ops = getattr(torch.ops, namespaces["gelu"])
gelu_builtin = as_builtin(gelu_ops.gelu.default)


class GeluNew(reference.Gelu):
    """x Phi(x) of a tensor of any shape, by a kernel of this project."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute GELU as `torch.nn.functional.gelu` does.

        Subclasses of Tensor get torch's op, and so do the graphs of torch.compile.
        """
        if type(x) is not Tensor or is_dynamo_compiling():
            return torch.nn.functional.gelu(x)
        return gelu_builtin(x)


SOLUTIONS["gelu"] = GeluNew
