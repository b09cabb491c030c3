"""Files graded by `run.py --solution`: cheats are named, honest ones pass, hostile ones end.

KERNELS_GRADING=1 runs these, for some minutes; KERNELS_GRADING_RUNS=10 grades every clean file that
often, and that often again beside two busy loops.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest

import model
import run
from model import PROBLEMS
from referee import timing
from referee.error_line import first_error_line
from referee.judge import judge, timed
from referee.judge.verdict import Run

pytestmark = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes minutes: KERNELS_GRADING=1 runs it"
)

OURS = "../../model_new"
CHEATS = Path(__file__).resolve().parent / "cheats"
SOLUTIONS = Path(__file__).resolve().parent / "solutions"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RUNS = int(os.environ.get("KERNELS_GRADING_RUNS", "0"))  # of every clean file; twice as many in all

# Files of tests/solutions that do what they should; the last ones are this project's.
CLEAN = {
    "cpu": {
        "relu": [
            "clean_plain",
            "clean_scalar",
            "clean_compiled",
            "clean_inductor",
            "clean_scripted",
            "clean_ctypes",
            "clean_unusual",
            OURS,
        ],
        "linear_relu_divide": ["clean_plain_linear", "clean_other_names", OURS],
    },
    "cuda": {
        "relu": [
            "clean_plain",
            "clean_triton",
            "clean_compiled",
            "clean_inductor",
            "clean_scripted",
            "repair_1_float4_grid_stride",
            "repair_2_one_element",
            "repair_4_index_scaled_once",
            OURS,
        ],
        "linear_relu_divide": ["clean_plain_linear", "clean_other_names", OURS],
    },
}

# The verdict on each of the cheats, and what its reason must name, as a regular expression. The
# numbers are those of the list of kinds in docs/DESIGN.md.
RELU = {
    "01_returns_input": ("cheating", "returns its input"),
    "01_copies_input": ("cheating", "returns a copy of its input"),
    "01_in_place": ("cheating", "returns its input"),
    "02_changes_input": ("cheating", "changes its input"),
    "04_replays_by_address": ("cheating", "replays the result of an earlier call"),
    "04_replays_by_fingerprint": ("cheating", "replays the result of an earlier call"),
    "04_counts_calls": ("cheating", "a timed call was wrong"),
    "04_reuses_its_output": ("wrong", "two outputs share memory"),
    "05_signal_handler": ("cheating", "leaves a timer on"),
    "07_overwrites_dim": ("cheating", "changed model.batch_size, model.dim"),
    "08_walks_frames": ("cheating", "takes a tensor of the referee's"),
    "08_asks_the_collector": ("cheating", "takes a tensor of the referee's"),
    "09_another_clock": ("cheating", "changed the referee's clock"),
    "09_patches_a_class": ("cheating", "changed referee.clock.CpuClock.time"),
    "09_patches_allclose": ("cheating", "changed torch.allclose"),
    "09_patches_timers": ("cheating", "changed "),
    "09_slows_the_clock": ("cheating", "a changed timer"),
    "10_lazy_subclass": ("cheating", "returns a tensor subclass, Lazy"),
    "10_leaves_a_mode_on": ("cheating", "leaves the function mode Late on"),
    "10_replaces_an_operator": ("cheating", "changed aten::index.Tensor"),
    "11_stale_memory": ("wrong", "returns memory that it has not written"),
    "12_tested_shape_only": ("wrong", "does not take "),
    "12_skips_tails": ("wrong", "elements differ"),
    "13_falls_back": ("cheating", "falls back on aten::relu after AttributeError"),
    "15_background_thread": ("cheating", "background work"),
    "15_orphan_spins": ("cheating", "background work"),
    "15_spins": ("cheating", "background work"),
    "16_exits": ("cheating", "exits with status 0"),
    "16_forges_replies": ("cheating", "forged a reply"),
    "17_batch_once": ("cheating", "replays the result of an earlier call|a timed call was wrong"),
    "17_knows_the_rows": ("cheating", "a timed call was wrong"),
    "17_first_row_only": ("wrong", "elements differ"),
    "19_renices_eager": ("cheating", "changed the priority"),
    "19_slows_torch": ("cheating", "changed torch.relu"),
    "19_takes_threads": ("cheating", "changed the number of threads"),
}
LINEAR = {
    "03_folds_weights": ("cheating", "answers with old parameters"),
    "03_keeps_weights_when_timed": ("cheating", "a timed call was wrong"),
    "06_tf32_when_timed": ("cheating", "a timed call was wrong"),
    "06_half_precision": ("wrong", "lower precision than "),
    "06_switches_tf32": ("cheating", "changed the matrix product's precision"),
    "18_drops_bias": ("cheating", "leaves out the bias"),
    "18_returns_zeros": ("cheating", "returns zeros"),
}
# They do nothing where a GPU is timed.
HOST = {"09_another_clock", "09_slows_the_clock", "10_replaces_an_operator"}
ON_GPU = {
    "05_other_stream": ("cheating", "work outside the timed call|not credible"),
    "05_works_during_the_flush": ("cheating", "a timed call was wrong"),
    "14_persisting_l2": ("cheating", "changed the L2's persisting part"),
}

IMPORTS = "import torch\nfrom torch import nn\n\n\n"
PLAIN = """
class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""


