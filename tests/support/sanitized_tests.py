"""The tests that run under compute-sanitizer on a GPU: the table SANITIZED, and their markers.

A row selects cases of a test by their ids, which pytest makes of a case's parameters. For example,

    Cases("test_short_sums", ["sm90", "skinny"], ["highest"])

selects `test_short_sums[sm90-highest-(1, 3, 7)]`, whose id has one text of each list.

Under a sanitizer a kernel takes 10 to 100 times as long. So the table has only the cases that are
needed to reach every kernel and the ends of its loops. Large tensors are left out, as are most
repetitions at other precisions and sizes. For each width of a dtype, one dtype is tested.
"""

import pytest

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]


class Cases:
    """A row of the table.

    Args:
        test: the test's name.
        *choices: lists of texts; the id of a selected case has one text of each list.
        without: tools that do not run these cases, to save time.
    """

    def __init__(self, test, *choices, without=()):
        self.test = test
        self.choices = choices
        self.without = without

    def has(self, case_id):
        """Return whether the row selects the case of this id."""
        return all(any(is_part(text, case_id) for text in texts) for texts in self.choices)


def is_part(text, case_id):
    """Return whether a text is a part of an id, or several: its parts are joined by "-"."""
    return f"-{text}-" in f"-{case_id}-"


WIDTHS = ["torch.float32", "torch.float64", "torch.float16"]  # one dtype of each width
# test_linear_forward.py: the path that is chosen, in these dtypes, and torch's path.
PATHS = [*(f"cuda-auto-{dtype}" for dtype in WIDTHS), "cuda-torch-torch.float32"]
# test_linear_float32.py: sm90 at both of its precisions, and the other paths at `highest`.
SM90 = ["sm90-highest", "sm90-high"]
SKINNY = ["skinny-highest"]
SM80 = ["sm80-highest"]

# By subset and file of `tests/`. sanitize.py runs each subset as a process of its own.
SANITIZED = {
    "relu": {
        "relu/test_relu_forward.py": [
            Cases("test_results_match_torch_for_any_size", WIDTHS),
            Cases("test_results_match_torch_for_any_layout_and_x_does_not_change", WIDTHS),
            Cases("test_special_values_are_right", WIDTHS),
        ],
        "relu/test_relu_backward.py": [
            Cases("test_gradients_match_torch_for_any_size", WIDTHS),
            Cases("test_gradients_match_torch_for_any_layout", WIDTHS),
            Cases("test_gradients_of_special_values_match_torch", WIDTHS),
        ],
    },
    "linear": {  # torch's products and the passes beside them
        "linear/test_linear_forward.py": [
            Cases("test_results_are_right_for_any_sizes", PATHS),
            Cases("test_results_are_right_for_any_dimensions", PATHS),
            Cases(
                "test_results_are_right_for_an_x_of_any_strides", PATHS, ["(12, 16)"], ["columns"]
            ),
            Cases(
                "test_results_are_right_for_a_weight_of_any_strides",
                PATHS,
                ["(12, 16)"],
                ["columns"],
            ),
            Cases("test_results_are_right_for_a_bias_with_gaps", PATHS),
        ],
        "linear/test_linear_backward.py": [
            Cases("test_gradients_are_right_for_any_shape", WIDTHS),
            Cases("test_gradients_are_right_for_an_x_of_any_strides", WIDTHS, ["columns"]),
            Cases("test_gradients_are_right_for_a_weight_of_any_strides", WIDTHS, ["columns"]),
        ],
    },
    "sm90": {
        "linear/test_linear_float32.py": [
            Cases(
                "test_the_forward_keeps_its_promise",
                ["sm90-highest-(200, 4099, 2053)"],
                without=["initcheck"],
            ),
            Cases(
                "test_tiles_cover_all_rows_of_x_once",
                SM90,
                ["(353, 262, 512)", "(353, 262, 1024)", "(353, 262, 4096)"],
            ),
            Cases(  # several tiles for each cluster
                "test_tiles_cover_all_rows_of_x_once",
                SM90,
                ["(1000, 4000, 2048)"],
                without=["initcheck"],
            ),
            Cases("test_short_sums_err_no_more_than_torch_or_by_a_few_roundings", SM90),
            Cases("test_the_layout_changes_no_bit", ["sm90"]),
            Cases("test_special_values_come_out_where_torch_has_them", SM90, ["(65, 1001, 1030)"]),
        ],
        "linear/test_linear_layouts.py": [
            # Every layout, and for several tiles of each cluster an x stored by rows.
            Cases("test_sums_of_integers_are_exact", ["torch.float16"], ["2.0-(300, 264, 1000)"]),
            Cases(
                "test_sums_of_integers_are_exact",
                ["torch.float16-x-weight", "torch.float16-x-weight^T"],
                ["2.0-(2048, 4096, 320)"],
            ),
            Cases("test_gradients_of_integers_are_exact", ["torch.float16"], ["(300, 264, 1000)"]),
            Cases(
                "test_gradients_of_integers_are_exact",
                ["torch.float16-x-weight", "torch.float16-x-weight^T"],
                ["(2048, 4096, 320)"],
            ),
        ],
        "linear/test_linear_one_product.py": [
            Cases("test_any_tiles_of_x_are_computed_again", ["1500-[1]"], without=["initcheck"]),
            Cases("test_the_layout_changes_no_bit_of_the_result"),
        ],
    },
    "other paths": {
        "linear/test_linear_float32.py": [
            Cases(
                "test_tiles_cover_all_rows_of_x_once",
                SKINNY,
                ["(353, 262, 512)", "(353, 262, 1024)", "(353, 262, 4096)"],
            ),
            Cases(
                "test_tiles_cover_all_rows_of_x_once",
                SM80,
                ["(353, 262, 512)", "(353, 262, 1024)"],
            ),
            Cases(
                "test_tiles_cover_all_rows_of_x_once",
                SM80,
                ["(353, 262, 4096)"],
                without=["racecheck"],
            ),
            Cases("test_short_sums_err_no_more_than_torch_or_by_a_few_roundings", SKINNY + SM80),
            Cases("test_the_layout_changes_no_bit", ["skinny", "sm80-(70, 129, 301)"]),
            Cases(
                "test_the_layout_changes_no_bit", ["sm80-(65, 130, 1028)"], without=["racecheck"]
            ),
            Cases(
                "test_special_values_come_out_where_torch_has_them",
                SKINNY + SM80,
                ["(65, 1001, 1030)"],
            ),
        ],
    },
}


