"""The problem ReLU for the referee: results have to be exact."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from problems import elementwise
from problems.shapes import SweepShape
from problems.small_cases import changed_in_part
from referee.call_names import COPY
from referee.comparison.case import OwnCase
from referee.comparison.reference_tensor import ReferenceTensor
from referee.contestants.forms import dtype_name
from referee.reference.problem import Problem
from referee.reference.random_values import random_tensor
from referee.times.timings import ReportNames, Timings

# The exponents of the sizes of a sweep: 2^12, 2^14, ... elements.
SWEEP_EXPONENTS = {"cpu": range(12, 27, 2), "cuda": range(12, 33, 2)}
# The length of the large vector among the cases: many whole blocks, and 3 elements.
LARGE_LENGTH = (1 << 24) + 3
BACKWARD_SHAPES = [(129, 65), (4097,), (300_007,)]
RANDOM_SHAPES = 12  # how many shapes are drawn at random, which no solution can foresee
LARGEST_RANDOM_SIZE = 90
# Vectors of this many elements and fewer are computed while torch fills new memory with NaN.
LONGEST_FILLED_VECTOR = 65


class ReluProblem(Problem):
    """ReLU of every dtype that torch.relu takes, every shape and every layout.

    A right result has eager's values: any two NaN are equal, and so are 0 and -0, because eager's
    own bits of these differ between devices and between versions of torch. README promises more of
    this project's kernels: they keep the bits of x.
    """

    names = ReportNames(solution="ModelNew", eager="torch.relu")
    needs_float64 = False

    def reference_tensors(self, module: torch.nn.Module, inputs: list) -> list[ReferenceTensor]:
        """Return eager's results; no other values are right."""
        return [
            ReferenceTensor(eager, None, must_equal_eager=True)
            for eager in self.run(module, inputs)
        ]

    def reference_tensor_in_step(
        self, eager: Tensor, exact: Tensor | None, terms: int, in_tf32: Tensor | None
    ) -> ReferenceTensor:
        """Return eager's result or gradient; no other values are right."""
        return ReferenceTensor(eager, None, must_equal_eager=True)

    def where_gradients_pass(self, module: torch.nn.Module, inputs: list) -> Tensor | None:
        """Return where x is not zero. At zero, a solution's derivative may be 0 or 1."""
        return inputs[0] != 0

    def accuracy(self, relative: float, is_equal: bool, usual: str) -> str:
        """Return the accuracy class of a result, which is right only if it is exact."""
        return "exact"

    def floor_seconds(self, timings: Timings) -> float:
        """Return the seconds of the fastest copy of as many bytes; 0 if no copy was timed."""
        copies = timings.seconds.get(COPY)
        return min(copies) if copies else 0.0

    def cases(self, device_seed: int) -> Iterator[OwnCase]:
        """Yield every shape, layout and special value, first in the problem's dtype.

        The same inputs in other dtypes come later. A solution may refuse those.
        """
        small_inputs = list(elementwise.small_inputs(self.device, device_seed))
        generator = torch.Generator(self.device).manual_seed(device_seed)
        # The names of cases in the problem's dtype begin with this.
        prefix = f"{dtype_name(self.dtype)},"
        for name, make in small_inputs:
            if name.startswith(prefix):
                x = make()
                required = x.is_contiguous() and x.numel() > 0
                yield OwnCase(name, [x], required=required)
        large = elementwise.sprinkle(self._draw(generator, LARGE_LENGTH), generator)
        yield OwnCase("a large vector with special values", [large])
        yield from changed_in_part(self._draw(generator, 129, 65), generator)
        yield OwnCase("other values at the same address", [self._draw(generator, 129, 65)])
        for _ in range(RANDOM_SHAPES):
            dimensions = random.randint(1, 3)
            shape = [random.randint(1, LARGEST_RANDOM_SIZE) for _ in range(dimensions)]
            yield OwnCase(f"shape {shape}, drawn at random", [self._draw(generator, *shape)])
        for length in range(1, LONGEST_FILLED_VECTOR + 1):
            x = self._draw(generator, length)
            yield OwnCase(f"length {length}, new memory filled", [x], fill_new_tensors=True)
        for name, make in small_inputs:
            if not name.startswith(prefix):
                yield OwnCase(name, [make()], required=False)
        # After inputs that a solution may refuse, a usual one must give the right result.
        yield OwnCase("an input", [self._draw(generator, 129, 65)])

    def backward_inputs(self) -> list[list[list]]:
        """Return groups of small inputs for which gradients are compared, one for each shape."""
        if not self.dtype.is_floating_point:
            return []
        generator = torch.Generator(self.device).manual_seed(random.randrange(1 << 30))
        return [[[self._draw(generator, *shape)]] for shape in BACKWARD_SHAPES]

    def _draw(self, generator: torch.Generator, *shape: int) -> Tensor:
        """Return random values of the problem's dtype."""
        return random_tensor(shape, self.dtype, self.device, generator)

    @staticmethod
    def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
        """Raise a ValueError if torch.relu does not take the dtype."""
        if dtype not in elementwise.dtypes_of_relu(device).values():
            function = f"torch.relu of torch {torch.__version__}"
            raise ValueError(f"{function} does not take {dtype} on {device}")

    @staticmethod
    def settings_for(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        """Return one empty setting because no product is computed."""
        return ("",)

    @staticmethod
    def sweep(init_inputs: list, device: torch.device) -> list[SweepShape]:
        """Return the shapes of x in a sweep: rows of 1,024 elements."""
        sizes = [2**exponent for exponent in SWEEP_EXPONENTS[device.type]]
        return [SweepShape((elements // 1024, 1024), elements) for elements in sizes]
