"""`run.py --reference`: the error budget, files that are no problems, and grading by them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_solutions import CHEATS, DEVICES, SOLUTIONS, found_wrong, read_verdicts

import run
from referee.reference_file import BadReferenceError, load
from referee.judge import oracle
from referee.judge.budget import Output, grade
from referee.structure import flatten

grading = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes minutes: KERNELS_GRADING=1 runs it"
)

IMPORTS = "import torch\nfrom torch import nn\n\n\n"
WIDE = """
class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(3, 131072)]

def get_init_inputs():
    return []
"""
LINEAR = """
class Model(nn.Module):
    def __init__(self, in_features, out_features, divisor):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x):
        return torch.relu(self.linear(x)) / self.divisor

def get_inputs():
    return [torch.rand(33, 96)]

def get_init_inputs():
    return [96, 80, 2.0]
"""
MANY = """
class Model(nn.Module):
    def __init__(self, sizes, kind=None):
        super().__init__()
        assert isinstance(sizes, tuple)
        self.linear = nn.Linear(*sizes)
        self.norm = nn.BatchNorm1d(sizes[1])

    def forward(self, x, scale, labels, matrix):
        y = self.norm(self.linear(x)) * scale
        return y, [y.argmax(1) == labels, labels + 1], matrix @ matrix.T, y.half(), y.sum()

def get_inputs():
    square = torch.rand(64, 64)
    return [torch.rand(64, 48).T.contiguous().T, 1.5, torch.randint(9, (64,)), square + square.T]

def get_init_inputs():
    return [(48, 32)]
"""


def sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product, its terms added one after the other."""
    out = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for column, row in zip(x.T, weight.T, strict=True):
        out += column[:, None] * row
    return out


def tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@pytest.fixture
def product():
    x, weight = torch.randn(40, 2048), torch.randn(30, 2048)
    return x, weight, Output(x @ weight.T, x.double() @ weight.double().T)


def test_the_budget_allows_other_orders_of_summation(product):
    x, weight, output = product
    found = output.compare([(0, sums(x, weight).view(-1))])
    assert found.problem is None
    assert not found.equal
    assert grade(found.relative) == "float32-grade"
    assert output.compare([(0, output.eager[:500]), (500, output.eager[500:])]).equal


def test_the_budget_forbids_lower_precision(product):
    x, weight, output = product
    found = output.compare([(0, (tf32(x) @ tf32(weight).T).view(-1))])
    assert "beyond the error budget" in found.problem
    assert grade(found.relative) == "TF32-grade"
    half = (x.bfloat16() @ weight.bfloat16().T).float().view(-1)
    assert grade(output.compare([(0, half)]).relative) == "bf16-grade"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_a_narrow_budget(dtype):
    x, weight = torch.randn(40, 512, dtype=dtype), torch.randn(30, 512, dtype=dtype)
    exact = x.double() @ weight.double().T
    output = Output(x @ weight.T, exact)
    assert output.compare([(0, exact.to(dtype).view(-1))]).problem is None
    assert output.compare(
        [(0, (exact * (1 + 8 * torch.finfo(dtype).eps)).to(dtype).view(-1))]
    ).problem
    assert output.compare([(0, (exact + 1).to(dtype).view(-1))]).problem


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_one_wrong_element(product, value):
    *_, output = product
    wrong = output.eager.clone()
    wrong[77] = value
    assert output.compare([(0, wrong)]).problem.startswith("1 of 1,200 elements")
    assert output.compare_some(wrong[70:80], output.eager[70:80]).startswith("1 of 10 elements")
    assert output.compare_some(wrong[:70], output.eager[:70]) is None


def test_small_errors_everywhere(product):
    """Each within the budget, but not their mean."""
    *_, output = product
    off = output.eager + 0.9 * output.slack
    assert output.compare([(0, off)]).problem.startswith("mean error")


def test_what_is_not_finite_must_be_met():
    eager = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    output = Output(eager, eager.double())
    assert output.compare([(0, eager)]).problem is None
    for i in range(3):
        wrong = eager.clone()
        wrong[i] = 0.5
        assert output.compare([(0, wrong)]).problem


