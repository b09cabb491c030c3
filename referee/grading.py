"""One file under grading: everything that the checks share.

The checks are functions in the files of `referee/checks`. They take a `Grading` and raise
`NotCorrectError` as soon as something is wrong. `CHECKS_ONCE` and `CHECKS_PER_SETTING` in
`referee/checks/__init__` list them in their order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch

from referee.comparison.quantity import Quantity
from referee.comparison.result_spec import ResultSpec
from referee.contestants import processes
from referee.contestants.contestant import Contestant
from referee.contestants.role import Role
from referee.contestants.state import State, StateError
from referee.reference.module import ReferenceModule
from referee.reference.random_values import new_seed
from referee.resources import Resources
from referee.times.round_limit import RoundLimit
from referee.times.timings import TimesOfSetting
from referee.verdict import NotCorrectError, Verdict
from referee.verdict_words import WRONG

TIMEOUT = 300  # default of `Options.timeout`
RESULTS_ARE_COPIED = (
    "results are copied within the clock, eager's too: the system forbids to read them"
)
RUNS_ARE_NOT_COUNTED = (
    "/proc/PID/schedstat does not count how often threads run, so a stopped process may run unseen"
)


@dataclass(frozen=True)
class GradedFile:
    """A solution's file, which was read before the first solution started.

    Attributes:
        path: the file.
        text: its content.
    """

    path: Path
    text: bytes


@dataclass(frozen=True)
class Options:
    """How files are graded.

    Attributes:
        round_limit: how many rounds are timed.
        timeout: the seconds that a solution's process may run, for one file.
        is_sweep: whether only the checks of a sweep are made.
        compiled: whether torch.compile's program is timed beside eager.
        is_quick: whether this is a project's quick check, which leaves out `check_step_memory` and
            yardsticks that take long to prepare.
        largest_gradients: bytes. If a problem's parameters take more, gradients are compared for
            its small inputs only, and no training step is timed.
    """

    round_limit: RoundLimit
    timeout: float
    is_sweep: bool = False
    compiled: bool = False
    is_quick: bool = False
    largest_gradients: float = math.inf


@dataclass
class Findings:
    """Findings of one check that a later check needs.

    Attributes:
        is_forward_only: whether gradients of the problem's own small inputs were not those of the
            reference, or could not be compared.
        result_specs: for each result, the reference's demands. A timed call must meet them, too.
        may_rely_on_inputs: whether the solution may rely on what `get_inputs` draws: its results
            for unusual inputs were another function's, or `check_other_inputs` found none to try.
            Refusing unusual inputs does not count.
        is_right_for_both_signs: whether its results for inputs of both signs were right.
        times: the times under the current precision setting; None before the forwards are timed.
        quantities: results and gradients of a training step, with their error budgets; empty if the
            file is forward only or gradients were not compared.
    """

    # Set by check_own_gradients, read by check_gradients.
    is_forward_only: bool = False
    # Set by check_values, read there and by time_forwards.
    result_specs: list[ResultSpec] = field(default_factory=list)
    # Set by check_other_inputs and check_case, read by check_gradients.
    may_rely_on_inputs: bool = False
    # Set by check_other_inputs, read by check_other_gradients.
    is_right_for_both_signs: bool = False
    # Set by time_forwards, read by time_training_steps.
    times: TimesOfSetting | None = None
    # Set by check_gradients, read by the checks after it; check_step_memory empties it if a step
    # raises.
    quantities: list[Quantity] = field(default_factory=list)


class Grading:
    """A file under grading.

    The arguments, and the resources' problem, are attributes, too.

    Args:
        resources: the shared memory and eager's processes for the problem.
        file: the solution's file.
        options: how the file is graded.
        verdict: the verdict, to which the checks add their findings.
        progress: shows the progress line: its arguments are what is done and how far that is.

    Attributes:
        device: the device on which solutions compute.
        solution: the process that runs the file.
        state: the solution's parameters and buffers.
        reference: the reference's module, which has the same parameters as all contestants.
        latest_inputs: the arguments of the latest call.
        earlier_results: small results of the reference for some earlier inputs, on the CPU. These
            results help to describe a wrong one, which may be the right result of another call.
        findings: what one check has found and a later one needs.
    """

    def __init__(
        self,
        resources: Resources,
        file: GradedFile,
        options: Options,
        verdict: Verdict,
        progress: Callable[..., None],
    ) -> None:
        self.resources = resources
        self.problem = resources.problem
        self.file = file
        self.options = options
        self.verdict = verdict
        self.progress = progress
        self.device = resources.problem.device
        deadline = monotonic() + options.timeout
        self.solution = Contestant(
            resources.server, resources.memory.pool, self.device, Role.SOLUTION, deadline
        )
        verdict.has_walls = self.solution.has_walls
        resources.memory.are_results_copied = not self.solution.is_readable
        if resources.memory.are_results_copied:
            verdict.notes.append(RESULTS_ARE_COPIED)
        if not processes.counts_runs():
            verdict.notes.append(RUNS_ARE_NOT_COUNTED)
        self.state = State(self.solution, resources.memory.pool)
        self.reference = ReferenceModule(resources.problem)
        self.latest_inputs: list = []
        self.earlier_results: list[torch.Tensor] = []
        self.findings = Findings()

    def close(self) -> None:
        """End the solution's process and give back the memory that the grading has used."""
        self.solution.close()
        self.state.close()
        self.forget_round()
        self.resources.memory.pool.free_stray_pages()

    def set_precision(self, setting: str) -> None:
        """Set the precision of float32 products, in this process and in the solution's."""
        self.problem.setting = setting
        torch.set_float32_matmul_precision(self.problem.precision)
        self.solution.ask("set_precision", setting=self.problem.precision)

    def construct(self, arguments: list | None = None, check_first_values: bool = False) -> None:
        """Construct both modules under one seed and give the solution the reference's parameters.

        Args:
            arguments: the constructors' arguments; None for the problem's own.
            check_first_values: whether both constructors must have drawn the same values.
        """
        seed = new_seed()
        self.reference.construct(seed, arguments)
        if arguments is None:
            arguments = self.problem.arguments
        dtype = self.problem.file.dtype
        try:
            self.state.construct(dtype, seed, self.reference.module, arguments, check_first_values)
        except StateError as error:
            raise NotCorrectError(WRONG, str(error)) from None

    def write_state(self) -> None:
        """Write the reference's parameters and buffers where the solution reads them."""
        self.state.write(self.reference.values())

    def write_inputs(self, inputs_of_calls: list[list]) -> None:
        """Write the arguments of the next request's calls, a list for each call."""
        self.resources.memory.write_inputs(inputs_of_calls)

    def draw_inputs(self) -> list:
        """Return new inputs; before large ones are drawn, the present ones are freed."""
        if self.problem.gives_memory_back:
            self.forget_round()
        return self.problem.draw()

    def forget_round(self) -> None:
        """Free what the referee keeps of a round so that the next round has the memory."""
        self.latest_inputs = []
        self.resources.memory.forget()
