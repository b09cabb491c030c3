"""Does the solution answer as the reference does?"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from referee.cases import Case, elementwise, random, served, sprinkle
from referee.compare import first_mismatch, layout_mismatch, share_memory
from referee.gradients import gradient_checks
from referee.progress import Progress

ENOUGH = 10  # failures after which nothing more is learnt, and a crashed GPU only repeats itself
REFUSED_DTYPES = [
    torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
]  # fmt: skip
REFUSED_OBJECTS = [[1.0, -1.0], 1.0, None]


@dataclass
class Checks:
    """How many cases were tried, and the failures, in words."""

    count: int = 0
    failures: list[str] = field(default_factory=list)

    def record(self, name: str, check: Callable[[], str | None]) -> None:
        """Runs one check; an exception is a failure like any other."""
        if len(self.failures) >= ENOUGH:
            return
        self.count += 1
        try:
            problem = check()
        except Exception as error:  # whatever the solution raises belongs in the report
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.failures.append(f"{name}: {problem}")

    def add(self, other: "Checks") -> None:
        """Takes in the count and the failures of others."""
        self.count += other.count
        self.failures += other.failures


class Watch:
    """Remembers tensors, and all memory under them, to see whether something changed them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._kept = {
            name: (x, _geometry(x), storage := _storage(x), storage.clone())
            for name, x in tensors.items()
        }

    def problem(self) -> str | None:
        """The change, in words."""
        for name, (x, geometry, storage, before) in self._kept.items():
            if _geometry(x) != geometry:
                return f"the {name}'s shape, strides or address were changed"
            if changed := first_mismatch(storage, before, exact=True):
                return f"the {name}'s memory was changed: {changed}"
        return None