def test_integers_are_equal_or_wrong():
    output = Output(torch.arange(9), None)
    assert output.compare([(0, torch.arange(9))]).equal
    assert output.compare([(0, torch.arange(1, 10))]).problem.startswith("9 of 9")


def test_flatten():
    assert flatten((1, [2, (3,)])) == ("[*, [*, [*]]]", [1, 2, 3])
    assert flatten(4) == ("*", [4])
    with pytest.raises(ValueError, match="more than"):
        flatten([0] * 1001)


# A file's text, and what the line must say.
BAD = {
    "import": ("import no_such_module\n", "the import raises ModuleNotFoundError: No module"),
    "exit": ("raise SystemExit(0)\n", "the import raises SystemExit"),
    "syntax": ("def f(:\n", "the import raises SyntaxError"),
    "empty": ("", "defines no Model, no get_inputs, no get_init_inputs"),
    "no inputs": (WIDE.replace("get_inputs", "inputs"), "defines no get_inputs"),
    "inputs raise": (WIDE.replace("torch.rand(3,", "torch.rand(-3,"), "get_inputs raises Runtime"),
    "inputs are text": (WIDE.replace("[torch.rand(3, 131072)]", "'x'"), "gives a str, not a list"),
    "no tensor": (WIDE.replace("torch.rand(3, 131072)", "3"), "get_inputs gives no tensor"),
    "a dict": (WIDE.replace("torch.rand(3, 131072)", "{}"), "get_inputs gives a dict"),
    "constructor": (WIDE.replace("[]", "[1]"), "Model raises TypeError: "),
    "no module": (WIDE.replace("nn.Module", "str"), "Model raises AttributeError: "),
    "forward": (WIDE.replace("relu(x)", "relu(y)"), "forward raises NameError: name 'y'"),
    "returns a dict": (WIDE.replace("torch.relu(x)", "{'x': x}"), "returns a dict, not a tensor"),
    "returns nothing": (WIDE.replace("torch.relu(x)", "[]"), "Model returns no tensor"),
    "in place": (WIDE.replace("relu(x)", "relu_(x.sub_(1))"), "Model changes its inputs"),
    "random": (WIDE.replace("torch.relu(x)", "nn.functional.dropout(x)"), "another result"),
    "other shapes": (
        WIDE.replace("(3,", "(torch.randint(1, 99999, ()),").replace("131072", "3"),
        "of another form each time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_references(name, tmp_path, capsys):
    text, reason = BAD[name]
    file = tmp_path / "bad.py"
    file.write_text(IMPORTS + text)
    arguments = ["--device", "cpu", "--reference", str(file), "--solution", str(file)]
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    output = capsys.readouterr()
    assert stopped.value.code == 2
    assert output.out == ""
    [line] = [line for line in output.err.splitlines() if line.startswith("run.py: ")]
    assert line.startswith(f"run.py: {file}: ")
    assert reason in line


def test_a_reference_that_does_not_fit(tmp_path, monkeypatch):
    file = tmp_path / "wide.py"
    file.write_text(IMPORTS + WIDE)
    monkeypatch.setattr(oracle, "LARGEST_SHARE", 0)
    with pytest.raises(BadReferenceError, match=r"needs about .* of memory on cpu"):
        oracle.Oracle(load(file), torch.device("cpu"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--reference", "{file}"],
        ["--reference", "/no/such/file", "--solution", "{file}"],
        ["relu", "--reference", "{file}", "--solution", "{file}"],
        ["--reference", "{file}", "--solution", "{file}", "--rows", "3"],
        ["--reference", "{file}", "--solution", "{file}", "--dtype", "float16"],
        ["--reference", "{file}", "--solution", "{file}", "--device", "tpu"],
    ],
    ids=" ".join,
)
def test_requests_that_make_no_sense(arguments, tmp_path, capsys):
    file = tmp_path / "reference.py"
    file.write_text(IMPORTS + WIDE)
    with pytest.raises(SystemExit) as stopped:
        run.main([a.format(file=file) for a in arguments])
    output = capsys.readouterr()
    assert stopped.value.code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1


def grade_by(text: str, files: list[Path], folder: Path, device: str = "cpu"):
    """The exit status, and the verdicts by the stem of their files, against a reference's text."""
    reference, path = folder / "reference.py", folder / "verdicts.json"
    reference.write_text(IMPORTS + text)
    options = ["--trials", "3", "--device", device, "--json", str(path)]
    status = run.main(["--reference", str(reference), *options, "--solution", *map(str, files)])
    return status, read_verdicts(path)


# A timed call shows it, and an earlier call's result is not always known.
REPLAYED = "replays the result of an earlier call|a timed call was wrong"
CHEATING = {
    "01_copies_input": ("cheating", "returns a copy of its input"),
    "01_returns_input": ("cheating", "returns its input"),
    "02_changes_input": ("cheating", "changes its input"),
    "04_counts_calls": ("cheating", REPLAYED),
    "04_replays_by_address": ("cheating", REPLAYED),
    "04_replays_by_fingerprint": ("cheating", REPLAYED),
    "08_walks_frames": ("cheating", "takes a tensor of the referee's"),
    "10_lazy_subclass": ("cheating", "returns a tensor subclass, Lazy"),
    "11_stale_memory": ("wrong", "returns memory that it has not written"),
    "13_falls_back": ("cheating", "falls back on the reference's own operators"),
    "15_background_thread": ("cheating", ""),  # late, or wrong in a timed call
    "16_exits": ("cheating", "exits with status 0"),
    "17_batch_once": ("cheating", REPLAYED),
    "19_takes_threads": ("cheating", "changed the number of threads"),
}
CHEATING_LINEAR = {
    "03_folds_weights": ("cheating", "answers with old parameters"),
    "06_half_precision": ("wrong", "lower precision than eager's"),
    "18_drops_bias": ("wrong", "beyond the error budget"),
    "18_returns_zeros": ("cheating", "returns zeros"),
}


@grading
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("text", "named"), [(WIDE, CHEATING), (LINEAR, CHEATING_LINEAR)], ids=["relu", "linear"]
)
def test_cheats_are_named(text, named, device, tmp_path):
    files = [CHEATS / f"{name}.py" for name in named]
    status, verdicts = grade_by(text, files, tmp_path, device)
    assert status == 1
    for name, found in verdicts.items():
        word, reason = named[name]
        assert (name, found["verdict"]) == (name, word), found["reason"]
        assert re.search(reason, found["reason"]), (name, found["reason"])


FLAT = """old = self.linear
        del self.linear
        self.flat, self.bias = nn.Parameter(old.weight.flatten()), old.bias
        self.linear = lambda x: nn.functional.linear(x, self.flat.view(32, 48), self.bias)
        """
# Each file differs from the reference of many outputs in one thing, which its line must name.
OTHERWISE = {
    "the same": ("", "", "correct", ""),
    "a list": ("return y, [", "return [y, (", "correct", ""),
    "one output": ("return y, [", "return y\n        [", "wrong", "returns *, expected [*, [*"),
    "an integer": ("labels + 1", "labels + 2", "wrong", "64 of 64 elements"),
    "another dtype": ("y.half()", "y.bfloat16()", "wrong", "dtype is bfloat16, expected float16"),
    "another shape": ("matrix @ matrix.T", "(matrix @ matrix.T)[:9]", "wrong", "'s shape is [9, "),
    "symmetric": ("matrix @ matrix.T", "matrix.T @ matrix", "correct", ""),
    "none": ("y.sum()", "None", "wrong", "returns a NoneType, not a plain tensor"),
    "its input": ("labels + 1", "labels.add_(1)", "cheating", "returns its input"),
    "raises": ("y.sum()", "y.no_such_thing()", "error", "AttributeError: "),
    "other names": ("self.linear =", "self.batch = nn.BatchNorm1d(sizes[1])\n        self.fc =",
                    "correct", ""),
    "more state": ("self.norm =", "self.extra = nn.Linear(3, 3)\n        self.norm =", "correct",
                   ""),
    "another state": ("self.norm =", FLAT + "self.norm =", "correct", ""),
}  # fmt: skip


@grading
def test_many_inputs_and_outputs(tmp_path):
    files = []
    for name, (old, new, *_) in OTHERWISE.items():
        files.append(tmp_path / f"{name}.py")
        text = MANY.replace("Model(", "ModelNew(", 1).replace(old, new) if old else MANY
        text = text.replace("class Model(", "class ModelNew(")
        if name == "other names":
            text = text.replace("        self.norm = nn.BatchNorm1d(sizes[1])\n", "")
            text = text.replace("self.norm(self.linear(x))", "self.batch(self.fc(x))")
        if name == "a list":
            text = text.replace("labels + 1]", "labels + 1)").replace("y.sum()", "y.sum()]")
        files[-1].write_text(IMPORTS + text)
    status, verdicts = grade_by(MANY, files, tmp_path)
    assert status == 1
    for name, (*_, word, reason) in OTHERWISE.items():
        found = verdicts[name]
        assert (name, found["verdict"]) == (name, word), found["reason"]
        assert reason in found["reason"]
    assert verdicts["the same"]["accuracy"] == "exact"
    assert "calls the reference's own operators" in verdicts["the same"]["notes"]
    assert not any("state" in note for note in verdicts["other names"]["notes"])
    assert verdicts["more state"]["notes"] == verdicts["other names"]["notes"]
    [note] = (note for note in verdicts["another state"]["notes"] if "state" in note)
    assert note == "its state is not the reference's: none was loaded or changed"


@grading
@pytest.mark.parametrize("device", DEVICES)
def test_clean_files(device, tmp_path):
    own = "clean_scalar" if device == "cpu" else "clean_triton"
    files = [SOLUTIONS / f"{name}.py" for name in ("clean_plain", own, "clean_compiled")]
    files.append(Path(run.__file__).parent / "model_new.py")
    status, verdicts = grade_by(WIDE, files, tmp_path, device)
    assert found_wrong(verdicts) == {}
    assert status == 0
    assert {found["accuracy"] for found in verdicts.values()} == {"exact"}
    assert verdicts["clean_plain"]["notes"] == ["calls the reference's own operators"]


# The table of the five designs on a GPU: the verdict, what the reason must name, and how fast.
DESIGNS = {
    "design_1_float4_grid_stride": ("error", "error", ""),
    "design_2_one_element": ("correct", "", "slower"),
    "design_3_own_backward": ("correct", "", "slower"),
    "design_4_index_scaled_twice": ("error", "CUDA error: an illegal memory access", ""),
    "design_5_linear_then_kernel": ("correct", "", ""),
    "repair_1_float4_grid_stride": ("correct", "", ""),
    "repair_2_one_element": ("correct", "", "slower"),
    "repair_4_index_scaled_once": ("correct", "", ""),
}


def grade_designs(*options: str) -> tuple[int, dict[str, str]]:
    """The exit status of the one command, and its lines by the stem of the file."""
    command = [sys.executable, str(SOLUTIONS), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if ".py: " in line]
    return done.returncode, {Path(line.partition(".py: ")[0]).name: line for line in lines}


@grading
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_starting_designs_need_a_gpu():
    status, lines = grade_designs("--device", "cpu", "--trials", "1")
    assert status == 1
    assert lines.keys() == DESIGNS.keys()
    assert all("error (RuntimeError: needs a GPU, line" in line for line in lines.values())


@grading
@pytest.mark.gpu
def test_the_starting_designs():
    status, lines = grade_designs("--timeout", "600")
    assert status == 1
    assert lines.keys() == DESIGNS.keys()
    for name, (word, reason, speed) in DESIGNS.items():
        line = lines[name].partition(".py: ")[2]
        assert line.startswith(f"{word} ("), line
        assert reason in line
        assert not speed or f": {speed}; " in line, line
