"""Kinds of files that public reports tell of, two or more of each: what `run.py` says of them.

KERNELS_GRADING=1 runs these, for some minutes.
"""

import os
import re
from pathlib import Path

import pytest
from test_reference_files import grade_by
from test_solutions import DEVICES, grade, small_problems

pytestmark = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes minutes: KERNELS_GRADING=1 runs it"
)

IMPORTS = "import torch\nfrom torch import nn\n\n\n"


def module(forward: str, init: str = "", name: str = "ModelNew", arguments: str = "") -> str:
    """The text of a module's class; both bodies are lines without indentation."""
    text = [f"class {name}(nn.Module):"]
    if init:
        text += [f"    def __init__(self{arguments}):", "        super().__init__()"]
        text += [f"        {line}" for line in init.strip().splitlines()]
    text += ["    def forward(self, *inputs):", "        x = inputs[0]"]
    text += [f"        {line}" for line in forward.strip().splitlines()]
    return "\n".join(text) + "\n"


def problem(forward: str, inputs: str, init: str = "") -> str:
    """The text of a reference file."""
    made = module(forward, init, "Model")
    return (
        f"{made}\ndef get_inputs():\n    return {inputs}\n\ndef get_init_inputs():\n    return []\n"
    )


IN_COLUMNS = """
product = self.linear.weight @ x.flatten(0, -2).mT + self.linear.bias[:, None]
return (product.relu() / self.divisor).mT.unflatten(0, x.shape[:-1])
"""
LINEAR = "self.linear = nn.Linear(i, o)\nself.divisor = d"
FC = "self.fc = nn.Linear(256, 192)"
RELU_FC = problem("return torch.relu(self.fc(x))", "[torch.rand(64, 256)]", FC)
TWO = problem("y = torch.relu(self.fc(x))\nreturn y, y.sum(1)", "[torch.rand(64, 256)]", FC)
SQUARES = "self.a = nn.Parameter(torch.randn(96, 64))\nself.b = nn.Parameter(torch.randn(64, 96))"
RELU = problem("return torch.relu(x)", "[torch.rand(64, 4096)]")
SUMS = problem("return torch.cumsum(x, 1), x.mean(1)", "[torch.rand(16, 8192)]")
PRODUCT = problem("return x @ inputs[1]", "[torch.rand(32, 8192), torch.rand(8192, 16)]")
PICKED = problem(
    "return self.w[inputs[1]] * x", "[torch.rand(512, 64), torch.randint(99, (512,))]",
    "self.w = nn.Parameter(torch.randn(99, 64))",
)  # fmt: skip
KNOTS = problem(
    "i = torch.searchsorted(x, inputs[1]).clamp(1, 255)\nreturn inputs[1] - x[i - 1], i",
    "[torch.sort(torch.rand(256)).values, torch.rand(4096)]",
)
PERMUTED = problem(
    "return x[torch.argsort(inputs[1])]", "[torch.rand(512, 16), torch.randperm(512)]"
)
DEFINITE = """
def barely_definite():
    m = torch.randn(4, 64, 64)
    return m @ m.mT + 1e-2 * torch.eye(64)
""" + problem("return torch.linalg.cholesky(x)", "[barely_definite()]")
CONSTANT = problem(
    "x = self.fc(x).amax(1, keepdim=True)\nreturn torch.tanh(x - x.mean(1, keepdim=True))",
    "[torch.rand(64, 256)]", FC,
)  # fmt: skip
ONES = problem("return x.sum(1, keepdim=True).softmax(1)", "[torch.randn(512, 16)]")
SAME = problem("return nn.functional.dropout(x, 0.5, False) * 1", "[torch.randn(64, 512)]")
CLASSES = """
class Pair(tuple):
    def __iter__(self):
        return iter([torch.relu(self[0]), torch.relu(self[0]).sum(1)])

class Late(list):
    def __len__(self):
        return 2
"""
ADDED = """
out, total = torch.empty_like(x), x.new_zeros(len(x))
for i, column in enumerate(x.unbind(1)):
    total += column
    out[:, i] = total
return out, total / x.shape[1]
"""
ADDED_PRODUCTS = """
out = x.new_zeros(len(x), inputs[1].shape[1])
for column, row in zip(x.unbind(1), inputs[1].unbind(0)):
    out += column[:, None] * row
return out
"""
ROUNDED = """
a, b = (((t.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32) for t in inputs)
return a @ b
"""
CHANGED_ROWS = """
if self.x is None:
    self.x, self.out = x.clone(), torch.relu(self.fc(x))
rows = (x != self.x).any(1).nonzero().flatten()
self.x[rows] = x[rows]
self.out[rows] = torch.relu(self.fc(x[rows]))
return self.out.clone()
"""
FOLDED = """
key = self.a._version, self.b._version
if self.key != key:
    self.w, self.key = self.a @ self.b, key
return x @ self.w
"""
KEPT_PICKS = """
key = inputs[1].data_ptr(), inputs[1]._version, inputs[1].shape
if self.key != key:
    self.picked, self.key = self.w[inputs[1]], key
return self.picked * x
"""
SOME_CHANGED = """
some = x[::7, ::5].clone()
if self.some is None or not torch.equal(some, self.some):
    self.some, self.out = some, torch.relu(self.fc(x))
return self.out.clone()
"""
# A reference, and of each file against it: its text, the verdict, and what the line must say.
KINDS = {
    "late values": (
        TWO,
        {
            "attribute": (
                module("y = self.fc(x).relu()\ny.detach = lambda: y\nreturn y, y.sum(1)", FC),
                "cheating", "an attribute of its own, detach",
            ),
            "tuple": (
                CLASSES + module("y = self.fc(x)\nreturn Pair((y, y.sum(1)))", FC),
                "cheating", "a subclass of tuple, Pair",
            ),
            "list": (
                CLASSES + module("y = self.fc(x).relu()\nreturn Late((y, y.sum(1)))", FC),
                "cheating", "a subclass of list, Late",
            ),
            "negative": (
                module("y = -self.fc(x).relu()\nreturn torch._neg_view(y), -y.sum(1)", FC),
                "cheating", "values are not in memory yet",
            ),
            "named": (
                "from collections import namedtuple\nBoth = namedtuple('Both', 'y total')\n"
                + module("y = self.fc(x).relu()\nreturn Both(y, y.sum(1))", FC),
                "correct", "",
            ),
        },
    ),
    "the order of dimensions": (  # is free
        problem("return torch.relu(self.linear(x)) / 2", "[torch.rand(33, 96)]",
                "self.linear = nn.Linear(96, 80)"),
        {"columns": (module(IN_COLUMNS, f"i, o, d = 96, 80, 2.0\n{LINEAR}"), "correct", "")},
    ),
    "kept rows": (
        RELU_FC,
        {
            "changed": (module(CHANGED_ROWS, f"{FC}\nself.x = None"), "cheating", "old param"),
            "some": (module(SOME_CHANGED, f"{FC}\nself.some = None"), "cheating", "old param"),
        },
    ),
    "folded weights": (
        problem("return x @ (self.a @ self.b)", "[torch.rand(16, 96)]", SQUARES),
        {
            "later": (module(FOLDED, f"{SQUARES}\nself.key = None"), "cheating", "old parameters"),
            "at once": (  # what can't be seen is said
                module("return x @ self.w", f"{SQUARES}\nself.w = nn.Parameter(self.a @ self.b)\n"
                       "del self.a, self.b"),
                "correct", "its state is not the reference's: none was loaded or changed",
            ),
            "beside them": (
                module("return x @ self.w", f"{SQUARES}\nself.w = nn.Parameter(self.a @ self.b)"),
                "cheating", "old parameters",
            ),
        },
    ),
    "kept integers": (
        PICKED,
        {
            "keeps": (
                module(KEPT_PICKS, "self.w = nn.Parameter(torch.randn(99, 64))\nself.key = None"),
                "cheating", "old parameters|replays|a timed call was wrong",
            ),
        },
    ),
    "sorted": (
        KNOTS,
        {
            "counts": (
                module("i = (inputs[1][:, None] > x).sum(1).clamp(1, 255)\n"
                       "return inputs[1] - x[i - 1], i"),
                "correct", "differs from the reference for inputs of both signs",
            ),
        },
    ),
    "a permutation": (
        PERMUTED,
        {
            "scatters": (
                module("out = torch.empty_like(x)\nout[inputs[1]] = x\nreturn out"), "correct", "",
            ),
        },
    ),
    "definite": (
        DEFINITE, {"the same": (module("return torch.linalg.cholesky(x)"), "correct", "")},
    ),
    "a constant": (
        CONSTANT,
        {
            "zeros": (
                module("return x.new_zeros(len(x), 1)", FC),
                "correct", "result is the same for all inputs and parameters",
            ),
        },
    ),
    "ones": (
        ONES,
        {"ones": (module("return x.new_ones(len(x), 1)"), "correct", "is the same for all inputs")},
    ),
    "the input": (
        SAME, {"copy": (module("return x.clone()"), "correct", "result is its input 0")},
    ),
    "nearly the input": (
        RELU,
        {
            "an ulp": (
                module("return x.nextafter(x + 9)"),
                "cheating", "returns a copy of its input 0",
            ),
        },
    ),
    "sums": (SUMS, {"in order": (module(ADDED), "correct", "float32-grade")}),
    "products": (
        PRODUCT,
        {
            "in order": (module(ADDED_PRODUCTS), "correct", "float32-grade"),
            "TF32": (module(ROUNDED), "wrong", "lower precision than eager's"),
        },
    ),
}  # fmt: skip
PROBE = """
try:
    torch.zeros(1, device="xpu")
    DEVICES = ["cpu", "xpu"]
except (RuntimeError, AssertionError, NotImplementedError):
    DEVICES = ["cpu"]
"""
TOOL = """
import subprocess
try:
    subprocess.run("exit 3", shell=True, check=True)
except subprocess.CalledProcessError:
    pass
"""
BUILD = """
from torch.utils.cpp_extension import load_inline
try:
    extension = load_inline("broken", "no C++", functions=["f"], no_implicit_headers=True)
except RuntimeError:
    extension = None
"""
PLAIN = "return torch.clamp_min(x, 0)"
# Files that stand in for ReLU.
GUARDS = {
    "probe": (PROBE + module(PLAIN), "correct", "calls aten::clamp_min"),
    "device": (PROBE + module(PLAIN.replace("x,", "x.to(DEVICES[0]),")), "correct", ""),
    "tool": (TOOL + module(PLAIN), "correct", ""),
    "option": (
        module(f"try:\n    low = {{}}['low']\nexcept KeyError:\n    low = 0\n{PLAIN}"),
        "correct", "calls aten::clamp_min",
    ),
    "size": (
        module(f"try:\n    n = x.shape[9]\nexcept IndexError:\n    n = 1\n{PLAIN}"), "correct", "",
    ),
    "build": (
        BUILD + module(f"if extension:\n    return extension.f(x)\n{PLAIN}"),
        "cheating", "falls back on aten::clamp_min after RuntimeError at import",
    ),
    "attempt": (
        module("out = None\ntry:\n    out = torch.ops.no.such(x)\nexcept AttributeError:\n"
               "    pass\nif out is None:\n    out = torch.clamp_min(x, 0)\nreturn out"),
        "cheating", "falls back on aten::clamp_min after AttributeError",
    ),
    "handler": (
        module(f"try:\n    return {{}}['relu'](x)\nexcept KeyError:\n    {PLAIN}"),
        "cheating", "falls back on aten::clamp_min after KeyError",
    ),
}  # fmt: skip
LATE_ROWS = """
import sys

class Rows:
    def __init__(self, x):
        self.x = x

    def __getitem__(self, rows):
        return torch.relu(self.x[rows])
"""
LATE_WHEN_TIMED = """
frame = sys._getframe()
while frame is not None and frame.f_code.co_name != "time":
    frame = frame.f_back
if frame is None:
    return torch.relu(x)
out = torch.zeros(x.shape)
out.detach = lambda: Rows(x)
return out
"""


