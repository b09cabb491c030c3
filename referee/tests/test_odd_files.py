"""Files whose replies, state or end are odd: each gets a verdict, and grading goes on."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from referee.contestants.errors import EndedError
from referee.contestants.server import PACKAGE
from referee.reference.file import BadReferenceError
from referee.reference.unusual_inputs import ALTERED, BOTH_SIGNS, unusual_inputs
from referee.report import graded_files
from referee.rounds.timed_requests import checked_seconds
from referee.testing.graded import grade
from referee.testing.texts import IMPORTS, correct, error, module, reference, wrong
from referee.verdict import outcome
from referee.verdict_words import ERROR

RELU = reference("return torch.relu(x)", "[torch.rand(8, 64)]")
# Replaces ITEMS of each reply that has results.
FORGED = """
import json, os
from referee.child import main

send = main._reply
def forge(descriptor, reply):
    if "returned" in reply:
        reply = reply | {ITEMS}
    send(descriptor, reply)
main._reply = forge
"""
PLAIN = module("return torch.relu(x)")
# Describes a result with a stride of STRIDE elements.
STRIDES = """
from referee.child import kept_results

tell = kept_results.describe
def describe(x):
    return tell(x) | {"strides": [STRIDE, 1]}
kept_results.describe = describe
"""
# Says that all parameters are at the same address.
SAME_ADDRESS = """
from referee.child import held_module

tell = held_module._describe_state
held_module._describe_state = lambda x: tell(x) | {"storage": 8}
"""
# Describes an exception by a text, where the referee expects a dictionary.
RAISED = """
from referee.child import main

main._describe = lambda error, file: "text"
"""
# Says that autograd keeps NUMBER bytes for the backward.
KEPT_BYTES = """
from referee.child.request_handler import RequestHandler

RequestHandler.count_saved_bytes = lambda self, inputs: {"bytes": NUMBER}
"""


def forged(items: str) -> str:
    """Return the text of a file that replaces these items, of a dictionary, in its replies."""
    return FORGED.replace("ITEMS", items) + PLAIN


def test_forged_replies_are_errors(tmp_path):
    table = {
        "calls_are_a_number": error(forged('"returned": 5'), '"returned" is no list'),
        "no_calls": error(forged('"returned": []'), "of 0 calls, expected 1"),
        "a_call_is_a_text": error(forged('"returned": ["x"]'), '"returned" is no list'),
        "results_are_a_number": error(
            forged('"returned": [{"results": 1}]'), '"results" of a call are no list'
        ),
        "a_result_is_a_text": error(
            forged('"returned": [{"nesting": "*", "results": ["x"]}]'),
            '"results" of a call are no list',
        ),
        "raised_is_a_text": error(RAISED + module("raise ValueError"), '"raised" is no dictionary'),
        "far_strides": wrong(
            STRIDES.replace("STRIDE", "1 << 46") + PLAIN,
            "spans .* bytes, more than there is memory",
        ),
        "long_strides": wrong(
            STRIDES.replace("STRIDE", "1 << 41") + PLAIN,
            "spans .* bytes, more than there is memory",
        ),
        "correct": correct(PLAIN),
    }
    grade(RELU, table, tmp_path, trials=1)


@pytest.mark.parametrize("number", ["'x'", "True", "-1", "1.5", "1 << 48", "[8]"])
def test_kept_bytes_that_are_no_number_of_bytes_are_not_reported(number, tmp_path):
    table = {"forges": correct(KEPT_BYTES.replace("NUMBER", number) + PLAIN, "training step")}
    [record] = grade(RELU, table, tmp_path, trials=1).values()
    [run] = record["runs"]
    assert run["step"]["kept_bytes"].keys() == {"eager"}
    assert "keeps" not in graded_files.describe(record)


def test_kept_bytes_are_left_out_if_those_of_eager_are_not_known():
    """Eager's forward may raise because of the hooks that count them."""
    times = {"median_ms": 1.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "time": "a tie"}
    rows = [
        {**times, "role": "solution", "name": "ModelNew"},
        {**times, "role": "eager", "name": "eager"},
    ]
    seconds = {"step": {"eager": [1.0], "ModelNew": [1.0]}}
    step = {"summary": {"step": rows}, "seconds": seconds, "kept_bytes": {"ModelNew": 8}}
    assert "keeps" not in graded_files._describe_step({"step": step})


