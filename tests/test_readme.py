"""README and the docs against the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


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


def test_readmes_tree_is_the_tree():
    listed = tree()
    assert [str(path) for path in listed if not (ROOT / path).exists()] == []
    hidden = ("__", ".", "requirements", "LICENSE", "README", "pyproject")
    for folder in (Path(), Path("kernels")):
        there = {path.name for path in (ROOT / folder).iterdir()}
        named = {path.name for path in listed if path.parent == folder}
        ours = {name for name in there if not name.startswith(hidden)}
        assert named == ours, f"in {folder}"


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("path", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=str)
def test_links_lead_somewhere(path):
    links = LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
