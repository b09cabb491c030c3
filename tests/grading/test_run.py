"""The command line: bad input, exit statuses, runs of stand-ins and of the real thing."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from time import sleep
from types import SimpleNamespace

import pytest
import torch

import run
from problems import elementwise
from referee.program import command as grading_command
from referee.project import project_command
from tests.grading.result_files import check_shape
from tests.support.command_line import interrupt_after, messages, run_to_end, start
from tests.support.processes import ROOT, copy_project, python

pytestmark = pytest.mark.usefixtures("one_server")

CPU = ["--device", "cpu", "--rows", "1", "--trials", "1"]
RELU = "class ModelNew(model.Model):\n    def forward(self, x):\n        return "
FULL = "No space left on device"

# `run.py` refuses these commands. {file} is a plain file, and {fifo} a named pipe.
BAD_COMMANDS = [
    "no_such_problem",
    "--rows 0",
    "--rows -1",
    "--rows many",
    "--rows 999999999999999999999999999999",
    "--trials 0",
    "--dtype bool",
    "--dtype float32,bool",
    "--dtype int8",
    "linear_relu_divide --dtype int8",
    "--device tpu",
    "--device meta",
    "--device cuda:99",
    "--no-such-option",
    "--timeout 3",
    "--timeout 0",
    "linear_relu_divide --rows 999999999999999999999999999999",
    "--sweep --rows 3",
    "--json /no/such/folder/file",
    "--json /",
    "--markdown /no/such/folder/file",
    "--plot a.txt",
    "--plot /no/such/folder/a.svg",
    "--bundle solution.py",
    "relu --sweep --bundle a.py",
    "relu --bundle /no/such/folder/file",
    "relu --bundle a.py --solution {file}",
    "--solution {file}",
    "relu --solution",
    "relu --solution /no/such/file",
    "relu --solution /dev/zero",
    "relu --solution /",
    "relu --solution {fifo}",
    "relu --solution a\0b",
    "relu --timeout 3",
    "relu --solution {file} --timeout 0",
    "relu --solution {file} --sweep",
    "relu --solution {file} --dtype float32,float16",
    "relu --solution {file} --json {file}",
    "linear_relu_divide --solution {file} --dtype int8",
    "--reference {file}",
    "--reference /no/such/file --solution {file}",
    "relu --reference {file} --solution {file}",
    "--reference {file} --solution {file} --rows 3",
    "--reference {file} --solution {file} --device tpu",
    "--reference {file} --solution {file} --dtype float16",
]


@pytest.mark.parametrize("words", BAD_COMMANDS)
def test_bad_input_is_refused_in_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    (tmp_path / "plain.py").write_text(f"import model\n{RELU}x\n")
    with pytest.raises(SystemExit) as stopped:
        run.main(words.format(fifo="fifo", file="plain.py").split(" "))
    output = capsys.readouterr()
    assert (stopped.value.code, output.out) == (2, "")
    assert output.err.startswith("run.py: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("forward", "word", "reason"),
    [
        ("torch.relu(x) + 1", "wrong", r"elements differ, the first at [0, 0]: got 1"),
        ("x.clone()", "wrong", "returns a copy of its input 0: float32, random, seed "),
        ("0 * x.abs()", "wrong", "returns zeros: float32, random, seed "),
    ],
)
def test_a_wrong_solution_gets_a_reason_and_is_not_timed(
    forward, word, reason, place_solution, small_problems, capsys, tmp_path
):
    # The file lacks the other problem's class. Asking for it would raise TypeError, because this
    # `__getattr__` cannot be called.
    place_solution(f"{RELU}{forward}\n\n\n__getattr__ = None")
    path = tmp_path / "result.json"
    assert run.main(["relu", *CPU, "--json", str(path)]) == 1
    output = capsys.readouterr().out
    assert " cases compared with the reference, 1 wrong\nnothing was timed\n" in output
    assert f"\n{word.upper()}  " in output
    [record] = check_shape(path.read_text())
    assert (record["verdict"], record["runs"]) == (word, [])
    assert reason in record["reason"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "x = 1",
            "AttributeError: the file defines no ModelNew; it defines no class or function",
        ),
        (
            "class ModelNw:\n    pass",
            "AttributeError: the file defines no ModelNew; it defines ModelNw",
        ),
        ("import no_such", "ModuleNotFoundError: No module named 'no_such', line 6"),
        ("raise SystemExit(3)", "SystemExit: 3, line 6"),
    ],
)
def test_a_failed_import_is_told(text, reason, place_solution, small_problems, capsys):
    place_solution(text)
    assert run.main(["relu", *CPU]) == 1
    output = capsys.readouterr()
    assert (output.out, messages(output.err)) == (
        "",
        [f"the solution cannot be imported: {reason}"],
    )


def why_not_imported(**options) -> str:
    """Run `run.py`, whose solution cannot be imported, and return the message."""
    done = run_to_end("relu", *CPU, **options)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = messages(done.stderr)
    assert line.startswith("the solution cannot be imported: ")
    return line


def test_a_failed_build_names_the_compiler(tmp_path):
    line = why_not_imported(CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert ": BuildError: " in line and "no-such-compiler" in line


def run_without_torch(*words):
    """Run Python with these words. By -S it sees its own library and PYTHONPATH, but no package."""
    return subprocess.run(
        [sys.executable, "-S", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_help_of_the_benchmarks_needs_no_torch():
    done = run_without_torch("-m", "problems.benchmark", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m problems.benchmark")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("run.py", ["run.py", "--help"]),
        ("problems.benchmark", ["-m", "problems.benchmark", "host"]),
    ],
)
def test_a_missing_torch_gives_the_command_that_installs_it(program, words):
    done = run_without_torch(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{program}: torch is not installed: pip install -r require")
    assert done.stderr.count("\n") == 1


def test_an_old_python_is_named_before_anything_is_imported():
    code = """
        import runpy, sys
        sys.version_info, sys.version = (3, 9, 1), "3.9.1 (main)"
        runpy.run_path("run.py", run_name="__main__")
    """
    done = python(code, ROOT)
    assert (done.returncode, done.stderr) == (1, "Python 3.9.1 is too old, 3.10 is needed\n")


def test_a_missing_solution_is_named(tmp_path):
    copy_project(tmp_path)
    (tmp_path / "model_new.py").unlink()
    assert "model_new" in why_not_imported(folder=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_without_home_can_run_it():
    """The build is then in a temporary folder. The user is not in the list of users either."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    # Python may be in a folder that only root can read.
    rights = "+dac_override,+dac_read_search"
    user = ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={rights}"]
    unset = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"))
    before = [*user, f"--ambient-caps={rights}"]
    done = run_to_end("relu", *CPU, before=before, cwd="/", **unset)
    assert done.returncode == 0, done.stderr
    assert "relu: cpu" in done.stdout


