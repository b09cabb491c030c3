"""The command line: bad input, exit statuses, and one tiny run of the real thing."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import run
from model import PROBLEMS, LinearReluDivide, Model

ROOT = Path(run.__file__).parent


class Clone(Model):
    """A wrong solution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@pytest.fixture
def solution(monkeypatch):
    """Puts a stand-in where run.py imports the solution from."""

    def place(relu: type, linear_relu_divide: type = LinearReluDivide) -> None:
        solutions = {"relu": relu, "linear_relu_divide": linear_relu_divide}
        module = SimpleNamespace(SOLUTIONS=solutions)
        monkeypatch.setitem(sys.modules, "model_new", module)

    return place


@pytest.fixture
def small_weights(monkeypatch):
    """The second problem with in_features 96, out_features 80."""
    small = replace(PROBLEMS["linear_relu_divide"], get_init_inputs=lambda: [96, 80, 2.0])
    monkeypatch.setitem(PROBLEMS, "linear_relu_divide", small)


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_problem"],
        ["--rows", "0"],
        ["--rows", "-1"],
        ["--rows", "many"],
        ["--rows", "9" * 30],
        ["--trials", "0"],
        ["--dtype", "bool"],
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--device", "cuda:99"],
        ["--json", "/no/such/folder/file"],
        ["--json", str(ROOT)],
        ["--bundle", "/no/such/folder/file"],
        ["--bundle", "solution.py"],
        ["linear_relu_divide", "--dtype", "int8"],
        ["linear_relu_divide", "--rows", "9" * 30],
        ["--dtype", "int8"],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_bad_input(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    output = capsys.readouterr()
    assert stopped.value.code == 2
    assert output.out == ""
    assert output.err.startswith("run.py: ")
    assert output.err.count("\n") == 1


def test_wrong_solution(solution, capsys, tmp_path):
    solution(Clone)
    path = tmp_path / "result.json"
    assert run.main(["relu", "--device", "cpu", "--rows", "1", "--json", str(path)]) == 1
    output = capsys.readouterr().out
    assert "nothing was timed" in output
    assert "WRONG  float32, random" in output
    assert "elements differ, the first at [" in output
    record = json.loads(path.read_text())
    assert record["checks"]["failures"]
    assert "timings" not in record


def test_solution_that_does_not_build(monkeypatch, capsys):
    def fail(name: str) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(run.importlib, "import_module", fail)
    assert run.main(["--device", "cpu", "--rows", "1"]) == 1
    assert "no compiler" in capsys.readouterr().err


def test_solution_that_changes_settings(solution, capsys):
    class Sabotage(Model):
        def __init__(self) -> None:
            super().__init__()
            torch.set_default_dtype(torch.float16)

    solution(Sabotage)
    try:
        assert run.main(["relu", "--device", "cpu", "--rows", "1", "--trials", "1"]) == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert "WRONG  the solution changed the default dtype" in capsys.readouterr().out


def test_bundle(monkeypatch, capsys, tmp_path):
    bundles = SimpleNamespace(bundle=lambda problem: f"# {problem}\n")
    monkeypatch.setattr(run.importlib, "import_module", {"kernels.bundle": bundles}.get)
    path = tmp_path / "solution.py"
    assert run.main(["relu", "--bundle", str(path)]) == 0
    assert path.read_text() == "# relu\n"
    assert capsys.readouterr().out.count("\n") == 1


def test_from_end_to_end(tmp_path):
    path = tmp_path / "result.json"
    options = ["relu", "--rows", "1", "--trials", "3", "--device", "cpu", "--json", str(path)]
    command = [sys.executable, str(ROOT / "run.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "building the kernels" in done.stderr
    assert "torch.relu (again)" in done.stdout
    assert "NumPy" not in done.stderr
    assert (
        "kept for backward: ModelNew 49,152 bytes, torch.relu 1,572,864 bytes (1/32)" in done.stdout
    )
    record = json.loads(path.read_text())
    assert record["shape"] == [1, 393216]
    assert record["checks"] == {"count": record["checks"]["count"], "failures": []}
    assert {len(times) for times in record["timings"]["seconds"].values()} == {3}
    assert record["step"]["kept_bytes"] == {"ModelNew": 49152, "torch.relu": 1572864}
    for half in ("forward", "backward", "step"):
        assert {len(times) for times in record["step"]["seconds"][half].values()} == {3}


def test_integers_have_no_step(solution, capsys, tmp_path):
    solution(Model)
    path = tmp_path / "result.json"
    options = ["relu", "--dtype", "int8", "--rows", "1", "--trials", "1", "--device", "cpu"]
    assert run.main([*options, "--json", str(path)]) == 0
    assert "training step" not in capsys.readouterr().out
    assert "step" not in json.loads(path.read_text())


@pytest.mark.usefixtures("small_weights")
def test_both_problems(solution, capsys, tmp_path):
    path = tmp_path / "result.json"
    options = ["--device", "cpu", "--rows", "5", "--trials", "2", "--json", str(path)]
    solution(Model)
    assert run.main(options) == 0
    output = capsys.readouterr().out
    assert output.startswith("relu: ")
    assert "\n\nlinear_relu_divide: " in output
    assert "highest, gradient of weight" in output
    records = json.loads(path.read_text())
    assert list(records) == ["relu", "linear_relu_divide"]
    linear = records["linear_relu_divide"]
    assert linear["shape"] == [5, 96]
    assert [row["name"] for row in linear["errors"]][:2] == [
        "highest, x in 0..1",
        "highest, x normal",
    ]
    timings = linear["settings"]["highest"]["timings"]
    assert timings["flops"] == 2 * 5 * 96 * 80
    assert set(timings["seconds"]) == {
        "LinearReluDivideNew", "eager", "eager (again)", "product alone",
    }  # fmt: skip
    assert {len(times) for times in timings["seconds"].values()} == {2}
    assert linear["settings"]["highest"]["step"]["kept_bytes"]["eager"] == 5 * 80 * 4

    class NoBias(LinearReluDivide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.linear.weight.T) / self.divisor

    solution(Model, NoBias)  # the second alone is wrong
    assert run.main(options) == 1
    output = capsys.readouterr().out
    assert "WRONG  float32, [" in output
    assert "errors" not in json.loads(path.read_text())["linear_relu_divide"]


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_linear_in_other_dtypes(dtype, solution, capsys):
    solution(Model)
    options = ["--dtype", dtype, "--device", "cpu", "--rows", "5", "--trials", "5"]
    assert run.main(["linear_relu_divide", *options]) == 0
    output = capsys.readouterr().out
    assert f"[5, 96] {dtype}" in output
    assert "highest" not in output  # the setting is float32's


def test_problem_without_solution(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "model_new", SimpleNamespace(SOLUTIONS={}))
    assert run.main(["relu", "--device", "cpu", "--rows", "1"]) == 1
    assert "it has none for relu" in capsys.readouterr().err
