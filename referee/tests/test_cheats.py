"""Cheats that return wrong results and try to seem right, graded against reference files.

The head of each part says why its cheats are no gain, and the comment at a text says what this
cheat tries. Cheats that return right results and try to seem faster are in
`test_cheats_in_time.py`.
"""

from contextlib import suppress
from textwrap import indent

import pytest

from referee import grading
from referee.checks import timed_forwards
from referee.contestants.reading import UnreadableError
from referee.contestants.state import State
from referee.rounds import turns
from referee.rounds.early_elements import EarlyElements
from referee.tests.graded import grade
from referee.tests.texts import (
    LATE,
    correct,
    error,
    module,
    own_linear_relu,
    reference,
    wrong,
)

RELU = reference("return torch.relu(x)", "[torch.rand(32, 16384)]")
# Defines functions that find the request in a frame of the process's own code, which called the
# solution. Only requests of timed calls have the argument "outputs" and no argument "nan_bytes".
IS_TIMED = """
import sys

def frame_of_request():
    frame = sys._getframe(1)
    while frame and "request" not in frame.f_locals:
        frame = frame.f_back
    return frame

def is_timed():
    frame = frame_of_request()
    if frame is None:
        return False
    arguments = frame.f_locals["request"]["arguments"]
    return "outputs" in arguments and "nan_bytes" not in arguments
"""

# ----------------------------------------------- results that are computed when somebody reads them
#
# The process is stopped before the referee reads, and the referee reads its memory from outside.
# So nothing in the process runs at that time, and what is not in memory by then is missing.

# Computes in the finalizer of an object that hangs on the result.
FINALIZER = """
class Late:
    def __init__(self, x, out):
        self.x, self.out = x, out

    def __del__(self):
        torch.clamp_min(self.x, 0, out=self.out)

"""
FINALIZER += module("out = torch.empty_like(x)\nout.late = Late(x, out)\nreturn out")
# Patches the methods by which a result would be read; they compute first.
PATCHED = """
todo = []
def late(name):
    own = getattr(torch.Tensor, name)
    def method(self, *args, **options):
        if todo:
            x, out = todo.pop()
            torch.clamp_min(x, 0, out=out)
        return own(self, *args, **options)
    setattr(torch.Tensor, name, method)

for name in ("contiguous", "cpu", "numpy", "tolist", "view", "reshape", "flatten", "copy_"):
    late(name)
"""
PATCHED += module("out = torch.empty_like(x)\ntodo.append((x, out))\nreturn out")
# A thread computes after the call has returned.
THREAD = "import threading, time\n" + module("""
def work():
    time.sleep(0.05)
    torch.clamp_min(x, 0, out=out)
out = torch.zeros_like(x)
threading.Thread(target=work).start()
return out
""")
# The result's pages cannot be read: a handler of SIGSEGV could compute each at its first read.
PAGES = """
import ctypes, mmap

libc = ctypes.CDLL(None)
""" + module("""
size = x.numel() * 4
memory = mmap.mmap(-1, size)
out = torch.frombuffer(memory, dtype=torch.float32).view(x.shape)
libc.mprotect(ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(size), 0)
return out
""")
# A child process that is left behind computes in shared memory.
ORPHAN = "import os, time\n" + module("""
out = torch.zeros(x.shape).share_memory_()
if os.fork() == 0:
    time.sleep(0.05)
    for i, row in enumerate(x.tolist()):
        for j, value in enumerate(row):
            out[i, j] = value if value > 0 else 0
    os._exit(0)
return out
""")
# Returns x - 0.5 as a tensor of a subclass, which computes at each use by torch.
SUBCLASS = """
class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [torch.relu(a.as_subclass(torch.Tensor)) if type(a) is Late else a for a in args]
        return func(*args, **(kwargs or {}))
"""
SUBCLASS += module("return (x - 0.5).as_subclass(Late)")
# The handler of a timer's signal computes after the call has returned.
SIGNAL = "import signal\n" + module("""
def work(number, frame):
    torch.clamp_min(x, 0, out=out)

out = torch.zeros_like(x)
signal.signal(signal.SIGALRM, work)
signal.setitimer(signal.ITIMER_REAL, 0.02)
return out
""")

