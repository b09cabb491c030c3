"""Which tests run under compute-sanitizer on a GPU: those with the marker `sanitize`.

    @pytest.mark.sanitize("sm90", path=["sm90"], shape=[(64, 17, 65), (65, 129, 300)])

The first argument is the subset, one of those in sanitize.py. Each other argument names a parameter
of the test and lists its values; a parameter that is not named may have any value. `without` lists
tools that do not run these cases, to save time. A test may have several markers.

Under a sanitizer a kernel takes 10 to 100 times as long. So the markers select only the cases that
are needed to reach every kernel and the ends of its loops. Large tensors are left out, as are most
repetitions at other precisions and sizes. For each width of a dtype, one dtype is tested.
"""

import pytest
import torch

from tests.support.sanitize import SUBSETS, TOOLS

ONE_OF_A_WIDTH = [torch.float32, torch.float64, torch.float16]


def is_left_out(tool, subset, dtype):
    """Return whether a tool runs no tests of a subset in this dtype; it may be None.

    racecheck (2025.3) ends in an internal error when it skips cuBLAS's kernels for half types;
    checking them takes minutes. Our own kernels for half types are in the subset "sm90".

    initcheck does not see the stores of TMA, by which our kernels write results of half types. It
    runs no tests of half types in any subset, and to save time none of float64.
    """
    if tool == "racecheck":
        return subset == "linear" and dtype == torch.float16
    return tool == "initcheck" and dtype in (torch.float16, torch.float64)


def selected_by(marker, parameters):
    """Return whether a marker `sanitize` selects the case of a test with these parameters."""
    values = {name: value for name, value in marker.kwargs.items() if name != "without"}
    return all(parameters[name] in value for name, value in values.items())


def mark_sanitized(items):
    """Add a marker `sanitized(subset=..., tool=...)` to each test for each tool that runs it.

    Args:
        items: the tests that pytest has collected.

    Returns:
        The markers that select none of the collected cases, each in words.

    Raises:
        pytest.UsageError: if a marker names a subset that does not exist, or a parameter that its
            test does not have.
    """
    markers = set()
    used = set()
    for item in items:
        for position, marker in enumerate(item.iter_markers("sanitize")):
            parameters = item.callspec.params
            unknown = marker.kwargs.keys() - {"without"} - parameters.keys()
            unknown |= set(marker.args) - SUBSETS.keys()
            if unknown:
                raise pytest.UsageError(f"unknown in `sanitize` of {item.nodeid}: {unknown}")
            key = (item.path, item.originalname, position, str(marker.kwargs))
            markers.add(key)
            if selected_by(marker, parameters):
                used.add(key)
                add_markers_of_tools(item, marker)
    return [f"{path}::{test}: sanitize({values})" for path, test, _, values in markers - used]


def dtype_of(parameters):
    """Return the dtype of a test's case; None if it has none.

    It is the parameter `dtype`, or an element of the parameter `case` (test_linear_forward.py).
    """
    values = [parameters.get("dtype"), *parameters.get("case", ())]
    return next((value for value in values if isinstance(value, torch.dtype)), None)


def add_markers_of_tools(item, marker):
    """Add a marker `sanitized` to a test, which `marker` selects, for each tool that runs it."""
    [subset] = marker.args
    dtype = dtype_of(item.callspec.params)
    for tool in TOOLS:
        is_without = tool in marker.kwargs.get("without", ())
        if not is_without and not is_left_out(tool, subset, dtype):
            item.add_marker(pytest.mark.sanitized(subset=subset, tool=tool))
