"""Direct calls of the operators: any arguments, opcheck, and programs that were saved before."""

import random
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from model_new import ModelNew
from tests.support.beside_torch import samples
from tests.support.processes import ROOT, forked, printed
from tests.support.tensors import DTYPES, OPERATORS, linear_modules

SCHEMAS = [
    "relu(Tensor input) -> Tensor",
    "linear_relu_divide(Tensor input, Tensor weight, Tensor? bias, float divisor) -> Tensor",
    "linear_relu_divide_with_mask(Tensor input, Tensor weight, Tensor? bias, float divisor)"
    " -> (Tensor, Tensor)",
    "linear_relu_divide_gradients(Tensor grad_output, Tensor mask, Tensor? input, Tensor? weight,"
    " int output_mask, float divisor) -> (Tensor, Tensor, Tensor)",
]
NAMES = [schema.partition("(")[0] for schema in SCHEMAS]


def expanded(x):
    """Return a view of 2^20 elements, or of 2^60, which no address space can hold.

    Linux may promise any memory that is smaller than the address space.
    """
    return x.new_ones(()).expand([2**20] * (3 if x.dim() % 2 else 1))


# Functions that change a random tensor into another view, device, layout or dtype.
CHANGES = [
    expanded,
    lambda x: expanded(x).unsqueeze(0)[:0],
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x.transpose(0, -1),
    lambda x: x[..., ::2],
    lambda x: x[..., :1].expand(x.shape),
    lambda x: x.clone().requires_grad_(),
    lambda x: x.new_zeros(100).as_strided(x.shape[:2], (3, 2)[: x.dim()]),
    lambda x: x.to(torch.complex64),
]


def random_tensor(choose):
    """Draw a tensor of ones: any small shape and dtype, and mostly with one of CHANGES."""
    dtype = choose.choice([torch.float32, torch.float32, torch.uint8, *DTYPES, torch.bool])
    shape = [choose.choice([0, 1, 1, 2, 3, 4, 8, 9, 17]) for _ in range(choose.randint(0, 4))]
    x = torch.ones(shape, dtype=dtype)
    if choose.random() < 0.7:
        with suppress(RuntimeError, IndexError):  # integers have no gradients, scalars have no rows
            return choose.choice(CHANGES)(x)
    return x


