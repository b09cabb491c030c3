"""Cheats that are right in untimed calls, and wrong or harmful in timed calls and steps alone.

The results and gradients of timed calls are compared, too, and so is the memory of inputs and
parameters.
"""

from contextlib import contextmanager
from textwrap import indent

import pytest

from referee.checks import timed_forwards, turn_memory
from referee.checks.turn_memory import turn
from referee.contestants.state import State
from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import (
    IS_TIMED,
    LINEAR,
    LINEAR_INIT,
    RELU,
    correct,
    in_timed_forwards,
    module,
    own_linear_relu,
    reference,
    wrong,
)

# ------------------------------------------------------------- timed calls that eager's error hides
#
# Eager's result of these references has some elements that are far off: where rounding carries a
# product past a whole number, and the largest of the quotients. So the error budget lets each
# element be far off, and only the mean error shows the cheat.

WEIGHT = "self.weight = nn.Parameter(torch.randn(256, 1024))"
WRAPS_FORWARD = "return torch.remainder(x @ self.weight, 1)"
WRAPS = reference(WRAPS_FORWARD, "[4 * torch.randn(512, 256)]", WEIGHT)
# The quotients of the first column are large.
SCALES = "torch.cat([torch.tensor([1e-5]), torch.ones(1023)])"
PEAKS = reference("return 1 / x", f"[torch.randn(1024, 1024) * {SCALES}]")
ZEROS_LATER = in_timed_forwards("return x.new_zeros(512, 1024)", WRAPS_FORWARD, WEIGHT)
PEAKS_LATER = in_timed_forwards("return torch.where(x.abs() < 0.2, 1 / x, 0)", "return 1 / x")
MEAN_ERROR = "^a timed call was wrong: mean error"


def test_zeros_in_timed_calls_are_wrong_though_each_element_may_be_off_by_its_size(
    device, tmp_path
):
    grade(WRAPS, {"zeros_later": wrong(ZEROS_LATER, MEAN_ERROR)}, tmp_path, device=device)


@pytest.mark.slow
def test_zeros_beside_few_large_quotients_are_wrong(device, tmp_path):
    grade(PEAKS, {"peaks_later": wrong(PEAKS_LATER, MEAN_ERROR)}, tmp_path, device=device)


def test_a_wrong_result_whose_size_depends_on_the_values_is_wrong(tmp_path):
    """It cannot be another call's result, because no other call's has the same size."""
    right = "return x[x > 0.5]"
    cheat = in_timed_forwards("return 1.5 * x[x > 0.5]", right)
    table = {"scales_later": wrong(cheat, "^a timed call was wrong: .* elements beyond")}
    grade(reference(right, "[torch.rand(64, 64)]"), table, tmp_path)


# ---------------------------------------------------------------------- gradients of timed steps
#
# Gradients are compared in two steps before the times, and in all timed steps.

OWN_FORWARD = "return Own.apply(x, self.fc.weight, self.fc.bias) * self.scale"
RIGHT = own_linear_relu() + module(OWN_FORWARD, LINEAR_INIT)
# Returns the gradients of its first backward again.
KEEPS_GRADIENTS = "kept = []\n" + own_linear_relu("""
kept or kept.append(gradients)
gradients = kept[0]
""") + module(OWN_FORWARD, LINEAR_INIT)  # fmt: skip
# Is right in the first three backwards, and wrong in the timed steps after them.
LATER_WRONG = "calls = []\n" + own_linear_relu("""
calls.append(0)
if len(calls) > 3:
    gradients = [1.2 * gradient for gradient in gradients]
""") + module(OWN_FORWARD, LINEAR_INIT)  # fmt: skip
AT_LINEAR = {
    "keeps_gradients": wrong(KEEPS_GRADIENTS, "^gradient of"),
    "wrong_gradients_later": wrong(LATER_WRONG, "^in timed steps, gradient of"),
    "right": correct(RIGHT, "training step"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_LINEAR, "wrong_gradients_later"))
def test_gradients_that_are_wrong_in_timed_steps_are_found(table, device, tmp_path):
    grade(LINEAR, table, tmp_path, device=device)


# Its gradient is zero everywhere.
SIGN = reference("return torch.sign(x)", "[torch.randn(64, 256)]")
# Its gradient is zero in the first three backwards, as in LATER_WRONG.
SIGN_LATER_WRONG = """
calls = []

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, g):
        calls.append(0)
        return torch.zeros_like(g) if len(calls) <= 3 else 1000 * g

"""


