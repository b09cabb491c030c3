"""The errors of the float32 GEMMs, on their CPU twin: they keep the promises.

A test draws operands, computes relu(x weight^T + bias) / divisor in three ways, and judges them:

operands    `draw_case` draws a named case, and `compositions.operands` a random composition; `hunt`
            searches for the operands with the largest errors
results     `linear` is the twin's, `cublas` that of a float32 sum, and `Reference` the exact one
judgement   `broken_promises` compares our errors with those of `cublas`, and `bound_ratio` compares
            them with the bound of docs/SPLIT.md

A kernel of the twin is a set of constants, for example SM90. `replace(SM90, promotes=False)` leaves
out promotion, a step of docs/SPLIT.md. A kernel without one of the steps breaks a promise.

`cublas` sums as cuBLAS does, in one accumulator along all of K. The CPU's own product is not used,
because it adds several partial sums and errs up to five times less.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support import compositions, promises
from tests.support import split_twin as twin
from tests.support.adversary import hunt
from tests.support.named_operands import CASES, draw_case
from tests.support.promises import (
    FEW_TERMS_ERROR,
    FP16X3_SLACK,
    ONE_PRODUCT_SLACK,
    Reference,
    bound_ratio,
    broken_promises,
)
from tests.support.split_twin import (
    FP16X3_KERNELS,
    ONE_PRODUCT,
    SM80,
    SM80_ON_HOPPER,
    SM90,
    cublas,
    linear,
)
from tests.support.tensors import slow

QUICK = [kernel for kernel in FP16X3_KERNELS if kernel != SM80_ON_HOPPER]
EACH_KERNEL = pytest.mark.parametrize(
    "kernel", [*QUICK, *slow([SM80_ON_HOPPER])], ids=FP16X3_KERNELS.get
)
pytestmark = pytest.mark.usefixtures("one_thread")
DIVISOR = 2.0


def judge(operands, kernel, allowance=FEW_TERMS_ERROR):
    """Return a message for each promise that a kernel breaks for these x, weight and bias."""
    x, weight, bias = operands
    reference = Reference(x, weight, bias, DIVISOR)
    out = linear(x, weight, bias, DIVISOR, kernel)
    torch_out = cublas(x, weight, bias, DIVISOR)
    broken = broken_promises(out, torch_out, reference, FP16X3_SLACK, allowance)
    if not bound_ratio(out, reference).max() <= 1:
        broken.append("the bound")
    return broken


def judge_named(name, kernel, sizes=(24, 1024, 32), allowance_of=promises.allowance_of_long_sums):
    """Return the broken promises of a named case with these sizes: M, K and N."""
    return judge(draw_case(name, *sizes), kernel, allowance_of(name))


@EACH_KERNEL
@pytest.mark.parametrize("name", CASES)
def test_every_case_keeps_the_promises(name, kernel):
    allowance_of = promises.allowance_of_long_sums
    if kernel.cores == twin.AMPERE:  # its sums keep fewer bits: "graded columns" errs more
        allowance_of = promises.allowance_of_short_sums
    assert judge_named(name, kernel, allowance_of=allowance_of) == []


@EACH_KERNEL
@pytest.mark.parametrize("name", CASES)
def test_promises_hold_for_sizes_that_are_no_multiples_of_anything(name, kernel):
    assert judge_named(name, kernel, (17, 301, 29), promises.allowance_of_short_sums) == []


@EACH_KERNEL
@pytest.mark.parametrize("name", ["normal", "all positive", "16 outlier columns, all positive"])
@pytest.mark.parametrize("k", [2047, 2048, 4096])
def test_promises_hold_where_the_promotion_interval_grows(k, name, kernel):
    assert judge_named(name, kernel, (8, k, 16)) == []


@EACH_KERNEL
@pytest.mark.parametrize("k", [256, 1000])
@pytest.mark.parametrize("seed", [*range(6), *slow(range(6, 24))])
def test_random_compositions_keep_the_promises(seed, k, kernel):
    _, *operands = compositions.operands(seed, 32, k, 32)
    assert judge(operands, kernel) == []


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in promises.LESS_ACCURATE_THAN_TF32]
)
def test_one_product_errs_no_more_than_tf32(name):
    """This holds even if results are computed again alone, not with their tile."""
    kernel = replace(ONE_PRODUCT, tile=1)
    x, weight, bias = draw_case(name, 32, 1024, 48)
    torch_out = twin.epilogue(twin.tf32_product(x, weight, kernel), bias, DIVISOR)
    out = linear(x, weight, bias, DIVISOR, kernel)
    reference = Reference(x, weight, bias, DIVISOR)
    assert broken_promises(out, torch_out, reference, ONE_PRODUCT_SLACK) == []


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("normal", {"promotes": False}),
        ("all positive", {"interval": 256}),
        ("all positive, lognormal", {"interval": 256}),
        ("normal", {"products": 1}),
        ("normal", {"half": torch.bfloat16}),
        ("uniform", {"half": torch.bfloat16}),
        ("graded by 2^22 and inversely graded", {"lo_exponent": 0}),
        ("inf and NaN in x", {"recomputes": False}),
        ("inf and NaN in the weight", {"recomputes": False}),
    ],
)
@EACH_KERNEL
def test_a_kernel_without_one_of_the_steps_breaks_a_promise(name, broken, kernel):
    assert judge_named(name, replace(kernel, **broken)) != []


def test_a_kernel_that_samples_and_does_not_recompute_breaks_a_promise():
    for name in ("sampled weights are tiny", "outliers in the weight"):
        assert judge_named(name, replace(SM90, recomputes=False)) != []
        assert judge_named(name, replace(SM80, recomputes=False)) == []


def derived_bound(k, kernel):
    """Return the derived error of docs/SPLIT-PROOF.md's first table of errors, in units of u S."""
    interval = twin.promotion_interval(k, kernel)
    promotions = 2 if kernel.compensates else math.ceil(k / interval)
    return 8 + 10 * interval / kernel.cores.terms + 0.2 + promotions + 3


