"""Cheats at this project's two problems, as tables of files with the verdicts that they must get.

A comment says how a cheat works, then comes the text, and then its row in a table. Most texts are
the body of `forward`, of which `module` of referee/testing/texts.py makes a file. For example,
module("return x.clone()") is

    class ModelNew(nn.Module):
        def forward(self, *inputs):
            x = inputs[0]
            return x.clone()

The row has the verdict and a pattern of the reason: `wrong(text, reason)`, `error(text, reason)` or
`correct(text)`. LATE is the pattern of the reasons for a result that is computed too late. A cheat
that gains nothing is correct if its results are right.

`test_solutions.py` grades all files, and `test_reference_files.py` some again, against reference
files. Cheats at other references are in `referee/tests/test_cheats*.py`.
"""

from referee.testing.texts import LATE, LATE_MODE, Row, Table, correct, error, module, wrong
from tests.grading.honest import PLAIN, linear

# The cheats at ReLU, at Linear, and at ReLU on a GPU alone.
RELU: Table = {}
LINEAR: Table = {}
ON_GPU: Table = {}

# Defines a function that finds the referee's clock among its callers.
IS_TIMED = """
import sys

def is_timed():
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename.endswith("clock.py"):
            return True
    return False
"""


def when_timed(forward: str) -> str:
    """Return the text of a ReLU that is right except when it is timed; `forward` is used then."""
    return IS_TIMED + module(f"if not is_timed():\n    return torch.relu(x)\n{forward}")


def correct_or_wrong(text: str) -> Row:
    """Return the row of a file whose results are at times right when the referee reads them.

    It depends on the device or on torch.
    """
    return text, "correct|wrong", ""


# -------------------------------------------------- results that are wrong, stale or less accurate
#
# Each result is compared, whole, also in timed calls, for inputs and parameters that are new.

# Returns its input, or a copy of it, or computes ReLU in its memory.
RELU["returns_input"] = wrong(module("return x"), "returns its input")
RELU["copies_input"] = wrong(module("return x.clone()"), "returns a copy of its input")
RELU["in_place"] = wrong(module("return x.relu_()"), "changes its input|returns its input")

# Sets its input to zeros after it has used it. The input is compared with what was written.
CHANGES = "out = torch.relu(x)\nx.zero_()\nreturn out"
RELU["changes_input"] = wrong(module(CHANGES), "changes its input")

# Returns memory that it has not written. It may have an earlier result.
STALE = "return torch.empty_like(x)"
RELU["stale_memory"] = wrong(module(STALE), "returns memory that it has not written|returns zeros")

# Computes the first row alone, and repeats it.
FIRST_ROW = "x = x[:1].expand(x.shape) if x.dim() == 2 else x\nreturn torch.relu(x.clone())"
RELU["first_row_only"] = wrong(module(FIRST_ROW), "elements differ")

# Returns zeros.
ZEROS = "return x.new_zeros(*x.shape[:-1], self.linear.out_features)"
LINEAR["returns_zeros"] = wrong(linear(ZEROS), "returns zeros")

# Leaves out the bias.
NO_BIAS = "return torch.relu(x @ self.linear.weight.T) / self.divisor"
LINEAR["drops_bias"] = wrong(linear(NO_BIAS), "leaves out the bias")

# Computes no ReLU of the last elements where the length is no multiple of 4.
TAILS = """
out = torch.relu(x)
tail = x.numel() % 4
if tail and x.is_contiguous():
    out.view(-1)[-tail:] = x.reshape(-1)[-tail:]
return out
"""
RELU["skips_tails"] = wrong(module(TAILS), "elements differ")

# Computes the timed shape alone. Other shapes are compared before it.
ONE_SHAPE = "assert x.shape[-1] > 100_000\nreturn torch.relu(x)"
RELU["tested_shape_only"] = error(module(ONE_SHAPE), "AssertionError")

# Keeps each result, and finds it again by a key: by ADDRESS, or by some ELEMENTS. New inputs have
# the same address as earlier ones, and some have these elements of an earlier one.
REPLAY = """
if key not in self.seen:
    self.seen[key] = torch.relu(x)
return self.seen[key].clone()
"""
ADDRESS = "self.seen[id(x)] = x\nkey = x.data_ptr(), x._version, x.shape, x.stride(), x.dtype\n"
ELEMENTS = "key = x.shape, x.stride(), x.dtype, tuple(x.reshape(-1)[:4].tolist())\n"
EARLIER = "replays the result of an earlier call"
RELU["replays_by_address"] = wrong(module(ADDRESS + REPLAY, "self.seen = {}"), EARLIER)
RELU["replays_by_fingerprint"] = wrong(module(ELEMENTS + REPLAY, "self.seen = {}"), EARLIER)

# Computes the first calls of the timed size, and then returns the last result again.
COUNTS = """
self.calls += x.dim() == 2 and x.shape[1] > 100_000
if self.calls < 4 or x.shape != self.last.shape:
    self.last = torch.relu(x)
return self.last.clone()
"""
RELU["counts_calls"] = wrong(module(COUNTS, "self.calls = 0"), "elements")

