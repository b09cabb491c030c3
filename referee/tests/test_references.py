"""References: which files are refused, what is drawn for them, and what cannot be judged."""

import os
import random
import re
import signal

import pytest
import torch

from referee.checks import timed_forwards, timed_training_steps
from referee.contestants.descriptions import elements_share_memory
from referee.eager_processes import EagerProcess
from referee.program import command
from referee.reference import problem as reference_problem
from referee.reference.file import BadReferenceError, NoRoomError, load
from referee.reference.problem import Problem
from referee.reference.reference_step import StepArguments, step_or_none
from referee.reference.trivial_results import describe_trivial_results
from referee.testing.graded import grade
from referee.testing.texts import IMPORTS, correct, error, module, reference

WIDE = reference("return torch.relu(x)", "[torch.rand(3, 131072)]")
# Files that are no references. By name: the text, and what the line must contain.
BAD = {
    "import": ("import no_such_module\n", "the import raises ModuleNotFoundError: No module"),
    "exit": ("raise SystemExit(0)\n", "the import raises SystemExit"),
    "syntax": ("def f(:\n", "the import raises SyntaxError"),
    "empty": ("", "defines no Model, no get_inputs, no get_init_inputs"),
    "no inputs": (WIDE.replace("get_inputs", "inputs"), "defines no get_inputs"),
    "inputs raise": (WIDE.replace("torch.rand(3,", "torch.rand(-3,"), "get_inputs raises Runtime"),
    "inputs are text": (WIDE.replace("[torch.rand(3, 131072)]", "'x'"), "gives a str, not a list"),
    "tensors in a list": (WIDE.replace("torch.rand(3, 131072)", "[torch.rand(3)]"), "gives a list"),
    "no tensor": (WIDE.replace("torch.rand(3, 131072)", "3"), "get_inputs gives no tensor"),
    "a dict": (WIDE.replace("torch.rand(3, 131072)", "{}"), "get_inputs gives a dict"),
    "constructor": (WIDE.replace("[]", "[1]"), "Model raises TypeError: "),
    "no module": (WIDE.replace("nn.Module", "str"), "Model makes a Model, not an nn.Module"),
    "forward": (WIDE.replace("relu(x)", "relu(y)"), "forward raises NameError: name 'y'"),
    "returns a dict": (WIDE.replace("torch.relu(x)", "{'x': x}"), "returns a dict, not a tensor"),
    "returns nothing": (WIDE.replace("torch.relu(x)", "[]"), "Model returns no tensor"),
    "in place": (WIDE.replace("relu(x)", "relu_(x.sub_(1))"), "Model changes its inputs"),
    "random": (WIDE.replace("torch.relu(x)", "nn.functional.dropout(x)"), "draws random numbers"),
    "float8": (
        WIDE.replace("torch.relu(x)", "x.to(torch.float8_e4m3fn)"),
        "Model returns a tensor of float8_e4m3fn, for which torch cannot draw",
    ),
    "float8 parameter": (
        reference(
            "return x * self.w.float()",
            "[torch.rand(3, 8)]",
            "self.w = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)",
        ),
        "Model's state has w of float8_e4m3fn, for which torch cannot draw",
    ),
    "no copy": (
        reference(
            "return self.fc(x)",
            "[torch.rand(3, 8)]",
            "self.fc, self.file = nn.Linear(8, 8), open(__file__)",
        ),
        "a copy of Model raises TypeError: cannot pickle",
    ),
    "another number": (
        WIDE.replace("torch.rand(3, 131072)", "torch.rand(3, 8), torch.rand(()).item()").replace(
            "(self, x)", "(self, x, scale)"
        ),
        "get_inputs draws another value of input 1 each time; only tensors may vary",
    ),
    "other shapes": (
        WIDE.replace("(3,", "(torch.randint(1, 99999, ()),").replace("131072", "3"),
        "of another form each time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_references_end_the_program_with_a_reason(name, tmp_path, capsys):
    text, reason = BAD[name]
    file = tmp_path / "bad.py"
    file.write_text(IMPORTS + text)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", str(file), str(file)])
    output = capsys.readouterr()
    assert (stopped.value.code, output.out) == (2, "")
    [line] = [line for line in output.err.splitlines() if f": {file}: " in line]
    assert reason in line


def test_a_reference_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "wide.py"
    file.write_text(IMPORTS + WIDE)
    monkeypatch.setattr(reference_problem, "MAX_SHARE_OF_FREE", 0)
    with pytest.raises(BadReferenceError, match=r"needs about .* of memory on cpu"):
        Problem("wide", load(file), torch.device("cpu"))


# First lines of a forward that raise if autograd records it; the last, in its backward.
NO_BACKWARD = (
    "if torch.is_grad_enabled(): raise TypeError('no backward')",
    "if torch.is_grad_enabled(): x.numpy()",
    "x = torch.igamma(x, x)",
)
OUT_OF_MEMORY = "if torch.is_grad_enabled(): raise torch.OutOfMemoryError('none')"


def step_of(first_line, tmp_path):
    """Return a problem whose forward is `first_line` and `x * 2`, and the arguments of a step."""
    path = tmp_path / "problem.py"
    path.write_text(IMPORTS + reference(f"{first_line}\nreturn x * 2", "[torch.rand(3, 4)]"))
    problem = Problem("problem", load(path), torch.device("cpu"))
    return problem, StepArguments(problem.construct(0), problem.draw(), [torch.ones(3, 4)], [], 1)


@pytest.mark.parametrize("line", NO_BACKWARD)
def test_a_reference_whose_step_raises_has_no_gradients(line, tmp_path):
    problem, step = step_of(line, tmp_path)
    assert step_or_none(lambda: problem.run_step(step)) is None


def test_a_reference_without_memory_is_not_one_without_gradients(tmp_path):
    problem, step = step_of(OUT_OF_MEMORY, tmp_path)
    with pytest.raises(NoRoomError):
        step_or_none(lambda: problem.run_step(step))


# First lines of a forward on a CPU that need more memory than there is, and how the reason begins.
MORE_THAN_THERE_IS = {
    "torch": ("torch.empty(1 << 46)", "DefaultCPUAllocator: can't allocate memory: you tried"),
    "python": ("bytearray(1 << 60)", "MemoryError"),
}


@pytest.mark.parametrize("name", MORE_THAN_THERE_IS)
def test_a_lack_of_memory_on_a_cpu_is_told_in_plain_words(name, tmp_path):
    line, reason = MORE_THAN_THERE_IS[name]
    path = tmp_path / "problem.py"
    path.write_text(IMPORTS + reference(f"{line}\nreturn x * 2", "[torch.rand(3, 4)]"))
    expected = f"problem.py: forward needs more memory than there is: {reason}"
    with pytest.raises(NoRoomError, match=re.escape(expected)):
        Problem("problem", load(path), torch.device("cpu"))


def test_a_fault_of_the_referee_does_not_pass_for_a_missing_backward(tmp_path, monkeypatch):
    problem, step = step_of("", tmp_path)
    assert step_or_none(lambda: problem.run_step(step)) is not None
    monkeypatch.setattr(reference_problem, "sources_of", lambda arguments: arguments)
    with pytest.raises(TypeError):
        step_or_none(lambda: problem.run_step(step))


def test_what_is_drawn_later_does_not_follow_from_a_constructors_seed(device, tmp_path):
    """A solution knows the seed. So the generators get the states back that they had before."""
    path = tmp_path / "problem.py"
    drawing = "import random\nself.drawn = torch.rand(4) + random.random()"
    path.write_text(IMPORTS + reference("return x", "[torch.rand(4)]", drawing))
    file = load(path)
    torch.rand(1, device=device)  # makes the GPU's generator
    states, python_state = generator_states(device), random.getstate()
    file.construct([], 5, torch.device(device))
    assert all(map(torch.equal, states, generator_states(device)))
    assert random.getstate() == python_state


def generator_states(device):
    on_gpus = torch.cuda.get_rng_state_all() if device == "cuda" else []
    return [torch.get_rng_state(), *on_gpus]


# Its float64 result would have dtype float32. So the budget is an absolute tolerance of 1e-4, and
# all results are within it.
TINY = "return x.float() * 1e-6"


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("return torch.zeros_like(x) + 1", "the same for all inputs and parameters that were"),
        (TINY, "cannot tell the reference's result for other inputs and parameters apart"),
        ("return x * 3", ""),
    ],
)
def test_a_result_that_the_budget_allows_is_not_called_the_same(tmp_path, forward, words):
    path = tmp_path / "problem.py"
    path.write_text(IMPORTS + reference(forward, "[torch.rand(64, 64)]"))
    problem = Problem("problem", load(path), torch.device("cpu"))
    lines = describe_trivial_results(problem, [])
    assert words in "; ".join(lines)
    assert bool(lines) == bool(words)


