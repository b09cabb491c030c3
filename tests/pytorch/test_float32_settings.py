"""Linear -> ReLU -> divide uses float32 or TF32 as torch does, for every setting of torch.

Settings belong to the process, and some cannot be undone, so each test runs in a child process.
"""

import contextlib
import itertools
import os
import warnings
from functools import partial

import pytest
import torch

from model_new import linear_ops
from tests.support.compare import assert_same_bits, outcome
from tests.support.processes import forked, printed, python
from tests.support.tensors import linear_modules, step

# Values of the environment variable NVIDIA_TF32_OVERRIDE. cuBLAS knows 0 and 1.
OVERRIDES = [None, "0", "1", "2", "01", ""]


def run_in_child(function, tmp_path, run=python, **environment):
    """Call a function of this file in a new process, or in a fork."""
    code = f"from {__name__} import {function.__name__} as f; f()"
    printed(code, tmp_path, run, **environment)


def settings(on_cpu=False):
    """Return every way to set the precision of products in this torch: names and functions.

    Each is tried, so that ways which this torch refuses are left out.
    """
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
    warnings.simplefilter("ignore")  # torch 2.9 warns where later versions raise
    accepted = {}
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError):
            call()
            accepted[name] = call
    return accepted


def apply_settings(calls, *names):
    """Undo all earlier settings, and make these, in this order."""
    calls["highest"]()
    for name in [name for name in calls if name.endswith("none")] + list(names):
        calls[name]()


def combinations(calls, repeat):
    """Make any `repeat` settings one after the other, for all combinations; yield their names."""
    for names in itertools.product(calls, repeat=repeat):
        apply_settings(calls, *names)
        yield names


def is_tf32(setting):
    """Return whether cuBLAS uses TF32 when torch asks it for this precision of products."""
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    if override == "0":
        return False
    if override == "1":
        return setting != "bfx9"
    return setting == "tf32"


def check_products():
    """Assert that our operator's precision is torch's after any three settings."""
    mixed = 0
    for names in combinations(settings(), 3):
        setting = torch._C._get_fp32_precision_getter("cuda", "matmul")
        want = "high" if is_tf32(setting) else "highest"
        assert linear_ops.float32_precision() == want, (names, setting)
        try:
            torch.backends.cuda.matmul.allow_tf32  # noqa: B018
        except RuntimeError:
            mixed += 1
    assert mixed > 100  # reading the old setting raises for these, but torch's products do not


@pytest.mark.slow
@pytest.mark.parametrize("override", OVERRIDES)
def test_the_precision_is_the_one_that_torch_derives_from_its_settings(override, tmp_path):
    """Old and new settings may be mixed without an error."""
    run_in_child(check_products, tmp_path, forked, NVIDIA_TF32_OVERRIDE=override)


def check_cpu():
    """Assert that a step has the bits of the reference's after any two settings."""
    modules = linear_modules(64, 72)
    x = torch.randn(80, 64)
    grad_output = torch.randn(80, 72)
    for names in combinations(settings(on_cpu=True), 2):
        got, want = (outcome(step, module, x, grad_output) for module in modules)
        if isinstance(want[0], torch.Tensor):
            assert_same_bits(got[:3], want[:3])
        else:
            assert got == want, names


@pytest.mark.slow
def test_results_on_a_cpu_match_torch_for_every_setting(tmp_path):
    """The bits are the same, also on CPUs with TF32 or bfloat16 products."""
    run_in_child(check_cpu, tmp_path, forked)


# A size for which the sm90 kernels compute the products at `high` and at `highest`.
M, N, K = 1024, 4096, 2048


def arithmetic(got, exact):
    """Return "float32" or "TF32", judging by the mean error."""
    error = ((got.double() - exact).abs().mean() / exact.abs().mean()).item()
    assert error < 2e-3, error
    return "TF32" if error > 1e-5 else "float32"


