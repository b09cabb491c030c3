"""The table of operands: `python -m referee.benchmark operands`, at the small sizes of a CPU."""

import pytest
import torch

from model import LinearReluDivide
from model_new import LinearReluDivideNew
from referee import benchmark, operand_benchmark
from referee.draws import Draw
from referee.operand_benchmark import HIGH, HIGHEST, report, same_places
from referee.pairs import Modules, alternate, samplers_of
from referee.stats import speed_up
from referee.timing import Names

CPU = torch.device("cpu")
KINDS = {"LinearReluDivideNew": LinearReluDivideNew, "eager": LinearReluDivide}
INF, NAN = float("inf"), float("nan")
CHOSEN = ["uniform", "one-hot x", "inf in one row of x", "step, softmax - one-hot"]


def table(lines, kinds=KINDS):
    """The cells by column of every line, as strings; names may have spaces."""
    text, _ = report(lines, kinds, CPU, trials=1).split("\n\n")
    _, *rows = text.splitlines()
    return [row[len(max((line.name for line in lines), key=len)) :].split() for row in rows]


def lines(*names):
    return [next(line for line in HIGHEST if line.name == name) for name in names]


@pytest.mark.parametrize("line", [*HIGHEST, *HIGH], ids=lambda line: line.name)
def test_every_line_can_be_drawn(line):
    m, k, n = 70, 128, 66
    draw = Draw(0)
    x, weight, bias = line.operands(draw, m, k, n)
    assert (x.shape, weight.shape, bias.shape) == ((m, k), (n, k), (n,))
    if line.grad_output:
        assert line.grad_output(draw, m, n).shape == (m, n)
    else:
        assert "inf" in line.name or torch.isfinite(x).all()


def test_lines_of_a_cpu():
    found = table(lines(*CHOSEN))
    assert len(found) == len(CHOSEN)
    for name, cells in zip(CHOSEN, found, strict=True):
        assert cells[:3] == ["128"] * 3
        assert all(float(time) > 0 for time in cells[3:6])
        largest, mean, unit, eagers_unit = map(float, cells[6:10])
        assert {largest, mean} <= {0, 1}  # torch's own product on both sides
        assert unit == eagers_unit
        assert cells[10:] == (["same"] if "inf" in name else [])


class Wrong(LinearReluDivideNew):
    def forward(self, x):
        out = super().forward(x)
        return out + torch.where(out.isfinite(), 1e-3, NAN)


def test_errors_and_misplaced_infinities_are_seen():
    uniform, infinite = table(
        lines("uniform", "inf in one row of x"), {"wrong": Wrong, "eager": LinearReluDivide}
    )
    largest, mean, unit, eagers_unit = map(float, uniform[6:10])
    assert min(largest, mean) > 100
    assert unit > 100 * eagers_unit
    assert infinite[-1] == "DIFFER"


def test_same_places():
    values = torch.tensor([1.0, INF, -INF, NAN])
    assert same_places(values[:1], values[:1] + 1) == ""
    for i in range(4):
        for j, value in enumerate([2.0, INF, -INF, NAN]):
            other = values.clone()
            other[i] = value
            expected = "same" if i == j else "DIFFER"
            assert same_places(other, values) == same_places(values, other) == expected


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_command(precision, monkeypatch, capsys):
    line = HIGHEST[0]
    monkeypatch.setattr(operand_benchmark, "HIGHEST", [line])
    monkeypatch.setattr(operand_benchmark, "HIGH", [line, line])
    before = torch.get_float32_matmul_precision()
    try:
        command = ["operands", "--device", "cpu", "--precision", precision, "--trials", "1"]
        benchmark.main(command)
        with pytest.raises(SystemExit):
            benchmark.main([*command, "--dtype", "float16"])
    finally:
        torch.set_float32_matmul_precision(before)
    out = capsys.readouterr().out
    assert out.count("\nuniform ") == (1 if precision == "highest" else 2)


@pytest.mark.gpu
def test_identical_code_takes_the_same_time_after_memory_was_freed():
    x = torch.rand(2**29, device="cuda")
    for _ in range(2):  # the freed memory slows what comes next
        freed = torch.empty(2**33, dtype=torch.uint8, device="cuda").fill_(1)
        del freed
        torch.cuda.empty_cache()
        torch.relu(x)
        modules = Modules(Names("candidate", "reference"), torch.relu, torch.relu)
        candidate, reference = alternate(samplers_of(modules, x), longest=1.0).values()
        assert speed_up(reference, candidate)[0] == pytest.approx(1, abs=0.005)