# ------------------------------------------ results that are foreseen, or kept from an earlier call
#
# The inputs of each call are new values that follow from no seed of the solution, often at the same
# addresses. So a result that was computed before the request is another call's.

# Draws what get_inputs would draw under the seed that the constructor had.
FORESEEN = module("""
if self.known is None:
    torch.manual_seed(self.seed)
    self.known = torch.relu(torch.rand(32, 16384, device=x.device))
return self.known.clone()
""", "self.seed = torch.initial_seed()\nself.known = None")  # fmt: skip
# A thread computes the result of the same memory again and again, also between the calls. If it
# runs first after the process goes on, the result is right, and was computed while the clock ran.
AHEAD = "import threading, time\nresults = {}\n" + module("""
def work():
    while True:
        results[x.data_ptr()] = torch.relu(x)
        time.sleep(0.001)
if x.data_ptr() not in results:
    results[x.data_ptr()] = torch.relu(x)
    threading.Thread(target=work, daemon=True).start()
return results[x.data_ptr()].clone()
""")
# Finds a result again by the address of its input.
REPLAYS = module("""
key = x.data_ptr(), x.shape
if key not in self.seen:
    self.seen[key] = torch.relu(x)
return self.seen[key].clone()
""", "self.seen = {}")  # fmt: skip
# Computes in three calls, and returns the last result again in all later ones.
COUNTS = module("""
self.calls += 1
if self.calls < 4:
    self.last = torch.relu(x)
return self.last.clone()
""", "self.calls = 0")  # fmt: skip
# Returns the same memory in each call. The referee still holds the results of four calls when it
# calls again, and compares them after that.
REUSES = "kept = {}\n" + module("""
out = kept.setdefault(x.shape, torch.empty_like(x))
return torch.clamp_min(x, 0, out=out)
""")
# Returns COUNT buffers in turn, which is found in the same way.
RING = """
if self.ring is None:
    self.ring = [torch.empty_like(x) for _ in range(COUNT)]
self.calls += 1
return torch.clamp_min(x, 0, out=self.ring[self.calls % COUNT])
"""
RING_INIT = "self.ring, self.calls = None, 0"

# ----------------------------------------------- results with few wrong elements, and false replies
#
# All elements are compared. A process that knows the token of a request may well write a reply
# itself, but the referee reads the memory that the reply describes, and this is stopped then.