def result_or_error_type(run, *arguments):
    """Return the function's result, or the type of its error."""
    try:
        return run(*arguments)
    except RuntimeError as error:
        return type(error)


def assert_same_arithmetic(got, want, context):
    """Assert that our arithmetic is torch's.

    Ours may be float32 where torch raises, as it does for "bfx9" on some GPUs.
    """
    is_error = isinstance(want, type)
    assert got == want or (is_error and got == "float32"), (context, got, want)


def draw_forward():
    """Return both modules, x, and the exact result of their forward."""
    modules = linear_modules(K, N, device="cuda")
    x = torch.randn(M, K, device="cuda")
    weight, bias = (p.detach().double() for p in modules[0].linear.parameters())
    return modules, x, torch.relu(x.double() @ weight.t() + bias) / 3.0


def check_forward():
    """Assert that the forward has the reference's arithmetic after any two settings."""
    modules, x, exact = draw_forward()
    seen = set()
    for names in combinations(settings(), 2):
        with torch.no_grad():
            kinds = [result_or_error_type(lambda m=m: arithmetic(m(x), exact)) for m in modules]
        assert_same_arithmetic(*kinds, names)
        seen.add(kinds[1])
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    assert override == "1" or "float32" in seen
    assert override == "0" or "TF32" in seen


@pytest.mark.gpu
@pytest.mark.parametrize("override", [None, "0", "1", "2"])
def test_the_forward_uses_the_arithmetic_of_torch_after_any_two_settings(override, tmp_path):
    """The error tells whether a product was float32 or TF32."""
    run_in_child(check_forward, tmp_path, NVIDIA_TF32_OVERRIDE=override)


def check_backward():
    """Assert that gradients have the reference's arithmetic after any two settings.

    The first setting comes before the forward, the second one before the backward.
    """
    modules = linear_modules(K, N, 2.0, device="cuda")
    x = torch.randn(M, K, device="cuda")
    grad_output = torch.randn(M, N, device="cuda")
    calls = settings()

    def kinds(module, change):
        rows = x.detach().requires_grad_()
        out = module(rows)
        change()
        weight = module.linear.weight
        grad_x, grad_weight = torch.autograd.grad(out, (rows, weight), grad_output)
        grad_z = (grad_output / 2 * (out.detach() > 0)).double()
        of_x = arithmetic(grad_x, grad_z @ weight.detach().double())
        of_weight = arithmetic(grad_weight, grad_z.t() @ x.double())
        return [of_x, of_weight]

    for first, second in itertools.product(calls, repeat=2):
        results = []
        for module in modules:
            apply_settings(calls, first)
            found = result_or_error_type(kinds, module, calls[second])
            results.append([found, found] if isinstance(found, type) else found)
        for name, got, want in zip(("x", "weight"), *results, strict=True):
            assert_same_arithmetic(got, want, (first, second, name))


@pytest.mark.gpu
@pytest.mark.parametrize("override", [None, "0", "1"])
def test_gradients_use_the_precision_that_is_set_during_backward(override, tmp_path):
    """It may differ from that of the forward."""
    run_in_child(check_backward, tmp_path, NVIDIA_TF32_OVERRIDE=override)


def check_autocast():
    """Assert that mean errors under autocast are 1% above the reference's at most.

    This holds after any two settings.
    """
    modules, x, exact = draw_forward()
    for names in combinations(settings(), 2):
        for dtype in (torch.float16, torch.bfloat16):
            with torch.no_grad(), torch.autocast("cuda", dtype):
                got, torch_result = (module(x) for module in modules)
            assert got.dtype == torch_result.dtype == dtype
            errors = [(out.double() - exact).abs().mean().item() for out in (got, torch_result)]
            assert errors[0] <= 1.01 * errors[1], (names, dtype, errors)


@pytest.mark.gpu
def test_products_under_autocast_are_as_accurate_as_in_torch_for_all_settings(tmp_path):
    run_in_child(check_autocast, tmp_path)