@pytest.mark.slow
def test_gradients_are_compared_also_where_the_references_are_zero(device, tmp_path):
    table = {
        "later wrong": wrong(
            SIGN_LATER_WRONG + module("return Own.apply(x)"), "^a timed step's gradient of x"
        ),
        "right": correct(module("return torch.sign(x)"), "training step"),
    }
    grade(SIGN, table, tmp_path, device=device)


# --------------------------------------------- the memory of inputs and parameters, in timed calls

TRANSPOSED = reference("return x.t().contiguous()", "[torch.randn(256, 256)]")
# Maps the shared memory a second time, and returns views of the inputs there. The referee fills the
# inputs with NaN before it reads whole timed results.
SECOND_MAPPING = """
import mmap, os

links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
descriptor = next(int(link[14:]) for link in links if "memfd:referee" in os.path.realpath(link))
maps = open("/proc/self/maps").read().splitlines()
start = next(int(line.split("-")[0], 16) for line in maps if "memfd:referee" in line)
memory = mmap.mmap(descriptor, 1 << 40)
"""
VIEW = """
offset = x.data_ptr() - start
return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).t()
"""
ALIASES = SECOND_MAPPING + in_timed_forwards(VIEW, "return x.t().contiguous()")
# Does so in timed steps.
STEP_ALIASES = (
    SECOND_MAPPING
    + IS_TIMED
    + f"""
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return view(x) if is_timed() else x.t().contiguous()

    @staticmethod
    def backward(ctx, g):
        return g.t()

def view(x):
{indent(VIEW, "    ")}
"""
)
STEP_ALIASES += module("return Own.apply(x) if torch.is_grad_enabled() else x.t().contiguous()")


@pytest.mark.slow
def test_a_view_of_an_input_through_a_second_mapping_is_wrong(tmp_path):
    """The elements that are read early are not NaN yet, and so differ from the whole result."""
    table = {
        "aliases": wrong(ALIASES, "^a timed call's result is not complete"),
        "step_aliases": wrong(STEP_ALIASES, "^a timed step's result is not complete"),
        "plain": correct(module("return x.t().contiguous()"), "training step"),
    }
    grade(TRANSPOSED, table, tmp_path)


@pytest.mark.usefixtures("unreadable_processes")
def test_a_view_of_an_input_is_wrong_also_where_results_are_copied(tmp_path):
    """A copy of it would be right, for the process copies it before the input is overwritten."""
    table = {
        "aliases": wrong(ALIASES, "^a timed call: its result changes with its input"),
        "step_aliases": wrong(STEP_ALIASES, "^a timed step: its result changes with its input"),
        "plain": correct(module("return x.t().contiguous()"), "training step"),
    }
    grade(TRANSPOSED, table, tmp_path)


# Finds eager's weight, which has the values of its own one, in the shared memory, and changes it.
CHANGES_EAGER = """
own = self.fc.weight.detach()
values = bytes(own.flatten()[:64].view(torch.uint8).tolist())
offset = memory.find(values, 0, 1 << 26)
while offset >= 0:
    if offset != own.data_ptr() - start:
        memory[offset : offset + 4] = bytes(4)
    offset = memory.find(values, offset + 1, 1 << 26)
"""


@pytest.mark.slow
def test_a_change_of_eagers_parameters_is_wrong(tmp_path):
    right = "return torch.relu(self.fc(x)) * self.scale"
    changes = SECOND_MAPPING + in_timed_forwards(CHANGES_EAGER, right, LINEAR_INIT)
    table = {"changes_eager": wrong(changes, "writes into eager's parameters")}
    grade(LINEAR, table, tmp_path)


# In its first forward, finds eager's parameter in the shared memory and makes it NaN. The values of
# this parameter, and of no other tensor, are from 3 to 4.
SCALE_INIT = "self.scale = nn.Parameter(torch.rand(64) + 3)"
SCALED = reference(
    "return torch.relu(x) + (self.scale - self.scale)", "[torch.rand(32, 64)]", SCALE_INIT
)
SPOILS_EAGER = """
import numpy

values = numpy.frombuffer(memory, dtype=numpy.float32, count=1 << 22)
calls = 0
"""
SPOIL = """
global calls
calls += 1
if calls == 1:
    begin = (self.scale.data_ptr() - start) // 4
    for i in numpy.flatnonzero((values >= 3) & (values <= 4)):
        if not begin <= i < begin + self.scale.numel():
            values[i] = numpy.nan
return x.clone()
"""


