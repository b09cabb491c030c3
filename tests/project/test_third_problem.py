"""A third problem needs the files of `tests/project/third_problem`, and nothing else.

The test adds them to a copy of the project: the folder `kernels/` as it is, and the Python files at
the end of the files that EXTENDED names.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import run_to_end
from tests.support.processes import ROOT, copy_project

pytestmark = pytest.mark.slow  # the kernels are built twice

ADDED = ROOT / "tests" / "project" / "third_problem"
EXTENDED = {  # files of the project, and the file of ADDED that is appended to each
    "model.py": "model.py",
    "model_new.py": "model_new.py",
    "kernels/__init__.py": "kernels_init.py",
    "kernels/build/bundle.py": "kernels_build_bundle.py",
}
HEAD = "import torch\nfrom torch import nn\n\n\nclass ModelNew(nn.Module):\n"
# The forwards of two wrong solutions of GELU: its approximation, and a copy.
GRADED = {"tanh": 'return nn.functional.gelu(x, approximate="tanh")', "copies": "return x.clone()"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a copy of the project with the third problem."""
    folder = tmp_path_factory.mktemp("project")
    copy_project(folder)
    shutil.copytree(ADDED / "kernels", folder / "kernels", dirs_exist_ok=True)
    for name, added in EXTENDED.items():
        text = (ROOT / name).read_text() + "\n\n" + (ADDED / added).read_text()
        (folder / name).write_text(text)
    return folder


def run(folder, *arguments, status=0):
    """Run `python run.py gelu`, assert its exit status, and return its output."""
    done = run_to_end("gelu", *arguments, folder=folder, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_third_problem_is_compared_and_its_solutions_are_graded(project, device):
    """Our solution and its bundle are correct, and two wrong files are found to be wrong."""
    size = ["--rows", "3", "--trials", "3", "--device", device]
    output = run(project, *size)
    assert re.search("[1-9] cases compared with the reference, none wrong", output)
    assert "\nbackward, ModelNew " in output
    bundle = project / "bundle.py"
    run(project, "--bundle", str(bundle))
    assert "// ---- linear/" not in bundle.read_text()
    files = [bundle]
    for name, text in GRADED.items():
        files.append(project / f"{name}.py")
        files[-1].write_text(f"{HEAD}    def forward(self, x):\n        {text}\n")
    options = [*size, "--json", "graded.json", "--solution", "model_new.py", *map(str, files)]
    run(project, *options, status=1)
    records = json.loads((project / "graded.json").read_text())["records"]
    verdicts = {Path(r["file"]).stem: (r["verdict"], r["accuracy"]) for r in records}
    assert verdicts["model_new"] == verdicts["bundle"] == ("correct", "float32-grade")
    assert verdicts["tanh"][0] == "wrong"
    assert verdicts["copies"][0] == "wrong"
    assert "run.py: gelu has no sweep" in run(project, "--sweep", status=2)