def test_forged_addresses_of_parameters_change_nothing(tmp_path):
    """The referee then takes parameters of different sizes for different ones."""
    init = "self.a, self.b = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(64))"
    forward = "return torch.relu(x) * self.a + self.b"
    table = {
        "same_address": correct(SAME_ADDRESS + module(forward, init)),
        "correct": correct(module(forward, init)),
    }
    grade(reference(forward, "[torch.rand(8, 64)]", init), table, tmp_path, trials=1)


# Forbids to read the first page of the shared memory, by which the referee tries what it can read.
HIDES = """
import ctypes

def hide():
    for line in open("/proc/self/maps"):
        if "memfd:referee" in line:
            start = int(line.split("-")[0], 16)
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_long(4096), 0)
"""


def test_parameters_that_a_constructor_hides_are_compared(tmp_path):
    """The referee has tried what it can read before the file's code ran."""
    init = "self.a = nn.Parameter(torch.rand(64))"
    other_init = "self.a = nn.Parameter(torch.ones(64))\nhide()"
    forward = "return torch.relu(x) * self.a"
    table = {
        "hides": wrong(HIDES + module(forward, other_init), "does not start with the values"),
        "correct": correct(module(forward, init)),
    }
    grade(reference(forward, "[torch.rand(8, 64)]", init), table, tmp_path, trials=1)


def test_both_parts_of_a_complex_first_value_are_compared(tmp_path):
    init = "self.w = nn.Parameter(torch.randn(64, dtype=torch.complex64){})"
    forward = "return torch.view_as_real(x * self.w)"
    table = {
        "conjugated": wrong(
            module(forward, init.format(".conj_physical()")), "does not start with"
        ),
        "correct": correct(module(forward, init.format(""))),
    }
    problem = reference(forward, "[torch.rand(16, 64)]", init.format(""))
    grade(problem, table, tmp_path, trials=1)


def test_a_type_whose_name_has_several_lines_is_named_in_one(tmp_path):
    cheat = "return type('int\\nb.py: correct', (), {})()"
    table = {"cheat": wrong(module(cheat), r"returns a int\\nb\.py: correct, not a dense tensor$")}
    grade(RELU, table, tmp_path, trials=1)


def test_an_end_by_a_signal_without_a_name_is_an_error(tmp_path):
    """Python has no name for signal 40, a real-time signal."""
    table = {
        "signal": error("import os\nos.kill(os.getpid(), 40)\n", "signal 40"),
        "correct": correct(PLAIN),
    }
    grade(RELU, table, tmp_path, trials=1)


@pytest.mark.parametrize("seconds", ["x", [1], [True, 0.1], [0.1], [-0.1, 0.1], [float("nan")] * 2])
def test_times_that_are_no_times_count_as_zeros(seconds):
    assert checked_seconds(seconds, 2) == [0.0, 0.0]
    assert checked_seconds([0.0, 0.5], 2) == [0.0, 0.5]


def test_crashes_are_named_by_signal_or_by_number():
    assert outcome(EndedError(-40, ""), "importing") == (
        ERROR,
        "crashes (signal 40) while importing",
    )
    assert "SIGSEGV" in outcome(EndedError(-signal.SIGSEGV, ""), "importing")[1]
    assert outcome(EndedError(-signal.SIGKILL, ""), "importing") == (
        ERROR,
        "is killed by SIGKILL, perhaps because memory was short, while importing",
    )


REFUSES = "assert x.min() >= 0\nreturn torch.relu(x)"


def test_inputs_that_a_file_refuses_are_no_case(tmp_path):
    table = {"refuses": correct(module(REFUSES)), "plain": correct(PLAIN)}
    records = grade(RELU, table, tmp_path, trials=1)
    assert records["plain"]["cases"] == 8
    refused = records["refuses"]["refused"]
    assert BOTH_SIGNS in refused  # so check 8 is left out
    assert records["refuses"]["cases"] == 8 - len(refused) - 1


SHARED_NORM = """
self.first = nn.BatchNorm1d(64)
self.second = self.first
"""
TWICE = "return self.second(torch.relu(self.first(x)))"