def test_a_change_of_eagers_parameters_before_the_rounds_hides_no_wrong_result(tmp_path):
    """For inputs of both signs, only finite results of eager's are compared."""
    spoils = SECOND_MAPPING + SPOILS_EAGER + module(SPOIL, SCALE_INIT)
    reason = "returns a copy of its input 0: inputs of both signs"
    grade(SCALED, {"spoils": wrong(spoils, reason)}, tmp_path)


# Writes into the input of a timed forward when its result is freed, which is after the comparison.
WRITES_LATE = """
class Writes:
    def __init__(self, x):
        self.x = x

    def __del__(self):
        self.x.zero_()
"""
WRITES_LATE += in_timed_forwards("""
y = torch.relu(x)
y.writes = Writes(x)
return y
""", "return torch.relu(x)")  # fmt: skip


@pytest.mark.slow
def test_inputs_that_change_late_are_written_again_before_the_next_turn(tmp_path, monkeypatch):
    """Small inputs are written before each turn anyhow; here none is small."""
    monkeypatch.setattr(turn_memory, "CACHED_BYTES", -1)
    time_request = timed_forwards.time_request
    are_whole = []

    def time_and_look(resources, timed_call, call_count, *args):
        are_whole.append(
            all(region.is_unchanged() for region in resources.memory.inputs[:call_count])
        )
        return time_request(resources, timed_call, call_count, *args)

    monkeypatch.setattr(timed_forwards, "time_request", time_and_look)
    grade(RELU, {"writes_late": correct(WRITES_LATE)}, tmp_path)
    assert len(are_whole) > 3  # there were later turns than those of the first round
    assert all(are_whole)


# In timed steps, it describes each result as one of the type OutOfMemoryError.
DESCRIBES_A_LACK_OF_MEMORY = f"""
{IS_TIMED}
from referee.child import kept_results

describe = kept_results.describe

def describe_falsely(value):
    in_step = is_timed() and frame_of_request().f_locals["request"]["method"] == "run_steps"
    return {{"type": "OutOfMemoryError"}} if in_step else describe(value)

kept_results.describe = describe_falsely
""" + module("return torch.relu(x)")
RAISES_IN_STEPS = IS_TIMED + module("""
if torch.is_grad_enabled() and is_timed():
    raise torch.OutOfMemoryError("no memory")
return torch.relu(x)
""")
LACKS = {
    "describes": wrong(DESCRIBES_A_LACK_OF_MEMORY, "OutOfMemoryError"),
    "raises": correct(RAISES_IN_STEPS, "^forward only: its training step runs out of memory"),
}


@pytest.mark.slow
def test_a_lack_of_memory_in_timed_steps_is_the_solutions_own(device, tmp_path):
    grade(RELU, LACKS, tmp_path, device=device)


NORM = "self.norm = nn.BatchNorm1d(64)"
NORM_FORWARD = "return self.norm(x)"


@pytest.mark.slow
def test_buffers_that_a_forward_changes_are_written_again_before_each_turn(tmp_path, monkeypatch):
    """In training mode, a norm changes its statistics, which are buffers."""
    changed_before_turn, changed_by_eager = [], []

    def changed(states: list[State]) -> list[str]:
        return [name for state in states for name in state.changed_parameters(buffers=set())]

    @contextmanager
    def look_at_turn(grading, *arguments):
        states_of_eager = [eager.state for eager in grading.resources.eager.members]
        with turn(grading, *arguments):
            changed_before_turn.append(changed([grading.state, *states_of_eager]))
            yield
            changed_by_eager.append(changed(states_of_eager))

    monkeypatch.setattr(timed_forwards, "turn", look_at_turn)
    problem = reference(NORM_FORWARD, "[torch.rand(32, 64)]", NORM)
    grade(problem, {"plain": correct(module(NORM_FORWARD, NORM))}, tmp_path)
    assert any(changed_by_eager)
    assert not any(changed_before_turn), changed_before_turn


# Changes its input only while hooks count what its forward keeps for the backward.
WHILE_COUNTED = module("""
counts = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
if counts:
    x.data.zero_()
return torch.relu(x)
""")


@pytest.mark.slow
def test_inputs_stay_intact_while_kept_bytes_are_counted(tmp_path):
    table = {"while_counted": wrong(WHILE_COUNTED, "changes its input, .* kept bytes are counted")}
    grade(RELU, table, tmp_path)
