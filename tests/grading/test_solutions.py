"""Solutions of the two problems, graded by `run.py --solution`: cheats, honest and hostile files.

The cheats are in `cheats.py`, the honest files in `honest.py` and `solutions/`, and the hostile
ones below. With KERNELS_GRADING_RUNS=10 every honest file is graded ten times more, and ten times
beside two busy loops.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from referee.contestants import free_memory
from referee.testing.texts import error, module, wrong
from tests.grading.cheats import LINEAR, ON_GPU, RELU
from tests.grading.graded import ONLY_ON_REQUEST, grade_with_run_py
from tests.grading.honest import HONEST, PLAIN, SOLUTIONS
from tests.support.command_line import interrupt_after

pytestmark = [ONLY_ON_REQUEST, pytest.mark.usefixtures("one_server")]
RUNS = int(os.environ.get("KERNELS_GRADING_RUNS", "0"))


@pytest.mark.parametrize(
    ("problem", "table"),
    [("relu", RELU), ("linear_relu_divide", LINEAR), ("relu", ON_GPU)],
    ids=["relu", "linear", "on a gpu"],
)
def test_cheats_get_their_verdicts(problem, table, device, tmp_path, small_problems):
    rows = []
    if table is ON_GPU:
        if device == "cpu":
            pytest.skip("they need a GPU")
        rows = ["--rows", "1024"]  # so that work on another stream outlasts the timed call
    grade_with_run_py(problem, table, tmp_path, *rows, device=device)


# The names of the honest files: texts of HONEST, and files of tests/grading/solutions.
ANY_DEVICE = ["honest_plain", "honest_compiled", "honest_inductor", "honest_scripted"]
REPAIRS = ["repair_1_float4_grid_stride", "repair_2_one_element", "repair_4_index_scaled_once"]
HONEST_RELU = {
    "cpu": [*ANY_DEVICE, "honest_scalar", "honest_ctypes", "honest_unusual", "ours"],
    "cuda": [*ANY_DEVICE, "honest_triton", *REPAIRS, "ours"],
}
HONEST_LINEAR = ["honest_plain_linear", "honest_other_names", "ours"]
ACCURACY = {"relu": "exact", "linear_relu_divide": "float32-grade"}


def grade_honest(
    device: str, problem: str, folder: Path, is_quick: bool = False
) -> dict[str, dict]:
    """Grade a problem's honest files, which must be correct; if `is_quick`, two of them."""
    names = HONEST_RELU[device] if problem == "relu" else HONEST_LINEAR
    if is_quick:
        names = [names[0], "ours"]
    files = {name: HONEST.get(name, SOLUTIONS / f"{name}.py") for name in names}
    table = {name: (text, "correct", ACCURACY[problem]) for name, text in files.items()}
    return grade_with_run_py(
        problem, table, folder, "--trials", "5", "--timeout", "600", device=device
    )


@pytest.fixture
def busy_loops():
    """Run two programs that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.parametrize("problem", ACCURACY)
def test_honest_files_are_correct(device, problem, tmp_path, capsys, small_problems):
    records = grade_honest(device, problem, tmp_path)
    output = capsys.readouterr().out
    assert "fast_1 " in output
    assert "honest_plain" in output.splitlines()[1]
    if problem == "relu":
        assert "honest_plain.py: correct (exact; " in output
        assert device == "cuda" or "float64" in records["honest_scalar"]["refused"]
    for _ in range(RUNS):
        grade_honest(device, problem, tmp_path)


@pytest.mark.parametrize("problem", ACCURACY)
def test_honest_files_are_correct_beside_busy_loops(
    device, problem, tmp_path, small_problems, busy_loops
):
    for _ in range(max(RUNS, 1)):
        grade_honest(device, problem, tmp_path, is_quick=not RUNS)


# Kills the referee's other processes.
KILLS = """
import os, signal, time

for name in filter(str.isdecimal, os.listdir("/proc")):
    parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
    if int(parent) == os.getppid() and int(name) != os.getpid():
        os.kill(int(name), signal.SIGKILL)
time.sleep(0.5)  # until they have ended
"""
STOPS = KILLS.replace("SIGKILL", "SIGSTOP")
# Each process holds a lock as long as it lives. The tests cannot use its id, which is valid only in
# its own namespace.
FORKS = """
import fcntl, os, time

for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = open(f"{__file__}.held", "a")
            fcntl.flock(held, fcntl.LOCK_SH)
            held.write("forked ")
            held.flush()
            os.closerange(0, 3)
            time.sleep(600)
        os._exit(0)
time.sleep(600)
"""
# Reading the mapped file's lost part would end the referee.
TRUNCATES = """
import os

for name in os.listdir("/proc/self/map_files"):
    path = f"/proc/self/map_files/{name}"
    if "memfd:referee" in os.readlink(path):
        os.truncate(path, 0)
