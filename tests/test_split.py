"""The arithmetic of the split product, on its CPU twin: each step, the promise, and its breaking.

The yardstick is a float32 sum as cuBLAS makes it, one accumulator along all of k. The CPU's own is
none: it adds up several partial sums and errs up to five times less.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from ranges import CASES, INF, NAN, ONE_PRODUCT_SLACK, Reference, broken_promises
from split_twin import (
    SM80,
    SM90,
    accumulate,
    cublas,
    exact_path,
    exponents,
    fma_sums,
    linear,
    one_product,
    prepare,
    product,
    scale,
    segment_length,
    split_pieces,
    tensor_core_sum,
    tf32,
    truncate,
)

KERNELS = pytest.mark.parametrize("kernel", [SM80, SM90], ids=["sm80", "sm90"])
DIVISOR = 2.0


def ulp(x):
    """Of float32 values, as float64."""
    return torch.ldexp(torch.ones_like(x.double()), torch.frexp(x).exponent - 24)


@pytest.fixture(autouse=True)
def one_thread():
    """Most tensors here are small: threads that wait for each other take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def drawn(name, sizes):
    operands = *CASES[name].draw(*sizes), DIVISOR
    return operands, Reference(*operands), cublas(*operands)


def judge(name, split, sizes=(32, 2048, 48)):
    operands, reference, trusted = drawn(name, sizes)
    return broken_promises(linear(*operands, split), trusted, reference)


# ------------------------------------------------------------------------------------ the promise


@KERNELS
@pytest.mark.parametrize("name", CASES)
def test_promise(name, kernel):
    assert judge(name, kernel) == []


@KERNELS
@pytest.mark.parametrize("name", CASES)
def test_promise_at_a_k_that_is_a_multiple_of_nothing(name, kernel):
    assert judge(name, kernel, (17, 1003, 29)) == []


@KERNELS
@pytest.mark.parametrize("name", CASES)
def test_one_product_errs_no_more_than_tf32(name, kernel):
    (x, weight, bias, divisor), reference, _ = drawn(name, (32, 1024, 48))
    trusted = cublas(tf32(x), tf32(weight), bias, divisor)
    out = linear(x, weight, bias, divisor, one_product(kernel))
    assert broken_promises(out, trusted, reference, ONE_PRODUCT_SLACK) == []


@pytest.mark.parametrize("name", CASES)
def test_cases_measure_something(name):
    """What is meant to be finite is, and float32 errs, except where it is exact."""
    _, reference, trusted = drawn(name, (32, 2048, 48))
    assert torch.isfinite(trusted).all() == ("inf and NaN" not in name and name != "overflow")
    assert torch.isfinite(trusted).double().mean() > 0.25
    errors = reference.errors(trusted)
    assert (errors.relative > 1e-8) == (
        name not in ("small integers", "ones", "weight that selects")
    )


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("normal", {"promotes": False}),
        ("normal", {"segment": 512, "compensation": 0.0}),
        ("all positive", {"promotes": False}),
        ("all positive", {"segment": 256, "one_signed": 0.0}),
        ("normal", {"products": 1}),
        ("normal", {"piece": torch.bfloat16}),
        ("uniform", {"piece": torch.bfloat16}),
        ("1e30 meets a zero column", {"flags": False}),
        ("graded and inversely graded", {"flags": False}),
        ("inf and NaN in x", {"flags": False}),
        ("inf and NaN in the weight", {"flags": False}),
        ("weight that selects", {"terms": 0}),
        ("sparse x, 1 in 100", {"terms": 0}),
        ("large values meet zeros", {"terms": 0}),
    ],
)
@KERNELS
def test_promise_is_broken_without(name, broken, kernel):
    if name == "weight that selects" and kernel.sampled:
        broken = {**broken, "flags": False}  # most of its samples are zero, which is flagged too
    assert judge(name, replace(kernel, **broken)) != []


def test_promise_is_broken_where_a_sampled_maximum_is_not_checked():
    for name in ("sampled weights are zero", "sampled weights are tiny"):
        assert judge(name, replace(SM90, flags=False)) != []
        assert judge(name, replace(SM80, flags=False)) == []


def test_compensation_heeds_terms_of_one_sign():
    for name in ("all positive", "all positive, lognormal"):
        assert judge(name, replace(SM90, segment=256)) == []


def test_compensation_leaves_exact_sums_alone(monkeypatch):
    """The same share of every sum, as if all were rounded, would spoil what float32 has exactly."""
    for name in ("small integers", "ones"):
        x, weight, _ = CASES[name].draw(32, 2048, 48)
        out, *_ = product(x, weight, replace(SM80, compensation=1.0))
        assert torch.equal(out.double(), x.double() @ weight.double().t())


# ------------------------------------------------------------------------------------------ flags

