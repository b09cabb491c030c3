"""Both modules behave as the reference for other kinds of tensors: subclasses, sparse and so on."""

import pytest
import torch
from torch import nn

from model import Model
from model_new import ModelNew
from tests.support.beside_torch import assert_same_results, samples
from tests.support.compare import assert_same_bits, outcome
from tests.support.tensors import linear_modules


def pairs(device="cpu"):
    """Return a pair for each problem, ReLU first: our module and the reference."""
    return [(ModelNew(), Model()), linear_modules(6, 10, 3.0, device=device)]


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Logged(torch.Tensor):
    """A subclass that sees calls of torch's functions, as quantized weights do, and notes them."""

    seen = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen = (*cls.seen, function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_results_keep_the_subclass_of_x_and_the_subclass_of_a_weight_sees_the_product():
    x = samples()
    for ours, reference in pairs():
        got, want = (module(x.as_subclass(Named)) for module in (ours, reference))
        assert type(got) is type(want) is Named
        assert_same_bits(*(t.detach().as_subclass(torch.Tensor) for t in (got, want)))
    linear, _ = linear_modules(6, 10)
    linear.linear.weight = nn.Parameter(linear.linear.weight.detach().as_subclass(Logged))
    linear(x)
    assert nn.functional.linear in Logged.seen


class Wrapper(torch.Tensor):
    """A wrapper subclass that stores its tensor transposed."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.t().shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [a.inner if isinstance(a, Wrapper) else a for a in args]
        out = function(*args, **(kwargs or {}))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


def test_a_wrapper_subclass_has_gradients():
    inner = samples()
    x = Wrapper(inner).requires_grad_()
    grad_output = Wrapper(samples())
    out = ModelNew()(x)
    (grad,) = torch.autograd.grad(out, x, grad_output)
    assert type(out) is Wrapper
    assert_same_bits(out.inner.detach(), torch.relu(inner))
    assert_same_bits(grad.inner, torch.where(inner > 0, grad_output.inner, 0.0))


class Table(torch.Tensor):
    """A subclass that defines three of torch's functions, and no others.

    The product is a Table. ReLU of a Table is the number 6, and ReLU in place is 7.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        results = {nn.functional.linear: cls(), torch.relu: 6.0, torch.relu_: 7.0}
        return results.get(function, NotImplemented)


class TableOfOperators(torch.Tensor):
    """A subclass that defines one of torch's operators, and no others."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return {torch.ops.aten.relu.default: cls()}.get(function, NotImplemented)


def test_the_modules_call_the_functions_of_torch_on_a_subclass_that_defines_no_others():
    x = samples().as_subclass(Table)
    assert [module(x) for module in pairs()[0]] == [6.0, 6.0]
    assert ModelNew(inplace=True)(x) == 7.0
    assert [module(x) for module in pairs()[1]] == [2.0, 2.0]  # 6 divided by 3
    assert type(ModelNew()(samples().as_subclass(TableOfOperators))) is TableOfOperators


# By name, a function that turns a float32 tensor into one of another kind.
KINDS = {
    "parameter": nn.Parameter,
    "negative": lambda x: torch.imag(torch.complex(x, x).conj()),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.to_mkldnn(),
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}


def parts(x):
    """Return dense tensors with the values of x, which may be nested, quantized or sparse."""
    if x.is_nested:
        return x.unbind()
    return [x.dequantize() if x.is_quantized else x.to_dense()]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_tensors_give_the_result_or_error_of_torch(make, mode):
    for pair in pairs():
        with mode():
            x = make(samples())
            got, want = (outcome(module, x) for module in pair)
            if not isinstance(want, torch.Tensor):
                assert got == want
                continue
            assert (type(got), got.layout) == (type(want), want.layout)
            assert_same_bits(parts(got), parts(want))


def test_the_gradient_of_a_sparse_x_matches_torch():
    x = samples().to_sparse().requires_grad_()

    def run(module):
        return torch.autograd.grad(module(x).to_dense().sum(), x)[0].to_dense()

    assert_same_results((ModelNew(), Model()), run)


@pytest.mark.filterwarnings("ignore")
def test_results_of_a_sparse_weight_match_torch():
    modules = linear_modules(6, 10)
    for module in modules:
        module.linear.weight = nn.Parameter(
            module.linear.weight.detach().to_sparse_csr(), requires_grad=False
        )
    x = samples()
    assert_same_results(modules, lambda module: module(x))
