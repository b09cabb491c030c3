"""A reference on a device, and the results that are right there.

A reference file is graded by this class as it is. A problem that has cases, bounds or yardsticks of
its own is a subclass, which overrides the methods in the part "what a problem may know better".
"""

import copy
import math
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from referee import cases
from referee.budget import Operators, Output, RoundedOperands
from referee.compare import INTEGERS, first_mismatch, share_memory
from referee.gradients_of import differentiate, is_differentiable, recorded, sources_of
from referee.memory import LARGEST_SHARE, free_bytes
from referee.names import COPY
from referee.reference_file import BadReferenceError, NoRoomError, ReferenceFile, generator_states
from referee.results import flatten, plain
from referee.shared import dtype_name, flat_bytes, forms_of, pack, without_repeats
from referee.timing import Names, Rate, Timings

SEEDS = 1 << 30
DIFFERENT = 1e-2  # relative, from which on two results are not the same but for rounding
SIGNS, PARTS = "inputs of both signs", "inputs altered in part"
PART = 16  # a sixteenth of an input is altered
LARGEST_PART = 1 << 22  # bytes
# torch may compute these in TF32 by its own settings: cuDNN's operators by default, products not.
CUDNN_OPERATORS = ("convolution", "rnn", "lstm", "gru")
PRODUCTS = ("mm", "matmul", "linear", "addmv", "mv")
# How much memory forwards need, in parts of inputs, outputs and parameters together. Training steps
# need up to 5, and are left out where they do not fit.
MEMORY_PARTS = 3
# Inputs, outputs and parameters that take more than this part of a GPU's memory are large: not all
# contestants can keep memory for them at once.
LARGE_PART = 1 / 16
PIECE = 1 << 24  # elements that are compared, or drawn, at a time
NO_FLOAT64 = "compared with eager, since the reference does not run in float64"
NO_ROOM_FOR_FLOAT64 = "compared with eager, since there is no memory for float64"
ARITHMETIC = RuntimeError, ValueError, TypeError, NotImplementedError


@dataclass
class Case:
    """A forward that is compared with the reference's.

    Attributes:
        name: in messages; the part before a comma is the kind, which may be refused.
        inputs: of the forward.
        arguments: of the constructor of a new module; None for the module of the case before.
        state: values for the module's state; None for those that are there, "other" for new ones.
        setting: the precision of float32 products.
        required: whether a solution must take the inputs.
        fill: torch fills new memory with NaN meanwhile.
        may_differ: a solution may compute another function here: it relies on how `get_inputs`
            draws.
    """

    name: str
    inputs: list
    arguments: list | None = None
    state: list[torch.Tensor] | str | None = None
    setting: str = ""
    required: bool = True
    fill: bool = False
    may_differ: bool = False


