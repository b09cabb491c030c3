"""Linear -> ReLU -> divide under every setting of float32's precision: the arithmetic of torch's.

Settings are of the process, and some cannot be undone, so each test does its work in a child.
"""

import contextlib
import itertools
import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits, outcome
from processes import ROOT, SUPPORT, printed
from tensors import OPERATORS, linear_modules, step

# Values of NVIDIA_TF32_OVERRIDE. cuBLAS knows 0 and 1.
OVERRIDES = [None, "0", "1", "2", "01", ""]


def child(function, tmp_path, **environment):
    """Calls a function of this file in a fresh process."""
    code = f"from test_float32_settings import {function.__name__} as f; f()"
    printed(code, tmp_path, path=(ROOT, SUPPORT, Path(__file__).parent), **environment)


def settings(on_cpu=False):
    """Every way to set the precision of products that this torch takes: a name, and a call."""
    backends = torch.backends
    levels = {"matmul": backends.cuda.matmul, "cudnn": backends.cudnn, "backends": backends}
    if on_cpu:
        levels |= {"mkldnn": backends.mkldnn, "mkldnn.matmul": backends.mkldnn.matmul}
    calls = {
        f"{name}.fp32_precision = {value}": partial(setattr, level, "fp32_precision", value)
        for name, level in levels.items()
        for value in ("ieee", "tf32", "bf16", "bfx9", "none")
    }
    for value in ("highest", "high", "medium"):
        calls[value] = partial(torch.set_float32_matmul_precision, value)
    for value in (True, False):
        name = f"allow_tf32 = {value}"
        calls[name] = partial(setattr, backends.cuda.matmul, "allow_tf32", value)
    warnings.simplefilter("ignore")  # torch 2.9 warns where later ones refuse
    taken = {}
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError):
            call()
            taken[name] = call
    return taken


def make(calls, *names):
    """Makes these settings, in this order, and no others."""
    calls["highest"]()
    for name in [name for name in calls if name.endswith("none")] + list(names):
        calls[name]()


def combinations(calls, repeat):
    """The names of any settings, which are made one after the other."""
    for names in itertools.product(calls, repeat=repeat):
        make(calls, *names)
        yield names


def check_products():
    override, calls, mixed = os.environ.get("NVIDIA_TF32_OVERRIDE"), settings(), 0
    for names in combinations(calls, 3):
        setting = torch._C._get_fp32_precision_getter("cuda", "matmul")
        one = {"0": False, "1": setting != "bfx9"}.get(override, setting == "tf32")
        assert OPERATORS.float32_precision() == ("high" if one else "highest"), (names, setting)
        try:
            torch.backends.cuda.matmul.allow_tf32  # noqa: B018
        except RuntimeError:
            mixed += 1
    assert mixed > 100  # torch has an error for these, which its products don't raise


@pytest.mark.slow
@pytest.mark.parametrize("override", OVERRIDES)
def test_number_of_products(override, tmp_path):
    """As torch resolves its settings, without an error where old and new ones are mixed."""
    child(check_products, tmp_path, NVIDIA_TF32_OVERRIDE=override)


def check_cpu():
    modules, x, grad_output = linear_modules(64, 72), torch.randn(80, 64), torch.randn(80, 72)
    for names in combinations(settings(on_cpu=True), 2):
        got, want = (outcome(step, module, x, grad_output) for module in modules)
        if isinstance(want[0], torch.Tensor):
            assert_same_bits(got[:3], want[:3])
        else:
            assert got == want, names


@pytest.mark.slow
def test_the_cpu_follows(tmp_path):
    """Output and gradients are torch's, also on a CPU that has TF32 or bfloat16 products."""
    child(check_cpu, tmp_path)


# A size whose products are sm_90's at `high` and at `highest`.
M, N, K = 1024, 4096, 2048


def arithmetic(got, exact):
    """float32 or TF32, by the mean error."""
    error = ((got.double() - exact).abs().mean() / exact.abs().mean()).item()
    assert error < 2e-3, error
    return "TF32" if error > 1e-5 else "float32"


def arithmetic_of(run, *arguments):
    """What `run` returns, or the kind of its error."""
    try:
        return run(*arguments)
    except RuntimeError as error:
        return type(error)


def assert_same_arithmetic(ours, eager, context):
    """Where torch raises an error, as for "bfx9" on some GPUs, ours may be float32 products."""
    is_error = isinstance(eager, type)
    assert ours == eager or (is_error and ours == "float32"), (context, ours, eager)


def drawn():
    """Both modules, x, and the exact result."""
    modules, x = linear_modules(K, N, device="cuda"), torch.randn(M, K, device="cuda")
    weight, bias = (p.detach().double() for p in modules[0].linear.parameters())
    return modules, x, torch.relu(x.double() @ weight.t() + bias) / 3.0


def check_forward():
    modules, x, exact = drawn()
    seen = set()
    for names in combinations(settings(), 2):
        with torch.no_grad():
            kinds = [arithmetic_of(lambda m=m: arithmetic(m(x), exact)) for m in modules]
        assert_same_arithmetic(*kinds, names)
        seen.add(kinds[1])
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    assert {"0": {"float32"}, "1": {"TF32"}}.get(override, {"float32", "TF32"}) <= seen


@pytest.mark.gpu
@pytest.mark.parametrize("override", [None, "0", "1", "2"])
def test_forward(override, tmp_path):
    """The same arithmetic as torch's after any two settings."""
    child(check_forward, tmp_path, NVIDIA_TF32_OVERRIDE=override)


def check_backward():
    modules, x = linear_modules(K, N, 2.0, device="cuda"), torch.randn(M, K, device="cuda")
    grad_output, calls = torch.randn(M, N, device="cuda"), settings()

    def kinds(module, change):
        rows = x.detach().requires_grad_()
        out = module(rows)
        change()
        grads = torch.autograd.grad(out, (rows, module.linear.weight), grad_output)
        grad_z = (grad_output / 2 * (out.detach() > 0)).double()
        exact = grad_z @ module.linear.weight.detach().double(), grad_z.t() @ x.double()
        return [arithmetic(*pair) for pair in zip(grads, exact, strict=True)]

    for first, second in itertools.product(calls, repeat=2):
        results = []
        for module in modules:
            make(calls, first)
            found = arithmetic_of(kinds, module, calls[second])
            results.append([found, found] if isinstance(found, type) else found)
        for name, ours, eager in zip(("x", "weight"), *results, strict=True):
            assert_same_arithmetic(ours, eager, (first, second, name))


@pytest.mark.gpu
@pytest.mark.parametrize("override", [None, "0", "1"])
def test_settings_changed_before_backward(override, tmp_path):
    """The gradients' products are of the precision that is set when they are made."""
    child(check_backward, tmp_path, NVIDIA_TF32_OVERRIDE=override)


def check_autocast():
    modules, x, exact = drawn()
    for names in combinations(settings(), 2):
        for dtype in (torch.float16, torch.bfloat16):
            with torch.no_grad(), torch.autocast("cuda", dtype):
                ours, eager = (module(x) for module in modules)
            assert ours.dtype == eager.dtype == dtype
            errors = [(out.double() - exact).abs().mean().item() for out in (ours, eager)]
            assert errors[0] <= 1.01 * errors[1], (names, dtype, errors)


@pytest.mark.gpu
def test_autocast(tmp_path):
    """Products of half types, whatever is set for float32."""
    child(check_autocast, tmp_path)
