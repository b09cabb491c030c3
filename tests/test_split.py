"""The arithmetic of the split product, on its CPU twin: each step, the promises, their breaking.

The yardstick is a float32 sum as cuBLAS makes it, one accumulator along all of k. The CPU's own is
none: it adds up several partial sums and errs up to five times less.
"""

from dataclasses import replace
from functools import partial

import pytest
import ranges
import split_twin as twin
import torch
from adversary import hunt
from compare import assert_same_bits
from compositions import operands
from families import CASES, named
from ranges import FEW_TERMS, ONE_PRODUCT_SLACK, SLACK, Reference, broken_promises, of_bound
from split_twin import KERNELS, SM80, SM80_ON_HOPPER, SM90, cublas, linear, one_product, product
from tensors import slow

from problems.operands import INF, NAN

EACH_KERNEL = pytest.mark.parametrize(
    "kernel", [SM80, SM90, *slow([SM80_ON_HOPPER])], ids=KERNELS.get
)
pytestmark = pytest.mark.usefixtures("one_thread")
DIVISOR = 2.0
UNIT = 2.0**-24

# Float32 has these exactly.
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


def judge(x, weight, bias, split, allowance=FEW_TERMS):
    """The promises that the twin breaks, in words."""
    reference = Reference(x, weight, bias, DIVISOR)
    out = linear(x, weight, bias, DIVISOR, split)
    broken = [] if of_bound(out, reference).max() <= 1 else ["the bound"]
    trusted = cublas(x, weight, bias, DIVISOR)
    return broken + broken_promises(out, trusted, reference, SLACK, allowance)


def judge_named(name, split, sizes=(24, 1024, 32), allowance=ranges.few_terms):
    return judge(*named(name, *sizes), split, allowance(name))


@EACH_KERNEL
@pytest.mark.parametrize("name", CASES)
def test_promises(name, kernel):
    allowance = ranges.few_terms_in_all if kernel.cores == twin.AMPERE else ranges.few_terms
    assert judge_named(name, kernel, allowance=allowance) == []


@EACH_KERNEL
@pytest.mark.parametrize("name", CASES)
def test_promises_at_a_k_that_is_a_multiple_of_nothing(name, kernel):
    assert judge_named(name, kernel, (17, 301, 29), ranges.few_terms_in_all) == []


@EACH_KERNEL
@pytest.mark.parametrize("name", ["normal", "all positive", "16 outlier columns, all positive"])
@pytest.mark.parametrize("k", [2047, 2048, 4096])
def test_promises_on_both_sides_of_a_longer_segment(k, name, kernel):
    assert judge_named(name, kernel, (8, k, 16)) == []


@EACH_KERNEL
@pytest.mark.parametrize("k", [256, 1000])
@pytest.mark.parametrize("seed", [*range(6), *slow(range(6, 24))])
def test_promises_on_random_compositions(seed, k, kernel):
    _, x, weight, bias = operands(seed, 32, k, 32)
    assert judge(x, weight, bias, kernel) == []


def test_compositions_are_drawn_again_finite_and_of_24_bits_of_range():
    (name, *drawn), (again, *others) = operands(3, 5, 70, 6), operands(3, 5, 70, 6)
    assert name == again
    assert_same_bits(drawn, others)
    assert len({operands(seed, 2, 16, 2)[0] for seed in range(100)}) > 95
    for seed in range(100):
        name, x, weight, bias = operands(seed, 16, 256, 16)
        for rows in (x, weight, bias[None]):
            assert torch.isfinite(rows).all(), name
        for rows in (x, weight):
            smallest = torch.where(rows == 0, INF, rows.abs()).amin(1)
            assert (smallest * 2.0**24 >= twin.maxima(rows)).all(), name


def derived_bound(k, kernel):
    """The rows of docs/SPLIT.md's table, in 2^-24."""
    length = twin.segment_length(k, kernel)
    additions = 2 if kernel.compensates else k / length
    return 8 + 10 * length / kernel.cores.terms + 0.2 + additions + 3


@EACH_KERNEL
def test_derived_bound_is_within_the_promise(kernel):
    assert all(derived_bound(k, kernel) <= 64 + k / 64 for k in range(1, 1 << 16))


SOUGHT = [(64, SM80), (64, SM80_ON_HOPPER)]
SOUGHT += [(k, replace(SM90, segment=length)) for k, length in ((128, 32), (128, 64), (192, 128))]


@pytest.mark.parametrize(("k", "kernel"), SOUGHT)
@pytest.mark.parametrize("rounds", [20, *slow([80])])
def test_bound_is_kept_on_operands_sought_to_break_it(k, kernel, rounds):
    call = partial(linear, divisor=1.0, split=kernel)
    worst = hunt(call, count=128, k=k, rounds=rounds, seed=0) * (64 + k / 64)
    assert 0.3 * derived_bound(k, kernel) < worst <= derived_bound(k, kernel)


