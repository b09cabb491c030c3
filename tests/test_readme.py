"""The files, functions, links and errors that README, documents and docstrings name exist."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "DESIGN.md").read_text()
CONTRIBUTING = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LINK = re.compile(r"\]\(([^):]+)\)")
STEP = re.compile(r"^\| `([\w:.]+)` \| `([\w/]+\.(?:py|cpp|h|cuh?))` \|", re.MULTILINE)


def tree() -> list[Path]:
    """Return the paths in README's tree."""
    [block] = re.findall(r"\n\n```\n(model.py .+?)^```", README, re.DOTALL | re.MULTILINE)
    paths = []
    folder = Path()
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = Path(name) if name.endswith("/") else Path()
            paths.append(Path(name))
        else:
            paths.append(folder / name)
    return paths


def kernel_files() -> list[str]:
    """Return the path of every file of `kernels/`, relative to it."""
    files = (path for path in KERNELS.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return [path.relative_to(KERNELS).as_posix() for path in files]


def anchors(page: Path) -> set[str]:
    """Return the names by which links reach the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readmes_tree_is_the_tree():
    listed = tree()
    assert [str(path) for path in listed if not (ROOT / path).exists()] == []
    hidden = ("__", ".", "requirements", "LICENSE", "README", "pyproject")
    for folder in (Path(), Path("kernels")):
        there = {path.name for path in (ROOT / folder).iterdir()}
        named = {path.name for path in listed if path.parent == folder} - {"__init__.py"}
        ours = {name for name in there if not name.startswith(hidden)}
        assert named == ours, f"in {folder}"


def test_each_file_of_the_kernels_belongs_to_one_row_of_designs_table():
    """A row's first cell has paths, in which * matches any characters."""
    [table] = re.findall(r"^## Files\n(.+)", DESIGN, re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    rows = [path for cell in cells for path in re.findall(r"`(.+?)`", cell)]
    files = kernel_files()
    found = {file: [row for row in rows if fnmatch(file, row)] for file in files}
    assert {file: rows for file, rows in found.items() if len(rows) != 1} == {}
    assert [row for row in rows if not any(fnmatch(file, row) for file in files)] == []


def test_each_step_of_contributings_routes_is_in_the_file_that_it_names():
    """A method `Class.method` is there if both of its parts are; a namespace is not looked for."""
    steps = STEP.findall(CONTRIBUTING)
    assert len(steps) == 12
    for function, path in steps:
        text = (ROOT / path).read_text()
        for name in function.rpartition("::")[2].split("."):
            assert re.search(rf"\b(?:def|class) {name}\b|\b{name}\(", text), (function, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading_that_exist(page):
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_modules_docstrings_name_their_arguments_dtypes_and_errors():
    from model_new import LinearReluDivideNew, ModelNew

    relu = ModelNew()
    linear = LinearReluDivideNew(3, 2, 2.0)
    failing_calls = [
        (relu, [1.0]),
        (relu, torch.ones(2, dtype=torch.bool)),
        (relu, torch.ones(2, dtype=torch.complex64)),
        (ModelNew(inplace=True), torch.ones(2, requires_grad=True)),
        (linear, [1.0]),
        (linear, torch.ones(2, 4)),
        (linear, torch.ones(2, 3, dtype=torch.float16)),
        (linear, torch.ones(())),
    ]
    raised = {ModelNew: set(), LinearReluDivideNew: set()}
    for module, x in failing_calls:
        with pytest.raises(Exception) as caught:
            module(x)
        raised[type(module)].add(type(caught.value).__name__)
    dtypes = {
        ModelNew: "dtype that `torch.relu` takes",
        LinearReluDivideNew: "float32, float64, float16 or bfloat16",
    }
    for kind, names in ((ModelNew, ["inplace"]), (LinearReluDivideNew, ["in_features", "divisor"])):
        about, _, raises = kind.forward.__doc__.partition("Raises:\n")
        known = {line.split(":")[0].strip() for line in raises.splitlines() if ": " in line}
        assert known == raised[kind]
        words = " ".join(about.split())
        for word in ("Args: ", "Returns: ", dtypes[kind]):
            assert word in words
        assert all(f"    {name}: " in kind.__doc__ for name in names)
