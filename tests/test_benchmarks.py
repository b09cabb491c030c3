"""`python -m referee.benchmark` at small sizes of a CPU, and the figures of README and docs."""

import json
import re
import shlex

import pytest
import torch
from documents import HEADLINE, document, record

from model import LinearReluDivide, Model
from referee import benchmark
from referee.benchmarks import figures, operand_table, timings
from referee.benchmarks.draws import Draw
from referee.benchmarks.operand_table import HIGH, HIGHEST, same_places
from referee.benchmarks.pairs import alternate, samplers_of
from referee.report import markdown
from referee.stats import speed_up

INF, NAN = float("inf"), float("nan")
TEXT = """Before.

<!-- cpu: python -c "print(6 * 7)" -->
old
<!-- end -->

Between.

<!-- cuda: python -c "print('not here')" -->
```
kept
```
<!-- end -->
"""


@pytest.fixture
def run(monkeypatch, solution, capsys):
    """The lines that a benchmark prints for stand-ins of this project's modules."""
    monkeypatch.setattr(timings, "SIZES", {"cpu": range(4, 6)})
    monkeypatch.setattr(timings, "FEATURES", (16, 24))
    monkeypatch.setattr(timings, "LAYOUT_PART", {"cpu": 256})
    monkeypatch.setattr(timings, "alternate", lambda samplers, *_: alternate(samplers, 0.0))

    def call(*arguments, linear=LinearReluDivide):
        solution(Model, linear)
        precision = torch.get_float32_matmul_precision()
        try:
            assert benchmark.main([*arguments, "--device", "cpu"]) == 0
        finally:
            torch.set_float32_matmul_precision(precision)
        return capsys.readouterr().out.splitlines()

    return call


@pytest.mark.parametrize(
    ("what", "tables"),
    [("sizes", [2]), ("views", [7]), ("linear", [4]), ("layouts", [24]), ("host", [2, 2])],
)
def test_tables(what, tables, run):
    """So many rows below a title, with positive times."""
    text = "\n".join(run(what))
    _, dtype, *found = text.split("\n\n")
    assert dtype == "float32, precision highest"
    assert [len(rows.splitlines()) - 1 for rows in found] == tables
    for row in (row for rows in found for row in rows.splitlines()[1:]):
        assert all(float(cell) > 0 for cell in re.findall(r" \(?(\d+\.?\d*)\)?(?= |$)", row)[-2:])


def test_integers_have_no_step(run):
    assert len([line for line in run("host", "--dtype", "int8") if "backward" in line]) == 0


# ------------------------------------------------------------------------------------- operands


def cells(monkeypatch, run, *names, **kind):
    """Of each of these lines at `highest`, without its name."""
    chosen = [next(line for line in HIGHEST if line.name == name) for name in names]
    monkeypatch.setattr(operand_table, "HIGHEST", chosen)
    printed = run("operands", "--trials", "1", **kind)
    found = {name: [line for line in printed if line.startswith(name + "  ")] for name in names}
    return [line.removeprefix(name).split() for name, [line] in found.items()]


@pytest.mark.parametrize("line", [*HIGHEST, *HIGH], ids=lambda line: line.name)
def test_every_line_can_be_drawn(line):
    m, k, n = 70, 128, 66
    draw = Draw(0)
    x, weight, bias = line.operands(draw, m, k, n)
    assert (x.shape, weight.shape, bias.shape) == ((m, k), (n, k), (n,))
    if line.grad_output:
        assert line.grad_output(draw, m, n).shape == (m, n)
    else:
        assert "inf" in line.name or torch.isfinite(x).all()


def test_lines_of_a_cpu(monkeypatch, run):
    names = ["uniform", "one-hot x", "inf in one row of x", "step, softmax - one-hot"]
    for name, found in zip(names, cells(monkeypatch, run, *names), strict=True):
        assert found[:3] == ["128"] * 3
        assert all(float(time) > 0 for time in found[3:6])
        largest, mean, unit, eagers_unit = map(float, found[6:10])
        assert {largest, mean} <= {0, 1}  # torch's own product on both sides
        assert unit == eagers_unit
        assert found[10:] == (["same"] if "inf" in name else [])


class Wrong(LinearReluDivide):
    def forward(self, x):
        out = super().forward(x)
        return out + torch.where(out.isfinite(), 1e-3, NAN)


