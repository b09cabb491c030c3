"""Files graded by `run.py --solution`: cheats are named, honest ones pass, hostile ones end.

KERNELS_GRADING=1 runs these, for some minutes; KERNELS_GRADING_RUNS=10 grades every clean file that
often, and that often again beside two busy loops.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grading import (
    DEVICES,
    ONLY,
    PLAIN,
    PLAIN_LINEAR,
    cheating,
    check,
    error,
    grade,
    linear,
    module,
    write,
    wrong,
)
from test_run import interrupted

import run
from referee import timing
from referee.judge import judge

pytestmark = ONLY
FOLDER = Path(__file__).resolve().parent
RUNS = int(os.environ.get("KERNELS_GRADING_RUNS", "0"))  # of every clean file; twice as many in all

# Cheats: the text, if it is no file of tests/cheats, the verdict, and what its reason must name.
# The numbers are those of the list of kinds in docs/REFEREE.md.
REPLAY = """
if key not in self.seen:
    self.seen[key] = torch.relu(x)
return self.seen[key].clone()
"""
COUNTS = """
self.calls += x.dim() == 2 and x.shape[1] > 100_000
if self.calls < 4 or x.shape != self.last.shape:
    self.last = torch.relu(x)
return self.last.clone()
"""
TAILS = """
out, tail = torch.relu(x), x.numel() % 4
if tail and x.is_contiguous():
    out.view(-1)[-tail:] = x.reshape(-1)[-tail:]
return out
"""
FALLS_BACK = "try:\n    return extension.relu(x)\nexcept Exception:\n    return torch.relu(x)"
SLOW = "import time\nfast = torch.relu\ntorch.relu = lambda x: (time.sleep(0.01), fast(x))[1]\n"
IN_HALF = """
own = self.linear
z = nn.functional.linear(x.bfloat16(), own.weight.bfloat16(), own.bias.bfloat16())
return torch.relu(z.float()) / self.divisor
"""
OTHER_STREAM = """
if x.numel() < 1 << 18:
    return torch.relu(x)
with torch.cuda.stream(STREAM):
    return torch.relu(x)
"""
IN_FRAMES = """
frame = sys._getframe()
while frame := frame.f_back:
    for name, value in frame.f_locals.items():
        if name == "expected" and value is not None and value.shape == x.shape:
            return value.clone()
return torch.relu(x)
"""
IS_ALIVE = """
for other in [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == x.shape]:
    if other.dtype == x.dtype and other.data_ptr() != x.data_ptr() and (other >= 0).all():
        return other.clone()
return torch.relu(x)
"""
TO_EVERY_PIPE = """
for descriptor in range(3, 64):
    with suppress(OSError):
        os.write(descriptor, b'{"verdict": "correct", "seconds": 1e-9}\\n')
return x
"""
SMALLER = """
import sys
batch_size, dim = 1, 1
for other in list(sys.modules.values()):
    if hasattr(other, "batch_size") and hasattr(other, "dim"):
        other.batch_size, other.dim = 1, 1