ALL, NONE, SOME = "all", "none", "some"

# Of x, of weight on sm_80, of weight on sm_90; none and none unless named here.
FLAGS = {
    "wide lognormal": (NONE, NONE, SOME),
    "weight that selects": (NONE, ALL, ALL),
    "outliers in the weight": (NONE, NONE, SOME),
    "sparse x, 1 in 100": (ALL, NONE, NONE),
    "sparse weight, 1 in 100": (NONE, ALL, ALL),
    "sparse x and weight, 1 in 10": (ALL, ALL, ALL),
    "graded columns": (ALL, NONE, NONE),
    "graded columns, shuffled": (ALL, NONE, NONE),
    "graded and inversely graded": (ALL, ALL, ALL),
    "graded and inversely graded, shuffled": (ALL, ALL, ALL),
    "mildly graded and inversely graded": (NONE, NONE, ALL),
    "1e30 meets a zero column": (ALL, NONE, NONE),
    "1e5 meets a zero column": (ALL, NONE, NONE),
    "2^10 .. 2^24 meet a zero column": (SOME, NONE, NONE),
    "weight of 1e30 meets a zero column": (NONE, ALL, ALL),
    "large values meet zeros": (NONE, ALL, ALL),
    "inf and NaN in x": (SOME, NONE, NONE),
    "inf and NaN in the weight": (NONE, SOME, SOME),
    "sampled weights are zero": (NONE, NONE, ALL),
    "sampled weights are tiny": (NONE, NONE, SOME),
    "sampled weights are huge": (NONE, SOME, SOME),
    "huge sampled weights meet zeros": (NONE, SOME, SOME),
}


def amount(flagged):
    return ALL if flagged.all() else SOME if flagged.any() else NONE


@pytest.mark.parametrize("name", CASES)
def test_flags(name):
    x, weight, _ = CASES[name].draw(32, 8192, 48)
    want_x, *want_weight = FLAGS.get(name, (NONE, NONE, NONE))
    assert amount(prepare(x, SM80.x_top, False, SM80).flagged) == want_x
    for kernel, want in zip((SM80, SM90), want_weight, strict=True):
        rows = prepare(weight, kernel.weight_top, kernel.sampled, kernel)
        overflowed = ~(torch.isfinite(rows.pieces[0]) & torch.isfinite(rows.pieces[1])).all(1)
        assert amount(rows.flagged | overflowed) == want, kernel


def test_flags_do_not_depend_on_the_other_operand():
    """inf in x reaches every result of its rows, none of which may flag a row of the weight."""
    x, weight, _ = CASES["inf and NaN in x"].draw(32, 512, 48)
    for kernel in (SM80, SM90):
        assert not product(x, weight, kernel)[2].flagged.any()


def test_zero_rows_are_not_flagged():
    rows = torch.zeros(3, 512)
    for kernel in (SM80, SM90):
        assert not prepare(rows, 8, kernel.sampled, kernel).flagged.any()


