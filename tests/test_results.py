"""Results that people look at: JSON, Markdown, sweeps, plots, README's picture."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from time import sleep
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from documents import HEADLINE, check_shape, document, record, timings

import run
from model import PROBLEMS, Model
from referee import linear_relu_divide as linear
from referee import records, relu, sweep, timing
from referee.correctness import Checks
from referee.outcome import Outcome, Run
from referee.progress import Progress
from referee.report import markdown, plot
from referee.solutions import CHEATING, Verdict
from referee.step import Step


@pytest.fixture
def quick(monkeypatch, solution, small_weights):
    """Torch's own modules, of which few cases are checked."""
    solution(Model)
    monkeypatch.setattr(relu, "check_small", lambda *arguments: Checks(1))
    monkeypatch.setattr(linear, "check_small", lambda *arguments: Checks(1))


@pytest.fixture
def small_sweep(monkeypatch):
    monkeypatch.setattr(relu, "SWEEP", {"cpu": range(10, 13)})
    monkeypatch.setattr(linear, "SWEEP", {"cpu": (1, 4)})
    monkeypatch.setattr(sweep, "COPIED", {"cpu": 1 << 20})


# ---------------------------------------------------------------------------------------- JSON


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("names", [["relu"], ["linear_relu_divide"], []])
def test_json_of_problems(names, tmp_path):
    path = tmp_path / "result.json"
    options = ["--device", "cpu", "--rows", "2", "--trials", "3", "--json", str(path)]
    assert run.main([*names, *options]) == 0
    found = check_shape(path.read_text())
    assert [r["problem"] for r in found] == (names or [*PROBLEMS])
    assert {(r["verdict"], r["file"], r["dtype"]) for r in found} == {("correct", None, "float32")}
    assert all(timed["step"] for r in found for timed in r["runs"])
    command = json.loads(path.read_text())["command"]
    assert command.startswith("python run.py " + " ".join([*names, "--device cpu --rows 2"]))


@pytest.mark.usefixtures("quick")
def test_several_dtypes(tmp_path, capsys):
    path, table = tmp_path / "result.json", tmp_path / "table.md"
    options = ["--device", "cpu", "--rows", "2", "--trials", "2", "--dtype", "float32,int8"]
    assert run.main(["relu", *options, "--json", str(path), "--markdown", str(table)]) == 0
    assert [r["dtype"] for r in check_shape(path.read_text())] == ["float32", "int8"]
    labels = [line.split(" | ")[0] for line in table.read_text().splitlines()[4:]]
    assert labels == [f"| relu `[2, 393216]` {dtype}" for dtype in ("float32", "int8")]
    assert "\n\nrelu: cpu: " in capsys.readouterr().out


def test_json_of_graded_files(monkeypatch, tmp_path, capsys):
    files = [tmp_path / "right.py", tmp_path / "wrong.py"]
    for file in files:
        file.touch()

    def grade(files, task, report):
        right = Verdict(files[0], accuracy="exact", count=3, import_seconds=2.0)
        right.timings = timings(relu)
        report(right)
        report(Verdict(files[1], CHEATING, "returns its input"))

    monkeypatch.setattr(run.solutions, "grade_files", grade)
    path, table = tmp_path / "result.json", tmp_path / "table.md"
    options = ["--device", "cpu", "--rows", "1", "--json", str(path), "--markdown", str(table)]
    assert run.main(["relu", *options, "--solution", *map(str, files)]) == 1
    right, wrong = check_shape(path.read_text())
    assert (right["file"], right["verdict"], right["accuracy"]) == (
        str(files[0]), "correct", "exact",
    )  # fmt: skip
    assert right["import_seconds"] == 2.0
    assert [timed["time"] for timed in right["runs"]] == ["faster"]
    assert (wrong["verdict"], wrong["reason"]) == ("cheating", "returns its input")
    assert wrong["runs"] == []
    assert f"| `{files[1]}` | cheating: returns its input |  |" in table.read_text()


def test_written_whole_or_not_at_all(monkeypatch, tmp_path, quick):
    """As the file that is there already, so the one beside it."""
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.main(["relu", "--device", "cpu", "--rows", "1", "--trials", "1", "--json", str(path)])
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


# ------------------------------------------------------------------------------------- Markdown