"""
ORPHAN = """
import os
if os.fork() == 0:
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
"""
L2 = """
import ctypes
runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
torch.cuda.init()
runtime.cudaDeviceSetLimit(6, ctypes.c_size_t(16 << 20))  # cudaLimitPersistingL2CacheSize
"""
PRINTS = "print('all outputs correct, speed-up 100x', flush=True)\n"
ADDRESS = "self.seen[id(x)] = x\nkey = x.data_ptr(), x._version, x.shape, x.stride(), x.dtype\n"
ELEMENTS = "key = x.shape, x.stride(), x.dtype, tuple(x.reshape(-1)[:4].tolist())\n"
EARLIER = "replays the result of an earlier call"
RELU = {
    "01_returns_input": cheating(module("return x"), "returns its input"),
    "01_copies_input": cheating(module("return x.clone()"), "returns a copy of its input"),
    "01_in_place": cheating(module("return x.relu_()"), "returns its input"),
    "02_changes_input": cheating(
        module("out = torch.relu(x)\nx.zero_()\nreturn out"), "changes its input"
    ),
    "04_replays_by_address": cheating(module(ADDRESS + REPLAY, "self.seen = {}"), EARLIER),
    "04_replays_by_fingerprint": cheating(module(ELEMENTS + REPLAY, "self.seen = {}"), EARLIER),
    "04_counts_calls": cheating(module(COUNTS, "self.calls = 0"), "a timed call was wrong"),
    "04_reuses_its_output": wrong("", "two outputs share memory"),
    "05_signal_handler": cheating("", "leaves a timer on"),
    "07_overwrites_dim": cheating(SMALLER + PLAIN, "changed model.batch_size, model.dim"),
    "08_walks_frames": cheating("import sys\n" + module(IN_FRAMES), "takes a tensor of "),
    "08_asks_the_collector": cheating(
        "import gc\n" + module(IS_ALIVE), "takes a tensor of the ref"
    ),
    "09_another_clock": cheating("", "changed the referee's clock"),
    "09_patches_a_class": cheating("", "changed referee.clock.CpuClock.time"),
    "09_patches_allclose": cheating(
        "torch.allclose = torch.equal = lambda *args, **options: True\n" + PLAIN,
        "changed torch.allclose",
    ),
    "09_patches_timers": cheating("", "changed "),
    "09_slows_the_clock": cheating("", "a changed timer"),
    "10_lazy_subclass": cheating("", "returns a tensor subclass, Lazy"),
    "10_leaves_a_mode_on": cheating("", "leaves the function mode Late on"),
    "10_replaces_an_operator": cheating("", "changed aten::index.Tensor"),
    "11_stale_memory": wrong(
        module("return torch.empty_like(x)"), "returns memory that it has not written"
    ),
    "12_tested_shape_only": wrong(
        module("assert x.shape[-1] > 100_000\nreturn torch.relu(x)"), "does not take "
    ),
    "12_skips_tails": wrong(module(TAILS), "elements differ"),
    "13_falls_back": cheating(
        "extension = None\n" + module(FALLS_BACK), "falls back on aten::relu after AttributeError"
    ),
    "15_background_thread": cheating("", "background work"),
    "15_orphan_spins": cheating(ORPHAN + PLAIN, "background work"),
    "15_spins": cheating("", "background work"),
    "16_exits": cheating(module(f"import os\n{PRINTS}os._exit(0)"), "exits with status 0"),
    "16_forges_replies": cheating(
        "import os\nfrom contextlib import suppress\n" + module(TO_EVERY_PIPE), "forged a reply"
    ),
    "17_batch_once": cheating("", f"{EARLIER}|a timed call was wrong"),
    "17_knows_the_rows": cheating("", "a timed call was wrong"),
    "17_first_row_only": wrong(
        module("x = x[:1].expand(x.shape) if x.dim() == 2 else x\nreturn torch.relu(x.clone())"),
        "elements differ",
    ),
    "19_renices_eager": cheating("", "changed the priority"),
    "19_slows_torch": cheating(SLOW + module("return fast(x)"), "changed torch.relu"),
    "19_takes_threads": cheating(
        "torch.set_num_threads(1)\n" + PLAIN, "changed the number of threads"
    ),
}
LINEAR = {
    "03_folds_weights": cheating("", "answers with old parameters"),
    "03_keeps_weights_when_timed": cheating("", "a timed call was wrong"),
    "06_tf32_when_timed": cheating("", "a timed call was wrong"),
    "06_half_precision": wrong(linear(IN_HALF), "lower precision than "),
    "06_switches_tf32": cheating(
        'torch.set_float32_matmul_precision("high")\n' + PLAIN_LINEAR,
        "changed the matrix product's precision",
    ),
    "18_drops_bias": cheating(
        linear("return torch.relu(x @ self.linear.weight.T) / self.divisor"), "leaves out the bias"
    ),
    "18_returns_zeros": cheating(
        linear("return x.new_zeros(*x.shape[:-1], self.linear.out_features)"), "returns zeros"
    ),
}
ON_GPU = {
    "05_other_stream": cheating(
        "STREAM = torch.cuda.Stream()\n" + module(OTHER_STREAM),
        "work outside the timed call|not credible",
    ),
    "05_works_during_the_flush": cheating("", "a timed call was wrong"),
    "14_persisting_l2": cheating(L2 + PLAIN, "changed the L2's persisting part"),
}
for table in (RELU, LINEAR, ON_GPU):
    for name, (text, *verdict) in table.items():
        table[name] = text or FOLDER / "cheats" / f"{name}.py", *verdict
# They do nothing where a GPU is timed.
HOST = {"09_another_clock", "09_slows_the_clock", "10_replaces_an_operator"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("table", [RELU, LINEAR, ON_GPU], ids=["relu", "linear", "on a gpu"])
def test_cheats_are_named(table, device, tmp_path, small, monkeypatch):
    if device == "cpu" and table is ON_GPU:
        pytest.skip("they need a GPU")
    monkeypatch.setattr(judge, "SETTLING", 1.0)
    monkeypatch.setattr(timing, "CONFIRMATION", timing.Rounds(3))
    left_out = HOST if device == "cuda" else set()
    table = {name: about for name, about in table.items() if name not in left_out}
    rows = ["--rows", "1024"] if "05_other_stream" in table else []
    problem = "linear_relu_divide" if "18_drops_bias" in table else "relu"
    grade(problem, table, tmp_path, *rows, device=device)


def test_every_cheat_is_tested():
    files = {path.stem for path in (FOLDER / "cheats").glob("[0-9]*.py")}
    assert files <= {*RELU, *LINEAR, *ON_GPU}


# Honest files: the text, if it is no file of tests/solutions; the last ones are this project's.
AOT = 'self.compiled = torch.compile(torch.relu, backend="aot_eager", dynamic=True)'
INDUCTOR = "self.compiled = torch.compile(torch.relu)"  # compiles anew for some shapes
SCRIPTED = """
class Relu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, min=0)

