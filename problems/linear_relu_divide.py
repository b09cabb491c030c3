"""The problem Linear -> ReLU -> divide for the referee: cases, error limits and yardsticks.

The product limits the speed. How accurate it has to be depends on the precision setting.

During the products a GPU reaches its power limit, and its clock slows down. All contestants are
affected alike because each timed round calls all of them, in random order and without a pause.
"""

import math
import random
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from problems import operands
from problems.linear_yardsticks import LIBRARY, PRODUCT, THREE_PRODUCTS, TRITON
from problems.shapes import RowNeeds, SweepShape
from problems.small_cases import Layout, changed_in_part
from referee.comparison.accuracy import CLASSES
from referee.comparison.case import OwnCase
from referee.comparison.reference_tensor import ReferenceTensor
from referee.contestants.forms import dtype_name
from referee.reference.problem import Problem
from referee.reference.random_values import random_tensor
from referee.times.timings import LimitingRate, ReportNames, Timings

# The largest relative errors of rounding to the nearest number of a format.
U32 = 2.0**-24  # float32
U_TF32 = 2.0**-11  # TF32 and float16

FLOAT32_GRADE = "float32-grade"

SETTINGS = {"cpu": ("highest",), "cuda": ("highest", "high", "medium")}
SWEEP_ROWS = {"cpu": (1, 4, 16, 64), "cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384)}

# How many tensors of the weight's size are in memory at once. In float32 these are the reference's
# weight, a copy of it in float64 (which counts as two) and its magnitudes in float64 (two), random
# values from which new weights are made, eager's weight, the solution's, and two gradients.
WEIGHT_COPIES = 10

# M, N and K: sizes around the widths of vectors and tiles. Each of the 13 sizes occurs twice as M,
# twice as N and twice as K.
SMALL_SIZES = [
    (1, 2, 3),
    (2, 16, 65),
    (3, 127, 15),
    (7, 7, 1),
    (8, 63, 63),
    (15, 1, 7),
    (16, 15, 127),
    (17, 65, 16),
    (63, 3, 2),
    (64, 17, 64),
    (65, 129, 8),
    (127, 8, 129),
    (129, 64, 17),
    (1, 15, 15),
    (2, 65, 1),
    (3, 3, 63),
    (7, 17, 7),
    (8, 129, 127),
    (15, 8, 16),
    (16, 64, 2),
    (17, 2, 64),
    (63, 16, 8),
    (64, 127, 129),
    (65, 7, 17),
    (127, 63, 3),
    (129, 1, 65),
]
LARGER_SIZES = [(5, 9, 4097), (257, 130, 1000), (1, 300, 2049), (300, 1, 513)]  # M, N and K
DIVISORS = [2.0, 3.0, -1.5, 1.0]
RANDOM_SIZES = 8  # how many sizes are drawn at random, which no solution can foresee
LARGEST_RANDOM_SIZE = 150


# Layouts of x with 33 features.
X_LAYOUTS = [
    Layout("x[:, 1:]", (9, 34), lambda dense: dense[:, 1:]),
    Layout("x[:, ::2]", (9, 66), lambda dense: dense[:, ::2]),
    Layout("x[::2]", (18, 33), lambda dense: dense[::2]),
    Layout("x transposed", (33, 300), lambda dense: dense.t()),
    Layout("x expanded rows", (1, 33), lambda dense: dense.expand(9, 33)),
    Layout("x expanded columns", (9, 1), lambda dense: dense.expand(9, 33)),
    Layout("x with storage offset 1", (1 + 9 * 33,), lambda dense: dense[1:].view(9, 33)),
    Layout("x 1-d", (33,), lambda dense: dense),
    Layout("x 1-d, strided", (66,), lambda dense: dense[::2]),
    Layout("x 3-d", (2, 5, 33), lambda dense: dense),
    Layout("x 3-d, permuted", (33, 5, 4), lambda dense: dense.permute(1, 2, 0)),
    Layout("x 4-d", (2, 3, 2, 33), lambda dense: dense),
    Layout("no rows", (0, 33), lambda dense: dense),
]


class LinearReluDivideProblem(Problem):
    """relu(x weight^T + bias) / divisor.

    The error limit of an element is that of a sum, for any order in which its terms are added. At
    `highest`, float32 results of the timed size also have to be in the class float32-grade.
    """

    names = ReportNames(solution="LinearReluDivideNew", eager="eager")
    yardsticks = {"cpu": (PRODUCT,), "cuda": (PRODUCT, LIBRARY, THREE_PRODUCTS, TRITON)}  # noqa: RUF012
    slow_yardsticks = (TRITON,)
    yardstick_file = Path(__file__).with_name("linear_yardsticks.py")
    limiting_rate = LimitingRate(unit="TFLOP/s", work_unit="flops", yardstick=PRODUCT)

    @property
    def settings(self) -> tuple[str, ...]:
        """The precision settings that are measured: all, unless `some_settings` names some."""
        if self.some_settings:
            return self.some_settings
        return self.settings_for(self.dtype, self.device)

    @property
    def work(self) -> int:
        """The floating-point operations of one product."""
        _k, n, _divisor = self.arguments
        return 2 * math.prod(self.shape) * n

    @property
    def moved_bytes(self) -> int:
        """Bytes that a call reads and writes: those of x and out, and of the weight."""
        k, n, _divisor = self.arguments
        return super().moved_bytes + n * k * self.dtype.itemsize

    def floor_seconds(self, timings: Timings) -> float:
        """Return the seconds of the fastest product.

        Eager's calls count because they compute the product too. A third of the time for three
        float16 products counts because an honest float32 call computes at least one such product.
        """
        seconds = list(timings.seconds.get(PRODUCT, []))
        seconds += timings.seconds[self.names.eager]
        seconds += timings.seconds[self.names.control]
        seconds += [time / 3 for time in timings.seconds.get(THREE_PRODUCTS, [])]
        return min(seconds)

    def reference_tensors(self, module: nn.Module, inputs: list) -> list[ReferenceTensor]:
        """Return the exact result, and how far each of its elements may be off."""
        [x] = inputs
        [eager] = self.run(module, inputs)
        if self._is_timed_size(x):
            # The inputs of this size are uniform in [-1, 1), so their magnitudes can be summed in
            # float32. Other inputs may be near the ends of its range.
            z = functional.linear(*_convert_operands(module.linear, x, torch.float64))
            magnitude = _sum_magnitudes(module.linear, x, torch.float32).double()
        else:
            z, magnitude = exact_sums(module.linear, x)
        exact = torch.relu(z) / module.divisor
        limit = self._limit(module, x, z, magnitude, exact)
        return [ReferenceTensor(eager, exact, terms=x.shape[-1], element_limits=limit)]

    def _limit(
        self, module: nn.Module, x: Tensor, z: Tensor, magnitude: Tensor, exact: Tensor
    ) -> Tensor:
        """Return how far each element of the result may be off.

        Args:
            module: the reference.
            x: its input.
            z: the exact sums x weight^T + bias.
            magnitude: the sums of the terms' magnitudes.
            exact: the exact results relu(z) / divisor.
        """
        divisor = abs(module.divisor)
        info = torch.finfo(x.dtype)
        smallest_subnormal = info.smallest_normal * info.eps
        relative_limit = self._relative_limit(x.dtype, terms=x.shape[-1])
        # Results that underflow are rounded by an amount that does not shrink with the terms.
        limit = magnitude * (relative_limit / divisor) + 2 * smallest_subnormal
        if x.dtype.itemsize == 2:
            # The result is rounded to a half type, and the product too may be rounded, before the
            # bias is added.
            product = z - module.linear.bias.detach().double()
            limit += (2 * exact.abs() + product.abs() / divisor) * info.eps
        return limit

    def _relative_limit(self, dtype: torch.dtype, terms: int) -> float:
        """Return how far a sum may be off, divided by the sum of its terms' magnitudes."""
        if dtype == torch.float64:
            # The exact result, which is in float64, may be this far off itself.
            return 4 * (terms + 4) * torch.finfo(dtype).eps
        if self._may_be_tf32:
            return 8 * U_TF32 + 16 * U32  # x and weight are rounded to TF32
        if dtype == torch.float32:
            # A plain sum of K terms is rounded K times, each time by at most U32 times the sum of
            # their magnitudes. The signs of these errors are random, so the standard deviation of
            # the whole error is at most sqrt(K) times that. The factor 8 allows eight of them.
            return (4 + 8 * math.sqrt(terms)) * U32
        # Half types. A product of two elements is exact in float32, in which the sum is computed.
        return (16 + 4 * math.sqrt(terms)) * U32

    @property
    def _may_be_tf32(self) -> bool:
        """True if the precision setting allows float32 products to be computed in TF32."""
        return self.dtype == torch.float32 and self.precision != "highest"

    def where_gradients_pass(self, module: nn.Module, inputs: list) -> Tensor | None:
        """Return where rounding cannot change the sign of ReLU's input, at the timed size.

        Other sizes have no such mask. Their gradients are compared on several inputs, and only an
        error that occurs on all of them counts.
        """
        [x] = inputs
        if not self._is_timed_size(x):
            return None
        if x.dtype == torch.float32 and not self._may_be_tf32:
            # Sums in float32 are good enough: their errors are far below 64 roundings of the terms.
            z = module.linear(x)
            magnitude = _sum_magnitudes(module.linear, x, torch.float32)
        else:
            z, magnitude = exact_sums(module.linear, x)
        return z.abs() > self._relative_error_of_z(x.dtype) * magnitude

    def _is_timed_size(self, x: Tensor) -> bool:
        """Return whether x has the size at which solutions are timed."""
        return tuple(x.shape) == tuple(self.shape)

    def _relative_error_of_z(self, dtype: torch.dtype) -> float:
        """Return how far ReLU's input may be off, divided by the sum of its terms' magnitudes."""
        if dtype.itemsize == 2:
            # The product may be rounded before the bias is added.
            return torch.finfo(dtype).eps
        return U_TF32 * 4 if self._may_be_tf32 else U32 * 64

    def accuracy(self, relative: float, is_equal: bool, usual: str) -> str:
        """Return the accuracy class of the results, from the Frobenius norm of their errors."""
        if self.dtype != torch.float32:
            return f"{dtype_name(self.dtype)}-grade"
        if relative <= (4 + math.sqrt(self.shape[-1])) * U32:
            return FLOAT32_GRADE
        if relative <= CLASSES["TF32-grade"]:
            return "TF32-grade"
        return "worse than TF32"

    def required_accuracy(self) -> str:
        """Return the accuracy class that float32 results must have at `highest`."""
        is_float32_at_highest = self.dtype == torch.float32 and not self._may_be_tf32
        return FLOAT32_GRADE if is_float32_at_highest else ""

    def guesses(self, module: nn.Module, inputs: list) -> dict[str, Tensor]:
        """Return the results of solutions that leave out one of the operations."""
        [x] = inputs
        with torch.no_grad():
            z = module.linear(x)
            product = x @ module.linear.weight.T
            return {
                "leaves out the bias": torch.relu(product) / module.divisor,
                "leaves out the division": torch.relu(z),
                "leaves out ReLU": z / module.divisor,
            }

    def cases(self, device_seed: int) -> Iterator[OwnCase]:
        """Yield small sizes, layouts of x, and operands on which products err most."""
        generator = torch.Generator(self.device).manual_seed(device_seed)

        def draw(*shape: int) -> Tensor:
            return random_tensor(shape, self.dtype, self.device, generator)

        yield from _state_cases(draw, generator)
        for setting in self.settings:
            suffix = f" at {setting}" if setting else ""
            yield from _at_setting(setting, _size_cases(draw, suffix))
            if self.dtype == torch.float32:
                yield from _at_setting(setting, self._operand_cases(suffix))
        first_setting = self.settings[0]
        yield from _at_setting(first_setting, _random_size_cases(draw))
        yield from _at_setting(first_setting, _layout_cases(draw))
        # After unusual inputs, which a solution may refuse, a usual one must give the right result.
        yield OwnCase("an input", [draw(129, 65)], arguments=[65, 33, 2.0], setting=first_setting)

    def _operand_cases(self, suffix: str) -> Iterator[OwnCase]:
        """Yield a case for each of `operands.CASES`: x, and the parameters of one module.

        The first case constructs the module.

        Args:
            suffix: the end of the cases' names.
        """
        arguments = [129, 65, 2.0]
        for name in operands.CASES:
            x, weight, bias = operands.draw_case(name, m=33, k=129, n=65)
            inputs = [x.to(self.device)]
            yield OwnCase(f"{name}{suffix}", inputs, arguments=arguments, state=[weight, bias])
            arguments = None  # the module of the case before

    def backward_inputs(self) -> list[list[list]]:
        """Return one group of three small inputs for which gradients are compared."""
        generator = torch.Generator(self.device).manual_seed(random.randrange(1 << 30))
        shape = (129, 65)
        return [[[random_tensor(shape, self.dtype, self.device, generator)] for _ in range(3)]]

    def backward_arguments(self) -> list | None:
        """Return the arguments of the module for `backward_inputs`."""
        return [65, 33, 3.0]

    @staticmethod
    def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
        """Raise a ValueError if the dtype is not a floating one."""
        if not dtype.is_floating_point:
            raise ValueError(f"linear_relu_divide takes floating dtypes, not {dtype}")

    @staticmethod
    def row_needs(init_inputs: list, dtype: torch.dtype) -> RowNeeds:
        """Return the memory that a forward needs."""
        k, n, _divisor = init_inputs
        row_bytes = max(n, k) * (dtype.itemsize + torch.float64.itemsize)
        return RowNeeds((k,), row_bytes, fixed_bytes=WEIGHT_COPIES * n * k * dtype.itemsize)

    @staticmethod
    def settings_for(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        """Return the precision settings of float32 products; "" for other dtypes."""
        return SETTINGS[device.type] if dtype == torch.float32 else ("",)

    @staticmethod
    def sweep(init_inputs: list, device: torch.device) -> list[SweepShape]:
        """Return the shapes of x in a sweep."""
        k, n, _divisor = init_inputs
        return [
            SweepShape((rows, k), max(rows * k, n * k, rows * n))
            for rows in SWEEP_ROWS[device.type]
        ]


# ------------------------------------------------------------------------------------------- cases

DrawTensor = Callable[..., Tensor]  # takes the sizes of a tensor, and draws it


def _at_setting(setting: str, cases_without_setting: Iterator[OwnCase]) -> Iterator[OwnCase]:
    """Yield the cases, each with the precision setting."""
    for case in cases_without_setting:
        case.setting = setting
        yield case


def _state_cases(draw: DrawTensor, generator: torch.Generator) -> Iterator[OwnCase]:
    """Yield cases that a solution gets wrong if it keeps values from earlier calls."""
    yield OwnCase("an input", [draw(129, 65)], arguments=[65, 33, 2.0], state="other")
    yield OwnCase("parameters overwritten", [draw(129, 65)], state="other")
    yield from changed_in_part(draw(129, 65), generator)
    for m, n in ((1, 1), (7, 3), (17, 65), (33, 31), (130, 129)):
        name = f"[{m}, 9] -> {n}, new memory filled"
        yield OwnCase(name, [draw(m, 9)], arguments=[9, n, 2.0], fill_new_tensors=True)


def _size_cases(draw: DrawTensor, suffix: str) -> Iterator[OwnCase]:
    """Yield two cases for each of SMALL_SIZES, and one for each of LARGER_SIZES.

    Args:
        draw: draws a tensor of a shape.
        suffix: the end of the cases' names.
    """
    for (m, n, k), divisor in zip(SMALL_SIZES, cycle(DIVISORS), strict=False):
        name = f"[{m}, {k}] -> {n}, divisor {divisor}{suffix}"
        yield OwnCase(f"{name}, as constructed", [draw(m, k)], arguments=[k, n, divisor])
        yield OwnCase(f"{name}, other parameters", [draw(m, k)], state="other")
    for m, n, k in LARGER_SIZES:
        yield OwnCase(f"[{m}, {k}] -> {n}{suffix}", [draw(m, k)], arguments=[k, n, 2.0])


def _random_size_cases(draw: DrawTensor) -> Iterator[OwnCase]:
    """Yield cases of random sizes and divisors."""
    for _ in range(RANDOM_SIZES):
        m, n, k = (random.randint(1, LARGEST_RANDOM_SIZE) for _ in range(3))
        divisor = random.uniform(0.3, 3.0)
        name = f"[{m}, {k}] -> {n}, divisor {divisor:.3g}, drawn at random"
        yield OwnCase(name, [draw(m, k)], arguments=[k, n, divisor])


def _layout_cases(draw: DrawTensor) -> Iterator[OwnCase]:
    """Yield the layouts of x, for one module, which the first case constructs.

    A solution may refuse those that are not contiguous matrices with elements.
    """
    arguments = [33, 17, 2.0]
    for layout in X_LAYOUTS:
        x = layout.view(draw(*layout.shape))
        required = x.is_contiguous() and x.numel() > 0 and x.dim() == 2
        yield OwnCase(layout.name, [x], required=required, arguments=arguments)
        arguments = None  # the module of the case before


# ------------------------------------------------------------------------------------- exact sums


def exact_sums(module: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x weight^T + bias, and the sums of the terms' magnitudes, in float64."""
    z = functional.linear(*_convert_operands(module, x, torch.float64))
    return z, _sum_magnitudes(module, x, torch.float64)


def _sum_magnitudes(module: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |x| |weight|^T + |bias|, computed in a dtype."""
    converted = _convert_operands(module, x, dtype)
    return functional.linear(*(None if tensor is None else tensor.abs() for tensor in converted))


def _convert_operands(module: nn.Linear, x: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    """Return x, weight and bias in a dtype; None in the place of a bias that is missing."""
    tensors = (x, module.weight, module.bias)
    return [None if tensor is None else tensor.detach().to(dtype) for tensor in tensors]
