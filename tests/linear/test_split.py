"""The arithmetic of the float32 GEMMs, on their CPU twin: its steps, and the promises.

The names of the steps are those of docs/SPLIT.md. Tests also show that a twin without one of the
steps breaks a promise. Errors are compared with those of a float32 sum as cuBLAS computes it, in
one accumulator along all of K. The CPU's own product is not used for that: it adds several partial
sums and errs up to five times less.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from problems.operands import INF, NAN
from tests.support import promises
from tests.support import split_twin as twin
from tests.support.adversary import hunt
from tests.support.compare import assert_same_bits
from tests.support.compositions import operands
from tests.support.named_operands import CASES, draw_case, sampled_columns, sampled_spans
from tests.support.processes import ROOT
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
    product,
)
from tests.support.tensors import slow

QUICK = [kernel for kernel in FP16X3_KERNELS if kernel != SM80_ON_HOPPER]
EACH_KERNEL = pytest.mark.parametrize(
    "kernel", [*QUICK, *slow([SM80_ON_HOPPER])], ids=FP16X3_KERNELS.get
)
pytestmark = pytest.mark.usefixtures("one_thread")
DIVISOR = 2.0
UNIT = 2.0**-24

# Cases whose float32 results are exact.
EXACT = [
    "small integers",
    "ones",
    "weight that selects",
    "integers, larger ones in the sample",
    "one-hot x",
    "one-hot x meets a tiny column",
    "zero weight",
    "inf in all rows of x",
]


def judge(x, weight, bias, kernel, allowance=FEW_TERMS_ERROR):
    """Return a message for each promise that the twin of a kernel breaks."""
    reference = Reference(x, weight, bias, DIVISOR)
    out = linear(x, weight, bias, DIVISOR, kernel)
    torch_out = cublas(x, weight, bias, DIVISOR)
    broken = broken_promises(out, torch_out, reference, FP16X3_SLACK, allowance)
    if not bound_ratio(out, reference).max() <= 1:
        broken.append("the bound")
    return broken


def judge_named(name, kernel, sizes=(24, 1024, 32), allowance_of=promises.allowance_of_long_sums):
    """Return the broken promises of a named case with these sizes: M, K and N."""
    return judge(*draw_case(name, *sizes), kernel, allowance_of(name))


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
    _, x, weight, bias = operands(seed, 32, k, 32)
    assert judge(x, weight, bias, kernel) == []


def test_compositions_are_reproducible_finite_and_have_24_bits_of_range():
    name, *tensors = operands(3, 5, 70, 6)
    same_name, *same_tensors = operands(3, 5, 70, 6)
    assert name == same_name
    assert_same_bits(tensors, same_tensors)
    assert len({operands(seed, 2, 16, 2)[0] for seed in range(100)}) > 95
    for seed in range(100):
        name, x, weight, bias = operands(seed, 16, 256, 16)
        for rows in (x, weight, bias[None]):
            assert torch.isfinite(rows).all(), name
        for rows in (x, weight):
            smallest = torch.where(rows == 0, INF, rows.abs()).amin(1)
            assert (smallest * 2.0**24 >= twin.maxima(rows)).all(), name


def test_the_example_of_the_guide_has_the_numbers_of_the_twin():
    """The guide is docs/SPLIT.md."""
    x = torch.tensor([[3.7, 0.01]])
    weight = torch.tensor([[0.3, -2.0]])
    e_x = twin.exponents(twin.maxima(x), SM90.x_target)
    e_weight = twin.weight_exponents(weight, SM90)
    parts = [*twin.split(twin.scale(x, e_x)), *twin.split(twin.scale(weight, e_weight))]
    total = twin.scaled_sum(x, weight, e_x, e_weight, SM90)
    numbers = [*torch.cat(parts).flatten().tolist(), total.item()]
    text = (ROOT / "docs" / "SPLIT.md").read_text()
    _, _, example = text.partition("### An example\n")
    assert (e_x.item(), e_weight.item()) == (13, 8)
    assert [number for number in numbers if f"{number:.16g}" not in example] == []
    out = linear(x, weight, torch.tensor([0.5]), DIVISOR, SM90).item()
    assert f"/ 2 = {out:.10f} |" in example
    exact = ((x.double() @ weight.double().t()).item() + 0.5) / DIVISOR
    assert f"result of these float32 operands is {exact:.10f}" in example


def derived_bound(k, kernel):
    """Return the sum of the rows of docs/SPLIT-PROOF.md's table, in units of 2^-24."""
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
    x, weight = (torch.full((1, 64), small) for small in (2.0**-12 - 2.0**-23, 2.0**-12))
    x[0, 0] = weight[0, 0] = 1 + 2.0**-11 - 2.0**-22
    reference = Reference(x, weight, torch.zeros(1), 1.0)
    too_long, right = (
        bound_ratio(linear(x, weight, torch.zeros(1), 1.0, kernel), reference).item()
        for kernel in (replace(SM80, interval=64), SM80)
    )
    assert too_long > 1 > right > 0.5


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