def test_segment_that_is_too_long_for_ampere_breaks_the_bound():
    """1 + 63 products just below half of its last place; low low of the first counts besides."""
    x, weight = (torch.full((1, 64), small) for small in (2.0**-12 - 2.0**-23, 2.0**-12))
    x[0, 0] = weight[0, 0] = 1 + 2.0**-11 - 2.0**-22
    reference = Reference(x, weight, torch.zeros(1), 1.0)
    parts = [
        of_bound(linear(x, weight, torch.zeros(1), 1.0, split), reference).item()
        for split in (replace(SM80, segment=64), SM80)
    ]
    assert parts[0] > 1 > parts[1] > 0.5


BROKEN = [(16, {"low_top": 0}), (64, {"products": 1})]
BROKEN += [(64, {"piece": torch.bfloat16}), (512, {"promotes": False})]


@pytest.mark.parametrize(("k", "broken"), BROKEN)
def test_hunt_finds_what_breaks_the_bound(k, broken):
    call = partial(linear, divisor=1.0, split=replace(SM90, **broken))
    assert hunt(call, count=32, k=k, rounds=15, seed=0) > 1


@pytest.mark.parametrize("name", [name for name in CASES if name not in ranges.NOT_AS_TF32])
def test_one_product_errs_no_more_than_tf32(name):
    """Even if no result is made again but those of rows that fp16 does not carry."""
    split = replace(one_product(SM90), tile=1)
    x, weight, bias = named(name, 32, 1024, 48)
    trusted = twin.epilogue(twin.tf32_product(x, weight, split), bias, DIVISOR)
    out = linear(x, weight, bias, DIVISOR, split)
    reference = Reference(x, weight, bias, DIVISOR)
    assert broken_promises(out, trusted, reference, ONE_PRODUCT_SLACK) == []


@pytest.mark.parametrize("name", CASES)
def test_cases_measure_something(name):
    """Results meant to be finite are, and float32 errs, except where it is exact."""
    x, weight, bias = named(name, 24, 1024, 32)
    trusted = cublas(x, weight, bias, DIVISOR)
    assert torch.isfinite(trusted).all() == ("inf " not in name and name != "overflow")
    assert torch.isfinite(trusted).double().mean() > 0.25
    errors = Reference(x, weight, bias, DIVISOR).errors(trusted)
    assert (errors.relative > 1e-8) == (name not in EXACT)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("normal", {"promotes": False}),
        ("all positive", {"segment": 256}),
        ("all positive, lognormal", {"segment": 256}),
        ("normal", {"products": 1}),
        ("normal", {"piece": torch.bfloat16}),
        ("uniform", {"piece": torch.bfloat16}),
        ("graded by 2^22 and inversely graded", {"low_top": 0}),
        ("inf and NaN in x", {"redoes": False}),
        ("inf and NaN in the weight", {"redoes": False}),
    ],
)
@EACH_KERNEL
def test_promise_is_broken_without(name, broken, kernel):
    assert judge_named(name, replace(kernel, **broken)) != []


def test_promise_is_broken_where_a_sampled_maximum_is_missed_and_nothing_made_again():
    for name in ("sampled weights are tiny", "outliers in the weight"):
        assert judge_named(name, replace(SM90, redoes=False)) != []
        assert judge_named(name, replace(SM80, redoes=False)) == []


ONE_PRODUCT = one_product(SM90)


def lognormal(rows, k, sigma):
    return torch.randn(rows, k).sign() * (torch.randn(rows, k) * sigma).exp()


