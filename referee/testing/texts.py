"""Functions that make files to grade: the texts of references and solutions, and rows of tables.

A table has a row for each file: its text or path, the verdict that it must get, and a pattern of
the line that the referee prints of it. For example,

    {"copies": wrong(module("return x.clone()"), "returns a copy")}

is a table of one file. `graded.grade` writes the files, grades them and checks their verdicts. The
tables themselves are in the tests that use them.
"""

from pathlib import Path
from textwrap import indent

# The text or path of a file, a pattern of the verdict, and a pattern of the line. The line is the
# reason if the file is not correct; otherwise it has the notes and the accuracy class.
Row = tuple[str | Path, str, str]
Table = dict[str, Row]  # by the file's name, without .py
# A reason if a result is computed too late. What the memory of the result held before decides which
# of these it is.
LATE = "has not written|returns zeros|elements|is not complete"
# Defines functions that find the request in a frame of the process's own code, which called the
# solution. A timed call has one of these methods, and the argument "outputs".
IS_TIMED = """
import sys

def frame_of_request():
    frame = sys._getframe(1)
    while frame and "request" not in frame.f_locals:
        frame = frame.f_back
    return frame

def is_timed():
    frame = frame_of_request()
    if frame is None:
        return False
    request = frame.f_locals["request"]
    is_timed_method = request["method"] in ("run_forwards", "run_steps")
    return is_timed_method and "outputs" in request["arguments"]
"""
# A mode of torch. If its attribute `todo` is a pair of tensors x and out, it computes ReLU of x
# into out at the next call of a function of torch.
LATE_MODE = """
from torch.overrides import TorchFunctionMode

class Late(TorchFunctionMode):
    todo = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.todo:
            (x, out), self.todo = self.todo, ()
            torch.clamp_min(x, 0, out=out)
        return func(*args, **(kwargs or {}))
"""
IMPORTS = "import torch\nfrom torch import nn\n\n\n"


def module(forward: str, init: str = "", arguments: str = "", name: str = "ModelNew") -> str:
    """Return the text of a module's class.

    Args:
        forward: the body of `forward`, not indented; `x` is the first input.
        init: the body of `__init__` after super().__init__(), not indented.
        arguments: of `__init__` after `self`: ", a, b" for example.
        name: of the class.
    """
    text = f"class {name}(nn.Module):\n"
    inner = " " * 8
    if init:
        text += f"    def __init__(self{arguments}):\n{inner}super().__init__()\n"
        text += f"{indent(init.strip(), inner)}\n"
    text += f"    def forward(self, *inputs):\n{inner}x = inputs[0]\n"
    return f"{text}{indent(forward.strip(), inner)}\n"


def reference(forward: str, inputs: str, init: str = "") -> str:
    """Return the text of a reference file.

    Args:
        forward: as in `module`.
        inputs: what `get_inputs` returns: "[torch.rand(8, 64)]" for example.
        init: as in `module`.
    """
    text = module(forward, init, name="Model") + f"\ndef get_inputs():\n    return {inputs}\n"
    return f"{text}\ndef get_init_inputs():\n    return []\n"


RELU = reference("return torch.relu(x)", "[torch.rand(32, 16384)]")
LINEAR_INIT = """
self.fc = nn.Linear(256, 192)
self.register_buffer("scale", torch.rand(192) + 0.5)
"""
LINEAR = reference(
    "return torch.relu(self.fc(x)) * self.scale", "[torch.rand(64, 256)]", LINEAR_INIT
)


def in_timed_forwards(cheat: str, right: str, init: str = "") -> str:
    """Return the text of a module that runs the lines `cheat` in timed forwards, else `right`."""
    body = indent(cheat.strip(), "    ")
    forward = f"if is_timed() and not torch.is_grad_enabled():\n{body}\n{right.strip()}"
    return IS_TIMED + module(forward, init)


OWN_LINEAR_RELU = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        y = torch.relu(nn.functional.linear(x, weight, bias))
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight, y = ctx.saved_tensors
        g = g * (y != 0)
        gradients = [g @ weight, g.t() @ x, g.sum(0)]
LINES
        return tuple(gradients)

"""


def own_linear_relu(lines: str = "") -> str:
    """Return the text of an autograd function, `Own`: a linear layer, then ReLU.

    Args:
        lines: the end of its backward, not indented. They may change `gradients`, the list of the
            gradients of x, weight and bias.
    """
    return OWN_LINEAR_RELU.replace("LINES", indent(lines.strip(), " " * 8))


def correct(text: str | Path, line: str = "") -> Row:
    """Return the row of a file that is right; `line` is a pattern of its notes and its accuracy."""
    return text, "correct", line


def wrong(text: str | Path, reason: str) -> Row:
    """Return the row of a file that is wrong, with a pattern of the reason."""
    return text, "wrong", reason


def error(text: str | Path, reason: str) -> Row:
    """Return the row of a file that raises or ends, with a pattern of the reason."""
    return text, "error", reason
