"""`python -m problems.benchmark` at small sizes on a CPU, and the figures of README and docs."""

import copy
import json
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from model import LinearReluDivide, Model
from problems.benchmark import (
    command,
    measure_host,
    measure_linear,
    options,
    pages,
    report,
    rounds,
    tree,
    views,
)
from problems.benchmark.paths.grid_table import path_grid_table
from problems.benchmark.tables import TABLES
from referee.report import by_role, markdown
from referee.times.ratios import speed_up
from tests.support.made_up_results import HEADLINE, document, record

COMMANDS = {name: c for commands in report.COMMANDS.values() for name, c in commands.items()}
ENVIRONMENT = {"device": "a CPU", "threads": None, "torch": "2", "cuda": None}
# A row of the results of `host`, without our time; and the part of a page with the table.
ROW = {"call": "ReLU", "part": "forward", "device": "cpu", "eager_seconds": 9.5e-6, "ratio": 1.5}
PAGE = """<!-- table: {name} -->
a CPU, torch 2; `{command}`; commit abc, 2026-01-02

| call | this, us | eager, us | speedup |
|---|---|---|---|
| ReLU, forward, cpu | {value} | 9.50 | 1.500 |
<!-- end -->
"""


class Wrong(LinearReluDivide):
    """A solution whose error is far above rounding."""

    def forward(self, x):
        return super().forward(x) + 1e-3


@pytest.mark.parametrize("linear", [LinearReluDivide, Wrong])
@pytest.mark.parametrize(
    "what, row_count, table_lines", [("linear", 12, 4), ("host", 4, 4), ("operands", 9, 9)]
)
def test_results_have_positive_times_and_operands_have_errors(
    what, row_count, table_lines, linear, monkeypatch, tmp_path, capsys
):
    """`table_lines` does not count the line of titles."""
    ours = SimpleNamespace(SOLUTIONS={"relu": Model, "linear_relu_divide": linear})
    monkeypatch.setitem(sys.modules, "model_new", ours)
    monkeypatch.setattr(rounds, "ROUNDS", 3)
    monkeypatch.setattr(measure_linear, "FEATURES", (16, 24))
    path = tmp_path / "results.json"
    assert command.main([what, "--device", "cpu", "--json", str(path)]) == 0
    about, kind, table = capsys.readouterr().out.split("\n\n")
    results = json.loads(path.read_text())
    assert about.startswith(results["environment"]["device"])
    assert (kind, results["dtype"], results["precision"]) == (
        "float32, highest",
        "float32",
        "highest",
    )
    assert results["command"] == f"python -m problems.benchmark {what} --device cpu --json {path}"
    assert len(table.splitlines()) == 1 + table_lines
    rows = results["rows"]
    assert len(rows) == row_count
    for row in rows:
        for key in ("ours_seconds", "eager_seconds", "ratio"):
            assert row[key] > 0
    if what == "operands":
        [uniform] = [row for row in rows if row["operands"] == "uniform"]
        if linear is Wrong:
            assert uniform["ours_error"] > 100 * uniform["eager_error"]
        else:
            assert uniform["ours_error"] == uniform["eager_error"]


def test_every_measurement_of_the_command_line_has_a_function_and_a_table():
    functions = [*command.WITH_DTYPE, *command.WITHOUT_OPTIONS]
    assert options.MEASUREMENTS == functions == list(TABLES)


def test_tables_of_linear_have_a_column_for_each_number_of_rows():
    """These are the command's table, and the view `range` of several commands."""
    rows = [
        {"k": k, "n": 8, "m": m, "ours_seconds": 1.4e-6 * m, "ratio": k / m}
        for k in (4, 16)
        for m in (1, 2)
    ]
    assert TABLES["linear"](rows) == [
        ["speedup (this, us)", "M 1", "M 2"],
        ["K 4, N 8", "4.000 (1)", "2.000 (3)"],
        ["K 16, N 8", "16.000 (1)", "8.000 (3)"],
    ]
    file = {
        "command": "c",
        "commit": "abc",
        "date": "2026-01-02T03:04:05",
        "environment": ENVIRONMENT,
        "dtype": "float16",
        "precision": "",
        "rows": rows,
    }
    heading, *_, row = views.view_range([file]).splitlines()
    assert heading == "- a CPU, torch 2; `c`; commit abc, 2026-01-02"
    assert row == "| float16 (a CPU) | 4.000 to 16.000 | 2.000 to 8.000 |"


