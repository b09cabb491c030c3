"""`run.py --reference`: the error budget, files that are no problems, and grading by them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cheats import LINEAR, RELU
from grading import ONLY, PLAIN, grade
from honest import HONEST, SOLUTIONS
from texts import IMPORTS, correct, module, reference

import run
from referee.comparison import accuracy
from referee.comparison.reference_tensor import ReferenceTensor
from referee.contestants.results import flatten
from referee.reference import problem
from referee.reference.file import BadReferenceError, load

pytestmark = pytest.mark.usefixtures("one_server")

WIDE = reference("return torch.relu(x)", "[torch.rand(3, 131072)]")
LARGE_LINEAR = (SOLUTIONS / "linear_reference.py").read_text()
OF_LINEAR = LARGE_LINEAR.replace("1024, 4096", "33, 96").replace("4096, 4096", "96, 80")
# A reference with many inputs and outputs.
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


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to TF32, which drops the last 13 bits of a float32."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@pytest.fixture
def product():
    """Return x, weight, and the reference tensor of their product."""
    x = torch.randn(40, 2048)
    weight = torch.randn(30, 2048)
    return x, weight, ReferenceTensor(x @ weight.T, x.double() @ weight.double().T)


def test_the_budget_forbids_lower_precision(product):
    x, weight, output = product
    assert output.compare(output.eager).has_eagers_bits
    found = output.compare((tf32(x) @ tf32(weight).T).view(-1))
    assert "beyond the error budget" in found.mistake
    assert accuracy.accuracy_class(found.errors.relative) == "TF32-grade"
    half = (x.bfloat16() @ weight.bfloat16().T).float().view(-1)
    assert accuracy.accuracy_class(output.compare(half).errors.relative) == "bf16-grade"
    off = output.eager + 0.9 * output.budget.slack  # each within the budget, but not their mean
    assert output.compare(off).mistake.startswith("mean error")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_a_narrow_budget(dtype):
    x = torch.randn(40, 512, dtype=dtype)
    weight = torch.randn(30, 512, dtype=dtype)
    exact = x.double() @ weight.double().T
    output = ReferenceTensor(x @ weight.T, exact)
    eps = torch.finfo(dtype).eps
    for other, is_right in ((exact, True), (exact * (1 + 8 * eps), False), (exact + 1, False)):
        assert (output.compare(other.to(dtype).view(-1)).mistake is None) == is_right


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_one_wrong_element_is_found(product, value):
    *_, output = product
    wrong = output.eager.clone()
    wrong[77] = value
    assert output.compare(wrong).mistake.startswith("1 of 1,200 elements")
    assert output.other_draws.find_mistake(wrong[70:80], output.eager[70:80]).startswith(
        "1 of 10 elements"
    )
    assert output.other_draws.find_mistake(wrong[:70], output.eager[:70]) is None


def test_nan_infinities_and_integers_must_be_equal():
    eager = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    output = ReferenceTensor(eager, eager.double())
    assert output.compare(eager).mistake is None
    for i in range(3):
        assert output.compare(eager.where(torch.arange(4) != i, 0.5)).mistake
    integers = ReferenceTensor(torch.arange(9), None)
    assert integers.compare(torch.arange(9)).has_eagers_bits
    assert integers.compare(torch.arange(1, 10)).mistake.startswith("9 of 9")


def test_nested_outputs_are_flattened():
    assert flatten((1, [2, (3,)])) == ("[*, [*, [*]]]", [1, 2, 3])
    assert flatten(4) == ("*", [4])
    with pytest.raises(ValueError, match="more than"):
        flatten([0] * 1001)


# Files that are no references. By name: the text, and what the line must contain.
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
    "random": (WIDE.replace("torch.relu(x)", "nn.functional.dropout(x)"), "draws random numbers"),
    "no copy": (
        OF_LINEAR.replace("super().__init__()", "super().__init__(); self.f = open(__file__)"),
        "a copy of Model raises TypeError: cannot pickle",
    ),
    "other shapes": (
        WIDE.replace("(3,", "(torch.randint(1, 99999, ()),").replace("131072", "3"),
        "of another form each time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_references_end_the_program_with_a_reason(name, tmp_path, capsys):
    text, reason = BAD[name]
    file = tmp_path / "bad.py"
    file.write_text(IMPORTS + text)
    with pytest.raises(SystemExit) as stopped:
        run.main(["--device", "cpu", "--reference", str(file), "--solution", str(file)])
    output = capsys.readouterr()
    assert (stopped.value.code, output.out) == (2, "")
    [line] = [line for line in output.err.splitlines() if line.startswith("run.py: ")]
    assert line.startswith(f"run.py: {file}: ")
    assert reason in line


def test_a_reference_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "wide.py"
    file.write_text(IMPORTS + WIDE)
    monkeypatch.setattr(problem, "LARGEST_SHARE", 0)
    with pytest.raises(BadReferenceError, match=r"needs about .* of memory on cpu"):
        problem.Problem("wide", load(file), torch.device("cpu"))


# Cheats that are graded against a reference file too.
OF_RELU = [
    "copies_input",
    "returns_input",
    "changes_input",
    "counts_calls",
    "replays_by_address",
    "replays_by_fingerprint",
    "stale_memory",
    "background_thread",
    "batch_once",
]
OF_THE_LINEAR = ["folds_weights", "half_precision", "drops_bias", "returns_zeros"]


@ONLY
@pytest.mark.parametrize(("text", "named"), [(WIDE, OF_RELU), (OF_LINEAR, OF_THE_LINEAR)])
def test_cheats_are_wrong(text, named, device, tmp_path):
    table = {name: ((RELU | LINEAR)[name][0], "wrong", "") for name in named}
    grade(text, table, tmp_path, device=device)


# Replaces the parameters of `linear` by a flat weight and a bias of the module's own.
FLAT = """old = self.linear
        del self.linear
        self.flat, self.bias = nn.Parameter(old.weight.flatten()), old.bias
        self.linear = lambda x: nn.functional.linear(x, self.flat.view(32, 48), self.bias)
        self.norm ="""
NORM = "self.norm = nn.BatchNorm1d(sizes[1])"
# MANY with other names, and with the norm before the linear layer.
WITHOUT_NORM = MANY.replace(NORM, "").replace("self.norm", "self.batch")
BATCH = NORM.replace("norm", "batch")
OTHER = WITHOUT_NORM.replace("self.linear", "self.fc")
OTHER = OTHER.replace("self.fc = ", f"{BATCH}\n        self.fc = ")
# MANY with a list and a tuple in each other's place.
A_LIST = MANY.replace("return y, [", "return [y, (").replace("labels + 1]", "labels + 1)")
UNKNOWN = "its state is not the reference's"
# Changes of MANY. By name: the old text, the new one, the verdict, and a pattern of the line.
OTHERWISE = {
    "the same": ("", "", "correct", "exact"),
    "one output": ("return y, [", "return y\n        [", "wrong", r"returns \*, expected \[\*, "),
    "an integer": ("labels + 1", "labels + 2", "wrong", "64 of 64 elements"),
    "another dtype": ("y.half()", "y.bfloat16()", "wrong", "dtype is bfloat16, expected float16"),
    "another shape": ("matrix @ matrix.T", "(matrix @ matrix.T)[:9]", "wrong", r"shape is \[9, "),
    "symmetric": ("matrix @ matrix.T", "matrix.T @ matrix", "correct", ""),
    "none": ("y.sum()", "None", "wrong", "returns a NoneType, not a plain tensor"),
    "its input": ("labels + 1", "labels.add_(1)", "wrong", "changes its input|returns its input"),
    "raises": ("y.sum()", "y.no_such_thing()", "error", "AttributeError: "),
    "more state": ("self.norm =", "self.extra = nn.Linear(3, 3)\n        self.norm =", "correct",
                   f"^(?!.*{UNKNOWN})"),
    "another state": ("self.norm =", FLAT, "wrong", UNKNOWN),
}  # fmt: skip


@ONLY
def test_many_inputs_and_outputs_are_judged_one_by_one(tmp_path):
    table = {name: (MANY.replace(old, new), *end) for name, (old, new, *end) in OTHERWISE.items()}
    table["a list"] = (A_LIST.replace("y.sum()", "y.sum()]"), "correct", "")
    table["other names"] = (OTHER, "correct", f"^(?!.*{UNKNOWN})")
    table = {
        name: (text.replace("Model(", "ModelNew("), *end) for name, (text, *end) in table.items()
    }
    grade(MANY, table, tmp_path)


@ONLY
def test_inputs_that_cannot_be_drawn_again_are_an_error(tmp_path):
    inputs = "[torch.rand(3, 5)] if CALLS.append(1) or len(CALLS) < 6 else 1 / 0"
    problem = "CALLS = []\n" + reference("return torch.relu(x)", inputs)
    table = {"plain": (PLAIN, "error", "get_inputs raises ZeroDivisionError")}
    grade(problem, table, tmp_path)


@ONLY
@pytest.mark.parametrize("forward, inputs, init", [
    ("return x[x > 0]", "[torch.randn(64, 256)]", ""),
    ("return self.e(x)", "[torch.randint(9, (64,))]", "self.e = nn.Embedding(9, 2, sparse=True)"),
    ("return x.float() * 2", "[torch.randn(64, 64).to(torch.float8_e4m3fn)]", ""),
])  # fmt: skip
def test_references_whose_gradients_cannot_be_judged(forward, inputs, init, tmp_path):
    grade(reference(forward, inputs, init), {"same": correct(module(forward, init))}, tmp_path)


@ONLY
def test_clean_files_are_correct(device, tmp_path):
    own = SOLUTIONS / ("clean_scalar.py" if device == "cpu" else "clean_triton.py")
    table = {"plain": (PLAIN, "correct", "exact"), "own": (own, "correct", "exact")}
    for name in ("clean_compiled", "ours"):
        table[name] = HONEST[name], "correct", "exact"
    grade(WIDE, table, tmp_path, device=device)


# The five designs and their repairs on a GPU: the verdict, a part of the reason, and the speed.
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


@ONLY
def test_the_starting_designs_get_their_verdicts(device):
    """Without a GPU all of them are errors."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SOLUTIONS), "--device", device, "--timeout", "600"]
    done = subprocess.run([*command, "--trials", "30"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    lines = [line.partition(".py: ") for line in done.stdout.splitlines() if ".py: " in line]
    found = {Path(path).name: line for path, _, line in lines}
    assert (done.returncode, found.keys()) == (1, DESIGNS.keys())
    for name, (word, reason, speed) in DESIGNS.items():
        if device == "cpu":
            assert found[name].startswith("error (RuntimeError: needs a GPU, line")
            continue
        assert found[name].startswith(f"{word} (")
        assert reason in found[name]
        assert not speed or f": {speed}; " in found[name]
