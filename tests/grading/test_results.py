"""The output of run.py: JSON, Markdown, printed tables, sweeps and its progress."""

import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import referee
import run
from problems import linear_relu_divide as linear
from problems import relu
from referee import engine, records
from referee.call_names import COMPILED
from referee.console import Progress
from referee.project import roofline, sweep
from referee.reference.file import NoRoomError
from referee.report import comparison_tables, graded_files, markdown, tables
from referee.times import round_limit
from referee.times.timings import StepTimings, TimesOfSetting, Timings
from referee.verdict import NotCorrectError
from referee.verdict_words import CORRECT, ERROR, LEFT_OUT
from tests.grading.result_files import check_shape
from tests.support.made_up_results import DTYPES, document, record, timings

pytestmark = pytest.mark.usefixtures("one_server")

OPTIONS = ["--device", "cpu", "--trials", "3"]
# The references, under the names of the solutions.
REFERENCES_AS_SOLUTIONS = """
class ModelNew(model.Model):
    pass


class LinearReluDivideNew(model.LinearReluDivide):
    pass
"""


@pytest.fixture
def quick(monkeypatch, place_solution, small_problems):
    """Make runs quick.

    A run of run.py then builds no kernels, because its solutions are the references. It compares
    outputs and gradients of the timed size alone, which `small_problems` makes small. A sweep has
    three sizes of ReLU (2^10, 2^11 and 2^12 elements) and two of the linear module (1 and 4 rows).
    The copy that measures the memory's bandwidth has 1 MiB.
    """
    place_solution(REFERENCES_AS_SOLUTIONS)
    for kind in (relu.ReluProblem, linear.LinearReluDivideProblem):
        monkeypatch.setattr(kind, "cases", lambda self, seed: ())
        monkeypatch.setattr(kind, "backward_inputs", lambda self: [])
    monkeypatch.setattr(relu, "SWEEP_EXPONENTS", {"cpu": range(10, 13)})
    monkeypatch.setattr(linear, "SWEEP_ROWS", {"cpu": (1, 4)})
    monkeypatch.setattr(roofline, "COPIED_BYTES", {"cpu": 1 << 20})


def test_a_run_writes_json_and_markdown_of_each_dtype(quick, tmp_path, capsys):
    path = tmp_path / "result.json"
    table = tmp_path / "table.md"
    options = [*OPTIONS, "--rows", "2", "--dtype", "float32,int8", "--json", str(path)]
    assert run.main(["relu", *options, "--markdown", str(table)]) == 0
    found = check_shape(path.read_text())
    facts = [(r["problem"], r["dtype"], r["verdict"], r["file"]) for r in found]
    assert facts == [("relu", dtype, "correct", None) for dtype in ("float32", "int8")]
    assert [bool(r["runs"][0]["step"]) for r in found] == [True, False]
    command = " ".join(["python run.py relu", *options, "--markdown", str(table)])
    assert json.loads(path.read_text())["command"] == command
    labels = [line.split(" | ")[0] for line in table.read_text().splitlines()[4:]]
    assert labels == [f"| relu `[2, 131072]` {dtype}" for dtype in ("float32", "int8")]
    output = capsys.readouterr().out
    assert (output.count("\n\nrelu: cpu: "), output.count("kernels ready in ")) == (1, 1)
    assert "\nAll correct: relu.\n" in output


def test_graded_files_are_in_json_markdown_and_the_output(quick, tmp_path, capsys):
    files = [tmp_path / "right.py", tmp_path / "wrong.py"]
    for file, result in zip(files, ("x.relu()", "x"), strict=True):
        text = f"import model\nclass ModelNew(model.Model):\n    forward = lambda self, x: {result}"
        file.write_text(text)
    path = tmp_path / "result.json"
    table = tmp_path / "table.md"
    options = [*OPTIONS, "--rows", "1", "--json", str(path), "--markdown", str(table)]
    assert run.main(["relu", *options, "--solution", *map(str, files)]) == 1
    right, wrong = check_shape(path.read_text())
    facts = [right[key] for key in ("file", "verdict", "accuracy")]
    assert facts == [str(files[0]), "correct", "exact"]
    assert (wrong["verdict"], wrong["runs"]) == ("wrong", [])
    assert wrong["reason"].startswith("returns its input")
    assert f"| `{files[1]}` | wrong: {wrong['reason']} |  |" in table.read_text()
    output = capsys.readouterr().out
    assert f"{files[0]}: correct (exact; " in output
    assert "; fast_2 0.00; " in output