def test_a_bundle_is_written_or_the_error_is_told(monkeypatch, capsys, tmp_path):
    bundles = SimpleNamespace(bundle=lambda problem: f"# {problem}\n")
    monkeypatch.setitem(sys.modules, "kernels.build.bundle", bundles)
    path = tmp_path / "solution.py"
    assert run.main(["relu", "--bundle", str(path)]) == 0
    assert path.read_text() == "# relu\n"
    assert capsys.readouterr().out.count("\n") == 1
    assert run.main(["relu", "--bundle", "/dev/full"]) == 1
    assert messages(capsys.readouterr().err) == [f"cannot write /dev/full: {FULL}"]


def test_a_path_that_stdout_cannot_print_is_escaped(tmp_path):
    path = tmp_path / "é\udcff.py"
    done = run_to_end("relu", "--bundle", str(path), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout or "\\udcc3" in done.stdout
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "unbuffered", "number"),
    [  # any two of these three are combined in all ways
        (["--help"], "", errno.ENOSPC),
        (["--help"], "1", errno.EPIPE),
        (["relu", "--bundle", "/dev/null"], "", errno.EPIPE),
        (["relu", "--bundle", "/dev/null"], "1", errno.ENOSPC),
    ],
)
def test_a_stdout_that_takes_nothing_gives_one_line(options, unbuffered, number):
    if number == errno.EPIPE:
        reader, out = os.pipe()
        os.close(reader)
    else:
        out = os.open("/dev/full", os.O_WRONLY)
    done = run_to_end(*options, out=out, PYTHONUNBUFFERED=unbuffered)
    os.close(out)
    message = f"run.py: cannot write to stdout: {os.strerror(number)}\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "options", "status"),
    [(">&- 2>&-", "--help", 0), ("2>&-", "--rows 0", 2), ("2>/dev/full", "--rows 0", 2)],
)
def test_missing_streams_change_no_exit_status(streams, options, status):
    line = f'"{sys.executable}" "{ROOT / "run.py"}" {options} {streams}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.mark.slow
