"""The API of three names, and the example in the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from texts import IMPORTS, module, reference

import referee

FOLDER = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_readmes_example(tmp_path):
    text = (FOLDER / "README.md").read_text()
    [example] = [
        code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "grade(" in code
    ]
    forward = "return torch.relu(x)"
    (tmp_path / "problem.py").write_text(IMPORTS + reference(forward, "[torch.rand(64, 64)]"))
    (tmp_path / "solution.py").write_text(IMPORTS + module(forward))
    command = [sys.executable, "-c", example]
    environment = {"PYTHONPATH": str(FOLDER.parent), "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert output.startswith("correct ")


def test_names():
    assert set(referee.API_NAMES) == {"Reference", "Result", "grade"}
    for name in referee.API_NAMES:
        assert getattr(referee, name).__doc__
    with pytest.raises(AttributeError):
        _ = referee.no_such_name


def test_nothing_is_imported_from_the_project():
    """The package stands alone."""
    for path in FOLDER.rglob("*.py"):
        names = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M)
        assert not {"model", "model_new", "kernels", "problems", "run"} & set(names), path
