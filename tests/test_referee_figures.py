"""The blocks of docs/BENCHMARKS.md."""

import shlex

import pytest

from referee import benchmark, figures

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
def path(tmp_path):
    path = tmp_path / "figures.md"
    path.write_text(TEXT)
    return path


def test_a_block_gets_what_its_command_prints(path):
    assert figures.measure(path, "cpu") == []
    assert path.read_text() == TEXT.replace("old", "```\n42\n```")


def test_a_block_whose_command_fails_stays(path):
    path.write_text(TEXT.replace("print(6 * 7)", "exit(3)"))
    before = path.read_text()
    assert figures.measure(path, "cpu") == ['python -c "exit(3)"']
    assert path.read_text() == before


@pytest.mark.parametrize("device, only", [("cpu", "views"), ("mps", "")])
def test_no_such_block(path, device, only):
    with pytest.raises(ValueError, match="has no block"):
        figures.measure(path, device, only)


def test_the_blocks_of_the_file_are_commands_of_this_project():
    text = figures.BENCHMARKS.read_text()
    blocks = list(figures.BLOCK.finditer(text))
    assert len(blocks) == text.count("<!-- end -->") > 0
    for match in blocks:
        assert match["device"] in ("cpu", "cuda")
        python, *arguments = shlex.split(match["command"])
        assert python == "python"
        if arguments[:2] == ["-m", "referee.benchmark"]:
            benchmark.parse(arguments[2:])
        else:
            assert arguments[0] == "run.py" or arguments[1].startswith("referee.")
