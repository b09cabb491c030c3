"""Solutions whose gradients differ from the reference's or are missing, and some that only seem so.

In the texts, `x` is the first input of a forward and `inputs` are all of them.
"""

import pytest
import torch

from referee.reference import reference_step
from referee.reference.float64 import NO_ROOM_FOR_FLOAT64
from referee.testing.graded import grade
from referee.testing.texts import Table, correct, module, own_linear_relu, reference

pytestmark = pytest.mark.slow
FC = "self.fc = nn.Linear(256, 192)\n"
STEP = "training step"
# By name: the text of a reference, that of the files, and a table of files. A row of the table is
# the expression that replaces HERE in the text, the verdict, and a pattern of the line.
BACKWARDS: dict[str, tuple[str, str, Table]] = {}

# Three inputs, of which the last has no gradient. HERE is the first output.
THREE_INPUTS = "[torch.rand(64, 256), torch.rand(64, 1), torch.randint(9, (64,))]"
USE_OF_OWN = """
y, scale = Own.apply(x, self.fc.weight, self.fc.bias), inputs[1]
return HERE, inputs[2] + 1
"""
BACKWARDS["an own function"] = (
    reference("return torch.relu(self.fc(x)) * inputs[1], inputs[2] + 1", THREE_INPUTS, FC),
    own_linear_relu() + module(USE_OF_OWN, FC),
    {
        "right": ("y * scale", "correct", STEP),
        "detached": ("y.detach() * scale", "correct", "forward only: no gradient of input 0, "),
        "none": ("y.detach() * scale.detach()", "correct", "forward only(?!: )"),
        "twice": ("(2 * y - y.detach()) * scale", "wrong", "gradient of input 0: "),
    },
)

# A frozen parameter, gradients that are rounding errors alone, and an output without elements.
NOISE = "return torch.relu(self.norm(self.conv(x))), x[:0]"
NORM = """
self.conv, self.norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
self.norm.bias.requires_grad_(False)
"""
BACKWARDS["a frozen parameter"] = (
    reference(NOISE, "[torch.randn(4, 8, 32, 32)]", NORM),
    module(NOISE, NORM),
    {"same": ("", "correct", STEP)},
)

# Autograd records the first output in the reference alone, and a use of input 1 in the file alone.
# The third output is a parameter of the module.
SIDES = "return x[:0] * 2, x * (inputs[1] > 0) * self.w, self.w"
ONE_SIDE = "return x.new_empty(0, 32), x * (inputs[1] > 0) * self.w + 0 * inputs[1], self.w"
WEIGHT = "self.w = nn.Parameter(torch.randn(32))"
BACKWARDS["other graphs"] = (
    reference(SIDES, "[torch.randn(64, 32), torch.randn(32)]", WEIGHT),
    module(ONE_SIDE, WEIGHT),
    {"more": ("", "correct", STEP)},
)

# The gradient of x is right, but the one of the output, which the referee wrote, becomes zeros.
CHANGE = """
def change(g):
    right = g.clone()
    g.zero_()
    return right
"""
HOOKED = "y = x * x.sigmoid()\nif y.requires_grad:\n    y.register_hook(change)\nreturn y"
BACKWARDS["a changed gradient"] = (
    reference("return x * x.sigmoid()", "[torch.randn(64, 1024)]"),
    CHANGE + module(HOOKED),
    {"zeros": ("", "wrong", "changes the gradient of its output")},
)

# The gradient of the last row is an eighth too large; the output is right.
ROW = "y = x * x.sigmoid()\nreturn y + (y - y.detach()) * (x.new_ones(64, 1).cumsum(0) > 63) / 8"
BACKWARDS["one row"] = (
    reference("return x * x.sigmoid()", "[torch.randn(64, 1024)]"),
    module(ROW),
    {"an eighth more": ("", "wrong", "gradient of x: ")},
)


@pytest.mark.parametrize(("problem", "text", "files"), BACKWARDS.values(), ids=BACKWARDS)
def test_backwards_of_their_own_get_their_verdicts(problem, text, files, device, tmp_path):
    table = {name: (text.replace("HERE", here), *rest) for name, (here, *rest) in files.items()}
    grade(problem, table, tmp_path, device=device)


def test_a_lack_of_memory_for_one_file_is_none_for_the_next(tmp_path, monkeypatch):
    """The first file's gradients are not compared in float64; those of the second one are."""
    module_in_float64 = reference_step.module_in_float64
    calls = []

    def fail_once(wide_module):
        calls.append(wide_module)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return module_in_float64(wide_module)

    monkeypatch.setattr(reference_step, "module_in_float64", fail_once)
    plain = correct(module("return torch.relu(self.fc(x))", FC), STEP)
    problem = reference("return torch.relu(self.fc(x))", "[torch.rand(64, 256)]", FC)
    records = grade(problem, {"first": plain, "second": plain}, tmp_path)
    note = f"training step: {NO_ROOM_FOR_FLOAT64}"
    assert note in records["first"]["notes"]
    assert note not in records["second"]["notes"]
    assert len(calls) > 1