def test_markdown():
    found = [record(kind, dtype) for kind, dtype in HEADLINE[:4]]
    found[1]["runs"][0]["step"] = records._step(
        Step(timings(relu, 1.5), timings(relu, 1.5), {"ModelNew": 1, "torch.relu": 32})
    )
    assert markdown.tables(document(found)) == (
        "a | GPU, torch 2.13, CUDA 13.0; `python run.py`, now.\n\n"
        "| x | ours | eager | `torch.compile` | fastest yardstick | eager / ours "
        "| training step |\n"
        "|---|---|---|---|---|---|---|\n"
        "| relu `[4, 8]` float32 | 1.500 ms, 4 GB/s | 3.000 ms | 2.500 ms | 2.000 ms, copy "
        "| **2.000** (2.000 to 2.000) |  |\n"
        "| relu `[4, 8]` float16 | 1.500 ms, 4 GB/s | 3.000 ms | 2.500 ms | 2.000 ms, copy "
        "| **2.000** (2.000 to 2.000) | 1.500 |\n"
        "| relu `[4, 8]` bfloat16 | 1.500 ms, 4 GB/s | 3.000 ms | 2.500 ms | 2.000 ms, copy "
        "| **2.000** (2.000 to 2.000) |  |\n"
        "| linear_relu_divide `[4, 8]` float32, `highest` | 1.500 ms, 0.004 TFLOP/s | 3.000 ms "
        "| 2.500 ms | 2.000 ms, product alone | **2.000** (2.000 to 2.000) |  |\n"
        "| linear_relu_divide `[4, 8]` float32, `high` | 1.500 ms, 0.004 TFLOP/s | 3.000 ms "
        "| 2.500 ms | 2.000 ms, product alone | **2.000** (2.000 to 2.000) |  |\n"
    )


def test_markdown_of_what_is_wrong():
    facts = {"problem": "relu", "shape": (4, 8), "dtype": "int8"}
    found = [records.of_outcome(facts, Outcome(Checks(3, ["one", "two"])), 0.0)]
    text = markdown.tables({**document(found), "complete": False})
    assert text.endswith("| relu `[4, 8]` int8 | **wrong** one; two |  |  |  |  |  |\n")
    assert "Interrupted: not all of it was measured." in text


# --------------------------------------------------------------------------------------- sweeps