PRINTS = """
import model
print("printed by the import")
class ModelNew(model.Model):
    def forward(self, x):
        print("printed by the forward")
        {end}
"""


def test_verbose_shows_what_graded_files_print(quick, tmp_path, capsys):
    """A traceback comes first. Without --verbose, a message says that something was printed."""
    files = {"right": "return x.relu()", "wrong": "return x + 1", "raises": "return self.no_such"}
    for name, end in files.items():
        (tmp_path / f"{name}.py").write_text(PRINTS.format(end=end))
    paths = [str(tmp_path / f"{name}.py") for name in files]
    options = ["relu", *OPTIONS, "--rows", "1", "--solution", *paths]
    assert run.main(options) == 1
    output = capsys.readouterr()
    assert "printed by" not in output.out
    for path, what in zip(paths, ("", "", "its traceback and "), strict=True):
        assert f"run.py: {path}: --verbose shows {what}what it printed\n" in output.err
    assert run.main([*options, "--verbose"]) == 1
    output = capsys.readouterr()
    assert "--verbose" not in output.err
    sections = re.split(r"^/\S+: ", output.out, flags=re.M)[1:4]
    for section in sections:
        assert "\n    printed by the import\n    printed by the forward\n" in section
    last = sections[2].index("    AttributeError: 'ModelNew' object has no attribute 'no_such'\n")
    assert f'"{Path(referee.__file__).parent}' not in output.out  # frames of the referee's own
    assert sections[2].index("Traceback") < last < sections[2].index("printed by the import")


def test_no_traceback_is_promised_for_a_crash(quick, tmp_path, capsys):
    path = tmp_path / "crashes.py"
    path.write_text(PRINTS.format(end="import os; os.kill(os.getpid(), 11)"))
    assert run.main(["relu", *OPTIONS, "--rows", "1", "--solution", str(path)]) == 1
    output = capsys.readouterr()
    assert "SIGSEGV" in output.out
    assert f"run.py: {path}: --verbose shows what it printed\n" in output.err


def test_a_result_that_cannot_be_written_leaves_the_old_file(quick, monkeypatch, tmp_path, capsys):
    """The disk may be full, or the writing may fail. No unfinished file is left beside it."""
    options = ["relu", *OPTIONS, "--rows", "1", "--json"]
    assert run.main([*options, "/dev/full"]) == 1
    output = capsys.readouterr()
    assert "WRONG" not in output.out
    assert output.err.endswith("run.py: cannot write /dev/full: No space left on device\n")
    path = tmp_path / "results" / "result.json"
    path.parent.mkdir()
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.main([*options, str(path)])
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


# ------------------------------------------------------------------------------- printed tables


def test_a_markdown_table_has_a_row_for_each_setting_and_for_each_wrong_result():
    found = [record(*key) for key in ((relu, "float16"), (linear, "float32"))]
    step = StepTimings(timings(relu, 1.5), timings(relu, 1.5), {"ModelNew": 1, "torch.relu": 32})
    found[0]["runs"][0]["step"] = records.make_step_record(step)
    found.append(record(relu, "int8", word="wrong", reason="one; two"))
    note = " Interrupted: not all of it was measured."
    times = "1.500 ms | 3.000 ms | **2.000** (2.000 to 2.000)"
    assert markdown.as_markdown({**document(found), "complete": False}).splitlines() == [
        f"a | GPU, torch 2.13, CUDA 13.0; `python run.py`, now.{note}",
        "",
        "| module, x | time | eager's time | eager / time | training step: eager / time |",
        "|---|---|---|---|---|",
        f"| relu `[4, 8]` float16 | {times} | 1.500 |",
        f"| linear_relu_divide `[4, 8]` float32, `highest` | {times} |  |",
        f"| linear_relu_divide `[4, 8]` float32, `high` | {times} |  |",
        "| relu `[4, 8]` int8 | **wrong** one; two |  |  |  |",
    ]


