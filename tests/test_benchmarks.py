"""`python -m problems.benchmark` at small sizes on a CPU, and the figures of README and docs."""

import copy
import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from documents import ABOUT, HEADLINE, document, record

from model import LinearReluDivide, Model
from problems import benchmark, figures, pages
from referee.names import COMPILED
from referee.report import comparison, markdown, tables
from referee.times.timing import speed_up

RAW = {path.name: json.loads(path.read_text()) for path in figures.RESULTS.glob("*.json")}
# The output of the commands that these tests run, and the part of a page with its table.
PRINTED = "a CPU, torch 2\n\nhost time  ours ns  eager ns\nReLU  {}  9.50"
PAGE = """<!-- table: {name}.json -->
a CPU, torch 2; `{command}`

| host time | ours ns | eager ns |
| --- | --- | --- |
| ReLU | {value} | 9.50 |
<!-- end -->
"""


class Wrong(LinearReluDivide):
    """A solution whose error is far above rounding."""

    def forward(self, x):
        return super().forward(x) + 1e-3


@pytest.mark.parametrize("linear", [LinearReluDivide, Wrong])
@pytest.mark.parametrize("what, count", [("linear", 4), ("host", 4), ("operands", 9)])
def test_each_table_has_positive_times_and_operands_have_errors(
    what, count, linear, monkeypatch, capsys
):
    """A table has `count` rows of positive times. Each row of "operands" ends with two errors."""
    ours = SimpleNamespace(SOLUTIONS={"relu": Model, "linear_relu_divide": linear})
    monkeypatch.setitem(sys.modules, "model_new", ours)
    monkeypatch.setattr(benchmark, "ROUNDS", 3)
    monkeypatch.setattr(benchmark, "FEATURES", (16, 24))
    assert benchmark.main([what, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    _, kind, lines = printed.split("\n\n")
    assert kind == "float32, precision highest"
    rows = [row.split() for row in lines.splitlines()[1:]]
    assert len(rows) == count
    times = slice(-5, -2) if what == "operands" else slice(-3, None)
    assert all(float(cell.strip("()")) > 0 for row in rows for cell in row[times])
    if what == "operands":
        [uniform] = [row for row in rows if row[0] == "uniform"]
        our_error, eagers_error = map(float, uniform[-2:])
        if linear is Wrong:
            assert our_error > 100 * eagers_error
        else:
            assert our_error == eagers_error
    *_, table = pages.parse(printed)
    assert [" ".join(row).split() for row in table["rows"]] == rows


def program(value: str, status: int = 0) -> str:
    """Return a command that prints PRINTED with this value, and exits with this status."""
    code = f"print({PRINTED.format(value)!r}); exit({status})"
    return f"python -c {shlex.quote(code)}"


@pytest.fixture
def project(monkeypatch, tmp_path):
    """Return a function that writes results of a CPU and of a GPU, and a page with their tables."""
    for name in ("BENCHMARKS", "README", "PICTURE"):
        monkeypatch.setattr(figures, name, tmp_path / f"{name}.svg")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.README.write_text("")

    def write(command: str) -> str:
        """Write results that another run of the command printed; return the page."""
        page = ""
        for name, device in (("here", "cpu"), ("elsewhere", "cuda")):
            printed = PRINTED.format("1.25")
            results = {"device": device, "command": command, "output": pages.parse(printed)}
            (tmp_path / f"{name}.json").write_text(pages.dump(results))
            page += PAGE.format(name=name, command=command, value="1.25")
        figures.BENCHMARKS.write_text(page)
        return page

    return write


@pytest.mark.parametrize("status, value", [(0, "6.00"), (3, "1.25")])
def test_report_measures_this_device_anew_unless_the_command_fails(
    project, status, value, tmp_path
):
    """The results of the other device do not change."""
    command = program("6.00", status)
    old = project(command)
    assert figures.renew("cpu", "") == ([command] if status else [])
    assert figures.BENCHMARKS.read_text() == old.replace("1.25", value, 1)
    rows = {
        path.stem: json.loads(path.read_text())["output"][1]["rows"]
        for path in tmp_path.glob("*.json")
    }
    assert rows == {"here": [["ReLU", value, "9.50"]], "elsewhere": [["ReLU", "1.25", "9.50"]]}


def test_report_gives_readme_the_table_and_the_picture_of_its_commands_samples(project, tmp_path):
    content = document([record(*key) for key in HEADLINE])
    path = tmp_path / "content"
    path.write_text(json.dumps(content))
    code = f"import shutil, sys; shutil.copy('{path}', sys.argv[2]); "
    code += f"print({PRINTED.format('6.00')!r})"
    command = f"python -c {shlex.quote(code)}"
    old = project(command)
    readme = f"<!-- cpu: {command} -->\n<!-- end -->\n"
    figures.README.write_text(readme)
    assert figures.renew("cpu", "shutil") == []
    table = markdown.as_markdown({**content, "command": command})
    assert figures.README.read_text() == readme.replace("<!-- end", table + "<!-- end")
    assert figures.BENCHMARKS.read_text() == old.replace("1.25", "6.00", 1)
    assert figures.PICTURE.read_text().startswith("<?xml")


def test_report_changes_no_file_if_a_page_cannot_be_made(project, tmp_path):
    """For example, if the command prints other tables than before."""
    project("python -c 'print(1)'")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="unpack"):
        figures.renew("cpu", "")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_report_says_that_no_command_contains_a_text(project):
    project(program("6.00"))
    with pytest.raises(ValueError, match="no results"):
        figures.renew("cpu", "linear")


@pytest.mark.parametrize("kind, dtype", HEADLINE)
def test_the_pages_understand_the_tables_that_run_prints(kind, dtype):
    """A row of the forward's table has the label of its setting, the times and the ratio."""
    made = record(kind, dtype)
    about = f"{made['problem']}: {tables.headline(ABOUT, 'cpu', '')}; {made['shape']} {dtype}"
    output = pages.parse(f"{about}\n{comparison.details(made)}")
    results = {"device": "cpu", "command": "python run.py", "output": output}
    heading = pages.view_heading([results])
    assert heading == "a | GPU, torch 2.13, CUDA 13.0; `python run.py`\n"
    lines = pages.view_forward([results], made["problem"]).splitlines()
    for line, run in zip(lines[2:], made["runs"], strict=True):
        label = f"{dtype}, {run['setting']}".removesuffix(", ")
        assert line.startswith(f"| {label} | 1.500 | 3.000 | 2.000 [2.000, 2.000] | 1.000 ")


@pytest.mark.parametrize("problem, settings", [("relu", 3), ("linear_relu_divide", 5)])
def test_the_pages_need_no_times_of_torchs_compiler(problem, settings):
    """A machine may have no compiler that torch.compile could use."""
    results = copy.deepcopy(RAW["headline.json"])
    assert pages.view_step([results], problem).count("not timed") == 0
    for table in pages.tables_of(results):
        table["rows"] = [row for row in table["rows"] if COMPILED not in row[0]]
    assert pages.view_step([results], problem).count("not timed") == settings


@pytest.mark.parametrize(
    "view, printed, shown",
    [
        (
            "host",
            "host time  ours ns  eager ns  eager / ours\nReLU  2  3  1.5",
            "ReLU | 2 | 3 | 1.5",
        ),
        (
            "operands",
            "operands  eager us  ours us  ratio  u  eager's u\nones  3  2  1.5  0.1  0.2",
            "ones | 2 | 3 | 1.5 | 0.1 | 0.2",
        ),
    ],
)
def test_the_pages_show_ours_before_eagers(view, printed, shown):
    """The cells that a command printed come in the order of all tables: ours, eager's, speedup."""
    results = {"command": "python", "output": pages.parse(f"a CPU, torch 2\n\n{printed}")}
    columns, _, row = pages.VIEWS[view]([results]).splitlines()[2:]
    assert row == f"| {shown} |"
    assert columns.split(" | ")[3].strip(" |") == "speedup"


@pytest.mark.parametrize("name", RAW)
def test_results_name_a_device_and_a_command_of_this_project(name):
    check_command(RAW[name]["device"], RAW[name]["command"])


def test_readmes_table_names_a_device_and_a_command_of_this_project():
    text = figures.README.read_text()
    blocks = figures.README_TABLE.findall(text)
    assert len(blocks) == text.count("<!-- end -->") > 0
    for _, device, command in blocks:
        check_command(device, command)


def check_command(device: str, command: str) -> None:
    """Assert that a device and a command of this project exist."""
    assert device in ("cpu", "cuda")
    python, *arguments = shlex.split(command)
    assert python == "python"
    if arguments[0] != "run.py":
        assert arguments[:2] == ["-m", "problems.benchmark"]
        benchmark.parse_options(arguments[2:])


def test_every_table_of_benchmarks_is_made_from_the_results_and_all_results_are_used():
    text = figures.BENCHMARKS.read_text()
    blocks = pages.BLOCK.findall(text)
    assert len(blocks) == text.count("<!-- end -->") > 0
    assert {name for _, _, names in blocks for name in names.split()} == RAW.keys()
    assert pages.fill(text, figures.RESULTS) == text


def test_readmes_times_and_ratios_are_those_of_the_results():
    """Every number with three digits behind the point in README's table is in the results."""
    [(head, _, command)] = figures.README_TABLE.findall(figures.README.read_text())
    [results] = [results for results in RAW.values() if results["command"] == command]
    cells = " ".join(
        cell for table in pages.tables_of(results) for row in table["rows"] for cell in row
    )
    block = figures.README_TABLE.search(figures.README.read_text())[0].removeprefix(head)
    numbers = re.findall(r"\b\d+\.\d{3}\b", block)
    assert len(numbers) >= 3 * 8  # ours, eager's and the ratio of eight rows
    assert set(numbers) <= set(re.findall(r"\b\d+\.\d{3}\b", cells))


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
        candidate, reference = benchmark.time_in_turn(both, x).values()
        assert speed_up(reference, candidate)[0] == pytest.approx(1, abs=0.005)
