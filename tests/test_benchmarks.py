"""`python -m problems.benchmark` at small sizes of a CPU, and the figures of README and docs."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from documents import HEADLINE, document, record

from model import LinearReluDivide, Model
from problems import benchmark
from referee.report import tables
from referee.timing import speed_up

TEXT = """<!-- cpu: python -c "print(6 * 7)" -->
old
<!-- end -->

<!-- cuda: python -c "print('not here')" -->
```
kept
```
<!-- end -->
"""


class Wrong(LinearReluDivide):
    def forward(self, x):
        return super().forward(x) + 1e-3


@pytest.mark.parametrize("linear", [LinearReluDivide, Wrong])
@pytest.mark.parametrize("what, count", [("linear", 4), ("host", 4), ("operands", 9)])
def test_tables(what, count, linear, monkeypatch, capsys):
    """So many rows below a title, of positive times; those of operands end with two errors."""
    ours = SimpleNamespace(SOLUTIONS={"relu": Model, "linear_relu_divide": linear})
    monkeypatch.setitem(sys.modules, "model_new", ours)
    monkeypatch.setattr(benchmark, "ROUNDS", 3)
    monkeypatch.setattr(benchmark, "FEATURES", (16, 24))
    assert benchmark.main([what, "--device", "cpu"]) == 0
    _, kind, printed = capsys.readouterr().out.split("\n\n")
    assert kind == "float32, precision highest"
    rows = [row.split() for row in printed.splitlines()[1:]]
    assert len(rows) == count
    times = slice(-5, -2) if what == "operands" else slice(-3, None)
    assert all(float(cell.strip("()")) > 0 for row in rows for cell in row[times])
    if what == "operands":
        [(ours, eagers)] = [map(float, row[-2:]) for row in rows if row[0] == "uniform"]
        assert ours > 100 * eagers if linear is Wrong else ours == eagers


@pytest.fixture
def pages(monkeypatch, tmp_path):
    for name in ("BENCHMARKS", "README", "PICTURE"):
        monkeypatch.setattr(benchmark, name, tmp_path / f"{name}.svg")
    benchmark.BENCHMARKS.write_text(TEXT)
    benchmark.README.write_text("")


@pytest.mark.parametrize("code, new", [("print(6 * 7)", "```\n42\n```"), ("exit(3)", "old")])
def test_a_block_gets_what_its_command_prints_unless_that_fails(pages, code, new):
    text = TEXT.replace("print(6 * 7)", code)
    benchmark.BENCHMARKS.write_text(text)
    assert benchmark.measure("cpu", "") == ([f'python -c "{code}"'] if new == "old" else [])
    assert benchmark.BENCHMARKS.read_text() == text.replace("old", new)


def test_readmes_block_gets_tables_and_a_picture(pages, tmp_path):
    """They are those of the results that the command writes."""
    content = document([record(*key) for key in HEADLINE])
    path = tmp_path / "content.json"
    path.write_text(json.dumps(content))
    code = f"import shutil, sys; shutil.copy('{path}', sys.argv[2]); print(6 * 7)"
    text = TEXT.replace("print(6 * 7)", code)
    readme = f'<!-- cpu: python -c "{code}" -->\n<!-- end -->\n'
    benchmark.README.write_text(readme)
    benchmark.BENCHMARKS.write_text(text)
    assert benchmark.measure("cpu", "shutil") == []
    table = tables.markdown({**content, "command": f'python -c "{code}"'})
    assert benchmark.README.read_text() == readme.replace("<!-- end", table + "<!-- end")
    assert benchmark.BENCHMARKS.read_text() == text.replace("old", "```\n42\n```")
    assert benchmark.PICTURE.read_text().startswith("<?xml")


def test_no_such_block(pages):
    with pytest.raises(ValueError, match="no block"):
        benchmark.measure("cpu", "linear")


@pytest.mark.parametrize(
    "page", [benchmark.BENCHMARKS, benchmark.README], ids=lambda page: page.name
)
def test_blocks_are_commands_of_this_project(page):
    text = page.read_text()
    blocks = benchmark.BLOCK.findall(text)
    assert len(blocks) == text.count("<!-- end -->") > 0
    for _, device, command in blocks:
        assert device in ("cpu", "cuda")
        python, *arguments = shlex.split(command)
        assert python == "python"
        if arguments[0] != "run.py":
            assert arguments[:2] == ["-m", "problems.benchmark"]
            benchmark.parse(arguments[2:])


@pytest.mark.gpu
@pytest.mark.slow  # by default two tests share the GPU
def test_identical_code_takes_the_same_time_after_memory_was_freed():
    x = torch.rand(2**29, device="cuda")
    for _ in range(2):
        torch.empty(2**33, dtype=torch.uint8, device="cuda").fill_(1)  # slows what comes next
        torch.cuda.empty_cache()
        torch.relu(x)
        both = {"candidate": torch.relu, "reference": torch.relu}
        candidate, reference = benchmark.alternate(both, x).values()
        assert speed_up(reference, candidate)[0] == pytest.approx(1, abs=0.005)
