"""ReLU: equal to the last bit, and limited by memory."""

import math
import random

import torch

from model import Problem
from referee import cases
from referee.child.yardsticks import COPY
from referee.judge.budget import Output
from referee.judge.judge import fastest_copy
from referee.judge.problem import OfProject
from referee.judge.problem import choose_shape as problem_rows
from referee.remote import dtype_name
from referee.timing import Names, Timings

YARDSTICKS = {"cpu": (COPY,), "cuda": (COPY,)}
SWEEP = {"cpu": range(12, 27, 2), "cuda": range(12, 33, 2)}  # exponents of two, of elements
LARGE = (1 << 24) + 3  # elements of a vector that they serve in the way of the timed size
BACKWARD = [(129, 65), (4097,), (300_007,)]


class Judge(OfProject):
    """Every dtype that torch.relu takes, shape and layout; NaN payloads and -0 may differ."""

    names = Names(solution="ModelNew", eager="torch.relu")
    by_rows = True

    def expected(self, inputs: list) -> list[Output]:
        return [Output(eager, None, terms=0) for eager in self.oracle.run(self.module, inputs)]

    def budget(self, eager: torch.Tensor, exact: torch.Tensor, terms: int) -> Output:
        return Output(eager, None, terms=0)

    def fastest(self, timings: Timings) -> float:
        return fastest_copy(timings)

    def check_small(self) -> None:
        self.construct_alike()
        every = list(cases.elementwise(self.device, self.seed))
        own = [case for case in every if case.name.startswith(f"{dtype_name(self.dtype)},")]
        for case in own:
            x = case.make()
            self.check(case.name, [x], x.is_contiguous() and x.numel() > 0)
        large = cases.sprinkle(self.draw(LARGE), self.generator)
        self.check("a large vector with special values", [large])
        x = self.draw(129, 65)
        self.check("an input", [x])
        x = x.clone()
        cases.refill(x[random.randrange(len(x))], self.generator)
        self.check("another row at the same address", [x], again=True)
        x = x.clone()
        place = random.randrange(x.numel())
        x.view(-1)[place] = 1 if x.view(-1)[place] <= 0 else 3
        self.check("another element at the same address", [x], again=True)
        self.check("other values at the same address", [self.draw(129, 65)], again=True)
        for length in range(1, 66):
            self.check(f"length {length}, new memory filled", [self.draw(length)], fill=True)
        for case in every:
            if case not in own:
                self.check(case.name, [case.make()], required=False)
        self.check("an input", [self.draw(129, 65)])

    def check_gradients(self) -> None:
        for shape in BACKWARD:
            self.start_backward()
            x = self.draw(*shape)
            self.check_backward([[x.masked_fill_(x == 0, 1)]])  # at 0 a slope may be 0 or 1
            if not self.has_backward:
                return


def choose_shape(
    problem: Problem, wanted: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], str]:
    """As of `problem`.

    Raises:
        ValueError: it does not fit, or torch.relu does not take the dtype.
    """
    if dtype not in cases.served(device).values():
        raise ValueError(
            f"torch.relu of torch {torch.__version__} does not take {dtype} on {device}"
        )
    return problem_rows(problem, wanted, dtype, device)


def settings(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Of the precision of products, of which there are none."""
    return ("",)


def sweep(problem: Problem, device: torch.device) -> list[tuple[int, ...]]:
    """The shapes of x of a sweep."""
    return [(2**e // 1024, 1024) for e in SWEEP[device.type]]


def elements(problem: Problem, shape: tuple[int, ...]) -> int:
    """The elements of a call's largest tensor."""
    return math.prod(shape)
