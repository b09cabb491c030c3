"""The backward of files that `run.py` grades: right, wrong or none, for both kinds of problems.

KERNELS_GRADING=1 runs these, for a minute.
"""

import os
import re

import pytest
from test_reference_files import grade_by
from test_solutions import DEVICES, IMPORTS, grade, small_problems

pytestmark = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes a minute: KERNELS_GRADING=1 runs it"
)
RELU = """
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


class ModelNew(nn.Module):
    def forward(self, x):
        return Own.apply(x)


KEPT = {}


def kept(g, y):
    if g.numel() < 1 << 18 or g.shape not in KEPT:
        KEPT[g.shape] = g * (y > 0)
    return KEPT[g.shape].clone()
"""
LINEAR = """
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


class ModelNew(nn.Module):
    def __init__(self, i, o, divisor):
        super().__init__()
        self.linear = nn.Linear(i, o)
        self.divisor = divisor

    def forward(self, x):
        if x.dim() != 2:
            return torch.relu(self.linear(x)) / self.divisor
        return Own.apply(x, self.linear.weight, self.linear.bias, self.divisor)
"""
OF_THEM = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(256, 192)

    def forward(self, x, scale, whole):
        y = torch.relu(self.fc(x))
        return y * scale, whole + 1


def get_inputs():
    return [torch.rand(64, 256), torch.rand(64, 1), torch.randint(9, (64,))]


def get_init_inputs():
    return []
"""
MINE = OF_THEM.split("def get_inputs")[0].replace("Model", "ModelNew")
MINE = MINE.replace(
    "torch.relu(self.fc(x))", "Own.apply(x, self.fc.weight, self.fc.bias, 1.0) * HERE"
)
# A frozen parameter, gradients that are rounding errors alone, and an output without elements.
NOISE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))), x[:0]


def get_inputs():
    return [torch.randn(4, 8, 32, 32)]


def get_init_inputs():
    return []
"""
# By name: what stands HERE, the verdict, and what its line says.
OF_RELU = {
    "right": ("g * (y > 0)", "correct", "training step "),
    "off_by_an_ulp": ("g * (y > 0) * (1 + 2**-23)", "wrong", "gradient of x: "),
    "raises": ("g.no_such_name", "correct", "forward only: its backward raises AttributeError"),
    "kept": ("kept(g, y)", "cheating", "a timed step's gradient of x was wrong"),
}
OF_LINEAR = {
    "right": ("g.sum(0)", "correct", "training step "),
    "half": ("g.sum(0) * 0.5", "wrong", "gradient of linear.bias: "),
    "none": ("None", "correct", "forward only: no gradient of linear.bias"),
}
OF_FILE = {
    "right": ("1", "correct", "training step "),
    "detached": ("1; y = y.detach()", "correct", "forward only: no gradient of input 0, "),
    "none": ("1; scale = scale.detach(); y = y.detach()", "correct", "forward only)"),
    "twice": ("1; y = 2 * y - y.detach()", "wrong", "gradient of input 0: "),
}


def write(text: str, files: dict, folder) -> list:
    paths = [folder / f"{name}.py" for name in files]
    for path in paths:
        path.write_text(IMPORTS + text.replace("HERE", files[path.stem][0]))
    return paths


def check(verdicts: dict, files: dict, output: str) -> None:
    for name, (_, verdict, text) in files.items():
        [line] = re.findall(rf"^\S*{name}\.py: (?:correct|wrong|cheating|error).*$", output, re.M)
        assert verdicts[name]["verdict"] == verdict, line
        assert text in line


@pytest.mark.parametrize("device", DEVICES)
def test_relu(device, tmp_path, capsys, monkeypatch):
    small_problems(monkeypatch, device)
    _, verdicts = grade("relu", write(RELU, OF_RELU, tmp_path), tmp_path, device=device)
    check(verdicts, OF_RELU, capsys.readouterr().out)
    step = verdicts["right"]["runs"][0]["step"]
    assert step["kept_bytes"].keys() == {"ModelNew", "torch.relu"}


@pytest.mark.parametrize("device", DEVICES)
def test_linear(device, tmp_path, capsys, monkeypatch):
    small_problems(monkeypatch, device)
    files = write(LINEAR, OF_LINEAR, tmp_path)
    _, verdicts = grade("linear_relu_divide", files, tmp_path, device=device)
    check(verdicts, OF_LINEAR, capsys.readouterr().out)


@pytest.mark.parametrize("device", DEVICES)
def test_reference_file(device, tmp_path, capsys):
    own = LINEAR.split("class ModelNew")[0].replace("HERE", "g.sum(0)")
    files = write(own + MINE, OF_FILE, tmp_path)
    _, verdicts = grade_by(OF_THEM, files, tmp_path, device=device)
    check(verdicts, OF_FILE, capsys.readouterr().out)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_nothing(device, tmp_path, capsys):
    file = tmp_path / "same.py"
    file.write_text(IMPORTS + NOISE.split("def get_inputs")[0].replace("Model(", "ModelNew("))
    _, verdicts = grade_by(NOISE, [file], tmp_path, device=device)
    check(verdicts, {"same": ("", "correct", "training step ")}, capsys.readouterr().out)