@pytest.mark.parametrize(
    ("shape", "strides", "is_shared"),
    [
        ([3, 4], [4, 1], False),
        ([3, 4], [1, 3], False),
        ([3, 4], [9, 2], False),
        ([3, 4], [1, 0], True),
        ([3, 4], [2, 1], True),
        ([3, 1, 4], [4, 0, 1], False),
        ([1, 1], [0, 0], False),
        ([3, 0], [0, 0], False),
        ([], [], False),
        ([2, 2, 2], [4, 0, 1], True),
    ],
)
def test_strides_tell_whether_elements_share_memory(shape, strides, is_shared):
    assert elements_share_memory(shape, strides) == is_shared


def test_a_shape_that_changes_only_in_timed_steps_ends_them(tmp_path, monkeypatch):
    timed_calls_of = timed_training_steps.timed_calls_of

    def draw_a_negative_element_from_now_on(*arguments):
        monkeypatch.setenv("NEGATIVE", "1")
        return timed_calls_of(*arguments)

    monkeypatch.setattr(timed_training_steps, "timed_calls_of", draw_a_negative_element_from_now_on)
    last = "torch.tensor([-1.0 if 'NEGATIVE' in os.environ else 1.0])"
    problem = "import os\n" + reference("return x[x > 0]", f"[torch.cat([torch.rand(63), {last}])]")
    table = {"same": correct(module("return x[x > 0]"), "not timed: shapes of its results depend")}
    grade(problem, table, tmp_path)


