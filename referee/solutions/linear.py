"""Files that stand in for Linear -> ReLU -> divide."""

import copy
import math
import random

import torch
from torch import nn

from referee import cases, linear_checks
from referee import linear_relu_divide as grader
from referee.benchmarks import operands
from referee.child.rows import draw_state
from referee.error_line import LONGEST_LINE
from referee.errors import U32, Allowance, Comparison
from referee.linear_errors import compare_output, precision
from referee.remote import dtype_name, pack
from referee.solutions.budget import CLASSES
from referee.solutions.judge import SEEDS
from referee.solutions.oracle import difference
from referee.solutions.rows import Rows
from referee.solutions.verdict import CHEATING, WRONG, FoundError
from referee.timing import Timings

# The Frobenius norm of the errors over that of the results, at most: between what rounding to the
# format gives, 3.0e-4 (7.4e-4 truncated) and 2.3e-3, and the next one's.
GRADES = {"TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
# The largest error in parts of the sum of the terms' magnitudes that bfloat16 operands explain.
LOWER = 2.0**-6


class Linear(Rows):
    """Within the errors of a sum in the dtype, in whatever order."""

    rate, names = grader.RATE, grader.NAMES

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        k, n, _ = self.task.problem.get_init_inputs()
        self.output_shape = (self.task.shape[0], n)
        self.scale = 1 / math.sqrt(k)
        self.stale: dict[str, nn.Module] = {}
        self.worst = 0.0

    def check_small(self) -> None:
        sizes, draw = linear_checks.SIZES, self._draw
        self.construct(65, 33, 3.0)
        self.check("an input, as constructed", draw(129, 65), True)
        self.load("load_state_dict")
        self.check("an input, a state loaded", draw(129, 65), True)
        for turn in range(2):
            for i, m in enumerate(sizes):
                n = sizes[(5 * i + 4 * turn + 1) % len(sizes)]
                k = sizes[(8 * i + 3 * turn + 2) % len(sizes)]
                divisor = linear_checks.DIVISORS[(i + turn) % len(linear_checks.DIVISORS)]
                self.construct(k, n, divisor)
                name = f"[{m}, {k}] -> {n}, divisor {divisor}"
                self.check(f"{name}, as constructed", draw(m, k), True)
                self.load("load_state_dict")
                self.check(f"{name}, a state loaded", draw(m, k), True)
        for m, n, k in linear_checks.SHAPES[:-1]:
            self.construct(k, n, 2.0)
            self.check(f"[{m}, {k}] -> {n}", draw(m, k), True)
        self._check_calls()
        self.construct(33, 17, 2.0)
        for name, shape, view in linear_checks.X_LAYOUTS:
            x = view(draw(*shape))
            self.check(name, x, x.is_contiguous() and x.numel() > 0 and x.dim() == 2)
        if self.dtype == torch.float32:
            self._check_operands()
        self.construct(65, 33, 2.0)
        self.check("an input", draw(129, 65), True)

    def _check_calls(self) -> None:
        """One address, one module, other values."""
        self.construct(65, 33, 2.0)
        x = self._draw(129, 65)
        self.check("an input", x, True)
        self.load("data")
        self.check("parameters overwritten", x, True, again=True)
        values = x.clone()
        cases.refill(values[random.randrange(len(values))], self.generator)
        self.check("another row at the same address", values, True, again=True)
        values = values.clone()
        values.view(-1)[random.randrange(values.numel())].neg_().add_(3)
        self.check("another element at the same address", values, True, again=True)
        if self.remote.ask("attribute", name="divisor", value=-0.5)["there"]:
            self.stale = {"an old divisor": self._copy()}
            self.reference.divisor = -0.5
            self.check("divisor assigned", values, True)
        for m, n in ((1, 1), (7, 3), (17, 65), (33, 31), (130, 129)):
            self.construct(9, n, 2.0)
            self.check(f"[{m}, 9] -> {n}, new memory filled", self._draw(m, 9), True, fill=True)

    def _check_operands(self) -> None:
        """Operands of many kinds, but for those that only some hardware carries."""
        self.construct(129, 65, 2.0)
        for name in operands.CASES:
            if "subnormal" in name or "overflow" in name:
                continue
            x, weight, bias = operands.named(name, 33, 129, 65)
            self.reference.load_state_dict({"linear.weight": weight, "linear.bias": bias})
            self.put_state("load_state_dict")
            self.check(name, x.to(self.device), True)

    def construct(self, k: int, n: int, divisor: float) -> None:
        """Both modules, under one seed."""
        seed, dtype = random.randrange(SEEDS), dtype_name(self.dtype)
        state = self.remote.ask("new", args=pack([k, n, divisor]), seed=seed, dtype=dtype)["state"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.task.problem.reference(k, n, divisor).to(self.device, self.dtype)
        shapes = [list(value.shape) for value in module.state_dict().values()]
        self.state = [str(name) for name, _ in state]
        if [shape for _, shape in state] != shapes:
            got = ", ".join(f"{name} {shape}" for name, shape in state) or "empty"
            raise FoundError(WRONG, f"its state is {got}, expected {shapes}"[:LONGEST_LINE])
        self.reference, self.stale, self.earlier = module, {}, {}

    def load(self, how: str) -> None:
        """New values for both modules' parameters."""
        self.stale = {"old parameters": self._copy()}
        for parameter in self.reference.parameters():
            cases.refill(parameter.data, self.generator)
        self.put_state(how)

    def put_state(self, how: str) -> None:
        """Gives the solution the reference's parameters."""
        values = list(self.reference.state_dict().values())
        self.remote.put(*values)
        shapes = [list(value.shape) for value in values]
        dtype = dtype_name(self.dtype)
        self.remote.ask("state", names=self.state, shapes=shapes, dtype=dtype, how=how)

    def fresh(self, turn: int) -> tuple[int | None, nn.Module, list]:
        self.construct(65, 33, 3.0)
        self.load("load_state_dict")
        return self.feed_small((129, 65))

    def wrong_result(self, problem: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        """The budget is that of smaller sizes."""
        grade = "float32-grade" if self.dtype == torch.float32 else "bf16-grade"
        return problem if difference(got, want) > CLASSES[grade] else None

    def check_headline(self) -> None:
        self.check_backward()
        self.progress("constructing")
        self.construct(*self.task.problem.get_init_inputs())
        self.check_whole(f"{list(self.task.shape)}, x in 0..1", True)
        seed = random.randrange(SEEDS)
        self.remote.ask("fill_state", seed=seed, names=self.state, scale=self.scale)
        draw_state([*self.reference.state_dict().values()], seed, self.scale)
        self.check_whole(f"{list(self.task.shape)}, x in -1..1", False)
        self.verdict.accuracy = self._grade(self.worst)

    def mismatch(self, output: torch.Tensor, x: torch.Tensor, whole: bool = False) -> str | None:
        compared = self._compare(output, x)
        if whole:
            self.worst = max(self.worst, compared.solution.relative)
        if compared.solution.beyond and (problem := compared.problem()):
            return problem
        if whole and (grade := self._grade(self.worst)) in GRADES:
            return f"{grade}: relative error {self.worst:.2g}"
        return None

    def _compare(self, output: torch.Tensor, x: torch.Tensor) -> Comparison:
        k = x.shape[-1]
        allowance = Allowance.of(x.dtype, precision(), k).times(grader.TIMED)
        if x.dtype == torch.float32:
            # A plain sum of K terms: its errors add up as random signs do, six standard
            # deviations of them.
            allowance = Allowance(0.0, (4 + 8 * math.sqrt(k)) * U32, allowance.smallest)
        return compare_output("", output, self.expected(x), x, self.reference, allowance)

    def _grade(self, relative: float) -> str:
        """The accuracy class of errors at the timed size."""
        if self.dtype != torch.float32:
            return f"{dtype_name(self.dtype)}-grade"
        k = self.reference.linear.in_features
        if relative <= (4 + math.sqrt(k)) * U32:
            return "float32-grade"
        return next((name for name, most in GRADES.items() if relative <= most), "worse than bf16")

    def guesses(self, x: torch.Tensor) -> dict[str, tuple[str, torch.Tensor]]:
        module = self.reference
        with torch.no_grad():
            z, divisor = module.linear(x), module.divisor
            product = x @ module.linear.weight.T
            found = {
                "returns zeros": (CHEATING, torch.zeros_like(z)),
                "leaves out the bias": (CHEATING, torch.relu(product) / divisor),
                "leaves out the division": (WRONG, torch.relu(z)),
                "leaves out ReLU": (WRONG, z / divisor),
            }
            for what, stale in self.stale.items():
                found[f"answers with {what}"] = (CHEATING, stale(x))
        return found

    def agrees(self, output: torch.Tensor, guess: torch.Tensor) -> bool:
        scale = guess.abs().max().item()
        return (output - guess).abs().max().item() <= 1e-3 * scale

    def _diagnose(
        self,
        name: str,
        output: torch.Tensor,
        expected: torch.Tensor,
        x: torch.Tensor,
        bait: list | None,
        problem: str,
    ) -> tuple[str, str]:
        word, reason = super()._diagnose(name, output, expected, x, bait, problem)
        is_float32 = word == WRONG and self.dtype == torch.float32
        if is_float32 and self._compare(output, x).solution.scaled <= LOWER:
            return WRONG, f"lower precision than float32: {reason}"
        return word, reason

    def work(self) -> int:
        return 2 * math.prod(self.task.shape) * self.output_shape[1]

    def fastest(self, timings: Timings) -> float:
        return grader.fastest_product(timings)

    def _draw(self, *shape: int) -> torch.Tensor:
        return cases.random(shape, self.dtype, self.device, self.generator)

    def _copy(self) -> nn.Module:
        return copy.deepcopy(self.reference)