def test_errors_and_misplaced_infinities_are_seen(monkeypatch, run):
    names = ["uniform", "inf in one row of x"]
    uniform, infinite = cells(monkeypatch, run, *names, linear=Wrong)
    largest, mean, unit, eagers_unit = map(float, uniform[6:10])
    assert min(largest, mean) > 100
    assert unit > 100 * eagers_unit
    assert infinite[-1] == "DIFFER"


def test_same_places():
    values = torch.tensor([1.0, INF, -INF, NAN])
    assert same_places(values[:1], values[:1] + 1) == ""
    for i in range(4):
        for j, value in enumerate([2.0, INF, -INF, NAN]):
            other = values.clone()
            other[i] = value
            expected = "same" if i == j else "DIFFER"
            assert same_places(other, values) == same_places(values, other) == expected


@pytest.mark.parametrize("options", [["operands", "--dtype", "float16"], ["--dtype", "float"]])
def test_options_that_are_refused(options):
    with pytest.raises(SystemExit):
        benchmark.main([*options, "--device", "cpu"])


# -------------------------------------------------------------------------------------- figures


@pytest.fixture
def pages(tmp_path):
    pages = figures.Pages(*(tmp_path / name for name in ("figures.md", "README.md", "a.svg")))
    pages.benchmarks.write_text(TEXT)
    pages.readme.write_text("")
    return pages


def test_a_block_gets_what_its_command_prints(pages):
    assert figures.measure(pages, "cpu") == []
    assert pages.benchmarks.read_text() == TEXT.replace("old", "```\n42\n```")


def test_a_block_whose_command_fails_stays(pages):
    pages.benchmarks.write_text(TEXT.replace("print(6 * 7)", "exit(3)"))
    before = pages.benchmarks.read_text()
    assert figures.measure(pages, "cpu") == ['python -c "exit(3)"']
    assert pages.benchmarks.read_text() == before


@pytest.mark.parametrize("is_complete", [True, False])
def test_readmes_block_gets_tables_and_a_picture(pages, tmp_path, is_complete):
    """They are those of the results that the command writes."""
    content = document([record(*key) for key in HEADLINE[: None if is_complete else 3]])
    (tmp_path / "content.json").write_text(json.dumps(content))
    code = "import shutil, sys; shutil.copy({!r}, sys.argv[2]); print(6 * 7)"
    code = code.format(str(tmp_path / "content.json"))
    readme = f'One table.\n\n<!-- cpu: python -c "{code}" -->\n<!-- end -->\n'
    text = TEXT.replace("print(6 * 7)", code)
    pages.readme.write_text(readme)
    pages.benchmarks.write_text(text)
    if not is_complete:
        with pytest.raises(ValueError, match="no correct result of linear_relu_divide"):
            figures.measure(pages, "cpu")
        assert (pages.readme.read_text(), pages.benchmarks.read_text()) == (readme, text)
        assert not pages.picture.exists()
        return
    assert figures.measure(pages, "cpu", "shutil") == []
    tables = markdown.tables({**content, "command": f'python -c "{code}"'})
    assert pages.readme.read_text() == readme.replace("<!-- end", tables + "<!-- end")
    assert pages.benchmarks.read_text() == text.replace("old", "```\n42\n```")
    assert pages.picture.read_text().startswith("<?xml")


@pytest.mark.parametrize("device, only", [("cpu", "views"), ("mps", "")])
def test_no_such_block(pages, device, only):
    with pytest.raises(ValueError, match="no block"):
        figures.measure(pages, device, only)


@pytest.mark.parametrize("page", ["benchmarks", "readme"])
def test_blocks_are_commands_of_this_project(page):
    text = getattr(figures.Pages(), page).read_text()
    blocks = list(figures.BLOCK.finditer(text))
    assert len(blocks) == text.count("<!-- end -->") > 0
    for match in blocks:
        assert match["device"] in ("cpu", "cuda")
        python, *arguments = shlex.split(match["command"])
        assert python == "python"
        if arguments[0] != "run.py":
            assert arguments[:2] == ["-m", "referee.benchmark"]
            benchmark.parse(arguments[2:])


@pytest.mark.gpu
def test_identical_code_takes_the_same_time_after_memory_was_freed():
    x = torch.rand(2**29, device="cuda")
    for _ in range(2):  # the freed memory slows what comes next
        freed = torch.empty(2**33, dtype=torch.uint8, device="cuda").fill_(1)
        del freed
        torch.cuda.empty_cache()
        torch.relu(x)
        both = {"candidate": torch.relu, "reference": torch.relu}
        candidate, reference = alternate(samplers_of(both, x), longest=1.0).values()
        assert speed_up(reference, candidate)[0] == pytest.approx(1, abs=0.005)
