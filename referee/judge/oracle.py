"""A reference file's problem: inputs, parameters, and results with their error budgets."""

import copy
import random

import torch
from torch import nn

from referee import cases
from referee.child.feed import LARGEST_PART, PART, flat_bytes
from referee.compare import first_mismatch, share_memory
from referee.judge.budget import Output, Terms
from referee.memory import LARGEST_SHARE, RING, free_bytes
from referee.reference_file import CPU, BadReferenceError, ReferenceFile, flatten
from referee.remote import pack

SEEDS = 1 << 30
DRAWS = 3  # sets of inputs, each under a seed of its own
DIFFERENT = 1e-2  # relative, from which on two results are not the same but for rounding
SIGNS, PARTS = "inputs of both signs", "inputs altered in part"
# Operators that a forward of the library's calls beside those that compute.
VIEWS = ("view", "detach", "empty", "clone", "copy", "expand", "reshape", "alias", "as_strided")


class Oracle:
    """The reference on a device.

    Raises:
        BadReferenceError: the file is no problem that can be graded.
    """

    def __init__(self, file: ReferenceFile, device: torch.device) -> None:
        self.device, self.file = device, file
        self.args = file.called("get_init_inputs")
        file.attempt("pickling its arguments", lambda: pack(self.args))
        # Whether inputs can be drawn again from their seed, on the device; None: nobody has tried.
        self.repeats: bool | None = file.is_ours or None
        # Those that `get_inputs` would not draw, by what they are; None: eager's results for them
        # are not finite.
        self.unlike: dict[str, list | None] = {}
        self.trivial: list[str] | None = None  # as of `find_trivial`, once it is known
        self._seeds = [random.randrange(SEEDS) for _ in range(DRAWS)]
        self._draws = [] if file.is_ours else [file.draw(self._seeds[0])]
        module, inputs = self.construct(random.randrange(SEEDS)), self.inputs(0)
        self.form, self.parameters = form_of(inputs), parameters_of(module)
        self.tensors = [i for i, x in enumerate(inputs) if _is_tensor(x) and x.numel()]
        if not self.tensors:
            raise file.bad("get_inputs gives no tensor")
        wide = [i for i in self.tensors if inputs[i].itemsize > 1]  # float8 can't be drawn
        self.floats = [i for i in wide if inputs[i].is_floating_point()]
        shapes = [tuple(inputs[i].shape) for i in self.tensors]
        self.shape = shapes[0] if len(shapes) == 1 else tuple(map(list, shapes))
        self.dtype = inputs[self.tensors[0]].dtype
        self.input_bytes = sum(inputs[i].nbytes for i in self.tensors)
        torch.cuda.empty_cache()
        self.output_bytes = sum(x.nbytes for x in self._look(module, inputs))
        if self.parameters:  # each time that these change, a copy keeps the old ones
            self.copy(module)
        del inputs
        self.slots = self._count_slots(sum(p.nbytes for p in module.parameters()))
        self.note = "" if file.is_ours else self._float64_note(module)
        if not file.is_ours:
            self._draws += [file.draw(seed) for seed in self._seeds[1:]]
        if any(form_of(draw) != self.form for draw in self._draws):
            raise file.bad("get_inputs draws inputs of another form each time")

    def construct(self, seed: int, args: list | None = None) -> nn.Module:
        """The module, with the parameters of a seed, of the inputs' dtype where it is ours."""
        args = copy.deepcopy(self.args if args is None else args)
        module, dtype = self.file.construct(args, seed, self.device), self.file.dtype
        return module.to(dtype) if dtype and dtype.is_floating_point else module

    def copy(self, module: nn.Module) -> nn.Module:
        """A copy of the module."""
        return self.file.attempt("a copy of Model", lambda: copy.deepcopy(module))

    def inputs(self, draw: int) -> list:
        """Those of one of the DRAWS seeds, on the device."""
        if self.file.is_ours:
            return self.draw(self._seeds[draw])
        return self.there(self._draws[draw])

    def there(self, inputs: list) -> list:
        """A copy on the device."""
        return [x.to(self.device, copy=True) if _is_tensor(x) else x for x in inputs]

    def draw(self, seed: int) -> list:
        """Inputs on the device, as its processes draw them too."""
        return self.file.draw(seed, self.device)

    def draw_alike(self, seed: int) -> list:
        """Inputs that are drawn on the device; none where that can't be, or gives another form."""
        try:
            inputs = self.draw(seed)
        except BadReferenceError:
            return []
        return inputs if form_of(inputs) == self.form else []

    def make_unlike(self, name: str) -> list:
        """Such inputs, on the CPU: of two kinds, both of the first draw's."""
        inputs = [x.clone() if _is_tensor(x) else x for x in self._draws[0]]
        for i in self.floats:
            if name == SIGNS:
                some = torch.empty_like(inputs[i]).uniform_(-1, 1)  # in the place of zeros
                inputs[i].mul_(some.sign()).add_(some.mul_(inputs[i] == 0))
                continue
            x, other = (flat_bytes(y).view(y.dtype) for y in (inputs[i], self._draws[1][i]))
            size = max(1, min(len(x) // PART, LARGEST_PART // x.element_size()))
            start = random.randrange(min(size, len(x) - size), len(x) - size + 1)
            x[start : start + size] = other[start : start + size]
        return inputs

    def run(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Eager's outputs."""
        with torch.no_grad():
            _, outputs = self.file.attempt("forward", lambda: flatten(module(*inputs)))
            return [y.detach() for y in outputs]

    def expected(self, module: nn.Module, inputs: list) -> list[Output]:
        """The outputs, as near to exact as can be had."""
        eager = self.run(module, inputs)
        exact = [None] * len(eager) if self.note else self._exact(module, inputs)
        return [Output(*pair, self.terms) for pair in zip(eager, exact, strict=True)]

    def find_trivial(self) -> list[str]:
        """Which results are constants, or copies of inputs, as far as the inputs there are tell."""
        module, lines = self.construct(random.randrange(SEEDS)), []
        outputs = self.expected(module, self.inputs(0))
        constant, copied = [True] * len(outputs), [set(self.tensors) for _ in outputs]
        unlike = map(self.there, filter(None, self.unlike.values()))
        for inputs in (*map(self.inputs, range(1, DRAWS)), *unlike):
            for turn, found in enumerate(self.expected(module, inputs)):
                constant[turn] &= outputs[turn].allows(found.eager)
                copied[turn] &= {i for i in self.tensors if found.allows(inputs[i])}
            if not any(constant) and not any(copied):
                return []
        for p in module.parameters():
            if p.is_floating_point():
                p.data = cases.redraw(p.data, random.randrange(SEEDS))
        others = self.run(module, self.inputs(0))
        for turn, (output, other) in enumerate(zip(outputs, others, strict=True)):
            what = f"the reference's result{f' {turn}' if len(outputs) > 1 else ''} is"
            if constant[turn] and output.numel:
                all_of = "inputs and parameters" if output.allows(other) else "inputs"
                lines.append(f"{what} the same for all {all_of}")
            elif copied[turn] and output.numel:
                lines.append(f"{what} its input {min(copied[turn])}")
        return lines

    def _exact(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        wide = self.file.attempt("float64", lambda: copy.deepcopy(module).double())
        floats = {i for i, x in enumerate(inputs) if _is_tensor(x) and x.is_floating_point()}
        return self.run(wide, [x.double() if i in floats else x for i, x in enumerate(inputs)])

    def _look(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """The outputs of two forwards, which must be the same tensors."""
        with torch.no_grad(), Terms() as seen:
            self.structure, outputs = self.file.attempt("forward", lambda: flatten(module(*inputs)))
        self.ops = sorted(op for op in seen.names if not any(view in op for view in VIEWS))
        self.terms, self.shares = seen.most, False  # memory, with inputs or earlier outputs
        for x in outputs:
            if type(x) not in (torch.Tensor, nn.Parameter):
                raise self.file.bad(f"Model returns a {type(x).__name__}, not a tensor")
            if x.layout != torch.strided or x.is_complex():
                raise self.file.bad(f"Model returns a tensor of {x.dtype}, {x.layout}")
        if not outputs:
            raise self.file.bad("Model returns no tensor")
        if self.file.is_ours:
            return outputs
        for i in self.tensors:
            if first_mismatch(inputs[i].cpu(), self._draws[0][i], exact=True):
                raise self.file.bad("Model changes its inputs")
        pairs = list(zip(self.run(module, inputs), outputs, strict=True))
        if any(difference(*pair) > DIFFERENT for pair in pairs):
            raise self.file.bad("Model gives another result for the same inputs each time")
        pairs += [(inputs[i], x) for i in self.tensors for x in outputs]
        self.shares = any(share_memory(*pair) for pair in pairs)
        return outputs

    def _float64_note(self, module: nn.Module) -> str:
        """Why there is no float64 result that eager's can be compared with; "" if there is one."""
        note, inputs = "compared with eager, for its float64 result", self.inputs(0)
        eager = self.run(module, inputs)
        try:
            exact = self._exact(module, inputs)
        except BadReferenceError:
            return f"{note} cannot be had"
        for x, y in zip(eager, exact, strict=True):
            if x.is_floating_point() and (y.dtype != torch.float64 or x.shape != y.shape):
                return f"{note} is none"
            if difference(x, torch.where(x.isfinite(), y, x)) > DIFFERENT:  # it may overflow
                return f"{note} is another"
        return ""

    def _count_slots(self, parameter_bytes: int) -> int:
        """How many inputs fit in memory beside everything else."""
        torch.cuda.empty_cache()
        slots, each, draws = RING[self.device.type], 2 * self.input_bytes, DRAWS * self.input_bytes
        fixed = 9 * self.output_bytes + 10 * parameter_bytes + 4 * self.input_bytes
        if self.device.type == "cpu":  # which has the draws, and eager in two processes
            fixed += draws + self.input_bytes
        if fixed + slots * each > LARGEST_SHARE * free_bytes(self.device):
            slots = 1
        needs = {CPU: draws, self.device: fixed + slots * each}
        for device, need in {} if self.file.is_ours else needs.items():
            free = LARGEST_SHARE * free_bytes(device)
            if need > free:  # of ours, `memory.choose_rows` has looked
                raise self.file.bad(
                    f"grading needs about {need / 2**30:,.1f} GiB of memory on {device}, and "
                    f"{free / 2**30:,.1f} GiB can be used"
                )
        return slots


def form_of(inputs: list) -> list[tuple]:
    """Shape, strides, dtype, offset and elements in memory of tensors; other values as they are."""
    return [_spec(x) if _is_tensor(x) else (x,) for x in inputs]


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _spec(x: torch.Tensor) -> tuple:
    size = x.untyped_storage().nbytes() // x.element_size()
    return tuple(x.shape), x.stride(), x.dtype, x.storage_offset(), size


def parameters_of(module: nn.Module) -> list[tuple[str, int]]:
    """The names of the parameters that can change, with a number for each, which shared ones share.

    Those of buffers, and of whole numbers, are left out.
    """
    own, turns = {id(p) for p in module.parameters() if p.is_floating_point()}, {}
    state = module.state_dict(keep_vars=True)
    return [(n, turns.setdefault(id(p), len(turns))) for n, p in state.items() if id(p) in own]


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """The norm of a difference in parts of the second's; of integers, how many differ."""
    if x.shape != y.shape:
        return float("inf")
    if not x.is_floating_point():
        return (x != y).double().mean().item() if x.numel() else 0.0
    x, y = (t.double().nan_to_num(0, 0, 0) for t in (x, y))
    norm = y.norm().item()
    return (x - y).norm().item() / norm if norm else 0.0
