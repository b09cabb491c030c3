"""Cheats that return right results and try to be timed as faster, graded against reference files.

They gain nothing, or little. Two of them are wrong if a thread is late; all others are correct.
"""

from statistics import median

import pytest

from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import LATE_MODE, RELU, correct, module, reference

PLAIN = module("return torch.relu(x)")

SLEEP = 0.005  # seconds that each call of CLOCKS really takes
# Makes the clocks that other modules imported run at a hundredth of the speed.
CLOCKS = """
import sys, time
now = time.perf_counter

def slow_clock():
    return now() / 100

for module_name, module in list(sys.modules.items()):
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if value is now and module_name != __name__:
            setattr(module, name, slow_clock)
""" + module(f"end = now() + {SLEEP}\nwhile now() < end:\n    pass\nreturn torch.relu(x)")
# A thread holds the interpreter's lock, so that the reply is late, and works meanwhile.
LOCK = "import ctypes, threading\n" + module("""
def work():
    ctypes.PyDLL(None).usleep(30000)  # without giving the lock back
    torch.clamp_min(x, 0, out=out)
out = torch.zeros_like(x)
threading.Thread(target=work).start()
return out
""")
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
# Computes the result at the next call of a function of torch.
MODE = LATE_MODE + "\nmode = Late()\nmode.__enter__()\n"
MODE += module("out = torch.empty_like(x)\nmode.todo = x, out\nreturn out")
SPINS = """
import threading, zlib
def spin():
    while True:
        zlib.crc32(bytes(1 << 24))  # without the interpreter's lock, for which calls would wait

threading.Thread(target=spin, daemon=True).start()
"""
# torch's own function takes longer, but not what the module calls.
SLOWS_TORCH = """
import time
fast = torch.relu

def slow(x):
    time.sleep(0.01)
    return fast(x)

torch.relu = slow
""" + module("return fast(x)")
# Does something, HERE, to each process that has the same parent.
SIBLINGS = """
import os, signal
from contextlib import suppress
for name in filter(str.isdecimal, os.listdir("/proc")):
    with suppress(OSError, ValueError):
        parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
        if int(parent) == os.getppid() and int(name) != os.getpid():
            HERE
"""
NO_GAIN = {
    "hides_time": correct(CLOCKS),
    "thread_with_the_lock": (LOCK, "correct|wrong", ""),  # right if it is done before the reply
    "ahead": (AHEAD, "correct|wrong", ""),  # wrong if it has not run yet when the call is made
    "mode": correct(MODE),
    "spins": correct(SPINS + PLAIN),
    "stops_eager": correct(SIBLINGS.replace("HERE", "os.kill(int(name), signal.SIGSTOP)") + PLAIN),
    "demotes_eager": correct(
        SIBLINGS.replace("HERE", "os.setpriority(os.PRIO_PROCESS, int(name), 19)") + PLAIN
    ),
    "slows_torch": correct(SLOWS_TORCH),
    "plain": correct(PLAIN),
}
TAKES_LONG = {"hides_time", "thread_with_the_lock"}  # each call takes SLEEP or more
# Without walls it does gain on a busy machine: see "Out of reach" in VERDICTS.md.
NEEDS_WALLS = {"demotes_eager"}


@pytest.mark.parametrize("walls", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("table", quick_and_slow(NO_GAIN, "hides_time"))
def test_cheats_at_the_clock_are_never_faster(table, device, walls, tmp_path):
    if not walls:
        table = {name: row for name, row in table.items() if name not in NEEDS_WALLS}
    # On a busy machine, eager may be slower than its copy in three rounds by chance.
    records = grade(RELU, table, tmp_path, trials=6, device=device, walls=walls)
    for name, record in records.items():
        for run in record["runs"]:
            assert run["time"] != "faster", name
            if name in TAKES_LONG:
                assert min(run["forward"]["seconds"]["ModelNew"]) >= 0.8 * SLEEP, name


SINES = "for _ in range(8):\n    x = torch.sin(x)\nreturn x"
# The calls of a request take less time than empty requests vary by, so only the process's own clock
# can tell how long they take.
SHORT_SINES = reference(SINES, "[torch.randn(8, 64)]")
# Finds the inputs of the other calls of a request, and computes all calls in the first one, each by
# itself. All calls together take as long as eager's.
ALL_IN_THE_FIRST_CALL = """
import sys

results = {}

def compute(x):
    for _ in range(8):
        x = torch.sin(x)
    return x

def inputs_of_all_calls():
    frame = sys._getframe()
    while frame and "arguments_of_calls" not in frame.f_locals:
        frame = frame.f_back
    return [arguments[0] for arguments in frame.f_locals["arguments_of_calls"]]
"""
ALL_IN_THE_FIRST_CALL += module("""
if torch.is_grad_enabled():
    return compute(x)
if x.data_ptr() not in results:
    results.clear()
    results.update({y.data_ptr(): compute(y) for y in inputs_of_all_calls()})
return results.pop(x.data_ptr())
""")


@pytest.mark.slow
def test_the_work_of_all_calls_counts_if_the_first_one_does_it(device, tmp_path):
    table = {"all_in_the_first_call": correct(ALL_IN_THE_FIRST_CALL)}
    records = grade(SHORT_SINES, table, tmp_path, trials=9, device=device)
    [run] = records["all_in_the_first_call"]["runs"]
    assert run["time"] != "faster"
    seconds = run["forward"]["seconds"]
    assert median(seconds["ModelNew"]) > 0.7 * median(seconds["eager"])


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


@pytest.mark.slow
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
    assert no_time["step"]["summary"]["step"][0]["time"] != "faster"
    # The referee takes its own clock for no_time, less an empty request. Samples of that difference
    # scatter, so their median may be a little below eager's. A false clock, even one that says a
    # third, would be far below.
    for times, honest_times in zip(seconds_of(no_time), seconds_of(honest), strict=True):
        assert median(times["ModelNew"]) > 0.6 * median(honest_times["eager"])
    is_noted = any("only its own clock" in note for note in records["a_third"]["notes"])
    assert is_noted or third["time"] != "faster"
    own = honest["forward"]["seconds"]["ModelNew"]
    assert median(own) < 5 * median(honest["forward"]["seconds"]["eager"])


def seconds_of(run: dict) -> list[dict]:
    """Return the seconds of a run's forwards, and of its training steps, by timed call."""
    return [run["forward"]["seconds"], run["step"]["seconds"]["step"]]


@pytest.mark.slow
@pytest.mark.parametrize("walls", [True, False])
def test_eager_and_the_server_start_again_if_a_file_kills_them(device, walls, tmp_path):
    kill = SIBLINGS.replace("HERE", "os.kill(int(name), signal.SIGKILL)") + PLAIN
    table = {"kills": (kill, "correct|error", ""), "next": correct(PLAIN)}
    grade(RELU, table, tmp_path, device=device, walls=walls)


@pytest.mark.slow
def test_a_rivals_file_is_read_before_anybody_runs(tmp_path):
    rewrites = f"open({str(tmp_path / 'rival.py')!r}, 'w').write('x = 1')\n" + PLAIN
    grade(RELU, {"rewrites": correct(rewrites), "rival": correct(PLAIN)}, tmp_path)