# One random element of 524,288 is wrong.
ONE_IN_A_MILLION = "import random\n" + module("""
out = torch.relu(x)
out.view(-1)[random.randrange(out.numel())] += 1
return out
""")
# The last element is wrong, as in a kernel that computes full vectors only.
TAIL = module("out = torch.relu(x)\nout.view(-1)[-1:] = x.reshape(-1)[-1:] - 1\nreturn out")
# Writes a correct reply itself, before anything is computed. The pipe of replies and the token are
# in the frame of the request.
REPLIES = "import json, os\n" + IS_TIMED
REPLIES += module("""
out = torch.empty_like(x)
frame = frame_of_request()
if frame:
    asked = frame.f_locals["request"]
    description = {"type": "Tensor", "shape": list(x.shape), "strides": list(x.stride())}
    description |= {"dtype": "float32", "device": "cpu", "address": x.data_ptr()}
    call = {"nesting": "*", "results": [description]}
    count = len(asked["arguments"]["inputs"])
    reply = {"token": asked["token"], "seconds": [1e-9] * count, "returned": [call] * count}
    os.write(frame.f_locals["replies"], json.dumps(reply).encode() + b"\\n")
return out
""")
# Writes a verdict to every open file. It has no token, so it is no reply.
JUNK = "import os\nfrom contextlib import suppress\n" + module("""
for descriptor in range(3, 64):
    with suppress(OSError):
        os.write(descriptor, b'{"verdict": "correct", "seconds": 1e-9}\\n')
return torch.relu(x)
""")
OF_ANOTHER_CALL = "replays the result|elements"
OVERWRITES = "a later call overwrites an earlier call's result"
AT_RELU = {
    "finalizer": wrong(FINALIZER, LATE),
    "patched_methods": wrong(PATCHED, LATE),
    "thread": wrong(THREAD, LATE),
    "pages": wrong(PAGES, "not in memory when the call has returned"),
    "orphan": wrong(ORPHAN, LATE),
    "subclass": wrong(SUBCLASS, "elements|not a plain tensor"),
    "signal": wrong(SIGNAL, LATE),
    "foreseen": wrong(FORESEEN, OF_ANOTHER_CALL),
    "ahead": (AHEAD, "wrong|correct", f"{OF_ANOTHER_CALL}|exact"),
    "replays": wrong(REPLAYS, OF_ANOTHER_CALL),
    "counts": wrong(COUNTS, OF_ANOTHER_CALL),
    "reuses_its_output": wrong(REUSES, OVERWRITES),
    "ring_of_two": wrong(module(RING.replace("COUNT", "2"), RING_INIT), OVERWRITES),
    "ring_of_four": wrong(module(RING.replace("COUNT", "4"), RING_INIT), OVERWRITES),
    "one_in_a_million": wrong(ONE_IN_A_MILLION, "1 of 524,288 elements"),
    "tail": wrong(TAIL, "1 of 524,288 elements"),
    "replies": (
        REPLIES,
        "wrong|error",
        # The reply describes memory of the CPU, also on a GPU.
        "not new memory|sends a reply of its own|output's device is cpu",
    ),
    "junk": error(JUNK, "sends a reply of its own"),
    "returns_its_input": wrong(module("return x"), "returns (a copy of )?its input"),
    "copies_its_input": wrong(module("return x.clone()"), "returns a copy of its input 0"),
    "in_place": wrong(module("return x.relu_()"), "changes its input|returns its input"),
    "changes_its_input": wrong(module("y = torch.relu(x)\nx.zero_()\nreturn y"), "changes its inp"),
    "unwritten": wrong(module("return torch.empty_like(x)"), "has not written|returns zeros"),
    "zeros": wrong(module("return torch.zeros_like(x)"), "returns zeros"),
    "first_row": wrong(module("return torch.relu(x[:1].expand(x.shape).clone())"), "elements"),
    "exits": error("import os\nprint('all correct', flush=True)\nos._exit(0)\n", "exits with"),
    "crashes": error(module("import ctypes\nctypes.string_at(0)"), "SIGSEGV"),
}
CPU_ONLY = {"pages", "orphan"}  # they need results in a CPU's memory

# ---------------------------------------------------- results that are right for other parameters
#
# Another process writes new values into the parameters before each round.

SIGNS_INIT = "self.w = nn.Parameter(torch.randn(256, 192))"
SIGNS = reference("return x @ torch.sign(self.w)", "[torch.randn(16, 256)]", SIGNS_INIT)
# Computes the signs of the weight in its first forward, and keeps them.
PACKED = """
if self.signs is None:
    self.signs = torch.sign(self.w.detach()).clone()
return x @ self.signs
"""
AT_SIGNS = {
    "packed": wrong(module(PACKED, SIGNS_INIT + "\nself.signs = None"), "other parameters"),
    "right": correct(module("return x @ torch.sign(self.w)", SIGNS_INIT)),
}

# ------------------------------------------------------------ results whose elements share memory
#
# They save most of the writes. The referee finds them by their strides.

MEANS = reference("return torch.zeros_like(x) + x.mean(1, keepdim=True)", "[torch.rand(64, 256)]")
# Has strides of 0 in training steps alone.
STEP_EXPANDS = """
y = x.mean(1, keepdim=True).expand(x.shape)
return y if torch.is_grad_enabled() else y.contiguous()
"""
# Each row begins one element after the row before it.
OVERLAPS = """
memory = x.mean().repeat(x.shape[0] + x.shape[1])
return memory.as_strided(x.shape, (1, 1))
"""
EXPANDS = "return x.mean(1, keepdim=True).expand(x.shape)"
SHARED = r"elements of its result share memory \(strides \[1, 0\]\), the reference's do not"
AT_MEANS = {
    "expands": wrong(module(EXPANDS), SHARED),
    "step_expands": wrong(module(STEP_EXPANDS), "result 0, recorded: elements of its result"),
    "overlaps": wrong(module(OVERLAPS), r"share memory \(strides \[1, 1\]\)"),
    "columns": correct(module("return (x.t() * 0 + x.mean(1)).t()"), "training step"),
}
# Elements may share memory if the reference's do.
EXPANDED = reference(EXPANDS, "[torch.rand(64, 256)]")
AT_EXPANDED = {
    "same": correct(module(EXPANDS), "training step"),
    "whole": correct(module(EXPANDS + ".contiguous()"), "training step"),
}

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


