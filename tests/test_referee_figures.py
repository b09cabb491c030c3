"""The figures of README and docs/BENCHMARKS.md, by the commands that stand there."""

import json
import shlex

import pytest
from test_results import HEADLINE, document, record

from referee import benchmark, figures, markdown

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


README = """One table.

<!-- cpu: python -c "{}" -->
<!-- end -->
"""


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
    readme, text = README.format(code), TEXT.replace("print(6 * 7)", code)
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
    assert pages.picture.read_text().startswith("<svg")


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
        if arguments[:2] == ["-m", "referee.benchmark"]:
            benchmark.parse(arguments[2:])
        else:
            assert arguments[0] == "run.py" or arguments[1].startswith("referee.")
