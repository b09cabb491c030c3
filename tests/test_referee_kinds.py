"""Files of many kinds, graded by `run.py`.

The kinds are those that public reports describe, and files that catch exceptions.

Each table of files is graded against one reference. In the texts, `x` is the first input of a
forward and `inputs` are all of them.
"""

import pytest

from referee.tests.texts import Table, correct, module, reference, wrong
from tests.support.grading import ONLY, grade, linear

pytestmark = [ONLY, pytest.mark.usefixtures("one_server")]

# By name, a reference and the files that are graded against it.
KINDS: dict[str, tuple[str, Table]] = {}

# --------------------------------------------------------------------------- forms of the outputs

FC = "self.fc = nn.Linear(256, 192)\nself.x = None\n"
TWO_OUTPUTS = "y = torch.relu(self.fc(x))\nreturn y, y.sum(1)"
CLASSES = """
from collections import namedtuple

Both = namedtuple("Both", "y total")

class Pair(tuple):
    def __iter__(self):
        return iter([torch.relu(self[0]), torch.relu(self[0]).sum(1)])

class Late(list):
    def __len__(self):
        return 2
"""


def two(result: str) -> str:
    """Return the text of a module with two outputs, which the lines `result` return."""
    return CLASSES + module(f"y = self.fc(x).relu()\n{result}", FC)


# Containers and tensors that could compute their values only when somebody reads them.
KINDS["late values"] = (
    reference(TWO_OUTPUTS, "[torch.rand(64, 256)]", FC),
    {
        "attribute": (two("y.detach = lambda: y\nreturn y, y.sum(1)"), "correct|wrong", ""),
        "tuple": correct(two("return Pair((y, y.sum(1)))")),
        "list": correct(two("return Late((y, y.sum(1)))")),
        "negative": correct(two("return torch._neg_view(-y), y.sum(1)")),
        "named": correct(two("return Both(y, y.sum(1))")),
    },
)

# An output of 36 MiB that nobody writes. The C library maps fresh memory for it, which is zeros and
# not what the referee left in free blocks.
KINDS["new memory"] = (
    reference("return torch.relu(x)", "[torch.rand(9, 1 << 20)]"),
    {"unwritten": wrong(module("return torch.empty_like(x)"), "not written|returns zeros")},
)

# The right values with other strides than the reference's.
OF_FC = reference("return torch.relu(self.fc(x))", "[torch.rand(64, 256)]", FC)
KINDS["the order of dimensions"] = (
    OF_FC,
    {"columns": correct(module("return torch.relu(self.fc(x)).mT.contiguous().mT", FC))},
)

# ------------------------------------------------------------------- values kept for a later call

# Computes the rows of x that have changed since the call before, and keeps all others.
CHANGED_ROWS = """
if self.x is None:
    self.x, self.out = x.clone(), torch.relu(self.fc(x))
rows = (x != self.x).any(1).nonzero().flatten()
self.x[rows] = x[rows]
self.out[rows] = torch.relu(self.fc(x[rows]))
return self.out.clone()
"""
# Computes only if one of some elements of x has changed.
SOME_CHANGED = """
some = x[::7, ::5].clone()
if self.x is None or not torch.equal(some, self.x):
    self.x, self.out = some, torch.relu(self.fc(x))
return self.out.clone()
"""
KINDS["kept rows"] = (
    OF_FC,
    {
        "changed": wrong(module(CHANGED_ROWS, FC), "old parameters|beyond the error budget"),
        "some": wrong(module(SOME_CHANGED, FC), "old parameters|beyond the error budget"),
    },
)