@pytest.mark.parametrize("name", CASES)
def test_cases_have_finite_results_and_errors(name):
    """Results are finite except in cases named otherwise; float32 errs except in exact cases."""
    x, weight, bias = draw_case(name, 24, 1024, 32)
    torch_out = cublas(x, weight, bias, DIVISOR)
    assert torch.isfinite(torch_out).all() == ("inf " not in name and name != "overflow")
    assert torch.isfinite(torch_out).double().mean() > 0.25
    errors = Reference(x, weight, bias, DIVISOR).errors(torch_out)
    assert (errors.relative > 1e-8) == (name not in EXACT)


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


def lognormal(rows, k, sigma):
    """Draw values of both signs whose logarithms have this standard deviation."""
    return torch.randn(rows, k).sign() * (torch.randn(rows, k) * sigma).exp()


# By name, a function of the number of rows and of K that draws rows that fit into fp16.
ORDINARY_ROWS = {
    "normal": torch.randn,
    "uniform": lambda n, k: 2 * torch.rand(n, k) - 1,
    "lognormal": lambda n, k: lognormal(n, k, 2),
    "student": lambda n, k: torch.randn(n, k) / torch.randn(2, n, k).square().mean(0).sqrt(),
    "outliers": lambda n, k: torch.randn(n, k) * torch.where(torch.rand(n, k) < 1e-3, 1e3, 1.0),
    "int8": lambda n, k: torch.randint(-127, 128, (n, k)).float(),
    "int4, scaled": lambda n, k: torch.randint(-8, 8, (n, k)) * 1e-3,
    "half precision": lambda n, k: torch.randn(n, k).half().float(),
    "zero": torch.zeros,
    "ones": torch.ones,
    "1 in 100 is zero": lambda n, k: torch.randn(n, k) * (torch.rand(n, k) > 0.01),
    "1 in 100 is not zero": lambda n, k: torch.randn(n, k) * (torch.rand(n, k) < 0.01),
    "2 of 4": lambda n, k: torch.randn(n, k // 4, 4).mul(torch.tensor([1, 0, 0, 1])).view(n, k),
    "blocks": lambda n, k: (
        torch.randn(n, k) * (torch.arange(n)[:, None] % 8 == torch.arange(k) % 8)
    ),
    "selects": lambda n, k: torch.eye(k)[torch.randint(k, (n,))],
    "tiny": lambda n, k: torch.randn(n, k) * 2.0**-110,
    "huge": lambda n, k: torch.randn(n, k) * 2.0**120,
}


@pytest.mark.parametrize("name", ORDINARY_ROWS)
@pytest.mark.parametrize("k", [1000, 8192])
def test_ordinary_rows_do_not_need_tf32(name, k):
    rows = ORDINARY_ROWS[name](256, k)
    for as_fp16 in (twin.x_as_fp16, twin.weight_as_fp16):
        _, _, needs_tf32 = as_fp16(rows, ONE_PRODUCT)
        assert not needs_tf32.any()


def graded(k):
    """Return k values from 2^-20 to 2^20."""
    return torch.linspace(-20, 20, k).exp2()


# By name, a function of K and of a tiny value that draws a row that does not fit into fp16.
WIDE_ROWS = {
    "inf": lambda k, tiny: torch.randn(k).index_fill_(0, torch.tensor([k - 1]), INF),
    "NaN": lambda k, tiny: torch.randn(k).index_fill_(0, torch.tensor([k // 2]), NAN),
    "all NaN": lambda k, tiny: torch.full((k,), NAN),
    "graded": lambda k, tiny: graded(k),
    "inversely graded": lambda k, tiny: graded(k).flip(0),
    "graded, shuffled": lambda k, tiny: graded(k)[torch.randperm(k)],
    "1 in 16 is tiny": lambda k, tiny: torch.where(torch.rand(k) < 1 / 16, tiny, 1.0),
    "1 in 8 of few is tiny": lambda k, tiny: (
        torch.where(torch.rand(k) < 1 / 8, tiny, 1.0) * (torch.rand(k) < 0.1)
    ),
}


@pytest.mark.parametrize("name", WIDE_ROWS)
def test_wide_rows_need_tf32(name):
    """A tiny value is subnormal in fp16 when the row is scaled, by its maximum or by its mean."""
    for as_fp16, tiny in ((twin.x_as_fp16, 2.0**-33), (twin.weight_as_fp16, 2.0**-20)):
        rows = torch.randn(8, 4096)
        rows[3] = WIDE_ROWS[name](4096, tiny)
        _, _, needs_tf32 = as_fp16(rows, ONE_PRODUCT)
        assert needs_tf32.nonzero().tolist() == [[3]]


def test_a_row_with_an_outlier_that_overflows_needs_tf32():
    rows = torch.randn(8, 4096)
    rows[2, 1001] = 2.0**17
    rows[5, 1001] = 2.0**11
    _, _, needs_tf32 = twin.weight_as_fp16(rows, ONE_PRODUCT)
    assert needs_tf32.nonzero().tolist() == [[2]]


def test_tiles_are_computed_again_as_a_whole():
    """They have TF32's bits, also in rows without a special value. Other tiles do not change."""
    x = torch.randn(10, 256)
    weight = torch.randn(9, 256)
    want = product(x, weight, ONE_PRODUCT)
    x[1, 7] = NAN
    weight[8, 3] = INF
    got = product(x, weight, replace(ONE_PRODUCT, tile=4))
    is_tf32 = torch.zeros(10, 9, dtype=torch.bool)
    is_tf32[:4] = True
    is_tf32[:, 8:] = True
    tf32s = twin.tf32_product(x, weight, ONE_PRODUCT)
    assert_same_bits(got, torch.where(is_tf32, tf32s, want))
    assert not torch.equal(tf32s[2:4, :8], want[2:4, :8])


def test_a_weight_that_overflows_makes_all_its_results_infinite_or_nan():
    """So the results show which must be computed again. It holds for any x, even for zeros."""
    x = torch.randn(8, 256)
    x[0] = 0
    x[1] = x[1].abs()
    weight = torch.randn(6, 256)
    e_x = twin.exponents(twin.maxima(x), SM90.x_target)
    e_weight = torch.full((6,), 7)
    weight[2, 200] = 512  # 512 * 2^7 rounds to inf
    weight[3, 0] = -(2.0**30)
    weight[4, 100] = 511.8  # this one does not
    total = twin.scaled_sum(x, weight, e_x, e_weight, SM90)
    finite = torch.isfinite(total)
    assert finite.any(0).tolist() == [True, True, False, False, True, True]
    assert torch.equal(finite.all(0), finite.any(0))


def test_exponents_of_a_weight_have_the_limits_of_sm90():
    """docs/SPLIT.md, step 1, says why they lose nothing."""
    weight = torch.tensor([[2.0**127], [2.0**121], [2.0**120], [2.0**-118], [2.0**-119]])
    weight = weight.expand(5, 8)
    assert twin.weight_exponents(weight, SM90).tolist() == [-111, -111, -111, 127, 127]
    assert twin.weight_exponents(weight, SM80).tolist() == [-113, -107, -106, 132, 133]
    assert twin.mean_exponents(weight, ONE_PRODUCT).tolist() == [-125, -119, -118, 120, 121]
    assert twin.mean_exponents(weight * 2.0**-8, ONE_PRODUCT).tolist()[3:] == [126, 126]


def test_sampled_spans_are_whole_fours_and_begin_at_multiples_of_four():
    """`test_emulator.py` compares with the kernel."""
    for k in (96, 300, 301, 1000, 2047, 8192):
        spans = sampled_spans(k)
        assert len(spans) == 8
        for number, span in enumerate(spans):
            begin = span[0].item()
            assert begin % 4 == 0 and number * k / 8 - 4 < begin <= number * k / 8
            assert span.tolist() == list(range(begin, begin + len(span)))
            assert len(span) == 16 or span[-1].item() == k // 4 * 4 - 1
    assert [span[0].item() for span in sampled_spans(1000)][:3] == [0, 124, 248]
    assert sampled_columns(21).tolist() == list(range(20))
    assert sampled_columns(3).tolist() == []


def test_scaled_maxima_are_just_below_a_power_of_two_and_scaling_is_exact():
    smallest = torch.finfo(torch.float32).smallest_normal
    maximum = torch.tensor([1.0, 2.0, 1.999, 3e38, smallest, smallest / 2**23, 5e-42, 1e-30])
    for target in (14, 9, 2):
        exponent = twin.exponents(maximum, target)
        scaled = twin.scale(maximum[:, None], exponent)
        assert ((2.0**target <= scaled) & (scaled < 2.0 ** (target + 1))).all()
        assert torch.equal(torch.ldexp(scaled[:, 0], -exponent.double()).float(), maximum)
    assert twin.exponents(torch.tensor([0.0, INF, NAN]), 14).tolist() == [0, 0, 0]


def test_hi_and_lo_keep_23_bits():
    """The error of hi + lo is at most 2^-23 of the value, or 2^-36 for small ones."""
    scaled = (torch.randn(1 << 18) * torch.randint(-24, 13, (1 << 18,)).float().exp2()).double()
    hi, lo = twin.split(scaled)
    error = (scaled - hi - lo * 2.0**-11).abs()
    assert (error <= (scaled.abs() * 2.0**-23).clamp(min=2.0**-36)).all()
    assert (error[scaled.abs() >= 2.0**-13] > 0).double().mean() < 0.3  # most are exact


def test_lo_overflows_only_where_hi_does():
    scaled = torch.linspace(2**15, 65600, 1 << 16, dtype=torch.float64).float().double()
    for half in twin.split(scaled):
        assert torch.equal(torch.isfinite(half), scaled < 65520)


@pytest.fixture
def reference_and_result():
    """Return a reference, and torch's result; ReLU changes no element of them."""
    x, weight, bias = draw_case("normal", 8, 64, 8)
    bias += 100
    return Reference(x, weight, bias, 1.0), cublas(x, weight, bias, 1.0)


def test_broken_promises_names_misplaced_values_and_errors(reference_and_result):
    """An infinity that torch's sum has may be finite in ours, but only if the exact result is."""
    reference, torch_out = reference_and_result

    def broken(change, torch_out=torch_out):
        out = torch_out.clone()
        change(out)
        return broken_promises(out, torch_out, reference)

    def put(value):
        return lambda out: out[3, 4].fill_(value)

    assert broken(lambda out: None) == []
    for value in (NAN, INF, -INF):
        assert "misplaced" in broken(put(value))[0]
    assert len(broken(put(99.0))) == 3
    assert any("mean" in line for line in broken(lambda out: out.mul_(1 + 1e-6)))

    infinite = torch_out.clone()
    infinite[3, 4] = INF
    assert broken(put(INF), infinite) == []
    reference.out[3, 4] = INF
    assert broken(put(INF), infinite) == []
    for value in (NAN, -INF, 3e38, 0.0):
        assert "misplaced" in broken(put(value), infinite)[0]


def test_broken_promises_allows_larger_errors_of_few_terms(reference_and_result):
    reference, torch_out = reference_and_result
    for units, count in ((5, 0), (20, 3), (70, 3)):
        out = (reference.out + units * UNIT * reference.magnitude).float()
        broken = broken_promises(out, torch_out, reference, FP16X3_SLACK, FEW_TERMS_ERROR)
        assert len(broken) == count
        assert (bound_ratio(out, reference).max() > 1) == (units == 70)