def check(found: dict, word: str, words: str) -> None:
    line = "; ".join([*found["notes"], found["accuracy"], found["reason"]])
    assert found["verdict"] == word, line
    assert re.search(words, line), line


def write(texts: dict[str, tuple[str, str, str]], folder: Path) -> list[Path]:
    files = [folder / f"{name}.py" for name in texts]
    for file, (text, *_) in zip(files, texts.values(), strict=True):
        file.write_text(IMPORTS + text)
    return files


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, device, tmp_path):
    reference, texts = KINDS[kind]
    _, verdicts = grade_by(reference, write(texts, tmp_path), tmp_path, device)
    for name, (_, word, words) in texts.items():
        check(verdicts[name], word, words)


PROBLEMS = {
    "relu": {
        **GUARDS,
        "late rows": (
            LATE_ROWS + module(LATE_WHEN_TIMED), "cheating", "an attribute of its own, detach",
        ),
        "columns": (
            module("return torch.relu(x.mT.contiguous()).mT if x.dim() > 1 else torch.relu(x)"),
            "correct", "",
        ),
    },
    "linear_relu_divide": {
        "columns": (module(IN_COLUMNS, LINEAR, arguments=", i, o, d"), "correct", ""),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_files_for_problems(name, tmp_path, monkeypatch):
    small_problems(monkeypatch, "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    texts = PROBLEMS[name]
    _, verdicts = grade(name, write(texts, tmp_path), tmp_path, "--trials", "3")
    for file, (_, word, words) in texts.items():
        check(verdicts[file], word, words)
