"""How much memory the referee takes: free memory in control groups, and results that are held."""

from pathlib import Path

import pytest
import torch

from referee.checks import step_memory, values
from referee.contestants import free_memory
from referee.reference import in_parts, tf32
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.testing.graded import grade
from referee.testing.texts import IMPORTS, RELU, correct, module

CPU = torch.device("cpu")
# The names of the files with a limit and the use, and the key of what Linux may take back.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("mount", "line", "groups", "names", "left"),
    [
        ("", "0::/outer/inner", {"outer/inner": "max", "outer": "1000"}, V2, [400]),
        ("", "0::/outer", {"outer": "1000", "": "900"}, V2, [400, 300]),
        ("", "0::/", {"outer": "1000"}, V2, []),
        ("memory", "4:memory:/outer/inner", {"outer/inner": "800", "outer": "900"}, V1, [200, 300]),
        ("memory", "4:cpu,memory:/outer", {"outer": "500"}, V1, [0]),
        ("memory", "4:memory:/docker/of/the/host", {"": "1000"}, V1, [400]),
        ("memory", "4:cpu:/outer", {"outer": "1000"}, V1, []),
    ],
)
def test_limits_of_control_groups_count(tmp_path: Path, mount, line, groups, names, left):
    """700 of 1,000 bytes are used, 100 of them by files that make room."""
    root = tmp_path / "root"
    membership = tmp_path / "cgroup"
    for group, limit in groups.items():
        folder = root / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text("700\n")
        (folder / "memory.stat").write_text(f"anon 500\n{names[2]} 100\n")
    membership.write_text(f"1:name=systemd:/\n{line}\n")
    assert free_memory._cgroup_free(root, membership) == left
    assert free_memory._cgroup_free(root, tmp_path / "absent") == []


def test_free_memory_is_within_the_control_group(monkeypatch):
    monkeypatch.setattr(free_memory, "_cgroup_free", lambda: [5000, 400])
    assert free_memory.free_bytes(CPU) == 400


MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("output_bytes", "input_bytes", "free", "held"),
    [
        (MIB, MIB, 64 * GIB, 4),
        (GIB // 4, MIB, 64 * GIB, 4),
        (GIB // 4 + 1, MIB, 64 * GIB, 3),
        (GIB, MIB, 64 * GIB, 1),
        (GIB + 1, MIB, 64 * GIB, 0),
        (MIB, GIB // 2, 64 * GIB, 2),  # the inputs of two calls take 1 GiB
        (MIB, 5 * GIB, 64 * GIB, 1),
        (MIB, MIB, 24 * MIB, 3),  # three results take an eighth of the free memory
    ],
)
def test_results_that_are_held_during_later_calls_take_limited_memory(
    output_bytes, input_bytes, free, held, monkeypatch
):
    """Up to four results are held, which the call after them must not overwrite."""
    monkeypatch.setattr(values, "free_bytes", lambda _: free)
    assert values.count_of_held(CPU, output_bytes, max(output_bytes, input_bytes)) == held


def test_a_note_says_that_later_steps_had_no_memory(tmp_path, monkeypatch):
    def raise_out_of_memory(_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step_memory, "_run_step", raise_out_of_memory)
    table = {"plain": correct(module("return torch.relu(x)"), "no memory .* later training steps")}
    grade(RELU, table, tmp_path, trials=1)


@pytest.mark.parametrize("form", ["contiguous", "transposed", "every second column"])
def test_operands_are_rounded_to_tf32_in_parts(form, monkeypatch):
    """A float64 number keeps 11 bits; the operand itself does not change."""
    monkeypatch.setattr(in_parts, "PART", 7)
    fractions = torch.randn(12, 10, dtype=torch.float64)
    fractions[3, 4:8:2] = torch.tensor([torch.nan, torch.inf])
    operand = {"contiguous": fractions, "transposed": fractions.T}.get(form, fractions[:, ::2])
    before = operand.clone()
    rounded = tf32._round_to_tf32([operand, 3])
    fraction, exponent = torch.frexp(before)
    expected = torch.ldexp((fraction * 2048).round() / 2048, exponent)
    torch.testing.assert_close(rounded[0], expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(operand, before, rtol=0, atol=0, equal_nan=True)
    assert rounded[1] == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rounding_to_tf32_takes_little_more_memory_than_its_result():
    """The temporaries of five operators are those of one part."""
    operand = torch.randn(1 << 25, dtype=torch.float64, device="cuda")
    result_bytes = operand.nbytes
    part_bytes = in_parts.PART * operand.itemsize
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rounded = tf32._round_to_tf32(operand)
    assert rounded.shape == operand.shape
    assert torch.cuda.max_memory_allocated() - before <= result_bytes + 5 * part_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_convolution_and_its_budget_take_at_most_five_times_its_tensors(tmp_path):
    """Its results are also computed in float64, with operands in TF32 and without."""
    convolution = f"""{IMPORTS}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(64, 128, 1)

    def forward(self, x):
        return self.convolution(x)


def get_inputs():
    return [torch.rand(16, 64, 256, 256)]


def get_init_inputs():
    return []
"""
    path = tmp_path / "reference.py"
    path.write_text(convolution)
    problem = Problem("convolution", load(path), torch.device("cuda"))
    assert problem.operators_in_tf32() == ("convolution",)
    module = problem.construct(0)
    inputs = problem.draw()
    others = torch.cuda.memory_allocated() - problem.all_bytes
    torch.cuda.reset_peak_memory_stats()
    problem.reference_tensors(module, inputs)
    assert torch.cuda.max_memory_allocated() - others <= 5 * problem.all_bytes
