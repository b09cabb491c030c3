"""The problems by name, and the sizes at which they are measured."""

from pathlib import Path

import torch

from model import Problem as Entry
from problems.linear_relu_divide import LinearReluDivideProblem
from problems.relu import ReluProblem
from referee import cases
from referee.memory import choose_rows
from referee.problem import Problem
from referee.reference_file import ReferenceFile

MODEL = Path(__file__).resolve().parent.parent / "model.py"
# Problems with cases of their own; others are graded as a reference file is.
KINDS: dict[str, type[Problem]] = {
    "relu": ReluProblem,
    "linear_relu_divide": LinearReluDivideProblem,
}
# Rows of x on a CPU. Of ReLU: beyond the size from which kernels write past the caches. Of Linear:
# a float64 product with all of the weight takes a CPU a second.
CPU_ROWS = 64


def make(
    name: str, entry: Entry, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Problem:
    """Return a problem of this project's at a size, with one input of both signs.

    Args:
        name: of the problem.
        entry: of `model.PROBLEMS`.
        shape: of x.
        dtype: of x, and of parameters if it is a floating one.
        device: where solutions compute.
    """

    def get_inputs() -> list[torch.Tensor]:
        return [cases.refill(torch.zeros(tuple(shape), dtype=dtype))]

    reference = entry.reference
    file = ReferenceFile(
        MODEL,
        reference,
        get_inputs,
        entry.get_init_inputs,
        text=MODEL.read_bytes(),
        solutions=(f"{reference.__name__}New", "ModelNew"),
        dtype=dtype,
        any_values=True,
    )
    return KINDS.get(name, Problem)(name, file, device)


def choose_shape(
    name: str, entry: Entry, wanted: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], str]:
    """Return the shape of x, and a sentence that says why it is not the headline's, or "".

    Raises:
        ValueError: it does not fit, or the problem does not take the dtype.
    """
    row, row_bytes, fixed_bytes = needs(name, entry, dtype, device)
    usual = entry.rows if device.type == "cuda" else min(entry.rows, CPU_ROWS)
    count, note = choose_rows(wanted, usual, row_bytes, device, fixed_bytes)
    if not (note or wanted or usual == entry.rows):
        note = f"{usual:,} of {entry.rows:,} rows, for a CPU would need minutes for all"
    return (count, *row), note


def needs(
    name: str, entry: Entry, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], int, int]:
    """Return the shape of a row of x, the bytes that each row needs, and those needed in any case.

    Raises:
        ValueError: the problem does not take the dtype.
    """
    kind = KINDS.get(name)
    if kind is not None:
        kind.check_dtype(dtype, device)
    if kind is LinearReluDivideProblem:
        return kind.needs(entry.get_init_inputs(), dtype)
    with torch.device("meta"):
        [x] = entry.get_inputs_at(1)
    return tuple(x.shape[1:]), x.numel() * dtype.itemsize, 0


def settings(name: str, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Return the settings of the precision of float32 products; "" where there is none."""
    kind = KINDS.get(name)
    return kind.settings_for(dtype, device) if kind else ("",)


def sweep(name: str, entry: Entry, device: torch.device) -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes of x of a sweep, each with the elements of a call's largest tensor."""
    return KINDS[name].sweep(entry.get_init_inputs(), device)
