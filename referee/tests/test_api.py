"""The names of the API, and what README, VERDICTS and INTERNALS say of the code."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import referee
from referee import checks, engine
from referee.testing.graded import grade
from referee.testing.texts import IMPORTS, correct, module, reference, wrong

FOLDER = Path(__file__).resolve().parent.parent


def code_in(page: str, part: str) -> str:
    """Return a page's only Python example that has this part."""
    text = (FOLDER / page).read_text()
    [example] = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if part in code]
    return example


def small_problem() -> str:
    """Return the README's problem with an eighth of its rows, which takes less time."""
    problem = code_in("README.md", "class Model(nn.Module)")
    size = "torch.rand(1024, 4096)"
    assert size in problem
    return problem.replace(size, "torch.rand(128, 4096)")


@pytest.mark.slow
def test_the_readmes_example_grades_its_solution_as_correct(tmp_path):
    (tmp_path / "problem.py").write_text(small_problem())
    (tmp_path / "solution.py").write_text(code_in("README.md", "class ModelNew(nn.Module)"))
    command = [sys.executable, "-c", code_in("README.md", "grade(Reference")]
    environment = {"PYTHONPATH": str(FOLDER.parent), "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert output.startswith("correct ")


def form_of(text: str) -> str:
    """Return a text in one line, with N for each number and WORD for each word of times."""
    one_line = " ".join(text.split())
    return re.sub("faster|slower|a tie|too noisy", "WORD", re.sub(r"\d[\d,.]*\d|\d", "N", one_line))


@pytest.mark.slow
def test_the_readmes_verdicts_are_those_that_the_command_prints(tmp_path):
    """But for numbers and words of times."""
    exp = "torch.exp(x - x.amax(dim=1, keepdim=True))"
    exp_in_half = "torch.exp((x - x.amax(dim=1, keepdim=True)).bfloat16()).float()"
    solution = code_in("README.md", "class ModelNew(nn.Module)")
    assert exp in solution
    (tmp_path / "problem.py").write_text(small_problem())
    (tmp_path / "solution.py").write_text(solution)
    (tmp_path / "half.py").write_text(solution.replace(exp, exp_in_half))
    line = [sys.executable, "-m", "referee", "problem.py", "solution.py", "half.py"]
    environment = {"PYTHONPATH": str(FOLDER.parent), "PATH": "/usr/bin:/bin"}
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run([*line, "--device", "cpu"], check=False, **options)  # half.py is wrong
    [verdicts] = re.findall(
        r"```\n(solution\.py: .*?)(half\.py: .*?)```", (FOLDER / "README.md").read_text(), re.S
    )
    for verdict in verdicts:
        assert form_of(verdict) in form_of(done.stdout)


TIMES = ("milliseconds", "speedup", "interval", "step_speedup")  # attributes of a result


@pytest.mark.slow
def test_each_of_several_solutions_has_a_result_in_their_order(tmp_path):
    forward = "return torch.relu(x)"
    problem, right, wrong_file = (tmp_path / f"{name}.py" for name in ("problem", "right", "wrong"))
    problem.write_text(IMPORTS + reference(forward, "[torch.rand(64, 64)]"))
    right.write_text(IMPORTS + module(forward))
    wrong_file.write_text(IMPORTS + module("return torch.zeros_like(x)"))
    results = referee.grade_all(referee.Reference(problem), [wrong_file, right], "cpu", trials=3)
    assert [result.file for result in results] == [wrong_file, right]
    assert [result.is_correct for result in results] == [False, True]
    of_wrong, of_right = ([getattr(result, name) for name in TIMES] for result in results)
    assert of_wrong == [None] * len(TIMES)
    assert None not in of_right
    assert [result.time == "" for result in results] == [True, False]


def test_the_readmes_table_has_the_attributes_of_a_result():
    names = {field.name for field in dataclasses.fields(referee.Result)} | {"is_correct"}
    [head, _] = (FOLDER / "README.md").read_text().split("Times are None, and")
    _, table = head.split("| attribute | content |")
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(first_cells))) == names


def test_verdicts_lists_all_checks_in_their_order():
    text = (FOLDER / "VERDICTS.md").read_text()
    cells = re.findall(r"^\| \d+ \| (`.+?) \|", text, re.MULTILINE)
    made = [*checks.CHECKS_ONCE, *checks.CHECKS_PER_SETTING]
    assert re.findall(r"`(\w+)`", "".join(cells)) == [check.__name__ for check in made]


LINEAR = "self.fc = nn.Linear(256, 64, bias=False)"
FORWARD = "return self.fc(x)"
# Adds in another order than eager, so that its roundings differ. For zeros both are exact.
TWO_SUMS = """
w = self.fc.weight
return x[:, ::2] @ w[:, ::2].t() + x[:, 1::2] @ w[:, 1::2].t()
"""
# Is wrong where x is zeros, which no other check draws.
WRONG_FOR_ZEROS = f"if not x.any():\n    return x[:, :64] + 1\n{FORWARD}"


@pytest.mark.slow
@pytest.mark.parametrize("place", range(1, len(checks.CHECKS_PER_SETTING) + 1))
def test_the_check_of_internals_may_be_at_any_place_after_the_first(place, tmp_path, monkeypatch):
    """The example check of INTERNALS.md does not change what the other checks find."""
    namespace = {}
    exec(code_in("INTERNALS.md", "def check_zeros"), namespace)
    assert checks.CHECKS_PER_SETTING[0] is checks.check_values
    with_check = list(checks.CHECKS_PER_SETTING)
    with_check.insert(place, namespace["check_zeros"])
    monkeypatch.setattr(engine, "CHECKS_PER_SETTING", with_check)
    table = {
        "right": correct(module(TWO_SUMS, LINEAR), "training step"),
        "wrong": wrong(module(WRONG_FOR_ZEROS, LINEAR), "zeros"),
    }
    grade(reference(FORWARD, "[torch.randn(64, 256)]", LINEAR), table, tmp_path)


def test_bad_arguments_raise_the_documented_errors(tmp_path):
    missing = tmp_path / "missing.py"
    with pytest.raises(OSError, match="missing"):
        referee.Reference(missing)
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(referee.BadReferenceError, match="defines no Model, no get_inputs"):
        referee.Reference(empty)
    path = tmp_path / "problem.py"
    path.write_text(IMPORTS + reference("return torch.relu(x)", "[torch.rand(8, 64)]"))
    problem = referee.Reference(path)
    assert "reference" not in sys.modules  # a caller may have a module of this name
    with pytest.raises(OSError, match="missing"):
        referee.grade(problem, missing, device="cpu")
    with pytest.raises(ValueError, match="expected cpu, cuda or cuda:N"):
        referee.grade(problem, path, device="tpu")


def test_the_package_has_the_documented_names_and_no_others():
    names = {"BadReferenceError", "Reference", "Result", "grade", "grade_all"}
    assert set(referee.API_NAMES) == names
    for name in referee.API_NAMES:
        assert getattr(referee, name).__doc__
    with pytest.raises(AttributeError):
        _ = referee.no_such_name


@pytest.mark.parametrize("trials", [0, -1])
def test_a_number_of_rounds_below_one_is_refused(trials):
    with pytest.raises(ValueError, match="trials of 1 or more"):
        referee.grade(None, "solution.py", "cpu", trials=trials)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_time_limit_that_is_not_positive_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout of more than 0 seconds; got"):
        referee.grade(None, "solution.py", "cpu", timeout=timeout)
