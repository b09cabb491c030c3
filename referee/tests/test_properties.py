"""Properties of comparisons, budgets and times, for values that hypothesis draws."""

from itertools import product

import pytest
import torch

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from referee.comparison.reference_tensor import ReferenceTensor
from referee.contestants.descriptions import elements_share_memory
from referee.times.gain import compare_times

# Hypothesis draws the same examples every time. The profile, which a project's own tests may have
# set, stays.
EXAMPLES = settings(max_examples=100, derandomize=True, deadline=None, database=None)

# ---------------------------------------------------------------------- elements that share memory

SHAPES = st.lists(st.integers(0, 4), max_size=4)


@EXAMPLES
@given(st.data(), SHAPES)
def test_elements_at_the_same_place_are_always_found(data, shape):
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    places = [
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in product(*map(range, shape))
    ]
    if len(set(places)) < len(places):
        assert elements_share_memory(shape, strides)


@EXAMPLES
@given(st.data(), SHAPES)
def test_slices_and_transposes_of_a_contiguous_tensor_share_no_elements(data, shape):
    x = torch.empty(shape)
    x = x.permute(data.draw(st.permutations(range(x.dim()))))
    x = x[tuple(slice(None, None, data.draw(st.integers(1, 3))) for _ in shape)]
    assert not elements_share_memory(list(x.shape), list(x.stride()))


# -------------------------------------------------------------------------------- the error budget

# No subnormals: their roundings are not relative ones.
FLOATS = st.floats(2.0**-20, 2.0**20, width=32)
FLOATS |= FLOATS.map(lambda value: -value)
# Eager's result and the exact one: rows of an element of each.
RESULTS = st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=8)


def reference_of(results: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eager's result in float32 and the exact one in float64."""
    eager, exact = zip(*results, strict=True)
    return torch.tensor(eager), torch.tensor(exact, dtype=torch.float64)


@EXAMPLES
@given(RESULTS)
def test_eagers_own_result_is_right_however_far_off_it_is(results):
    eager, exact = reference_of(results)
    reference = ReferenceTensor(eager, exact)
    assert reference.compare(eager).mistake is None
    assert reference.spec.find_mistake(eager, eager) is None


@EXAMPLES
@given(
    st.lists(st.tuples(FLOATS, st.integers(-4, 4)), min_size=1, max_size=8),
    st.integers(-20, 20),
)
def test_a_budget_has_the_unit_of_the_result(rows, exponent):
    """Eager is off by few roundings. All values are multiplied by a power of two."""
    eager, exact = reference_of([(value * (1 + ulps * 2.0**-23), value) for value, ulps in rows])
    unit = 2.0**exponent
    budget = ReferenceTensor(eager, exact).spec.budget
    scaled = ReferenceTensor(unit * eager, unit * exact).spec.budget
    assert scaled.atol == pytest.approx(unit * budget.atol)
    assert scaled.mean_limit == pytest.approx(unit * budget.mean_limit)
    assert scaled.rtol == budget.rtol


@EXAMPLES
@given(RESULTS, st.floats(1.01, 100))
def test_an_element_beyond_its_limit_and_eagers_error_is_wrong(results, factor):
    eager, exact = reference_of(results)
    reference = ReferenceTensor(eager, exact)
    allowed = reference.spec.budget.allowed(exact)
    limit = torch.maximum(allowed, (eager.double() - exact).abs())
    got = exact.clone()
    got[0] += factor * limit[0] + 1e-3 * exact[0].abs()  # more than float32 rounds
    assert reference.compare(got.float()).wrong[0]


# ------------------------------------------------------------------------------------------- times

# The seconds of eager, of the control and of a solution: a row for each round.
SECONDS = st.floats(0.5, 2.0)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS, st.floats(0.1, 10.0)), min_size=1, max_size=8)


@EXAMPLES
@given(ROUNDS, st.integers(-10, 10))
def test_a_word_on_a_cpu_does_not_depend_on_the_unit(rounds, exponent):
    scaled = [[seconds * 2.0**exponent for seconds in its_round] for its_round in rounds]
    word, word_of_scaled = (
        compare_times(*zip(*rows, strict=True), "cpu") for rows in (rounds, scaled)
    )
    assert word == word_of_scaled


@EXAMPLES
@given(
    st.lists(st.tuples(*[st.floats(0.95, 1.05)] * 2), min_size=3, max_size=8),
    st.floats(0.1, 10),
    st.sampled_from(["cpu", "cuda"]),
)
def test_times_that_are_those_of_the_control_are_neither_faster_nor_slower(rows, factor, device):
    """However much the control differs from eager: here it takes `factor` times as long."""
    eager = [seconds for seconds, _ in rows]
    control = [factor * seconds for _, seconds in rows]
    assert compare_times(eager, control, control, device) in ("a tie", "too noisy")


@EXAMPLES
@given(ROUNDS)
def test_what_is_faster_stays_faster_if_it_takes_half_the_time(rounds):
    eager, control, solution = zip(*rounds, strict=True)
    half = [seconds / 2 for seconds in solution]
    word, word_of_half = (compare_times(eager, control, its, "cpu") for its in (solution, half))
    if word == "faster":
        assert word_of_half == "faster"
    if word_of_half == "slower":
        assert word == "slower"