def ModelNew() -> nn.Module:
    return torch.jit.script(Relu())
"""
NAMES = """
own = nn.Linear(i, o)
self.w, self.b, self.divisor = own.weight, own.bias, d
self.register_buffer("zero", torch.zeros(()), persistent=False)
"""
OTHER_NAMES = """
z = torch.einsum("...k,nk->...n", x, self.w) + self.b
return torch.maximum(z, self.zero).div_(self.divisor)
"""
SHORT = {
    "clean_plain": PLAIN,
    "clean_compiled": module("return self.compiled(x)", AOT),
    "clean_inductor": module("return self.compiled(x)", INDUCTOR),
    "clean_scripted": SCRIPTED,
    "clean_plain_linear": PLAIN_LINEAR,
    "clean_other_names": linear(OTHER_NAMES, NAMES),
    "ours": run.OURS,
}
ANYWHERE = ["clean_plain", "clean_compiled", "clean_inductor", "clean_scripted"]
REPAIRS = ["1_float4_grid_stride", "2_one_element", "4_index_scaled_once"]
CLEAN = {
    ("cpu", "relu"): [*ANYWHERE, "clean_scalar", "clean_ctypes", "clean_unusual", "ours"],
    ("cuda", "relu"): [*ANYWHERE, "clean_triton", *(f"repair_{name}" for name in REPAIRS), "ours"],
}
for device in ("cpu", "cuda"):
    names = ["clean_plain_linear", "clean_other_names", "ours"]
    CLEAN[device, "linear_relu_divide"] = names
CASES = [
    pytest.param(device, problem, names, marks=[pytest.mark.gpu] * (device == "cuda"))
    for (device, problem), names in CLEAN.items()
]
ACCURACY = {"relu": "exact", "linear_relu_divide": "float32-grade"}


def grade_clean(device: str, problem: str, names: list[str], folder: Path) -> dict[str, dict]:
    files = {name: SHORT.get(name, FOLDER / "solutions" / f"{name}.py") for name in names}
    table = {name: (text, "correct", ACCURACY[problem]) for name, text in files.items()}
    return grade(problem, table, folder, "--trials", "5", "--timeout", "600", device=device)


@pytest.fixture
def busy_loops():
    """Two programs that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.parametrize(("device", "problem", "names"), CASES)
def test_honest_files(device, problem, names, tmp_path, capsys, small):
    records = grade_clean(device, problem, names, tmp_path)
    output = capsys.readouterr().out
    assert "fast_1 " in output
    assert "clean_plain" in output.splitlines()[1]
    if problem == "relu":
        assert records["clean_plain"]["notes"] == ["calls aten::relu"]
        assert "clean_plain.py: correct (exact; " in output
        assert device == "cuda" or "float64" in records["clean_scalar"]["refused"]
    for _ in range(RUNS):
        grade_clean(device, problem, names, tmp_path)


@pytest.mark.parametrize(("device", "problem", "names"), CASES)
def test_honest_files_beside_busy_loops(device, problem, names, tmp_path, small, busy_loops):
    some = [name for name in names if RUNS or name.startswith("clean_plain") or name == "ours"]
    for _ in range(max(RUNS, 1)):
        grade_clean(device, problem, some, tmp_path)