def in_timed_forwards(cheat: str, right: str, init: str = "") -> str:
    """Return the text of a module that runs the lines `cheat` in timed forwards, else `right`."""
    body = indent(cheat.strip(), "    ")
    forward = f"if is_timed() and not torch.is_grad_enabled():\n{body}\n{right.strip()}"
    return IS_TIMED + module(forward, init)


ZEROS_LATER = in_timed_forwards("return x.new_zeros(512, 1024)", WRAPS_FORWARD, WEIGHT)
PEAKS_LATER = in_timed_forwards("return torch.where(x.abs() < 0.2, 1 / x, 0)", "return 1 / x")
AT_WRAPS = {"zeros_later": wrong(ZEROS_LATER, "a timed call was wrong: mean error")}
AT_PEAKS = {"peaks_later": wrong(PEAKS_LATER, "a timed call was wrong: mean error")}

# ------------------------------------------------------------------ stale parameters and gradients
#
# Parameters and buffers change before each round. Gradients are compared in two steps before the
# times, and in all timed steps.

LINEAR_INIT = """
self.fc = nn.Linear(256, 192)
self.register_buffer("scale", torch.rand(192) + 0.5)
"""
LINEAR = reference(
    "return torch.relu(self.fc(x)) * self.scale", "[torch.rand(64, 256)]", LINEAR_INIT
)
# Keeps a copy of the weight, or of the buffer.
FOLDED = LINEAR_INIT + "self.w = self.fc.weight.detach().clone()\n"
KEPT_BUFFER = LINEAR_INIT + "self.kept = self.scale.clone()\n"
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
# Multiplies in bfloat16.
HALF_PRECISION = """
weight, bias = self.fc.weight.bfloat16(), self.fc.bias.bfloat16()
return nn.functional.linear(x.bfloat16(), weight, bias).relu().float() * self.scale
"""
AT_LINEAR = {
    "folds": wrong(
        module(
            "return nn.functional.linear(x, self.w.to(x), self.fc.bias).relu() * self.scale", FOLDED
        ),
        "answers with old parameters|beyond the error budget",
    ),
    "keeps_a_buffer": wrong(
        module("return self.fc(x).relu() * self.kept.to(x)", KEPT_BUFFER),
        "answers with old parameters|beyond the error budget",
    ),
    "keeps_gradients": wrong(KEEPS_GRADIENTS, "gradient of"),
    "wrong_gradients_later": wrong(LATER_WRONG, "gradient of"),
    "changes_a_parameter": wrong(
        module(
            "self.fc.weight.data[0, 0] += 1\nreturn self.fc(x).relu() * self.scale", LINEAR_INIT
        ),
        "changes its parameter fc.weight",
    ),
    "has_no_parameters": wrong(module("return x.new_zeros(64, 192)"), "state is not the ref"),
    "half_precision": wrong(module(HALF_PRECISION, LINEAR_INIT), "lower precision than eager's"),
    "right": correct(RIGHT, "training step"),
}

# By name: the text of the reference, and the table of the files that are graded on it.
PROBLEMS = {
    "relu": (RELU, AT_RELU),
    "signs": (SIGNS, AT_SIGNS),
    "means": (MEANS, AT_MEANS),
    "expanded": (EXPANDED, AT_EXPANDED),
    "wraps": (WRAPS, AT_WRAPS),
    "peaks": (PEAKS, AT_PEAKS),
    "linear": (LINEAR, AT_LINEAR),
}
QUICK = {"signs"}  # graded even without -m slow
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROBLEMS]


@pytest.mark.parametrize("name", NAMES)
def test_cheats_get_their_verdicts(name, device, tmp_path):
    problem, table = PROBLEMS[name]
    if device == "cuda":
        table = {file: row for file, row in table.items() if file not in CPU_ONLY}
    grade(problem, table, tmp_path, device=device)


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
        "later wrong": wrong(SIGN_LATER_WRONG + module("return Own.apply(x)"), "gradient of x"),
        "right": correct(module("return torch.sign(x)"), "training step"),
    }
    grade(SIGN, table, tmp_path, device=device)


