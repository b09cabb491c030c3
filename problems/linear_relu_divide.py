"""relu(x weight^T + bias) / divisor: as accurate as the precision setting, limited by products.

A GPU that runs products back to back meets its power limit and slows down by a fifth. The rounds
do not wait for it to recover: interleaved in random order, all contestants meet the same clock.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import linear

from problems import operands
from problems.linear_yardsticks import LIBRARY, PRODUCT, THREE, TRITON
from problems.small_cases import changed_in_part
from referee import cases
from referee.budget import CLASSES, Output
from referee.problem import Case, Problem
from referee.shared import dtype_name
from referee.timing import Names, Rate, Timings

U32 = 2.0**-24  # what rounding to nearest changes at most, in parts: float32
U_TF32 = 2.0**-11  # TF32, and float16
SETTINGS = {"cpu": ("highest",), "cuda": ("highest", "high", "medium")}
SWEEP = {"cpu": (1, 4, 16, 64), "cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384)}  # rows of x
# Weights in memory at once: the reference's, a float64 copy and one of magnitudes (2 each), the
# values others are drawn from, eager's, the solution's, and gradients.
WEIGHTS = 10
SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129]  # around the widths of tiles and vectors
# Rows, out_features, in_features: long sums, and several tiles.
SHAPES = [(5, 9, 4097), (257, 130, 1000), (1, 300, 2049), (300, 1, 513)]
RANDOM_SHAPES, LONGEST_SIDE = 8, 150  # shapes that nobody can foresee
FLOAT32 = "float32-grade"
DIVISORS = [2.0, 3.0, -1.5, 1.0]
# For 33 features: the shape of the dense tensor underneath, and the view taken of it.
X_LAYOUTS = [
    ("x[:, 1:]", (9, 34), lambda x: x[:, 1:]),
    ("x[:, ::2]", (9, 66), lambda x: x[:, ::2]),
    ("x[::2]", (18, 33), lambda x: x[::2]),
    ("x transposed", (33, 300), lambda x: x.t()),
    ("x expanded rows", (1, 33), lambda x: x.expand(9, 33)),
    ("x expanded columns", (9, 1), lambda x: x.expand(9, 33)),
    ("x with storage offset 1", (1 + 9 * 33,), lambda x: x[1:].view(9, 33)),
    ("x 1-d", (33,), lambda x: x),
    ("x 1-d, strided", (66,), lambda x: x[::2]),
    ("x 3-d", (2, 5, 33), lambda x: x),
    ("x 3-d, permuted", (33, 5, 4), lambda x: x.permute(1, 2, 0)),
    ("x 4-d", (2, 3, 2, 33), lambda x: x),
    ("no rows", (0, 33), lambda x: x),
]


class LinearReluDivideProblem(Problem):
    """Elements within the errors of a sum in any order; the timed size in the precision's class."""

    names = Names(solution="LinearReluDivideNew", eager="eager")
    yardsticks = {"cpu": (PRODUCT,), "cuda": (PRODUCT, LIBRARY, THREE, TRITON)}  # noqa: RUF012
    yardstick_file = Path(__file__).with_name("linear_yardsticks.py")
    rate = Rate(
        unit="TFLOP/s",
        work="flops",
        yardstick=PRODUCT,
        floor="a product at the highest rate measured",
    )

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of the precision that are measured; a sweep takes one of them."""
        return self.some_settings or self.settings_for(self.dtype, self.device)

    @property
    def work(self) -> int:
        """The flops of one product."""
        return 2 * math.prod(self.shape) * self.args[1]

    @property
    def moved(self) -> int:
        """Bytes that a call reads and writes."""
        return super().moved + math.prod(self.args[:2]) * self.dtype.itemsize

    def fastest(self, timings: Timings) -> float:
        """Return the seconds of the fastest product.

        Eager's calls are products too, and an honest float32 call needs a float16 product at least.
        """
        times = [timings.seconds.get(PRODUCT, [])]
        times += [timings.seconds[name] for name in (self.names.eager, self.names.again)]
        times.append([seconds / 3 for seconds in timings.seconds.get(THREE, [])])
        return min(map(min, filter(None, times)))

    def expected(self, module: nn.Module, inputs: list) -> list[Output]:
        """Return the exact results, each with the error of a sum of so many terms in any order."""
        [x], [eager] = inputs, self.run(module, inputs)
        if tuple(x.shape) == tuple(self.shape):  # whose values are far from the ends of float32
            z = linear(*_operands(module.linear, x, torch.float64))
            magnitude = _magnitude(module.linear, x, torch.float32).double()
        else:
            z, magnitude = exact_sums(module.linear, x)
        exact = torch.relu(z) / module.divisor
        limit = self._limit(x, z, magnitude, exact, module)
        return [Output(eager, exact, x.shape[-1], limit)]

    def _limit(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        magnitude: torch.Tensor,
        exact: torch.Tensor,
        module: nn.Module,
    ) -> torch.Tensor:
        """Return the most that each element may be off.

        Args:
            x: the input.
            z: the exact sums.
            magnitude: the sums of the terms' magnitudes.
            exact: the exact results.
            module: the reference.
        """
        divisor, terms, eps = abs(module.divisor), x.shape[-1], torch.finfo(x.dtype).eps
        if x.dtype == torch.float64:  # the float64 result itself is this far off
            part = 4 * (terms + 4) * eps
        elif self._may_be_tf32:  # the roundings of x and weight to TF32
            part = 8 * U_TF32 + 16 * U32
        elif x.dtype == torch.float32:
            # A plain sum of K terms: its errors add up as random signs do, six standard deviations.
            part = (4 + 8 * math.sqrt(terms)) * U32
        else:
            part = (16 + 4 * math.sqrt(terms)) * U32
        limit = magnitude * (part / divisor) + 2 * torch.finfo(x.dtype).smallest_normal * eps
        if x.dtype.itemsize == 2:  # the product may be rounded before the bias is added
            product = z - module.linear.bias.detach().double()
            limit += (2 * exact.abs() + product.abs() / divisor) * eps
        return limit

    @property
    def _may_be_tf32(self) -> bool:
        """Return whether the precision setting lets float32 products be TF32's."""
        return self.dtype == torch.float32 and self.precision != "highest"

    def clear(self, module: nn.Module, inputs: list) -> torch.Tensor | None:
        """Return where ReLU's side is certain, at the timed size; small sizes are drawn often."""
        [x] = inputs
        if tuple(x.shape) != tuple(self.shape):
            return None
        if x.dtype == torch.float32 and not self._may_be_tf32:
            # Sums in float32 are good enough: their errors are far below 64 roundings of the terms.
            z, magnitude = module.linear(x), _magnitude(module.linear, x, torch.float32)
        else:
            z, magnitude = exact_sums(module.linear, x)
        near = torch.finfo(x.dtype).eps  # the product may be rounded before the bias is added
        if x.dtype.itemsize > 2:
            near = U_TF32 * 4 if self._may_be_tf32 else U32 * 64
        return z.abs() > near * magnitude

    def accuracy(self, relative: float, is_equal: bool, grade: str) -> str:
        """Return the class of the results, from the Frobenius norm of their errors."""
        if self.dtype != torch.float32:
            return f"{dtype_name(self.dtype)}-grade"
        if relative <= (4 + math.sqrt(self.shape[-1])) * U32:
            return FLOAT32
        return "TF32-grade" if relative <= CLASSES["TF32-grade"] else "worse than TF32"

    def least_accuracy(self) -> str:
        """Return the class that float32 results must reach at `highest`."""
        return FLOAT32 if self.dtype == torch.float32 and not self._may_be_tf32 else ""

    def guesses(self, module: nn.Module, inputs: list) -> dict[str, torch.Tensor]:
        """Return results without one of the three operations."""
        [x] = inputs
        with torch.no_grad():
            z, product = module.linear(x), x @ module.linear.weight.T
            return {
                "leaves out the bias": torch.relu(product) / module.divisor,
                "leaves out the division": torch.relu(z),
                "leaves out ReLU": z / module.divisor,
            }

    def cases(self, device_seed: int) -> Iterator[Case]:
        """Return small sizes, layouts of x, and operands on which products err most."""
        generator = torch.Generator(self.device).manual_seed(device_seed)

        def draw(*shape: int) -> torch.Tensor:
            return cases.random(shape, self.dtype, self.device, generator)

        yield Case("an input", [draw(129, 65)], arguments=[65, 33, 2.0], state="other")
        yield Case("parameters overwritten", [draw(129, 65)], state="other")
        yield from changed_in_part(draw(129, 65), generator)
        for m, n in ((1, 1), (7, 3), (17, 65), (33, 31), (130, 129)):
            name = f"[{m}, 9] -> {n}, new memory filled"
            yield Case(name, [draw(m, 9)], arguments=[9, n, 2.0], fill=True)
        for setting in self.settings:
            at = setting and f" at {setting}"
            for case in self._sizes(draw, at):
                case.setting = setting
                yield case
            if self.dtype == torch.float32:
                for case in self._operands(at):
                    case.setting = setting
                    yield case
        for _ in range(RANDOM_SHAPES):
            m, n, k = (random.randint(1, LONGEST_SIDE) for _ in range(3))
            divisor = random.uniform(0.3, 3.0)
            name = f"[{m}, {k}] -> {n}, divisor {divisor:.3g}, drawn at random"
            yield Case(name, [draw(m, k)], arguments=[k, n, divisor], setting=self.settings[0])
        first = self.settings[0]
        for turn, (name, shape, view) in enumerate(X_LAYOUTS):
            x = view(draw(*shape))
            arguments = None if turn else [33, 17, 2.0]
            required = x.is_contiguous() and x.numel() > 0 and x.dim() == 2
            yield Case(name, [x], arguments, setting=first, required=required)
        yield Case("an input", [draw(129, 65)], arguments=[65, 33, 2.0], setting=first)

    def _sizes(self, draw: Callable[..., torch.Tensor], at: str) -> Iterator[Case]:
        """Yield SIZES of rows, each with two of columns and of K, and SHAPES.

        The strides 5 and 8 have no factor in common with the 13 sizes, so every size of columns
        and of K comes once in a turn, beside another one.
        """
        for turn in range(2):
            for i, m in enumerate(SIZES):
                n = SIZES[(5 * i + 4 * turn + 1) % len(SIZES)]
                k = SIZES[(8 * i + 3 * turn + 2) % len(SIZES)]
                divisor = DIVISORS[(i + turn) % len(DIVISORS)]
                name = f"[{m}, {k}] -> {n}, divisor {divisor}{at}"
                yield Case(f"{name}, as constructed", [draw(m, k)], arguments=[k, n, divisor])
                yield Case(f"{name}, other parameters", [draw(m, k)], state="other")
        for m, n, k in SHAPES:
            yield Case(f"[{m}, {k}] -> {n}{at}", [draw(m, k)], arguments=[k, n, 2.0])

    def _operands(self, at: str) -> Iterator[Case]:
        """Yield the operands on which products err most, as parameters of one module."""
        for turn, name in enumerate(operands.CASES):
            x, weight, bias = operands.draw_case(name, 33, 129, 65)
            arguments = None if turn else [129, 65, 2.0]
            yield Case(f"{name}{at}", [x.to(self.device)], arguments, state=[weight, bias])

    def backward_inputs(self) -> list[list[list]]:
        """Return a group of small inputs for which gradients are compared."""
        generator = torch.Generator(self.device).manual_seed(random.randrange(1 << 30))
        draws = (cases.random((129, 65), self.dtype, self.device, generator) for _ in range(3))
        return [[[x] for x in draws]]

    def backward_arguments(self) -> list | None:
        """Return the arguments of the module for `backward_inputs`."""
        return [65, 33, 3.0]

    @staticmethod
    def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError if the dtype is no floating one."""
        if not dtype.is_floating_point:
            raise ValueError(f"linear_relu_divide takes floating dtypes, not {dtype}")

    @staticmethod
    def needs(init_inputs: list, dtype: torch.dtype) -> tuple[tuple[int, ...], int, int]:
        """Return the shape of a row of x, and the bytes for a row, and for all rows together."""
        k, n, _ = init_inputs
        each = max(n, k) * (dtype.itemsize + torch.float64.itemsize)
        return (k,), each, WEIGHTS * n * k * dtype.itemsize

    @staticmethod
    def settings_for(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        """Return the settings of float32 products; "" for other dtypes."""
        return SETTINGS[device.type] if dtype == torch.float32 else ("",)

    @staticmethod
    def sweep(init_inputs: list, device: torch.device) -> list[tuple[tuple[int, ...], int]]:
        """Return the shapes of x of a sweep, each with the elements of a call's largest tensor."""
        k, n, _ = init_inputs
        return [((rows, k), max(rows, n) * k) for rows in SWEEP[device.type]]


def exact_sums(own: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x weight^T + bias, and the sums of the terms' magnitudes, in float64."""
    z = linear(*_operands(own, x, torch.float64))
    return z, _magnitude(own, x, torch.float64)


def _operands(own: nn.Linear, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().to(dtype) for t in (x, own.weight, own.bias)]


def _magnitude(own: nn.Linear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of the terms' magnitudes, computed in a dtype."""
    return linear(*(t if t is None else t.abs() for t in _operands(own, x, dtype)))