@EACH_KERNEL
def test_derived_bound_is_within_the_promise(kernel):
    assert all(derived_bound(k, kernel) <= 64 + k / 64 for k in range(1, 1 << 16))


# K and the kernel of each hunt. The intervals of sm90 are those of longer K.
HUNTED = [
    (64, SM80),
    (64, SM80_ON_HOPPER),
    (128, replace(SM90, interval=32)),
    (128, replace(SM90, interval=64)),
    (192, replace(SM90, interval=128)),
]


@pytest.mark.parametrize(("k", "kernel"), HUNTED)
@pytest.mark.parametrize("rounds", [20, *slow([80])])
def test_a_hunt_finds_no_operands_that_break_the_bound(k, kernel, rounds):
    call = partial(linear, divisor=1.0, kernel=kernel)
    worst = hunt(call, count=128, k=k, rounds=rounds, seed=0) * (64 + k / 64)
    assert 0.3 * derived_bound(k, kernel) < worst <= derived_bound(k, kernel)


def test_an_interval_of_64_on_ampere_breaks_the_bound():
    """63 products are added to a first one near 1. Each is just below half of the sum's last place.

    Truncation drops each of them. The product of the first elements' lo halves is missing as well.
    """
    x = torch.full((1, 64), 2.0**-12 - 2.0**-23)
    weight = torch.full((1, 64), 2.0**-12)
    x[0, 0] = weight[0, 0] = 1 + 2.0**-11 - 2.0**-22
    bias = torch.zeros(1)
    reference = Reference(x, weight, bias, 1.0)
    out = linear(x, weight, bias, 1.0, SM80)
    assert 0.5 < bound_ratio(out, reference).item() < 1
    out_of_too_long = linear(x, weight, bias, 1.0, replace(SM80, interval=64))
    assert bound_ratio(out_of_too_long, reference).item() > 1


def test_rows_of_subnormal_weights_keep_the_bound():
    """Scaled, they are 2^-22, so their products with x are cut as if they were 2^8 times larger."""
    x = torch.full((1, 64), 0.999 * 2.0**83)
    x[0, 0] = 2.0**100
    weight = torch.full((1, 64), 2.0**-149)
    bias = torch.zeros(1)
    reference = Reference(x, weight, bias, 1.0)
    out = linear(x, weight, bias, 1.0, SM90)
    assert 0.1 < bound_ratio(out, reference).item() < 1


# K, and the change that breaks a kernel.
BROKEN = [
    (16, {"lo_exponent": 0}),
    (64, {"products": 1}),
    (64, {"half": torch.bfloat16}),
    (512, {"promotes": False}),
]


@pytest.mark.parametrize(("k", "broken"), BROKEN)
def test_a_hunt_finds_operands_that_break_the_bound_of_a_broken_kernel(k, broken):
    call = partial(linear, divisor=1.0, kernel=replace(SM90, **broken))
    assert hunt(call, count=32, k=k, rounds=15, seed=0) > 1