def test_a_shared_module_may_change_its_buffers_which_have_two_names(tmp_path):
    """A forward in training mode changes its statistics, which are buffers, and may change."""
    problem = reference(TWICE, "[torch.rand(8, 64)]", SHARED_NORM)
    grade(problem, {"same": correct(module(TWICE, SHARED_NORM))}, tmp_path, trials=1)


EXPANDED = 'self.register_buffer("scale", torch.rand(1, 1).expand(8, 64))'
FULL = 'self.register_buffer("scale", torch.rand(1, 1).expand(8, 64).contiguous())'
SCALED = "return torch.relu(x) * self.scale"


def test_a_solution_may_expand_a_buffer_that_the_reference_expands(tmp_path):
    problem = reference(SCALED, "[torch.rand(8, 64)]", EXPANDED)
    table = {"same": correct(module(SCALED, EXPANDED)), "full": correct(module(SCALED, FULL))}
    grade(problem, table, tmp_path, trials=1)


def test_a_solution_may_not_expand_a_buffer_that_the_reference_does_not(tmp_path):
    problem = reference(SCALED, "[torch.rand(8, 64)]", FULL)
    table = {"expanded": wrong(module(SCALED, EXPANDED), "share memory")}
    grade(problem, table, tmp_path, trials=1)


SPARSE = "self.register_buffer('own', torch.eye(3).to_sparse())"
EXTRA = """
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass
"""


def test_state_that_only_the_solution_has_may_be_of_any_kind(tmp_path):
    """Parts of its state that are no plain tensors, and not the reference's, are ignored."""
    table = {
        "sparse": correct(module("return torch.relu(x)", SPARSE)),
        "extra": correct(PLAIN + EXTRA),
    }
    grade(RELU, table, tmp_path, trials=1)


CONJUGATED = "return torch.view_as_complex(x.view(8, 32, 2)).conj()"


def test_a_reference_may_return_a_conjugated_view(tmp_path):
    problem = reference(CONJUGATED, "[torch.rand(8, 64)]")
    grade(problem, {"same": correct(module(CONJUGATED))}, tmp_path, trials=1)


@pytest.mark.parametrize(
    ("forward", "init", "words"),
    [
        ("return x.to_sparse()", "", "returns a sparse tensor"),
        ("return x.to(torch.complex128)", "", "returns a tensor of complex128"),
        ("return x * 2", SPARSE, "state has own"),
    ],
)
def test_references_with_results_or_state_that_cannot_be_read_are_refused(
    tmp_path, forward, init, words
):
    with pytest.raises(BadReferenceError, match=words):
        grade(reference(forward, "[torch.rand(8, 64)]", init), {}, tmp_path)


# Replies as soon as its work is queued: the functions by which its clock would wait do nothing. The
# GPU goes on while the process is stopped. Elements that are read early are not computed yet.
QUEUED = """
torch.cuda.synchronize = lambda *arguments: None
torch.cuda.Event.synchronize = lambda event: None
torch.cuda.Event.elapsed_time = lambda start, end: 0.001
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_that_is_queued_behind_the_reply_is_wrong(tmp_path):
    late = """
out = torch.full_like(x, 7)
torch.cuda._sleep(40_000_000)
return torch.clamp_min(x, 0, out=out)
"""
    # Which rule finds it depends on when the work ends.
    words = "got 7, expected|is not complete|overwrites an earlier call's result"
    table = {"queued": wrong(QUEUED + module(late), words), "correct": correct(PLAIN)}
    grade(RELU, table, tmp_path, device="cuda")


# Draws take 4 s after a file was imported, which appends "|" to the file LOG.
SLOW_DRAWS = """
import time
from pathlib import Path

def draw():
    before, started, draws = Path(LOG).read_text().rpartition("|")
    if started and len(draws) < 10:
        time.sleep(0.4)
    with open(LOG, "a") as file:
        file.write(".")
    return torch.rand(8, 64)
