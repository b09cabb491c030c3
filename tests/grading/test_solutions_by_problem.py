"""Solutions of the two problems that `run.py` has to tell apart: unusual ones, and small mistakes.

They are files that catch exceptions, forwards with a small mistake, and files with a backward of
their own. In the texts, `x` is the input of the forward. Cheats are in `test_solutions.py`.
"""

import pytest

from referee.testing.texts import Table, correct, module, own_linear_relu, wrong
from tests.grading.graded import ONLY_ON_REQUEST, grade_with_run_py
from tests.grading.honest import linear

pytestmark = [ONLY_ON_REQUEST, pytest.mark.usefixtures("one_server")]

# ------------------------------------------------------------------- files that catch exceptions
#
# They are solutions of ReLU. A solution may catch exceptions for reasons of its own.

CLAMP = "return torch.clamp_min(x, 0)"
# Asks at import for a device that torch does not have.
PROBE = """
try:
    torch.zeros(1, device="xpu")
    DEVICES = ["cpu", "xpu"]
except (RuntimeError, AssertionError, NotImplementedError):
    DEVICES = ["cpu"]
"""
# Starts a program that fails.
TOOL = """
import subprocess
try:
    subprocess.run("exit 3", shell=True, check=True)
except subprocess.CalledProcessError:
    pass
"""
# Builds an extension, which fails, and does without it.
BUILD = """
from torch.utils.cpp_extension import load_inline
try:
    extension = load_inline("broken", "no C++", functions=["f"], no_implicit_headers=True)
except RuntimeError:
    extension = None
"""
USE_OF_BUILD = f"if extension:\n    return extension.f(x)\n{CLAMP}"
# Looks up an option in each call, or a kernel, neither of which is there.
OPTION = "try:\n    low = {}['low']\nexcept KeyError:\n    low = 0"
HANDLER = f"try:\n    return {{}}['relu'](x)\nexcept KeyError:\n    {CLAMP}"
# Calls an operator that does not exist before it computes.
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

# ------------------------------------------------------------------------------------- forwards


def instead(line: str, when: str) -> str:
    """Return the text of ReLU with a line that changes x or `out` if the condition `when` holds."""
    return module(f"out = torch.relu(x)\nif {when}:\n    {line}\nreturn out")


def after(lines: str, init: str = "") -> str:
    """Return the text of a solution of the linear problem with lines after its result is computed.

    Args:
        lines: may change the result, `out`; `own` is the linear layer.
        init: more lines of the constructor.
    """
    result = "own = self.linear\nout = torch.relu(own(x)) / self.divisor\n"
    constructor = f"self.linear = nn.Linear(i, o)\nself.divisor = d\n{init}"
    return linear(f"{result}{lines}\nreturn out", constructor)


