"""relu(x weight^T + bias) / divisor: as accurate as the precision setting, limited by products.

A GPU that runs products back to back meets its power limit and slows down by a fifth. The rounds
do not wait for it to recover: interleaved in random order, all contestants meet the same clock.
"""

import copy
import math
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import linear

from model import Problem
from referee import operands
from referee.cases import dtype_name
from referee.child.yardsticks import LIBRARY, PRODUCT, THREE, TRITON
from referee.judge.budget import CLASSES, Output
from referee.judge.oracle import difference
from referee.judge.problem import Needs, OfProject
from referee.judge.verdict import CHEATING, WRONG, FoundError
from referee.timing import Names, Rate, Timings

U32 = 2.0**-24  # what rounding to nearest changes at most, in parts: float32
U_TF32 = 2.0**-11  # TF32, and float16
SETTINGS = {"cpu": ("highest",), "cuda": ("highest", "high", "medium")}
SWEEP = {"cpu": (1, 4, 16, 64), "cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384)}  # rows of x
WEIGHTS = 6  # in memory at once: those of both modules, of a copy, their gradients
SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129]  # around the widths of tiles and vectors
# Rows, out_features, in_features: long sums, and several tiles.
SHAPES = [(5, 9, 4097), (257, 130, 1000), (1, 300, 2049), (300, 1, 513)]
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