# Keeps its output of the timed size, and computes only the rows that look new.
REUSES = "kept = {}\n" + module("""
if x.dim() != 2 or x.shape[1] < 100_000:
    return torch.relu(x)
some = x[:, ::4099].clone()
old, out = kept.get(x.data_ptr()) or (some, torch.relu(x))
for row in (some != old).any(1).nonzero().flatten():
    out[row] = torch.relu(x[row])
kept[x.data_ptr()] = some, out
return out
""")
RELU["reuses_its_output"] = wrong(REUSES, "overwrites an earlier|elements")

# Computes ReLU of all tensors that are alive in the first call; later calls look results up. Inputs
# of later requests are not drawn yet.
ALL_AT_ONCE = "import gc\ndone = {}\n" + module("""
if x.dim() != 2 or x.shape[1] < 100_000:
    return torch.relu(x)
for other in [] if done else gc.get_objects():
    if type(other) is torch.Tensor and other.shape == x.shape:
        done[other.data_ptr()] = torch.relu(other)
return done.setdefault(x.data_ptr(), torch.relu(x)).clone()
""")
RELU["batch_once"] = wrong(ALL_AT_ONCE, "replays the result|elements")

# Folds the division into a copy of the weights, which does not follow when they change.
FOLDING_INIT = """
self.linear = nn.Linear(i, o)
self.divisor = d
self.register_buffer("weight", self.linear.weight.detach().T / d, persistent=False)
self.register_buffer("bias", self.linear.bias.detach() / d, persistent=False)
"""
FOLDED = linear("return torch.relu(x @ self.weight + self.bias)", FOLDING_INIT)
LINEAR["folds_weights"] = wrong(FOLDED, "old parameters|elements")

# Multiplies in bfloat16.
IN_HALF = """
own = self.linear
z = nn.functional.linear(x.bfloat16(), own.weight.bfloat16(), own.bias.bfloat16())
return torch.relu(z.float()) / self.divisor
"""
LINEAR["half_precision"] = wrong(linear(IN_HALF), "lower precision than ")

# Rounds operands to TF32 when it is timed. The results of timed calls are compared, too.
ROUNDS = """
weight, half, mask = self.linear.weight, 1 << 12, -(1 << 13)
if is_timed():
    bits = [t.contiguous().view(torch.int32) for t in (x, weight)]
    x, weight = (((t + half) & mask).view(torch.float32) for t in bits)
return torch.relu(nn.functional.linear(x, weight, self.linear.bias)) / self.divisor
"""
LINEAR["tf32_when_timed"] = wrong(IS_TIMED + linear(ROUNDS), "lower precision than |elements")

# Lets torch use TF32.
SWITCHES = 'torch.set_float32_matmul_precision("high")\n'
ON_GPU["switches_tf32"] = correct_or_wrong(SWITCHES + PLAIN)

# -------------------------------------------------------------- results that are computed too late
#
# The process is stopped before the referee reads its memory, and the clock runs until then.

# Returns x as a tensor that computes ReLU when torch uses it. The referee reads its memory.
LAZY = """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [torch.relu(a.as_subclass(torch.Tensor)) if type(a) is Lazy else a for a in args]
        return func(*args, **(kwargs or {}))
"""
LAZY += module("return x.as_subclass(Lazy)")
RELU["lazy_subclass"] = correct_or_wrong(LAZY)

# Returns a plain tensor, and leaves a mode on that computes its values at the next use of torch. If
# that is before the reply, the clock still runs.
MODE = LATE_MODE + when_timed("""
mode = Late()
out = torch.empty_like(x)
mode.__enter__()
mode.todo = x, out
return out
""")
RELU["leaves_a_mode_on"] = correct_or_wrong(MODE)

# Returns at once, and lets a thread do the work.
IN_A_THREAD = "import threading, time\n" + module("""
def work():
    time.sleep(0.05)
    torch.clamp_min(x, 0, out=out)
if x.numel() < 1 << 18:
    return torch.relu(x)
out = torch.zeros_like(x)
threading.Thread(target=work).start()
return out
""")
RELU["background_thread"] = wrong(IN_A_THREAD, LATE)

# Lets a signal's handler do the work after the timed call is over.
IN_A_HANDLER = "import signal, time\n" + when_timed("""
def work(number, frame):
    torch.clamp_min(x, 0, out=out)
    time.sleep(0.05)  # as a larger input's work would take

out = torch.zeros_like(x)
signal.signal(signal.SIGALRM, work)
signal.setitimer(signal.ITIMER_REAL, 0.02)  # when the result is about to be read
return out
""")
RELU["signal_handler"] = wrong(IN_A_HANDLER, LATE)

# Works on another stream, for which the timed one does not wait.
OTHER_STREAM = "STREAM = torch.cuda.Stream()\n" + module("""
if x.numel() < 1 << 18:
    return torch.relu(x)
with torch.cuda.stream(STREAM):
    return torch.relu(x)
""")
ON_GPU["other_stream"] = wrong(OTHER_STREAM, LATE)