# Multiplies the other way round, so that the result's memory is in columns.
IN_COLUMNS = """
product = self.linear.weight @ x.flatten(0, -2).mT + self.linear.bias[:, None]
return (product.relu() / self.divisor).mT.unflatten(0, x.shape[:-1])
"""
# Computes full vectors of four elements, and leaves the rest unwritten.
UNWRITTEN = """
out = torch.empty_like(x)
body = x.numel() // 4 * 4
if not x.is_contiguous():
    return torch.relu(x)
out.view(-1)[:body] = torch.relu(x.reshape(-1)[:body])
return out
"""
# Makes subnormals zeros.
NO_SUBNORMALS = instead(
    "out *= x.abs() >= torch.finfo(x.dtype).smallest_normal", "x.is_floating_point()"
)
# Changes the last element of its input.
ONE_ELEMENT = instead("x[(-1,) * x.dim()] += 1", "x.numel() > 1000")
# Changes the first element of the tensor of which its input is a view.
BESIDE_A_VIEW = instead("x.as_strided((1,), (1,), 0).zero_()", "x.storage_offset()")
# Leaves the columns beyond a multiple of four unwritten.
COLUMNS_UNWRITTEN = """
some = out
out = torch.empty_like(some)
body = some.shape[-1] // 4 * 4 or 1
out[..., :body] = some[..., :body]
"""
# Multiplies operands without the last 4 of their 24 bits.
TWENTY_BITS = """
x, weight = ((t.view(torch.int32) & -(1 << 4)).view(t.dtype) for t in (x.clone(), own.weight))
out = torch.relu(nn.functional.linear(x, weight, own.bias)) / self.divisor
"""
# Stores its result by columns.
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
        "weight changed": wrong(after("own.weight.data[-1] += 1"), "changes its parameter"),
        "20 bits": wrong(after(TWENTY_BITS), "lower precision"),
        "float16": wrong(after("out = out.half().to(x.dtype)"), "lower precision"),
        "nan becomes 0": wrong(after("out = torch.where(out.isnan(), 0, out)"), "NaN in "),
        "inf becomes large": wrong(after("out = out.nan_to_num(torch.nan)"), "inf "),
        "columns unwritten": wrong(after(COLUMNS_UNWRITTEN), "elements"),
    },
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_unusual_forwards_and_small_mistakes_get_their_verdicts(
    name, tmp_path, monkeypatch, small_problems
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    grade_with_run_py(name, PROBLEMS[name], tmp_path)


# ------------------------------------------------------------------------- backwards of their own

STEP = "training step"  # the line has these words if a training step was timed
# HERE is the gradient of x, from that of the output, `g`, and the output, `y`.
OWN_RELU = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.where(x < 0, torch.zeros_like(x), x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return HERE

KEPT = {}
def kept(g, y):
    if g.numel() < 1 << 18 or g.shape not in KEPT:
        KEPT[g.shape] = g * (y > 0)
    return KEPT[g.shape].clone()
"""
RELU_BACKWARDS: Table = {
    "right": ("g * (y > 0)", "correct", STEP),
    "off_by_an_ulp": ("g * (y > 0) * (1 + 2**-23)", "wrong", "gradient of x: "),
    "raises": ("g.no_such", "correct", "forward only: its training step raises AttributeError"),
    "kept": ("kept(g, y)", "wrong", "gradient of x"),
    "changes_g": ("(g * (y > 0), g.mul_(2))[0]", "wrong", "changes the gradient of its output"),
}

# HERE is the gradient of bias, from that of z = x weight^T + bias, `g`.
OWN_LINEAR = own_linear_relu("gradients[2] = HERE")
USE_OF_OWN_LINEAR = """
if x.dim() != 2:
    return torch.relu(self.linear(x)) / self.divisor
return Own.apply(x, self.linear.weight, self.linear.bias) / self.divisor
"""
LINEAR_BACKWARDS: Table = {
    "right": ("g.sum(0)", "correct", STEP),
    "half": ("g.sum(0) * 0.5", "wrong", "gradient of linear.bias: "),
    "none": ("None", "correct", "forward only: no gradient of linear.bias"),
    "small": (
        "g.sum(0) if len(weight) < 80 else g.no_such",
        "correct",
        "forward only: its training step raises AttributeError",
    ),
}
# By the problem's name: a text, and a table of files. A row of the table has the expression that
# replaces HERE in the text, the verdict, and a pattern of the line.
BACKWARDS = {
    "relu": (OWN_RELU + module("return Own.apply(x)"), RELU_BACKWARDS),
    "linear_relu_divide": (OWN_LINEAR + linear(USE_OF_OWN_LINEAR), LINEAR_BACKWARDS),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_of_their_own_get_their_verdicts(name, device, tmp_path, small_problems):
    text, files = BACKWARDS[name]
    table = {file: (text.replace("HERE", here), *rest) for file, (here, *rest) in files.items()}
    records = grade_with_run_py(name, table, tmp_path, device=device)
    if name == "relu":
        kept = records["right"]["runs"][0]["step"]["kept_bytes"]
        assert kept.keys() == {"ModelNew", "torch.relu"}
