"""ReLU: equal to the last bit, and limited by memory."""

import torch

from model import Problem
from referee import cases
from referee.cases import dtype_name
from referee.judge.budget import Output
from referee.judge.judge import fastest_copy
from referee.judge.problem import Needs, OfProject
from referee.timing import Names, Timings

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
        own = f"{dtype_name(self.dtype)},"
        for name, make in every:
            if name.startswith(own):
                x = make()
                self.check(name, [x], x.is_contiguous() and x.numel() > 0)
        large = cases.sprinkle(self.draw(LARGE), self.generator)
        self.check("a large vector with special values", [large])
        self.check("an input", [self.draw(129, 65)])
        self.check_again()
        self.check("other values at the same address", [self.draw(129, 65)], again=True)
        for length in range(1, 66):
            self.check(f"length {length}, new memory filled", [self.draw(length)], fill=True)
        for name, make in every:
            if not name.startswith(own):
                self.check(name, [make()], required=False)
        self.check("an input", [self.draw(129, 65)])

    def check_gradients(self) -> None:
        for shape in BACKWARD if self.dtype.is_floating_point else ():
            x = self.draw(*shape)
            self.check_backward([[x.masked_fill_(x == 0, 1)]])  # at 0 a slope may be 0 or 1
            if not self.has_backward:
                return

    @classmethod
    def needs(cls, problem: Problem, dtype: torch.dtype, device: torch.device) -> Needs:
        if dtype not in cases.served(device).values():
            there = f"torch.relu of torch {torch.__version__}"
            raise ValueError(f"{there} does not take {dtype} on {device}")
        return super().needs(problem, dtype, device)

    @staticmethod
    def sweep(problem: Problem, device: torch.device) -> list[tuple[tuple[int, ...], int]]:
        """The shapes of x of a sweep, each with the elements of a call's largest tensor."""
        return [((2**e // 1024, 1024), 2**e) for e in SWEEP[device.type]]