# The reference multiplies by the product of two parameters. The files keep this product: until a
# parameter changes, in the place of the parameters, or beside them.
SQUARES = "self.a, self.b = (nn.Parameter(torch.randn(n, 160 - n)) for n in (96, 64))\nself.key = 0"
FOLDED = """
key = self.a._version, self.b._version
if self.key != key:
    self.w, self.key = self.a @ self.b, key
return x @ self.w
"""
IN_ONE = f"{SQUARES}\nself.w = nn.Parameter(self.a @ self.b)"
UNKNOWN = "its state is not the reference's"
KINDS["folded weights"] = (
    reference("return x @ (self.a @ self.b)", "[torch.rand(16, 96)]", SQUARES),
    {
        "later": wrong(module(FOLDED, SQUARES), "old parameters|beyond the error budget"),
        "at once": wrong(module("return x @ self.w", f"{IN_ONE}\ndel self.a, self.b"), UNKNOWN),
        "beside them": wrong(module("return x @ self.w", IN_ONE), "old parameters|beyond"),
    },
)

# The rows that an input of integers picks; they are kept as long as that input seems the same.
TABLE = "self.w, self.key = nn.Parameter(torch.randn(99, 64)), 0"
KEPT_PICKS = """
key = inputs[1].data_ptr(), inputs[1]._version, inputs[1].shape
if self.key != key:
    self.picked, self.key = self.w[inputs[1]], key
return self.picked * x
"""
KINDS["kept integers"] = (
    reference(
        "return self.w[inputs[1]] * x", "[torch.rand(512, 64), torch.randint(99, (512,))]", TABLE
    ),
    {"keeps": wrong(module(KEPT_PICKS, TABLE), "old parameters|elements")},
)

# ----------------------------------------------------- inputs and parameters of a certain structure
#
# The files are right only for such values, so the referee must not draw others.

# Sorted knots: the reference searches by bisection, and the file counts the smaller knots.
KNOTS = "i = torch.searchsorted(x, inputs[1]).clamp(1, 255)\nreturn inputs[1] - x[i - 1], i"
COUNTED = KNOTS.replace("torch.searchsorted(x, inputs[1])", "(inputs[1][:, None] > x).sum(1)")
KINDS["sorted"] = (
    reference(KNOTS, "[torch.sort(torch.rand(256)).values, torch.rand(4096)]"),
    {"counts": correct(module(COUNTED), "differs from the reference for inputs of both signs")},
)

# Each row goes to a place of its own, so the file need not fill the output.
SCATTERED = "out = torch.empty_like(x)\nout[inputs[1]] = x\nreturn out"
KINDS["a permutation"] = (
    reference("return x[inputs[1].argsort()]", "[torch.rand(512, 16), torch.randperm(512)]"),
    {"scatters": correct(module(SCATTERED))},
)

# A positive parameter, of which a root is taken.
POSITIVE = "self.w = nn.Parameter(torch.rand(64) + 0.1)"
KINDS["a root"] = (
    reference("return x * self.w.sqrt()", "[torch.rand(512, 64)]", POSITIVE),
    {"power": correct(module("return x * self.w**0.5", POSITIVE))},
)

# A parameter that the reference stores by columns.
PARAMETER = "self.w = nn.Parameter(torch.randn(48, 64)"
KINDS["a parameter in columns"] = (
    reference("return x @ self.w", "[torch.rand(33, 64)]", f"{PARAMETER}.t())"),
    {"in rows": correct(module("return x @ self.w", f"{PARAMETER}.t().contiguous())"))},
)

# The product of triangular matrices is triangular, so the file leaves out `tril`. Its gradients
# differ.
KINDS["triangular"] = (
    reference("return torch.tril(x @ inputs[1])", "[torch.randn(64, 64).tril()] * 2"),
    {"whole": correct(module("return x @ inputs[1]"), "forward only: another gradient of inp")},
)

# A matrix that is barely positive definite, as `cholesky` needs it.
DEFINITE = """
def barely_definite():
    m = torch.randn(4, 64, 64)
    return m @ m.mT + 1e-2 * torch.eye(64)
"""
DEFINITE += reference("return torch.linalg.cholesky(x)", "[barely_definite()]")
KINDS["definite"] = (
    DEFINITE,
    {"the same": correct(module("return torch.linalg.cholesky(x)"))},
)

# ------------------------------------------------------------------ results that hardly depend on x
#
# A file that returns a constant or its input is right where the reference does so too.