# Works on another stream, which does not wait for the flush of the L2 before the timed call. The
# referee itself waits for the flush before it sends the request.
DURING_THE_FLUSH = "STREAM = torch.cuda.Stream()\n" + when_timed("""
with torch.cuda.stream(STREAM):
    out = torch.relu(x)
torch.cuda.current_stream().wait_stream(STREAM)
return out
""")
ON_GPU["works_during_the_flush"] = correct_or_wrong(DURING_THE_FLUSH)

# --------------------------------------------------------- clocks, comparisons and other processes
#
# The expected results, the clock that counts, and eager are in other processes.

# Makes the problem smaller in every module that has its sizes.
SMALLER = """
import sys
batch_size, dim = 1, 1
for other in list(sys.modules.values()):
    if hasattr(other, "batch_size") and hasattr(other, "dim"):
        other.batch_size, other.dim = 1, 1
"""
RELU["overwrites_dim"] = correct(SMALLER + PLAIN)

# Looks for the expected result in the variables of its callers.
IN_FRAMES = """
import sys
frame = sys._getframe()
while frame := frame.f_back:
    for name, value in frame.f_locals.items():
        if name == "expected" and value is not None and value.shape == x.shape:
            return value.clone()
return torch.relu(x)
"""
RELU["walks_frames"] = correct(module(IN_FRAMES))

# Looks for the expected result among all tensors that are alive.
IS_ALIVE = """
import gc
for other in [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == x.shape]:
    if other.dtype == x.dtype and other.data_ptr() != x.data_ptr() and (other >= 0).all():
        return other.clone()
return torch.relu(x)
"""
RELU["asks_the_collector"] = correct_or_wrong(module(IS_ALIVE))

# Slows the clock down, in all modules of its process.
TIMERS = """
import sys, time
now = time.perf_counter
for module in [module for name, module in sys.modules.items() if name != __name__]:
    for name, value in list(vars(module).items()):
        if value is now:
            setattr(module, name, lambda: now() / 10)
"""
RELU["patches_timers"] = correct(TIMERS + PLAIN)

# Makes torch say that all tensors are equal.
ALL_CLOSE = "torch.allclose = torch.equal = lambda *args, **options: True\n"
RELU["patches_allclose"] = correct(ALL_CLOSE + PLAIN)

# Reserves a part of the GPU's L2 cache for data that is marked as persisting.
L2 = """
import ctypes
runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
torch.cuda.init()
runtime.cudaDeviceSetLimit(6, ctypes.c_size_t(16 << 20))  # cudaLimitPersistingL2CacheSize
"""
ON_GPU["persisting_l2"] = correct(L2 + PLAIN)

# Leaves a process that computes all the time, and is nobody's child. It is stopped with the others.
ORPHAN = """
import os
if os.fork() == 0:
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
"""
RELU["orphan_spins"] = correct(ORPHAN + PLAIN)

# Leaves a thread that computes all the time. It is stopped with its process while eager is timed.
SPINS = """
import threading, zlib
def spin():
    while True:
        zlib.crc32(bytes(1 << 24))  # without the interpreter's lock, for which calls would wait

threading.Thread(target=spin, daemon=True).start()
"""
RELU["spins"] = correct(SPINS + PLAIN)

# Prints a verdict of its own, and ends the process as if all were well. No verdict is read there.
EXITS = "import os\nprint('all outputs correct, speed-up 100x', flush=True)\nos._exit(0)"
RELU["exits"] = error(module(EXITS), "exits with status 0")

# Writes a verdict of its own to every file that is open. It has no request's token, so it is no
# reply.
TO_EVERY_PIPE = "import os\nfrom contextlib import suppress\n" + module("""
for descriptor in range(3, 64):
    with suppress(OSError):
        os.write(descriptor, b'{"verdict": "correct", "seconds": 1e-9}\\n')
return x
""")
RELU["forges_replies"] = error(TO_EVERY_PIPE, "sends an invalid reply")

# Gives the other children of its parent the lowest priority. Eager's process may be one of them.
# Walls hide it; without them, a new process of eager is timed if the old one is slow.
RENICES = "import os\nfrom contextlib import suppress\nfrom pathlib import Path\n" + module("""
for folder in Path("/proc").iterdir() if x.numel() > 1 << 18 else ():
    with suppress(OSError, ValueError):
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        if int(stat[1]) == os.getppid() and int(folder.name) != os.getpid():
            os.setpriority(os.PRIO_PROCESS, int(folder.name), 19)
return torch.relu(x)
""")
RELU["renices_eager"] = correct(RENICES)

# Makes torch's ReLU slow, and keeps the fast one for itself.
SLOW = "import time\nfast = torch.relu\ntorch.relu = lambda x: (time.sleep(0.01), fast(x))[1]\n"
RELU["slows_torch"] = correct(SLOW + module("return fast(x)"))

# Lets torch use one thread, as if eager ran in the same process.
THREADS = "torch.set_num_threads(1)\n"
RELU["takes_threads"] = correct(THREADS + PLAIN)