# --------------------------------------------- the memory of inputs and parameters, in timed calls

TRANSPOSED = reference("return x.t().contiguous()", "[torch.randn(256, 256)]")
# Maps the shared memory a second time, and returns views of the inputs there. The referee fills the
# inputs with NaN before it reads timed results.
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


@pytest.mark.slow
def test_a_view_of_an_input_through_a_second_mapping_is_wrong(tmp_path):
    table = {
        "aliases": wrong(ALIASES, "a timed call was wrong: .* got nan"),
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
    monkeypatch.setattr(turns, "CACHED_BYTES", -1)
    time_request = timed_forwards.time_request
    are_whole = []

    def time_and_look(bench, timed_call, calls, *args):
        are_whole.append(all(region.is_unchanged() for region in bench.memory.inputs[:calls]))
        return time_request(bench, timed_call, calls, *args)

    monkeypatch.setattr(timed_forwards, "time_request", time_and_look)
    grade(RELU, {"writes_late": correct(WRITES_LATE)}, tmp_path)
    assert len(are_whole) > 3  # there were later turns than those of the first round
    assert all(are_whole)


NORM = "self.norm = nn.BatchNorm1d(64)"
NORM_FORWARD = "return self.norm(x)"


@pytest.mark.slow
def test_buffers_that_a_forward_changes_are_written_again_before_each_turn(tmp_path, monkeypatch):
    """In training mode, a norm changes its statistics, which are buffers."""
    rewrite, time_request = timed_forwards.rewrite_small_memory, timed_forwards.time_request
    gradings = []
    changed_before_rewrite = []
    changed_before_turn = []

    def changed(states: list[State]) -> list[str]:
        return [name for state in states for name in state.changed_parameters(buffers=set())]

    def look_and_rewrite(grading):
        gradings.append(grading)
        changed_before_rewrite.append(changed([grading.state]))
        rewrite(grading)

    def look_and_time(bench, *arguments):
        states = [gradings[-1].state, *(eager.state for eager in bench.eager.processes)]
        changed_before_turn.append(changed(states))
        return time_request(bench, *arguments)

    monkeypatch.setattr(timed_forwards, "rewrite_small_memory", look_and_rewrite)
    monkeypatch.setattr(timed_forwards, "time_request", look_and_time)
    problem = reference(NORM_FORWARD, "[torch.rand(32, 64)]", NORM)
    grade(problem, {"plain": correct(module(NORM_FORWARD, NORM))}, tmp_path)
    assert any(changed_before_rewrite)
    assert not any(changed_before_turn), changed_before_turn


# -------------------------------------------------------- copies of results that arrive too late

# Where results are copied, leaves out the copies of timed calls.
LATE_COPIES = IS_TIMED
LATE_COPIES += """
own_copy = torch.Tensor.copy_

def copy(self, source, *args):
    return self if is_timed() else own_copy(self, source, *args)

torch.Tensor.copy_ = copy
"""
LATE_COPIES += module("return torch.relu(x)")


@pytest.mark.slow
def test_copies_that_arrive_after_the_reply_are_wrong(tmp_path, monkeypatch):
    """The test plays a GPU: it does the copies as soon as some elements have been read."""
    monkeypatch.setattr(grading, "can_read", lambda *_: False)
    read = EarlyElements.read

    def read_before_copies(early, reply):
        read(early, reply)
        for call, region in zip(reply["returned"], early._bench.memory.outputs, strict=False):
            for copy, description in zip(region.tensors, call["results"], strict=False):
                if description["shape"] != list(copy.shape):  # an empty call's
                    continue
                with suppress(UnreadableError):  # eager's memory may be hidden; it copies in time
                    copy.copy_(early._reader.whole(description))

    monkeypatch.setattr(EarlyElements, "read", read_before_copies)
    table = {
        "late": wrong(LATE_COPIES, "not complete when its clock stops"),
        "plain": correct(module("return torch.relu(x)")),
    }
    grade(RELU, table, tmp_path)
