"""Tests of cheats: files that try to seem right, or faster than they are.

The files of WRONG and OF_PARAMETERS return wrong results. Those of NO_GAIN return right ones, and
try to be timed as faster: they are correct, and gain nothing. Values and times alone decide.
"""

from contextlib import suppress
from statistics import median

import pytest
from graded import grade
from texts import correct, error, module, reference, wrong

from referee import grading
from referee.early_elements import EarlyElements
from referee.reading import UnreadableError

pytestmark = pytest.mark.slow

RELU = reference("return torch.relu(x)", "[torch.rand(32, 16384)]")
LINEAR_INIT = """
self.fc = nn.Linear(256, 192)
self.register_buffer("scale", torch.rand(192) + 0.5)
"""
LINEAR = reference(
    "return torch.relu(self.fc(x)) * self.scale", "[torch.rand(64, 256)]", LINEAR_INIT
)

# ----------------------------------------------- results that are computed when somebody reads them

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
# A thread does the work after the call has returned.
THREAD = "import threading, time\n" + module("""
def work():
    time.sleep(0.05)
    torch.clamp_min(x, 0, out=out)
out = torch.zeros_like(x)
threading.Thread(target=work).start()
return out
""")
# A thread holds the interpreter's lock, so that the reply is late, and works meanwhile.
LOCK = "import ctypes, threading\n" + module("""
def work():
    ctypes.PyDLL(None).usleep(30000)  # without giving the lock back
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
# A child process that is left behind does the work in shared memory.
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
SUBCLASS = """
class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [torch.relu(a.as_subclass(torch.Tensor)) if type(a) is Late else a for a in args]
        return func(*args, **(kwargs or {}))
"""
SUBCLASS += module("return (x - 0.5).as_subclass(Late)")
MODE = """
from torch.overrides import TorchFunctionMode

class Late(TorchFunctionMode):
    todo = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.todo:
            (x, out), self.todo = self.todo, ()
            torch.clamp_min(x, 0, out=out)
        return func(*args, **(kwargs or {}))

mode = Late()
mode.__enter__()
"""
MODE += module("out = torch.empty_like(x)\nmode.todo = x, out\nreturn out")
SIGNAL = "import signal\n" + module("""
def work(number, frame):
    torch.clamp_min(x, 0, out=out)

out = torch.zeros_like(x)
signal.signal(signal.SIGALRM, work)
signal.setitimer(signal.ITIMER_REAL, 0.02)
return out
""")

# ------------------------------------------ results that are foreseen, or kept from an earlier call

# Draws what get_inputs would draw under the seed that the constructor had.
FORESEEN = module(
    "return self.known.clone()",
    "torch.manual_seed(torch.initial_seed())\nself.known = torch.relu(torch.rand(32, 16384))",
)
# A thread computes the result of the same memory again and again, also between the calls.
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
REPLAYS = module("""
key = x.data_ptr(), x.shape
if key not in self.seen:
    self.seen[key] = torch.relu(x)
return self.seen[key].clone()
""", "self.seen = {}")  # fmt: skip
COUNTS = module("""
self.calls += 1
if self.calls < 4:
    self.last = torch.relu(x)
return self.last.clone()
""", "self.calls = 0")  # fmt: skip
REUSES = "kept = {}\n" + module("""
out = kept.setdefault(x.shape, torch.empty_like(x))
return torch.clamp_min(x, 0, out=out)
""")

# ----------------------------------------------- results with few wrong elements, and false replies

ONE_IN_A_MILLION = "import random\n" + module("""
out = torch.relu(x)
out.view(-1)[random.randrange(out.numel())] += 1
return out
""")
TAIL = module("out = torch.relu(x)\nout.view(-1)[-1:] = x.reshape(-1)[-1:] - 1\nreturn out")
# Finds the pipe of replies and the token in the calling frames, and writes a reply itself.
REPLIES = "import json, os, sys\n" + module("""
out = torch.empty_like(x)
frame = sys._getframe()
while frame and "request" not in frame.f_locals:
    frame = frame.f_back
if frame:
    description = {"type": "Tensor", "shape": list(x.shape), "strides": list(x.stride())}
    description |= {"dtype": "float32", "device": "cpu", "address": x.data_ptr()}
    call = {"structure": "*", "results": [description]}
    count = len(frame.f_locals["request"]["arguments"]["inputs"])
    reply = {"token": frame.f_locals["request"]["token"], "seconds": [1e-9] * count}
    reply["calls"] = [call] * count
    os.write(frame.f_locals["replies"], json.dumps(reply).encode() + b"\\n")
return out
""")
JUNK = "import os\nfrom contextlib import suppress\n" + module("""
for descriptor in range(3, 64):
    with suppress(OSError):
        os.write(descriptor, b'{"verdict": "correct", "seconds": 1e-9}\\n')
return torch.relu(x)
""")
WRONG = {
    "finalizer": wrong(FINALIZER),
    "patched_methods": wrong(PATCHED),
    "thread": wrong(THREAD),
    "pages": wrong(PAGES, "not in memory when the call has returned"),
    "orphan": wrong(ORPHAN),
    "subclass": wrong(SUBCLASS),
    "signal": wrong(SIGNAL),
    "foreseen": wrong(FORESEEN),
    "ahead": wrong(AHEAD),
    "replays": wrong(REPLAYS),
    "counts": wrong(COUNTS),
    "reuses_its_output": wrong(REUSES, "a later call overwrites an earlier call's result"),
    "one_in_a_million": wrong(ONE_IN_A_MILLION, "1 of 524,288 elements"),
    "tail": wrong(TAIL, "1 of 524,288 elements"),
    "replies": (REPLIES, "wrong|error", ""),
    "junk": error(JUNK, "sends a reply of its own"),
    "returns_its_input": wrong(module("return x"), "returns (a copy of )?its input"),
    "copies_its_input": wrong(module("return x.clone()"), "returns a copy of its input 0"),
    "in_place": wrong(module("return x.relu_()"), "changes its input|returns its input"),
    "changes_its_input": wrong(module("y = torch.relu(x)\nx.zero_()\nreturn y"), "changes its inp"),
    "unwritten": wrong(module("return torch.empty_like(x)"), "has not written|returns zeros"),
    "zeros": wrong(module("return torch.zeros_like(x)"), "returns zeros"),
    "first_row": wrong(module("return torch.relu(x[:1].expand(x.shape).clone())")),
    "exits": error("import os\nprint('all correct', flush=True)\nos._exit(0)\n", "exits with"),
    "crashes": error(module("import ctypes\nctypes.string_at(0)"), "SIGSEGV"),
}
# `pages` and `orphan` need results in a CPU's memory. On a GPU the thread of `ahead` works while
# the clock runs: the results are right, and nothing is gained.
CPU_ONLY = {"pages", "orphan", "ahead"}


def test_wrong(device, tmp_path):
    table = WRONG
    if device == "cuda":
        table = {name: row for name, row in WRONG.items() if name not in CPU_ONLY}
    grade(RELU, table, tmp_path, device=device)


# Where results are copied, leaves out the copies of timed calls: only others poison free memory.
LATE_COPIES = """
import sys

own_copy = torch.Tensor.copy_

def copy(self, source, *args):
    frame = sys._getframe(1)
    while frame and "request" not in frame.f_locals:
        frame = frame.f_back
    if frame and "poison" not in frame.f_locals["request"]["arguments"]:
        return self
    return own_copy(self, source, *args)

torch.Tensor.copy_ = copy
"""
LATE_COPIES += module("return torch.relu(x)")


def test_copies_that_arrive_after_the_reply(tmp_path, monkeypatch):
    """The test plays a GPU: it does the copies as soon as some elements have been read."""
    monkeypatch.setattr(grading, "can_read", lambda *_: False)
    read = EarlyElements.read

    def read_before_copies(early, reply):
        read(early, reply)
        for call, region in zip(reply["calls"], early._bench.outputs, strict=False):
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


FOLDED = LINEAR_INIT + "self.w = self.fc.weight.detach().clone()\n"
KEPT_BUFFER = LINEAR_INIT + "self.kept = self.scale.clone()\n"
OWN = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale):
        y = torch.relu(nn.functional.linear(x, weight, bias))
        ctx.save_for_backward(x, weight, y, scale)
        return y * scale

    @staticmethod
    def backward(ctx, g):
        x, weight, y, scale = ctx.saved_tensors
        g = g * scale * (y > 0)
        HERE
        return g @ weight, g.t() @ x, g.sum(0), None

kept = []
"""
KEEPS_G = OWN.replace("HERE", "kept or kept.append(g)\n        g = kept[0]")
# Right in the first three steps, while gradients are compared before the times, and wrong later.
LATER_WRONG = OWN.replace("HERE", "kept.append(0)\n        g = g if len(kept) <= 3 else 1.2 * g")
APPLY = module("return Own.apply(x, self.fc.weight, self.fc.bias, self.scale)", LINEAR_INIT)
OF_PARAMETERS = {
    "folds": wrong(
        module(
            "return nn.functional.linear(x, self.w.to(x), self.fc.bias).relu() * self.scale", FOLDED
        ),
        "answers with old parameters|beyond the error budget",
    ),
    "keeps_a_buffer": wrong(module("return self.fc(x).relu() * self.kept.to(x)", KEPT_BUFFER)),
    "keeps_a_gradient": wrong(KEEPS_G + APPLY, "gradient of"),
    "wrong_gradients_later": wrong(LATER_WRONG + APPLY, "gradient of"),
    "has_no_parameters": wrong(module("return x.new_zeros(64, 192)"), "state is not the ref"),
    "half_precision": wrong(
        module("return self.fc.bfloat16()(x.bfloat16()).relu().float() * self.scale", LINEAR_INIT),
    ),
    "right": correct(OWN.replace("HERE", "pass") + APPLY, "training step"),
}


def test_parameters_buffers_and_gradients(device, tmp_path):
    grade(LINEAR, OF_PARAMETERS, tmp_path, device=device)


# -------------------------------------------------------------------------------------------- times

SLEEP = 0.02  # s, that each call really takes
CLOCKS = """
import sys, time
now = time.perf_counter
for module in [m for n, m in list(sys.modules.items()) if n != __name__]:
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if value is now:
            setattr(module, name, lambda: now() / 100)
""" + module(f"end = now() + {SLEEP}\nwhile now() < end:\n    pass\nreturn torch.relu(x)")
SPINS = """
import threading, zlib
def spin():
    while True:
        zlib.crc32(bytes(1 << 24))  # without the interpreter's lock, for which calls would wait

threading.Thread(target=spin, daemon=True).start()
"""
SIBLINGS = """
import os, signal
from contextlib import suppress
for name in filter(str.isdecimal, os.listdir("/proc")):
    with suppress(OSError, ValueError):
        parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
        if int(parent) == os.getppid() and int(name) != os.getpid():
            HERE
"""
PLAIN = module("return torch.relu(x)")
NO_GAIN = {
    "hides_time": correct(CLOCKS),
    "thread_with_the_lock": (LOCK, "correct|wrong", ""),  # right if it is done before the reply
    "mode": correct(MODE),
    "spins": correct(SPINS + PLAIN),
    "stops_eager": correct(SIBLINGS.replace("HERE", "os.kill(int(name), signal.SIGSTOP)") + PLAIN),
    "demotes_eager": correct(
        SIBLINGS.replace("HERE", "os.setpriority(os.PRIO_PROCESS, int(name), 19)") + PLAIN
    ),
    "slows_torch": correct("import time\nfast = torch.relu\n"
        "torch.relu = lambda x: (time.sleep(0.01), fast(x))[1]\n" + module("return fast(x)")),
    "plain": correct(PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("walls", [True, False])
def test_no_gain(device, walls, tmp_path):
    records = grade(RELU, NO_GAIN, tmp_path, device=device, walls=walls)
    for run in records["hides_time"]["runs"] + records["thread_with_the_lock"]["runs"]:
        assert min(run["forward"]["seconds"]["ModelNew"]) >= 0.8 * SLEEP


SHORT = reference("return torch.relu(x)", "[torch.rand(8, 64)]")
# Its clock says PART of each call's time. A call of SHORT takes less time than empty requests vary
# by, so the referee's own clock cannot tell.
FALSE = """
from referee.child import clock

def patch(kind):
    own = kind.seconds
    kind.seconds = lambda self: [PART * seconds for seconds in own(self)]

patch(clock.CpuClock)
patch(clock.CudaClock)
"""
FALSE += PLAIN


def test_a_false_clock_gains_nothing_in_short_calls(device, tmp_path):
    """If the referee's clock cannot tell, the line says that only the file's own clock says so."""
    table = {
        "no_time": correct(FALSE.replace("PART", "1e-5"), "its clock is false.*training step"),
        "a_third": correct(FALSE.replace("PART", "0.3"), "training step"),
        "plain": correct(PLAIN, "^(?!.*clock is false).*training step"),
    }
    records = grade(SHORT, table, tmp_path, trials=9, device=device)
    [no_time], [third], [honest] = (records[name]["runs"] for name in table)
    assert no_time["time"] != "faster"
    assert no_time["step"]["summary"]["step"][0]["said"] != "faster"
    for times, honest_times in zip(_seconds_of(no_time), _seconds_of(honest), strict=True):
        assert median(times["ModelNew"]) > median(honest_times["eager"])
    is_noted = any("only its own clock" in note for note in records["a_third"]["notes"])
    assert is_noted or third["time"] != "faster"
    own = honest["forward"]["seconds"]["ModelNew"]
    assert median(own) < 5 * median(honest["forward"]["seconds"]["eager"])


def _seconds_of(run: dict) -> list[dict]:
    """The seconds of a run's forwards, and of its training steps, by contestant."""
    return [run["forward"]["seconds"], run["step"]["seconds"]["step"]]


@pytest.mark.parametrize("walls", [True, False])
def test_eager_and_the_server_start_again(device, walls, tmp_path):
    kill = SIBLINGS.replace("HERE", "os.kill(int(name), signal.SIGKILL)") + PLAIN
    table = {"kills": (kill, "correct|error", ""), "next": correct(PLAIN)}
    grade(RELU, table, tmp_path, device=device, walls=walls)


def test_a_rivals_file_is_read_before_anybody_runs(tmp_path):
    rewrites = f"open({str(tmp_path / 'rival.py')!r}, 'w').write('x = 1')\n" + PLAIN
    grade(RELU, {"rewrites": correct(rewrites), "rival": correct(PLAIN)}, tmp_path)