# --------------------------------------------------------------------------------------- report


def results_of(value: str) -> dict:
    """Return results whose table is that of PAGE with this value."""
    return {
        "benchmark": "host",
        "command": "another",
        "environment": ENVIRONMENT,
        "date": "2026-01-02T03:04:05+00:00",
        "rows": [{**ROW, "ours_seconds": float(f"{value}e-6")}],
    }


def program(results: dict, status: int = 0) -> str:
    """Return a command that writes these results to the file of --json, and exits with `status`."""
    code = "import pathlib, sys; assert sys.argv[1] == '--json'; "
    code += f"pathlib.Path(sys.argv[2]).write_text({json.dumps(results)!r}); exit({status})"
    return f"python -c {shlex.quote(code)}"


@pytest.fixture
def project(monkeypatch, tmp_path):
    """Return a function that writes results of a CPU and of a GPU, and a page with their tables."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(pages, "PAGES", [page])
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "PICTURE", tmp_path / "picture.svg")
    monkeypatch.setattr(tree, "commit", lambda: "abc")
    headline = {**document([record(*key) for key in HEADLINE]), "commit": "abc"}
    (tmp_path / pages.HEADLINE).write_text(json.dumps(headline))

    def write(command: str) -> str:
        """Write results as if this command had written them, and make it the one of `report`.

        Return the text of the page.
        """
        text = ""
        commands = {}
        for name, device in (("here.json", "cpu"), ("elsewhere.json", "cuda")):
            results = {**results_of("1.25"), "command": command, "commit": "abc"}
            (tmp_path / name).write_text(json.dumps(results))
            text += PAGE.format(name=name, command=command, value="1.25")
            commands[device] = {name: command}
        page.write_text(text)
        monkeypatch.setattr(report, "COMMANDS", commands)
        return text

    return write


@pytest.mark.parametrize("status, value", [(0, "6.00"), (3, "1.25")])
def test_report_measures_this_device_anew_unless_the_command_fails(
    project, status, value, tmp_path
):
    """The results of the other device do not change."""
    pytest.importorskip("matplotlib")
    old = project(program(results_of("6.00"), status))
    assert command.main(["report", "--device", "cpu"]) == (1 if status else 0)
    assert pages.PAGES[0].read_text() == old.replace("| 1.25 |", f"| {value} |", 1)
    seconds = {
        name: json.loads((tmp_path / name).read_text())["rows"][0]["ours_seconds"]
        for name in ("here.json", "elsewhere.json")
    }
    assert seconds == {"here.json": float(f"{value}e-6"), "elsewhere.json": 1.25e-6}
    assert pages.PICTURE.read_text().startswith("<?xml")


def test_a_page_shows_the_table_that_run_py_prints_with_markdown(project, tmp_path):
    """The line above the table has the commit in addition."""
    project("python")
    pages.PAGES[0].write_text(f"<!-- comparison: {pages.HEADLINE} -->\n<!-- end -->\n")
    content = json.loads((tmp_path / pages.HEADLINE).read_text())
    text = pages.fill(pages.PAGES[0].read_text(), tmp_path)
    _, heading, *table, end = text.splitlines()
    assert heading == "a | GPU, torch 2.13, CUDA 13.0; `python run.py`; commit abc, now"
    assert (table, end) == (markdown.as_markdown(content).splitlines()[1:], "<!-- end -->")


def test_results_are_kept_if_a_page_cannot_be_made(project, tmp_path):
    """For example, if the command writes other keys than before."""
    text = project(program({"benchmark": "host"}))
    with pytest.raises(KeyError):
        command.main(["report", "--device", "cpu"])
    assert pages.PAGES[0].read_text() == text
    assert json.loads((tmp_path / "here.json").read_text())["commit"] == "abc"


def test_a_block_stays_if_one_of_its_files_is_not_measured_yet(project, tmp_path):
    text = project("python").replace("1.25", "2.50")
    (tmp_path / "here.json").unlink()
    assert pages.fill(text, tmp_path) == text.replace("2.50", "1.25").replace("1.25", "2.50", 1)


def test_report_says_that_no_command_contains_a_text(project):
    project("python")
    with pytest.raises(ValueError, match="no command for cpu contains 'linear'"):
        command.main(["report", "--device", "cpu", "--only", "linear"])


def test_a_picture_that_cannot_be_drawn_does_not_keep_the_pages_from_being_made(
    project, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    old = project("python")
    pages.PAGES[0].write_text(old.replace("1.25", "8.00"))
    with pytest.raises(ValueError, match="drawing needs matplotlib"):
        command.main(["pages"])
    assert pages.PAGES[0].read_text() == old


def test_the_commit_of_a_tree_counts_changes_of_code_but_not_of_results(monkeypatch, tmp_path):
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    assert tree.commit() == "unknown"
    if not shutil.which("git"):
        return

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(["git", *names, *arguments], cwd=tmp_path, text=True).strip()

    git("init", "--quiet")
    assert tree.commit() == "unknown"  # there is no commit
    (tmp_path / "docs").mkdir()
    code = tmp_path / "run.py"
    page = tmp_path / "docs" / "page.md"
    for path in (code, page):
        path.write_text("old")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    head = git("rev-parse", "--short", "HEAD")
    page.write_text("new")
    assert tree.commit() == head
    code.write_text("new")
    assert tree.commit() == f"{head}-dirty"


def test_a_measurement_goes_all_the_way_to_a_page(project):
    """The real `host` runs on this CPU."""
    pytest.importorskip("matplotlib")
    project("python -m problems.benchmark host --device cpu")
    assert command.main(["report", "--device", "cpu", "--only", "here"]) == 0
    here, _ = pages.PAGES[0].read_text().split("<!-- end -->\n", 1)
    _, heading, _, *table = here.splitlines()
    assert "; `python -m problems.benchmark host --device cpu`; commit abc, 20" in heading
    assert len(table) == 2 + 2 * len(measure_host.SMALL_CALLS)


# ---------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("kind, dtype", HEADLINE)
def test_the_pages_show_each_run_of_a_comparison(kind, dtype):
    """A row of the forward's table has the label of its run, the times and the ratio."""
    made = record(kind, dtype)
    results = {**document([made]), "commit": "abc"}
    heading = views.view_heading([results])
    assert heading == "a | GPU, torch 2.13, CUDA 13.0; `python run.py`; commit abc, now\n"
    lines = views.view_forward([results], made["problem"]).splitlines()
    for line, timed in zip(lines[2:], made["runs"], strict=True):
        label = f"{dtype}, {timed['setting']}".removesuffix(", ")
        assert line.startswith(f"| {label} | 1.500 | 3.000 | 2.000 [2.000, 2.000] | 1.000 ")