def random_argument(choose, kind, tensors):
    """Draw an argument of a kind in the operator's schema; 1 in 100 is of a wrong type."""
    if choose.random() < 0.01:
        return choose.choice([None, "text", 2**70, [1.5], object()])
    if kind == "Tensor":
        # More than half are one of a few tensors so that some arguments fit together.
        return choose.choice(tensors) if choose.random() < 0.6 else random_tensor(choose)
    if kind == "Tensor?":
        return None if choose.random() < 0.4 else random_argument(choose, "Tensor", tensors)
    if kind == "float":
        return choose.choice([1.0, 0.0, -3.5, 3, float("nan"), float("inf"), True])
    return choose.randint(-1, 8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_random_arguments_give_results_or_errors(seed):
    """The process never crashes. A result of ReLU has the shape of its argument."""
    choose = random.Random(seed)
    calls_with_results = 0
    for _ in range(1000):
        name = choose.choice(NAMES)
        operator = getattr(OPERATORS, name).default
        rows = choose.randint(1, 5)
        columns = choose.choice([1, 7, 8, 9, 16])
        tensors = [
            torch.ones(rows, columns),
            torch.zeros((rows * columns + 7) // 8, dtype=torch.uint8),
            torch.zeros(rows, (columns + 7) // 8, dtype=torch.uint8),
            random_tensor(choose),
        ]
        arguments = [
            random_argument(choose, str(a.type).replace("Optional[Tensor]", "Tensor?"), tensors)
            for a in operator._schema.arguments
        ]
        try:
            results = operator(*arguments)
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError):
            continue
        calls_with_results += 1
        if name.startswith("relu") and isinstance(results, torch.Tensor):
            assert results.shape == arguments[0].shape
    assert calls_with_results > 100


def test_opcheck_finds_no_fault_in_relu(device):
    """This holds for an x of any strides, and for an empty one."""
    for x in (samples(device), samples(device).t(), samples(device)[:, ::2], samples(device)[:0]):
        for leaf in (x, x.clone().requires_grad_()):
            torch.library.opcheck(OPERATORS.relu, (leaf,))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck_finds_no_fault_in_the_operators_of_linear(device, bias):
    """`torch.library.opcheck` finds no fault in the three operators of Linear."""
    weight = torch.randn(10, 6, device=device)
    b = torch.randn(10, device=device) if bias else None
    for x in (samples(device), samples(device).unflatten(0, (2, 2)), samples(device)[:0]):
        for grad in (False, True):
            tensors = [t if t is None else t.clone().requires_grad_(grad) for t in (x, weight, b)]
            torch.library.opcheck(OPERATORS.linear_relu_divide, (*tensors, 3.0))
        if x.numel() == 0:
            continue
        out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, b, 3.0)
        torch.library.opcheck(OPERATORS.linear_relu_divide_with_mask, (x, weight, b, 3.0))
        if bias:  # without a bias these would be the same calls again
            opcheck_gradients(torch.randn_like(out), mask, x, weight)
            opcheck_gradients(torch.randn_like(out).requires_grad_(), mask, x, weight)


def opcheck_gradients(grad_output, mask, x, weight):
    """Check the operator of the gradients for every combination of wanted gradients."""
    for output_mask in range(8):  # the bits 1, 2 and 4 ask for the gradients of x, weight and bias
        needed_weight = weight if output_mask & 1 else None
        needed_x = x if output_mask & 2 else None
        arguments = (grad_output, mask, needed_x, needed_weight, output_mask, 3.0)
        torch.library.opcheck(OPERATORS.linear_relu_divide_gradients, arguments)


def test_schemas_are_those_that_saved_programs_hold():
    """Programs that were saved before must still run. A new schema needs a new name."""
    got = [str(getattr(OPERATORS, name).default._schema) for name in NAMES]
    assert got == [f"relu_divide_kernels::{schema}" for schema in SCHEMAS]


# Code that loads another build: a bundle's library and operators have names of their own.
ANOTHER_BUILD = f"""
import pathlib, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from kernels.build.bundle import bundle
def another_build(problem):
    exec(bundle(problem), namespace := {{}})
    return namespace
def builds():
    names = (pathlib.Path(library).name for library in torch.ops.loaded_libraries)
    return {{name for name in names if name.startswith(("kernels_", "relu_divide_kernels_"))}}
"""


class Operator(torch.nn.Module):
    """ReLU as the first versions of ModelNew were traced."""

    def forward(self, x):
        return torch.ops.relu_divide_kernels.relu(x)


def save(x, relu, module, folder):
    """Save both modules as programs of all kinds, and their results for x."""
    for name, model in (("relu", relu), ("linear", module)):
        exported = torch.export.export(model, (x,))
        torch.export.save(exported, folder / f"{name}.pt2")
        torch.jit.save(torch.jit.trace(model, x, check_trace=False), folder / f"{name}-traced.pt")
        torch.jit.save(torch.jit.script(model), folder / f"{name}-scripted.pt")
    torch.save((x, relu(x), module(x).detach()), folder / "results.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_saved_with_one_build_run_with_another(tmp_path):
    save(torch.randn(4, 6), Operator(), linear_modules(6, 9)[0], tmp_path)
    ours = {Path(library).name for library in torch.ops.loaded_libraries}
    code = f"""
        for problem in ("relu", "linear_relu_divide"):
            another_build(problem)
        assert len(builds()) == 2 and not builds() & {ours!r}
        x, *results = torch.load("results.pt")
        for name, want in zip(("relu", "linear"), results):
            exported = torch.export.load(name + ".pt2").module()
            traced = torch.jit.load(name + "-traced.pt")
            scripted = torch.jit.load(name + "-scripted.pt")
            for program in (exported, traced, scripted):
                leaf = x.clone().requires_grad_()
                got = program(leaf)
                torch.testing.assert_close(got.detach(), want)
                got.sum().backward()
                assert leaf.grad.count_nonzero() > 0
            calls = [n.target for n in exported.graph.nodes if n.op == "call_function"]
            assert any(str(call).startswith("relu_divide_kernels") for call in calls), calls
        # The stable operators are those of the first build. Each build has its own, too.
        import model_new
        program = torch.export.export(model_new.LinearReluDivideNew(6, 9, 3.0), (x,))
        own = program.module()
        module = torch.export.load("linear.pt2").module()
        module.load_state_dict(own.state_dict())
        torch.testing.assert_close(own(x), module(x))
        assert torch.equal(model_new.ModelNew()(x), torch.relu(x))
        assert len(builds()) == 4
    """
    printed(ANOTHER_BUILD + textwrap.dedent(code), tmp_path, forked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_of_relu_run_without_these_kernels(tmp_path):
    """The linear module in TorchScript needs none either: it calls its `linear`."""
    save(torch.randn(4, 6), ModelNew(), linear_modules(6, 9)[0], tmp_path)
    code = """
        import torch
        x, *results = torch.load("results.pt")
        exported = torch.export.load("relu.pt2").module()
        for program in exported, *map(torch.jit.load, ("relu-traced.pt", "relu-scripted.pt")):
            assert torch.equal(program(x), results[0])
        torch.testing.assert_close(torch.jit.load("linear-scripted.pt")(x).detach(), results[1])
        assert not hasattr(torch.ops.relu_divide_kernels, "relu")
    """
    printed(code, tmp_path, forked)
