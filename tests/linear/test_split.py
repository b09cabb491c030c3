"""The steps of the float32 GEMMs' arithmetic, on their CPU twin.

The names of the steps are those of docs/SPLIT.md. test_split_errors.py judges whole results.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from problems import operands
from problems.operands import INF, NAN, Draw
from tests.support import split_twin as twin
from tests.support.compare import assert_same_bits
from tests.support.named_operands import sampled_columns, sampled_spans, student
from tests.support.processes import ROOT
from tests.support.split_twin import ONE_PRODUCT, SM80, SM90

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_example_of_the_guide_has_the_numbers_of_the_twin():
    """The guide is docs/SPLIT.md. Its divisor is 2."""
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
    out = twin.linear(x, weight, torch.tensor([0.5]), 2.0, SM90).item()
    assert f"/ 2 = {out:.10f} |" in example
    exact = ((x.double() @ weight.double().t()).item() + 0.5) / 2
    assert f"result of these float32 operands is {exact:.10f}" in example


def scaled_int4(draw, rows, k):
    """Return integers from -8 to 7, times 0.001."""
    return (draw.uniform(rows, k) * 16 - 8).floor() * 1e-3


# By name, a function that draws rows that fit into fp16.
ORDINARY_ROWS = {
    "normal": Draw.normal,
    "uniform": operands.linear_weight,
    "lognormal": partial(operands.lognormal, sigma=2),
    "student": student,
    "outliers": operands.outliers,
    "int8": partial(operands.integers, largest=127),
    "int4, scaled": scaled_int4,
    "half precision": operands.half_precision,
    "zero": Draw.zeros,
    "ones": Draw.ones,
    "1 in 100 is zero": partial(operands.sparse, share=0.99),
    "1 in 100 is not zero": partial(operands.sparse, share=0.01),
    "2 of 4": operands.sparse_two_of_four,
    "blocks": operands.block_diagonal,
    "selects": operands.selection,
    "tiny": partial(operands.scaled_rows, factors=[2.0**-110]),
    "huge": partial(operands.scaled_rows, factors=[2.0**120]),
}


@pytest.mark.parametrize("name", ORDINARY_ROWS)
@pytest.mark.parametrize("k", [1000, 8192])
def test_ordinary_rows_do_not_need_tf32(name, k):
    rows = ORDINARY_ROWS[name](Draw(0), 256, k)
    for as_fp16 in (twin.x_as_fp16, twin.weight_as_fp16):
        _, _, needs_tf32 = as_fp16(rows, ONE_PRODUCT)
        assert not needs_tf32.any()


def wide_rows(k, tiny):
    """Return rows of k elements that do not fit into fp16, by name. Some hold a tiny value."""
    inf_at_the_end = torch.randn(k)
    inf_at_the_end[-1] = INF
    nan_in_the_middle = torch.randn(k)
    nan_in_the_middle[k // 2] = NAN
    graded = torch.linspace(-20, 20, k).exp2()
    eighth_is_tiny = torch.where(torch.rand(k) < 1 / 8, tiny, 1.0)
    return {
        "inf": inf_at_the_end,
        "NaN": nan_in_the_middle,
        "all NaN": torch.full((k,), NAN),
        "graded": graded,
        "inversely graded": graded.flip(0),
        "graded, shuffled": graded[torch.randperm(k)],
        "1 in 16 is tiny": torch.where(torch.rand(k) < 1 / 16, tiny, 1.0),
        "1 in 8 of few is tiny": eighth_is_tiny * (torch.rand(k) < 0.1),
    }


@pytest.mark.parametrize("name", wide_rows(k=8, tiny=0.0))  # the names
def test_wide_rows_need_tf32(name):
    """A tiny value is subnormal in fp16 when the row is scaled, by its maximum or by its mean."""
    for as_fp16, tiny in ((twin.x_as_fp16, 2.0**-33), (twin.weight_as_fp16, 2.0**-20)):
        rows = torch.randn(8, 4096)
        rows[3] = wide_rows(4096, tiny)[name]
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
    want = twin.product(x, weight, ONE_PRODUCT)
    x[1, 7] = NAN
    weight[8, 3] = INF
    got = twin.product(x, weight, replace(ONE_PRODUCT, tile=4))
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