@pytest.mark.parametrize("problem, settings", [("relu", 3), ("linear_relu_divide", 5)])
def test_the_pages_need_no_times_of_torch_compile(problem, settings):
    """A machine may have no compiler that torch.compile could use."""
    results = json.loads((pages.RESULTS / pages.HEADLINE).read_text())
    without = copy.deepcopy(results)
    for made in without["records"]:
        for timed in made["runs"]:
            summaries = [timed["forward"]["summary"], *timed["step"]["summary"].values()]
            for rows in summaries:
                rows[:] = [row for row in rows if row["role"] != "compiled"]
    for view in (views.view_forward, views.view_step):
        assert view([results], problem).count("not timed") == 0
        assert view([without], problem).count("not timed") == settings


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_report_is_one_of_this_project_and_its_results_are_valid(name):
    python, *arguments = shlex.split(COMMANDS[name])
    assert python == "python"
    if arguments[0] != "run.py":
        assert arguments[:2] == ["-m", "problems.benchmark"]
        command.parse_options(arguments[2:])
    path = pages.RESULTS / name
    if path.exists():
        assert views.heading_of(json.loads(path.read_text()))


def test_every_table_is_made_from_the_results_and_all_results_are_used():
    used = set()
    for page in pages.PAGES:
        text = page.read_text()
        blocks = pages.BLOCK.findall(text)
        assert len(blocks) == text.count("<!-- end -->") > 0
        assert pages.fill(text, pages.RESULTS) == text
        used |= {name for _, _, names in blocks for name in names.split()}
    # `paths` and `path-grid` are not commands of `report`.
    assert used == COMMANDS.keys() | {"paths.json", pages.PATH_GRID}
    assert {path.name for path in pages.RESULTS.iterdir()} <= used