def check_small(
    reference: nn.Module, solution: nn.Module, device: torch.device, seed: int, progress: Progress
) -> Checks:
    """Every small case, what must be refused, the life of outputs, every short tail, gradients."""
    checks = Checks()
    for case in elementwise(device, seed):
        progress("checking small cases:", case.name)
        checks.record(case.name, lambda case=case: check_case(reference, solution, case))
    for dtype in REFUSED_DTYPES:
        if dtype in served(device).values():
            continue
        checks.record(
            f"{dtype} is refused",
            lambda dtype=dtype: check_error(
                reference, solution, torch.zeros(3, device=device).to(dtype)
            ),
        )
    for other in REFUSED_OBJECTS:
        checks.record(
            f"{other!r} is refused", lambda other=other: check_error(reference, solution, other)
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    checks.record("calls in a row", lambda: check_calls(reference, solution, device, generator))
    checks.record("tails", lambda: check_tails(reference, solution, device, generator))
    for name, check in gradient_checks(reference, solution, device, seed):
        progress("checking gradients:", name)
        checks.record(name, check)
    return checks


def check_headline(
    reference: nn.Module,
    solution: nn.Module,
    x: torch.Tensor,
    generator: torch.Generator,
    progress: Progress,
) -> Checks:
    """The timed size, special values among the random ones; x is overwritten in places.

    The second case starts one element late and ends two early, for the code that only large,
    badly aligned tensors reach.
    """
    checks = Checks()
    sprinkle(x, generator)
    name = f"full size {list(x.shape)}"
    views = {name: x, f"{name}, flat, offset 1": x.view(-1)[1:-2]}
    for name, view in views.items():
        progress(f"checking {name}")
        checks.record(name, lambda v=view: check_case(reference, solution, Case("", lambda: v)))
    return checks


def check_case(reference: nn.Module, solution: nn.Module, case: Case) -> str | None:
    """One input: layout and values of the output, fresh memory, an untouched input.

    The order matters. Memory is poisoned first, so that unwritten output shows; the reference
    comes last, so that its result exists nowhere while the solution runs.
    """
    x = case.make()
    output, problem = call_watched(solution, x, {"input": x}, x.numel() * x.element_size())
    if problem:
        return problem
    expected = reference(x)
    return _judge(output, expected, x)


def call_watched(
    solution: nn.Module, x: torch.Tensor, tensors: dict[str, torch.Tensor], size: int
) -> tuple[object, str | None]:
    """The output, and which of the tensors changed; poison lies where `size` bytes may land."""
    watch = Watch(tensors)
    poison(size, x.device)
    output = solution(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return output, watch.problem()


def check_calls(
    reference: nn.Module, solution: nn.Module, device: torch.device, generator: torch.Generator
) -> str | None:
    """Two calls at one address with other values: nothing is replayed, no output is reused."""
    first_values, second_values = (
        random((129, 65), torch.float32, device, generator) for _ in range(2)
    )
    x = first_values.clone()
    first = solution(x)
    x.data.copy_(second_values)  # .data leaves the version as it was
    second = solution(x)
    if share_memory(first, second):
        return "two outputs share memory"
    for output, values in ((second, second_values), (first, first_values)):
        if problem := _judge(output, reference(values), x):
            return problem
    return None


def check_tails(
    reference: nn.Module, solution: nn.Module, device: torch.device, generator: torch.Generator
) -> str | None:
    """Lengths 0 to 129 while torch fills new memory with NaN, so that unwritten output shows."""
    with nan_in_new_memory():
        for length in range(130):
            x = random((length,), torch.float32, device, generator)
            if problem := _judge(solution(x), reference(x), x):
                return f"length {length}: {problem}"
    return None


@contextmanager
def nan_in_new_memory(warn_only: bool = False) -> Iterator[None]:
    """Within it, torch.empty fills: part of torch's deterministic mode, which may only warn.

    `torch.use_deterministic_algorithms` does the same, and imports torch's compiler first.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn" if warn_only else "error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def check_error(reference: nn.Module, solution: nn.Module, x: object) -> str | None:
    """The solution must raise what the reference raises."""
    expected, got = (_raised(module, x) for module in (reference, solution))
    if got is expected:
        return None
    names = [error.__name__ if error else "nothing" for error in (got, expected)]
    return f"raised {names[0]}, expected {names[1]}"


def global_state() -> dict[str, object]:
    """Settings and functions that a solution could change to look better or spoil the baseline."""
    cuda = torch.backends.cuda.matmul
    return {
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the matrix product's precision": torch.get_float32_matmul_precision(),
        "gradient mode": torch.is_grad_enabled(),
        "the precision of float16 sums": cuda.allow_fp16_reduced_precision_reduction,
        "the precision of bfloat16 sums": cuda.allow_bf16_reduced_precision_reduction,
        "torch.relu": torch.relu,
        "torch.nn.functional.linear": nn.functional.linear,
        "torch.equal": torch.equal,
        "torch.empty": torch.empty,
        "torch.autograd.grad": torch.autograd.grad,
        "torch.cuda.synchronize": torch.cuda.synchronize,
        "torch.cuda.Event": torch.cuda.Event,
        "time.perf_counter": time.perf_counter,
    }


def _judge(output: object, expected: torch.Tensor, x: torch.Tensor) -> str | None:
    if problem := form_mismatch(output, expected, {"input": x}):
        return problem
    mismatch = first_mismatch(output, expected)
    return str(mismatch) if mismatch else None


def form_mismatch(
    output: object, expected: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> str | None:
    """The faults of the output but its values: layout, and memory that is not its own."""
    if problem := layout_mismatch(output, expected):
        return problem
    for name, tensor in tensors.items():
        if share_memory(output, tensor):
            return f"the output shares memory with the {name}"
    return None


def _storage(x: torch.Tensor) -> torch.Tensor:
    """All memory under x as a flat tensor: what a view skips must stay untouched as well."""
    elements = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((elements,), (1,), 0)


def _geometry(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.data_ptr()


def poison(size: int, device: torch.device) -> None:
    """Leaves free blocks full of 0xff, a NaN in every float dtype, for the output to land in.

    Several of about the size in bytes, since the C library hands small ones out as it likes.
    """
    sizes = range(size, size + 1024, 64) if size < 1 << 20 else [size]
    if len(sizes) == 1 and size < 1 << 25:  # which it does not map afresh
        sizes *= 4
    blocks = [torch.empty(n, dtype=torch.uint8, device=device).fill_(0xFF) for n in sizes]
    del blocks


def _raised(module: nn.Module, x: object) -> type[Exception] | None:
    try:
        module(x)
    except Exception as error:  # the type is what is compared
        return type(error)
    return None