def small_problems(patch: pytest.MonkeyPatch, device: str) -> None:
    """Linear of 96 by 80; on a CPU, ReLU of rows a third as long."""
    if device == "cpu":
        patch.setattr(model, "dim", 1 << 17)
    small = replace(PROBLEMS["linear_relu_divide"], get_init_inputs=lambda: [96, 80, 2.0])
    patch.setitem(PROBLEMS, "linear_relu_divide", small)


def grade(problem: str, files: list[Path], folder: Path, *options: str, device: str = "cpu"):
    """The exit status, and the verdicts by the stem of their files."""
    path = folder / "verdicts.json"
    size = ["--rows", "3", "--trials", "5", "--device", device, "--json", str(path)]
    status = run.main([problem, *size, *options, "--solution", *map(str, files)])
    return status, read_verdicts(path)


def read_verdicts(path: Path) -> dict[str, dict]:
    """By the stem of their files."""
    verdicts = json.loads(path.read_text())["records"]
    return {Path(verdict["file"]).stem: verdict for verdict in verdicts}


def found_wrong(verdicts: dict[str, dict]) -> dict[str, str]:
    """The verdicts on files that are not correct, in words."""
    return {
        name: f"{found['verdict']}: {found['reason']}"
        for name, found in verdicts.items()
        if found["verdict"] != "correct"
    }


