"""Another problem takes the files of `tests/third_problem`, and nothing else.

Its `model.py` and `model_new.py` are appended to the project's.
"""

import json
import shutil
from pathlib import Path

import pytest
from processes import ROOT, copy_project
from test_run import run_it

pytestmark = pytest.mark.slow  # it builds its kernels twice

ADDED = ROOT / "tests" / "third_problem"
HEAD = "import torch\nfrom torch import nn\n\n\nclass ModelNew(nn.Module):\n"
GRADED = {"tanh": 'return nn.functional.gelu(x, approximate="tanh")', "copies": "return x.clone()"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project, with the problem."""
    folder = tmp_path_factory.mktemp("project")
    copy_project(folder)
    shutil.copytree(ADDED / "kernels", folder / "kernels", dirs_exist_ok=True)
    for name in ("model.py", "model_new.py"):
        (folder / name).write_text((ROOT / name).read_text() + "\n\n" + (ADDED / name).read_text())
    return folder


def run(folder, *arguments, status=0):
    """What `python run.py gelu` prints."""
    done = run_it("gelu", *arguments, folder=folder, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_is_compared_and_files_are_graded(project, device):
    size = ["--rows", "3", "--trials", "3", "--device", device]
    output = run(project, *size)
    assert "5 cases compared with the reference, none wrong" in output
    assert "\nbackward, ModelNew " in output
    bundle = project / "bundle.py"
    run(project, "--bundle", str(bundle))
    assert "linear/sm90/" not in bundle.read_text()
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