"""
BROKEN = """
from torch.utils.cpp_extension import load_inline
load_inline('broken', 'int f() { return y; }', functions=['f'], no_implicit_headers=True)
"""
FLOOD = "import os\nfor _ in range(300):\n    os.write(1, b'correct ' * 100_000)\nos._exit(4)\n"
UNPRINTABLE = "class E(Exception):\n    def __str__(self):\n        raise SystemError\nraise E\n"
NO_NAN = module("return torch.where(x > 0, x, 0 * x.nan_to_num(0, 0, 0))")
# All free memory. The system would give it; a graded file may have a part of it.
FREE = free_memory.free_bytes(torch.device("cpu"))
# By name: a file's text, the verdict, and a pattern of the line. These files do not end by
# themselves, so each takes as long as `--timeout` allows.
ENDLESS = {
    "endless loop": ("while True:\n    pass\n", "time limit", "^3 s, while importing"),
    "sleeps": (module("import time\ntime.sleep(999)"), "time limit", "3 s, while checking"),
    "closes everything": ("import os\nos.closerange(0, 99)\n", "error|time limit", ""),
    "forks": (FORKS, "time limit", "while importing"),
}
# Hostile files that end.
HOSTILE = {
    "exit at import": error("import sys\nsys.exit(0)\n", "exits with status 0"),
    "exit 3": error("import os\nos._exit(3)\n", "exits with status 3 while importing"),
    "exit in words": error("raise SystemExit('no more')\n", "SystemExit: no more, line 5"),
    "at 0": error(module("import ctypes\nctypes.string_at(0)"), r"crashes \(SIGSEGV\) while check"),
    "abort": error("import os\nos.abort()\n", r"crashes \(SIGABRT\) while importing"),
    "all memory": error(f"x = torch.empty({FREE}, dtype=torch.int8)\n", "can't allocate memory"),
    "all memory, in Python": error(f"x = bytearray({FREE})\n", "MemoryError"),
    "NUL": error("x = '\0'\n", "null bytes"),
    "no ModelNew": error("x = 1\n", "AttributeError: the file defines no ModelNew"),
    "ModelNew is no class": error("ModelNew = 3\n", "defines no ModelNew"),
    "another constructor": error(module("return x", "pass", ", n"), "TypeError: "),
    "syntax": error("def f(:\n", "SyntaxError: invalid syntax"),
    "escapes": error("raise ValueError('\\x1b[2J' + 'x' * 9999)\n", r"ValueError: \?\[2Jxxx"),
    "flood": error(FLOOD, "exits with status 4"),
    "truncates": (TRUNCATES + PLAIN, "correct|error", ""),
    "no encoding é": error("x = '\xff\xfe'\n", "SyntaxError: "),
    "ends others": (KILLS + PLAIN, "correct|error", ""),
    "stops others": (STOPS + PLAIN, "correct", ""),
    "stops others and ends": error(STOPS + "os._exit(5)", "exits with status 5"),
    "compiler": error(BROKEN, " was not declared"),
    "an error that cannot be printed": error(UNPRINTABLE, "E: "),
    "recursion": error("def f():\n    f()\nf()\n", "RecursionError"),
    "object as output": wrong(module("return [x]"), r"returns \[\*\], expected \*"),
    "another shape": wrong(module("return torch.relu(x).view(-1)"), "output's shape is "),
    "another dtype": wrong(module("return torch.relu(x).double()"), "'s dtype is float64"),
    "sparse": wrong(module("return torch.relu(x).to_sparse()"), "not a dense tensor"),
    "nan becomes 0": wrong(NO_NAN, "special values"),
}


def test_hostile_files_get_their_verdicts(tmp_path, monkeypatch, capfd):
    """Each gets its verdict and reason, prints nothing of its own, and leaves no process behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    grade_with_run_py("relu", ENDLESS, tmp_path, "--rows", "1", "--timeout", "3")
    grade_with_run_py("relu", HOSTILE, tmp_path, "--rows", "1", "--timeout", "6")
    output, progress = capfd.readouterr()
    assert "Traceback" not in output + progress
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) < 600
    assert "; fast_1 0.00; " in output
    held = tmp_path / "forks.py.held"
    assert held.read_text().split() == ["forked"] * 3
    assert_released(held)


def test_an_interrupt_ends_the_solution(tmp_path):
    file = tmp_path / "sleeps.py"
    held = tmp_path / "held"
    lines = (
        "import fcntl, time",
        f"held = open({str(held)!r}, 'w')",
        "fcntl.flock(held, fcntl.LOCK_SH)",
        "held.write('sleeps')",
        "held.flush()",
        "time.sleep(600)",
    )
    file.write_text("\n".join(lines))
    interrupt_after("importing", "relu", "--rows", "1", "--solution", str(file), wait=2.0)
    assert held.read_text() == "sleeps"
    assert_released(held)


def assert_released(path):
    """Check that no process holds a lock on a file."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
