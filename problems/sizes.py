"""This project's problems by name, and the sizes at which they are measured."""

from pathlib import Path

import torch

from model import PROBLEMS
from problems.linear_relu_divide import LinearReluDivideProblem
from problems.relu import ReluProblem
from problems.shapes import RowNeeds, SweepShape
from referee.contestants.free_memory import BUFFERS, MAX_SHARE_OF_FREE, free_bytes
from referee.reference.file import ReferenceFile
from referee.reference.problem import Problem
from referee.reference.random_values import draw_into

MODEL_FILE = Path(__file__).resolve().parent.parent / "model.py"
# The problems that have cases and limits of their own. The others of `model.PROBLEMS` are graded as
# any reference file is.
PROBLEM_CLASSES: dict[str, type[Problem]] = {
    "relu": ReluProblem,
    "linear_relu_divide": LinearReluDivideProblem,
}
# The most rows of x on a CPU. ReLU's output is then large enough for kernels to bypass the caches,
# and a float64 product of Linear takes only a second.
CPU_ROWS = 64
# The part of the free memory that is used unless the user asks for more. A CPU's memory is shared
# with other programs; a GPU is usually free for one.
DEFAULT_SHARE = {"cpu": 0.25, "cuda": 0.9}
SHARE_IN_WORDS = {"cpu": "a quarter", "cuda": "90%"}


def make_problem(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Problem:
    """Return the referee's object for a problem, at one size.

    Inputs are uniform in [-1, 1) because ReLU does not change inputs in [0, 1).

    Args:
        name: the problem's name.
        shape: of x.
        dtype: of x, and of the parameters if it is a floating dtype.
        device: where solutions compute.
    """
    model_problem = PROBLEMS[name]

    def get_inputs() -> list[torch.Tensor]:
        return [draw_into(torch.zeros(tuple(shape), dtype=dtype))]

    reference_file = ReferenceFile(
        MODEL_FILE,
        model_problem.reference,
        get_inputs,
        model_problem.get_init_inputs,
        text=MODEL_FILE.read_bytes(),
        solutions=(f"{model_problem.reference.__name__}New", "ModelNew"),
        dtype=dtype,
        has_own_cases=True,
    )
    problem_class = PROBLEM_CLASSES.get(name, Problem)
    return problem_class(name, reference_file, device)


def choose_shape(
    name: str, asked_rows: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], str]:
    """Return the shape of x, and a sentence that says why it is not the headline's, or "".

    Args:
        name: the problem's name.
        asked_rows: how many rows the user asks for; None for as many as fit.
        dtype: of x.
        device: where solutions compute.

    Raises:
        ValueError: the rows do not fit, or the problem does not take the dtype.
    """
    needs = _needs(name, dtype, device)
    headline_rows = PROBLEMS[name].rows
    usual_rows = headline_rows if device.type == "cuda" else min(headline_rows, CPU_ROWS)
    rows, note = choose_rows(asked_rows, usual_rows, needs, device)
    is_limited_for_cpu = asked_rows is None and usual_rows < headline_rows
    if is_limited_for_cpu and not note:
        note = f"{usual_rows:,} of {headline_rows:,} rows, because a CPU would need minutes for all"
    return (rows, *needs.row_shape), note


def choose_rows(
    asked_rows: int | None, usual_rows: int, needs: RowNeeds, device: torch.device
) -> tuple[int, str]:
    """Return how many rows are measured, and a note that says why if memory limits them.

    Args:
        asked_rows: the number that the user asks for; None for as many as fit in the default share
            of the free memory.
        usual_rows: how many are measured if the memory suffices.
        needs: the memory that a forward needs.
        device: where the rows are measured.

    Raises:
        ValueError: `asked_rows` rows, or a single one, need more memory than there is.
    """
    free = free_bytes(device)
    bytes_for_a_row = BUFFERS[device.type] * needs.row_bytes
    share = MAX_SHARE_OF_FREE if asked_rows else DEFAULT_SHARE[device.type]
    rows_that_fit = (int(free * share) - needs.fixed_bytes) // bytes_for_a_row
    count = asked_rows if asked_rows else max(1, min(usual_rows, rows_that_fit))
    if count > rows_that_fit:
        needed = (count * bytes_for_a_row + needs.fixed_bytes) / 2**30
        raise ValueError(
            f"{count:,} rows need {needed:,.1f} GiB of memory on {device}, and "
            f"{free * share / 2**30:,.1f} GiB can be used"
        )
    if asked_rows or count == usual_rows:
        return count, ""
    part = SHARE_IN_WORDS[device.type]
    why = f"all processes together take up to {part} of the {free / 2**30:,.1f} GiB free"
    return count, f"{count:,} of {usual_rows:,} rows: {why}"


def _needs(name: str, dtype: torch.dtype, device: torch.device) -> RowNeeds:
    """Return a row's shape, and the memory that a forward needs.

    Raises:
        ValueError: the problem does not take the dtype.
    """
    problem_class = PROBLEM_CLASSES.get(name)
    if problem_class is not None:
        problem_class.check_dtype(dtype, device)
    if problem_class is LinearReluDivideProblem:  # its weight needs memory, too
        return problem_class.row_needs(PROBLEMS[name].get_init_inputs(), dtype)
    with torch.device("meta"):
        [x] = PROBLEMS[name].get_inputs_at(1)
    return RowNeeds(tuple(x.shape[1:]), x.numel() * dtype.itemsize, fixed_bytes=0)


def precision_settings(name: str, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Return the precision settings of float32 products; one empty setting if there is none."""
    problem_class = PROBLEM_CLASSES.get(name)
    return problem_class.settings_for(dtype, device) if problem_class else ("",)


def sweep_shapes(name: str, device: torch.device) -> list[SweepShape]:
    """Return the shapes of x in a sweep."""
    return PROBLEM_CLASSES[name].sweep(PROBLEMS[name].get_init_inputs(), device)