CARRIED = {
    "normal": lambda n, k: torch.randn(n, k),
    "uniform": lambda n, k: 2 * torch.rand(n, k) - 1,
    "lognormal": lambda n, k: lognormal(n, k, 2),
    "student": lambda n, k: torch.randn(n, k) / torch.randn(2, n, k).square().mean(0).sqrt(),
    "outliers": lambda n, k: torch.randn(n, k) * torch.where(torch.rand(n, k) < 1e-3, 1e3, 1.0),
    "int8": lambda n, k: torch.randint(-127, 128, (n, k)).float(),
    "int4, scaled": lambda n, k: torch.randint(-8, 8, (n, k)) * 1e-3,
    "half precision": lambda n, k: torch.randn(n, k).half().float(),
    "zero": lambda n, k: torch.zeros(n, k),
    "ones": lambda n, k: torch.ones(n, k),
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


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("k", [1000, 8192])
def test_ordinary_rows_are_carried(name, k):
    rows = CARRIED[name](256, k)
    for rounded in (twin.round_x, twin.round_weight):
        assert not rounded(rows, ONE_PRODUCT)[2].any()


def graded(k):
    return torch.linspace(-20, 20, k).exp2()


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
def test_wide_rows_are_not_carried(name):
    """Tiny is subnormal in fp16, beside the largest of a row of x and the mean of a weight's."""
    for rounded, tiny in ((twin.round_x, 2.0**-33), (twin.round_weight, 2.0**-20)):
        rows = torch.randn(8, 4096)
        rows[3] = WIDE_ROWS[name](4096, tiny)
        assert rounded(rows, ONE_PRODUCT)[2].nonzero().tolist() == [[3]]


def test_an_outlier_that_overflows_is_not_carried():
    rows = torch.randn(8, 4096)
    rows[2, 1001], rows[5, 1001] = 2.0**17, 2.0**11
    assert twin.round_weight(rows, ONE_PRODUCT)[2].nonzero().tolist() == [[2]]


def test_tiles_are_made_again_as_a_whole():
    x, weight = torch.randn(10, 256), torch.randn(9, 256)
    want = product(x, weight, ONE_PRODUCT)
    x[1, 7], weight[8, 3] = NAN, INF
    got = product(x, weight, replace(ONE_PRODUCT, tile=4))
    again = torch.zeros(10, 9, dtype=torch.bool)
    again[:4], again[:, 8:] = True, True
    tf32s = twin.tf32_product(x, weight, ONE_PRODUCT)
    assert_same_bits(got, torch.where(again, tf32s, want))
    assert not torch.equal(tf32s[2:4, :8], want[2:4, :8])


def test_a_weight_that_overflows_makes_all_its_results_infinite_or_nan():
    """So that what has to be made again is found in the product, whatever x is."""
    x = torch.randn(8, 256)
    x[0], x[1] = 0, x[1].abs()
    weight = torch.randn(6, 256)
    e_x, e_weight = twin.exponents(twin.maxima(x), 15), torch.full((6,), 7)
    weight[2, 200], weight[3, 0], weight[4, 100] = 512, -(2.0**30), 511.8  # 512 * 2^7 rounds to inf
    total = twin.scaled_sum(x, weight, e_x, e_weight, SM90)
    finite = torch.isfinite(total)
    assert finite.any(0).tolist() == [True, True, False, False, True, True]
    assert torch.equal(finite.all(0), finite.any(0))


def test_scales():
    """Maxima lie below a power of two, and scaling is undone exactly."""
    smallest = torch.finfo(torch.float32).smallest_normal
    maximum = torch.tensor([1.0, 2.0, 1.999, 3e38, smallest, smallest / 2**23, 5e-42, 1e-30])
    for top in (15, 8):
        exponent = twin.exponents(maximum, top)
        scaled = twin.scale(maximum[:, None], exponent)
        assert ((2.0 ** (top - 1) <= scaled) & (scaled < 2.0**top)).all()
        assert torch.equal(torch.ldexp(scaled[:, 0], -exponent.double()).float(), maximum)
    assert twin.exponents(torch.tensor([0.0, INF, NAN]), 15).tolist() == [0, 0, 0]


def test_pieces_carry_23_bits():
    scaled = (torch.randn(1 << 18) * torch.randint(-24, 13, (1 << 18,)).float().exp2()).double()
    high, low = twin.split_pieces(scaled)
    error = (scaled - high - low * 2.0**-11).abs()
    assert (error <= (scaled.abs() * 2.0**-23).clamp(min=2.0**-36)).all()
    assert (error[scaled.abs() >= 2.0**-13] > 0).double().mean() < 0.3  # most are carried exactly


def test_low_pieces_overflow_only_where_high_ones_do():
    scaled = torch.linspace(2**15, 65600, 1 << 16, dtype=torch.float64).float().double()
    for piece in twin.split_pieces(scaled):
        assert torch.equal(torch.isfinite(piece), scaled < 65520)


@pytest.fixture
def judged():
    """A reference, and torch's result, in which nothing is clipped."""
    x, weight, bias = named("normal", 8, 64, 8)
    bias += 100
    return Reference(x, weight, bias, 1.0), cublas(x, weight, bias, 1.0)


def test_judge(judged):
    reference, trusted = judged

    def broken(change, trusted=trusted):
        out = trusted.clone()
        change(out)
        return broken_promises(out, trusted, reference)

    def put(value):
        return lambda out: out[3, 4].fill_(value)

    assert broken(lambda out: None) == []
    for value in (NAN, INF, -INF):
        assert "misplaced" in broken(put(value))[0]
    assert len(broken(put(99.0))) == 3
    assert any("mean" in line for line in broken(lambda out: out.mul_(1 + 1e-6)))

    infinite = trusted.clone()
    infinite[3, 4] = INF
    assert broken(put(INF), infinite) == []
    reference.out[3, 4] = INF
    assert broken(put(INF), infinite) == []
    for value in (NAN, -INF, 3e38, 0.0):
        assert "misplaced" in broken(put(value), infinite)[0]


def test_judge_of_few_terms(judged):
    reference, trusted = judged
    for units, count in ((5, 0), (20, 3), (70, 3)):
        out = (reference.out + units * UNIT * reference.magnitude).float()
        assert len(broken_promises(out, trusted, reference, SLACK, FEW_TERMS)) == count
        assert (of_bound(out, reference).max() > 1) == (units == 70)