"""
SLOW_DRAWS += reference("return torch.relu(x)", "[draw()]")
STARTS = 'with open(LOG, "a") as file:\n    file.write("|")\n'


def test_the_time_limit_counts_only_while_a_solution_runs(tmp_path):
    """The draws for the first file take longer than the limit of 3 s, but do not count."""
    log = tmp_path / "log"
    log.touch()
    define_log = f"LOG = {str(log)!r}\n"
    start = define_log + STARTS
    table = {
        "correct": correct(start + PLAIN),
        "sleeps": (start + module("import time\ntime.sleep(60)"), "time limit", "3 s, while"),
    }
    grade(define_log + SLOW_DRAWS, table, tmp_path, trials=1, timeout=3)
    _, draws_for_correct, _ = log.read_text().split("|")
    assert len(draws_for_correct) >= 10


# Under a fixed seed, as some generated problems have it.
SEEDED = reference("return torch.relu(x)", "[torch.manual_seed(42) and torch.randn(64, 64)]")
# Keeps the first result for each beginning of its input.
KEEPS = """
key = tuple(x.flatten()[:16].tolist())
if key not in self.kept:
    self.kept[key] = torch.relu(x)
return self.kept[key].clone()
"""
SAME_MEMORY = """
self.out = torch.empty_like(x) if self.out is None else self.out
return self.out.copy_(torch.relu(x))
"""


def test_results_are_not_replayed_though_the_reference_repeats_its_inputs(tmp_path):
    note = "get_inputs draws the same inputs every time"
    table = {
        "correct": correct(PLAIN, note),
        "keeps_results": wrong(module(KEEPS, "self.kept = {}"), "replays"),
        "same_memory": wrong(module(SAME_MEMORY, "self.out = None"), "overwrites"),
    }
    grade(SEEDED, table, tmp_path, trials=1)


# A seed that the reference sets when it is imported.
FORESEEABLE = "torch.manual_seed(0)\n" + reference("return torch.relu(x)", "[torch.randn(64, 64)]")
# Draws what the reference would draw after its seed. It is wrong if it has foreseen an input.
FORESEES = module(
    """
if x.sum().item() in self.foreseen:
    return torch.zeros_like(x)
return torch.relu(x)
""",
    """
torch.manual_seed(0)
self.foreseen = {torch.randn(64, 64).sum().item() for _ in range(200)}
""",
)


def test_inputs_are_not_those_that_follow_from_a_seed_of_the_reference(tmp_path):
    grade(FORESEEABLE, {"foresees": correct(FORESEES)}, tmp_path, trials=1)


@pytest.mark.parametrize("values", [torch.rand(1000), torch.ones(1000), torch.zeros(1000)])
def test_repeated_inputs_are_altered_in_part(values):
    source = SimpleNamespace(float_indices=[0], repeats=True)
    problem = SimpleNamespace(input_source=source)
    [altered] = unusual_inputs(problem, ALTERED, [values])
    assert 0 < int((altered != values).sum()) <= 1000 // 16


# Makes the folder of an extension, as a build does.
BUILDS = """
import os
from pathlib import Path

folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
(folder / "extension").mkdir()  # raises if the folder exists
# No file that was graded before may know the folder's name: it could put something into it.
with open("names.txt", "a+") as names:
    names.seek(0)
    assert folder.name not in names.read()
    print(*os.listdir(folder.parent), file=names)
"""


@pytest.mark.slow
def test_each_file_builds_in_a_folder_of_its_own(tmp_path):
    """Otherwise a killed build's lock stops the next file, or it gets what another has built.

    The files are graded twice: the second time, too, nobody knows the names of the folders.
    """
    (tmp_path / "problem.py").write_text(IMPORTS + RELU)
    names = ["first.py", "second.py"]
    for name in names:
        (tmp_path / name).write_text(IMPORTS + BUILDS + PLAIN)
    command = [sys.executable, "-m", "referee", "problem.py", *names, "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command += ["--trials", "1"]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_a_note_names_inputs_that_repeat_beside_others(tmp_path):
    """A solution may keep what follows from such an input alone."""
    forward = "return x * inputs[1]"
    problem = reference(forward, "[torch.rand(8, 64), torch.tril(torch.ones(8, 64))]")
    note = "get_inputs draws the same input 1 every time"
    grade(problem, {"plain": correct(module(forward), note)}, tmp_path, trials=1)
