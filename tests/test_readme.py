"""README and the docs against the tree. `python tests/test_readme.py` counts files' lines anew."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DESIGN = ROOT / "docs" / "DESIGN.md"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
COUNTED = re.compile(r"^\| `(.+?)` \| (\d+) \|", re.MULTILINE)  # DESIGN's table of files
ROUTES = re.compile(r"`([\w/]+\.(?:py|cpp|h|cuh?))` \((\d+)\)")  # CONTRIBUTING's routes


def tree():
    """The paths in README's tree."""
    [block] = re.findall(r"\n\n```\n(model.py .+?)^```", README, re.DOTALL | re.MULTILINE)
    paths, folder = [], Path()
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = Path(name) if name.endswith("/") else Path()
            paths.append(Path(name))
        else:
            paths.append(folder / name)
    return paths


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def kernel_files() -> dict[str, int]:
    """The lines of every file of `kernels/`, by its path there."""
    folder = ROOT / "kernels"
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix(): count_lines(path) for path in files}


def write_counts() -> None:
    """Corrects the numbers of lines in DESIGN's table and CONTRIBUTING's routes."""
    files = kernel_files()

    def row(match: re.Match) -> str:
        return f"| `{match[1]}` | {files.get(match[1], match[2])} |"

    def step(match: re.Match) -> str:
        path = ROOT / match[1]
        return f"`{match[1]}` ({count_lines(path) if path.exists() else match[2]})"

    DESIGN.write_text(COUNTED.sub(row, DESIGN.read_text()))
    contributing = ROOT / "docs" / "CONTRIBUTING.md"
    contributing.write_text(ROUTES.sub(step, contributing.read_text()))


def test_readmes_tree_is_the_tree():
    listed = tree()
    assert [str(path) for path in listed if not (ROOT / path).exists()] == []
    hidden = ("__", ".", "requirements", "LICENSE", "README", "pyproject")
    for folder in (Path(), Path("kernels")):
        there = {path.name for path in (ROOT / folder).iterdir()}
        named = {path.name for path in listed if path.parent == folder}
        ours = {name for name in there if not name.startswith(hidden)}
        assert named == ours, f"in {folder}"


def test_pages_are_short():
    assert len(README.splitlines()) <= 120
    assert count_lines(DESIGN) <= 150


def test_design_lists_every_file_of_the_kernels_with_its_lines():
    listed = {path: int(lines) for path, lines in COUNTED.findall(DESIGN.read_text())}
    files = kernel_files()
    assert listed.keys() == files.keys()
    assert listed == files, "python tests/test_readme.py writes the numbers"


def test_contributings_routes_have_seven_steps_and_the_lines_of_their_files():
    text = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    routes = [rows for rows in tables if ROUTES.search(rows)]
    assert len(routes) == 2
    for rows in routes:
        steps = ROUTES.findall(rows)
        assert rows.count("\n") - 2 == len(steps) <= 7
        right = [(path, str(count_lines(ROOT / path))) for path, _ in steps]
        assert steps == right, "python tests/test_readme.py writes the numbers"


@pytest.mark.parametrize("path", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=str)
def test_links_lead_somewhere(path):
    links = LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


if __name__ == "__main__":
    write_counts()