# The mean of one column is the column itself, so the result is zeros.
CONSTANT = "x = self.fc(x).amax(1, keepdim=True)\nreturn torch.tanh(x - x.mean(1, keepdim=True))"
KINDS["a constant"] = (
    reference(CONSTANT, "[torch.rand(64, 256)]", FC),
    {
        "zeros": correct(
            module("return x.new_zeros(len(x), 1)", FC), "the same for all inputs and parameters"
        )
    },
)

# The softmax of one column is ones.
KINDS["ones"] = (
    reference("return x.sum(1, keepdim=True).softmax(1)", "[torch.randn(512, 16)]"),
    {"ones": correct(module("return x.new_ones(len(x), 1)"), "is the same for all inputs")},
)

# Dropout that is switched off returns its input.
KINDS["the input"] = (
    reference("return nn.functional.dropout(x, 0.5, False) * 1", "[torch.randn(64, 512)]"),
    {
        "copy": correct(module("return x.clone()"), "result is its input 0"),
        "no copy": wrong(module("return x"), "returns its input"),
    },
)

# The input, each element of which is one ulp larger.
KINDS["nearly the input"] = (
    reference("return torch.relu(x)", "[torch.rand(64, 4096)]"),
    {"an ulp": wrong(module("return x.nextafter(x + 9)"), "returns a copy of its input 0")},
)

# -------------------------------------------------------------------------------- accuracy of sums

# Adds column after column, as a plain loop does.
ADDED = """
out, total = torch.empty_like(x), x.new_zeros(len(x))
for i, column in enumerate(x.unbind(1)):
    total += column
    out[:, i] = total
return out, total / x.shape[1]
"""
KINDS["sums"] = (
    reference("return torch.cumsum(x, 1), x.mean(1)", "[torch.rand(16, 8192)]"),
    {"in order": correct(module(ADDED), "float32-grade")},
)

ADDED_PRODUCTS = """
out = x.new_zeros(len(x), inputs[1].shape[1])
for column, row in zip(x.unbind(1), inputs[1].unbind(0)):
    out += column[:, None] * row
return out
"""
ROUNDED_TO_TF32 = """
a, b = (((t.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32) for t in inputs)
return a @ b
"""
KINDS["products"] = (
    reference("return x @ inputs[1]", "[torch.rand(32, 8192), torch.rand(8192, 16)]"),
    {
        "in order": correct(module(ADDED_PRODUCTS), "float32-grade"),
        "TF32": wrong(module(ROUNDED_TO_TF32), "lower precision than eager's"),
    },
)


@pytest.mark.parametrize(("text", "table"), KINDS.values(), ids=KINDS)
def test_files_of_a_kind_get_their_verdicts(text, table, device, tmp_path):
    grade(text, table, tmp_path, device=device)


# ------------------------------------------------------------------- files that catch exceptions
#
# They are solutions of ReLU. A solution may catch exceptions for reasons of its own.

CLAMP = "return torch.clamp_min(x, 0)"
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
USE_OF_BUILD = f"if extension:\n    return extension.f(x)\n{CLAMP}"
OPTION = "try:\n    low = {}['low']\nexcept KeyError:\n    low = 0"
HANDLER = f"try:\n    return {{}}['relu'](x)\nexcept KeyError:\n    {CLAMP}"
ATTEMPT = """
out = None
try:
    out = torch.ops.no.such(x)
except AttributeError:
    pass
return torch.clamp_min(x, 0) if out is None else out
"""
CATCHERS: Table = {
    "probe": correct(PROBE + module(CLAMP)),
    "device": correct(PROBE + module(CLAMP.replace("x,", "x.to(DEVICES[0]),"))),
    "tool": correct(TOOL + module(CLAMP)),
    "option": correct(module(f"{OPTION}\n{CLAMP}")),
    "size": correct(module(f"try:\n    n = x.shape[9]\nexcept IndexError:\n    n = 1\n{CLAMP}")),
    "build": correct(BUILD + module(USE_OF_BUILD)),
    "attempt": correct(module(ATTEMPT)),
    "handler": correct(module(HANDLER)),
}