@pytest.mark.parametrize(("ratio", "noise", "is_tie"), [(2.0, 0.0, False), (1.001, 0.2, True)])
def test_ties_are_printed(ratio, noise, is_tie):
    """Eager's second measurement is always a tie. The solution is one if it is as fast as eager."""
    text = comparison_tables.results(
        records.make_run_record(TimesOfSetting("", timings(relu, ratio, noise=noise)))
    )
    rows = {line.split("  ")[0]: line.endswith("a tie") for line in text.splitlines()}
    names = relu.ReluProblem.names
    assert [rows[n] for n in (names.control, names.solution, names.eager)] == [True, is_tie, False]


def test_one_round_has_no_interval():
    found = record(relu)
    for times in found["runs"][0]["forward"]["seconds"].values():
        del times[1:]
    assert "| **2.000** (one round) |" in markdown.as_markdown(document([found]))
    found["file"] = "a.py"
    assert "| 2.000 [one round] |" in markdown.as_markdown(document([found], "grading"))
    assert ", 2.000 (one round) times eager's speed: faster; " in graded_files.describe(found)


def test_steps_and_notes_of_a_graded_file_have_lines_of_their_own():
    found = record(relu)
    step = StepTimings(timings(relu, 1.5), timings(relu, 1.5), {"ModelNew": 1, "torch.relu": 32})
    found["runs"][0]["step"] = records.make_step_record(step)
    found |= {"file": "a.py", "accuracy": "exact", "notes": ["a note"], "refused": ["zeros", "NaN"]}
    times = "1.500 ms, 2.000 [2.000, 2.000] times eager's speed: faster; 133.3% of a copy's speed"
    assert graded_files.describe(found).splitlines() == [
        f"a.py: correct (exact; 7 cases), {times}",
        "    training step 1.500 [1.500, 1.500]: faster; keeps 1 bytes, eager 32",
        "    a note",
        "    refuses zeros, NaN",
    ]


