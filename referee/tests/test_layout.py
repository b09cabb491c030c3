"""Imports inside the package go one way: from a part to the parts that are listed below it.

In contestants/ and child/, the modules have such an order, too.

Nothing in the package, its tests included, imports anything of the project around it.
"""

import ast
import re
from pathlib import Path

import pytest

import referee
from referee import child, contestants

PACKAGE = Path(referee.__file__).parent
# `referee/__init__` describes each part in a paragraph that begins with its name: "checks/: ...".
PARTS = re.findall(r"^(\w+)/?: ", referee.__doc__, re.MULTILINE)
# `pip install ./referee` leaves a copy of the package in build/.
OTHERS = {"tests", "testing", "build"}
FILES = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in OTHERS]


def part_of(module):
    """Return the part to which "referee.checks.values" belongs, here "checks"."""
    return module.split(".")[1]


def imported_modules(file):
    """Return the modules of the package that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in modules if module.startswith("referee.")}


def test_the_list_of_parts_is_complete():
    parts = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert sorted(PARTS) == sorted(parts - {"__init__"})


def test_the_list_of_a_parts_modules_is_complete():
    for paragraph in re.split(r"\n\n", referee.__doc__):
        part = re.match(r"(\w+)/: ", paragraph)
        if part is None or part[1] in ("child", "contestants"):  # they have lists of their own
            continue
        modules = {file.stem for file in (PACKAGE / part[1]).glob("*.py")} - {"__init__"}
        assert modules <= set(re.findall(r"\w+", paragraph)), part[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_part_imports_only_parts_below_it(file):
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":  # it imports the API when that is used
        return
    for module in imported_modules(file):
        is_below = PARTS.index(part_of(module)) >= PARTS.index(part)
        assert is_below, f"{part} imports {module}, which is above it in referee/__init__.py"


@pytest.mark.parametrize("package", [contestants, child], ids=lambda package: package.__name__)
def test_a_module_imports_only_modules_that_are_listed_below_it(package):
    first_list, *_ = re.findall(r"(?:^    .+\n)+", package.__doc__, re.MULTILINE)
    modules = re.findall(r"^    (\w+)", first_list, re.MULTILINE)
    folder = Path(package.__file__).parent
    assert sorted(modules) == sorted({file.stem for file in folder.glob("*.py")} - {"__init__"})
    for position, module in enumerate(modules):
        imported = imported_modules(folder / f"{module}.py")
        for above in modules[:position]:
            name = f"{package.__name__}.{above}"
            assert not any(other == name or other.startswith(f"{name}.") for other in imported)


def test_no_file_imports_anything_of_the_project_around_the_package():
    project = {"kernels", "model", "model_new", "problems", "run", "tests"}
    for path in PACKAGE.rglob("*.py"):
        names = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M)
        assert not project & set(names), path