# ------------------------------------------------------- solutions of this project's two problems


def instead(text: str, when: str) -> str:
    """Return the text of ReLU with a line that changes x or `out` if the condition `when` holds."""
    return module(f"out = torch.relu(x)\nif {when}:\n    {text}\nreturn out")


def after(text: str, init: str = "") -> str:
    """Return the text of the linear problem with lines after its result `out`, which may change it.

    `init` has more lines of the constructor.
    """
    result = "own = self.linear\nout = torch.relu(own(x)) / self.divisor\n"
    constructor = f"self.linear = nn.Linear(i, o)\nself.divisor = d\n{init}"
    return linear(f"{result}{text}\nreturn out", constructor)


IN_COLUMNS = """
product = self.linear.weight @ x.flatten(0, -2).mT + self.linear.bias[:, None]
return (product.relu() / self.divisor).mT.unflatten(0, x.shape[:-1])
"""
UNWRITTEN = """
out, body = torch.empty_like(x), x.numel() // 4 * 4
if not x.is_contiguous():
    return torch.relu(x)
out.view(-1)[:body] = torch.relu(x.reshape(-1)[:body])
return out
"""
NO_SUBNORMALS = "out *= x.abs() >= torch.finfo(x.dtype).smallest_normal"
NO_SUBNORMALS = instead(NO_SUBNORMALS, "x.is_floating_point()")
ONE_ELEMENT = instead("x[(-1,) * x.dim()] += 1", "x.numel() > 1000")
BESIDE_A_VIEW = instead("x.as_strided((1,), (1,), 0).zero_()", "x.storage_offset()")
COLUMNS_UNWRITTEN = """
some, out = out, torch.empty_like(out)
body = some.shape[-1] // 4 * 4 or 1
out[..., :body] = some[..., :body]
"""
TWENTY_BITS = """
x, weight = ((t.view(torch.int32) & -(1 << 4)).view(t.dtype) for t in (x.clone(), own.weight))
out = torch.relu(nn.functional.linear(x, weight, own.bias)) / self.divisor
"""
IN_ORDER = "return torch.relu(x.mT.contiguous()).mT if x.dim() > 1 else torch.relu(x)"
# By the problem's name: a table of solutions.
PROBLEMS = {
    "relu": {
        **CATCHERS,
        "columns": correct(module(IN_ORDER)),
        "tail unwritten": wrong(module(UNWRITTEN), "elements differ"),
        "one element": wrong(ONE_ELEMENT, "changes its input"),
        "beside a view": wrong(BESIDE_A_VIEW, "changes its input"),
        "subnormals": wrong(NO_SUBNORMALS, "special values|bit patterns"),
        "half precision": wrong(module("return torch.relu(x.half().to(x.dtype))"), "float32, rand"),
        "through float32": wrong(module("return x.float().relu().to(x.dtype)"), "float64, random"),
    },
    "linear_relu_divide": {
        "columns": correct(linear(IN_COLUMNS)),
        "no ReLU": wrong(after("out = own(x) / self.divisor"), "leaves out ReLU"),
        "no division": wrong(after("out = torch.relu(own(x))"), "leaves out the division"),
        "other weights": wrong(after("", "self.linear.weight.data *= 2"), "does not start with"),
        "weight changed": (after("own.weight.data[-1] += 1"), "wrong", ""),
        "20 bits": wrong(after(TWENTY_BITS), "lower precision"),
        "float16": wrong(after("out = out.half().to(x.dtype)"), "lower precision"),
        "nan becomes 0": wrong(after("out = torch.where(out.isnan(), 0, out)"), "NaN in "),
        "inf becomes large": wrong(after("out = out.nan_to_num(torch.nan)"), "inf "),
        "columns unwritten": wrong(after(COLUMNS_UNWRITTEN), "elements"),
    },
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_files_for_this_projects_problems_get_their_verdicts(name, tmp_path, monkeypatch, small):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    grade(name, PROBLEMS[name], tmp_path)
