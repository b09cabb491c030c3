"""The courses: of a problem of this project's, and of a reference file."""

import random
from contextlib import suppress
from typing import ClassVar

import torch

from model import Problem
from referee import cases
from referee.child.yardsticks import COPY
from referee.judge.budget import Found, Output, grade
from referee.judge.checks import DIFFERS, LARGEST_KEPT
from referee.judge.feeding import Renewal, send
from referee.judge.judge import Judge
from referee.judge.oracle import DRAWS, PARTS, SIGNS
from referee.judge.verdict import CHEATING, WRONG, FoundError, of_exception
from referee.memory import choose_rows
from referee.remote import RaisedError, pack

# By which a solution may fall back on the reference's own ReLU.
LIBRARY = ("aten::relu", "aten::relu_", "aten::clamp", "aten::clamp_min", "aten::threshold")
# Of ReLU: beyond the size from which kernels write past the caches. Of Linear: a float64 product
# with all of the weight takes a CPU a second.
CPU_ROWS = 64
METRICS = ("max", "mean", "relative")
Needs = tuple[tuple[int, ...], int, int]


class OfProject(Judge):
    """Many small cases, then the timed size under each setting of the task."""

    library = LIBRARY
    yardsticks: ClassVar = {"cpu": (COPY,), "cuda": (COPY,)}

    def check_and_time(self) -> None:
        for setting in () if self.task.only_times else self.task.settings:
            self.set_precision(setting)
            self.check_gradients()
            if not self.has_backward:
                break
        names = self.construct_alike()
        for setting in self.task.settings:
            self.set_precision(setting)
            self.check_whole(names)
            self.time()
            self.check_changes()
        self.remote.ask("allocate", slots=0, inputs=pack([]))  # the next task needs the room

    def set_precision(self, setting: str) -> None:
        """Of float32 products, here and there; "" is the default."""
        self.setting = setting
        torch.set_float32_matmul_precision(self.precision)
        self.remote.ask("set_precision", setting=self.precision)

    def construct_alike(self, *args: object) -> list[str]:
        """`construct` of a solution whose state must be the reference's, but for names."""
        names = self.construct(list(args) or None)
        if names is None:
            shapes = [list(value.shape) for value in self.module.state_dict().values()]
            raise FoundError(WRONG, f"its state has not the reference's shapes, {shapes}")
        return names

    def check_again(self) -> None:
        """Another row, then another element, at the same address."""
        x = self.inputs[0].clone()
        cases.refill(x[random.randrange(len(x))], self.generator)
        self.check("another row at the same address", [x], again=True)
        x = x.clone()
        place = random.randrange(x.numel())
        x.view(-1)[place] = 1 if x.view(-1)[place].item() <= 0 else 3
        self.check("another element at the same address", [x], again=True)

    def check_whole(self, names: list[str]) -> None:
        """One forward of the timed size, of inputs that both draw from a seed."""
        self.relative, self.equal = 0.0, True
        self.load(names)
        name = ", ".join(filter(None, [f"{list(self.oracle.shape)}", self.setting]))
        self._give_whole()
        if self.oracle.output_bytes <= LARGEST_KEPT:  # more would take seconds
            self.check(f"{name}, the first time")
        self._give_whole(again=True)
        found = self.check(name)
        self.verdict.accuracy = self.verdict.accuracy or self.accuracy()
        if any(self.budgets[0].errors):
            self.note_errors(name, found, self.budgets[0])

    def accuracy(self) -> str:
        """The class of the result of the timed size."""
        return "exact"

    def note_errors(self, name: str, found: Found, want: Output) -> None:
        """A row of the table of errors against float64."""
        values = found.max, found.mean, found.relative, *want.errors
        keys = (f"{who}_{what}" for who in ("solution", "reference") for what in METRICS)
        self.verdict.errors.append({"name": name, **dict(zip(keys, values, strict=True))})

    def _give_whole(self, again: bool = False) -> None:
        """After a forward at the same address, if `again`, whose output is still there."""
        if again:
            self.remote.ask("forward", bait=None, size=self.oracle.output_bytes, fill=False)
        else:
            self.remote.ask("allocate", slots=1, inputs=pack(self.oracle.form))
        renewal = Renewal(self.oracle, self.parameters, inputs=True)
        renewal.give(self.remote, 0, is_timed=False)
        self.redraw(renewal.seed)
        self.inputs = renewal.inputs()

    def refuse(self, name: str, raised: RaisedError, required: bool) -> None:
        """One that takes the timed size alone is wrong; one that takes nothing has an error."""
        word, line = of_exception(raised, name)
        if required and word != CHEATING:
            if self.verdict.count == 1:
                self.load(self.construct_alike())
                self._give_whole()
                self._give_whole(again=True)
            raise FoundError(WRONG, f"does not take {name}: {line}")
        super().refuse(name, raised, required)

    @classmethod
    def choose_shape(
        cls, problem: Problem, wanted: int | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[tuple[int, ...], str]:
        """The shape of x, and a sentence that says why it is not the headline's, or "".

        Raises:
            ValueError: it does not fit, or the problem does not take the dtype.
        """
        row, row_bytes, fixed_bytes = cls.needs(problem, dtype, device)
        usual = problem.rows if device.type == "cuda" else min(problem.rows, CPU_ROWS)
        count, note = choose_rows(wanted, usual, row_bytes, device, fixed_bytes)
        if not (note or wanted or usual == problem.rows):
            note = f"{usual:,} of {problem.rows:,} rows, to be done within a minute on a CPU"
        return (count, *row), note

    @classmethod
    def needs(cls, problem: Problem, dtype: torch.dtype, device: torch.device) -> Needs:
        """The shape of a row of x, the bytes that each needs, and those needed in any case."""
        with torch.device("meta"):
            [x] = problem.get_inputs_at(1)
        return x.shape[1:], x.numel() * dtype.itemsize, 0

    @staticmethod
    def settings(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        """Of the precision of float32 products; "" where there is none."""
        return ("",)


class Reference(Judge):
    """Within an error budget, relative to eager's errors."""

    def check_small(self) -> None:
        """All is of the timed size."""
        names = self.construct()
        self.check("as constructed", self.oracle.inputs(0))
        if any(True for _ in self.module.parameters()):
            if names is None:
                note = "its state is not the reference's: none was loaded or changed"
                self.verdict.notes.append(note)
            else:
                self.load(names)
                self.check("a state loaded")
                self.overwrite()
                self.check("parameters overwritten")
        for draw in range(1, DRAWS):
            inputs = self.oracle.inputs(draw)
            self.check(f"seed {draw + 1}, at the same address", inputs, again=True, fill=draw > 1)

    def check_and_time(self) -> None:
        """Inputs that `get_inputs` would not draw, too: an honest file may rely on what it draws.

        A look at some elements does not tell those that are altered in part from others. Of both
        signs, ReLU is no identity, and rounding errors do not cancel.
        """
        oracle = self.oracle
        is_known = oracle.file.is_ours or not oracle.floats  # ours are of both signs
        for name in () if is_known else (PARTS, SIGNS):
            if inputs := self._unlike(name):
                there = oracle.there(inputs)
                self.check(name, there, required=False, again=True, may_differ=True)
        differs = any(note.startswith(DIFFERS) for note in self.verdict.notes)
        is_unlike = oracle.file.is_ours or any(oracle.unlike.values())
        self.relies_on_inputs = differs or not is_unlike
        if oracle.trivial is None:
            oracle.trivial = oracle.find_trivial()
        self.verdict.accuracy = "exact" if self.equal else grade(self.relative)
        self.verdict.notes += [*oracle.trivial, *filter(None, [oracle.note])]
        self.check_backward([oracle.inputs(draw) for draw in range(DRAWS)])
        self.time()

    def _unlike(self, name: str) -> list | None:
        """Such inputs, for which eager gives finite results.

        Its process is asked, which an assertion on the device may end.
        """
        oracle = self.oracle
        if name not in oracle.unlike:
            inputs, oracle.unlike[name] = oracle.make_unlike(name), None
            torch.cuda.empty_cache()
            self.spared |= self.baselines.start()
            self.prepare_baselines()
            eager = self.baselines.remotes[0]
            with suppress(FoundError):  # the baselines start again when they are needed
                send(eager, 0, inputs)
                if eager.ask("probe")["finite"] is True:
                    oracle.unlike[name] = inputs
                send(eager, 0, oracle.inputs(0))
        return oracle.unlike[name]