def test_limits_of_the_flags():
    k = 2048
    rows = torch.zeros(6, k)
    rows[0, :512] = 1  # sqrt(128 * 2048) nonzero elements
    rows[1, :511] = 1
    rows[2:] = 1
    tiny = 2.0**-21  # 2^14 is the largest
    rows[2, -k // 32 :] = tiny
    rows[3, -k // 32 - 1 :] = tiny
    rows[4, -k // 32 - 1 :] = 2 * tiny
    rows[5, -1] = INF
    want = [False, True, False, True, False, True]
    assert prepare(rows, 15, False, SM80).flagged.tolist() == want


# -------------------------------------------------------------------------------- scale and split


def test_maxima_are_scaled_below_a_power_of_two():
    smallest = torch.finfo(torch.float32).smallest_normal
    maximum = torch.tensor([1.0, 2.0, 1.999, 3e38, smallest, smallest / 2**23, 5e-42, 1e-30])
    for top in (15, 8):
        scaled = scale(maximum[:, None], exponents(maximum, top))
        assert ((2.0 ** (top - 1) <= scaled) & (scaled < 2.0**top)).all()
    assert exponents(torch.tensor([0.0, INF, NAN]), 15).tolist() == [0, 0, 0]


def test_scaling_is_undone_exactly():
    x = torch.randn(64, 300) * torch.randint(-100, 100, (64, 1)).float().exp2()
    exponent = exponents(x.abs().amax(1), 15)
    back = torch.ldexp(scale(x, exponent), -exponent[:, None].double()).float()
    assert torch.equal(back, x)


def test_pieces_carry_23_bits():
    scaled = (torch.randn(1 << 18) * torch.randint(-24, 13, (1 << 18,)).float().exp2()).double()
    high, low = split_pieces(scaled)
    error = (scaled - high - low).abs()
    assert (error <= (scaled.abs() * 2.0**-23).clamp(min=2.0**-25)).all()
    assert (error[scaled.abs() >= 2.0**-2] > 0).double().mean() < 0.3  # most are carried exactly


def test_fp16_values_have_no_low_piece():
    scaled = torch.randn(1000).half().double()
    high, low = split_pieces(scaled)
    assert torch.equal(high, scaled)
    assert not low.any()


# ----------------------------------------------------------------------------------- tensor cores


def test_truncate():
    x = torch.randn(10000, dtype=torch.float64)
    cut = truncate(x)
    assert torch.equal(cut, cut.float().double())
    assert (((x - cut) * x.sign() >= 0) & ((x - cut).abs() < ulp(cut.float()))).all()
    special = torch.tensor([0.0, INF, -INF, 1.0, -(2.0**-140)], dtype=torch.float64)
    assert torch.equal(truncate(special), special)
    assert truncate(torch.tensor(NAN, dtype=torch.float64)).isnan()


def add(total, products, alignment):
    x = torch.zeros(1, 16, dtype=torch.float64)
    x[0, : len(products)] = torch.tensor(products, dtype=torch.float64)
    total = torch.full((1, 1), total, dtype=torch.float64)
    return accumulate(total, x, torch.ones(1, 16, dtype=torch.float64), alignment).item()


def test_accumulate():
    unit = 2.0**-23  # of 1
    for alignment in (None, 0, 1, 2, 3):
        assert add(1.0, [1.5 * unit], alignment) == 1 + unit
        assert add(-1.0, [-1.5 * unit], alignment) == -1 - unit
        assert add(0.0, [0.0], alignment) == 0
        assert add(0.0, [3 * 2.0**-40, -(2.0**-42)], alignment) == 11 * 2.0**-42
    for alignment in (0, 1, 2, 3):  # 16 products that are each just on, or just below, the last bit
        last = unit / 2**alignment
        assert add(1.0, [last] * 16, alignment) == 1 + 16 * last
        assert add(1.0, [last / 2] * 16, alignment) == 1
    assert add(1.0, [unit / 16] * 16, None) == 1 + unit


@pytest.mark.gpu
def test_tensor_cores_accumulate_as_the_twin_does():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the twin has Hopper's alignment")
    for k in (16, 32, 64):
        for draw in (torch.randn, torch.rand):
            x, weight = draw(128, k).half(), draw(128, k).half()
            got = torch.mm(x.cuda(), weight.cuda().t(), out_dtype=torch.float32).cpu()
            want = torch.zeros(128, 128, dtype=torch.float64)
            for a, b in zip(x.double().split(16, 1), weight.double().split(16, 1), strict=True):
                want = accumulate(want, a, b, SM90.alignment)
            assert torch.equal(got.double(), want)


def lost_share(segment):
    """The share of sums of one sign that truncation takes."""
    rows = (torch.rand(16, 2048) * 2.0**12).half().double()
    pieces = (rows, torch.zeros_like(rows))
    got = tensor_core_sum(pieces, pieces, segment, SM80)
    want = rows @ rows.t()
    return ((want - got) / want).mean().item()


def test_promotion_bounds_what_truncation_takes():
    losses = [lost_share(segment) for segment in (128, 512, 2048)]
    assert losses[0] > 0
    assert losses[1] > 3 * losses[0]
    assert losses[2] > 3 * losses[1]


def test_segment_length():
    assert [segment_length(k) for k in (1, 4095, 4096, 8191, 8192, 65536)] == [
        *(64, 64, 128, 128, 256, 256)
    ]


# ------------------------------------------------------------------------------- float32 and exact


def test_fma_sums_round_once_a_step():
    x = torch.tensor([[1 + 2.0**-11, 1 + 2.0**-12]])
    weight = torch.tensor([[-1.0, 1 + 2.0**-12]])
    assert fma_sums(x, weight, 2).item() == 2.0**-24
    x = torch.tensor([[2.0**24, 1.0, 1.0, 1.0]])
    assert fma_sums(x, torch.ones(1, 4), 4).item() == 2.0**24
    assert fma_sums(x, torch.ones(1, 4), 2).flatten().tolist() == [2.0**24, 2.0]


def test_exact_path_sums_short_segments_in_float64():
    x = torch.zeros(1, 96)
    x[0, 0], x[0, 32], x[0, 64] = 2.0**24, 1.0, 1.0
    assert exact_path(x, torch.ones(1, 96)).item() == 2.0**24 + 2


# -------------------------------------------------------------------------------------- the judge


def test_judge():
    x, weight, bias = CASES["normal"].draw(8, 64, 8)
    bias += 100  # nothing is clipped
    reference = Reference(x, weight, bias, 1.0)
    trusted = cublas(x, weight, bias, 1.0)

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
