"""Grades relu(x weight^T + bias) / divisor: as accurate as torch, and limited by products.

A GPU that runs products back to back meets its power limit and slows down by a fifth. The rounds
do not wait for it to recover: interleaved in random order, all contestants meet the same clock.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from model import Problem
from referee import cases
from referee.errors import U_TF32, Allowance, Comparison, Errors
from referee.linear_checks import Contender, check_gradient, check_output, check_small
from referee.linear_errors import clear_of_zero, precision
from referee.memory import RING, choose_rows
from referee.outcome import Outcome, Run, Task
from referee.progress import Progress
from referee.step import Pace, Step, measure_step
from referee.timing import Names, Rate, Rounds, Timings, compiled, measure

NAMES = Names(solution="LinearReluDivideNew", eager="eager")
PRODUCT = "product alone"
LIBRARY = "cuBLASLt epilogue"
THREE = "3 float16 products"  # in one call, concatenated along K: no split, no epilogue
RATE = Rate(
    unit="TFLOP/s",
    scale=1e12,
    digits=2,
    work="flops",
    yardstick=PRODUCT,
    floor="a product at the highest rate measured",
    margin={"cpu": 1.5, "cuda": 1.25},
)
SETTINGS = {"cpu": ["highest"], "cuda": ["highest", "high", "medium"]}
SWEEP = {"cpu": (1, 4, 16, 64), "cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384)}  # rows of x
CPU_ROWS = 64  # a float64 product with all of the weight takes a CPU a second
WEIGHTS = 6  # in memory at once: those of both modules, of a copy, their gradients
SUSPECTS = 16, 64  # rows and columns that are looked at after a timed call
# Times the allowance for a sum of a few terms: beyond any order of summation in float32, well
# within TF32, of which a timed call must not make use either.
TIMED = 4.0


class Inputs:
    """A ring of inputs `[rows, in_features]`, and the parameters of both modules.

    Before every call one random row of x and one of the weight, in both modules alike, are
    rewritten in place. A result that was kept, or computed from a kept weight, is then wrong in
    that row or that column. `.data` leaves versions as they were.
    """

    def __init__(
        self,
        ring: list[torch.Tensor],
        reference: nn.Module,
        solution: nn.Module,
        generator: torch.Generator,
    ) -> None:
        self.ring, self._generator = ring, generator
        self._linear, self._divisor = reference.linear, reference.divisor
        self._weights = [m.get_parameter("linear.weight").data for m in (reference, solution)]
        self._turn = self.row = self._column = 0
        self._values = torch.empty(0), torch.empty(0)

    def next(self) -> torch.Tensor:
        """The next input of the ring, which `write` is to alter, and the weight with it."""
        self._turn = (self._turn + 1) % len(self.ring)
        x, (n, k) = self.ring[self._turn], self._weights[0].shape
        self.row, self._column = random.randrange(len(x)), random.randrange(n)
        of_x, of_weight = (cases.refill(torch.empty_like(x[0]), self._generator) for _ in range(2))
        self._values = of_x, of_weight.div_(math.sqrt(k))
        return x

    def write(self) -> None:
        """Gives the row of that input, and the one of both weights, their new values."""
        of_x, of_weight = self._values
        self.ring[self._turn].data[self.row] = of_x
        for weight in self._weights:
            weight[self._column] = of_weight

    @torch.no_grad()
    def wrong(self, output: torch.Tensor) -> str | None:
        """Compares altered, first, last and random rows and columns with float64."""
        x, linear = self.ring[self._turn], self._linear
        rows, columns = self._suspects()
        flat, weight = x[rows].double(), linear.weight[columns].double()
        z, magnitude = flat @ weight.T, flat.abs() @ weight.abs().T
        if linear.bias is not None:
            bias = linear.bias[columns].double()
            z, magnitude = z + bias, magnitude + bias.abs()
        exact, magnitude = torch.relu(z) / self._divisor, magnitude / abs(self._divisor)
        errors = Errors(timed_allowance(x.dtype, x.shape[1]))
        errors.add(output[rows][:, columns], exact, magnitude)
        return _timed("call", errors)

    @torch.no_grad()
    def wrong_gradient(
        self, output: torch.Tensor, gradients: Sequence[torch.Tensor], grad_output: torch.Tensor
    ) -> str | None:
        """Compares such rows and columns of all gradients; where the output is 0, none passes.

        The output is what `wrong` has found right.
        """
        x, weight = self.ring[self._turn], self._linear.weight
        rows, columns = self._suspects()
        features = torch.randint(x.shape[1], (SUSPECTS[1],), device=x.device)
        across, down = (
            grad_output[part].double() * (output[part] != 0) / self._divisor
            for part in (rows, (slice(None), columns))
        )
        some_weight, some_x = weight[:, features].double(), x[:, features].double()
        got = {"x": gradients[0][rows][:, features], "weight": gradients[1][columns][:, features]}
        exact = {"x": (across, some_weight), "weight": (down.T, some_x)}
        if len(gradients) > 2:
            got["bias"] = gradients[2][columns][:, None]
            exact["bias"] = (down.T, torch.ones_like(some_x[:, :1]))
        for name, (left, right) in exact.items():
            terms = left.shape[1]
            allowance = timed_allowance(x.dtype, terms)
            if name == "bias":
                allowance = Allowance.of_sum(x.dtype, terms).times(TIMED)
            if x.dtype == torch.float16:  # an output that underflows hides on which side it was
                hidden = (grad_output.abs().max() / abs(self._divisor) * right.abs().max()).item()
                allowance = replace(allowance, smallest=hidden)
            errors = Errors(allowance)
            errors.add(got[name], left @ right, left.abs() @ right.abs())
            if problem := _timed(f"gradient of {name}", errors):
                return problem
        return None

    def _suspects(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, n = self.ring[self._turn], len(self._weights[0])
        altered, sizes, chosen = (self.row, self._column), (len(x), n), []
        for first, size, count in zip(altered, sizes, SUSPECTS, strict=True):
            known = [first, 0, size - 1]
            known += (random.randrange(size) for _ in range(count - len(known)))
            chosen.append(torch.tensor(known, device=x.device))
        return tuple(chosen)


def choose_shape(
    problem: Problem,
    wanted: int | None,
    dtype: torch.dtype,
    device: torch.device,
    buffers: int | None = None,
) -> tuple[tuple[int, ...], str]:
    """The shape of x, and a sentence that says why it is not the headline's, or "".

    Raises:
        ValueError: it does not fit, or an integer dtype.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"linear_relu_divide takes floating dtypes, not {dtype}")
    k, n, _ = problem.get_init_inputs()
    usual = problem.rows if device.type == "cuda" else min(problem.rows, CPU_ROWS)
    each = max(n, k) * (dtype.itemsize + torch.float64.itemsize)
    weights = WEIGHTS * n * k * dtype.itemsize
    count, note = choose_rows(wanted, usual, each, device, weights, buffers)
    if not (note or wanted) and usual < problem.rows:
        note = f"{usual:,} of {problem.rows:,} rows, to be done within a minute on a CPU"
    return (count, k), note


