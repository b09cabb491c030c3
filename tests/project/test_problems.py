"""`problems/`: the small cases, and how many rows of x fit into memory."""

from collections import Counter

import pytest
import torch

from problems import elementwise, linear_relu_divide, sizes
from problems.shapes import RowNeeds
from referee.reference import random_values
from referee.reference.dtypes import DTYPES

CPU = torch.device("cpu")


def test_cases_are_of_the_dtypes_that_torch_takes():
    taken = elementwise.dtypes_of_relu(CPU)
    for name, dtype in DTYPES.items():
        if name in taken:
            assert torch.relu(torch.ones(1, dtype=dtype)).item() == 1
        else:
            with pytest.raises(NotImplementedError):
                torch.relu(torch.ones(1, dtype=dtype))
    every = list(elementwise.small_inputs(CPU, 5))
    assert list(dict.fromkeys(name.partition(",")[0] for name, _ in every)) == list(taken)
    assert len(every) > 400


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_values_of_unsigned_dtypes_are_in_both_halves_of_the_range(dtype):
    """This holds for special values, random ones, sprinkled ones and bit patterns."""
    largest = torch.iinfo(dtype).max
    values = elementwise.special_values(dtype).tolist()
    assert values == [largest // 2 + 1, 0, 1, largest - 1, largest]
    generator = torch.Generator().manual_seed(1)
    x = random_values.random_tensor((3, 5001), dtype, CPU, generator)
    halves = sum(value > largest // 2 for value in x.view(-1).tolist()) / x.numel()
    assert 0.45 < halves < 0.55
    before = x.tolist()
    random_values.draw_into(x.t()[7], generator)
    assert [b[7] for b in before] != x.t()[7].tolist()
    elementwise.sprinkle(x, generator)
    assert {*values} <= {*x.view(-1).tolist()}
    patterns = elementwise.bit_patterns(dtype, CPU, generator)
    assert x.dtype == patterns.dtype == dtype
    assert len(set(patterns.tolist())) >= min(largest + 1, 99_000)


def test_each_small_size_of_linear_is_twice_an_m_an_n_and_a_k():
    small_sizes = linear_relu_divide.SMALL_SIZES
    assert len(set(small_sizes)) == len(small_sizes) == 26
    counts_m, counts_n, counts_k = (Counter(column) for column in zip(*small_sizes, strict=True))
    assert set(counts_m.values()) == {2}
    assert counts_m == counts_n == counts_k


def test_as_many_rows_are_chosen_as_fit_into_memory(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 2000)
    needs = RowNeeds((), row_bytes=10, fixed_bytes=0)
    assert sizes.choose_rows(None, 4, needs, CPU) == (4, "")
    rows, note = sizes.choose_rows(None, 4096, needs, CPU)
    assert rows == 5
    assert note.startswith("5 of 4,096 rows")
    assert sizes.choose_rows(20, 4096, needs, CPU) == (20, "")
    assert sizes.choose_rows(None, 4096, needs._replace(fixed_bytes=400), CPU)[0] == 1
    with pytest.raises(ValueError, match="1 rows need"):
        sizes.choose_rows(None, 4096, needs._replace(fixed_bytes=500), CPU)
    for wanted, size in [(21, 10), (None, 56)]:
        with pytest.raises(ValueError, match="GiB"):
            sizes.choose_rows(wanted, 4096, needs._replace(row_bytes=size), CPU)
