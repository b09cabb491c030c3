"""Check that links, files, variables and errors that the documents name exist."""

import re
import shutil
import subprocess
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
DESIGN = (ROOT / "docs" / "DESIGN.md").read_text()
CONTRIBUTING = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
PAGES_OUTSIDE_REFEREE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*PAGES_OUTSIDE_REFEREE, *sorted((ROOT / "referee").glob("*.md"))]

LINK = re.compile(r"\]\(([^):]+)\)")
# A source file in code font, such as `linear/operator/gate.h`.
FILE = re.compile(r"`([\w/.]+\.(?:py|cpp|h|cuh?))`")
FILES_ELSEWHERE = {
    "ATen/autocast_mode.h",  # torch
    "run_and_check.py",  # KernelBench
    "kernels/gelu/dispatch.py",  # an example
}
# How the code reads an environment variable or a macro.
READ = [
    re.compile(r"""\benviron(?:\.get\(|\.setdefault\(|\[)["'](\w+)["']"""),
    re.compile(r"""\bgetenv\(["'](\w+)["']"""),
    re.compile(r"^#if.*\b(KERNELS_\w+)", re.MULTILINE),
    re.compile(r"-D(KERNELS_\w+)"),
]
SET_BY_THE_BUILD = {"PATH", "LC_ALL"}
SPLIT = (ROOT / "docs" / "SPLIT.md").read_text()
STEP = re.compile(r"^\| `([\w:.]+)` \| `([\w/]+\.(?:py|cpp|h|cuh?))` \|", re.MULTILINE)


def source_files() -> list[Path]:
    """Return all Python, C++ and CUDA files."""
    paths = list(ROOT.glob("*.py"))
    for folder in ("kernels", "problems", "referee", "tests"):
        paths += (ROOT / folder).rglob("*")
    suffixes = (".py", ".cpp", ".h", ".cu", ".cuh")
    return [path for path in paths if path.suffix in suffixes]


def source_texts() -> list[str]:
    """Return the texts of all Python, C++ and CUDA files."""
    return [path.read_text() for path in source_files()]