@contextmanager
def _precision_kept() -> Iterator[None]:
    """Within it, the precision setting may be changed."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@_precision_kept()
def grade(task: Task, outcome: Outcome) -> None:
    """Checks outputs and gradients under every precision setting; if all are right, times them.

    Args:
        outcome: what is found is added to it as it is found.
    """
    problem, device, progress = task.problem, task.device, task.progress
    generator = torch.Generator(device=device)
    seed = generator.seed() % 2**31  # new in every run
    contender = Contender(problem.reference, task.solution, device, generator)
    checks = outcome.checks
    checks.add(check_small(contender, SETTINGS[device.type], seed, progress))
    if checks.failures:
        return
    progress("drawing the weights")
    reference, solution = _modules(task)
    ring = _ring(task.shape, task)
    is_float32 = task.dtype == torch.float32
    for setting in SETTINGS[device.type] if is_float32 else SETTINGS["cpu"]:
        torch.set_float32_matmul_precision(setting)
        label = setting if is_float32 else ""
        _check_headline(reference, solution, ring[0], label, generator, outcome, progress)
        if checks.failures:
            break
        inputs = Inputs(ring, reference, solution, generator)
        for x in ring:
            cases.refill(x, generator)
        run = _measure(reference, solution, inputs, label, generator, task, outcome)
        if torch.get_float32_matmul_precision() != setting:
            checks.failures.append(f"{setting}: the solution changed the precision setting")
        if run.problems:
            break


def _modules(task: Task) -> tuple[nn.Module, nn.Module]:
    """The reference and the solution, with equal parameters."""
    reference, solution = (
        kind(*task.problem.get_init_inputs()).to(task.device, task.dtype)
        for kind in (task.problem.reference, task.solution)
    )
    solution.load_state_dict(reference.state_dict())
    return reference, solution


def _ring(shape: tuple[int, ...], task: Task) -> list[torch.Tensor]:
    count = RING[task.device.type]
    return [torch.empty(shape, dtype=task.dtype, device=task.device) for _ in range(count)]


def _check_headline(
    reference: nn.Module,
    solution: nn.Module,
    x: torch.Tensor,
    label: str,
    generator: torch.Generator,
    outcome: Outcome,
    progress: Progress,
) -> None:
    """The timed size: the benchmark's x in 0..1, x of both signs, and the gradients for that."""
    strict = x.dtype == torch.float32
    prefix = f"{label}, " if label else ""

    def record(name: str, compared: Comparison | None, problem: str | None) -> str | None:
        if compared:
            compared.name = name
            outcome.errors.append(compared)
        return problem

    for name, fill in (("x in 0..1", x.uniform_), ("x normal", x.normal_)):
        fill(generator=generator)
        name = f"{prefix}{name}"
        progress(f"checking {list(x.shape)}:", name)
        outcome.checks.record(
            name, lambda name=name: record(name, *check_output(reference, solution, x, strict))
        )

    def gradients() -> str | None:
        clear = clear_of_zero(x, reference)
        grad_output = cases.random(tuple(clear.shape), x.dtype, x.device, generator) * clear
        compared, problem = check_gradient(reference, solution, x, grad_output, None, strict)
        for name, comparison in compared.items():
            record(f"{prefix}gradient of {name.removeprefix('linear.')}", comparison, None)
        return problem

    progress(f"checking {list(x.shape)}:", f"{prefix}gradients")
    outcome.checks.record(f"{prefix}gradients", gradients)