def test_an_interrupt_ends_it_at_any_time_in_one_line(tmp_path):
    """The program may be importing torch, or waiting for a compiler."""
    interrupt_after(" torch._C\n", *CPU, flags=["-X", "importtime"])
    interrupt_after("building the kernels", *CPU, wait=2.0, TORCH_EXTENSIONS_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forward", "sweep"])
def test_interrupts_keep_what_was_measured(moment, tmp_path):
    path = tmp_path / "result.json"
    options = ["relu", "--device", "cpu", "--json", str(path)]
    if moment == "sweep":
        interrupt_after("[4, 1024] ", *options, "--sweep")
    else:
        options += ["--rows", "4", "--trials", "100000"]
        output = interrupt_after("timing the forward round", *options, wait=1.0)
        assert "torch.relu (again)" in output
    first, *_ = check_shape(path.read_text())
    assert json.loads(path.read_text())["complete"] is False
    assert first["verdict"] == ("correct" if moment == "sweep" else "interrupted")
    assert first["runs"]


@pytest.mark.slow
def test_interrupts_that_were_switched_off_do_nothing():
    """Both nohup and `&` in a script switch them off; the program then runs to its end."""
    process = start("relu", "--bundle", "/dev/null", sigint=signal.SIG_IGN)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        sleep(0.1)
    assert process.returncode == 0
    assert process.stdout.read().startswith("wrote /dev/null: ")


@pytest.mark.parametrize("optimize", ["", pytest.param("2", marks=pytest.mark.slow)])
def test_our_relu_passes_from_end_to_end(optimize, tmp_path):
    """At level 2 of its optimizations, Python drops assertions and docstrings."""
    options = ["relu", "--device", "cpu", "--rows", "1", "--trials", "3", "--json", "result.json"]
    (tmp_path / "random.py").write_text('raise ImportError("not Python\'s own")')
    done = run_to_end(*options, cwd=tmp_path, PYTHONOPTIMIZE=optimize)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building the kernels" in done.stderr
    assert "NumPy" not in done.stderr
    assert done.stdout.startswith("relu: cpu: ")
    assert "no GPU" not in done.stdout  # nobody asked for one
    assert "bytes, torch.relu 1,572,864 bytes (1/32)\n" in done.stdout
    [record] = check_shape((tmp_path / "result.json").read_text())
    assert (record["verdict"], record["reason"], record["cases"] > 500) == ("correct", "", True)
    elements = 393216
    assert record["shape"] == [1, elements]
    [timed] = record["runs"]
    # Our ReLU keeps a bit of each element, and torch's the output.
    kept = {"ModelNew": elements // 8, "torch.relu": 4 * elements}
    assert timed["step"]["kept_bytes"] == kept
    for seconds in (timed["forward"]["seconds"], *timed["step"]["seconds"].values()):
        assert {len(times) for times in seconds.values()} == {3}


# The references themselves as solutions of both problems.
BOTH = "ModelNew, LinearReluDivideNew = (p.reference for p in model.PROBLEMS.values())"
BOTH_OPTIONS = ["--device", "cpu", "--rows", "5", "--trials", "2"]


@pytest.mark.slow
def test_both_problems_are_compared_and_timed(place_solution, small_problems, capsys, tmp_path):
    place_solution(BOTH)
    path = tmp_path / "result.json"
    assert run.main([*BOTH_OPTIONS, "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("relu: ")
    assert "\n\nlinear_relu_divide: " in output
    relu, linear = check_shape(path.read_text())
    assert [relu["problem"], linear["problem"]] == ["relu", "linear_relu_divide"]
    assert (linear["shape"], linear["accuracy"]) == ([5, 96], "float32-grade")
    names = [f"highest, gradient of {name}" for name in ("x", "linear.weight", "linear.bias")]
    assert [row["name"] for row in linear["errors"]] == ["[5, 96], highest", *names]
    assert names[1] in output
    [timed] = linear["runs"]
    forward = timed["forward"]
    kept = timed["step"]["kept_bytes"]
    flops = 2 * 5 * 96 * 80  # of x [5, 96] and weight [80, 96]
    assert (timed["setting"], forward["work"], forward["work_unit"]) == ("highest", flops, "flops")
    assert forward["seconds"].keys() == {*kept, "eager (again)", "product alone"}
    assert (len(forward["seconds"]["eager"]), kept["eager"]) == (2, 5 * 80 * 4)


@pytest.mark.slow
def test_a_wrong_solution_of_one_problem_leaves_the_other_correct(
    place_solution, small_problems, capsys, tmp_path
):
    wrong = "return torch.relu(x @ self.linear.weight.T) / self.divisor"
    wrong = f"class Wrong(model.LinearReluDivide):\n    def forward(self, x):\n        {wrong}\n"
    place_solution(f"{wrong}\n\n{BOTH}\nLinearReluDivideNew = Wrong")
    path = tmp_path / "result.json"
    assert run.main([*BOTH_OPTIONS, "--json", str(path)]) == 1
    assert "WRONG  leaves out the bias: " in capsys.readouterr().out
    verdicts = [(r["verdict"], len(r["errors"])) for r in check_shape(path.read_text())]
    assert verdicts == [("correct", 0), ("wrong", 0)]


def test_the_quick_check_says_what_it_leaves_out(
    place_solution, small_problems, monkeypatch, capsys, tmp_path
):
    """It prints about how long it takes, and what only --full does."""
    place_solution("LinearReluDivideNew = model.LinearReluDivide")
    monkeypatch.setattr(grading_command, "CPU_SECONDS", 0.1)
    monkeypatch.setattr(grading_command, "FULL_CPU_SECONDS", 0.1)
    monkeypatch.setattr(project_command, "QUICK_PARAMETERS", 0)
    path = tmp_path / "result.json"
    options = ["linear_relu_divide", "--device", "cpu", "--rows", "2", "--json", str(path)]
    left = "gradients were compared at small sizes; --full compares and times them at this one"
    for more, is_quick in (([], True), (["--full"], False)):
        assert run.main([*options, *more]) == 0
        output = capsys.readouterr()
        begins = messages(output.err)
        assert bool(begins) == is_quick
        if is_quick:
            seconds = run.QUICK_SECONDS["cpu"]
            assert begins[0].startswith(f"a quick check of linear_relu_divide: about {seconds} s, ")
        [record] = check_shape(path.read_text())
        assert (left in record["notes"]) == (left in output.out) == is_quick
        assert (record["runs"][0]["step"] is None) == is_quick
        assert ("; --full measures for longer.\n" in output.out) == is_quick


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_linear_is_compared_in_other_dtypes(dtype, place_solution, small_problems, capsys):
    place_solution("ModelNew = model.LinearReluDivide")
    assert run.main(["linear_relu_divide", *CPU, "--dtype", dtype]) == 0
    output = capsys.readouterr().out
    assert f"[1, 96] {dtype}" in output
    assert "highest" not in output  # the setting is float32's


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_integer_dtypes_are_those_of_torch_relu(dtype, place_solution, small_problems, capsys):
    """Newer versions of torch support more of these dtypes; others are refused."""
    place_solution("ModelNew = model.Model")
    if dtype in elementwise.dtypes_of_relu(torch.device("cpu")):
        assert run.main(["relu", *CPU, "--dtype", dtype]) == 0
        assert f"[1, 131072] {dtype}\n" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as stopped:
        run.main(["relu", *CPU, "--dtype", dtype])
    assert stopped.value.code == 2
    message = f"torch.relu of torch {torch.__version__} does not take torch.{dtype} on cpu"
    assert messages(capsys.readouterr().err) == [message]


def test_the_output_says_why_there_is_no_gpu(monkeypatch, place_solution, small_problems, capsys):
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    place_solution(f"{RELU}x")
    reason = "torch.cuda.is_available() is false (Found no NVIDIA driver on your system)"
    for is_built, why in ((True, reason), (False, "torch is a CPU build")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        assert run.main(["relu", "--rows", "1"]) == 1
        first = capsys.readouterr().out.splitlines()[0]
        assert f" threads); no GPU: {why}; torch {torch.__version__}, " in first
