"""ReLU: equal to the last bit, and limited by memory."""

import random
from collections.abc import Iterator

import torch

from problems.small_cases import changed_in_part
from referee import cases
from referee.budget import Output
from referee.names import COPY
from referee.problem import Case, Problem
from referee.shared import dtype_name
from referee.timing import Names, Timings

SWEEP = {"cpu": range(12, 27, 2), "cuda": range(12, 33, 2)}  # exponents of two, of elements
LARGE = (1 << 24) + 3  # elements of a vector that takes the way of the timed size
BACKWARD = [(129, 65), (4097,), (300_007,)]
RANDOM_SHAPES, LONGEST_SIDE = 12, 90  # shapes that nobody can foresee
FILLED = 66  # vectors shorter than this are computed while torch fills new memory


class ReluProblem(Problem):
    """Every dtype that torch.relu takes, shape and layout; NaN payloads and -0 may differ."""

    names = Names(solution="ModelNew", eager="torch.relu")
    needs_float64 = False

    def expected(self, module: torch.nn.Module, inputs: list) -> list[Output]:
        """Return eager's bits."""
        return [Output(eager, None, terms=0) for eager in self.run(module, inputs)]

    def budget(self, eager: torch.Tensor, exact: torch.Tensor | None, terms: int) -> Output:
        """Return eager's bits."""
        return Output(eager, None, terms=0)

    def clear(self, module: torch.nn.Module, inputs: list) -> torch.Tensor | None:
        """Return where x is not zero: there a slope may be 0 or 1."""
        return inputs[0] != 0

    def accuracy(self, relative: float, is_equal: bool, grade: str) -> str:
        """Return the class of a result, which is right only if it is exact."""
        return "exact"

    def fastest(self, timings: Timings) -> float:
        """Return the seconds of a copy of as many bytes."""
        copies = timings.seconds.get(COPY)
        return min(copies) if copies else 0.0

    def cases(self, device_seed: int) -> Iterator[Case]:
        """Return every dtype, shape, layout and special value; those of other dtypes last."""
        every = list(cases.elementwise(self.device, device_seed))
        generator = torch.Generator(self.device).manual_seed(device_seed)
        own = f"{dtype_name(self.dtype)},"
        for name, make in every:
            if name.startswith(own):
                x = make()
                required = x.is_contiguous() and x.numel() > 0
                yield Case(name, [x], required=required)
        large = cases.sprinkle(self._draw(generator, LARGE), generator)
        yield Case("a large vector with special values", [large])
        yield from self._changed_in_part(generator)
        for _ in range(RANDOM_SHAPES):
            shape = [random.randint(1, LONGEST_SIDE) for _ in range(random.randint(1, 3))]
            yield Case(f"shape {shape}, drawn at random", [self._draw(generator, *shape)])
        for length in range(1, FILLED):
            x = self._draw(generator, length)
            yield Case(f"length {length}, new memory filled", [x], fill=True)
        for name, make in every:
            if not name.startswith(own):
                yield Case(name, [make()], required=False)
        yield Case("an input", [self._draw(generator, 129, 65)])

    def backward_inputs(self) -> list[list[list]]:
        """Return groups of small inputs for which gradients are compared, one for each shape."""
        if not self.dtype.is_floating_point:
            return []
        generator = torch.Generator(self.device).manual_seed(random.randrange(1 << 30))
        return [[[self._draw(generator, *shape)]] for shape in BACKWARD]

    def _draw(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return cases.random(shape, self.dtype, self.device, generator)

    def _changed_in_part(self, generator: torch.Generator) -> Iterator[Case]:
        """Return an input, then it with another row, then with another element."""
        yield from changed_in_part(self._draw(generator, 129, 65), generator)
        yield Case("other values at the same address", [self._draw(generator, 129, 65)])

    @staticmethod
    def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError if torch.relu does not take the dtype."""
        if dtype not in cases.served(device).values():
            there = f"torch.relu of torch {torch.__version__}"
            raise ValueError(f"{there} does not take {dtype} on {device}")

    @staticmethod
    def settings_for(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        """Return "": no product is computed."""
        return ("",)

    @staticmethod
    def sweep(init_inputs: list, device: torch.device) -> list[tuple[tuple[int, ...], int]]:
        """Return the shapes of x of a sweep, each with the elements of a call's largest tensor."""
        return [((2**e // 1024, 1024), 2**e) for e in SWEEP[device.type]]
