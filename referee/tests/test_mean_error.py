"""The mean error in another draw: what it forbids, and what it must not forbid."""

import pytest
import torch

from referee.comparison.accuracy import ErrorSizes
from referee.comparison.budget import (
    FREE_ELEMENTS,
    SPARSE_FACTOR,
    Budget,
    budget_in_another_draw,
)
from referee.comparison.quantity import Kind, Quantity
from referee.comparison.reference_tensor import ReferenceTensor

COUNT = 10_000
# Alternating +0.5 and -0.5: all magnitudes are 0.5.
SIGNS = torch.tensor([0.5, -0.5]).repeat(COUNT // 2)


def with_flips(count: int, start: int = 0) -> torch.Tensor:
    """Return SIGNS with another sign in some elements, each of which is off by 1."""
    flipped = SIGNS.clone()
    flipped[start : start + count] *= -1
    return flipped


# A row: eager's largest error, mean error and root mean square error, mean_limit of the budget,
# and mean_limit in another draw.
MEAN_SLACKS = {
    "exact": (0.0, 0.0, 0.0, 0.1, 0.1),
    "roundings": (1.0, 0.25, 0.3, 8.0, 8.25),
    "half_of_them_zeros": (1.0, 0.25, 0.5, 1.0, 1.25),
    "one_flip_in_10,000": (1.0, 1e-4, 1e-2, 4e-4, (SPARSE_FACTOR + 1) * 1e-4),
    "one_flip_but_a_long_sum": (1.0, 1e-4, 1e-2, 0.1, 0.1001),
}


@pytest.mark.parametrize("row", MEAN_SLACKS.values(), ids=MEAN_SLACKS)
def test_the_mean_limit_in_another_draw_follows_from_eagers_errors(row):
    largest, mean, root_mean_square_error, mean_limit, expected = row
    eager = ErrorSizes(
        largest=largest, mean=mean, relative=root_mean_square_error / 3, root_mean_square=3.0
    )
    budget = Budget(atol=4 * largest, mean_limit=mean_limit)
    free = FREE_ELEMENTS * budget.atol
    for count in (1, 10, COUNT):
        found = budget_in_another_draw(budget, eager, count)
        assert found.mean_limit == pytest.approx(expected + free / count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_few_elements_is_not_narrower_than_their_own_limits(dtype):
    """Eager is exact, by chance."""
    for count in range(1, FREE_ELEMENTS + 1):
        eager = torch.full((count,), 1.5, dtype=dtype)
        output = ReferenceTensor(eager, eager.double())
        eps = torch.finfo(dtype).eps
        got = eager + eps * (9 if dtype == torch.float32 else 2)
        assert output.spec.find_mistake(got, eager) is None


# How many signs eager flips in the draw that sets the budget, how many a solution in another draw,
# and whether that is right.
FLIPS = [(1, 1, True), (1, 60, True), (1, 100, False), (10, 600, True), (10, 800, False)]


@pytest.mark.parametrize(("eagers", "solutions", "is_right"), FLIPS)
def test_few_flips_of_signs_are_right_and_many_are_wrong(eagers, solutions, is_right):
    output = ReferenceTensor(with_flips(eagers), SIGNS.double())
    got = with_flips(solutions, start=COUNT // 2)
    mistake = output.spec.find_mistake(got, SIGNS)
    assert (mistake is None) == is_right
    assert is_right or mistake.startswith("mean error")


def test_zeros_are_wrong_though_each_element_may_be_off_by_its_size():
    output = ReferenceTensor(with_flips(1), SIGNS.double())
    assert not output.spec.compare_with_eager(torch.zeros(COUNT), SIGNS).wrong.any()
    words = output.spec.find_mistake(torch.zeros(COUNT), SIGNS)
    assert words == "mean error 0.5; eager's own error allows 0.0081"
    assert not output.spec.allows(torch.zeros(COUNT), SIGNS)


def test_few_large_quotients_do_not_excuse_the_others():
    x = torch.linspace(1e-6, 1, COUNT)
    output = ReferenceTensor(1 / x, 1 / x.double())
    other = x.flip(0)
    assert output.spec.find_mistake(1 / other, 1 / other) is None
    crude = 1 / other * (1 + 1e-2 * (other > 0.2))
    assert not output.spec.compare_with_eager(crude, 1 / other).wrong.any()
    assert output.spec.find_mistake(crude, 1 / other).startswith("mean error")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("growth", [0.5, 1.0, 8.0])
def test_whoever_is_within_the_budget_is_right_spec(dtype, growth):
    """Neither another size of the result nor eager's own error makes an honest file wrong."""
    generator = torch.Generator().manual_seed(1)

    def draw(size):
        x = torch.randn(64, 512, generator=generator).to(dtype)
        weight = (size * torch.randn(512, 96, generator=generator)).to(dtype)
        return (x @ weight).relu(), (x.double() @ weight.double()).relu()

    output = ReferenceTensor(*draw(1.0))
    eager, exact = draw(growth)
    most = 0.99 * ReferenceTensor(eager, exact).spec.budget.mean_limit
    got = (exact + most).to(dtype)
    assert output.spec.find_mistake(got, eager) is None
    far = 3 * max(growth, 1.0) * output.spec.budget_elsewhere().mean_limit
    assert output.spec.find_mistake((exact + far).to(dtype), eager)


ZEROS_OR_NOT = [(torch.zeros(COUNT), True), (with_flips(60, start=COUNT // 2), False)]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("got", "is_wrong"), ZEROS_OR_NOT, ids=["zeros", "flips"])
def test_zeros_are_wrong_in_steps_in_which_rounding_flips_an_element_of_eagers(kind, got, is_wrong):
    """Each element may then be off by its size, so no element is wrong. The mean error is."""
    untimed = Quantity(kind.value, kind)
    for _ in range(2):
        untimed.begin_step(ReferenceTensor(with_flips(1), SIGNS.double()))
        untimed.judge_untimed(got if is_wrong else with_flips(3))
        assert not untimed.comparison.wrong.any()
    timed = untimed.without_steps()
    timed.judge_timed(got, SIGNS)
    for quantity in (untimed, timed):
        assert quantity.is_wrong_in_one_step == is_wrong
        assert (quantity.find_mistake() is not None) == is_wrong
        assert not is_wrong or quantity.find_mistake().startswith(f"{kind.value}: mean error 0.5")


def test_a_gradient_of_rounding_errors_alone_is_right():
    """Eager's relative error is as large as that of the solution: BatchNorm subtracts the bias."""
    generator = torch.Generator().manual_seed(1)

    def draw():
        return 1e-7 * torch.randn(COUNT, generator=generator)

    gradient = Quantity("gradient of bias", Kind.PARAMETER_GRADIENT)
    for _ in range(2):
        gradient.begin_step(ReferenceTensor(draw(), 1e-16 * draw().double()))
        gradient.judge_untimed(draw())
    for _ in range(8):
        gradient.judge_timed(draw(), draw())
    assert gradient.find_mistake() is None


def test_a_limit_of_each_element_also_limits_the_mean():
    """Eager is exact. The limit of the elements allows a larger mean error than the budget."""
    limit = torch.full((COUNT,), 0.25)
    output = ReferenceTensor(SIGNS, SIGNS.double(), element_limits=limit)
    assert output.spec.budget.mean_limit < 1e-5
    assert output.spec.budget_elsewhere().mean_limit == pytest.approx(0.25)


def test_without_float64_the_mean_is_not_limited():
    output = ReferenceTensor(SIGNS, None)
    assert output.spec.find_mistake(SIGNS + 1e-4, SIGNS) is None
    assert output.spec.find_mistake(SIGNS[:0], SIGNS[:0]) is None
