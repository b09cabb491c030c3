"""Cheats whose results are computed when somebody reads them, or after the reply.

The process is stopped before the referee reads, and the referee reads its memory from outside. So
nothing in the process runs at that time, and what is not in memory by then is missing.
"""

from contextlib import suppress

import pytest

from referee.contestants.reading import Reader, UnreadableError
from referee.rounds import timed_requests
from referee.rounds.early_elements import EarlyElements
from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import IS_TIMED, RELU, correct, module, wrong

# The cheats fill their result with 7 before they return it, and compute later. On a GPU the referee
# may see that some elements have changed since the call returned.
SEVENS = "524,288 of 524,288 elements .* got 7, expected|its result is not complete"

# Computes in the finalizer of an object that hangs on the result.
FINALIZER = """
class Late:
    def __init__(self, x, out):
        self.x, self.out = x, out

    def __del__(self):
        torch.clamp_min(self.x, 0, out=self.out)

"""
FINALIZER += module("out = torch.full_like(x, 7)\nout.late = Late(x, out)\nreturn out")
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
PATCHED += module("out = torch.full_like(x, 7)\ntodo.append((x, out))\nreturn out")
# A thread computes after the call has returned.
THREAD = "import threading, time\n" + module("""
def work():
    time.sleep(0.05)
    torch.clamp_min(x, 0, out=out)
out = torch.full_like(x, 7)
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
out = torch.full(x.shape, 7.0).share_memory_()
if os.fork() == 0:
    time.sleep(0.05)
    for i, row in enumerate(x.tolist()):
        for j, value in enumerate(row):
            out[i, j] = value if value > 0 else 0
    os._exit(0)
return out
""")
# Returns x - 0.5 as a tensor of a subclass. Each of torch's functions that is called with it
# computes the ReLU of x first.
SUBCLASS = """
class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [
            torch.relu(a.as_subclass(torch.Tensor) + 0.5) if type(a) is Late else a for a in args
        ]
        return func(*args, **(kwargs or {}))
"""
SUBCLASS += module("return (x - 0.5).as_subclass(Late)")
# The handler of a timer's signal computes after the call has returned.
SIGNAL = "import signal\n" + module("""
def work(number, frame):
    torch.clamp_min(x, 0, out=out)

out = torch.full_like(x, 7)
signal.signal(signal.SIGALRM, work)
signal.setitimer(signal.ITIMER_REAL, 0.02)
return out
""")
AT_RELU = {
    "finalizer": wrong(FINALIZER, SEVENS),
    "patched_methods": wrong(PATCHED, SEVENS),
    "thread": wrong(THREAD, SEVENS),
    "pages": wrong(PAGES, "cannot be read when the call has returned"),
    "orphan": wrong(ORPHAN, SEVENS),
    # Its memory is read, which holds x - 0.5.
    "subclass": wrong(SUBCLASS, "524,288 of 524,288 elements"),
    "signal": wrong(SIGNAL, SEVENS),
    "unwritten": wrong(module("return torch.empty_like(x)"), "has not written|returns zeros"),
}
CPU_ONLY = {"pages", "orphan"}  # they need results in a CPU's memory


@pytest.mark.parametrize("table", quick_and_slow(AT_RELU, "finalizer", "unwritten"))
def test_results_that_are_computed_late_are_wrong(table, device, tmp_path):
    if device == "cuda":
        table = {name: row for name, row in table.items() if name not in CPU_ONLY}
    grade(RELU, table, tmp_path, device=device)


# Where results are copied, leaves out the copies of timed calls.
LATE_COPIES = IS_TIMED
LATE_COPIES += """
own_copy = torch.Tensor.copy_

def copy(self, source, *args):
    return self if is_timed() else own_copy(self, source, *args)

torch.Tensor.copy_ = copy
"""
LATE_COPIES += module("return torch.relu(x)")


class LateCopies(EarlyElements):
    """Plays a GPU: it does the copies as soon as some elements have been read."""

    def __init__(self, resources, contestant):
        super().__init__(resources, contestant)
        self.resources, self.reader = resources, contestant.reader

    def read(self, reply):
        super().read(reply)
        for call, region in zip(reply["returned"], self.resources.memory.outputs, strict=False):
            for copy, description in zip(region.tensors, call["results"], strict=False):
                if description["shape"] != list(copy.shape):  # an empty call's
                    continue
                with suppress(UnreadableError):  # eager's memory may be hidden; it copies in time
                    copy.copy_(self.reader.read_whole(description))


@pytest.mark.slow
def test_copies_that_arrive_after_the_reply_are_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(Reader, "can_read", lambda *_: False)
    monkeypatch.setattr(timed_requests, "EarlyElements", LateCopies)
    table = {
        "late": wrong(LATE_COPIES, "not complete when its clock stops"),
        "plain": correct(module("return torch.relu(x)")),
    }
    grade(RELU, table, tmp_path)
