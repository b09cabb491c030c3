"""The command line: bad input, exit statuses, and one tiny run of the real thing."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch

import run
from model import LinearReluDivide, Model
from referee import cases, correctness, relu
from referee.progress import Progress

ROOT = Path(run.__file__).parent
TINY = ["relu", "--device", "cpu", "--rows", "1", "--trials", "1"]


def command(*arguments: str, folder: Path = ROOT) -> list[str]:
    return [sys.executable, str(folder / "run.py"), *arguments]


def lines_of(stderr: str) -> list[str]:
    """The lines of run.py besides its progress; never a traceback."""
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr
    return [line for line in stderr.splitlines() if line.startswith("run.py: ")]


class Clone(Model):
    """A wrong solution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_problem"],
        ["--rows", "0"],
        ["--rows", "-1"],
        ["--rows", "many"],
        ["--rows", "9" * 30],
        ["--trials", "0"],
        ["--dtype", "bool"],
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--device", "cuda:99"],
        ["--json", "/no/such/folder/file"],
        ["--json", str(ROOT)],
        ["--bundle", "/no/such/folder/file"],
        ["--bundle", "solution.py"],
        ["linear_relu_divide", "--dtype", "int8"],
        ["linear_relu_divide", "--rows", "9" * 30],
        ["--dtype", "int8"],
        ["--no-such-option"],
        ["--dtype", "float32,bool"],
        ["--plot", "a.txt"],
        ["--plot", "/no/such/folder/a.svg"],
        ["--markdown", "/no/such/folder/file"],
        ["--sweep", "--rows", "3"],
        ["relu", "--sweep", "--bundle", "solution.py"],
        ["relu", "--solution", str(ROOT / "model.py"), "--sweep"],
        ["relu", "--solution", str(ROOT / "model.py"), "--dtype", "float32,float16"],
    ],
    ids=" ".join,
)
def test_bad_input(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    output = capsys.readouterr()
    assert stopped.value.code == 2
    assert output.out == ""
    assert output.err.startswith("run.py: ")
    assert output.err.count("\n") == 1


def test_wrong_solution(solution, capsys, tmp_path):
    solution(Clone)
    path = tmp_path / "result.json"
    assert run.main(["relu", "--device", "cpu", "--rows", "1", "--json", str(path)]) == 1
    output = capsys.readouterr().out
    assert "nothing was timed" in output
    assert "WRONG  float32, random" in output
    assert "elements differ, the first at [" in output
    [record] = json.loads(path.read_text())["records"]
    assert record["verdict"] == "wrong"
    assert record["reason"].startswith("float32, random")
    assert record["runs"] == []


def test_solution_that_does_not_build(tmp_path):
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(command(*TINY), env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = lines_of(done.stderr)
    assert line.startswith("run.py: the solution cannot be imported: BuildError: ")
    assert "no-such-compiler" in line


def test_solution_that_is_missing(tmp_path):
    for name in ("run.py", "model.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("referee", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(command(*TINY, folder=tmp_path), capture_output=True, text=True)
    assert done.returncode == 1
    [line] = lines_of(done.stderr)
    assert line.endswith(": ModuleNotFoundError: No module named 'model_new'")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_without_home():
    """And without an entry in the list of users."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    may = "+dac_override,+dac_read_search"  # root's Python may lie where others cannot read
    user = ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={may}"]
    user += [f"--ambient-caps={may}"]
    environment = {**os.environ}
    for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [*user, *command(*TINY)], env=environment, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 1
    [line] = lines_of(done.stderr)
    assert line.startswith("run.py: the solution cannot be imported: ")
    assert "home" in line


def test_solution_that_changes_settings(solution, capsys):
    class Sabotage(Model):
        def __init__(self) -> None:
            super().__init__()
            torch.set_default_dtype(torch.float16)

    solution(Sabotage)
    try:
        assert run.main(["relu", "--device", "cpu", "--rows", "1", "--trials", "1"]) == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert "WRONG  the solution changed the default dtype" in capsys.readouterr().out


def test_bundle(monkeypatch, capsys, tmp_path):
    bundles = SimpleNamespace(bundle=lambda problem: f"# {problem}\n")
    monkeypatch.setattr(run.importlib, "import_module", {"kernels.build.bundle": bundles}.get)
    path = tmp_path / "solution.py"
    assert run.main(["relu", "--bundle", str(path)]) == 0
    assert path.read_text() == "# relu\n"
    assert capsys.readouterr().out.count("\n") == 1
    assert run.main(["relu", "--bundle", "/dev/full"]) == 1
    assert capsys.readouterr().err == "run.py: cannot write /dev/full: No space left on device\n"


def test_a_path_that_stdout_cannot_print(tmp_path):
    path = tmp_path / "é\udcff.py"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    options = ["relu", "--bundle", str(path)]
    done = subprocess.run(command(*options), env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout or "\\udcc3" in done.stdout
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stdout", "options", "unbuffered"),
    [
        ("full", ["--help"], ""),
        ("full", ["relu", "--bundle", "/dev/null"], "1"),
        ("closed pipe", ["--help"], "1"),
        ("closed pipe", ["relu", "--bundle", "/dev/null"], ""),
    ],
)
def test_stdout_that_takes_nothing(stdout, options, unbuffered):
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        command(*options),
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=full if stdout == "full" else pipe,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(pipe)
    os.close(full)
    reason = os.strerror(errno.ENOSPC if stdout == "full" else errno.EPIPE)
    assert done.returncode == 1
    assert done.stderr == f"run.py: cannot write to stdout: {reason}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "options", "status"),
    [(">&- 2>&-", "--help", 0), ("2>&-", "--rows 0", 2), ("2>/dev/full", "--rows 0", 2)],
)
def test_streams_that_are_not_there(streams, options, status):
    line = f'"{sys.executable}" "{ROOT / "run.py"}" {options} {streams}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_progress_that_nobody_takes(monkeypatch):
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        progress = Progress()
        progress("a stage")
        progress.clear()
    with suppress(OSError):
        full.close()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["import", "build"])
def test_interrupts(moment, tmp_path):
    marks = {"import": (" torch._C\n", "-X", "importtime"), "build": ("building the kernels",)}
    mark, *flags = marks[moment]
    program, *rest = command(*TINY)
    process = subprocess.Popen(
        [program, *flags, *rest],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup switches it off
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if mark in line:
                break
        sleep(2 if moment == "build" else 0)  # a compiler is at work
        process.send_signal(signal.SIGINT)
        said += process.stderr.readlines()
        assert process.wait() == 130
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the compiler
    assert lines_of("".join(said)) == ["run.py: interrupted"]


@pytest.mark.slow
def test_interrupts_that_were_switched_off():
    """As nohup and `&` in a script do."""
    process = subprocess.Popen(
        command("relu", "--bundle", "/dev/null"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        sleep(0.1)
    assert process.stderr.read() == ""
    assert process.returncode == 0


# 2: no assertions, no docstrings
@pytest.mark.parametrize("optimize", ["", pytest.param("2", marks=pytest.mark.slow)])
def test_from_end_to_end(optimize, tmp_path):
    path = tmp_path / "result.json"
    options = ["relu", "--rows", "1", "--trials", "3", "--device", "cpu", "--json", str(path)]
    done = subprocess.run(
        command(*options),
        env={**os.environ, "PYTHONOPTIMIZE": optimize},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building the kernels" in done.stderr
    assert done.stdout.startswith("cpu: ")
    assert "no GPU" not in done.stdout  # nobody asked for one
    assert "torch.relu (again)" in done.stdout
    assert "NumPy" not in done.stderr
    assert (
        "kept for backward: ModelNew 49,152 bytes, torch.relu 1,572,864 bytes (1/32)" in done.stdout
    )
    [record] = json.loads(path.read_text())["records"]
    assert record["shape"] == [1, 393216]
    assert (record["verdict"], record["reason"]) == ("correct", "")
    [timed] = record["runs"]
    assert {len(times) for times in timed["forward"]["seconds"].values()} == {3}
    assert timed["step"]["kept_bytes"] == {"ModelNew": 49152, "torch.relu": 1572864}
    for half in ("forward", "backward", "step"):
        assert {len(times) for times in timed["step"]["seconds"][half].values()} == {3}


def test_integers_have_no_step(solution, capsys, tmp_path):
    solution(Model)
    path = tmp_path / "result.json"
    options = ["relu", "--dtype", "int8", "--rows", "1", "--trials", "1", "--device", "cpu"]
    assert run.main([*options, "--json", str(path)]) == 0
    assert "training step" not in capsys.readouterr().out
    [record] = json.loads(path.read_text())["records"]
    assert [timed["step"] for timed in record["runs"]] == [None]


def test_json_on_a_full_disk(solution, monkeypatch, capsys):
    solution(Model)
    monkeypatch.setattr(relu, "check_small", lambda *arguments: correctness.Checks())
    options = ["--dtype", "int8", "--json", "/dev/full"]
    assert run.main([*TINY, *options]) == 1
    output = capsys.readouterr()
    assert "WRONG" not in output.out
    [line] = lines_of(output.err)
    assert line == "run.py: cannot write /dev/full: No space left on device"


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_dtypes_of_newer_torch(dtype, solution, capsys):
    solution(Model)
    options = ["relu", "--dtype", dtype, "--rows", "1", "--trials", "1", "--device", "cpu"]
    if dtype in cases.served(torch.device("cpu")):
        assert run.main(options) == 0
        assert f"[1, 393216] {dtype}\n" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit) as stopped:
            run.main(options)
        assert stopped.value.code == 2
        message = f"torch.relu of torch {torch.__version__} does not take torch.{dtype} on cpu"
        assert capsys.readouterr().err == f"run.py: {message}\n"


def test_why_there_is_no_gpu(monkeypatch, solution, capsys):
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    solution(Clone)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert run.main(["relu", "--rows", "1"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    reason = "torch.cuda.is_available() is false (Found no NVIDIA driver on your system)"
    assert f" threads); no GPU: {reason}; torch {torch.__version__}, " in first
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert run.main(["relu", "--rows", "1"]) == 1
    assert "; no GPU: torch is a CPU build; " in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
@pytest.mark.usefixtures("small_weights")
def test_both_problems(solution, capsys, tmp_path):
    path = tmp_path / "result.json"
    options = ["--device", "cpu", "--rows", "5", "--trials", "2", "--json", str(path)]
    solution(Model)
    assert run.main(options) == 0
    output = capsys.readouterr().out
    assert output.startswith("relu: ")
    assert "\n\nlinear_relu_divide: " in output
    assert "highest, gradient of weight" in output
    relu, linear = json.loads(path.read_text())["records"]
    assert [relu["problem"], linear["problem"]] == ["relu", "linear_relu_divide"]
    assert linear["shape"] == [5, 96]
    assert [row["name"] for row in linear["errors"]][:2] == [
        "highest, x in 0..1",
        "highest, x normal",
    ]
    [timed] = linear["runs"]
    timings = timed["forward"]
    assert timed["setting"] == "highest"
    assert (timings["work"], timings["work_unit"]) == (2 * 5 * 96 * 80, "flops")
    assert set(timings["seconds"]) == {
        "LinearReluDivideNew", "eager", "eager (again)", "product alone",
    }  # fmt: skip
    assert {len(times) for times in timings["seconds"].values()} == {2}
    assert timed["step"]["kept_bytes"]["eager"] == 5 * 80 * 4

    class NoBias(LinearReluDivide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.linear.weight.T) / self.divisor

    solution(Model, NoBias)  # the second alone is wrong
    assert run.main(options) == 1
    output = capsys.readouterr().out
    assert "WRONG  float32, [" in output
    relu, linear = json.loads(path.read_text())["records"]
    assert (relu["verdict"], linear["verdict"]) == ("correct", "wrong")
    assert linear["errors"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_linear_in_other_dtypes(dtype, solution, capsys):
    solution(Model)
    options = ["--dtype", dtype, "--device", "cpu", "--rows", "5", "--trials", "5"]
    assert run.main(["linear_relu_divide", *options]) == 0
    output = capsys.readouterr().out
    assert f"[5, 96] {dtype}" in output
    assert "highest" not in output  # the setting is float32's


def test_problem_without_solution(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "model_new", SimpleNamespace(SOLUTIONS={}))
    assert run.main(["relu", "--device", "cpu", "--rows", "1"]) == 1
    assert "it has none for relu" in capsys.readouterr().err