class Problem:
    """A reference on a device.

    Args:
        name: the problem's.
        file: the reference.
        device: where solutions compute.

    Attributes:
        names: of the contestants in reports.
        rate: the speed that limits the problem.
        yardsticks: what is timed beside eager, by device.
        slow_yardsticks: those that take seconds to prepare; a quick check leaves them out.
        yardstick_file: path of a file with the problem's own yardsticks, or None.
        structure: of the results, as `results.flatten` says it.
        args: of the constructor.
        setting: the precision of float32 products that is graded now; one of `settings`.
        form: of the inputs, as `shared.forms_of` says it.
        tensors: the indices of the inputs that are tensors with elements.
        floats: the indices of those that hold floats.
        shape: of the inputs, for reports.
        dtype: of the first tensor among the inputs.
        input_bytes, parameter_bytes, output_bytes: of all of them together.
        operators: names of those that the reference's forward calls.
        note: why results are compared with eager's alone, or "".
        step_note: the same of training steps; set by the first of them.
        terms: of the longest sum that gives one element of a result.
        shares: results may share memory with inputs or with earlier results.

    Raises:
        BadReferenceError: the file is no problem that can be graded.
    """

    names = Names(solution="ModelNew", eager="eager")
    yardsticks = {"cpu": (COPY,), "cuda": (COPY,)}  # noqa: RUF012 - never changed
    slow_yardsticks: tuple[str, ...] = ()
    yardstick_file = None
    rate = Rate(
        unit="GB/s",
        work="moved_bytes",
        yardstick=COPY,
        floor="writing its outputs as fast as a copy",
    )
    settings: tuple[str, ...] = ("",)
    some_settings: tuple[str, ...] = ()  # that alone are asked for, by a sweep
    needs_float64 = True  # False where gradients must have eager's bits

    def __init__(self, name: str, file: ReferenceFile, device: torch.device) -> None:
        self.name = name
        self.file = file
        self.device = with_index(device)
        self.setting = ""
        self.structure = ""
        self.operators: set[str] = set()
        self.terms = 1
        self.shares = False
        self.step_note = ""
        self.args = file.arguments()
        file.call_or_refuse("pickling its arguments", lambda: pack(self.args))
        self._draws_on_device = True
        module, inputs = self.construct(random.randrange(SEEDS)), self._first_draw()
        self.form = forms_of(inputs)
        if not file.covers_all_values:
            self.draw()  # of the same form
        self.tensors = [i for i, x in enumerate(inputs) if _is_tensor(x) and x.numel()]
        if not self.tensors:
            raise file.bad("get_inputs gives no tensor")
        wide = [i for i in self.tensors if inputs[i].itemsize > 1]  # float8 can't be drawn
        self.floats = [i for i in wide if inputs[i].is_floating_point()]
        shapes = [tuple(inputs[i].shape) for i in self.tensors]
        self.shape = shapes[0] if len(shapes) == 1 else tuple(map(list, shapes))
        self.dtype = inputs[self.tensors[0]].dtype
        self.input_bytes = sum(inputs[i].nbytes for i in self.tensors)
        self.parameter_bytes = sum(x.nbytes for x in self._checked_state(module).values())
        outputs = self._inspect(module, inputs)
        self.output_bytes = sum(x.nbytes for x in outputs)
        if any(True for _ in module.parameters()):
            self.copy(module)  # each time that these change, a copy keeps the old ones
        del outputs
        self._check_room()
        self.note = "" if file.covers_all_values else self._float64_note(module, inputs)

    # ------------------------------------------------------------ what the reference file gives

    def construct(self, seed: int, args: list | None = None) -> nn.Module:
        """Return the reference's module, with the parameters of a seed."""
        return self.file.construct(
            copy.deepcopy(self.args if args is None else args), seed, self.device
        )

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy of the module."""
        return self.file.call_or_refuse("a copy of Model", lambda: copy.deepcopy(module))

    def draw(self) -> list:
        """Return new arguments of a forward, on the device.

        Raises:
            BadReferenceError: `get_inputs` raises, or gives another form than before.
        """
        if self._draws_on_device:
            inputs = self.file.draw(self.device)
        else:
            inputs = [x.to(self.device) if _is_tensor(x) else x for x in self.file.draw()]
        if forms_of(inputs) != self.form:
            raise self.file.bad("get_inputs draws inputs of another form each time")
        return inputs

    def run(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Return eager's outputs."""
        with torch.no_grad():
            _, outputs = self.file.call_or_refuse("forward", lambda: flatten(module(*inputs)))
            return [plain(y) for y in outputs]

    def derive(
        self,
        module: nn.Module,
        inputs: list,
        output_gradients: list[torch.Tensor],
        names: list[str],
    ) -> list[torch.Tensor | None]:
        """Return eager's outputs, then the gradients of inputs and of parameters by name."""
        arguments = recorded(inputs)
        with torch.enable_grad():
            _, outputs = flatten(module(*arguments))
            sources = sources_of(arguments, module.state_dict(keep_vars=True), names)
            gradients = differentiate(outputs, sources, output_gradients)
        return [*map(plain, outputs), *gradients]

    # ------------------------------------------------------------ what a problem may know better

    def expected(self, module: nn.Module, inputs: list) -> list[Output]:
        """Return the error budgets of the reference's results."""
        eager = self.run(module, inputs)
        if self.note:
            return [Output(x, None, self.terms) for x in eager]
        exact = self._float64_results(module, inputs)
        allowed = self._tf32_results(module, inputs) or [None] * len(eager)
        parts = zip(eager, exact, allowed, strict=True)
        outputs = [Output(x, y, self.terms, allowed=z) for x, y, z in parts]
        if self.is_large:
            for output in outputs:
                output.forget_exact()
        return outputs

    def budget(self, eager: torch.Tensor, exact: torch.Tensor | None, terms: int) -> Output:
        """Return the error budget of a result or gradient of a training step."""
        return Output(eager, exact, terms)

    def where_gradients_pass(self, module: nn.Module, inputs: list) -> torch.Tensor | None:
        """Return a mask of the output, true where a gradient surely passes; None if unknown.

        Where a sum is near zero, rounding decides whether ReLU passes a gradient.
        """
        return None

    def cases(self, device_seed: int) -> Iterable[Case]:
        """Return the problem's own small cases."""
        return ()

    def backward_inputs(self) -> list[list[list]]:
        """Return groups of small inputs for which gradients are compared, besides the timed size.

        All inputs of a group have one form: what is wrong must be wrong for all of them.
        """
        return []

    def backward_arguments(self) -> list | None:
        """Return the arguments of the module for `backward_inputs`."""
        return None

    def guesses(self, module: nn.Module, inputs: list) -> dict[str, torch.Tensor]:
        """Return results of typical mistakes, by words for the message."""
        return {}

    def accuracy(self, relative: float, is_equal: bool, usual: str) -> str:
        """Return the accuracy class of a solution's results at the timed size.

        Args:
            relative: the largest relative error of a result.
            is_equal: all results have eager's bits.
            usual: the class of that error.
        """
        return "exact" if is_equal else usual

    def least_accuracy(self) -> str:
        """Return the class that the timed size must reach, or "" where the budget decides."""
        return ""

    @property
    def is_large(self) -> bool:
        """True if contestants give unused memory back to the GPU, for others to take."""
        if self.device.type == "cpu":
            return False
        _, memory = torch.cuda.mem_get_info(self.device)
        return self.all_bytes > LARGE_PART * memory

    @property
    def work(self) -> int:
        """The work of one call, in units of the rate."""
        return self.moved

    @property
    def moved(self) -> int:
        """Bytes that a call reads and writes, if it reads all of its inputs."""
        return self.input_bytes + self.output_bytes

    def floor_seconds(self, timings: Timings) -> float:
        """Return the seconds of one call's work at the highest rate measured."""
        copies = timings.seconds.get(COPY)
        return min(copies) * self.output_bytes / self.moved if copies else 0.0

    @property
    def precision(self) -> str:
        """The setting of torch for float32 products."""
        return self.setting or "highest"

    # ------------------------------------------------------------ other inputs

    def unusual_inputs(self, name: str, seen: list) -> list:
        """Return inputs that `get_inputs` would not draw, of both signs, or altered in part.

        Args:
            name: SIGNS or PARTS.
            seen: inputs that the solution has seen, which are the ones altered.
        """
        inputs = [x.clone() if _is_tensor(x) else x for x in seen]
        if name == SIGNS:
            for i in self.floats:
                _draw_signs(_flat(inputs[i]))
            return inputs
        others = self.draw()
        for i in self.floats:
            x, other = _flat(inputs[i]), _flat(others[i])
            size = max(1, min(len(x) // PART, LARGEST_PART // x.element_size()))
            start = random.randrange(min(size, len(x) - size), len(x) - size + 1)
            x[start : start + size] = other[start : start + size]
        return inputs

    def find_trivial(self, kinds: list[str]) -> list[str]:
        """Return a line for each result that is a constant or a copy of an input.

        Some inputs are tried: that a result is no constant is certain, that it is one is not.

        Args:
            kinds: of inputs beside those that `draw` gives: SIGNS, PARTS, or both.
        """
        module = self.construct(random.randrange(SEEDS))
        outputs = self.expected(module, self.draw())
        firsts = [output.eager for output in outputs]
        for output in outputs:
            output.forget()
        are_constant = [True] * len(outputs)
        copied = [set(self.tensors) for _ in outputs]
        for kind in ("", "", *kinds):
            inputs = self.unusual_inputs(kind, self.draw()) if kind else self.draw()
            for i, (output, found) in enumerate(
                zip(outputs, self.run(module, inputs), strict=True)
            ):
                are_constant[i] = are_constant[i] and output.allows(found, firsts[i])
                copied[i] = {j for j in copied[i] if output.allows(inputs[j], found)}
            if not any(are_constant) and not any(copied):
                return []
        redraw_all(module)
        others = self.run(module, self.draw())
        lines = []
        for i, output in enumerate(outputs):
            number = f" {i}" if len(outputs) > 1 else ""
            subject = f"the reference's result{number} is"
            if are_constant[i] and output.numel:
                ignores_parameters = output.allows(others[i], firsts[i])
                ignored = "inputs and parameters" if ignores_parameters else "inputs"
                lines.append(f"{subject} the same for all {ignored}")
            elif copied[i] and output.numel:
                lines.append(f"{subject} its input {min(copied[i])}")
        return lines

    # ------------------------------------------------------------ behind the constructor

    def _first_draw(self) -> list:
        """Draw on the device; where `get_inputs` cannot do that, on the CPU."""
        if self.device.type == "cuda":
            with suppress(BadReferenceError):
                return self.file.draw(self.device)
            self._draws_on_device = False
        return [x.to(self.device) if _is_tensor(x) else x for x in self.file.draw()]

    def _checked_state(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of the reference, which must be plain tensors."""
        state = module.state_dict()
        for name, x in state.items():
            if not _is_tensor(x) or x.layout != torch.strided:
                raise self.file.bad(f"Model's state has {name}, which is no plain tensor")
        return state

    def _inspect(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Run the forward twice, set what it tells of the problem, and return its outputs.

        Raises:
            BadReferenceError: the outputs cannot be graded.
        """
        before = generator_states(self.device)
        kept = [x.clone() if _is_tensor(x) else x for x in inputs]
        with torch.no_grad(), Operators() as seen:
            self.structure, outputs = self.file.call_or_refuse(
                "forward", lambda: flatten(module(*inputs))
            )
        if generator_states(self.device) != before:
            raise self.file.bad("Model draws random numbers in forward: no two runs agree")
        self.operators, self.terms = seen.names, seen.most_terms
        if not outputs:
            raise self.file.bad("Model returns no tensor")
        for x in outputs:
            if not isinstance(x, torch.Tensor):
                raise self.file.bad(f"Model returns a {type(x).__name__}, not a tensor")
            if x.layout != torch.strided:
                raise self.file.bad("Model returns a sparse tensor")
            if x.itemsize not in INTEGERS:
                raise self.file.bad(f"Model returns a tensor of {dtype_name(x.dtype)}")
        outputs = [plain(x) for x in outputs]
        for x, was in zip(inputs, kept, strict=True):
            if _is_tensor(x) and first_mismatch(x, was, exact=True):
                raise self.file.bad("Model changes its inputs")
        again = self.run(module, inputs)
        pairs = list(zip(again, outputs, strict=True))
        if any(difference(*pair) > DIFFERENT for pair in pairs):
            reason = "Model gives another result for the same inputs each time: it keeps some state"
            raise self.file.bad(reason)
        pairs += [(inputs[i], x) for i in self.tensors for x in outputs]
        self.shares = any(share_memory(*pair) for pair in pairs)
        return outputs

    def _float64_results(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Return the results in float64.

        Raises:
            BadReferenceError, torch.OutOfMemoryError: they cannot be had.
        """
        wide = self.file.call_or_refuse("float64", lambda: in_float64(module))
        return self.run(wide, widened(inputs))

    def _tf32_results(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Return the results with operands rounded to TF32, where torch's settings allow that."""
        words = self.tf32_operators()
        if not words:
            return []
        with RoundedOperands(words):
            return self._float64_results(module, inputs)

    def tf32_operators(self) -> tuple[str, ...]:
        """Return words in the names of those operators that torch may compute in TF32."""
        if self.device.type != "cuda" or self.dtype != torch.float32:
            return ()
        words: tuple[str, ...] = ()
        if torch.backends.cudnn.allow_tf32:
            words += CUDNN_OPERATORS
        if torch.get_float32_matmul_precision() != "highest":
            words += PRODUCTS
        return tuple(word for word in words if any(word in name for name in self.operators))

    def _float64_note(self, module: nn.Module, inputs: list) -> str:
        """Return why there is no float64 result to compare with; "" if there is one."""
        eager = self.run(module, inputs)
        try:
            exact = self._float64_results(module, inputs)
        except (NoRoomError, torch.OutOfMemoryError):
            return NO_ROOM_FOR_FLOAT64
        except BadReferenceError:
            return NO_FLOAT64
        for x, y in zip(eager, exact, strict=True):
            if x.is_floating_point() and (y.dtype != torch.float64 or x.shape != y.shape):
                return "compared with eager, since the reference gives no float64 result"
            if difference(y, x, where_finite=True) > DIFFERENT:  # eager may overflow
                return "compared with eager, since its float64 result is a different one"
        return ""

    @property
    def all_bytes(self) -> int:
        """Bytes of inputs, outputs and parameters together."""
        return self.input_bytes + self.output_bytes + self.parameter_bytes

    def _check_room(self) -> None:
        """Raise BadReferenceError where the grading does not fit into the device's memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        needed = MEMORY_PARTS * self.all_bytes
        free = LARGEST_SHARE * free_bytes(self.device)
        if needed > free:
            raise self.file.bad(
                f"grading needs about {needed / 2**30:,.1f} GiB of memory on {self.device}, and "
                f"{free / 2**30:,.1f} GiB can be used"
            )


def derive_or_none(call: Callable[[], list]) -> list | None:
    """Return the outcome of a reference's backward; None where it has none.

    Raises:
        torch.OutOfMemoryError: there may be one, but no memory for it.
    """
    try:
        return call()
    except torch.OutOfMemoryError:  # which is a RuntimeError
        raise
    except ARITHMETIC:
        return None


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, without a copy."""
    return flat_bytes(x).view(x.dtype)


def _draw_signs(x: torch.Tensor) -> None:
    """Give the elements of a flat tensor random signs, and values between -1 and 1 to zeros."""
    for part in x.split(PIECE):
        some = torch.empty_like(part).uniform_(-1, 1)
        part.mul_(some.sign()).add_(some.mul_(part == 0))


def with_index(device: torch.device) -> torch.device:
    """Return a device with the index that its tensors have."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def in_float64(module: nn.Module) -> nn.Module:
    """Return a copy of a module in float64."""
    return copy.deepcopy(module).double()


def widened(inputs: list) -> list:
    """Return inputs, those that can have a gradient in float64."""
    return [x.double() if is_differentiable(x) else x for x in inputs]


def changing_state(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that get other values in every call.

    They hold floats. One of several names that share memory is enough.
    """
    known, names = set(), []
    for name, x in module.state_dict().items():
        key = x.data_ptr(), x.shape, x.stride()
        if x.is_floating_point() and x.numel() and key not in known:
            known.add(key)
            names.append(name)
    return names


def redraw_all(module: nn.Module) -> None:
    """Give a module other parameters and buffers."""
    state = module.state_dict()
    for name in changing_state(module):
        x = without_repeats(state[name])
        x.copy_(redrawn(x))


def redrawn(base: torch.Tensor) -> torch.Tensor:
    """Return other values for a parameter or buffer, see `cases.redraw`."""
    return cases.redraw(base, random.randrange(SEEDS))


def difference(x: torch.Tensor, y: torch.Tensor, where_finite: bool = False) -> float:
    """Return |x - y| / |y|, Frobenius norms; for integers, the share of elements that differ.

    Args:
        x: a tensor.
        y: another, with which it is compared in pieces, to save memory.
        where_finite: leave out the elements where y is not finite.
    """
    if x.shape != y.shape:
        return float("inf")
    x, y = x.reshape(-1), y.reshape(-1)
    if not y.is_floating_point():
        return int((x != y).sum()) / max(len(x), 1)
    squares = norm = 0.0
    for start in range(0, len(x), PIECE):
        mine, theirs = (t[start : start + PIECE].double() for t in (x, y))
        if where_finite:
            mine = torch.where(theirs.isfinite(), mine, theirs)
        mine, theirs = (t.nan_to_num(0, 0, 0) for t in (mine, theirs))
        squares += (mine - theirs).square_().sum().item()
        norm += theirs.square().sum().item()
    return math.sqrt(squares / norm) if norm else 0.0


def shape_and_dtype(shape: list[int], dtype: torch.dtype) -> str:
    """Return a shape and dtype in words: "[3, 4] float32"."""
    return f"{shape} {dtype_name(dtype)}"
