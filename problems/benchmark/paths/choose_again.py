"""`choose-again`: writes the paths that choose_path takes into the results of `path-grid`.

These results hold the times of all paths, so nothing is measured. After a change of
kernels/linear/operator/choose_path.h, the table made from them shows how good the new choices are.
"""

import json
from dataclasses import replace
from pathlib import Path

from problems.benchmark.paths.choice import Gpu, chosen_paths
from problems.benchmark.paths.grid_rows import as_row, read_row
from referee.records import as_json
from referee.report import files

# The GPUs whose results may be in the file, by the name that torch gives them.
GPUS = {"NVIDIA H200": Gpu(capability=90, multiprocessors=132)}


def choose_again(path: Path) -> None:
    """Replace `chosen` of each product in a file of results of `path-grid`.

    Raises:
        ValueError: the file's GPU is none of `GPUS`.
    """
    results = json.loads(path.read_text())
    device = results["environment"]["device"]
    if device not in GPUS:
        raise ValueError(f"GPUS of {__name__} has no {device}")
    results["rows"] = [_with_new_choices(row, GPUS[device]) for row in results["rows"]]
    files.write(path, as_json(results))


def _with_new_choices(row: dict, gpu: Gpu) -> dict:
    """Return a row of the results with the paths that choose_path takes on this GPU."""
    all_timed = read_row(row)
    chosen = chosen_paths([timed.product for timed in all_timed], gpu)
    return as_row(
        [replace(timed, chosen=path) for timed, path in zip(all_timed, chosen, strict=True)]
    )