SIGNALS = """
import os, signal, time

for name in filter(str.isdecimal, os.listdir("/proc")):
    parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
    if int(parent) == os.getppid() and int(name) != os.getpid():
        os.kill(int(name), signal.NAME)
time.sleep(0.5)  # until it has ended
"""
FORKS = """
import os, time

for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(f"{__file__}.pids", "a").write(f"{os.getpid()}\\n")
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
# A file's text, the verdict, and what its reason must name.
HOSTILE = {
    "endless loop": ("while True:\n    pass\n", "time limit", "^; 6 s, while importing"),
    "sleeps in forward": (
        module("import time\ntime.sleep(999)"),
        "time limit",
        "6 s, while checking",
    ),
    "exit at import": cheating("import sys\nsys.exit(0)\n", "exits with status 0"),
    "exit 3": error("import os\nos._exit(3)\n", "exits with status 3 while importing"),
    "exit in words": error("raise SystemExit('no more')\n", "SystemExit: no more, line 5"),
    "segmentation fault": error(
        module("import ctypes\nctypes.string_at(0)"), r"crashes \(SIGSEGV\) while check"
    ),
    "abort": error("import os\nos.abort()\n", r"crashes \(SIGABRT\) while importing"),
    "100 GB": error("x = [torch.ones(25 << 30) for _ in range(99)]\n", "can't allocate memory"),
    "100 GB of Python": error("x = bytearray(100 << 30)\n" * 9, "MemoryError"),
    "NUL": error("x = '\0'\n", "null bytes"),
    "no ModelNew": error("x = 1\n", "AttributeError: the file defines no ModelNew"),
    "ModelNew is no class": error("ModelNew = 3\n", "defines no ModelNew"),
    "another constructor": error(module("return x", "pass", ", n"), "TypeError: "),
    "syntax": error("def f(:\n", "SyntaxError: invalid syntax"),
    "escapes": error("raise ValueError('\\x1b[2J' + 'x' * 9999)\n", r"ValueError: \?\[2Jxxx"),
    "flood": error(FLOOD, "exits with status 4"),
    "closes everything": ("import os\nos.closerange(0, 99)\n", "error|cheating|time limit", ""),
    "forks": (FORKS, "time limit", "while importing"),
    "truncates": error(TRUNCATES, "PermissionError: "),
    "no encoding é": error("x = '\xff\xfe'\n", "SyntaxError: "),
    "ends others": cheating(
        SIGNALS.replace("NAME", "SIGKILL") + PLAIN, "ended a process of the referee's"
    ),
    "stops others": cheating(SIGNALS.replace("NAME", "SIGSTOP") + PLAIN, "changed the prior"),
    "stops others and ends": error(
        SIGNALS.replace("NAME", "SIGSTOP") + "os._exit(5)", "exits with status 5"
    ),
    "compiler": error(BROKEN, " was not declared"),
    "an error that cannot be printed": error(UNPRINTABLE, "E: "),
    "recursion": error("def f():\n    f()\nf()\n", "RecursionError"),
    "object as output": wrong(module("return [x]"), r"returns \[\*\], expected \*"),
    "another shape": wrong(module("return torch.relu(x).view(-1)"), "output's shape is "),
    "another dtype": wrong(module("return torch.relu(x).double()"), "'s dtype is float64"),
    "sparse": wrong(module("return torch.relu(x).to_sparse()"), "not a plain tensor"),
    "nan becomes 0": wrong(NO_NAN, "special values"),
}


def test_hostile_files(tmp_path):
    """They are named, print nothing of their own, and leave nobody behind."""
    path = tmp_path / "verdicts.json"
    command = [sys.executable, run.__file__, "relu", "--device", "cpu", "--rows", "1"]
    command += ["--trials", "3", "--timeout", "6", "--json", str(path), "--solution"]
    done = subprocess.run(
        [*command, *map(str, write(HOSTILE, tmp_path))],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    check(path, HOSTILE)
    assert "Traceback" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 600
    assert "fast_1 0.00, fast_2 0.00; geometric mean of 0 ratios: none" in done.stdout
    forked = (tmp_path / "forks.py.pids").read_text().split()
    assert len(forked) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in forked)


def test_an_interrupt_ends_the_solution(tmp_path):
    file, pid = tmp_path / "sleeps.py", tmp_path / "pid"
    text = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    file.write_text(text)
    interrupted("importing", "relu", "--rows", "1", "--solution", str(file), wait=2.0)
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.parametrize(
    ("answers", "word"), [(["late", None, None], "correct"), (["late"] * 2, "cheating")]
)
def test_incredible_times_are_taken_again(answers, word, tmp_path, monkeypatch, small):
    monkeypatch.setattr(timing, "CONFIRMATION", timing.Rounds(5))
    monkeypatch.setattr(judge, "wrong_clock", lambda *_: answers.pop(0))
    grade("relu", {"plain": (PLAIN, word, "")}, tmp_path)
    assert answers == []