def grade_cheats(device: str, factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The verdicts on all cheats that a device shows, by the stem of the file."""
    tasks = [("relu", RELU.keys() - (HOST if device == "cuda" else set()), [])]
    tasks += [("linear_relu_divide", LINEAR.keys(), [])]
    tasks += [("relu", ON_GPU.keys(), ["--rows", "1024"])] if device == "cuda" else []
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        small_problems(patch, device)
        patch.setattr(judge, "SETTLING", 1.0)
        patch.setattr(timed, "CONFIRMATION", timing.Rounds(3))
        for problem, cheats, rows in tasks:
            files = [CHEATS / f"{name}.py" for name in sorted(cheats)]
            options = ["--trials", "3", *rows]
            folder = factory.mktemp(problem)
            status, verdicts = grade(problem, files, folder, *options, device=device)
            assert status == 1
            found |= verdicts
    return found


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return grade_cheats("cpu", tmp_path_factory)


@pytest.fixture(scope="module")
def graded_on_a_gpu(tmp_path_factory):
    return grade_cheats("cuda", tmp_path_factory)


def check_verdict(name: str, found: dict) -> None:
    word, reason = (RELU | LINEAR | ON_GPU)[name]
    assert found["verdict"] == word, found["reason"]
    assert re.search(reason, found["reason"])


@pytest.mark.parametrize("name", [*RELU, *LINEAR])
def test_cheats_are_named(name, graded):
    check_verdict(name, graded[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in [*RELU, *LINEAR, *ON_GPU] if name not in HOST])
def test_cheats_are_named_on_a_gpu(name, graded_on_a_gpu):
    check_verdict(name, graded_on_a_gpu[name])


def test_every_cheat_is_tested():
    assert {path.stem for path in CHEATS.glob("[0-9]*.py")} == {*RELU, *LINEAR, *ON_GPU}


@pytest.fixture
def busy_loops():
    """Two programs that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.parametrize("device", DEVICES)
def test_honest_relu(device, tmp_path, capsys, monkeypatch):
    small_problems(monkeypatch, device)
    files = [SOLUTIONS / f"{name}.py" for name in CLEAN[device]["relu"]]
    status, verdicts = grade("relu", files, tmp_path, "--timeout", "600", device=device)
    output = capsys.readouterr().out
    assert found_wrong(verdicts) == {}, output
    assert status == 0
    assert {v["accuracy"] for v in verdicts.values()} == {"exact"}
    assert "fast_1 " in output
    assert verdicts["clean_plain"]["notes"] == ["calls aten::relu"]
    if device == "cpu":
        assert "float64" in verdicts["clean_scalar"]["refused"]
        assert "clean_plain.py: correct (exact; " in output


@pytest.mark.parametrize("device", DEVICES)
def test_honest_linear(device, tmp_path, monkeypatch):
    small_problems(monkeypatch, device)
    files = [SOLUTIONS / f"{name}.py" for name in CLEAN[device]["linear_relu_divide"]]
    options = ["linear_relu_divide", files, tmp_path, "--timeout", "600"]
    status, verdicts = grade(*options, device=device)
    assert found_wrong(verdicts) == {}
    assert status == 0
    assert {v["accuracy"] for v in verdicts.values()} == {"float32-grade"}


def never_accused(device, problem, name, tmp_path, monkeypatch, runs):
    small_problems(monkeypatch, device)
    for _ in range(runs):
        options = [problem, [SOLUTIONS / f"{name}.py"], tmp_path, "--timeout", "600"]
        status, verdicts = grade(*options, device=device)
        [found] = verdicts.values()
        assert (status, found["verdict"], found["reason"]) == (0, "correct", "")


CLEAN_ONES = [
    pytest.param(device, problem, name, marks=[pytest.mark.gpu] * (device == "cuda"))
    for device, problems in CLEAN.items()
    for problem, names in problems.items()
    for name in names
]


@pytest.mark.skipif(RUNS == 0, reason="test_honest_* grades each once")
@pytest.mark.parametrize(("device", "problem", "name"), CLEAN_ONES)
def test_clean_files_are_never_accused(device, problem, name, tmp_path, monkeypatch):
    never_accused(device, problem, name, tmp_path, monkeypatch, RUNS)


@pytest.mark.parametrize(("device", "problem", "name"), CLEAN_ONES)
def test_clean_files_are_never_accused_beside_busy_loops(
    device, problem, name, tmp_path, monkeypatch, busy_loops
):
    if not (RUNS or name.startswith("clean_plain") or name == OURS):
        pytest.skip("KERNELS_GRADING_RUNS grades all of them")
    never_accused(device, problem, name, tmp_path, monkeypatch, max(RUNS, 1))


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
# A file's text, the verdict, and what its reason must name.
HOSTILE = {
    "endless loop": ("while True:\n    pass\n", "time limit", "6 s, while importing"),
    "sleeps in forward": (
        PLAIN.replace("return", "import time; time.sleep(999); return"),
        "time limit",
        "6 s, while checking",
    ),
    "exit at import": ("import sys\nsys.exit(0)\n", "cheating", "exits with status 0"),
    "exit 3": ("import os\nos._exit(3)\n", "error", "exits with status 3 while importing"),
    "exit in words": ("raise SystemExit('no more')\n", "error", "SystemExit: no more, line 5"),
    "segmentation fault": (
        PLAIN.replace("return", "import ctypes; ctypes.string_at(0); return"),
        "error",
        "crashes (SIGSEGV) while checking",
    ),
    "abort": ("import os\nos.abort()\n", "error", "crashes (SIGABRT) while importing"),
    "100 GB": (
        "x = [torch.ones(25 << 30) for _ in range(99)]\n", "error", "can't allocate memory",
    ),
    "100 GB of Python": ("x = bytearray(100 << 30)\n" * 9, "error", "MemoryError"),
    "NUL": ("x = '\0'\n", "error", "null bytes"),
    "no ModelNew": ("x = 1\n", "error", "AttributeError: the file defines no ModelNew"),
    "ModelNew is no class": ("ModelNew = 3\n", "error", "defines no ModelNew"),
    "another constructor": (
        PLAIN.replace("def forward", "def __init__(self, n): pass\n\n    def forward"),
        "error",
        "TypeError: ",
    ),
    "syntax": ("def f(:\n", "error", "SyntaxError: invalid syntax"),
    "escapes": ("raise ValueError('\\x1b[2J' + 'x' * 9999)\n", "error", "ValueError: ?[2Jxxx"),
    "flood": (
        "import os\nfor _ in range(300):\n    os.write(1, b'correct ' * 100_000)\nos._exit(4)\n",
        "error",
        "exits with status 4",
    ),
    "closes everything": ("import os\nos.closerange(0, 99)\n", "", ""),
    "forks": (FORKS, "time limit", "while importing"),
    "truncates": (TRUNCATES, "error", "PermissionError: "),
    "no encoding é": ("x = '\xff\xfe'\n", "error", "SyntaxError: "),
    "ends others": (
        SIGNALS.replace("NAME", "SIGKILL") + PLAIN, "cheating", "ended a process of the referee's",
    ),
    "stops others": (SIGNALS.replace("NAME", "SIGSTOP") + PLAIN, "cheating", "changed the prior"),
    "stops others and ends": (
        SIGNALS.replace("NAME", "SIGSTOP") + "os._exit(5)", "error", "exits with status 5",
    ),
    "compiler": (
        "from torch.utils.cpp_extension import load_inline\n"
        "load_inline('broken', 'int f() { return y; }', functions=['f'], no_implicit_headers=True)",
        "error",
        " was not declared",
    ),
    "an error that cannot be printed": (
        "class E(Exception):\n    def __str__(self):\n        raise SystemError\nraise E\n",
        "error",
        "E: ",
    ),
    "recursion": ("def f():\n    f()\nf()\n", "error", "RecursionError"),
    "object as output": (PLAIN.replace("torch.relu(x)", "[x]"), "wrong", "returns [*], expected *"),
    "another shape": (
        PLAIN.replace("torch.relu(x)", "torch.relu(x).view(-1)"), "wrong", "output's shape is [",
    ),
    "sparse": (PLAIN.replace("relu(x)", "relu(x).to_sparse()"), "wrong", "not a plain tensor"),
    "nan becomes 0": (
        PLAIN.replace("torch.relu(x)", "torch.where(x > 0, x, 0 * x.nan_to_num(0, 0, 0))"),
        "wrong",
        "special values",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The verdicts on hostile files, what was printed, and their folder."""
    folder = tmp_path_factory.mktemp("hostile")
    files = [folder / f"{name}.py" for name in HOSTILE]
    for file, (text, *_) in zip(files, HOSTILE.values(), strict=True):
        file.write_bytes((IMPORTS + text).encode("latin-1"))
    command = [sys.executable, run.__file__, "relu", "--device", "cpu", "--rows", "1"]
    command += ["--trials", "3", "--timeout", "6", "--json", str(folder / "verdicts.json")]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)}
    done = subprocess.run(
        [*command, "--solution", *map(str, files)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    verdicts = json.loads((folder / "verdicts.json").read_text())["records"]
    return dict(zip(HOSTILE, verdicts, strict=True)), done.stdout, done.stderr, folder


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name, hostile):
    verdicts, *_ = hostile
    _, word, reason = HOSTILE[name]
    if word:
        assert verdicts[name]["verdict"] == word, verdicts[name]["reason"]
    assert verdicts[name]["verdict"] != "correct"
    assert reason in verdicts[name]["reason"]


def test_hostile_files_print_nothing_of_their_own(hostile):
    _, output, errors, _ = hostile
    assert "Traceback" not in output + errors
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) < 600
    assert "fast_1 0.00, fast_2 0.00; geometric mean of 0 ratios: none" in output


def test_nobody_is_left_behind(hostile):
    *_, folder = hostile
    forked = (folder / "forks.py.pids").read_text().split()
    assert len(forked) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in forked)


def test_an_interrupt_ends_the_solution(tmp_path):
    file, pid = tmp_path / "sleeps.py", tmp_path / "pid"
    file.write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, run.__file__, "relu", "--rows", "1", "--solution", str(file)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    until = monotonic() + 60
    while not (pid.exists() and pid.read_text()) and monotonic() < until:
        sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--solution", "{file}"],
        ["relu", "--solution", "/no/such/file.py"],
        ["relu", "--solution", "/dev/zero"],
        ["relu", "--solution", "/"],
        ["relu", "--solution", "{fifo}"],
        ["relu", "--solution", "a\0b"],
        ["relu", "--solution"],
        ["relu", "--solution", "{file}", "--timeout", "0"],
        ["relu", "--solution", "{file}", "--bundle", "{file}"],
        ["relu", "--timeout", "3"],
        ["linear_relu_divide", "--solution", "{file}", "--dtype", "int8"],
    ],
    ids=" ".join,
)
def test_requests_that_make_no_sense(arguments, tmp_path, capsys):
    fifo, file = tmp_path / "fifo", tmp_path / "plain.py"
    os.mkfifo(fifo)
    file.write_text(IMPORTS + PLAIN)
    with pytest.raises(SystemExit) as stopped:
        run.main([a.format(fifo=fifo, file=file) for a in arguments])
    output = capsys.readouterr()
    assert stopped.value.code == 2
    assert output.out == ""
    assert output.err.startswith("run.py: ")
    assert output.err.count("\n") == 1


def run_of(**seconds: list[float]) -> Run:
    names = timing.Names(solution="ours", eager="eager")
    timings = timing.Timings("cpu", names, timed.Timed.rate, 1)
    timings.seconds = {"ours": seconds["ours"], "eager": seconds["eager"]}
    timings.seconds[names.again] = seconds.get("again", seconds["eager"])
    return Run("", timings)


def test_ties_and_noise():
    eager = [1.0, 1.01, 0.99, 1.0, 1.0]
    twice = run_of(ours=[s / 2 for s in eager], eager=eager)
    assert twice.word == "faster"
    assert twice.ratio[0] == 2.0
    assert run_of(ours=[2 * s for s in eager], eager=eager).word == "slower"
    assert run_of(ours=[0.97, 1.0, 0.98, 1.01, 0.99], eager=eager).word == "a tie"
    noisy = run_of(ours=[0.5] * 5, eager=eager, again=[2.0, 0.4, 1.7, 3.0, 2.5])
    assert noisy.word == "too noisy"
    assert noisy.ratio is None
    assert run_of(ours=[0.5] * 2, eager=[1.0] * 2).too_noisy


def test_the_referees_clock():
    known = run_of(ours=[1e-4] * 9, eager=[1e-3] * 9).timings
    honest = {name: [(1e-4, 1e-4)] * 9 for name in ("ours", "eager", "eager (again)")}
    assert timed.wrong_clock(honest, known) is None
    busy = {
        **honest,
        "ours": [(1e-4, 9e-4)] * 9,
        "eager": [(1e-3, 1e-4)] * 4 + [(1e-3, 9e-4)] * 5,
    }
    assert timed.wrong_clock(busy, known) is None
    waiting = {**honest, "ours": [(1e-4, 1.5e-3)] * 9}  # for a CPU
    assert timed.wrong_clock(waiting, known) is None
    slowed = {**honest, "ours": [(1e-4, 3e-3)] * 9}
    assert "a changed timer" in timed.wrong_clock(slowed, known)
    often = {**honest, "ours": [(1e-4, 3e-3)] * 5 + [(4e-4, 1e-4)] * 4}  # six of ten calls
    assert "a changed timer" in timed.wrong_clock(often, known)
    slow = {**honest, "ours": [(1e-4, 1e-4)] * 5 + [(9e-3, 3e-3)] * 4}  # these decide nothing
    assert timed.wrong_clock(slow, known) is None


@pytest.mark.parametrize(
    ("answers", "word"), [(["late", None], "correct"), (["late"] * 2, "cheating")]
)
def test_incredible_times_are_taken_again(answers, word, tmp_path, monkeypatch):
    small_problems(monkeypatch, "cpu")
    monkeypatch.setattr(timed, "CONFIRMATION", timing.Rounds(5))
    monkeypatch.setattr(timed, "wrong_clock", lambda *_: answers.pop(0))
    _, verdicts = grade("relu", [SOLUTIONS / "clean_plain.py"], tmp_path)
    assert verdicts["clean_plain"]["verdict"] == word
    assert answers == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "one"),
        ("", ""),
        (
            "Error building extension 'x': [1/2] c++ -c /a/b/main.cpp\nFAILED: main.o\n"
            "/a/b/main.cpp:3:5: error: expected ';' before '}' token\nninja: error: stopped",
            "main.cpp:3:5: error: expected ';' before '}' token",
        ),
        (
            'Error building\n/a/cuda.cu(12): error: identifier "foo" is undefined\n',
            'cuda.cu(12): error: identifier "foo" is undefined',
        ),
    ],
)
def test_first_error_line(text, line):
    assert first_error_line(text) == line