@pytest.mark.slow
def test_inputs_that_cannot_be_drawn_again_are_an_error(tmp_path):
    """The sixth draw raises; the solution has started by then."""
    problem = "CALLS = []\n" + reference("return torch.relu(x)", "[draw()]")
    problem += """
def draw():
    CALLS.append(0)
    if len(CALLS) > 5:
        raise ZeroDivisionError
    return torch.rand(3, 5)
"""
    table = {"plain": error(module("return torch.relu(x)"), "get_inputs raises ZeroDivisionError")}
    grade(problem, table, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("forward, inputs, init", [
    ("return x[x > 0]", "[torch.randn(64, 256)]", ""),
    ("return self.e(x)", "[torch.randint(9, (64,))]", "self.e = nn.Embedding(9, 2, sparse=True)"),
    ("return x.float() * 2", "[torch.randn(64, 64).to(torch.float8_e4m3fn)]", ""),
])  # fmt: skip
def test_a_copy_is_correct_though_its_gradients_cannot_be_judged(forward, inputs, init, tmp_path):
    grade(reference(forward, inputs, init), {"same": correct(module(forward, init))}, tmp_path)


# Lines of a forward of the reference that fail in eager's process, not in the referee's.
FAILS = """
import sys
if "referee.engine" not in sys.modules and {condition}:
    raise {error}
return torch.relu(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [True, False])
def test_eager_is_blamed_if_it_raises_while_it_is_timed(is_alone, tmp_path):
    """It fails before any solution has started, or in a round with one."""
    imported = tmp_path / "imported"  # the solution makes this file
    condition = "True" if is_alone else f"__import__('os').path.exists({str(imported)!r})"
    forward = FAILS.format(condition=condition, error="ValueError('the reference fails')")
    text = reference(forward, "[torch.rand(8, 256)]")
    reason = "eager itself could not be timed: .*ValueError: the reference fails"
    solution = f"open({str(imported)!r}, 'w').close()\n\n\n" + module("return torch.relu(x)")
    grade(text, {"honest": error(solution, reason)}, tmp_path)
    assert imported.exists() is not is_alone


def test_eager_is_blamed_if_it_ends_before_its_results_are_freed(tmp_path, monkeypatch):
    def free_results(contestant):
        if isinstance(contestant, EagerProcess):
            os.kill(contestant.pid, signal.SIGKILL)
        contestant.ask("release")

    monkeypatch.setattr(timed_forwards, "_free_results", free_results)
    table = {
        "honest": error(
            module("return torch.relu(x)"), "eager itself could not be timed: is killed by SIGKILL"
        )
    }
    grade(reference("return torch.relu(x)", "[torch.rand(8, 256)]"), table, tmp_path)


@pytest.mark.slow
def test_no_solution_is_blamed_if_eager_has_no_memory_for_a_step(tmp_path):
    raised = "torch.OutOfMemoryError('none')"
    forward = FAILS.format(condition="torch.is_grad_enabled()", error=raised)
    text = reference(forward, "[torch.rand(3, 131072)]")
    table = {"honest": correct(module("return torch.relu(x)"), "no memory for the training step")}
    grade(text, table, tmp_path)
