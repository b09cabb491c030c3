"""The course for files that stand in for the `Model` of a reference file."""

from contextlib import suppress

from referee.judge.budget import grade
from referee.judge.checks import DIFFERS
from referee.judge.feeding import send
from referee.judge.judge import Judge
from referee.judge.oracle import DRAWS, PARTS, SIGNS
from referee.judge.verdict import FoundError


class Reference(Judge):
    """Within an error budget, relative to eager's errors."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.library = self.oracle.ops, True

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
        if oracle.trivial is None:
            oracle.trivial = oracle.find_trivial()
        self.verdict.accuracy = "exact" if self.equal else grade(self.relative)
        self.verdict.notes += [*oracle.trivial, *filter(None, [oracle.note])]
        self.check_backward([oracle.inputs(draw) for draw in range(DRAWS)])
        self.earlier.clear()
        self.inputs, self.stale = [], {}
        self.release()
        self.time_step(self.time())

    def relies_on_inputs(self) -> bool:
        is_known = any(note.startswith(DIFFERS) for note in self.verdict.notes)
        return is_known or not any(self.oracle.unlike.values())

    def _unlike(self, name: str) -> list | None:
        """Such inputs, for which eager gives finite results.

        Its process is asked, which an assertion on the device may end.
        """
        oracle = self.oracle
        if name not in oracle.unlike:
            inputs, oracle.unlike[name] = oracle.make_unlike(name), None
            self.release()
            self.spared |= self.baselines.start()
            self.prepare_baselines()
            eager = self.baselines.asked(False)
            with suppress(FoundError):  # the baselines start again when they are needed
                send(eager, 0, inputs)
                if eager.ask("probe")["finite"] is True:
                    oracle.unlike[name] = inputs
                send(eager, 0, oracle.inputs(0))
        return oracle.unlike[name]