def _read_results(name):
    """Return the results in a file of docs/benchmarks/."""
    return json.loads((pages.RESULTS / name).read_text())


def _speedups(name):
    """Return the speedup of each row of a file of `problems.benchmark`."""
    return [row["ratio"] for row in _read_results(f"{name}.json")["rows"]]


def _range_of_speedups(*names):
    """Return the smallest and the largest speedup in these files of `linear`: "1.1 to 4.7"."""
    ratios = [ratio for name in names for ratio in _speedups(f"linear-{name}")]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _headline_run(problem, dtype, setting):
    """Return a run of the headline's results."""
    [found] = [
        timed
        for made in _read_results(pages.HEADLINE)["records"]
        for timed in made["runs"]
        if (made["problem"], made["dtype"], timed["setting"]) == (problem, dtype, setting)
    ]
    return found


@pytest.fixture
def readme():
    return " ".join(pages.PAGES[0].read_text().split())


@pytest.fixture
def benchmarks():
    return " ".join(pages.PAGES[1].read_text().split())


def test_the_first_sentences_of_the_readme_repeat_the_headline(readme):
    run = _headline_run("linear_relu_divide", "float32", "highest")
    summary = run["forward"]["summary"]
    speedup = by_role(summary, "solution")["ratio"]
    assert f"is {speedup:.1f} times as fast as torch's" in readme
    median_ms = {row["name"]: row["median_ms"] for row in summary}
    times = median_ms["Triton tf32x3"] / median_ms["LinearReluDivideNew"]
    assert f"[{median_ms['Triton tf32x3']:.3f} ms](" in readme
    assert f"{times:.1f} times as long as" in readme


def test_the_table_of_calls_that_gain_repeats_the_speedups(readme):
    assert f"[{_range_of_speedups('highest')} times]" in readme
    others = _range_of_speedups("high", "float16", "bfloat16")
    assert f"| {others} times, for the same sizes" in readme
    rows = _read_results("host.json")["rows"]
    small_forwards = [r for r in rows if (r["call"], r["part"]) == ("[1, 64] -> 64", "forward")]
    cpu, gpu = (row["ratio"] for row in small_forwards)
    assert f"{cpu:.1f} times on a CPU, {gpu:.1f} times on an H200" in readme


def test_the_list_of_exceptions_in_benchmarks_repeats_the_results(benchmarks):
    relu_step = _headline_run("relu", "bfloat16", "")["step"]["summary"]
    forward = by_role(relu_step["forward"], "solution")["ratio"]
    assert f"[{1 / forward - 1:.0%} longer](#relu-how-fast-is-a-training-step)" in benchmarks
    at_high = [1 / ratio - 1 for ratio in _speedups("operands-high") if ratio < 0.99]
    assert f"[{100 * min(at_high):.0f} to {max(at_high):.0%} longer]" in benchmarks
    assert f"[{1 / min(_speedups('operands-highest')):.1f} times as long]" in benchmarks

    titles, *groups = path_grid_table(_read_results(pages.PATH_GRID)["rows"])

    def total(title):
        column = titles.index(title)
        return sum(int(group[column]) for group in groups)

    cold = total("slower, cold")
    assert f"For {total('products'):,} products of a" in benchmarks
    slow = f"operands in memory, {cold} products take 3 to 12% longer by the chosen path"
    assert slow in benchmarks
    assert f"CUDA graphs, {total('slower, warm')} products, nearly all of them small" in benchmarks


@pytest.mark.gpu
@pytest.mark.slow  # by default two tests share the GPU
def test_identical_code_takes_the_same_time_after_memory_was_freed():
    """The measured ratio of torch.relu to itself is within 0.5% of 1."""
    x = torch.rand(2**29, device="cuda")
    for _ in range(2):
        torch.empty(2**33, dtype=torch.uint8, device="cuda").fill_(1)  # slows what comes next
        torch.cuda.empty_cache()
        torch.relu(x)
        both = {"candidate": torch.relu, "reference": torch.relu}
        candidate, reference = rounds.time_in_turn(both, x).values()
        assert speed_up(reference, candidate)[0] == pytest.approx(1, abs=0.005)
