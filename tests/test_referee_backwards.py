"""Files with backwards of their own, graded by `run.py`.

Each table of files is graded against one reference. In the texts, `x` is the first input of a
forward and `inputs` are all of them.
"""

import pytest

from referee.tests.texts import Table, module, reference
from tests.support.grading import ONLY, grade, linear

pytestmark = [ONLY, pytest.mark.usefixtures("one_server")]
FC = "self.fc = nn.Linear(256, 192)\n"
STEP = "training step"
# By name: the problem, a text, and a table of files. A row of the table is the expression that
# replaces HERE in the text, the verdict, and a pattern of the line.
BACKWARDS: dict[str, tuple[str, str, Table]] = {}

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
BACKWARDS["relu"] = (
    "relu",
    OWN_RELU + module("return Own.apply(x)"),
    {
        "right": ("g * (y > 0)", "correct", STEP),
        "off_by_an_ulp": ("g * (y > 0) * (1 + 2**-23)", "wrong", "gradient of x: "),
        "raises": ("g.no_such", "correct", "forward only: its backward raises AttributeError"),
        "kept": ("kept(g, y)", "wrong", "gradient of x"),
        "changes_g": ("(g * (y > 0), g.mul_(2))[0]", "wrong", "changes the gradient of its output"),
    },
)

# HERE is the gradient of bias, from that of z = x weight^T + bias, `g`.
OWN_LINEAR = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, divisor):
        y = torch.relu(torch.addmm(bias, x, weight.t())) / divisor
        ctx.save_for_backward(x, weight, y)
        ctx.divisor = divisor
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight, y = ctx.saved_tensors
        g = g * (y != 0) / ctx.divisor
        return g @ weight, g.t() @ x, HERE, None
"""
USE_OF_OWN_LINEAR = """
if x.dim() != 2:
    return torch.relu(self.linear(x)) / self.divisor
return Own.apply(x, self.linear.weight, self.linear.bias, self.divisor)
"""
BACKWARDS["linear"] = (
    "linear_relu_divide",
    OWN_LINEAR + linear(USE_OF_OWN_LINEAR),
    {
        "right": ("g.sum(0)", "correct", STEP),
        "half": ("g.sum(0) * 0.5", "wrong", "gradient of linear.bias: "),
        "none": ("None", "correct", "forward only: no gradient of linear.bias"),
        "small": (
            "g.sum(0) if len(weight) < 80 else g.no_such",
            "correct",
            "forward only: its backward raises AttributeError",
        ),
    },
)

# Three inputs, of which the last has no gradient. HERE is a factor, and lines that follow it.
THREE_INPUTS = "[torch.rand(64, 256), torch.rand(64, 1), torch.randint(9, (64,))]"
USE_IN_A_FILE = """
y = Own.apply(x, self.fc.weight, self.fc.bias, 1.0) * HERE
return y * inputs[1], inputs[2] + 1
"""
BACKWARDS["file"] = (
    reference("return torch.relu(self.fc(x)) * inputs[1], inputs[2] + 1", THREE_INPUTS, FC),
    OWN_LINEAR.replace("HERE", "g.sum(0)") + module(USE_IN_A_FILE, FC),
    {
        "right": ("1", "correct", STEP),
        "detached": ("1; y = y.detach()", "correct", "forward only: no gradient of input 0, "),
        "none": (
            "1; inputs = [x, inputs[1].detach(), inputs[2]]; y = y.detach()",
            "correct",
            "forward only(?!: )",
        ),
        "twice": ("1; y = 2 * y - y.detach()", "wrong", "gradient of input 0: "),
    },
)

# A frozen parameter, gradients that are rounding errors alone, and an output without elements.
NOISE = "return torch.relu(self.norm(self.conv(x))), x[:0]"
NORM = """
self.conv, self.norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
self.norm.bias.requires_grad_(False)
"""
BACKWARDS["norm"] = (
    reference(NOISE, "[torch.randn(4, 8, 32, 32)]", NORM),
    module(NOISE, NORM),
    {"same": ("", "correct", STEP)},
)

# Autograd records the first output in the reference alone, and a use of input 1 in the file alone.
# The third output is a parameter of the module.
SIDES = "return x[:0] * 2, x * (inputs[1] > 0) * self.w, self.w"
ONE_SIDE = "return x.new_empty(0, 32), x * (inputs[1] > 0) * self.w + 0 * inputs[1], self.w"
WEIGHT = "self.w = nn.Parameter(torch.randn(32))"
BACKWARDS["sides"] = (
    reference(SIDES, "[torch.randn(64, 32), torch.randn(32)]", WEIGHT),
    module(ONE_SIDE, WEIGHT),
    {"more": ("", "correct", STEP)},
)

# The gradient of the last row is an eighth too large; the output is right.
ROW = "y = x * x.sigmoid()\nreturn y + (y - y.detach()) * (x.new_ones(64, 1).cumsum(0) > 63) / 8"
BACKWARDS["row"] = (
    reference("return x * x.sigmoid()", "[torch.randn(64, 1024)]"),
    module(ROW),
    {"an eighth more": ("", "wrong", "gradient of x: ")},
)


@pytest.mark.parametrize(("task", "text", "files"), BACKWARDS.values(), ids=BACKWARDS)
def test_files_with_backwards_get_their_verdicts(task, text, files, device, tmp_path, small):
    table = {name: (text.replace("HERE", here), *rest) for name, (here, *rest) in files.items()}
    records = grade(task, table, tmp_path, device=device)
    if task == "relu":
        kept = records["right"]["runs"][0]["step"]["kept_bytes"]
        assert kept.keys() == {"ModelNew", "torch.relu"}