@pytest.mark.usefixtures("quick", "small_sweep")
def test_sweep(tmp_path, capsys):
    path, table = tmp_path / "sweep.json", tmp_path / "sweep.md"
    options = ["--sweep", "--device", "cpu", "--trials", "5", "--json", str(path)]
    assert run.main([*options, "--dtype", "float32,float16", "--markdown", str(table)]) == 0
    found = check_shape(path.read_text())
    sizes = [
        ("relu", [2**e // 1024, 1024], d) for d in ("float32", "float16") for e in (10, 11, 12)
    ]
    sizes += [("linear_relu_divide", [m, 96], d) for d in ("float32", "float16") for m in (1, 4)]
    assert [(r["problem"], r["shape"], r["dtype"]) for r in found] == sizes
    limits = [timed["forward"]["roofline_seconds"] for r in found for timed in r["runs"]]
    assert len(limits) == len(sizes)
    assert min(limits) > 0
    lines = capsys.readouterr().out.splitlines()
    places = [lines[0].startswith("cpu: ")] + [line.find("/ this") for line in lines[2:]]
    assert sum(place > 0 for place in places) == 3  # the headline, two titles
    cases = [line for line in lines if line.startswith("[")]
    assert len(cases) == len(sizes)
    assert {line.index(" [", 8) - line[:70].rindex(" [") for line in cases} == {0}  # aligned
    assert table.read_text().count("\n| ") == 1 + len(sizes)


@pytest.mark.usefixtures("quick", "small_sweep")
def test_sizes_that_are_left_out(monkeypatch, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    options = ["relu", "--sweep", "--device", "cpu", "--dtype", "float32", "--json", str(path)]
    monkeypatch.setattr(sweep, "free_bytes", lambda device: 4 * 4 * 2048)  # 4 buffers of 2^11
    assert run.main([*options, "--trials", "3"]) == 0
    found = check_shape(path.read_text())
    assert [r["verdict"] for r in found] == ["correct", "left out", "left out"]
    assert "[4, 1024] float32               left out: needs 0.0 GiB" in capsys.readouterr().out
    monkeypatch.undo()


@pytest.mark.usefixtures("quick", "small_sweep")
def test_a_sweep_whose_time_is_over(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "SECONDS", {"cpu": 0.0})
    assert run.main(["relu", "--sweep", "--device", "cpu", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.count("left out: the 0 s of a sweep are over\n") == 3


@pytest.mark.usefixtures("small_sweep", "small_weights")
def test_a_sweep_of_a_wrong_solution(solution, capsys):
    class Zeros(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

    solution(Zeros)
    assert run.main(["relu", "--sweep", "--device", "cpu", "--dtype", "float32"]) == 1
    assert "WRONG  [1, 1024] float32: a timed call was wrong in rows" in capsys.readouterr().out


def test_roofline():
    """Where memory limits, its time; elsewhere that of the highest rate."""
    sizes = [sweep.Size("linear_relu_divide", "float32", "", (m, 8)) for m in (1, 1000)]
    for size, work, floor in zip(sizes, (10, 10_000), (1.0, 10.0), strict=True):
        made = timing.Timings("cpu", linear.NAMES, linear.RATE, work, moved=500, floor=floor)
        size.run = Run("", made)
    sweep.add_limits(sizes, 100.0)
    assert [size.limit for size in sizes] == [5.0, 10.0]


@pytest.mark.gpu
def test_sweep_on_a_gpu(tmp_path):
    """All sizes that fit are right, and the largest is as fast as torch."""
    path = tmp_path / "sweep.json"
    assert run.main(["--sweep", "--json", str(path)]) == 0
    found = check_shape(path.read_text())
    assert {r["verdict"] for r in found} <= {"correct", "left out"}
    assert sum(r["verdict"] == "correct" for r in found) >= 50
    seconds = [timed["forward"] for r in found for timed in r["runs"]]
    assert all(timing.COMPILED in forward["seconds"] for forward in seconds)
    for forward in seconds:  # no call beats the roofline by more than the floor's margin
        ours = next(row for row in forward["summary"] if row["role"] == "solution")
        assert ours["median_ms"] * 1e-3 > forward["roofline_seconds"] / 1.3


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forward", "sweep"])
def test_interrupts_keep_what_was_measured(moment, tmp_path):
    """A real one, of a real run, which ends at once."""
    path = tmp_path / "result.json"
    options = ["--device", "cpu", "--json", str(path), "relu"]
    options += ["--sweep"] if moment == "sweep" else ["--rows", "4", "--trials", "100000"]
    process = subprocess.Popen(
        [sys.executable, run.__file__, *options],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup switches it off
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if moment == "sweep":
            next(line for line in process.stdout if line.startswith("["))
        else:
            next(line for line in process.stderr if line.startswith("timing the forward round"))
            sleep(1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.endswith("run.py: interrupted\n")
    content = json.loads(path.read_text())
    assert content["complete"] is False
    first = check_shape(path.read_text())[0]
    assert first["verdict"] == ("correct" if moment == "sweep" else "interrupted")
    assert first["runs"]
    if moment == "forward":
        assert "torch.relu (again)" in output


# ---------------------------------------------------------------------------------------- plots


def swept() -> dict:
    found = []
    for kind, problem in ((relu, "relu"), (linear, "linear_relu_divide")):
        for rows in (4, 16, 64):
            size = sweep.Size(problem, "float32", "", (rows, 8), Run("", timings(kind)))
            size.run.timings.work = 1000 * rows
            size.limit = 1e-3 if rows > 4 else None  # as in a series that was interrupted
            found.append(records.of_size(size, 0.0))
    size.run, size.left_out = None, "needs more"
    return document([*found, records.of_size(size, 0.0)], "sweep")


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_plot(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    data, path = tmp_path / "sweep.json", tmp_path / f"plot{suffix}"
    data.write_text(json.dumps(swept()))
    assert plot.main([str(data), str(path)]) == 0
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    assert path.read_bytes() == plot.draw(swept(), suffix)  # the same for the same data
    text = path.read_text()
    ElementTree.fromstring(text)
    for word in ("ModelNew", "torch.compile", "copy", "product alone", "roofline", "TFLOP/s"):
        assert f"<!-- {word} -->" in text
    assert "(again)" not in text


@pytest.mark.usefixtures("quick", "small_sweep")
def test_plot_of_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    assert run.main(["relu", "--device", "cpu", "--trials", "2", "--plot", str(path)]) == 0
    assert "<!-- relu bfloat16 -->" in path.read_text()


def test_plot_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        run.main(["relu", "--plot", str(tmp_path / "a.svg")])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert (
        output.err == "run.py: argument --plot: drawing needs matplotlib: pip install matplotlib\n"
    )


# -------------------------------------------------------------------------------------- picture


def test_picture(tmp_path):
    """The texts are those of the data."""
    pytest.importorskip("matplotlib")
    found = [record(kind, d, ratio=2.0 if kind is relu else 4.0) for kind, d in HEADLINE]
    data, path = tmp_path / "results.json", tmp_path / "figures.svg"
    data.write_text(json.dumps(document(found)))
    assert plot.main([str(data), str(path)]) == 0
    text = path.read_text()
    ElementTree.fromstring(text)
    names = ["ModelNew"] * 3 + ["LinearReluDivideNew"] * 3
    settings = [f"{dtype}, 1.500 ms" for dtype in ("float32", "float16", "bfloat16")]
    settings += [f"{setting}, 0.750 ms" for setting in ("highest", "high", "float16")]
    ratios = ["1.000"] * 6 + ["1.200"] * 6 + ["2.000"] * 3 + ["4.000"] * 3
    legend = ["eager", "torch.compile", "this project"]
    title = ["Speed over eager on a | GPU, torch 2.13"]
    shown = [word for pair in zip(names, settings, strict=True) for word in pair]
    assert re.findall("<!-- (.+?) -->", text) == shown + ratios + legend + title


@pytest.mark.parametrize("fault", ["wrong", "missing", "no json", "[]", '{"schema": 0}'])
def test_pictures_that_are_refused(fault, tmp_path, capsys):
    found = [record(*key) for key in HEADLINE]
    if fault == "wrong":
        found[1]["verdict"] = "wrong"
    if fault == "missing":
        del found[1]
    data, path = tmp_path / "a.json", tmp_path / "a.svg"
    is_ours = fault in ("wrong", "missing")
    data.write_text(json.dumps(document(found)) if is_ours else fault)
    assert plot.main([str(data), str(path)]) == 2
    assert not path.exists()
    reason = "no correct result of relu float16\n" if is_ours else f"{data} is no"
    assert capsys.readouterr().err.startswith(f"referee.report.plot: {reason}")


# ------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize(
    ("terminal", "term", "written"),
    [
        (True, "xterm", "\r\x1b[Ka stage, 7 of 10 rou\r\x1b[K"),
        (True, "dumb", "a stage, 7 of 10 rounds\n"),
        (False, "xterm", "a stage, 7 of 10 rounds\n"),
    ],
)
def test_progress(terminal, term, written, monkeypatch):
    """On a terminal a line that fits, and is removed; elsewhere no escapes."""
    texts = []
    stream = SimpleNamespace(isatty=lambda: terminal, write=texts.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "21")
    progress = Progress()
    progress("a stage,", "7 of 10 rounds")
    progress("a stage,", "8 of 10 rounds")  # too soon to be shown
    progress.clear()
    assert "".join(texts) == written


@pytest.mark.parametrize(
    ("done", "seconds", "wanted", "text"),
    [
        (0, 0.0, timing.Rounds(10), " of 10"),
        (2, 4.0, timing.Rounds(10), " of 10, 16 s left"),
        (2, 4.0, timing.Rounds(None, 10.0), ", 6 s left"),
        (40, 4.0, timing.Rounds(None, 10.0), ", 1 s left"),
        (2, 20.0, timing.Rounds(None, 10.0), ", 10 s left"),
    ],
)
def test_time_left(done, seconds, wanted, text):
    assert timing._time_left(done, seconds, wanted, torch.device("cpu")) == text


# ----------------------------------------------------------------------------------------- help


def documented_errors(forward) -> set[str]:
    """The names below `Raises:` of a docstring."""
    _, _, raises = forward.__doc__.partition("Raises:\n")
    return {line.split(":")[0].strip() for line in raises.splitlines() if ": " in line}


def raised(call, *arguments) -> str:
    with pytest.raises(Exception) as caught:
        call(*arguments)
    return type(caught.value).__name__


def test_help():
    """The docstrings name shapes, dtypes, arguments and the errors that there are."""
    from model_new import LinearReluDivideNew, ModelNew

    module = LinearReluDivideNew(3, 2, 2.0)
    leaf = torch.ones(2, requires_grad=True)
    for forward, errors in (
        (
            ModelNew.forward,
            {
                raised(ModelNew(), torch.ones(2, dtype=torch.bool)),
                raised(ModelNew(), torch.ones(2, dtype=torch.complex64)),
                raised(ModelNew(inplace=True), leaf),
                raised(ModelNew(), [1.0]),
            },
        ),
        (
            LinearReluDivideNew.forward,
            {
                raised(module, torch.ones(2, 4)),
                raised(module, torch.ones(2, 3, dtype=torch.float16)),
                raised(module, torch.ones(())),
                raised(module, [1.0]),
            },
        ),
    ):
        assert documented_errors(forward) == errors
        for word in ("Args:\n", "Returns:\n", "float32, float64", "float16"):
            assert word in forward.__doc__
    for kind, names in ((ModelNew, ["inplace"]), (LinearReluDivideNew, ["in_features", "divisor"])):
        assert all(f"    {name}: " in kind.__doc__ for name in names)