def is_left_out(tool, subset, case_id):
    """Return whether a tool runs no tests of a subset in the dtype of this case.

    racecheck (2025.3) ends in an internal error when it skips cuBLAS's kernels for half types;
    checking them takes minutes. Our own kernels for half types are in the subset "sm90".

    initcheck does not see the stores of TMA, by which our kernels write results of half types. It
    runs no tests of half types in any subset, and to save time none of float64.
    """
    is_half = is_part("torch.float16", case_id)
    if tool == "racecheck":
        return subset == "linear" and is_half
    return tool == "initcheck" and (is_half or is_part("torch.float64", case_id))


def mark_sanitized(items, folder):
    """Add a marker `sanitized(subset=..., tool=...)` to each test for each tool that runs it.

    Args:
        items: the tests that pytest has collected.
        folder: the path of `tests/`.

    Returns:
        The rows of the collected files that select none of these tests, each in words.
    """
    cases_of_test = {}  # by file and name of a test
    for item in items:
        file = item.path.relative_to(folder).as_posix() if folder in item.path.parents else ""
        cases_of_test.setdefault((file, item.originalname), []).append(item)
    collected_files = {file for file, _ in cases_of_test}
    unused = []
    for subset, files in SANITIZED.items():
        for file, rows in files.items():
            for row in rows:
                cases = cases_of_test.get((file, row.test), [])
                selected = [item for item in cases if row.has(item.callspec.id)]
                for item in selected:
                    add_markers(item, subset, row.without)
                if file in collected_files and not selected:
                    unused.append(f"{subset}: {file}::{row.test} {row.choices}")
    return unused


def add_markers(item, subset, without):
    """Add a marker `sanitized` to a test for each tool that runs it."""
    for tool in TOOLS:
        if tool not in without and not is_left_out(tool, subset, item.callspec.id):
            item.add_marker(pytest.mark.sanitized(subset=subset, tool=tool))