def test_a_lack_of_memory_is_an_error_and_no_fault_of_ours(quick, monkeypatch, capsys):
    def need_more(self: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore is said of it.")

    monkeypatch.setattr(engine.Engine, "prepare", need_more)
    assert run.main(["relu", *OPTIONS, "--rows", "1"]) == 1
    assert "\nERROR  CUDA out of memory.\n" in capsys.readouterr().out


def test_a_failure_of_eager_is_an_error_and_no_fault_of_ours(quick, monkeypatch, capsys):
    def fail(self: object, *_: object) -> None:
        raise NotCorrectError(ERROR, "eager itself could not be timed: no")

    monkeypatch.setattr(engine.Engine, "prepare", fail)
    assert run.main(["relu", *OPTIONS, "--rows", "1"]) == 1
    output = capsys.readouterr()
    assert "0 cases compared with the reference, none wrong\n" in output.out
    assert "\nERROR  eager itself could not be timed: no\n" in output.out
    assert "imported" not in output.err


def record_of_runs(times: Timings) -> dict:
    """Make up the record of two runs, of which forward and training step have these times."""
    run_record = records.make_run_record(TimesOfSetting("", times, StepTimings(times, times)))
    return {**record(relu), "runs": [run_record, run_record]}


def test_noise_is_explained_once():
    noisy = record_of_runs(timings(relu, noise=9.0))
    last_lines = comparison_tables.last_lines([noisy], 1.0, is_full=False, documents="a")
    assert last_lines.count(tables.NOISY) == 1
    words = tables.words_of_lines([noisy, noisy])
    assert len(words) == 8  # of two forwards and two training steps in each record
    assert tables.explain_noise(words) == [tables.NOISY]
    assert comparison_tables.results(noisy["runs"][0]).count("  too noisy\n") >= 2


def test_noise_is_not_explained_where_there_is_none():
    quiet = record_of_runs(timings(relu))
    last_lines = comparison_tables.last_lines([quiet], 1.0, is_full=False, documents="a")
    assert tables.NOISY not in last_lines
    assert tables.explain_noise(tables.words_of_lines([quiet])) == []


def test_noise_is_not_explained_where_only_other_rows_are_noisy():
    """The line of a graded file has no word on yardsticks, forwards and backwards."""
    graded = record_of_runs(timings(relu))
    for timed in graded["runs"]:
        for row in [*timed["forward"]["summary"], *timed["step"]["summary"]["forward"]]:
            if row["role"] != "solution":
                row["time"] = "too noisy"
    assert tables.explain_noise(tables.words_of_lines([graded])) == []


def test_a_solution_that_is_faster_than_a_copy_is_explained():
    """The made-up copy takes 2 ms, the solution 3 ms / ratio."""
    for ratio, is_faster in ((1.2, False), (2.0, True)):
        text = comparison_tables.results(
            records.make_run_record(TimesOfSetting("", timings(relu, ratio)))
        )
        assert (comparison_tables.NO_LIMIT in text) == is_faster


def test_an_interrupted_file_has_no_reason():
    graded = record(relu, word="interrupted")
    graded["file"] = "a.py"
    assert graded_files.describe(graded) == "a.py: interrupted"


# --------------------------------------------------------------------------------------- sweeps


def test_a_sweep_times_every_size_and_writes_and_draws_it(quick, tmp_path, capsys):
    path, table, picture = (tmp_path / f"sweep.{suffix}" for suffix in ("json", "md", "svg"))
    options = [*OPTIONS, *f"--dtype float32,float16 --json {path} --markdown {table}".split()]
    options += ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else ["--sweep"]
    assert run.main(options) == 0
    found = check_shape(path.read_text())
    sizes = [("relu", [2**e // 1024, 1024], d) for d in DTYPES[:2] for e in (10, 11, 12)]
    sizes += [("linear_relu_divide", [m, 96], dtype) for dtype in DTYPES[:2] for m in (1, 4)]
    assert [(r["problem"], r["shape"], r["dtype"]) for r in found] == sizes
    runs = [timed for r in found for timed in r["runs"]]
    assert min(timed["forward"]["roofline_seconds"] for timed in runs) > 0
    assert [timed["step"] for timed in runs] == [None] * len(sizes)
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split()[0] for line in lines if line.endswith("/ this")]
    assert (lines[0][:5], titles) == ("cpu: ", ["relu", "linear_relu_divide"])
    rows = [line for line in lines if line.startswith("[")]
    assert len(rows) == len(sizes)
    ends_of_times = {re.search(r" [\d.]+(?= )", line).end() for line in rows}
    assert len(ends_of_times) == 1  # times are aligned to the right
    assert any(line.startswith(f"{len(sizes)} of {len(sizes)} sizes were timed") for line in lines)
    assert table.read_text().count("\n| ") == 1 + len(sizes)
    assert not picture.exists() or "<!-- relu float16 -->" in picture.read_text()


def test_a_sweep_leaves_out_sizes_for_which_there_is_no_room(quick, monkeypatch, tmp_path):
    def find_no_room(subject: object, device: object) -> None:
        raise NoRoomError("relu: needs about 9 GiB of memory")

    monkeypatch.setattr(run, "_make_problem", find_no_room)
    path = tmp_path / "result.json"
    assert run.main(["relu", *OPTIONS, "--sweep", "--json", str(path)]) == 1
    found = check_shape(path.read_text())
    assert {(r["verdict"], r["reason"][:17]) for r in found} == {(LEFT_OUT, "relu: needs about")}


def test_sizes_of_a_sweep_may_be_left_out_or_wrong(
    quick, place_solution, monkeypatch, tmp_path, capsys
):
    """They do not fit into memory, their result is wrong, or the time of the sweep is over."""
    path = tmp_path / "sweep.json"
    options = ["relu", "--sweep", *OPTIONS, "--dtype", "float32", "--json", str(path)]
    monkeypatch.setattr(sweep, "free_bytes", lambda device: 40960)  # ten times the first size
    assert run.main(options) == 0
    assert [r["verdict"] for r in check_shape(path.read_text())] == [CORRECT, LEFT_OUT, LEFT_OUT]
    assert "[4, 1024] float32               left out: needs 0.0 GiB" in capsys.readouterr().out
    monkeypatch.setattr(sweep, "free_bytes", lambda device: 1 << 40)
    place_solution("class ModelNew(model.Model):\n    def forward(self, x):\n        return 0 * x")
    assert run.main(options) == 1
    assert "[1, 1024] float32               wrong: returns zeros: [1" in capsys.readouterr().out
    monkeypatch.setattr(sweep, "SWEEP_SECONDS", {"cpu": 0.0})
    assert run.main(options) == 1  # a sweep without any size is no success
    output = capsys.readouterr().out
    assert output.count("left out: the 0 s of a sweep are over\n") == 3
    assert output.endswith("\n\n0 of 3 sizes were timed, in 0 s.\nNOTHING of relu was timed.\n")


def test_the_roofline_is_the_time_of_memory_or_that_of_the_highest_rate():
    """The longer time counts. An interrupted forward has no roofline."""
    found = [record(linear, "float16") for _ in range(3)]
    forwards = [r["runs"][0]["forward"] for r in found]
    for forward, work, floor in zip(forwards, (10, 10_000, 7), (1.0, 10.0, 0.0), strict=True):
        forward |= {"work": work, "floor_seconds": floor, "moved_bytes": 500}
    roofline.add_roofline(found, 100.0)
    assert [forward["roofline_seconds"] for forward in forwards] == [5.0, 10.0, None]  # interrupted


@pytest.mark.gpu
def test_a_sweep_on_a_gpu_is_right_and_stays_below_the_roofline(tmp_path):
    """All sizes that fit are right, and no call beats the roofline by more than the margin."""
    path = tmp_path / "sweep.json"
    assert run.main(["--sweep", "--json", str(path)]) == 0
    found = check_shape(path.read_text())
    assert {r["verdict"] for r in found} <= {CORRECT, LEFT_OUT}
    assert sum(r["verdict"] == CORRECT for r in found) >= 50
    for forward in (timed["forward"] for r in found for timed in r["runs"]):
        assert COMPILED in forward["seconds"]
        ours = next(row for row in forward["summary"] if row["role"] == "solution")
        assert ours["median_ms"] * 1e-3 > forward["roofline_seconds"] / 1.3


# ------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize(
    ("terminal", "term", "written"),
    [
        (True, "xterm", "\r\x1b[Ka stage, 7 of 10 rou\r\x1b[K"),
        (True, "dumb", "a stage, 7 of 10 rounds\n"),
        (False, "xterm", "a stage, 7 of 10 rounds\n"),
    ],
)
def test_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(
    terminal, term, written, monkeypatch
):
    """A terminal's line is cut to the terminal's width, and removed at the end."""
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
    stream.write = lambda text: os.write(-1, b"")  # raises OSError, as a closed stream does
    Progress()("a stage")  # raises nothing


def test_progress_says_how_many_seconds_are_left():
    for done, seconds, most, limit, text in (
        (0, 0.0, 10, math.inf, " of 10"),
        (2, 4.0, 10, math.inf, " of 10, 16 s left"),
        (2, 4.0, 50, 10.0, ", 6 s left"),
        (40, 4.0, 50, 10.0, ", 1 s left"),
        (2, 20.0, 50, 10.0, ", 10 s left"),
    ):
        assert round_limit._time_left(done, seconds, most, limit) == text