def _measure(
    reference: nn.Module,
    solution: nn.Module,
    inputs: Inputs,
    label: str,
    generator: torch.Generator,
    task: Task,
    outcome: Outcome,
) -> Run:
    x = inputs.ring[0]
    timings, calls = contest(reference, solution, x)
    run = Run(label, timings)
    outcome.runs.append(run)
    measure(calls, inputs, timings, fastest_product, task.wanted, task.progress)
    if not run.problems:
        n = len(reference.linear.weight)
        grad_output = cases.random((len(x), n), x.dtype, x.device, generator)
        pace = Pace(calls[PRODUCT], fastest_product(timings), backward=2)
        run.step = Step.of(x.device.type, NAMES, RATE)
        measure_step(
            reference, solution, inputs, grad_output, run.step, pace, task.wanted, task.progress
        )
    return run


def contest(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor
) -> tuple[Timings, dict[str, Callable]]:
    """All that `measure` needs for inputs like x, but these."""
    (n, k), m = reference.linear.weight.shape, len(x)
    moved = x.element_size() * (m * k + n * k + m * n)
    timings = Timings(x.device.type, NAMES, RATE, work=2 * m * n * k, moved=moved)
    return timings, contestants(reference, solution, x, timings.notes)


class Series:
    """Few to many rows of x, the problem's weight, one dtype and precision, for a sweep."""

    def __init__(self, task: Task, setting: str) -> None:
        self._task, self._precision = task, setting
        self.setting = setting if task.dtype == torch.float32 else ""
        self._features = task.problem.get_init_inputs()[:2]
        self.shapes = [(m, self._features[0]) for m in SWEEP[task.device.type]]
        self._modules: tuple[nn.Module, nn.Module] | None = None

    def needed(self, shape: tuple[int, ...]) -> int:
        """Bytes of memory: both modules, the ring and outputs; on a GPU 3 products' operands."""
        (m, _), (k, n) = shape, self._features
        kind, size = self._task.device.type, self._task.dtype.itemsize
        products = 3 * (m + n) * k * torch.float16.itemsize
        has_products = kind == "cuda" and self._task.dtype == torch.float32
        return (2 * n * k + RING[kind] * m * k + 2 * m * n) * size + has_products * products

    @_precision_kept()
    def time(self, shape: tuple[int, ...], wanted: Rounds, progress: Progress) -> Timings:
        """The forward's times."""
        task = self._task
        torch.set_float32_matmul_precision(self._precision)
        if self._modules is None:
            self._modules = _modules(task)
        generator = torch.Generator(device=task.device)
        generator.seed()
        ring = [cases.refill(x, generator) for x in _ring(shape, task)]
        timings, calls = contest(*self._modules, ring[0])
        inputs = Inputs(ring, *self._modules, generator)
        return measure(calls, inputs, timings, fastest_product, wanted, progress)

    def close(self) -> None:
        """Gives the weights' memory back."""
        self._modules = None