class Judge(OfProject):
    """Elements within the errors of a sum in any order; the timed size in the precision's class."""

    names = Names(solution="LinearReluDivideNew", eager="eager")
    yardsticks: ClassVar = {"cpu": (PRODUCT,), "cuda": (PRODUCT, LIBRARY, THREE, TRITON)}
    rate = Rate(
        unit="TFLOP/s",
        work="flops",
        yardstick=PRODUCT,
        floor="a product at the highest rate measured",
        margin={"cpu": 1.5, "cuda": 1.25},
    )

    @property
    def work(self) -> int:
        return 2 * math.prod(self.oracle.shape) * self.oracle.args[1]

    @property
    def moved(self) -> int:
        return super().moved + math.prod(self.oracle.args[:2]) * self.dtype.itemsize

    def fastest(self, timings: Timings) -> float:
        """Eager's calls are products too; of float32, an honest call needs a float16 product."""
        times = [timings.seconds[name] for name in (PRODUCT, self.names.eager, self.names.again)]
        times.append([seconds / 3 for seconds in timings.seconds.get(THREE, [])])
        return min(map(min, filter(None, times)))

    def expected(self, inputs: list) -> list[Output]:
        [x], [eager] = inputs, self.oracle.run(self.module, inputs)
        z, magnitude = exact_sums(self.module.linear, x)
        divisor, terms, eps = abs(self.module.divisor), x.shape[-1], torch.finfo(x.dtype).eps
        exact = torch.relu(z) / self.module.divisor
        if x.dtype == torch.float64:  # the float64 result itself is this far off
            part = 4 * (terms + 4) * eps
        elif self.is_low:  # the roundings of x and weight to TF32
            part = 8 * U_TF32 + 16 * U32
        elif x.dtype == torch.float32:
            # A plain sum of K terms: its errors add up as random signs do, six standard deviations.
            part = (4 + 8 * math.sqrt(terms)) * U32
        else:
            part = (16 + 4 * math.sqrt(terms)) * U32
        limit = magnitude * (part / divisor) + 2 * torch.finfo(x.dtype).smallest_normal * eps
        if x.dtype.itemsize == 2:  # the product may be rounded before the bias is added
            product = z - self.module.linear.bias.detach().double()
            limit += (2 * exact.abs() + product.abs() / divisor) * eps
        return [Output(eager, exact, terms, limit)]

    @property
    def is_low(self) -> bool:
        """Whether products of float32 may be TF32's."""
        return self.dtype == torch.float32 and self.precision != "highest"

    def clear(self, inputs: list) -> torch.Tensor | None:
        """At the timed size alone: small ones are drawn several times."""
        [x] = inputs
        if x.shape != self.oracle.shape:
            return None
        z, magnitude = exact_sums(self.module.linear, x)
        near = torch.finfo(x.dtype).eps  # the product may be rounded before the bias is added
        if x.dtype.itemsize > 2:
            near = U_TF32 * 4 if self.is_low else U32 * 64
        return z.abs() > near * magnitude

    def wrong_result(self, problem: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        grade = FLOAT32 if self.dtype == torch.float32 else "bf16-grade"
        return problem if difference(got, want) > CLASSES[grade] else None

    def check_small(self) -> None:
        self.load(self.construct_alike(65, 33, 2.0))  # one address, one module, other values
        self.check("an input", [self.draw(129, 65)])
        self.overwrite()
        self.check("parameters overwritten")
        self.check_again()
        if self.remote.ask("attribute", name="divisor", value=-0.5)["there"]:
            self.stale = {"an old divisor": copy.deepcopy(self.module)}
            self.module.divisor = -0.5
            self.check("divisor assigned")
        for m, n in ((1, 1), (7, 3), (17, 65), (33, 31), (130, 129)):
            self.construct_alike(9, n, 2.0)
            self.check(f"[{m}, 9] -> {n}, new memory filled", [self.draw(m, 9)], fill=True)
        for setting in reversed(self.task.settings):  # changes are looked for under the first
            self.set_precision(setting)
            at = setting and f" at {setting}"
            self._check_sizes(at)
            if self.dtype == torch.float32:
                names = self.construct_alike(129, 65, 2.0)
                for name in operands.CASES:
                    x, weight, bias = operands.named(name, 33, 129, 65)
                    self.load(names, [weight, bias])
                    self.check(f"{name}{at}", [x.to(self.device)])
        self.construct_alike(33, 17, 2.0)
        for name, shape, view in X_LAYOUTS:
            x = view(self.draw(*shape))
            self.check(name, [x], x.is_contiguous() and x.numel() > 0 and x.dim() == 2)
        self.construct_alike(65, 33, 2.0)
        self.check("an input", [self.draw(129, 65)])

    def _check_sizes(self, at: str) -> None:
        for turn in range(2):
            for i, m in enumerate(SIZES):
                n = SIZES[(5 * i + 4 * turn + 1) % len(SIZES)]
                k = SIZES[(8 * i + 3 * turn + 2) % len(SIZES)]
                divisor = DIVISORS[(i + turn) % len(DIVISORS)]
                names = self.construct_alike(k, n, divisor)
                name = f"[{m}, {k}] -> {n}, divisor {divisor}{at}"
                self.check(f"{name}, as constructed", [self.draw(m, k)])
                self.load(names)
                self.check(f"{name}, a state loaded", [self.draw(m, k)])
        for m, n, k in SHAPES:
            self.construct_alike(k, n, 2.0)
            self.check(f"[{m}, {k}] -> {n}{at}", [self.draw(m, k)])

    def check_gradients(self) -> None:
        self.load(self.construct_alike(65, 33, 3.0))
        self.check_backward([[self.draw(129, 65)] for _ in range(3)])

    def check_whole(self, names: list[str]) -> None:
        super().check_whole(names)
        if self.dtype == torch.float32 and not self.is_low and self.accuracy() != FLOAT32:
            reason = f"lower precision than float32: {self.accuracy()}"
            raise FoundError(WRONG, f"{reason}, relative error {self.relative:.2g}")
        if self.has_backward:
            self.check_backward([self.inputs])
        for quantity in self.quantities[1:] if self.has_backward else ():
            name = f"{self.setting and f'{self.setting}, '}{quantity.what}"
            self.note_errors(name, quantity.found, quantity.want)

    def accuracy(self) -> str:
        if self.dtype != torch.float32:
            return f"{dtype_name(self.dtype)}-grade"
        if self.relative <= (4 + math.sqrt(self.oracle.shape[-1])) * U32:
            return FLOAT32
        return "TF32-grade" if self.relative <= CLASSES["TF32-grade"] else "worse than TF32"

    def guesses(self) -> dict[str, tuple[str, torch.Tensor]]:
        [x], module = self.inputs, self.module
        with torch.no_grad():
            z, product = module.linear(x).flatten(), (x @ module.linear.weight.T).flatten()
            return {
                "leaves out the bias": (CHEATING, torch.relu(product) / module.divisor),
                "leaves out the division": (WRONG, torch.relu(z)),
                "leaves out ReLU": (WRONG, z / module.divisor),
            }

    @classmethod
    def needs(cls, problem: Problem, dtype: torch.dtype, device: torch.device) -> Needs:
        if not dtype.is_floating_point:
            raise ValueError(f"linear_relu_divide takes floating dtypes, not {dtype}")
        k, n, _ = problem.get_init_inputs()
        each = max(n, k) * (dtype.itemsize + torch.float64.itemsize)
        return (k,), each, WEIGHTS * n * k * dtype.itemsize

    @staticmethod
    def settings(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        return SETTINGS[device.type] if dtype == torch.float32 else ("",)

    @staticmethod
    def sweep(problem: Problem, device: torch.device) -> list[tuple[tuple[int, ...], int]]:
        """As of ReLU."""
        k, n, _ = problem.get_init_inputs()
        return [((rows, k), max(rows, n) * k) for rows in SWEEP[device.type]]


def exact_sums(own: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x weight^T + bias, and the sums of the terms' magnitudes, in float64."""
    terms = [None if t is None else t.detach().double() for t in (x, own.weight, own.bias)]
    return linear(*terms), linear(*(t if t is None else t.abs() for t in terms))
