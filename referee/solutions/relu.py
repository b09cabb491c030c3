"""Files that stand in for ReLU."""

import math
import random

import torch
from torch import nn

from referee import cases, relu
from referee.compare import first_mismatch
from referee.remote import dtype_name, pack
from referee.solutions.backward import LOOKED_AT
from referee.solutions.budget import Output
from referee.solutions.rows import SUSPECTS, Rows
from referee.solutions.verdict import CHEATING
from referee.timing import Timings


class Relu(Rows):
    """Equal to the last bit."""

    rate, names = relu.RATE, relu.NAMES

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.reference = self.task.problem.reference().to(self.device)
        self.output_shape = self.task.shape
        self.turned: set[int] = set()  # rows of the output's gradient with the other sign

    def check_small(self) -> None:
        self.progress("constructing")
        args = self.task.problem.get_init_inputs()
        self.remote.ask("new", args=pack(args), seed=self.seed, dtype=dtype_name(self.dtype))
        every = list(cases.elementwise(self.device, self.seed))
        own = [case for case in every if case.name.startswith(f"{dtype_name(self.dtype)},")]
        for case in own:
            x = case.make()
            self.check(case.name, x, x.is_contiguous() and x.numel() > 0)
        x = self._draw(1 << 22)
        self.check("a large vector", x, True)
        x = self._draw(129, 65)
        self.check("an input", x, True)
        values = x.clone()
        cases.refill(values[random.randrange(len(values))], self.generator)
        self.check("another row at the same address", values, True, again=True)
        values = values.clone()
        place = random.randrange(values.numel())
        values.view(-1)[place] = 1 if values.view(-1)[place] <= 0 else 3
        self.check("another element at the same address", values, True, again=True)
        self.check("other values at the same address", self._draw(129, 65), True, again=True)
        for length in range(1, 66):
            self.check(f"length {length}, new memory filled", self._draw(length), True, fill=True)
        for case in every:
            if case not in own:
                self.check(case.name, case.make(), False)
        self.check("an input", self._draw(129, 65), True)
        self.verdict.accuracy = "exact"

    def _draw(self, *shape: int) -> torch.Tensor:
        return cases.random(shape, self.dtype, self.device, self.generator)

    def mismatch(self, output: torch.Tensor, x: torch.Tensor, whole: bool = False) -> str | None:
        mismatch = first_mismatch(output, self.expected(x))
        return str(mismatch) if mismatch else None

    def guesses(self, x: torch.Tensor) -> dict[str, tuple[str, torch.Tensor]]:
        return {
            "returns a copy of its input": (CHEATING, x),
            "returns zeros": (CHEATING, torch.zeros_like(x)),
        }

    def budget(self, eager: torch.Tensor, exact: torch.Tensor, terms: int) -> Output:
        return Output(eager, None, terms=0)

    def fresh(self, turn: int) -> tuple[int | None, nn.Module, list]:
        return self.feed_small([(129, 65), (4097,), (300_007,)][turn])

    def step_wants(self, at: float) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """In random rows: nothing else of such a large input is drawn."""
        total, turned = self.task.shape[0], int(at * self.task.shape[0])
        self.turned ^= {turned}
        rows = [turned, *random.choices(range(total), k=SUSPECTS["relu"])]
        like = torch.empty(len(rows), *self.task.shape[1:], dtype=self.dtype, device=self.device)
        x = cases.draw_some(like, rows, total, self.latest[1])
        given = cases.draw_some(like, rows, total, self.step_seed)
        given[[i for i, row in enumerate(rows) if row in self.turned]] *= -1
        outputs, gradients, _ = self.derive(self.reference, [x], [given])
        places = torch.randint(x.numel(), (LOOKED_AT,))
        first = torch.tensor(rows) * x[0].numel()
        there = first[places // x[0].numel()] + places % x[0].numel()
        found = (y.reshape(-1)[places.to(y.device)] for y in (*outputs, *gradients))
        return [(list(self.task.shape), there, values) for values in found]

    def work(self) -> int:
        return 2 * math.prod(self.task.shape) * self.dtype.itemsize

    def fastest(self, timings: Timings) -> float:
        return relu.fastest_copy(timings)