def kernel_files() -> list[str]:
    """Return the path of every file of `kernels/`, relative to it."""
    files = (path for path in KERNELS.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return [path.relative_to(KERNELS).as_posix() for path in files]


def anchors(page: Path) -> set[str]:
    """Return the names by which links reach the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tree_in_design_has_the_files_and_folders_of_the_project():
    [tree] = re.findall(r"^```\n(model.py .+?)^```", DESIGN, re.DOTALL | re.MULTILINE)
    named = [line.split()[0] for line in tree.splitlines()]
    assert [name for name in named if name.endswith("/") and not (ROOT / name).is_dir()] == []
    hidden = ("__", ".", "requirements", "LICENSE", "README", "pyproject")
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(hidden)}
    tracked = _tracked_names()
    if tracked:  # the folder may also hold results and bundles of a user's
        there &= tracked
    assert {name.rstrip("/") for name in named} == there


def _tracked_names() -> set[str]:
    """Return the names in the project's folder that git knows; none if this is no checkout."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return set()
    command = ["git", "ls-files", "-z"]
    paths = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    return {path.partition("/")[0] for path in paths.split("\0") if path}


def test_each_file_of_the_kernels_belongs_to_one_row_of_the_table_in_design():
    """A row's first cell has paths, in which * matches any characters."""
    [table] = re.findall(r"^## Files\n(.+)", DESIGN, re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    rows = [path for cell in cells for path in re.findall(r"`(.+?)`", cell)]
    files = kernel_files()
    found = {file: [row for row in rows if fnmatch(file, row)] for file in files}
    assert {file: rows for file, rows in found.items() if len(rows) != 1} == {}
    assert [row for row in rows if not any(fnmatch(file, row) for file in files)] == []


def test_the_list_of_tests_has_all_of_them():
    tests = ROOT / "tests"
    folders = re.findall(r"^(\w+)/ ", (tests / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(folders) == sorted(path.parent.name for path in tests.glob("*/__init__.py"))
    for folder in folders:
        named = re.findall(r"\btest_\w+", (tests / folder / "__init__.py").read_text())
        assert sorted(named) == sorted(path.stem for path in (tests / folder).glob("test_*.py"))


def test_each_step_of_the_routes_in_contributing_is_in_the_file_that_it_names():
    """A method `Class.method` is there if both of its parts are; a namespace is not looked for."""
    steps = STEP.findall(CONTRIBUTING)
    rows = re.findall(r"^\| `[^`]+` \| `[^`]+` \|", CONTRIBUTING, re.MULTILINE)
    assert len(steps) == len(rows) > 0, "a row of the tables names no step"
    for function, path in steps:
        text = (ROOT / path).read_text()
        for name in function.rpartition("::")[2].split("."):
            assert re.search(rf"\b(?:def|class) {name}\b|\b{name}\(", text), (function, path)


def test_each_function_of_the_table_of_steps_in_split_is_in_the_kernels():
    _, _, section = SPLIT.partition("### Where each step is in the code\n")
    table = [line for line in section.partition("\n### ")[0].splitlines() if line[:1] == "|"]
    names = re.findall(r"`(\w+)`", "\n".join(table))
    text = "\n".join(path.read_text() for path in (KERNELS / "linear").rglob("*.cuh"))
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\b(?:<.*>)?\(", text)] == []


def test_the_variables_and_macros_that_the_code_reads_are_in_the_list_of_contributing():
    _, _, section = CONTRIBUTING.partition("## Environment variables and macros\n")
    first_cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    listed = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    texts = source_texts()
    read = {name for text in texts for pattern in READ for name in pattern.findall(text)}
    assert read - SET_BY_THE_BUILD - listed == set()
    assert [name for name in listed if not any(name in text for text in texts)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading_that_exist(page):
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES_OUTSIDE_REFEREE, ids=lambda page: page.name)
def test_the_files_that_documents_name_exist(page):
    """A page may leave out the first folders of a path."""
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for path in source_files()]
    for file in set(FILE.findall(page.read_text())) - FILES_ELSEWHERE:
        assert any(path.endswith(f"/{file}") for path in paths), file


def failing_calls():
    """Return calls of both modules that raise an error: a module, and its argument."""
    from model_new import LinearReluDivideNew, ModelNew

    relu = ModelNew()
    linear = LinearReluDivideNew(3, 2, 2.0)
    return [
        (relu, [1.0]),
        (relu, torch.ones(2, dtype=torch.bool)),
        (relu, torch.ones(2, dtype=torch.complex64)),
        (ModelNew(inplace=True), torch.ones(2, requires_grad=True)),
        (linear, [1.0]),
        (linear, torch.ones(2, 4)),
        (linear, torch.ones(2, 3, dtype=torch.float16)),
        (linear, torch.ones(())),
    ]


def test_the_docstrings_of_the_modules_name_all_errors():
    raised = defaultdict(set)
    for module, x in failing_calls():
        with pytest.raises(Exception) as caught:
            module(x)
        raised[type(module)].add(type(caught.value).__name__)
    for kind, errors in raised.items():
        _, _, raises = kind.forward.__doc__.partition("Raises:\n")
        named = {line.split(":")[0].strip() for line in raises.splitlines() if ": " in line}
        assert named == errors


def test_the_docstrings_of_the_modules_name_their_arguments_and_dtypes():
    from model_new import LinearReluDivideNew, ModelNew

    documented = [
        (ModelNew, ["inplace"], "dtype that `torch.relu` takes"),
        (
            LinearReluDivideNew,
            ["in_features", "divisor"],
            "float32, float64, float16 or bfloat16",
        ),
    ]
    for kind, arguments, dtypes in documented:
        assert all(f"    {name}: " in kind.__doc__ for name in arguments)
        about, _, _ = kind.forward.__doc__.partition("Raises:\n")
        words = " ".join(about.split())
        assert all(word in words for word in ("Args: ", "Returns: ", dtypes))