def sweep(task: Task) -> list[Series]:
    """The series of the task's dtype: for float32 `highest`, and on a GPU `high`."""
    settings = SETTINGS[task.device.type][:2] if task.dtype == torch.float32 else ["highest"]
    return [Series(task, setting) for setting in settings]


@torch.no_grad()
def contestants(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor, notes: list[str]
) -> dict[str, Callable]:
    """The calls that are timed, by name; `notes` gets what is left out."""
    weight = reference.linear.weight.data
    calls = {NAMES.solution: solution, NAMES.eager: reference, NAMES.again: reference}
    if x.is_cuda:
        calls |= compiled(reference, lambda module: module(x), notes)
    calls[PRODUCT] = lambda x: x @ weight.T
    if x.is_cuda:
        for name, yardstick in ((LIBRARY, _library), (THREE, three_products)):
            try:
                call = yardstick(reference, x)
                call(x)
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                notes.append(f"{name} is left out: {reason}")
            else:
                calls[name] = call
    return calls


def fastest_product(timings: Timings) -> float:
    """Seconds of one product at the highest rate measured, eager's calls being products too.

    For float32 that is float16's: an honest call needs at least one such product.
    """
    times = [timings.seconds[name] for name in (PRODUCT, NAMES.eager, NAMES.again)]
    times.append([seconds / 3 for seconds in timings.seconds.get(THREE, [])])
    return min(seconds for some in times for seconds in some)


def timed_allowance(dtype: torch.dtype, terms: int) -> Allowance:
    """The error a timed call may have, on values of random sign, wherever the reference is."""
    if dtype == torch.float32 and precision() != "highest":
        # The roundings of random operands add up as random signs do: six standard deviations.
        return Allowance(0.0, 2 * U_TF32 * min(1.0, 4 / math.sqrt(terms)), 0.0)
    return Allowance.of(dtype, precision(), terms).times(TIMED)


def _library(reference: nn.Module, x: torch.Tensor) -> Callable:
    """cuBLASLt's epilogue, which is relu(z / divisor)."""
    weight, bias, divisor = reference.linear.weight.data, reference.linear.bias, reference.divisor
    if not (divisor > 0 and math.frexp(divisor)[0] == 0.5):
        raise ValueError("1 / divisor is not exact")
    bias = bias.data / divisor
    return lambda x: torch._addmm_activation(bias, x, weight.T, alpha=1 / divisor)


def three_products(reference: nn.Module, x: torch.Tensor) -> Callable:
    """Three float16 products in one."""
    if x.dtype != torch.float32:
        raise ValueError("x is not float32")
    left, right = (torch.cat([t.half()] * 3, dim=1) for t in (x, reference.linear.weight.data))
    return lambda x: torch.mm(left, right.T, out_dtype=torch.float32)


def _timed(what: str, errors: Errors) -> str | None:
    if not errors.beyond:
        return None
    return f"a timed {what} was wrong: {errors.beyond} of {errors.count}, {errors.first}"
